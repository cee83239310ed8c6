"""Writing the stages of all ranks as one Hugging Face checkpoint, every rank its own part.

    rank 0      a directory beside the target, with the files at full size, their headers, config.json, the tokenizer
    every rank  the bytes of the parameters that it holds, where they belong in the files
    rank 0      the index; the directory takes its name

Nothing is gathered, and the files are the same whichever layout wrote them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.checkpoint.agree import Ranks
from dualpipe.checkpoint.hf import config_of, stage_tensors
from dualpipe.checkpoint.hub_files import CONFIG, INDEX, file_within, read_json
from dualpipe.checkpoint.hub_layout import NewTensor, Piece, ShardFile, index_of, lay_out, new_tensors, writers, writes
from dualpipe.checkpoint.hub_plan import model_tensors, shapes_of
from dualpipe.checkpoint.native_commit import sync
from dualpipe.models import HubConfig, config_from_dict
from dualpipe.nn.init import local_part
from dualpipe.parallel.materialize import Sliceable
from dualpipe.parallel.precision import DTypePlan

MAX_SHARD_BYTES = 5 * 10**9
# What a source's directory has besides tensors and config.json that belongs to the model.
CARRIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_OF_FILES = {"quantization_config", "auto_map", "torch_dtype", "dtype"}  # in config.json: of the source's files alone


def save_hf(
    stages: Sequence[nn.Module],
    path: str | PathLike[str],
    mesh: DeviceMesh | None,
    plan: DTypePlan,
    *,
    source: str | PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model to a new directory as safetensors, which transformers, vLLM and others read.

    Called by all ranks of `mesh` (from `build_mesh`) together, or by one process with None and all stages. `path` must
    be on a file system that all ranks share. Tensors get the dtypes `plan.of(name).save`, so one that is pinned to
    float32 stays so; experts are written apart, where the family's are; a tied head is not written. A rank takes the
    memory of one hub tensor on top. The timeout of the default process group must be longer than the writing takes.

    `source`, a checkpoint of the same model, is where `config.json`, `generation_config.json` and the tokenizer come
    from; without one, `config.json` has only what this library knows. It never says quantized: what is written is not.
    `max_shard_bytes`: of the tensors in a file; a larger tensor has a file of its own.

    The directory appears when it is complete. Raises, on every rank, with nothing left behind:
        ValueError: `path` exists and is not empty; a source that is another model; ranks that do not hold all of the
            model between them; a plan that lacks a tensor.
        OSError (RuntimeError with several ranks): writing failed on some rank.
    """
    ranks = Ranks(mesh)
    config = ranks.agree(lambda: config_of(stages))

    def prepare() -> tuple[dict[str, Sliceable], list[Piece]]:
        tensors = _sharded_tensors(stages)
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        pieces = [Piece(name, tuple(whole.shape), plan.of(name).save, tuple((p.start, p.stop) for p in parts[name][1]))
                  for name, whole in tensors.items()]  # fmt: skip
        return {name: local for name, (local, _) in parts.items()}, pieces

    local, pieces = ranks.agree(prepare)
    held = ranks.gather(lambda: pieces)
    write_model(ranks, config, held, local, path, plan.policy.param_dtype, source, max_shard_bytes)


