"""Writing the stages of all ranks as one Hugging Face checkpoint, every rank its own part.

    rank 0      a directory beside the target, with the files at full size, their headers, config.json, the tokenizer
    every rank  the bytes of the parameters that it holds, where they belong in the files
    rank 0      those that are carried from the source: of layers for multi-token prediction, which are not trained here
    rank 0      the index; the directory takes its name

Nothing is gathered, and the files are the same whichever layout wrote them.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.checkpoint.hf import config_of, stage_tensors
from dualpipe.checkpoint.hub_files import (
    CONFIG,
    INDEX,
    SINGLE,
    Header,
    Reader,
    TensorInfo,
    file_within,
    read_header,
    read_json,
)
from dualpipe.checkpoint.hub_layout import NewTensor, Piece, ShardFile, index_of, lay_out, new_tensors, writers, writes
from dualpipe.checkpoint.hub_plan import carried, model_tensors, shapes_of
from dualpipe.files import sync
from dualpipe.models import HubConfig, config_from_dict, read_config
from dualpipe.models.hub import MTP_LAYERS
from dualpipe.nn.init import local_part
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.materialize import Sliceable
from dualpipe.ranks import RankSync

MAX_SHARD_BYTES = 5 * 10**9
# What a source's directory has besides tensors and config.json that belongs to the model.
CARRIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)
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
    But for layers for multi-token prediction (DeepSeek-V3): as they are not trained here, they are carried from the
    source byte for byte, FP8 with its scales too. Those that it lacks `config.json` does not announce; that is warned.
    `max_shard_bytes`: of the tensors in a file; a larger tensor has a file of its own.

    The directory appears when it is complete. Raises, on every rank, with nothing left behind:
        ValueError: `path` exists and is not empty; a source that is another model; ranks that do not hold all of the
            model between them; a plan that lacks a tensor.
        OSError (RuntimeError with several ranks): writing failed on some rank.
    """
    ranks = RankSync.of_mesh(mesh)
    config = ranks.agree(lambda: config_of(stages))

    def prepare() -> tuple[dict[str, Sliceable], list[Piece]]:
        tensors = _sharded_tensors(stages)
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        pieces = [Piece(name, tuple(whole.shape), plan.of(name).save, tuple((p.start, p.stop) for p in parts[name][1]))
                  for name, whole in tensors.items()]
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
    ranks: RankSync,
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
    kept = ranks.first(lambda: {} if source is None else _carried_tensors(source))

    def arrange() -> tuple[_Job, list[Piece]]:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}")
        own = writers(config, held)[ranks.rank]
        shapes, dtypes = shapes_of(model_tensors(config)), {p.name: p.dtype for pieces in held for p in pieces}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        if missing := [name for name in shapes if name not in dtypes]:
            raise ValueError(f"no rank holds {', '.join(missing[:10])}{' ...' if missing[10:] else ''}; pass the mesh, "
                             "and all stages of every rank")
        tensors = new_tensors(config, shapes, dtypes)
        tensors += [NewTensor(name, info.shape, info.dtype) for name, info in kept.items()]
        return _Job(tensors, lay_out(tensors, max_shard_bytes)), own

    job, own = ranks.agree(arrange)
    folder = ranks.first(lambda: target.parent / f".{target.name}.{secrets.token_hex(4)}.partial")
    with ExitStack() as locks:  # of rank 0
        try:
            ranks.first(lambda: _make(folder, target, locks))
            ranks.first(lambda: _prepare(folder, job.files, config, dtype, source, kept))
            ranks.agree(lambda: _write(folder, job.files, _own_data(config, own, local)))
            ranks.first(lambda: _write(folder, job.files, _carried_data(source, kept)))
            ranks.first(lambda: _finish(folder, target, job))
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise


class _Job(NamedTuple):
    tensors: list[NewTensor]
    files: list[ShardFile]


# -- rank 0, before


def _make(folder: Path, target: Path, locks: ExitStack) -> None:
    """Make the directory, and remove those of writers of the same target that were killed.

    What is locked belongs to a process that lives: the system frees it when that dies.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()) or (target.is_dir() and any(target.iterdir())):
        raise ValueError(f"{target} exists already; give a new directory, or an empty one")
    for left in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
        with suppress(OSError):
            descriptor, is_free = _lock(left)
            os.close(descriptor)
            if is_free:
                shutil.rmtree(left)
    folder.mkdir(parents=True)
    locks.callback(os.close, _lock(folder)[0])


def _lock(folder: Path) -> tuple[int, bool]:
    """A descriptor that holds it, or does not: another writer does, or the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return descriptor, False
    return descriptor, True


