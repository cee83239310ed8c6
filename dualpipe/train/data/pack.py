"""Pack text into token shards on disk: `dualpipe data pack`.

A packed directory holds

    index.json          format, tokenizer, token type, largest token, and every file with its size and SHA-256
    tokens-00000.bin    token ids, uint16 or uint32, document after document, each closed by the end-of-document id
    documents.npy       one record per document: shard, offset and length in tokens, 64-bit hash of the content

Documents are the files, or their records where they are JSON lines or Parquet. A document lies in one shard. Everything
is written under a temporary name next to the target and renamed when complete, so a directory that exists is whole;
`data.py` checks that it still is when it reads it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import os
import struct
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase, BytesIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from dualpipe.runtime.files import name_file_in_errors, write_file
from dualpipe.train.config.schema import BYTES, STDLIB, TEXT_KEY, TOKENIZER

FORMAT = "dualpipe tokens 1"
INDEX = "index.json"
DOCUMENTS = "documents.npy"
DOCUMENT_TYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("hash", "<u8")])
SHARD_TOKENS = 1 << 28  # a shard is closed once it has this many

# Of the standard library: no third-party packages, no tests, and no tables that are data rather than code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # of files with records; others are text
PACKAGES = {".jsonl.zst": "zstandard", ".parquet": "pyarrow.parquet"}
PIECE = 1 << 12  # bytes of zstd that are decompressed at a time: some 10 KB of text
COPIED = 1 << 16  # bytes of document records that are copied at a time
ROWS = 256  # of a Parquet file that are decoded at a time

# What compressed files have, and where. Other binary files are known by a NUL byte.
MAGIC = (
    ("gzip", 0, b"\x1f\x8b"), ("zstd", 0, b"\x28\xb5\x2f\xfd"), ("bzip2", 4, b"1AY&SY"), ("xz", 0, b"\xfd7zXZ\0"),
    ("zip", 0, b"PK\x03\x04"), ("tar", 257, b"ustar"), ("Parquet", 0, b"PAR1"),
)


def pack(
    sources: Sequence[Source], tokenizer: Tokenizer, out: str | Path, *, text_key: str = TEXT_KEY,
    shard_tokens: int = SHARD_TOKENS, overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenise the documents of `sources` into the packed directory `out`; empty ones are left out. Returns its index.

    Files of a folder that are no text are left out with a warning that names them, unless they are called records.

    text_key: what the text of a record is called, in files that have records. overwrite: replace a packed directory
    that is already there, once the new one is complete; whatever ends this before leaves what was there.

    Raises ValueError where there is nothing to pack, a file cannot be read or tokenised, or `out` is there already or
    cannot be written, as where the disk is full.
    """
    out = Path(out)
    _check_target(out, overwrite=overwrite)
    left_out: dict[str, str] = {}  # why, by name
    text = []
    for source in sources:  # first, so that hours of packing do not end at the last file
        try:
            _read(source.path, 1 << 16)
            text.append(source)
        except NotText as error:
            if source.is_given or _kind(source.path) != "text":
                raise
            left_out[source.name] = error.reason
    new = out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as folder:
            new, old = Path(folder, "new"), Path(folder, "old")
            new.mkdir(0o755)
            index = _write(text, tokenizer, new, shard_tokens, text_key, left_out)
            _check_target(out, overwrite=overwrite)  # again, as hours may have passed
            try:
                if out.exists():
                    out.rename(old)
                new.rename(out)
            finally:
                if old.exists() and not out.exists():
                    old.rename(out)
    except OSError as error:  # in reading they are ValueErrors
        file = Path(error.filename or out)
        shown = out / file.name if file.parent == new else out
        raise ValueError(f"{shown} cannot be written: {error.strerror}; choose another place") from error
    if left_out:
        warnings.warn(f"files that are no text are left out: {_listed(left_out)}", stacklevel=1)
    return index


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse a place for a packed directory where something is that must not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out.is_dir() and (out / INDEX).exists()):
        raise ValueError(f"{out} exists and is no packed directory; give a new --out or remove it")
    if overwrite:
        return
    try:
        index = json.loads((out / INDEX).read_text(encoding="utf-8"))
        content = f", with {index['tokens']:,} tokens in {index['documents']:,} documents"
    except (OSError, ValueError, KeyError, TypeError):
        content = ", which is damaged"
    raise ValueError(f"{out} is a packed directory already{content}; give another --out, or --overwrite to replace it")


