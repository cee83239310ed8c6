"""Save the stages of a pipeline as one checkpoint of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dualpipe.hf.build import progress_bars_on_rank_0
from dualpipe.hf.stage import CausalLMStage
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.ranks.rank_sync import RankSync

_INDEX = "model.safetensors.index.json"


def save_stages(
    stages: Sequence[CausalLMStage], folder: str | Path, *, mesh: DeviceMesh | None = None,
    max_shard_size: int | str = "5GB", plan: DTypePlan | None = None,
) -> None:
    """Write the model of all ranks to `folder`, with the tensor names of the hub's files. Collective over the mesh.

    Gathers every stage in the memory of one rank. Each pipeline rank writes to a hidden folder `.rank-*` inside
    `folder`; when all are complete, their files are moved to `folder`.

    Args:
        stages: stages of this rank.
        folder: the same on all ranks, without a model.
        mesh: the mesh that `load_stages` received.
        max_shard_size: largest size of a file.
        plan: its `save` dtypes are the dtypes of the written tensors; None: the dtypes of the stages' tensors.

    Raises:
        ValueError: on every rank, if the folder has a model already or is not shared by all ranks, or if two stages
            have a tensor of the same name.
        RuntimeError: a rank cannot write.
    """
    folder = Path(folder)
    layout = Mesh.of(mesh)
    ranks = RankSync.of_mesh(mesh)
    rank_folder = folder / f".rank-{layout.rank('pp'):05}"
    ranks.first(lambda: _prepare(folder))
    tensors = [_gather_tensors(stage, plan, keep=layout.replica == 0) for stage in stages]

    def write() -> None:
        if layout.replica:
            return
        for number, (stage, state_dict) in enumerate(zip(stages, tensors)):
            stage.causal_lm.save_pretrained(
                rank_folder / f"{number:05}", state_dict=state_dict, max_shard_size=max_shard_size)

    with progress_bars_on_rank_0():
        ranks.agree(write)
    ranks.first(lambda: _join(folder, layout.size("pp")))


def _prepare(folder: Path) -> None:
    """Create a folder for a model, and remove the leftovers of a failed save.

    Raises ValueError if the folder has a model already.
    """
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise ValueError(f"{str(folder)!r} has a model already; choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".rank-*"):
        shutil.rmtree(leftover)


def _gather_tensors(stage: CausalLMStage, plan: DTypePlan | None, *, keep: bool) -> dict[str, Tensor]:
    """Gather the unsharded tensors of a stage on the CPU, by name. Collective over the ranks that share them.

    keep: False: take part in the collectives, and return no tensors.
    """
    has_tied_copy = stage.is_tied and stage.is_last and not stage.is_first  # the first stage has the weight
    tensors = {}
    for name, tensor in stage.state_dict().items():
        full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep and not (has_tied_copy and name == "lm_head.weight"):
            dtype = full_tensor.dtype if plan is None else plan.of(name).save
            tensors[name] = full_tensor.detach().to(torch.device("cpu"), dtype)
    return tensors


def _join(folder: Path, num_ranks: int) -> None:
    """Join the files of all `num_ranks` pipeline ranks into one checkpoint, and remove the ranks' folders."""
    num_rank_folders = len(list(folder.glob(".rank-*")))
    if num_rank_folders != num_ranks:
        raise ValueError(f"{str(folder)!r} has parts of {num_rank_folders} pipeline ranks, expected {num_ranks}; save "
                         "to a folder that all ranks share")
    files = sorted(folder.glob(".rank-*/*/*.safetensors"))
    file_names = _file_names(len(files))
    index = _make_index(files, file_names)
    for file, name in zip(files, file_names):
        file.rename(folder / name)
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = min(folder.glob(".rank-*/*/config.json"))
    for extra in sorted(config.parent.glob("*.json")):
        if extra.name not in (_INDEX, "config.json"):
            extra.rename(folder / extra.name)
    config.rename(folder / "config.json")  # last: a folder with this file is complete
    for rank_folder in folder.glob(".rank-*"):
        shutil.rmtree(rank_folder)


def _make_index(files: Sequence[Path], file_names: Sequence[str]) -> dict[str, Any]:
    """Return the index of a checkpoint of several files.

    files: existing files, which are read. file_names: their names in the checkpoint.

    Raises ValueError if two files have a tensor of the same name.
    """
    weight_map: dict[str, str] = {}
    total_size = 0
    for file, name in zip(files, file_names):
        with safe_open(file, framework="pt") as tensors:
            tensor_names = list(tensors.keys())
        repeated = [tensor_name for tensor_name in tensor_names if tensor_name in weight_map]
        if repeated:
            raise ValueError(f"several stages have the tensors {', '.join(repeated[:3])}; expected each in one stage: "
                             "save every stage of the model once")
        weight_map |= dict.fromkeys(tensor_names, name)
        total_size += file.stat().st_size
    return {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}


def _file_names(count: int) -> list[str]:
    """Return the names of a checkpoint's files, as transformers names them."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
