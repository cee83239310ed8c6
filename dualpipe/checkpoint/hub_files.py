"""The files of a Hugging Face checkpoint: what their headers say, and reading parts of their tensors.

A checkpoint is a directory with `config.json` and either one `model.safetensors` or several shards named by
`model.safetensors.index.json`. An index comes from elsewhere and may hold anything, so it never leads out of the
directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualpipe.dtypes import dtype_of_code

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LINES = 200  # of a list of problems


class TensorInfo(NamedTuple):
    """What a header says of a tensor."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """On disk."""
        return prod(self.shape) * self.dtype.itemsize


Header = Mapping[str, TensorInfo]


def raise_for(what: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with a line for every problem, if there is any."""
    problems = list(problems)
    if problems:
        rest = [f"... and {len(problems) - _LINES} more"] if len(problems) > _LINES else []
        raise ValueError("\n  ".join([what, *problems[:_LINES], *rest]))


def read_json(folder: str | PathLike[str], name: str) -> dict[str, Any]:
    """A JSON object in a file of the checkpoint; raises `ValueError` where it is missing or something else."""
    path = file_within(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; it holds a {type(content).__name__}")
    return content


def file_within(folder: str | PathLike[str], name: Any) -> Path:
    """The path of a file of the checkpoint. Raises `ValueError` for a name that leads elsewhere, or to no file.

    A link may lead to another file of the directory, or to the blobs of the Hugging Face cache that it belongs to.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; give the one that holds {CONFIG}")
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{folder}: {name!r} is not the plain name of a file; refused")
    path, real = folder / name, folder.resolve()
    allowed = {real, real.parents[1] / "blobs"} if real.parent.name == "snapshots" else {real}
    if path.resolve().parent not in allowed:
        raise ValueError(f"{path} is a link to {path.resolve()}, out of the directory; refused")
    if not path.is_file():
        raise ValueError(f"{folder} has no file {name}; is the download complete?")
    return path


def read_header(folder: str | PathLike[str]) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint, by name. Reads headers only.

    Raises:
        ValueError: with a line for each: a file that is missing, cut short or not safetensors; an index that does not
            agree with the shards; a tensor that is in two of them.
    """
    folder = Path(folder)
    if not folder.is_dir() or (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return _read_shard(file_within(folder, SINGLE))
    mapped = read_json(folder, INDEX).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
    header: dict[str, TensorInfo] = {}
    problems, lost = [], set()
    for file in sorted({json.dumps(file): file for file in mapped.values()}.values(), key=str):
        try:
            shard = _read_shard(file_within(folder, file))
        except ValueError as error:
            problems.append(str(error))
            lost.add(str(file))
            continue
        problems += [f"{name} is in both {header[name].file} and {file}" for name in shard if name in header]
        header |= shard
    problems += [f"{name} is not in {file}, where {INDEX} says it is" for name, file in mapped.items()
                 if str(file) not in lost and (name not in header or header[name].file != file)]
    raise_for(f"{folder} cannot be read:", problems)
    return header


def _read_shard(path: Path) -> dict[str, TensorInfo]:
    tensors = _open(path)
    found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
    return {name: TensorInfo(path.name, dtype_of_code(part.get_dtype(), name), tuple(part.get_shape()))
            for name, part in found.items()}


def _open(path: Path) -> safe_open:
    """Checks that the header describes every byte of the file, so one that was cut short is refused."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be opened as safetensors ({error}); download or write it again") from error


class Reader:
    """Reads parts of tensors. Files are mapped into memory when first needed; `bytes_read` counts what was asked for.

    What it returns shares the memory of the file, so copying it is what reads it.
    """

    def __init__(self, folder: str | PathLike[str], header: Header) -> None:
        self.bytes_read = 0
        self._folder, self._header = folder, header
        self._files: dict[str, safe_open] = {}

    def check(self, names: Iterable[str]) -> None:
        """Open the files of these tensors; raises `ValueError` where one is not what the header says."""
        problems: dict[str, None] = {}
        for name in names:
            info = self._header[name]
            try:
                part = self._file(info.file).get_slice(name)
                seen = TensorInfo(info.file, dtype_of_code(part.get_dtype(), name), tuple(part.get_shape()))
            except (ValueError, SafetensorError) as error:
                problems[str(error)] = None
            else:
                if seen != info:
                    problems[f"{name} is {seen} here, but {info} where the headers were read"] = None
        raise_for(f"{self._folder} is not the same for all ranks:", problems)

    def __call__(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """The part `at` of a tensor, a slice for each dimension."""
        part = self._file(self._header[name].file).get_slice(name)[at]
        self.bytes_read += part.nbytes
        return part

    def _file(self, file: str) -> safe_open:
        if file not in self._files:
            self._files[file] = _open(file_within(self._folder, file))
        return self._files[file]