def _prepare(
    folder: Path, files: Sequence[ShardFile], config: HubConfig, dtype: torch.dtype,
    source: str | PathLike[str] | None, kept: Header,
) -> None:
    """Fill it with all files, of which only the tensors and the index are still missing."""
    content = _config_json(config, dtype, source, kept)
    _write_json(folder / CONFIG, content)
    for name in CARRIED if source is not None else ():
        if (Path(source) / name).exists():
            shutil.copyfile(file_within(source, name), folder / name)
    for file in files:
        with naming(folder / file.name), open(folder / file.name, "xb") as out:
            out.write(file.head)
            out.truncate(file.size)


def _carried_tensors(source: str | PathLike[str]) -> dict[str, TensorInfo]:
    """What is carried of a checkpoint, which may have a config.json and a tokenizer alone. Reads headers only."""
    config = read_config(source)
    if not config.carried_layers or not any((Path(source) / name).exists() for name in (SINGLE, INDEX)):
        return {}
    return carried(config, read_header(source))


def _config_json(
    config: HubConfig, dtype: torch.dtype, source: str | PathLike[str] | None, kept: Header
) -> dict[str, Any]:
    content = config.to_dict() if source is None else read_json(source, CONFIG)
    if source is not None and (other := config_from_dict(content)) != config:
        theirs, ours = (asdict(each) for each in (other, config))
        differ = ", ".join(f"{key}: {theirs.get(key)} there, {value} in the model" for key, value in ours.items()
                           if theirs.get(key) != value)
        raise ValueError(f"{source} is of another model ({differ or other.model_type}); give the one that the model "
                         "was made from, or none")
    content = {key: value for key, value in content.items() if key not in _OF_FILES}
    described = config_from_dict(content)
    layers = len({described.carried_layer(name) for name in kept})
    for key in MTP_LAYERS:
        if content.get(key, layers) != layers:
            lacks = "no source was given" if source is None else f"{source} has no tensors of more"
            warnings.warn(
                f"config.json says {key} = {layers} instead of {content[key]}: layers for multi-token prediction are "
                f"not trained here, only carried, and {lacks}; the source is the checkpoint that the model was made "
                "from (init.from_hf, or `dualpipe hf export --source`)", stacklevel=2,
            )
            content[key] = layers
    return content | {"dtype": str(dtype).removeprefix("torch.")}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with naming(path), open(path, "x", encoding="utf-8") as out:
        out.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# -- every rank


class _Data(NamedTuple):
    """Elements of a tensor in the files, as runs of equal length that start at `starts`, in elements."""

    name: str
    starts: list[int]
    values: Tensor


def _own_data(config: HubConfig, pieces: Iterable[Piece], local: Mapping[str, Sliceable]) -> Iterator[_Data]:
    for piece in pieces:
        for write in writes(config, piece):
            block = local[piece.name][write.into]
            yield _Data(write.name, write.starts, (block.mT if write.transposed else block).to("cpu", piece.dtype))


def _carried_data(source: str | PathLike[str], kept: Header) -> Iterator[_Data]:
    reader = Reader(source, kept)
    for name, info in kept.items():
        yield _Data(name, [0], reader(name, tuple(slice(0, size) for size in info.shape)))


def _write(folder: Path, files: Sequence[ShardFile], data: Iterable[_Data]) -> None:
    """Where it belongs, flushed to the disk."""
    file_of = {name: file for file in files for name in file.starts}
    descriptors: dict[str, int] = {}
    with ExitStack() as stack:
        for name, starts, values in data:
            file = file_of[name]
            if file.name not in descriptors:
                descriptors[file.name] = os.open(folder / file.name, os.O_WRONLY)
                stack.callback(os.close, descriptors[file.name])
            raw = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())
            size = len(raw) // len(starts)
            with naming(folder / file.name):
                for index, start in enumerate(starts):
                    offset = file.starts[name] + start * values.itemsize
                    _write_all(descriptors[file.name], raw[index * size : (index + 1) * size], offset)
        for name, descriptor in descriptors.items():
            with naming(folder / name):
                os.fsync(descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):  # one call writes 2 GB at most
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of what is written inside names the file, as those of a full disk do not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


# -- rank 0, afterwards


def _finish(folder: Path, target: Path, job: _Job) -> None:
    if len(job.files) > 1:
        _write_json(folder / INDEX, index_of(job.files, job.tensors))
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    os.rename(folder, target)  # onto an empty directory too
    sync(target.parent)
