"""Split text into training and validation text, and choose the windows that evaluations read.

`ensure_packed` packs the text of a `[data]` path on first use. `open_splits` opens it, and selects validation documents
by a hash of their content.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualpipe.runtime.files import checksum_of
from dualpipe.train.config.schema import BYTES, TEXT_KEY, TOKENIZER
from dualpipe.train.data.document_index import TextPart, is_cached
from dualpipe.train.data.pack import FORMAT, INDEX, MASKED_FORMAT, pack
from dualpipe.train.data.sources import DOCUMENTS, find_sources
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ChatTokenizer, Tokenizer, load_tokenizer

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


def ensure_packed(
    path: str, *, tokenizer: str, cache: Path, text_key: str = TEXT_KEY, chat: bool = False, chat_template: str = "",
    end_token: str = "",
) -> Path:
    """Return the packed directory of a `[data]` path. Packs text into a directory below `cache`, on first use.

    Args:
        path: a packed directory, a file or folder of text or records, or "stdlib".
        tokenizer: "bytes", or as in `read_tokenizer`.
        cache: parent of directories that are packed here.
        text_key: as in `pack`.
        chat: pack conversations.
        chat_template: as in `ChatTokenizer`.
        end_token: as in `load_tokenizer`.

    Raises:
        ValueError: there is no text, or as `pack` does.
    """
    folder = Path(path)
    if folder.is_dir() and any((folder / name).exists() for name in (INDEX, DOCUMENTS)):
        if chat and (folder / INDEX).is_file() and not PackedTokens(folder).masks:
            raise ValueError(f"data.chat = true, but {folder} was packed as text; pack the conversations again with "
                             "`dualpipe data pack --chat`")
        return folder
    sources = find_sources([path])
    if not sources:
        raise ValueError(f"data.path = {path!r} holds no text; give a folder with files")
    loaded: Tokenizer | ChatTokenizer
    if chat:
        loaded = ChatTokenizer(tokenizer, chat_template)
    else:
        loaded = load_tokenizer(tokenizer, end_token)
    format = MASKED_FORMAT if chat else FORMAT
    digest = hashlib.sha256(f"{format}\n{loaded.identity}\n{text_key}\n".encode())
    for source in sources:  # files of the same name, size and time are taken for unchanged, without reading them
        stat = source.path.stat()
        digest.update(f"{source.path.resolve()}\0{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    target = cache / f"data-{digest.hexdigest()[:12]}"
    if not (target / INDEX).exists():
        pack(sources, loaded, target, text_key=text_key)
    return target


def scan_splits(
    train: Path, validation: Path | None, fraction: float, *, cache: Path, is_mixed: bool = False
) -> None:
    """Scan very many documents once for all ranks, whose `open_splits` then reads the scan from `cache`.

    Args:
        train: packed directory.
        validation: packed directory. None: `fraction` of `train`.
        fraction: as in `split_documents`.
        cache: as in `TokenStream`.
        is_mixed: as in `open_splits`.
    """
    paths = [train] if validation is None else [train, validation]
    try:
        counts = [json.loads((path / INDEX).read_text(encoding="utf-8"))["documents"] for path in paths]
        is_large = is_cached(max(counts))
    except (OSError, ValueError, KeyError, TypeError):
        return  # `open_splits` reports what is wrong with the index
    if is_large:
        open_splits(train, validation, fraction, cache=cache, is_mixed=is_mixed)


def open_splits(
    train: Path, validation: Path | None, fraction: float, *, at_least: int = 0, cache: Path | None = None,
    is_mixed: bool = False,
) -> Splits:
    """Open packed data.

    Args:
        train: packed directory.
        validation: packed directory. None: `fraction` of the documents of `train`.
        fraction: as in `split_documents`.
        at_least: as in `split_documents`.
        cache: as in `TokenStream`.
        is_mixed: `train` is a source of a mixture. Chat templates and ends of documents may differ from those of
            `validation`, as they do between the sources.

    Raises:
        ValueError: a directory is not complete, the two were packed with different tokenizers, or as `split_documents`
            does.
    """
    packed = PackedTokens(train)
    if validation is None:
        return split_documents(packed, fraction, at_least=at_least, cache=cache)
    packed_validation = PackedTokens(validation)
    is_same = packed_validation.has_vocabulary_of(packed) if is_mixed else (
        packed_validation.tokenizer == packed.tokenizer)
    if not is_same:
        raise ValueError(
            f"{train} was packed with the tokenizer {packed.tokenizer!r}, {validation} with "
            f"{packed_validation.tokenizer!r}; pack both with the same"
        )
    return Splits(TokenStream(packed, cache=cache), TokenStream(packed_validation, cache=cache))


def check_tokenizer(packed: PackedTokens, checkpoint: str) -> str:
    """Return a warning if a text was packed with another tokenizer than that of a checkpoint, else "".

    Args:
        packed: the text.
        checkpoint: directory of the checkpoint that the model starts from, or "".
    """
    path = Path(checkpoint, TOKENIZER)
    if not checkpoint or not path.is_file() or packed.tokenizer_file == checksum_of(path, "sha256"):
        return ""
    used = "as bytes" if packed.tokenizer == BYTES else "with another tokenizer"
    return (f"{packed.path} was packed {used}, but the model starts from a checkpoint with its own tokenizer; set "
            f"data.tokenizer = {checkpoint!r}, or pack the text with it")


def choose_evaluation_windows(
    stream: TokenStream, *, sequence_length: int, batch_size: int, limit: int, rows: range | None = None
) -> list[list[int]]:
    """Return the starts of the windows of every evaluation batch, spread evenly over the validation text.

    Batches are whole, and the same at every call. A text with fewer windows than a batch gives one batch of overlapping
    windows.

    Args:
        stream: the validation text.
        sequence_length: T; a window has T + 1 tokens.
        batch_size: sequences of the global batch.
        limit: maximum number of batches.
        rows: sequences of a batch that this rank reads. None: all.

    Raises:
        ValueError: the text is shorter than a window.
    """
    window = sequence_length + 1
    num_windows = stream.num_tokens // window
    if limit and not num_windows:
        raise ValueError(f"the validation text has {stream.num_tokens} tokens, but a sequence needs "
                         f"train.sequence_length + 1 = {window}; give more text in data.validation_path, lower "
                         "train.sequence_length, or set train.eval_batches = 0")
    if num_windows >= batch_size:
        count = min(limit, num_windows // batch_size)
        starts = np.linspace(0, num_windows - 1, count * batch_size, dtype=np.int64) * window
    else:
        count = min(limit, 1)
        starts = np.linspace(0, stream.num_tokens - window, count * batch_size, dtype=np.int64)
    return starts.reshape(count, batch_size)[:, range(batch_size) if rows is None else rows].tolist()