def _listed(left_out: Mapping[str, str], most: int = 10) -> str:
    """Return the number of files that were left out, and the first of them with the reasons."""
    first = ", ".join(f"{name} ({reason})" for name, reason in list(left_out.items())[:most])
    rest = len(left_out) - most
    return f"{len(left_out)}: {first}{f' and {rest} more' if rest > 0 else ''}"


def _write(
    sources: Sequence[Source], tokenizer: Tokenizer, out: Path, shard_tokens: int, key: str, left_out: dict[str, str]
) -> dict[str, Any]:
    """Write all files of a packed directory; returns its index. left_out: gets the files that turn out to be no text,
    with the reasons."""
    with name_file_in_errors(out / DOCUMENTS), TemporaryFile(dir=out) as records:  # closing it may write, and fail
        return _write_with(records, sources, tokenizer, out, shard_tokens, key, left_out)


def _write_with(
    records: IO[bytes], sources: Sequence[Source], tokenizer: Tokenizer, out: Path, shard_tokens: int, key: str,
    left_out: dict[str, str],
) -> dict[str, Any]:
    """The same as `_write`. records: an empty file for the document records until they can be counted, as 28 bytes
    each of maybe billions are too many for memory."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    largest = tokenizer.end_of_document
    num_documents = 0
    num_tokens = 0

    def encoded() -> Iterator[tuple[int, bytes]]:
        """For every document the shard that it is for, and its tokens."""
        nonlocal largest, num_documents, num_tokens
        shard = filled = 0
        for text, where in _texts(sources, key, left_out):
            try:
                tokens = tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"cannot tokenise {where}: {error}") from error
            if filled >= shard_tokens:
                shard, filled = shard + 1, 0
            content = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            length = len(tokens) + 1
            with name_file_in_errors(out / DOCUMENTS):
                records.write(struct.pack("<IQQQ", shard, filled, length, content))  # as DOCUMENT_TYPE
            largest = max(largest, int(tokens.max(initial=0)))
            filled += length
            num_documents += 1
            num_tokens += length
            yield shard, np.append(tokens.astype(dtype), dtype.type(tokenizer.end_of_document)).tobytes()

    def write(name: str, pieces: Iterable[bytes | memoryview]) -> dict[str, object]:
        """Write a file; what the index says of it."""
        with name_file_in_errors(out / name):
            size, checksum = write_file(out / name, pieces, "sha256")
        return {"file": name, "bytes": size, "sha256": checksum}

    shards = [write(f"tokens-{shard:05d}.bin", map(itemgetter(1), pieces))
              for shard, pieces in groupby(encoded(), key=itemgetter(0))]
    if not num_documents:
        no_text = f"; no text are {_listed(left_out)}" if left_out else ""
        raise ValueError(f"there is no text to pack: {len(sources)} files were found and all are empty{no_text}")
    index = {
        "format": FORMAT, "tokenizer": tokenizer.identity, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name,
        "end_of_document": tokenizer.end_of_document, "largest": largest, "documents": num_documents,
        "tokens": num_tokens, "document_index": write(DOCUMENTS, _as_array_file(records, num_documents)),
        "shards": shards,
    }
    write(INDEX, [(json.dumps(index, indent=1) + "\n").encode()])
    return index


def _as_array_file(records: IO[bytes], number: int) -> Iterator[bytes]:
    """Yield the content of an .npy file of `number` document records."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {
        "descr": np.lib.format.dtype_to_descr(DOCUMENT_TYPE), "fortran_order": False, "shape": (number,)})
    yield header.getvalue()
    records.seek(0)
    while piece := records.read(COPIED):
        yield piece


# -- the documents


