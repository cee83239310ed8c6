"""`dualpipe hf import` and `export`: between Hugging Face's form and this library's checkpoints, in one process.

The whole model is in host memory, in float32. Larger ones come and go by `dualpipe train --init.from_hf` and
`--export.to_hf`, where each rank has its part.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dualpipe.checkpoint.directory import find, is_checkpoint, latest, none_whole, scan
from dualpipe.checkpoint.hf import hub_dtypes, load_hf
from dualpipe.checkpoint.hf_save import save_hf
from dualpipe.checkpoint.hub_files import CONFIG
from dualpipe.checkpoint.load import load
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.checkpoint.save import save
from dualpipe.checkpoint.state import training_state
from dualpipe.dtypes import dtype_of
from dualpipe.models import HubConfig, Stage, build_stages, config_from_dict, read_config
from dualpipe.parallel import DTypePlan, DTypePolicy, resolve_dtypes
from dualpipe.parallel.materialize import build_on_meta, materialize


def import_hf(source: str | PathLike[str], directory: str | PathLike[str]) -> Path:
    """Write a Hugging Face checkpoint as step 0 of a run; returns its path.

    Raises ValueError as `load_hf` does, and for the directory of a run that is further: it would start again from these
    weights, and delete its own in time.
    """
    found = scan(directory)
    if found.damaged or any(each.manifest.step for each in found.committed):
        raise ValueError(f"{directory} has checkpoints of a run; give a new directory")
    config = read_config(source)
    stages = _stages(config)
    load_hf(stages, source, None, _plan(stages, torch.float32))
    # Recorded for an export: what the source keeps in float32 among narrower tensors stays so.
    plan = _plan(stages, torch.bfloat16, hub_dtypes(source, config))
    return save(directory, training_state(stages), step=0, plan=plan, config={"model": config.to_dict()})


def export_checkpoint(
    source: str | PathLike[str], target: str | PathLike[str], dtype: torch.dtype, max_shard_bytes: int,
    hub: str | PathLike[str] | None = None,
) -> None:
    """Write a checkpoint of a run, or the newest in a directory of them, in Hugging Face's form.

    Tensors are in `dtype`, but for those that the run kept in float32 while it computed in less. `hub`: what the model
    was made from, the `source` of `save_hf`; it is not recorded, so that nothing outside of it is read. Raises
    ValueError for a checkpoint that does not say what model it is of, and for a target that exists.
    """
    found = find(source)
    if not found.committed:
        none_whole(source, found.damaged.values())
    model = _model_of(found.committed[0])
    stages = _stages(config_from_dict(model))
    for stage in stages:
        materialize(stage, "cpu", _plan(stages, torch.float32))
    loaded = load(source, training_state(stages), allow=("optimizer/*", "routers/*"))
    if _model_of(Checkpoint(loaded.path, loaded.manifest)) != model:
        raise ValueError(f"{loaded.path} is of another model than {found.committed[0].path}; give one of them")
    kept = {name: dtype_of(of["save"]) for name, of in loaded.manifest.dtypes.items()}
    save_hf(stages, target, None, _plan(stages, dtype, kept), source=hub, max_shard_bytes=max_shard_bytes)


def _model_of(checkpoint: Checkpoint) -> dict[str, Any]:
    path, manifest = checkpoint
    if not isinstance(manifest.config, dict) or "model" not in manifest.config:
        raise ValueError(f"{path} does not say what model it is of; it was not saved by `dualpipe train`")
    return manifest.config["model"]


def is_of_a_run(path: str | PathLike[str]) -> bool:
    """Whether it is a checkpoint of this library, or a directory of them."""
    path = Path(path)
    return path.is_dir() and not (path / CONFIG).exists() and (is_checkpoint(path) or latest(path) is not None)


def _stages(config: HubConfig) -> list[Stage]:
    return build_on_meta(lambda: build_stages(config, 1))


def _plan(stages: list[Stage], dtype: torch.dtype, kept: dict[str, torch.dtype] | None = None) -> DTypePlan:
    return resolve_dtypes(stages, DTypePolicy(dtype, torch.float32, dtype), kept, sharded=False)
