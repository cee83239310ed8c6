"""Cut a stream into windows, the ranges of tokens that sequences are read from, and order them at random.

Text is cut into consecutive windows of T + 1 tokens. Conversations stay whole, so that an answer is read with its
question: a window starts at the start of a conversation and holds as many whole ones as fit. A conversation longer than
a window takes several, each of which starts with the last token of the window before:

    T + 1 = 8        conversations of 3, 4, 6 and 10 tokens
    window 0         0-6    two conversations; token 7 fills the sequence and is not a target
    window 1         7-12   one conversation
    window 2         13-20  tokens 0 to 7 of the last conversation
    window 3         20-22  tokens 7 to 9 of it; the targets are 8 and 9

Dimension letters: B sequences, N windows, D documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from dualpipe.train.data.token_stream import TokenStream

ORDER = "feistel 1"  # name in checkpoints of the permutation that `shuffle` computes; another one needs another name
_BLOCK = 1 << 22  # tokens of a loss mask to read at a time
_ROUNDS = 12  # of the permutation
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # increment of SplitMix64


class Span(NamedTuple):
    """Bounds of windows in a stream.

    starts: (B,) first token of each window.
    stops: (B,) end of each window. None: all windows are full.
    sources: (B,) index of each window's stream. None: there is one stream.
    """

    starts: np.ndarray
    stops: np.ndarray | None
    sources: np.ndarray | None = None

    def take(self, rows: np.ndarray | slice) -> Span:
        """Return the bounds of the windows in `rows`."""
        stops = None if self.stops is None else self.stops[rows]
        sources = None if self.sources is None else self.sources[rows]
        return Span(self.starts[rows], stops, sources)


@dataclass(frozen=True)
class TextWindows:
    """Consecutive full windows of a text. The rest at its end is not used.

    size: T + 1 tokens of a window.
    num_windows: N.
    num_left_out: always 0, because every window has targets.
    """

    size: int
    num_windows: int
    num_left_out: int = 0

    def span(self, numbers: np.ndarray) -> Span:
        """Return the bounds of windows, by their numbers (B,)."""
        return Span(numbers * self.size, None)


@dataclass(frozen=True)
class ConversationWindows:
    """Windows of whole conversations with at least one target that counts for the loss.

    starts, stops: (N,) bounds of the windows.
    num_left_out: number of windows without such a target, which are not read.
    """

    starts: np.ndarray
    stops: np.ndarray
    num_left_out: int

    @property
    def num_windows(self) -> int:
        """The number of windows."""
        return len(self.starts)

    def span(self, numbers: np.ndarray) -> Span:
        """Return the bounds of windows, by their numbers (B,). A negative number gives a window without targets."""
        stops = np.where(numbers < 0, self.starts[numbers], self.stops[numbers])
        return Span(self.starts[numbers], stops)


Windows: TypeAlias = TextWindows | ConversationWindows


def find_windows(stream: TokenStream, size: int) -> Windows:
    """Return the windows of a stream.

    Args:
        stream: the text or the conversations.
        size: T + 1 tokens of a window.
    """
    if not stream.has_loss_mask or stream.num_tokens < size:
        return TextWindows(size, stream.num_tokens // size)
    starts, stops = cut_documents(stream.document_bounds(), size)
    counts = _count_targets(stream, starts, stops)
    return ConversationWindows(starts[counts > 0], stops[counts > 0], int((counts == 0).sum()))


def choose_evaluation_windows(
    stream: TokenStream, *, sequence_length: int, batch_size: int, limit: int, rows: range | None = None
) -> list[Span]:
    """Return the bounds of the windows of every evaluation batch, spread evenly over the validation text.

    Batches are whole, and the same at every call. If there are fewer windows than a batch has sequences, there is one
    batch: the windows of text overlap, and of conversations the other sequences have no targets.

    Args:
        stream: the validation text.
        sequence_length: T; a window has T + 1 tokens.
        batch_size: sequences of the global batch.
        limit: maximum number of batches.
        rows: sequences of a batch that this rank reads. None: all.

    Raises:
        ValueError: the text is shorter than a window, or none of its targets counts for the loss.
    """
    if not limit:
        return []
    size = sequence_length + 1
    if stream.num_tokens < size:
        raise ValueError(f"the validation text has {stream.num_tokens} tokens, but a sequence needs "
                         f"train.sequence_length + 1 = {size}; give more text in data.validation_path, lower "
                         "train.sequence_length, or set train.eval_batches = 0")
    windows = find_windows(stream, size)
    total = windows.num_windows
    if not total:
        raise ValueError(f"no token of the {stream.num_documents} validation conversations counts for the loss; give "
                         "other conversations in data.validation_path, or set train.eval_batches = 0")
    if total >= batch_size:
        numbers = np.linspace(0, total - 1, min(limit, total // batch_size) * batch_size, dtype=np.int64)
        span = windows.span(numbers)
    elif isinstance(windows, TextWindows):
        span = Span(np.linspace(0, stream.num_tokens - size, batch_size, dtype=np.int64), None)
    else:
        numbers = np.arange(batch_size)
        numbers[total:] = -1
        span = windows.span(numbers)
    batch_rows = np.array(range(batch_size) if rows is None else rows, dtype=np.int64)
    return [span.take(first + batch_rows) for first in range(0, len(span.starts), batch_size)]


def cut_documents(bounds: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds (N,) of windows that hold whole documents.

    Args:
        bounds: (D + 1,) start of every document, and the end of the last one.
        size: T + 1, the maximum number of tokens in a window.
    """
    starts = []
    stops = []
    start = int(bounds[0])
    end = int(bounds[-1])
    while start < end:
        limit = min(start + size, end)
        last_bound = int(bounds[np.searchsorted(bounds, limit, side="right") - 1])  # within reach of the window
        cuts_document = last_bound <= start
        stop = limit if cuts_document else last_bound
        starts.append(start)
        stops.append(stop)
        start = stop - 1 if cuts_document else stop
    return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)


