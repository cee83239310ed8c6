"""Pack text into token shards on disk: `dualpipe data pack`.

A packed directory holds

    index.json          format, tokenizer, token type, largest token, and every file with its size and SHA-256
    tokens-00000.bin    token ids, uint16 or uint32, document after document, each closed by the end-of-document id
    documents.npy       one record per document: shard, offset and length in tokens, 64-bit hash of the content

A document lies in one shard. Everything is written under a temporary name next to the target and renamed when complete,
so a directory that exists is whole; `tokens.py` checks that it still is when it reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

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


def _walk(folder: Path) -> list[Source]:
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and not Path(root, name, DOCUMENTS).exists()]
        for name in files:
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                found.append(Source(path, path.relative_to(folder).as_posix()))
    return sorted(found, key=lambda source: source.name)


def stdlib_sources() -> list[Source]:
    """The source files of Python's own standard library, which every machine has."""
    folder = sysconfig.get_path("stdlib")
    return [
        s for s in _walk(Path(folder)) if s.name.endswith(".py") and NOT_STDLIB.isdisjoint(s.name.split("/")[:-1])
    ]


def pack(sources: Sequence[Source], tokenizer: Tokenizer, out: str | Path, shard_tokens: int = SHARD_TOKENS) -> Packed:
    """Tokenise `sources` (one document each; empty files are skipped) into the packed directory `out`.

    A packed directory that is already there is replaced once the new one is complete.

    Raises:
        ValueError: there is nothing to pack, a file cannot be read or tokenised, or `out` cannot be made or is
            something else.
    """
    out = Path(out)
    _check_replaceable(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}; choose another place") from error
    try:
        packed = _write(sources, tokenizer, temporary, shard_tokens)
        temporary.chmod(0o755)  # mkdtemp lets only the owner in
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return packed._replace(path=out)


def fingerprint(sources: Sequence[Source], tokenizer: Tokenizer) -> str:
    """A short name for what packing `sources` would give, from names, sizes and times, without reading them."""
    digest = hashlib.sha256(f"{FORMAT}\n{tokenizer.identity}\n".encode())
    for source in sources:
        stat = source.path.stat()
        digest.update(f"{source.path.resolve()}\0{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def file_record(path: Path) -> dict[str, object]:
    """Name, size and SHA-256 of a file, as the index lists it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _check_replaceable(out: Path) -> None:
    if out.exists() and not (out.is_dir() and ((out / INDEX).exists() or not any(out.iterdir()))):
        raise ValueError(f"{out} exists and is no packed directory; give a new --out or remove it")


def _replace(temporary: Path, out: Path) -> None:
    if out.exists():
        old = temporary.with_name(temporary.name + ".old")
        out.rename(old)
        temporary.rename(out)
        shutil.rmtree(old)
    else:
        temporary.rename(out)


def _write(sources: Sequence[Source], tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> Packed:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    writer = _ShardWriter(folder, dtype, shard_tokens)
    largest = tokenizer.end_of_document
    try:
        for text, tokens in _encoded(sources, tokenizer):
            largest = max(largest, int(tokens.max(initial=0)))
            closed = np.append(tokens.astype(dtype), dtype.type(tokenizer.end_of_document))
            writer.add(closed, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
    finally:
        writer.close()
    if not writer.documents:
        raise ValueError(f"there is no text to pack: {len(sources)} files were found and all are empty")
    documents = np.array(writer.documents, dtype=DOCUMENT_TYPE)
    np.save(folder / DOCUMENTS, documents)
    total = int(documents["length"].sum())
    _write_index(folder, tokenizer, dtype, writer.files, largest=largest, documents=len(documents), tokens=total)
    return Packed(folder, len(documents), total)


def _write_index(
    folder: Path, tokenizer: Tokenizer, dtype: np.dtype, shards: Sequence[Path], **counts: int
) -> None:  # fmt: skip
    index = {
        "format": FORMAT, "tokenizer": tokenizer.identity, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name,
        "end_of_document": tokenizer.end_of_document, **counts,
        "document_index": file_record(folder / DOCUMENTS), "shards": [file_record(path) for path in shards],
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _encoded(sources: Sequence[Source], tokenizer: Tokenizer) -> Iterator[tuple[bytes, np.ndarray]]:
    for source in sources:
        try:
            text = source.path.read_bytes()
            if text:
                yield text, tokenizer.encode(text)
        except OSError as error:
            raise ValueError(f"cannot read {source.path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"cannot tokenise {source.path}: {error}") from error


class _ShardWriter:
    """Appends documents to the current shard and opens the next where one is full."""

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self._folder, self._dtype, self._limit = folder, dtype, shard_tokens
        self._file: BinaryIO | None = None
        self._filled = 0
        self.files: list[Path] = []
        self.documents: list[tuple[int, int, int, int]] = []

    def add(self, tokens: np.ndarray, content_hash: int) -> None:
        if self._file is None or self._filled >= self._limit:
            self._open_next()
        self.documents.append((len(self.files) - 1, self._filled, len(tokens), content_hash))
        self._file.write(tokens.tobytes())
        self._filled += len(tokens)

    def _open_next(self) -> None:
        self.close()
        self.files.append(self._folder / f"tokens-{len(self.files):05d}.bin")
        self._file, self._filled = self.files[-1].open("wb"), 0

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