def _sharded_tensors(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        for inner in stage.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()  # a root stays gathered after a forward
        tensors |= stage_tensors(stage)
    return tensors


def write_model(
    ranks: Ranks,
    config: HubConfig,
    held: Sequence[Sequence[Piece]],
    local: Mapping[str, Sliceable],
    path: str | PathLike[str],
    dtype: torch.dtype,
    source: str | PathLike[str] | None,
    max_shard_bytes: int,
) -> None:
    """Write what each rank holds. `local`: this rank's pieces, by our names. `dtype`: that config.json names."""
    target = Path(path)

    def arrange() -> tuple[_Job, list[Piece]]:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}")
        own = writers(config, held)[ranks.rank]
        shapes, dtypes = shapes_of(model_tensors(config)), {p.name: p.dtype for pieces in held for p in pieces}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        if missing := [name for name in shapes if name not in dtypes]:
            raise ValueError(f"no rank holds {', '.join(missing[:10])}{' ...' if missing[10:] else ''}; pass the mesh, "
                             "and all stages of every rank")  # fmt: skip
        tensors = new_tensors(config, shapes, dtypes)
        return _Job(tensors, lay_out(tensors, max_shard_bytes)), own

    job, own = ranks.agree(arrange)
    folder = ranks.first(lambda: target.parent / f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        ranks.first(lambda: _prepare(folder, target, job.files, config, dtype, source))
        ranks.agree(lambda: _write_pieces(folder, job.files, config, own, local))
        ranks.first(lambda: _finish(folder, target, job))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class _Job(NamedTuple):
    tensors: list[NewTensor]
    files: list[ShardFile]


# -- rank 0, before


def _prepare(
    folder: Path, target: Path, files: Sequence[ShardFile], config: HubConfig, dtype: torch.dtype,
    source: str | PathLike[str] | None,
) -> None:  # fmt: skip
    """Make a directory with all files, of which only the tensors and the index are still missing."""
    if target.is_symlink() or (target.exists() and not target.is_dir()) or (target.is_dir() and any(target.iterdir())):
        raise ValueError(f"{target} exists already; give a new directory, or an empty one")
    content = _config_json(config, dtype, source)
    folder.mkdir(parents=True)
    _write_json(folder / CONFIG, content)
    for name in CARRIED if source is not None else ():
        if (Path(source) / name).exists():
            shutil.copyfile(file_within(source, name), folder / name)
    for file in files:
        with open(folder / file.name, "xb") as out:
            out.write(file.head)
            out.truncate(file.size)


def _config_json(
    config: HubConfig, dtype: torch.dtype, source: str | PathLike[str] | None
) -> dict[str, Any]:  # fmt: skip
    content = config.to_dict() if source is None else read_json(source, CONFIG)
    if source is not None and (other := config_from_dict(content)) != config:
        theirs, ours = (asdict(each) for each in (other, config))
        differ = ", ".join(f"{key}: {theirs.get(key)} there, {value} in the model" for key, value in ours.items()
                           if theirs.get(key) != value)  # fmt: skip
        raise ValueError(f"{source} is of another model ({differ or other.model_type}); give the one that the model "
                         "was made from, or none")  # fmt: skip
    content = {key: value for key, value in content.items() if key not in _OF_FILES}
    return content | {"dtype": str(dtype).removeprefix("torch.")}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as out:
        out.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# -- every rank


def _write_pieces(
    folder: Path, files: Sequence[ShardFile], config: HubConfig, pieces: Iterable[Piece], local: Mapping[str, Sliceable]
) -> None:
    file_of = {name: file for file in files for name in file.starts}
    descriptors: dict[str, int] = {}
    with ExitStack() as stack:
        for piece in pieces:
            for write in writes(config, piece):
                file = file_of[write.name]
                if file.name not in descriptors:
                    descriptors[file.name] = os.open(folder / file.name, os.O_WRONLY)
                    stack.callback(os.close, descriptors[file.name])
                data = _bytes(local[piece.name][write.into], piece.dtype, transposed=write.transposed)
                size = len(data) // len(write.starts)
                for index, start in enumerate(write.starts):
                    offset = file.starts[write.name] + start * piece.dtype.itemsize
                    _write_all(descriptors[file.name], data[index * size : (index + 1) * size], offset)
        for descriptor in descriptors.values():
            os.fsync(descriptor)


def _bytes(block: Tensor, dtype: torch.dtype, *, transposed: bool) -> memoryview:
    block = (block.mT if transposed else block).to("cpu", dtype).contiguous()
    return memoryview(block.view(-1).view(torch.uint8).numpy())


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):  # one call writes 2 GB at most
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# -- rank 0, afterwards


def _finish(folder: Path, target: Path, job: _Job) -> None:
    if len(job.files) > 1:
        _write_json(folder / INDEX, index_of(job.files, job.tensors))
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    os.rename(folder, target)  # onto an empty directory too
    sync(target.parent)
