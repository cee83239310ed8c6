"""Print documents of a packed directory token by token: `dualpipe data show`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from dualpipe.train.config.schema import BYTES
from dualpipe.train.data.token_stream import PackedTokens
from dualpipe.train.data.tokenizer import ByteTokenizer, read_tokenizer

COUNTED = "bold green"
UNCOUNTED = "dim"
_BORDER = "|"  # between tokens
_REPLACEMENT = "\ufffd"  # stands in decoded text for a part of a character
_MAX_TOKENS = 4  # for one character, which has up to 4 bytes in UTF-8


def show(path: str | Path, *, tokenizer: str = BYTES, first: int = 0, count: int = 1) -> None:
    """Print documents with a border between tokens. Tokens that count for the loss are in colour, or in brackets.

    Tokens that make up one character are printed as that character.

    Args:
        path: the packed directory.
        tokenizer: the tokenizer that the directory was packed with, "bytes" or as in `read_tokenizer`.
        first: number of the first document, from 0.
        count: number of documents.

    Raises:
        ValueError: the directory is incomplete, was packed with another tokenizer, or has no document `first`.
    """
    packed = PackedTokens(path)
    decode = _decoder(packed, tokenizer)
    if not 0 <= first < len(packed.documents):
        raise ValueError(f"--document {first}: {packed.path} has documents 0 to {len(packed.documents) - 1}; give one "
                         "of them")
    if count < 1:
        raise ValueError(f"--count {count}: give at least 1")
    console = Console(highlight=False, soft_wrap=True)
    for number in range(first, min(first + count, len(packed.documents))):
        shard, offset, length, _ = packed.documents[number].tolist()
        tokens = packed.shards[shard][offset : offset + length]
        mask = packed.masks[shard][offset : offset + length] if packed.masks else np.ones(length, dtype=np.uint8)
        console.print(Text(f"document {number}: {length} tokens, {int(mask.sum())} count for the loss", style="bold"))
        pieces = list(_pieces(tokens.tolist(), mask.astype(bool).tolist(), decode))
        console.print(_colour(pieces) if console.is_terminal else Text(_bracket(pieces)))


def _decoder(packed: PackedTokens, name: str) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes tokens. Raises ValueError if the directory has another tokenizer."""
    tokenizer = None if name == BYTES else read_tokenizer(name)
    if not packed.has_vocabulary_of(BYTES if tokenizer is None else tokenizer.identity):
        raise ValueError(f"--tokenizer {name}: {packed.path} was packed with the tokenizer {packed.tokenizer!r}; give "
                         "that one")
    if tokenizer is None:
        return _decode_bytes
    return partial(tokenizer.backend.decode, skip_special_tokens=False)


def _decode_bytes(tokens: Sequence[int]) -> str:
    """Return bytes as text, a character for each."""
    return "".join("<end>" if token == ByteTokenizer.end_of_document else chr(token) for token in tokens)


def _pieces(
    tokens: Sequence[int], mask: Sequence[bool], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[bool, str]]:
    """Yield the text of each token, or of the tokens that make up one character, with its loss mask."""
    begin = 0
    while begin < len(tokens):
        end = min(begin + _MAX_TOKENS, len(tokens))
        count, text = _first_piece(tokens[begin:end], mask[begin:end], decode)
        yield mask[begin], text
        begin += count


def _first_piece(
    tokens: Sequence[int], mask: Sequence[bool], decode: Callable[[Sequence[int]], str]
) -> tuple[int, str]:
    """Return how many of the first tokens make up whole characters, and their text; or else one token and its text.

    All tokens of a piece have the same loss mask.
    """
    for count in range(1, len(tokens) + 1):
        if mask[count - 1] != mask[0]:
            break
        text = decode(tokens[:count])
        if _REPLACEMENT not in text:
            return count, text
    return 1, decode(tokens[:1])


def _runs(pieces: Iterable[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    """Yield runs of tokens with the same loss mask, each as one text with borders between tokens."""
    for counts, run in groupby(pieces, key=itemgetter(0)):
        yield counts, _BORDER.join(map(itemgetter(1), run))


def _colour(pieces: Iterable[tuple[bool, str]]) -> Text:
    """Return the tokens as text in colours."""
    return Text(_BORDER).join(Text(text, style=COUNTED if counts else UNCOUNTED) for counts, text in _runs(pieces))


def _bracket(pieces: Iterable[tuple[bool, str]]) -> str:
    """Return the tokens as text, with brackets around those that count for the loss."""
    return _BORDER.join(f"[[{text}]]" if counts else text for counts, text in _runs(pieces))
