"""Split packed text into training and validation text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualpipe.train.data.document_index import TextPart, is_cached
from dualpipe.train.data.pack import DOCUMENT_TYPE
from dualpipe.train.data.sources import DOCUMENTS
from dualpipe.train.data.token_stream import PackedTokens, TokenStream

_UNIGRAM_BLOCK = 1 << 22  # tokens to count at a time


class Splits(NamedTuple):
    """Training text and validation text."""

    train: TokenStream
    validation: TokenStream

    def unigram_loss(self, vocab_size: int, max_tokens: int = 1 << 26) -> float:
        """Return the validation loss, in nats per token, of the token frequencies of `train` with add-one smoothing.

        Counts only tokens that count for the loss.

        Args:
            vocab_size: of the model.
            max_tokens: tokens to count, from the beginning of each text.
        """
        counts = np.zeros((2, vocab_size), dtype=np.int64)
        for stream, stream_counts in zip(self, counts):
            end = min(stream.num_tokens, max_tokens)
            for start in range(0, end, _UNIGRAM_BLOCK):
                stop = min(end, start + _UNIGRAM_BLOCK)
                tokens = stream.read(start, stop)
                if stream.has_loss_mask:
                    tokens = tokens[stream.read_mask(start, stop)]
                stream_counts += np.bincount(tokens, minlength=vocab_size)
        train_counts, validation_counts = counts
        log_p = np.log(train_counts + 1.0) - np.log(train_counts.sum() + vocab_size)
        return float(-(validation_counts * log_p).sum() / max(1, validation_counts.sum()))


def open_splits(
    train: Path, validation: Path | None, fraction: float, *, at_least: int = 0, cache: Path | None = None
) -> Splits:
    """Open packed data.

    Args:
        train: packed directory.
        validation: packed directory. None: `fraction` of the documents of `train`.
        fraction: as in `split_documents`.
        at_least: as in `split_documents`.
        cache: as in `TokenStream`.

    Raises:
        ValueError: a directory is not complete, or as `split_documents` does.
    """
    packed = PackedTokens(train)
    if validation is None:
        return split_documents(packed, fraction, at_least=at_least, cache=cache)
    return Splits(TokenStream(packed, cache=cache), TokenStream(PackedTokens(validation), cache=cache))


def scan_splits(train: Path, validation: Path | None, fraction: float, *, cache: Path) -> None:
    """Scan very many documents once for all ranks, whose `open_splits` then reads the scan from `cache`.

    Args:
        train: packed directory.
        validation: packed directory. None: `fraction` of `train`.
        fraction: as in `split_documents`.
        cache: as in `TokenStream`.
    """
    for path in filter(None, [train, validation]):
        file = path / DOCUMENTS
        if file.is_file() and is_cached(file.stat().st_size // DOCUMENT_TYPE.itemsize):
            open_splits(train, validation, fraction, cache=cache)
            return


def split_documents(
    packed: PackedTokens, fraction: float, *, at_least: int = 0, cache: Path | None = None
) -> Splits:
    """Reserve about `fraction` of the documents for validation, selected by a hash of their content.

    The selection depends on nothing else: it is the same in every run, and copies of a document are on the same side.
    If it leaves one side without a document, as for a single file, the last `fraction` of all tokens is the validation
    text instead. If either way leaves one side fewer than `at_least` tokens, the last tokens of the text are the
    validation text, as many as leave both sides enough.

    Args:
        packed: the packed directory.
        fraction: 0: no validation text.
        at_least: tokens that training and validation need each.
        cache: as in `TokenStream`.

    Raises:
        ValueError: the text has too few tokens for both.
    """
    all_documents = range(len(packed.documents))
    border = min(int(fraction * 2.0**64), 2**64 - 1)
    splits = Splits(
        train=TokenStream(packed, TextPart(all_documents, range(border, 2**64)), cache=cache),
        validation=TokenStream(packed, TextPart(all_documents, range(border)), cache=cache),
    )
    total = splits.train.num_tokens + splits.validation.num_tokens
    if fraction and total < 2 * at_least:
        raise ValueError(f"{packed.path} has {total} tokens, but training and validation need one sequence each, of "
                         f"train.sequence_length + 1 = {at_least}; {_remedies_for_short_text(total, at_least)}")
    has_enough = min(splits.train.num_tokens, splits.validation.num_tokens) >= at_least
    if not fraction or (splits.train.num_documents and splits.validation.num_documents and has_enough):
        return splits
    count = min(max(int(total * fraction), at_least), total - at_least)
    if not count:
        raise ValueError(f"data.validation_fraction = {fraction} reserves none of the {total} tokens in {packed.path} "
                         "for validation; give more text, or set it to 0")
    return _split_at(packed, total - count, cache)


def _remedies_for_short_text(total: int, window: int) -> str:
    """Return the remedies, in words, for a text of fewer than two windows; each of them is enough."""
    remedies = ["give more text"]
    if total >= 4:
        remedies.append(f"lower train.sequence_length to at most {total // 2 - 1}")
    if total >= window:
        remedies += ["give data.validation_path", "set data.validation_fraction = 0"]
    return ", or ".join(filter(None, [", ".join(remedies[:-1]), remedies[-1]]))


def _split_at(packed: PackedTokens, cut: int, cache: Path | None) -> Splits:
    """Split all tokens of a text at `cut`, which may be within a document."""
    all_documents = range(len(packed.documents))
    whole = TokenStream(packed, cache=cache)
    last_train = whole.index.number_at(cut - 1)
    first_validation = whole.index.number_at(cut)  # the same document, unless the cut is between two
    _, bounds = whole.index.span(cut, cut + 1)
    train_part = TextPart(all_documents[: last_train + 1], num_tokens=cut)
    validation_part = TextPart(all_documents[first_validation:], skip=cut - int(bounds[0]))
    return Splits(TokenStream(packed, train_part, cache=cache), TokenStream(packed, validation_part, cache=cache))
