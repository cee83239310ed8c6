"""Formats of files with records: JSON (plain, gzip or zstd) and Parquet. A file of any other kind is one text.

To add a format, write its reader and give it a suffix in `RECORD_FORMATS`. Finding files, error messages and packing go
by this table. docs/data.md lists the suffixes. Readers hold little of a file in memory, except of an array in JSON.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ZSTD_PIECE = 1 << 12  # bytes to decompress at a time: about 10 KB of text
PARQUET_ROWS = 256  # rows to decode at a time
# Errors of readers for damaged files.
READ_ERRORS = (ValueError, OSError, EOFError, RecursionError, zlib.error)
# Signatures of compressed files: name, offset, bytes. Other binary files are recognised by a NUL byte.
SIGNATURES = (
    ("gzip", 0, b"\x1f\x8b"), ("zstd", 0, b"\x28\xb5\x2f\xfd"), ("bzip2", 4, b"1AY&SY"), ("xz", 0, b"\xfd7zXZ\0"),
    ("zip", 0, b"PK\x03\x04"), ("tar", 257, b"ustar"), ("Parquet", 0, b"PAR1"),
)
_JSON_ARRAY = re.compile(rb'\s*\[\s*\{\s*"')  # the start of an array of objects

# Takes the keys of a record, and returns those to read. Raises ValueError if the record lacks them.
ChooseKeys: TypeAlias = Callable[[Collection[str]], list[str]]
# Records, each with the number of bytes of the file that are read so far, which the progress bar shows. A record has
# the values of its chosen keys; an empty line is {}.
Records: TypeAlias = Iterator[tuple[dict[str, Any], int]]


class NotText(ValueError):
    """A file has neither text nor records.

    Args:
        message: the error.
        reason: two or three words for a list of files.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RecordFormat(NamedTuple):
    """A format of files with records.

    read: yields the records of a file. Raises one of `READ_ERRORS` for a record that is bad, and `NotText` for a file
        without records.
    module: the module that it needs, of a package in the extra "data". "": none.
    is_binary: the bytes of a file are not text.
    fills_nulls: all records have the same keys, with None for those that a record lacks.
    """

    read: Callable[[Path, ChooseKeys], Records]
    module: str = ""
    is_binary: bool = False
    fills_nulls: bool = False


def find_format(path: Path) -> RecordFormat | None:
    """Return the format of a file by its name. None: the file is one text."""
    name = path.name.lower()
    for suffix, format in RECORD_FORMATS.items():
        if name.endswith(suffix):
            return format
    return None


def list_suffixes() -> str:
    """Return the names that files with records have, as text."""
    return ", ".join(f"*{suffix}" for suffix in RECORD_FORMATS)


def read_checked(path: Path, size: int = -1) -> bytes:
    """Check that a file is text or has records, and return its first `size` bytes, by default all.

    Raises:
        NotText: the file is compressed or binary.
        ValueError: the file cannot be opened, or the package that reads it is missing.
    """
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    format = find_format(path)
    if format is not None and format.module:
        _check_module(path, format.module)
    if format is None or not format.is_binary:
        _check_text(path, content)
    if format is None and path.name.lower().endswith(TABLE_SUFFIXES):
        raise NotText(f"{path} is a table, not text; convert its rows to records in a file named *.jsonl or *.parquet",
                      "a table")
    if format is None and _looks_like_records(content):
        raise NotText(f"{path} starts with a JSON object; give records in files named *.jsonl or *.json", "JSON")
    return content


def _check_module(path: Path, module: str) -> None:
    """Raise ValueError if the module that reads a file is not installed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{path} needs the package {package}: pip install 'dualpipe[data]'") from error


def _check_text(path: Path, content: bytes) -> None:
    """Raise NotText if the content of a file is compressed or binary."""
    for name, offset, signature in SIGNATURES:
        if content.startswith(signature, offset):
            raise NotText(f"{path} is a {name} file; unpack it, or give records in files named {list_suffixes()}",
                          f"a {name} file")
    if b"\0" in content:
        raise NotText(f"{path} is not text: it has NUL bytes; leave it out, or convert it to UTF-8", "NUL bytes")


def _looks_like_records(content: bytes) -> bool:
    """Return True if the content of a file begins with a JSON object in a line, or with an array of objects."""
    return _is_object(_strip(content.partition(b"\n")[0])) or _JSON_ARRAY.match(_strip(content)) is not None


def _read_parquet(path: Path, choose_keys: ChooseKeys) -> Records:
    """Yield the rows of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:  # pre_buffer keeps the whole file
        names = file.schema_arrow.names
        keys = choose_keys(names)
        for key in keys:
            if names.count(key) > 1:
                raise ValueError(f"the file has {names.count(key)} columns with the name {key!r}; expected one: "
                                 "rename or drop the others")
        bytes_per_row = path.stat().st_size / max(1, file.metadata.num_rows)
        number = 0
        for batch in file.iter_batches(PARQUET_ROWS, columns=keys, use_threads=False):
            for row in zip(*(batch.column(key) for key in keys)):
                number += 1
                yield {key: value.as_py() for key, value in zip(keys, row)}, int(number * bytes_per_row)


