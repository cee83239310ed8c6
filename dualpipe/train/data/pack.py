"""Pack text into token shards on disk: `dualpipe data pack`.

A packed directory holds

    index.json          format, tokenizer, token type, largest token, and every file with its size and SHA-256
    tokens-00000.bin    token ids, uint16 or uint32: the documents, each followed by the end-of-document id
    documents.npy       one record per document: shard, offset and length in tokens, 64-bit hash of the content

A document lies in one shard. All files are written under a temporary name next to the target and renamed at the end, so
a directory that exists is complete. `PackedTokens` checks that it still is when it opens it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import numpy as np

from dualpipe.runtime.files import name_file_in_errors, write_file
from dualpipe.train.config.schema import TEXT_KEY
from dualpipe.train.data.sources import DOCUMENTS, NotText, Source, file_kind, read_checked, read_documents
from dualpipe.train.data.tokenizer import Tokenizer

FORMAT = "dualpipe tokens 1"
INDEX = "index.json"
DOCUMENT_TYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("hash", "<u8")])
DOCUMENT_STRUCT = struct.Struct("<IQQQ")  # the same layout as DOCUMENT_TYPE
SHARD_TOKENS = 1 << 28  # a shard is closed once it has this many tokens
COPY_SIZE = 1 << 16  # bytes of document records to copy at a time


def pack(
    sources: Sequence[Source], tokenizer: Tokenizer, out: str | Path, *, text_key: str = TEXT_KEY,
    shard_tokens: int = SHARD_TOKENS, overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenize the documents of `sources` into the packed directory `out`, and return its index.

    Skips empty documents. Skips files in a folder that are not text, with a warning that names them, unless their names
    announce records.

    Args:
        sources: from `find_sources`.
        tokenizer: from `load_tokenizer`.
        out: the directory to create, with its parents.
        text_key: key of the text in a record, for files of records.
        shard_tokens: number of tokens after which a shard is closed.
        overwrite: replace an existing packed directory once the new one is complete. If anything fails before, the old
            one stays.

    Raises:
        ValueError: there is nothing to pack, a file cannot be read or tokenized, or `out` already exists or cannot be
            written, for example because the disk is full.
    """
    out = Path(out)
    _check_target(out, overwrite=overwrite)
    text_sources, skipped = _check_sources(sources)
    new = out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as folder:
            new = Path(folder, "new")
            new.mkdir(0o755)
            index = _write_files(text_sources, tokenizer, new, shard_tokens, text_key, skipped)
            _check_target(out, overwrite=overwrite)  # a second time, as hours may have passed
            _replace_directory(out, new, backup=Path(folder, "old"))
    except OSError as error:  # of writing: errors of reading are ValueErrors
        file = Path(error.filename or out)
        shown = out / file.name if file.parent == new else out
        raise ValueError(f"{shown} cannot be written: {error.strerror}; choose another place") from error
    if skipped:
        warnings.warn(f"files that are not text are skipped: {_list_skipped(skipped)}", stacklevel=1)
    return index


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Raise ValueError if there is something at `out` that must not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out.is_dir() and (out / INDEX).exists()):
        raise ValueError(f"{out} exists and is not a packed directory; give a new --out or remove it")
    if overwrite:
        return
    try:
        index = json.loads((out / INDEX).read_text(encoding="utf-8"))
        content = f", with {index['tokens']:,} tokens in {index['documents']:,} documents"
    except (OSError, ValueError, KeyError, TypeError):
        content = ", which is damaged"
    raise ValueError(f"{out} is a packed directory already{content}; give another --out, or --overwrite to replace it")


def _check_sources(sources: Sequence[Source]) -> tuple[list[Source], dict[str, str]]:
    """Return the sources that are text, and the reasons by name of those to skip.

    Looks at the beginning of all files before any is tokenized, so that hours of packing do not end at the last file.

    Raises:
        ValueError: a file that must be text is not, or cannot be read.
    """
    text_sources = []
    skipped: dict[str, str] = {}
    for source in sources:
        try:
            read_checked(source.path, 1 << 16)
            text_sources.append(source)
        except NotText as error:
            if source.is_explicit or file_kind(source.path) != "text":
                raise
            skipped[source.name] = error.reason
    return text_sources, skipped


def _list_skipped(skipped: Mapping[str, str], limit: int = 10) -> str:
    """Return the number of skipped files, and the first `limit` names with the reasons."""
    first = ", ".join(f"{name} ({reason})" for name, reason in list(skipped.items())[:limit])
    rest = len(skipped) - limit
    return f"{len(skipped)}: {first}{f' and {rest} more' if rest > 0 else ''}"


def _replace_directory(target: Path, new: Path, backup: Path) -> None:
    """Move `new` to `target`. The old directory moves to `backup`, and back if that fails."""
    try:
        if target.exists():
            target.rename(backup)
        new.rename(target)
    finally:
        if backup.exists() and not target.exists():
            backup.rename(target)


