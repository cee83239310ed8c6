"""Save the stages of a pipeline as one checkpoint that transformers loads as any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dualpipe.hf.stage import CausalLMStage
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.ranks.rank_sync import RankSync

_INDEX = "model.safetensors.index.json"


def save_stages(
    stages: Sequence[CausalLMStage], folder: str | Path, *, mesh: DeviceMesh | None = None,
    max_shard_size: int | str = "5GB", plan: DTypePlan | None = None,
) -> None:
    """Write the model of all ranks to `folder`, with the tensors of the hub's files. Collective over the mesh.

    stages: those of this rank; mesh: as `load_stages` got it. The folder must be the same on all ranks, and without a
    model; what a stage holds is gathered in the memory of one rank. Until everything is written the model lies in
    folders beside the place that it takes at the end.

    plan: the dtypes that tensors are written in, its `save`; None: those that the stages store them in.

    Raises ValueError, on every rank, where the folder has a model already or two stages have a tensor of the same name,
    and RuntimeError where a rank cannot write.
    """
    folder = Path(folder)
    layout = Mesh.of(mesh)
    ranks = RankSync.of_mesh(mesh)
    part = folder / f".rank-{layout.rank('pp'):05}"
    ranks.first(lambda: _make(folder))
    tensors = [_gather_tensors(stage, plan, keep=layout.replica == 0) for stage in stages]

    def write() -> None:
        if layout.replica:
            return
        for number, (stage, state_dict) in enumerate(zip(stages, tensors)):
            stage.causal_lm.save_pretrained(part / f"{number:05}", state_dict=state_dict, max_shard_size=max_shard_size)

    ranks.agree(write)
    ranks.first(lambda: _join(folder, layout.size("pp")))


def _make(folder: Path) -> None:
    """Make a folder for a model; ValueError where there is one."""
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise ValueError(f"{str(folder)!r} has a model already; choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".rank-*"):  # of a save that failed
        shutil.rmtree(leftover)


def _gather_tensors(stage: CausalLMStage, plan: DTypePlan | None, *, keep: bool) -> dict[str, Tensor]:
    """Return the whole tensors of a stage on the CPU, by name; none without `keep`.

    Collective over the ranks that share them.
    """
    is_copy = stage.is_tied and stage.is_last and not stage.is_first  # the first stage has the head's weight
    tensors = {}
    for name, tensor in stage.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep and not (is_copy and name == "lm_head.weight"):
            dtype = whole.dtype if plan is None else plan.of(name).save
            tensors[name] = whole.detach().to(torch.device("cpu"), dtype)
    return tensors


def _join(folder: Path, num_ranks: int) -> None:
    """Make one checkpoint of those of the stages of all `num_ranks` pipeline ranks."""
    num_parts = len(list(folder.glob(".rank-*")))
    if num_parts != num_ranks:
        raise ValueError(f"{str(folder)!r} has parts of {num_parts} of {num_ranks} pipeline ranks; save to a folder "
                         "that all ranks share")
    parts = sorted(folder.glob(".rank-*/*/*.safetensors"))
    weight_map: dict[str, str] = {}
    total_size = 0
    for file, name in zip(parts, _file_names(len(parts))):
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
        repeated = [tensor for tensor in names if tensor in weight_map]
        if repeated:
            raise ValueError(f"several stages have the tensors {', '.join(repeated[:3])}; each must be in one stage: "
                             "save every stage of the model once")
        weight_map |= dict.fromkeys(names, name)
        total_size += file.stat().st_size
    for file, name in zip(parts, _file_names(len(parts))):
        file.rename(folder / name)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = min(folder.glob(".rank-*/*/config.json"))
    for extra in sorted(config.parent.glob("*.json")):
        if extra.name not in (_INDEX, "config.json"):
            extra.rename(folder / extra.name)
    config.rename(folder / "config.json")  # last: a folder with it is whole
    for part in folder.glob(".rank-*"):
        shutil.rmtree(part)


def _file_names(count: int) -> list[str]:
    """Return the names of the files of a checkpoint."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
