"""Encode documents in batches, with the threads of the `tokenizers` package, while the caller reads and writes others.

    calling thread    prepare 2      convert 0, write 0     prepare 3     convert 1, write 1    prepare 4 ...
    encoder thread    [   encode 1 on all cores    ][    encode 2 on all cores    ][    encode 3 ...

`tokenizers` encodes a batch without Python's interpreter lock. The calling thread has the Python work: it reads and
decodes or renders documents, converts the encodings of an earlier batch to arrays, and writes them. The order of
documents is kept, and a document has the same tokens in every batch. On two cores, threads need 5% more CPU time than
`tokenizers` alone and worker processes 14% (docs/results/cpu.md), and a thread cannot be lost as a process can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from dualpipe.train.tokenization.chat_tokenizer import ChatTokenizer
from dualpipe.train.tokenization.tokenizer import ByteTokenizer, Document, FileTokenizer, PreparedText

if TYPE_CHECKING:
    from tokenizers import Encoding

BATCH_CHARACTERS = 1 << 20  # a batch is closed once it has this many
BATCH_DOCUMENTS = 4096  # the maximum in a batch: an encoding takes some 500 bytes besides its tokens
BATCHES_AHEAD = 2  # batches that wait for the encoder or are encoded, so that it never waits for the caller

AnyTokenizer: TypeAlias = ByteTokenizer | FileTokenizer | ChatTokenizer


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


class _Batch(NamedTuple):
    """Documents to encode at once."""

    documents: list[Document]
    places: list[str]
    texts: list[PreparedText]


def encode_documents(
    documents: Iterable[tuple[Document, str]], tokenizer: AnyTokenizer
) -> Iterator[EncodedDocument]:
    """Yield documents with their tokens, in order.

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
    batch = _Batch([], [], [])
    size = 0
    for document, place in documents:
        try:
            text = tokenizer.prepare(document)
        except ValueError as error:
            raise ValueError(f"cannot tokenize {place}: {error}") from error
        batch.documents.append(document)
        batch.places.append(place)
        batch.texts.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch.texts) >= BATCH_DOCUMENTS:
            yield batch
            batch = _Batch([], [], [])
            size = 0
    if batch.texts:
        yield batch


def _encode_batch(batch: _Batch, tokenizer: FileTokenizer | ChatTokenizer) -> list[Encoding]:
    """Return the encodings of a batch. Called in the encoder thread.

    Raises ValueError with the place of the first document that cannot be encoded.
    """
    try:
        return tokenizer.encode_texts(batch.texts)
    except BaseException as error:  # `tokenizers` raises Exception; a panic in Rust is a BaseException
        raise ValueError(f"cannot tokenize {_find_bad_document(batch, tokenizer)}: {error}") from error


def _find_bad_document(batch: _Batch, tokenizer: FileTokenizer | ChatTokenizer) -> str:
    """Return the place of the first document of a batch that cannot be encoded by itself, else the range of places."""
    for text, place in zip(batch.texts, batch.places):
        try:
            tokenizer.encode_texts([text])
        except BaseException:  # as in `_encode_batch`
            return place
    return f"the documents from {batch.places[0]} to {batch.places[-1]} at once"


def _convert(
    batch: _Batch, encodings: Future[list[Encoding]], tokenizer: FileTokenizer | ChatTokenizer
) -> Iterator[EncodedDocument]:
    """Yield the documents of a batch with their tokens, once it is encoded."""
    for document, place, text, encoding in zip(
        batch.documents, batch.places, batch.texts, encodings.result(), strict=True
    ):
        tokens, loss_mask = tokenizer.convert(text, encoding)
        yield EncodedDocument(document, place, tokens, loss_mask)
