"""Pack text into token shards on disk: `dualpipe data pack`.

A packed directory holds

    index.json          format, tokenizer, token type, largest token, and every file with its size and SHA-256
    tokens-00000.bin    token ids, uint16 or uint32, document after document, each closed by the end-of-document id
    documents.npy       one record per document: shard, offset and length in tokens, 64-bit hash of the content

Documents are the files, or their records (`records.py`). A document lies in one shard. Everything is written under a
temporary name next to the target and renamed when complete, so a directory that exists is whole; `tokens.py` checks
that it still is when it reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sysconfig
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from dualpipe.files import checksum_of, naming
from dualpipe.train.records import check_readable, documents
from dualpipe.train.tables import TEXT_KEY
from dualpipe.train.tokenizer import Tokenizer

FORMAT = "dualpipe tokens 1"
INDEX = "index.json"
DOCUMENTS = "documents.npy"
DOCUMENT_TYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("hash", "<u8")])
SHARD_TOKENS = 1 << 28  # a shard is closed once it has this many

# Of the standard library: no third-party packages, no tests, and no tables that are data rather than code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


class Source(NamedTuple):
    """A file to pack and the name it has in messages and in the order of documents."""

    path: Path
    name: str


class Packed(NamedTuple):
    """What `pack` wrote."""

    path: Path
    documents: int
    tokens: int


def find_sources(paths: Iterable[str | Path]) -> list[Source]:
    """All files under `paths`, in the order given and sorted within a directory.

    Hidden files and packed directories, such as an earlier `out` next to its text, are left out.
    """
    sources = []
    for path in map(Path, paths):
        if path.is_dir():
            sources += _walk(path)
        elif path.is_file():
            sources.append(Source(path, path.name))
        else:
            raise ValueError(f"there is no file or directory {path}; give files or directories of text")
    return sources


def _walk(folder: Path, left_out: Collection[str] = ()) -> list[Source]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error

    found = []
    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out
                      and not Path(root, name, DOCUMENTS).exists()]
        for name in files:
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                found.append(Source(path, path.relative_to(folder).as_posix()))
    return sorted(found, key=lambda source: source.name)


def stdlib_sources() -> list[Source]:
    """The source files of Python's own standard library, which every machine has."""
    found = _walk(Path(sysconfig.get_path("stdlib")), NOT_STDLIB)
    return [source for source in found if source.name.endswith(".py")]


def pack(
    sources: Sequence[Source], tokenizer: Tokenizer, out: str | Path, *, text_key: str = TEXT_KEY,
    shard_tokens: int = SHARD_TOKENS,
) -> Packed:
    """Tokenise the documents of `sources` into the packed directory `out`; empty ones are left out.

    A packed directory that is already there is replaced once the new one is complete. Whatever ends this before leaves
    what was there.

    text_key: what the text of a record is called, in files that have records.

    Raises:
        ValueError: there is nothing to pack, a file cannot be read or tokenised, or `out` is something else or cannot
            be written, as where the disk is full.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and ((out / INDEX).exists() or not any(out.iterdir()))):
        raise ValueError(f"{out} exists and is no packed directory; give a new --out or remove it")
    for source in sources:
        check_readable(source.path)
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        packed = _write(sources, tokenizer, temporary, shard_tokens, text_key)
        temporary.chmod(0o755)  # mkdtemp lets only the owner in
        _replace(temporary, out)
    except OSError as error:  # in reading they are ValueErrors
        file = Path(error.filename or out)
        shown = out / file.name if file.parent == temporary else out
        raise ValueError(f"{shown} cannot be written: {error.strerror}; choose another place") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return packed._replace(path=out)


def fingerprint(sources: Sequence[Source], tokenizer: Tokenizer, text_key: str = TEXT_KEY) -> str:
    """A short name for what packing `sources` would give, from names, sizes and times, without reading them."""
    digest = hashlib.sha256(f"{FORMAT}\n{tokenizer.identity}\n{text_key}\n".encode())
    for source in sources:
        stat = source.path.stat()
        digest.update(f"{source.path.resolve()}\0{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def file_record(path: Path) -> dict[str, object]:
    """Name, size and SHA-256 of a file, as the index lists it."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": checksum_of(path, "sha256")}


def _replace(temporary: Path, out: Path) -> None:
    old = temporary.with_name(temporary.name + ".old")
    try:
        if out.exists():
            out.rename(old)
        temporary.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write(
    sources: Sequence[Source], tokenizer: Tokenizer, folder: Path, shard_tokens: int, text_key: str
) -> Packed:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    end = dtype.type(tokenizer.end_of_document)
    largest, filled, shards = tokenizer.end_of_document, shard_tokens, list[Path]()
    table = bytearray()  # of DOCUMENT_TYPE: 28 bytes each, where there may be billions
    with ExitStack() as current:
        for text, tokens in _encoded(sources, tokenizer, text_key):
            if filled >= shard_tokens:
                current.close()
                shards.append(folder / f"tokens-{len(shards):05d}.bin")
                file, filled = current.enter_context(_create(shards[-1])), 0
            content = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            table += struct.pack("<IQQQ", len(shards) - 1, filled, len(tokens) + 1, content)
            file.write(np.append(tokens.astype(dtype), end).tobytes())
            largest, filled = max(largest, int(tokens.max(initial=0))), filled + len(tokens) + 1
    packed = np.frombuffer(table, dtype=DOCUMENT_TYPE)
    if not len(packed):
        raise ValueError(f"there is no text to pack: {len(sources)} files were found and all are empty")
    with _create(folder / DOCUMENTS) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(packed))
        file.write(packed.data)  # np.save says nothing where the disk is full
    total = int(packed["length"].sum())
    index = {
        "format": FORMAT, "tokenizer": tokenizer.identity, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name,
        "end_of_document": tokenizer.end_of_document, "largest": largest, "documents": len(packed), "tokens": total,
        "document_index": file_record(folder / DOCUMENTS), "shards": [file_record(path) for path in shards],
    }
    with _create(folder / INDEX) as file:
        file.write((json.dumps(index, indent=1) + "\n").encode())
    return Packed(folder, len(packed), total)


@contextmanager
def _create(path: Path) -> Iterator[BinaryIO]:
    """A new file, which is on the disk when it is left; an OSError until then names it."""
    with naming(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _encoded(sources: Sequence[Source], tokenizer: Tokenizer, text_key: str) -> Iterator[tuple[bytes, np.ndarray]]:
    for source in sources:
        for document in documents(source.path, text_key):
            try:
                tokens = tokenizer.encode(document.text)
            except ValueError as error:
                raise ValueError(f"cannot tokenise {document.where}: {error}") from error
            yield document.text, tokens