def _count_targets(stream: TokenStream, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the number of targets in each window that count for the loss, int64 (N,).

    The first token of a window is not a target.
    """
    counts = np.zeros(len(starts), dtype=np.int64)
    for begin in range(0, stream.num_tokens, _BLOCK):
        counted = begin + np.flatnonzero(stream.read_mask(begin, min(begin + _BLOCK, stream.num_tokens)))
        windows = np.searchsorted(starts, counted, side="left") - 1
        is_target = (windows >= 0) & (counted < stops[windows])
        counts += np.bincount(windows[is_target], minlength=len(starts))
    return counts


def shuffle(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images of `indices` under a random permutation of range(size), int64, in the same shape.

    Computes the permutation index by index: nothing is stored, however large it is.

    A Feistel network over pairs (left, right): each round adds to one half a hash of the other half. A round can be
    undone, so all rounds together are a bijection. The halves count modulo `left_size` and `right_size`, whose product
    is barely above the size of the permutation. An index that lands beyond the size goes through the network once more,
    until it lands inside (cycle walking). The walk follows a cycle of a bijection, so it ends, and no two indices end
    at one place.

    Example with 10 elements: the halves have sizes 4 and 3, the network permutes 0 to 11, and if it maps 7 to 11 and 11
    to 2, then the permutation maps 7 to 2.

    Args:
        indices: integers in range(size), of any shape.
        size: up to 2**62.
        seed: with `size` and `epoch`, all that the permutation depends on.
        epoch: selects one of the permutations of a seed.
    """
    left_size = math.isqrt(max(size, 1) - 1) + 1  # the square root, rounded up
    right_size = max(1, -(-size // left_size))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    places = _permute(indices.astype(np.uint64), left_size, right_size, keys)
    beyond = places >= size
    while beyond.any():
        places[beyond] = _permute(places[beyond], left_size, right_size, keys)
        beyond = places >= size
    return places.astype(np.int64)


def _permute(indices: np.ndarray, left_size: int, right_size: int, keys: np.ndarray) -> np.ndarray:
    """Apply the network, a bijection of range(left_size * right_size), to uint64 indices of any shape."""
    left, right = np.divmod(indices, np.uint64(right_size))
    for round_number, key in enumerate(keys):
        if round_number % 2:
            right = (right + _hash(left, key) % np.uint64(right_size)) % np.uint64(right_size)
        else:
            left = (left + _hash(right, key) % np.uint64(left_size)) % np.uint64(left_size)
    return left * np.uint64(right_size) + right


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the outputs of the SplitMix64 generator with seed `key` at positions `values`, uint64."""
    mixed = values * _GOLDEN + key  # arrays of uint64 wrap around
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
