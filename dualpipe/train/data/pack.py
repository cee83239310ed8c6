"""Pack text into token shards on disk: `dualpipe data pack`.

A packed directory holds

    index.json           format, tokenizer, token type, largest token, and every file with its size and SHA-256
    tokens-00000.bin     token ids, uint16 or uint32: the documents, each followed by the end-of-document id
    loss-mask-00000.bin  only for conversations: one byte per token of the shard, 1 if it counts for the loss, else 0
    documents.npy        one record per document: shard, offset and length in tokens, 64-bit hash of the content

The document of a conversation is the tokens that the chat template renders, without an end-of-document id. A document
lies in one shard. All files are written under a temporary name next to the target and renamed at the end, so a
directory that exists is complete. `PackedTokens` checks that it still is when it opens it. Documents are cut into
sequences when they are read: see `dualpipe.train.data.sequences`.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dualpipe.runtime.files import name_file_in_errors, write_file
from dualpipe.train.config.schema import TEXT_KEY
from dualpipe.train.data.chat import Conversation
from dualpipe.train.data.record_formats import NotText, find_format, list_suffixes, read_checked
from dualpipe.train.data.sources import DOCUMENTS, Source, list_left_out, read_conversations, read_documents
from dualpipe.train.data.tokenizer import ByteTokenizer, ChatTokenizer, Document, FileTokenizer, PreparedText, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

FORMAT = "dualpipe tokens 1"
MASKED_FORMAT = "dualpipe tokens with a loss mask 1"  # a separate name: a reader of FORMAT would ignore the mask
INDEX = "index.json"
DOCUMENT_TYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("hash", "<u8")])
DOCUMENT_STRUCT = struct.Struct("<IQQQ")  # the same layout as DOCUMENT_TYPE
SHARD_TOKENS = 1 << 28  # a shard is closed once it has this many tokens
COPY_SIZE = 1 << 16  # bytes of document records to copy at a time
BATCH_CHARACTERS = 1 << 20  # a batch to encode is closed once it has this many
BATCH_DOCUMENTS = 4096  # the maximum in a batch: an encoding takes some 500 bytes besides its tokens
BATCHES_AHEAD = 2  # batches that wait for the encoder or are encoded, so that it never waits for the caller
PROGRESS_INTERVAL = 0.2  # seconds between updates of the progress bar


def pack(
    sources: Sequence[Source], tokenizer: Tokenizer, out: str | Path, *, text_key: str = TEXT_KEY,
    shard_tokens: int = SHARD_TOKENS, overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenize the documents of `sources` into the packed directory `out`, and return its index.

    Documents are encoded on all cores; a terminal shows a progress bar. Skips empty documents, and conversations in
    which no token counts for the loss. Skips files in a folder that are not text, with a warning that names them,
    unless their names announce records.

    Args:
        sources: from `find_sources`.
        tokenizer: from `load_tokenizer`; a `ChatTokenizer` packs conversations.
        out: the directory to create, with its parents.
        text_key: key of the text in a record, for files of records. Conversations: key of the messages, or the default
            to find it as `read_conversations` does.
        shard_tokens: number of tokens after which a shard is closed.
        overwrite: replace an existing packed directory once the new one is complete. If anything fails before, the old
            one stays.

    Raises:
        ValueError: there is nothing to pack, a file cannot be read or tokenized, or `out` already exists or cannot be
            written, for example because the disk is full.
    """
    out = Path(out)
    _check_target(out, overwrite=overwrite)
    text_sources, skipped = _check_sources(sources, needs_records=isinstance(tokenizer, ChatTokenizer))
    new = out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as folder:
            new = Path(folder, "new")
            new.mkdir()
            index = _write_files(text_sources, tokenizer, new, shard_tokens, text_key, skipped)
            _check_target(out, overwrite=overwrite)  # a second time, as hours may have passed
            _replace_directory(out, new, backup=Path(folder, "old"))
    except OSError as error:  # of writing: errors of reading are ValueErrors
        file = Path(error.filename or out)
        shown = out / file.name if file.parent == new else out
        raise ValueError(f"{shown} cannot be written: {error.strerror}; choose another place") from error
    if skipped:
        warnings.warn(f"files that are not text are skipped: {list_left_out(skipped)}", stacklevel=1)
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