class NotText(ValueError):
    """A file that is compressed or binary. reason: in two or three words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Source(NamedTuple):
    """A file to pack and the name it has in messages and in the order of documents."""

    path: Path
    name: str
    is_given: bool = False  # by its own name, not by that of a folder: then it must be text


def _texts(sources: Sequence[Source], key: str, left_out: dict[str, str]) -> Iterator[tuple[bytes, str]]:
    """The documents of all files, as of `documents`; left_out: see `_write`."""
    for source in sources:
        try:
            yield from documents(source.path, key)
        except NotText as error:
            if source.is_given:
                raise
            left_out[source.name] = error.reason


def find_sources(paths: Iterable[str | Path]) -> list[Source]:
    """All files under `paths`, in the order given and sorted within a directory; ValueError where they cannot be read.

    "stdlib" stands for the source files of Python's own standard library, which every machine has. Hidden files and
    packed directories, such as an earlier `out` next to its text, are left out.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error

    sources = []
    for given in paths:
        path, left_out, ending = Path(given), set[str](), ""
        if given == STDLIB:
            path, left_out, ending = Path(sysconfig.get_path("stdlib")), NOT_STDLIB, ".py"
        elif path.is_file():
            sources.append(Source(path, path.name, is_given=True))
            continue
        elif not path.is_dir():
            raise ValueError(f"there is no file or directory {path}; give files or directories of text")
        found = []
        for root, folders, files in os.walk(path, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out
                          and not Path(root, name, DOCUMENTS).exists()]
            inside = (Path(root, name) for name in files if not name.startswith(".") and name.endswith(ending))
            found += [Source(file, file.relative_to(path).as_posix()) for file in inside if file.is_file()]
        sources += sorted(found, key=lambda source: source.name)
    return sources


def documents(path: Path, text_key: str) -> Iterator[tuple[bytes, str]]:
    """The documents of a file, each with where it is from, for messages; no more than a piece of the file is in memory.

    Empty ones are left out; how many records were is a warning.

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


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), "text")


def _read(path: Path, size: int = -1) -> bytes:
    """The first `size` bytes of a file, by default all.

    Raises NotText where it is compressed or binary, ValueError where it cannot be opened or a package that reads it is
    missing.
    """
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if module := PACKAGES.get(kind := _kind(path)):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{path} needs the package {module.partition('.')[0]}: pip install 'dualpipe[data]'"
                             ) from error
    elif kind != ".jsonl.gz":
        for name, offset, magic in MAGIC:
            if content.startswith(magic, offset):
                raise NotText(f"{path} is a {name} file; unpack it, or give records in files that are called "
                              f"{', '.join(KINDS)}", f"a {name} file")
        if b"\0" in content:
            raise NotText(f"{path} is not text: it has NUL bytes; leave it out, or convert it to UTF-8", "NUL bytes")
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


# -- tokenizers: `identity` tells two apart, so that data packed with one is not read as if it came from another


class ByteTokenizer:
    """One token per byte; the id after the last byte ends a document."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """(len(text),) uint8: the ids of a document, without the one that ends it."""
        return np.frombuffer(text, dtype=np.uint8)


class FileTokenizer:
    """A `tokenizers` JSON file. Documents must be UTF-8."""

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        from tokenizers import Tokenizer as HubTokenizer

        try:
            content = Path(path).read_bytes()
            self._tokenizer = HubTokenizer.from_str(content.decode("utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}; give 'bytes' or the path of a "
                             "tokenizer.json, or of a directory with one") from error
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error
        ends = map(self._tokenizer.token_to_id, [end_of_document] if end_of_document else END_NAMES)
        if (end := next((token for token in ends if token is not None), None)) is None:
            what = f"no token {end_of_document!r}" if end_of_document else f"none of {', '.join(END_NAMES)}"
            raise ValueError(f"{path} has {what}; name its end-of-document token with `dualpipe data pack "
                             "--end-of-document`")
        self.end_of_document = end
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()}:{end}"

    def encode(self, text: bytes) -> np.ndarray:
        """(tokens,) uint32."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error}); convert it, or use the tokenizer 'bytes'") from error
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=np.uint32)


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """`name` is "bytes" or the path of a `tokenizers` JSON file, or of a directory with a tokenizer.json."""
    if name != BYTES:
        return FileTokenizer(Path(name, TOKENIZER) if Path(name).is_dir() else name, end_of_document)
    if end_of_document is not None:
        raise ValueError(f"--end-of-document {end_of_document!r}: bytes have their own; leave it out, or give the "
                         "path of a tokenizer.json")
    return ByteTokenizer()