def _write_files(
    sources: Sequence[Source], tokenizer: Tokenizer, out: Path, shard_tokens: int, text_key: str,
    skipped: dict[str, str],
) -> dict[str, Any]:
    """Write all files of a packed directory, and return its index.

    Args:
        out: an empty directory.
        skipped: files are added that turn out not to be text, with the reasons.
    """
    with name_file_in_errors(out / DOCUMENTS), TemporaryFile(dir=out) as records:  # its close may write, and fail
        writer = _Writer(out, tokenizer, records, shard_tokens)
        shards = writer.write_shards(_read_all(sources, text_key, skipped))
        if not writer.num_documents:
            not_text = f"; not text are {_list_skipped(skipped)}" if skipped else ""
            raise ValueError(f"there is no text to pack: {len(sources)} files were found and all are empty{not_text}")
        index = {
            "format": FORMAT, "tokenizer": tokenizer.identity, "vocab_size": tokenizer.vocab_size,
            "dtype": writer.dtype.name, "end_of_document": tokenizer.end_of_document, "largest": writer.largest,
            "documents": writer.num_documents, "tokens": writer.num_tokens, "document_index": writer.write_documents(),
            "shards": shards,
        }
        writer.write_file(INDEX, [(json.dumps(index, indent=1) + "\n").encode()])
    return index


def _read_all(sources: Sequence[Source], text_key: str, skipped: dict[str, str]) -> Iterator[tuple[bytes, str]]:
    """Yield the documents of all files as `read_documents` does. Adds files that are not text to `skipped`."""
    for source in sources:
        try:
            yield from read_documents(source.path, text_key)
        except NotText as error:
            if source.is_explicit:
                raise
            skipped[source.name] = error.reason


class _Writer:
    """Writer of the files of a packed directory.

    Attributes:
        dtype: type of the tokens on disk.
        largest: largest token so far.
        num_documents: documents so far.
        num_tokens: tokens so far, with the ends of documents.

    Args:
        out: the directory.
        tokenizer: encodes the documents.
        records: an empty file for the document records until their number is known. They take 28 bytes each, too much
            memory for billions of documents.
        shard_tokens: number of tokens after which a shard is closed.
    """

    def __init__(self, out: Path, tokenizer: Tokenizer, records: IO[bytes], shard_tokens: int) -> None:
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.largest = tokenizer.end_of_document
        self.num_documents = 0
        self.num_tokens = 0
        self._out = out
        self._tokenizer = tokenizer
        self._records = records
        self._shard_tokens = shard_tokens

    def write_shards(self, documents: Iterable[tuple[bytes, str]]) -> list[dict[str, object]]:
        """Write the tokens of all documents, and return the entries of the shards in the index."""
        by_shard = groupby(self._encode(documents), key=itemgetter(0))
        return [self.write_file(f"tokens-{shard:05d}.bin", map(itemgetter(1), pieces)) for shard, pieces in by_shard]

    def _encode(self, documents: Iterable[tuple[bytes, str]]) -> Iterator[tuple[int, bytes]]:
        """Yield the shard and the tokens of every document, and write its record."""
        end = self.dtype.type(self._tokenizer.end_of_document)
        shard = 0
        filled = 0
        for text, place in documents:
            try:
                tokens = self._tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"cannot tokenize {place}: {error}") from error
            if filled >= self._shard_tokens:
                shard += 1
                filled = 0
            content_hash = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            length = len(tokens) + 1
            with name_file_in_errors(self._out / DOCUMENTS):
                self._records.write(DOCUMENT_STRUCT.pack(shard, filled, length, content_hash))
            self.largest = max(self.largest, int(tokens.max(initial=0)))
            self.num_documents += 1
            self.num_tokens += length
            filled += length
            yield shard, np.append(tokens.astype(self.dtype), end).tobytes()

    def write_documents(self) -> dict[str, object]:
        """Write the records of all documents as an .npy file, and return its entry in the index."""
        return self.write_file(DOCUMENTS, self._npy_content())

    def _npy_content(self) -> Iterator[bytes]:
        """Yield the content of an .npy file with the records of all documents."""
        header = BytesIO()
        np.lib.format.write_array_header_1_0(header, {
            "descr": np.lib.format.dtype_to_descr(DOCUMENT_TYPE), "fortran_order": False,
            "shape": (self.num_documents,),
        })
        yield header.getvalue()
        self._records.seek(0)
        yield from iter(partial(self._records.read, COPY_SIZE), b"")

    def write_file(self, name: str, pieces: Iterable[bytes | memoryview]) -> dict[str, object]:
        """Write a file, and return its entry in the index."""
        with name_file_in_errors(self._out / name):
            size, checksum = write_file(self._out / name, pieces, "sha256")
        return {"file": name, "bytes": size, "sha256": checksum}
