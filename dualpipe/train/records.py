"""The documents of a file: a text file is one; of JSON lines and Parquet, every record is one."""

from __future__ import annotations

import gzip
import importlib
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # of files with records; others are text
PACKAGES = {".jsonl.zst": "zstandard", ".parquet": "pyarrow.parquet"}
PIECE = 1 << 12  # bytes of zstd that are decompressed at a time: some 10 KB of text
ROWS = 256  # of a Parquet file that are decoded at a time

# What compressed files have, and where. Other binary files are known by a NUL byte.
MAGIC = (
    ("gzip", 0, b"\x1f\x8b"), ("zstd", 0, b"\x28\xb5\x2f\xfd"), ("bzip2", 4, b"1AY&SY"), ("xz", 0, b"\xfd7zXZ\0"),
    ("zip", 0, b"PK\x03\x04"), ("tar", 257, b"ustar"), ("Parquet", 0, b"PAR1"),
)


class Document(NamedTuple):
    """The text of a document, never empty, and where it is from, for messages."""

    text: bytes
    where: str


def documents(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of a file, those of records one by one: no more than a piece of the file is in memory.

    Empty ones are left out; how many records were is a warning.

    Raises:
        ValueError: the file cannot be read or is binary, or a record is not an object with a string `text_key`. The
            message names file and record, which are counted from 1 (in JSON lines: the line).
    """
    if (kind := _kind(path)) == "text":
        _refuse_binary(path, text := _read(path))
        if text:
            yield Document(text, str(path))
        return
    number = empty = first_empty = 0
    try:
        for number, text in enumerate(_texts(kind, path, text_key), 1):
            if text:
                yield Document(text, f"record {number} of {path}")
            else:
                empty, first_empty = empty + 1, first_empty or number
    except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:  # what damaged files raise
        raise ValueError(f"cannot read record {number + 1} of {path}: {error}") from error
    if empty:
        warnings.warn(f"{path}: empty records are left out: {empty}, the first is record {first_empty}", stacklevel=1)


def check_readable(path: Path) -> None:
    """Refuse what `documents` cannot read and shows it at once; so hours of packing do not end at the last file.

    Raises:
        ValueError: the file cannot be opened, is compressed or binary, or a package that reads it is missing.
    """
    head = _read(path, 1 << 16)
    if (kind := _kind(path)) in PACKAGES:
        _package(kind, path)
    elif kind != ".jsonl.gz":
        _refuse_binary(path, head)


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), "text")


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _refuse_binary(path: Path, content: bytes) -> None:
    for name, offset, magic in MAGIC:
        if content.startswith(magic, offset):
            raise ValueError(f"{path} is a {name} file; unpack it, or give records in files that are called "
                             f"{', '.join(KINDS)}")
    if b"\0" in content:
        raise ValueError(f"{path} is not text: it has NUL bytes; leave it out, or convert it to UTF-8")


def _texts(kind: str, path: Path, text_key: str) -> Iterator[bytes]:
    """The text of every record of a file, empty where it is."""
    if kind == ".parquet":
        with _package(kind, path).ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:  # else it keeps all
            _check_key(text_key, file.schema_arrow.names)
            for batch in file.iter_batches(ROWS, columns=[text_key], use_threads=False):
                for value in batch.column(0):
                    yield _encoded(value.as_py(), text_key)
        return
    with gzip.open(path, "rb") if kind == ".jsonl.gz" else path.open("rb") as file:
        for line in _zstd_lines(file, _package(kind, path)) if kind == ".jsonl.zst" else file:
            try:
                record = json.loads(line) if line.strip() else {text_key: ""}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"it is not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"it is not a JSON object but of type {type(record).__name__}")
            _check_key(text_key, record)
            yield _encoded(record[text_key], text_key)


def _zstd_lines(file: BufferedIOBase, zstandard: ModuleType) -> Iterator[bytes]:
    """Lines, frame by frame, as the package's own readers take a file that is cut off for a whole one."""
    frame, begun = None, list[bytes]()  # begun: a line, in pieces
    while data := file.read(PIECE):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                *ends, rest = frame.decompress(data).split(b"\n")
            except zstandard.ZstdError as error:
                raise ValueError(error) from error
            for end in ends:
                yield b"".join((*begun, end))
                begun.clear()
            begun.append(rest)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file is cut off")
    if last := b"".join(begun):
        yield last


def _check_key(text_key: str, keys: Iterable[str]) -> None:
    if text_key not in keys:
        raise ValueError(f"it has no {text_key!r}, but {', '.join(map(repr, keys)) or 'nothing'}; name the key of the "
                         "text with --text-key or data.text_key")


def _encoded(value: Any, text_key: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"its {text_key!r} is not a string but of type {type(value).__name__}")
    return value.encode()


def _package(kind: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        name = PACKAGES[kind].partition(".")[0]
        raise ValueError(f"{path} needs the package {name}: pip install 'dualpipe[data]'") from error