def _read_json_lines(path: Path, choose_keys: ChooseKeys) -> Records:
    """Yield the objects of a file that has one in each line."""
    with path.open("rb") as file:
        for line in _lines(path, file):
            yield _parse_line(line, choose_keys), file.tell()


def _read_json(path: Path, choose_keys: ChooseKeys) -> Records:
    """Yield the objects of a file that has one in each line, all in an array, or only one in several lines.

    The file is read whole unless its first line that is not empty is an object, with others after it.
    """
    with path.open("rb") as file:
        lines = iter(_lines(path, file))
        head: list[bytes] = []
        filled: list[bytes] = []  # the first two lines of them that are not empty
        while len(filled) < 2:
            line = next(lines, None)
            if line is None:
                break
            head.append(line)
            if _strip(line):
                filled.append(line)
        if len(filled) == 2 and _is_object(_strip(filled[0])):
            for line in chain(head, lines):
                yield _parse_line(line, choose_keys), file.tell()
            return
        content = b"\n".join(line.rstrip(b"\n") for line in chain(head, lines))
        if _strip(content):
            for record in _parse_whole(path, content, choose_keys):
                yield _select(record, choose_keys), file.tell()


RECORD_FORMATS = {
    ".jsonl": RecordFormat(_read_json_lines),
    ".jsonl.gz": RecordFormat(_read_json_lines, is_binary=True),
    ".jsonl.zst": RecordFormat(_read_json_lines, is_binary=True, module="zstandard"),
    ".ndjson": RecordFormat(_read_json_lines),
    ".ndjson.gz": RecordFormat(_read_json_lines, is_binary=True),
    ".ndjson.zst": RecordFormat(_read_json_lines, is_binary=True, module="zstandard"),
    ".json": RecordFormat(_read_json),
    ".json.gz": RecordFormat(_read_json, is_binary=True),
    ".json.zst": RecordFormat(_read_json, is_binary=True, module="zstandard"),
    ".parquet": RecordFormat(_read_parquet, is_binary=True, module="pyarrow.parquet", fills_nulls=True),
}
TABLE_SUFFIXES = (".csv", ".tsv")  # of tables, which have no reader and are not packed as text either


def _parse_line(line: bytes, choose_keys: ChooseKeys) -> dict[str, Any]:
    """Return the chosen values of the object in a line of JSON, {} for an empty line. Raises ValueError."""
    if not _strip(line):
        return {}
    return _select(_parse_json(line), choose_keys)


def _parse_whole(path: Path, content: bytes, choose_keys: ChooseKeys) -> list[Any]:
    """Return the objects of a file with an array of them, or with a single one.

    Raises:
        NotText: the file has no records, but for example settings.
        ValueError: an array is damaged.
    """
    no_records = NotText(f"{path} has no records: expected objects, one in each line or all in an array", "no records")
    try:
        value = _parse_json(content)
    except ValueError as error:
        if _strip(content).startswith(b"["):  # records that are cut off or damaged
            raise
        raise no_records from error
    if isinstance(value, dict):
        try:
            choose_keys(value)
        except ValueError as error:
            raise NotText(f"{path} has one object, but {error}", "no records") from error
    records = value if isinstance(value, list) else [value]
    if records and not any(isinstance(record, dict) for record in records):
        raise no_records
    return records


def _select(record: Any, choose_keys: ChooseKeys) -> dict[str, Any]:
    """Return the chosen values of a record. Raises ValueError unless it is an object."""
    if not isinstance(record, dict):
        raise ValueError(f"it is not a JSON object but of type {type(record).__name__}")
    return {key: record[key] for key in choose_keys(record)}


def _parse_json(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for an object that has a key twice."""
    try:
        return json.loads(content, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON ({error})") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with the keys and values. Raises ValueError if a key is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice; leave one out")
    return values


def _is_object(line: bytes) -> bool:
    """Return True if a line is a JSON object."""
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _strip(line: bytes) -> bytes:
    """Return a line without white space and a byte order mark."""
    return line.strip(b" \t\r\n").removeprefix(BYTE_ORDER_MARK)


def _lines(path: Path, file: BufferedReader) -> Iterable[bytes]:
    """Return the lines of an open file, decompressed as its name says."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    return _zstd_lines(file) if suffix == ".zst" else file


def _zstd_lines(file: BufferedReader) -> Iterator[bytes]:
    """Yield the lines of a zstd file, without their ends.

    Decompresses frame by frame, because the readers of the package `zstandard` take a truncated file for a complete
    one.

    Raises:
        ValueError: the file is damaged.
        EOFError: the file is truncated.
    """
    from zstandard import ZstdDecompressor, ZstdError

    frame = None
    line_pieces: list[bytes] = []  # of the line that has not ended yet
    for compressed in iter(partial(file.read, ZSTD_PIECE), b""):
        rest = compressed
        while rest:
            if frame is None:
                frame = ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                *line_ends, line_start = frame.decompress(rest).split(b"\n")
            except ZstdError as error:
                raise ValueError(error) from error
            for line_end in line_ends:
                yield b"".join((*line_pieces, line_end))
                line_pieces.clear()
            line_pieces.append(line_start)
            rest = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the file is cut off")
    last_line = b"".join(line_pieces)
    if last_line:
        yield last_line
