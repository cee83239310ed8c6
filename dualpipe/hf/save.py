"""Save the stages of a pipeline as one checkpoint of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dualpipe.checkpoint.hub.files import CONFIG, INDEX
from dualpipe.checkpoint.hub.save import carried_files, copy_carried, index_of, new_directory, shard_name
from dualpipe.checkpoint.tensors import TensorHeader, read_header
from dualpipe.hf.build import progress_bars_on_rank_0
from dualpipe.hf.stage import CausalLMStage
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.dtypes import long_name
from dualpipe.runtime.files import sync
from dualpipe.runtime.ranks.rank_sync import RankSync


def save_stages(
    stages: Sequence[CausalLMStage], folder: str | Path, *, mesh: DeviceMesh | None = None,
    max_shard_size: int | str = "5GB", plan: DTypePlan | None = None, source: str | Path | None = None,
) -> None:
    """Write the model of all ranks to `folder`, with the tensor names of the hub's files. Collective over the mesh.

    Gathers every stage in the memory of one rank. The folder appears when it is complete: until then, all ranks write
    to a hidden folder beside it.

    Args:
        stages: stages of this rank.
        folder: the same on all ranks, new or empty.
        mesh: the mesh that `load_stages` received.
        max_shard_size: largest size of a file.
        plan: its `save` dtypes are the dtypes of the written tensors; None: the dtypes of the stages' tensors.
        source: a checkpoint whose tokenizer is copied.

    Raises:
        ValueError: on every rank, if the folder exists and is not empty or is not shared by all ranks, or if two stages
            have a tensor of the same name.
        RuntimeError: a rank cannot write.
    """
    layout = Mesh.of(mesh)
    ranks = RankSync.of_mesh(mesh)
    with new_directory(folder, ranks) as hidden, progress_bars_on_rank_0():
        tensors = [_gather_tensors(stage, plan, keep=layout.replica == 0) for stage in stages]

        def write() -> None:
            if layout.replica:
                return
            for number, (stage, state_dict) in enumerate(zip(stages, tensors)):
                part = hidden / f"rank-{layout.rank('pp'):05}" / f"{number:05}"
                stage.causal_lm.save_pretrained(part, state_dict=state_dict, max_shard_size=max_shard_size)
                for file in part.iterdir():
                    sync(file)

        ranks.agree(write)
        dtype = None if plan is None else long_name(plan.policy.param_dtype)
        ranks.first(lambda: _join(hidden, layout.size("pp"), dtype, carried_files(source)))


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


def _join(folder: Path, num_ranks: int, dtype: str | None, copies: Sequence[Path]) -> None:
    """Join the files of all `num_ranks` pipeline ranks into one checkpoint, and remove the ranks' folders.

    dtype: dtype that config.json states; None: that of the stages.
    copies: files of another checkpoint that are copied.
    """
    parts = sorted(folder.glob("rank-*/*"))
    if len({part.parent for part in parts}) != num_ranks:
        raise ValueError(f"{str(folder.parent)!r} has parts of {len({part.parent for part in parts})} pipeline ranks, "
                         f"expected {num_ranks}; save to a folder that all ranks share")
    for extra in parts[0].glob("*.json"):
        if extra.name != INDEX:
            extra.rename(folder / extra.name)
    files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
    header: dict[str, TensorHeader] = {}
    for number, file in enumerate(files):
        name = shard_name(number, len(files))
        tensors, _ = read_header(file)
        repeated = [tensor for tensor in tensors if tensor in header]
        if repeated:
            raise ValueError(f"several stages have the tensors {', '.join(repeated[:3])}; expected each in one stage: "
                             "save every stage of the model once")
        header |= {tensor: info._replace(file=name) for tensor, info in tensors.items()}
        file.chmod((folder / CONFIG).stat().st_mode)  # safetensors 0.8 leaves 0600, whatever the umask
        file.rename(folder / name)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index_of(header), indent=2) + "\n", encoding="utf-8")
    if dtype is not None:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | {"dtype": dtype}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_carried(copies, folder)
    for part in folder.glob("rank-*"):
        shutil.rmtree(part)
