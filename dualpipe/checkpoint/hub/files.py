"""The files of a Hugging Face checkpoint: read their headers, and parts of tensors in stored form.

A checkpoint is a directory with `config.json` and either one `model.safetensors` or several shards listed in
`model.safetensors.index.json`. The index is untrusted, so no name in it may lead out of the directory.
`stored_formats` decodes the values of tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from dualpipe.checkpoint.hub.stored_formats import fp8_block
from dualpipe.checkpoint.tensors import Box, TensorHeader, read_header
from dualpipe.runtime.errors import raise_for
from dualpipe.runtime.files import CHECKSUMS
from dualpipe.runtime.ranks.rank_sync import RankSync

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHECKSUM = "xxh3_128"
_HASHED_AT_ONCE = 2**24  # bytes
StrPath = str | PathLike[str]


def file_within(folder: StrPath, name: Any) -> Path:
    """Return the path of a file of the checkpoint.

    Names come from the index, which is untrusted. Links are the owner's, such as those of the Hugging Face cache, and
    are followed.

    Raises:
        ValueError: the name leads out of the directory, or there is no such file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; give the one that holds {CONFIG}")
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{folder}: {name!r} is not the plain name of a file; refused")
    path = folder / name
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist; mend the link, or download the "
                         "file again")
    if not path.is_file():
        raise ValueError(f"{folder} has no file {name}; is the download complete?")
    return path


def checksum(folder: StrPath, ranks: RankSync) -> str:
    """Return a checksum of the tensors and of the config.json in a directory. Collective: ranks share the reading."""
    names = [*sorted(path.name for path in Path(folder).glob("*.safetensors")), CONFIG]

    def hash_files() -> dict[str, str]:
        digests = {}
        for name in names[ranks.rank :: ranks.size]:
            digest = CHECKSUMS[_CHECKSUM]()
            with file_within(folder, name).open("rb") as file:
                while block := file.read(_HASHED_AT_ONCE):
                    digest.update(block)
            digests[name] = digest.hexdigest()
        return digests

    digests: dict[str, str] = {}
    for of_rank in ranks.gather(hash_files):
        digests |= of_rank
    whole = CHECKSUMS[_CHECKSUM](json.dumps(sorted(digests.items())).encode())
    return f"{_CHECKSUM}:{whole.hexdigest()}"


def read_json(folder: StrPath, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of the checkpoint.

    Raises:
        ValueError: the file is missing, no JSON, or another JSON value.
    """
    path = file_within(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content


def read_headers(folder: StrPath) -> dict[str, TensorHeader]:
    """Return all tensors of a checkpoint by name. Reads headers only.

    Raises:
        ValueError: a file is missing, truncated or not safetensors; the index disagrees with the shards; or a tensor is
            in two shards. The message has a line for each problem.
    """
    folder = Path(folder)
    # A link to nothing counts as there: `file_within` names it.
    if not folder.is_dir() or os.path.lexists(folder / SINGLE) or not os.path.lexists(folder / INDEX):
        return read_header(file_within(folder, SINGLE))[0]
    files = read_json(folder, INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
    header: dict[str, TensorHeader] = {}
    problems = []
    # Each file once. The keys are JSON because a damaged index may have lists or objects instead of names.
    for file in sorted({json.dumps(file): file for file in files.values()}.values(), key=str):
        try:
            shard, _ = read_header(file_within(folder, file))
        except ValueError as error:
            problems.append(str(error))
            files = {name: other for name, other in files.items() if other != file}  # one line per bad file is enough
        else:
            problems += [f"{name} is in both {header[name].file} and {file}" for name in shard if name in header]
            header |= shard
    problems += [f"{name} is not in {file}, where {INDEX} says it is" for name, file in files.items()
                 if name not in header or header[name].file != file]
    raise_for(f"{folder} cannot be read:", problems)
    return header


class Reader:
    """Read boxes of tensors from a checkpoint. Files are memory-mapped at first use.

    Tensors that it returns share the memory of the file: copying them is what reads the disk.

    Args:
        folder: the directory of the checkpoint.
        header: from `read_headers`.
        block: rows and columns that share a scale, if the checkpoint has FP8.

    Attributes:
        bytes_read: total size of all boxes that were requested.
    """

    def __init__(self, folder: StrPath, header: Mapping[str, TensorHeader], block: tuple[int, int] | None = None):
        self.header = header
        self.block = block
        self.bytes_read = 0
        self._folder = folder
        self._files: dict[str, safe_open] = {}

    @classmethod
    def open(cls, folder: StrPath, model_type: str) -> Reader:
        """Open a checkpoint.

        Raises:
            ValueError: its headers cannot be read, or it has another model type.
        """
        hub = read_json(folder, CONFIG)
        if hub.get("model_type") != model_type:
            raise ValueError(f"{folder} holds a {hub.get('model_type')!r} model; the stages are {model_type!r}")
        return cls(folder, read_headers(folder), fp8_block(hub))

    def check(self, names: Iterable[str]) -> None:
        """Open the files of these tensors.

        Raises:
            ValueError: a file differs from the header, which rank 0 may have read.
        """
        files: dict[str, set[str]] = {}
        for name in names:
            files.setdefault(self.header[name].file, set()).add(name)
        problems = []
        for file, expected in files.items():
            try:
                path = file_within(self._folder, file)
                actual, _ = read_header(path)
            except ValueError as error:
                problems.append(str(error))
                continue
            self._files[file] = safe_open(path, framework="pt")
            problems += [f"{name} is {actual.get(name)} here, but {self.header[name]} where the headers were read"
                         for name in expected if actual.get(name) != self.header[name]]
        raise_for(f"{self._folder} is not the same for all ranks:", problems)

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, sharing the memory of its file."""
        file = self.header[name].file
        if file not in self._files:
            self._files[file] = safe_open(file_within(self._folder, file), framework="pt")
        values = self._files[file].get_slice(name)[box.slices]
        self.bytes_read += values.nbytes
        return values
