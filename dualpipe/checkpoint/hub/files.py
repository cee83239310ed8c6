"""The files of a Hugging Face checkpoint: what their headers say, and reading parts of tensors as they are stored.

A checkpoint is a directory with `config.json` and either one `model.safetensors` or several shards named by
`model.safetensors.index.json`. An index comes from elsewhere and may hold anything, so it never leads out of the
directory. How the values of a tensor are stored is in `stored_formats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from dualpipe.checkpoint.hub.stored_formats import fp8_block
from dualpipe.checkpoint.tensors import Box, TensorHeader, read_header
from dualpipe.runtime.errors import raise_for

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
StrPath = str | PathLike[str]


def file_within(folder: StrPath, name: Any) -> Path:
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


def read_json(folder: StrPath, name: str) -> dict[str, Any]:
    """A JSON object in a file of the checkpoint; raises `ValueError` where it is missing or something else."""
    path = file_within(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; it holds a {type(content).__name__}")
    return content


def read_headers(folder: StrPath) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint, by name. Reads headers only.

    Raises `ValueError` with a line for each: a file that is missing, cut short or not safetensors; an index that does
    not agree with the shards; a tensor that is in two of them.
    """
    folder = Path(folder)
    if not folder.is_dir() or (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return read_header(file_within(folder, SINGLE))[0]
    mapped = read_json(folder, INDEX).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
    header: dict[str, TensorHeader] = {}
    problems = []
    for file in sorted({json.dumps(file): file for file in mapped.values()}.values(), key=str):
        try:
            shard, _ = read_header(file_within(folder, file))
        except ValueError as error:
            problems.append(str(error))
            mapped = {name: other for name, other in mapped.items() if other != file}  # all has been said of it
        else:
            problems += [f"{name} is in both {header[name].file} and {file}" for name in shard if name in header]
            header |= shard
    problems += [f"{name} is not in {file}, where {INDEX} says it is" for name, file in mapped.items()
                 if name not in header or header[name].file != file]
    raise_for(f"{folder} cannot be read:", problems)
    return header


class Reader:
    """Reads boxes of tensors. Files are mapped into memory when first needed; `bytes_read` counts what was asked for.

    What it returns shares the memory of the file, so copying it is what reads it.
    block: rows and columns that share a scale, where there is FP8.
    """

    def __init__(self, folder: StrPath, header: Mapping[str, TensorHeader], block: tuple[int, int] | None = None):
        self.header, self.block, self.bytes_read = header, block, 0
        self._folder = folder
        self._files: dict[str, safe_open] = {}

    @classmethod
    def of(cls, folder: StrPath, model_type: str) -> Reader:
        """A reader of all tensors; raises `ValueError` where headers cannot be read, or are of another model type."""
        hub = read_json(folder, CONFIG)
        if hub.get("model_type") != model_type:
            raise ValueError(f"{folder} holds a {hub.get('model_type')!r} model; the stages are {model_type!r}")
        return cls(folder, read_headers(folder), fp8_block(hub))

    def check(self, names: Iterable[str]) -> None:
        """Open the files of these tensors; raises `ValueError` where one is not what the header says."""
        files: dict[str, set[str]] = {}
        for name in names:
            files.setdefault(self.header[name].file, set()).add(name)
        problems = []
        for file, inside in files.items():
            try:
                path = file_within(self._folder, file)
                here, _ = read_header(path)
            except ValueError as error:
                problems.append(str(error))
                continue
            self._files[file] = safe_open(path, framework="pt")
            problems += [f"{name} is {here.get(name)} here, but {self.header[name]} where the headers were read"
                         for name in inside if here.get(name) != self.header[name]]
        raise_for(f"{self._folder} is not the same for all ranks:", problems)

    def __call__(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        file = self.header[name].file
        if file not in self._files:
            self._files[file] = safe_open(file_within(self._folder, file), framework="pt")
        part = self._files[file].get_slice(name)[box.slices]
        self.bytes_read += part.nbytes
        return part
