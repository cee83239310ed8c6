"""Mixtures: choose the source of every sequence by weight, as a pure function of the sequence's number.

Sequences are numbered through the run, batch after batch. All have the same number of tokens, so a weight is a share of
the tokens. In each block of `BLOCK` sequences, every source has a fixed number of places: its weight, rounded. A random
permutation deals the places out, so shares are exact after every block, and the source of any sequence is found in
O(1).

    weights 2 : 1, BLOCK = 6        sources of a block      a b a a b a
                                    draw from that source   0 0 1 2 1 3      the next block continues with 4 and 2

If weights change during a run, a new mixture starts at that sequence, with the number of sequences drawn so far.

Dimension letters: B sequences, S sources, N places of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from dualpipe.train.data.sequences import Span, shuffle
from dualpipe.train.data.token_stream import TokenBatch, TokenStream

BLOCK = 4096  # sequences; the share of a source is rounded to a multiple of 1 / BLOCK, and is at least that
_ORDER_SEED = 0x6D6978  # keeps the order of sources independent of the orders within them


class Draws(NamedTuple):
    """Sources of sequences.

    sources: (B,) index of the source.
    draws: (B,) number of earlier sequences of that source.
    """

    sources: np.ndarray
    draws: np.ndarray


class Mixture:
    """A mixture of sources with fixed shares.

    Attributes:
        weights: weights of the sources, in the unit of the argument.
        places: (S,) places of each source in a block.

    Args:
        weights: weights of the sources, positive, in any unit.
        seed: selects the permutations.
        start: number of the first sequence that the weights apply to.
        num_drawn: sequences of each source before `start`. None: zero.
    """

    def __init__(
        self, weights: Sequence[float], seed: int, start: int = 0, num_drawn: Sequence[int] | None = None
    ) -> None:
        self.weights = tuple(weights)
        self.places = share_places(self.weights)
        self._seed = seed
        self._start = start
        self._num_drawn = np.zeros(len(self.weights), dtype=np.int64)
        if num_drawn is not None:
            self._num_drawn += np.array(num_drawn, dtype=np.int64)
        self._block = lru_cache(4)(self._deal)

    def draws(self, numbers: np.ndarray) -> Draws:
        """Return the sources of sequences, by their numbers (B,), which must not be before the start."""
        blocks, places = np.divmod(numbers - self._start, BLOCK)
        sources = np.empty_like(numbers)
        draws = np.empty_like(numbers)
        for block in np.unique(blocks).tolist():
            rows = blocks == block
            dealt = self._block(block)
            sources[rows] = dealt.sources[places[rows]]
            draws[rows] = dealt.draws[places[rows]]
        return Draws(sources, draws + self._num_drawn[sources] + blocks * self.places[sources])

    def num_drawn(self, number: int) -> list[int]:
        """Return the number of sequences of each source before sequence `number`, which is not before the start."""
        block, place = divmod(number - self._start, BLOCK)
        in_block = np.bincount(self._block(block).sources[:place], minlength=len(self.weights))
        return (self._num_drawn + block * self.places + in_block).tolist()

    def _deal(self, block: int) -> Draws:
        """Return the source of every place of a block, with the draws counted within the block (N,)."""
        cards = shuffle(np.arange(BLOCK), BLOCK, self._seed + _ORDER_SEED, block)
        sources = np.searchsorted(np.cumsum(self.places), cards, side="right")
        draws = np.empty(BLOCK, dtype=np.int64)
        for source, count in enumerate(self.places.tolist()):
            draws[sources == source] = np.arange(count)
        return Draws(sources, draws)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the mixture depends on besides the seed, as JSON."""
        return {"weights": list(self.weights), "start": self._start, "drawn": self._num_drawn.tolist()}

    def continue_from(self, state: dict[str, Any], number: int) -> Mixture:
        """Return the mixture that continues a saved one, with the weights of this one from sequence `number` on.

        Args:
            state: `state_dict` of the saved mixture.
            number: number of the next sequence.
        """
        saved = Mixture(state["weights"], self._seed, int(state["start"]), state["drawn"])
        if saved.weights == self.weights:
            return saved
        return Mixture(self.weights, self._seed, number, saved.num_drawn(number))


def share_places(weights: Sequence[float]) -> np.ndarray:
    """Return the places of each source in a block, int64 (S,): at least one, else as close to its share as possible."""
    shares = np.array(weights, dtype=np.float64) / sum(weights) * BLOCK
    places = np.maximum(1, np.floor(shares)).astype(np.int64)
    while places.sum() < BLOCK:
        places[np.argmax(shares - places)] += 1
    while places.sum() > BLOCK:
        places[np.argmax(np.where(places > 1, places - shares, -np.inf))] -= 1
    return places


def read_spans(streams: Sequence[TokenStream], span: Span, window: int, **options: Any) -> TokenBatch:
    """Read a batch of windows of several streams.

    Args:
        streams: streams by source. If `span.sources` is None, all windows are of the first.
        span: bounds of the windows.
        window: T + 1 tokens.
        options: options of `TokenStream.read_windows`.
    """
    if span.sources is None or not len(span.sources):
        return streams[0].read_windows(span.starts, window, stops=span.stops, **options)
    rows = []
    batches = []
    for source in np.unique(span.sources).tolist():
        source_rows = np.flatnonzero(span.sources == source)
        part = span.take(source_rows)
        rows.append(source_rows)
        batches.append(streams[source].read_windows(part.starts, window, stops=part.stops, **options))
    order = torch.from_numpy(np.argsort(np.concatenate(rows)))
    return TokenBatch(*(torch.cat(tensors)[order] for tensors in zip(*batches)))


def join_spans(sources: np.ndarray, spans: Sequence[Span], size: int) -> Span:
    """Merge the bounds of each source's windows into the bounds of a batch.

    Args:
        sources: (B,) source of every sequence.
        spans: for each source, the bounds of its windows, in the order of the batch.
        size: T + 1 tokens of a full window.
    """
    starts = np.empty(len(sources), dtype=np.int64)
    stops = np.empty(len(sources), dtype=np.int64)
    for source, span in enumerate(spans):
        starts[sources == source] = span.starts
        stops[sources == source] = span.starts + size if span.stops is None else span.stops
    return Span(starts, stops, sources)
