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
from typing import Any

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # of files with records; others are text
PACKAGES = {".jsonl.zst": "zstandard", ".parquet": "pyarrow.parquet"}
PIECE = 1 << 12  # bytes of zstd that are decompressed at a time: some 10 KB of text
ROWS = 256  # of a Parquet file that are decoded at a time

# What compressed files have, and where. Other binary files are known by a NUL byte.
MAGIC = (
    ("gzip", 0, b"\x1f\x8b"), ("zstd", 0, b"\x28\xb5\x2f\xfd"), ("bzip2", 4, b"1AY&SY"), ("xz", 0, b"\xfd7zXZ\0"),
    ("zip", 0, b"PK\x03\x04"), ("tar", 257, b"ustar"), ("Parquet", 0, b"PAR1"),
)


def documents(path: Path, text_key: str) -> Iterator[tuple[bytes, str]]:
    """The documents of a file, each with where it is from, for messages; no more than a piece of the file is in memory.

    Empty ones are left out; how many records were is a warning. The file has passed `check_readable`.

    Raises ValueError where the file cannot be read or is binary, or a record is not an object with a string `text_key`.
    The message names file and record, which are counted from 1 (in JSON lines: the line).
    """
    if (kind := _kind(path)) == "text":
        if text := _read(path):
            yield text, str(path)
        return
    number, empty, first_empty = 1, 0, 0
    try:
        for value in _values(path, kind, text_key):
            if not isinstance(value, str):
                raise ValueError(f"its {text_key!r} is not a string but of type {type(value).__name__}")
            if text := value.encode():
                yield text, f"record {number} of {path}"
            else:
                empty, first_empty = empty + 1, first_empty or number
            number += 1
    except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:  # what damaged files raise
        raise ValueError(f"cannot read record {number} of {path}: {error}") from error
    if empty:
        warnings.warn(f"{path}: empty records are left out: {empty}, the first is record {first_empty}", stacklevel=1)


def check_readable(path: Path) -> None:
    """Refuse what `documents` cannot read and shows it at once; so hours of packing do not end at the last file.

    Raises ValueError where the file cannot be opened, is compressed or binary, or a package that reads it is missing.
    """
    _read(path, 1 << 16)
    if module := PACKAGES.get(_kind(path)):
        try:
            importlib.import_module(module)
        except ImportError as error:
            package = module.partition(".")[0]
            raise ValueError(f"{path} needs the package {package}: pip install 'dualpipe[data]'") from error


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), "text")


def _read(path: Path, size: int = -1) -> bytes:
    """The first `size` bytes of a file, by default all; ValueError where they are binary and should be text."""
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if _kind(path) in ("text", ".jsonl"):
        for name, offset, magic in MAGIC:
            if content.startswith(magic, offset):
                raise ValueError(f"{path} is a {name} file; unpack it, or give records in files that are called "
                                 f"{', '.join(KINDS)}")
        if b"\0" in content:
            raise ValueError(f"{path} is not text: it has NUL bytes; leave it out, or convert it to UTF-8")
    return content


def _values(path: Path, kind: str, text_key: str) -> Iterator[Any]:
    """What every record has under `text_key`; an empty line has nothing."""

    def check(keys: Iterable[str]) -> None:
        if text_key not in keys:
            raise ValueError(f"it has no {text_key!r}, but {', '.join(map(repr, keys)) or 'nothing'}; name the key of "
                             "the text with --text-key or data.text_key")

    if kind == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:  # else it keeps all
            check(file.schema_arrow.names)
            for batch in file.iter_batches(ROWS, columns=[text_key], use_threads=False):
                for value in batch.column(0):
                    yield value.as_py()
        return
    with gzip.open(path, "rb") if kind == ".jsonl.gz" else path.open("rb") as file:
        for line in _zstd_lines(file) if kind == ".jsonl.zst" else file:
            try:
                record = json.loads(line) if line.strip() else {text_key: ""}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"it is not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"it is not a JSON object but of type {type(record).__name__}")
            check(record)
            yield record[text_key]


def _zstd_lines(file: BufferedIOBase) -> Iterator[bytes]:
    """Lines, frame by frame, as the package's own readers take a file that is cut off for a whole one."""
    from zstandard import ZstdDecompressor, ZstdError

    frame, begun = None, list[bytes]()  # begun: a line, in pieces
    while data := file.read(PIECE):
        while data:
            frame = frame or ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                *ends, rest = frame.decompress(data).split(b"\n")
            except ZstdError as error:
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