def _check_sources(sources: Sequence[Source], *, needs_records: bool) -> tuple[list[Source], dict[str, str]]:
    """Return the sources that are text, and the reasons by name of those to skip.

    Looks at the beginning of all files before any is tokenized, so that hours of packing do not end at the last file.

    Raises:
        ValueError: a file that must be text is not, or cannot be read; or `needs_records` and a file that the caller
            named has none.
    """
    text_sources = []
    skipped: dict[str, str] = {}
    for source in sources:
        try:
            if needs_records and find_format(source.path) is None:
                raise NotText(f"{source.path} holds no conversations: give records in files named {list_suffixes()}",
                              "no records")
            read_checked(source.path, 1 << 16)
            text_sources.append(source)
        except NotText as error:
            if source.is_explicit or find_format(source.path) is not None:
                raise
            skipped[source.name] = error.reason
    return text_sources, skipped


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
    is_chat = isinstance(tokenizer, ChatTokenizer)
    unread: set[str] = set()
    # Closing the temporary files may write, and fail.
    with name_file_in_errors(out / DOCUMENTS), TemporaryFile(dir=out) as records, TemporaryFile(dir=out) as masks:
        writer = _Writer(out, tokenizer, records, masks, shard_tokens)
        with PackProgress([source.path for source in sources]) as progress:
            documents = _read_all(sources, text_key, skipped, unread, progress, is_chat=is_chat)
            shards = writer.write_shards(progress.count_tokens(encode_documents(documents, tokenizer)))
        if not writer.num_documents:
            not_text = f"; not text are {list_left_out(skipped)}" if skipped else ""
            num_read = sum(source.name not in skipped for source in sources)
            found = f"all files are empty ({num_read} read)" if num_read else "no files with text were found"
            raise ValueError(f"there is no text to pack: {found}{writer.describe_left_out(', or ')}{not_text}")
        index: dict[str, Any] = {
            "format": MASKED_FORMAT if is_chat else FORMAT, "tokenizer": tokenizer.identity,
            "tokenizer_file": tokenizer.file_checksum, "vocab_size": tokenizer.vocab_size, "dtype": writer.dtype.name,
        }
        if not isinstance(tokenizer, ChatTokenizer):
            index["end_of_document"] = tokenizer.end_of_document
            index["end_token"] = tokenizer.end_token
        index |= {"largest": writer.largest, "documents": writer.num_documents, "tokens": writer.num_tokens}
        if is_chat:
            index["counted"] = writer.num_counted
            index["masks"] = writer.write_masks()
        index |= {"document_index": writer.write_documents(), "shards": shards}
        writer.write_file(INDEX, [(json.dumps(index, indent=1) + "\n").encode()])
    if unread:
        warnings.warn(f"keys of records that are not read: {', '.join(map(repr, sorted(unread)))}", stacklevel=1)
    if writer.num_left_out:
        warnings.warn(f"conversations are left out{writer.describe_left_out(': ')}", stacklevel=1)
    return index


def _read_all(
    sources: Sequence[Source], text_key: str, skipped: dict[str, str], unread: set[str], progress: PackProgress, *,
    is_chat: bool,
) -> Iterator[tuple[Document, str]]:
    """Yield the documents of all files as `read_documents` does.

    Adds files that are not text to `skipped`, and keys of conversations that are not read to `unread`.
    """
    for source in sources:
        try:
            if is_chat:
                key = "" if text_key == TEXT_KEY else text_key
                yield from read_conversations(source.path, key, progress.set_position, unread)
            else:
                yield from read_documents(source.path, text_key, progress.set_position)
        except NotText as error:
            if source.is_explicit:
                raise
            skipped[source.name] = error.reason
        progress.finish_file(source.path)


class EncodedDocument(NamedTuple):
    """A document with its tokens.

    document: the input.
    place: place of the document, as error messages name it.
    tokens: (N,) tokens without an end of document.
    loss_mask: (N,) bool, True for tokens that count for the loss. None: all do.
    """

    document: Document
    place: str
    tokens: np.ndarray
    loss_mask: np.ndarray | None


class _PreparedDocument(NamedTuple):
    """A document with its place and its text."""

    document: Document
    place: str
    text: PreparedText


_Batch: TypeAlias = list[_PreparedDocument]  # documents to encode at once


def encode_documents(documents: Iterable[tuple[Document, str]], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    """Yield documents with their tokens, in order. Encodes batches on all cores while others are read and written:

        calling thread    prepare 2      convert 0, write 0     prepare 3     convert 1, write 1    prepare 4 ...
        encoder thread    [   encode 1 on all cores    ][    encode 2 on all cores    ][    encode 3 ...

    `tokenizers` encodes a batch without Python's interpreter lock. The calling thread has the Python work: it reads and
    decodes or renders documents, converts the encodings of an earlier batch to arrays, and writes them. A document has
    the same tokens in every batch. On two cores, threads need 5% more CPU time than `tokenizers` alone and worker
    processes 14% (docs/results/cpu.md), and a thread cannot be lost as a process can.

    Args:
        documents: bytes, or conversations for a `ChatTokenizer`; each with its place, as error messages name it.
        tokenizer: encodes the documents.

    Raises:
        ValueError: a document cannot be encoded. Names its place.
    """
    if isinstance(tokenizer, ByteTokenizer):  # a view of the bytes: there is nothing to do in parallel
        for document, place in documents:
            yield EncodedDocument(document, place, tokenizer.encode(document), None)
        return
    pending: deque[tuple[_Batch, Future[list[Encoding]]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="encode_documents") as thread:
        try:
            for batch in _make_batches(documents, tokenizer):
                pending.append((batch, thread.submit(_encode_batch, batch, tokenizer)))
                if len(pending) > BATCHES_AHEAD:
                    yield from _convert(*pending.popleft(), tokenizer)
            while pending:
                yield from _convert(*pending.popleft(), tokenizer)
        finally:
            for _, future in pending:  # not empty after an error
                future.cancel()


def _make_batches(
    documents: Iterable[tuple[Document, str]], tokenizer: FileTokenizer | ChatTokenizer
) -> Iterator[_Batch]:
    """Yield the documents in batches, with their texts. Raises ValueError for a document that has no text."""
    batch: _Batch = []
    size = 0
    for document, place in documents:
        try:
            text = tokenizer.prepare(document)
        except ValueError as error:
            raise ValueError(f"cannot tokenize {place}: {error}") from error
        batch.append(_PreparedDocument(document, place, text))
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _encode_batch(batch: _Batch, tokenizer: FileTokenizer | ChatTokenizer) -> list[Encoding]:
    """Return the encodings of a batch. Called in the encoder thread.

    Raises ValueError with the place of the first document that cannot be encoded.
    """
    try:
        return tokenizer.encode_texts([prepared.text for prepared in batch])
    except BaseException as error:  # `tokenizers` raises Exception; a panic in Rust is a BaseException
        raise ValueError(f"cannot tokenize {_find_bad_document(batch, tokenizer)}: {error}") from error


def _find_bad_document(batch: _Batch, tokenizer: FileTokenizer | ChatTokenizer) -> str:
    """Return the place of the first document of a batch that cannot be encoded by itself, else the range of places."""
    for prepared in batch:
        try:
            tokenizer.encode_texts([prepared.text])
        except BaseException:  # as in `_encode_batch`
            return prepared.place
    return f"the documents from {batch[0].place} to {batch[-1].place} at once"


def _convert(
    batch: _Batch, encodings: Future[list[Encoding]], tokenizer: FileTokenizer | ChatTokenizer
) -> Iterator[EncodedDocument]:
    """Yield the documents of a batch with their tokens, once it is encoded."""
    for prepared, encoding in zip(batch, encodings.result(), strict=True):
        tokens, loss_mask = tokenizer.convert(prepared.text, encoding)
        yield EncodedDocument(prepared.document, prepared.place, tokens, loss_mask)


class _Writer:
    """Writer of the files of a packed directory.

    Attributes:
        dtype: type of the tokens on disk.
        largest: largest token so far.
        num_documents: documents so far.
        num_tokens: tokens so far, with the ends of documents.
        num_counted: tokens of conversations so far that count for the loss.
        num_left_out: conversations so far that are left out, because no token counts.

    Args:
        out: the directory.
        tokenizer: the tokenizer of the documents.
        records: an empty file for the document records until their number is known. They take 28 bytes each, too much
            memory for billions of documents.
        masks: an empty file for the loss masks of all shards, one after the other.
        shard_tokens: number of tokens after which a shard is closed.
    """

    def __init__(
        self, out: Path, tokenizer: Tokenizer, records: IO[bytes], masks: IO[bytes],
        shard_tokens: int,
    ) -> None:
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        ends = [] if isinstance(tokenizer, ChatTokenizer) else [tokenizer.end_of_document]
        self._end = np.array(ends, dtype=self.dtype)  # tokens after every document
        self.largest = 0
        self.num_documents = 0
        self.num_tokens = 0
        self.num_counted = 0
        self.num_left_out = 0
        self._first_left_out = ""
        self._shard_sizes: list[int] = []  # tokens
        self._out = out
        self._records = records
        self._masks = masks
        self._shard_tokens = shard_tokens

    def write_shards(self, documents: Iterable[EncodedDocument]) -> list[dict[str, object]]:
        """Write the tokens of all documents, and return the entries of the shards in the index."""
        by_shard = groupby(self._place(documents), key=itemgetter(0))
        return [self.write_file(f"tokens-{shard:05d}.bin", map(itemgetter(1), pieces)) for shard, pieces in by_shard]

    def _place(self, documents: Iterable[EncodedDocument]) -> Iterator[tuple[int, bytes]]:
        """Yield the shard and the tokens of every document, and write its record and its loss mask."""
        for document, place, ids, loss_mask in documents:
            if loss_mask is not None and not loss_mask.any():
                self.num_left_out += 1
                self._first_left_out = self._first_left_out or place
                continue
            if not self._shard_sizes or self._shard_sizes[-1] >= self._shard_tokens:
                self._shard_sizes.append(0)
            shard = len(self._shard_sizes) - 1
            tokens = np.concatenate([ids.astype(self.dtype), self._end])
            content = document.content() if isinstance(document, Conversation) else document
            content_hash = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
            with name_file_in_errors(self._out / DOCUMENTS):
                self._records.write(
                    DOCUMENT_STRUCT.pack(shard, self._shard_sizes[shard], len(tokens), content_hash))
                if loss_mask is not None:
                    self._masks.write(loss_mask.tobytes())
                    self.num_counted += int(loss_mask.sum())
            self.largest = max(self.largest, int(tokens.max()))
            self.num_documents += 1
            self.num_tokens += len(tokens)
            self._shard_sizes[shard] += len(tokens)
            yield shard, tokens.tobytes()

    def describe_left_out(self, before: str) -> str:
        """Return the number of conversations that are left out, and the first of them, as text; "" if there is none."""
        if not self.num_left_out:
            return ""
        return (f"{before}no token counts for the loss in {self.num_left_out} of the conversations, the first is "
                f"{self._first_left_out}: the assistant says nothing")

    def write_masks(self) -> list[dict[str, object]]:
        """Write the loss mask of every shard, and return their entries in the index."""
        self._masks.seek(0)
        return [self.write_file(f"loss-mask-{shard:05d}.bin", self._read_mask(size))
                for shard, size in enumerate(self._shard_sizes)]

    def _read_mask(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes of the loss mask."""
        for start in range(0, size, COPY_SIZE):
            yield self._masks.read(min(COPY_SIZE, size - start))

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


class PackProgress:
    """Progress bar of packing: the share of the files that is read, and tokens per second. Used in a `with` statement.

    Prints nothing unless stderr is a terminal. The bar disappears at the end.

    Args:
        files: the files to pack.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._is_shown = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("packing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=not self._is_shown,
        )
        total = sum(map(_size_of, files)) if self._is_shown else None
        self._task = self._bar.add_task("", total=total, rate="")
        self._started = time.monotonic()
        self._next_update = 0.0
        self._finished_bytes = 0  # of the files before the current one
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def set_position(self, position: int) -> None:
        """Record that the current file is read up to `position`, in bytes."""
        now = time.monotonic()
        if not self._is_shown or now < self._next_update:
            return
        self._next_update = now + PROGRESS_INTERVAL
        rate = self._num_tokens / (now - self._started + 1e-9)
        text = f"{self._num_tokens:,} tokens, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=self._finished_bytes + position, rate=text)

    def finish_file(self, file: Path) -> None:
        """Record that all of a file is read."""
        if self._is_shown:
            self._finished_bytes += _size_of(file)
            self.set_position(0)

    def count_tokens(self, documents: Iterable[EncodedDocument]) -> Iterator[EncodedDocument]:
        """Yield the documents, and add their tokens to the rate."""
        for document in documents:
            self._num_tokens += len(document.tokens)
            yield document


def _size_of(file: Path) -> int:
    """Return the size of a file in bytes, 0 if it has gone."""
    try:
        return file.stat().st_size
    except OSError:  # reading the file reports it
        return 0
