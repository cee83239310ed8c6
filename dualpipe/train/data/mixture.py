"""Mixtures: the source of every sequence of a run, by weights, as a function of the sequence's number.

Sequences are counted through the run, batch after batch. All have the same number of tokens, so a weight is a share of
the tokens. In each block of `BLOCK` sequences every source has a fixed number of places, its weight rounded, and a
random permutation deals them out: shares are exact after every block, and any sequence is found in O(1).

    weights 2 : 1, BLOCK = 6        sources of a block    a b a a b a
                                    draws of each         0 0 1 2 1 3      the next block begins with 4 and 2

Weights may change during a run: a mixture then begins at a sequence, with the draws that there have been.

Dimension letters: B sequences, S sources, N places of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from dualpipe.train.data.shuffle import shuffle
from dualpipe.train.data.token_stream import TokenBatch, TokenStream
from dualpipe.train.data.windows import Span

BLOCK = 4096  # sequences; a weight is rounded to a multiple of 1 / BLOCK of all, and to at least one
_ORDER_SEED = 0x6D6978  # apart from the seeds of the sources' own orders


class Draws(NamedTuple):
    """Where sequences come from.

    sources: (B,) number of the source.
    draws: (B,) number of sequences of that source before.
    """

    sources: np.ndarray
    draws: np.ndarray


class Mixture:
    """Sources in fixed shares.

    Attributes:
        weights: as given.
        places: (S,) places of each source in a block.

    Args:
        weights: of the sources, positive, in any unit.
        seed: selects the permutations.
        start: number of the first sequence that the weights hold for.
        drawn: sequences of each source before `start`. None: none.
    """

    def __init__(self, weights: Sequence[float], seed: int, start: int = 0, drawn: Sequence[int] | None = None) -> None:
        self.weights = tuple(weights)
        self.places = share_places(self.weights)
        self._seed = seed
        self._start = start
        self._drawn = np.array([0] * len(self.weights) if drawn is None else drawn, dtype=np.int64)
        self._block = lru_cache(4)(self._deal)

    def draws(self, numbers: np.ndarray) -> Draws:
        """Return where sequences come from, by their numbers (B,), none of them before the start."""
        blocks, places = np.divmod(numbers - self._start, BLOCK)
        sources = np.empty_like(numbers)
        draws = np.empty_like(numbers)
        for block in np.unique(blocks).tolist():
            rows = blocks == block
            dealt = self._block(block)
            sources[rows] = dealt.sources[places[rows]]
            draws[rows] = dealt.draws[places[rows]]
        return Draws(sources, draws + self._drawn[sources] + blocks * self.places[sources])

    def drawn(self, number: int) -> list[int]:
        """Return the number of sequences of each source before sequence `number`, which is not before the start."""
        block, place = divmod(number - self._start, BLOCK)
        of_block = np.bincount(self._block(block).sources[:place], minlength=len(self.weights))
        return (self._drawn + block * self.places + of_block).tolist()

    def _deal(self, block: int) -> Draws:
        """Return the source of every place of a block, and its draws of that source before within the block, (N,)."""
        cards = shuffle(np.arange(BLOCK), BLOCK, self._seed + _ORDER_SEED, block)
        sources = np.searchsorted(np.cumsum(self.places), cards, side="right")
        draws = np.empty(BLOCK, dtype=np.int64)
        for source, count in enumerate(self.places.tolist()):
            draws[sources == source] = np.arange(count)
        return Draws(sources, draws)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the mixture depends on besides the seed, as JSON."""
        return {"weights": list(self.weights), "start": self._start, "drawn": self._drawn.tolist()}

    def resumed(self, state: dict[str, Any], number: int) -> Mixture:
        """Return the mixture that goes on from a saved one with the weights of this one.

        Args:
            state: of the saved mixture. With other weights, its own hold up to sequence `number`.
            number: the next sequence.
        """
        saved = Mixture(state["weights"], self._seed, int(state["start"]), state["drawn"])
        if saved.weights == self.weights:
            return saved
        return Mixture(self.weights, self._seed, number, saved.drawn(number))


def share_places(weights: Sequence[float]) -> np.ndarray:
    """Return the places of each source in a block, int64 (S,): at least one, and as close to the weights as can be."""
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
        streams: by the numbers in `span.sources`; one, if that is None.
        span: bounds of the windows.
        window: T + 1 tokens.
        options: of `TokenStream.read_windows`.
    """
    if span.sources is None or not len(span.sources):
        return streams[0].read_windows(span.starts, window, stops=span.stops, **options)
    rows = []
    batches = []
    for source in np.unique(span.sources).tolist():
        own = np.flatnonzero(span.sources == source)
        stops = None if span.stops is None else span.stops[own]
        rows.append(own)
        batches.append(streams[source].read_windows(span.starts[own], window, stops=stops, **options))
    order = torch.from_numpy(np.argsort(np.concatenate(rows)))
    return TokenBatch(*(torch.cat(tensors)[order] for tensors in zip(*batches)))


def join_spans(sources: np.ndarray, spans: Sequence[Span], size: int) -> Span:
    """Return the bounds of a batch from those of each source's sequences in it.

    Args:
        sources: (B,) sources of the sequences.
        spans: bounds of every source's sequences, in order.
        size: T + 1, of full windows.
    """
    starts = np.empty(len(sources), dtype=np.int64)
    stops = np.empty(len(sources), dtype=np.int64)
    for source, span in enumerate(spans):
        starts[sources == source] = span.starts
        stops[sources == source] = span.starts + size if span.stops is None else span.stops
    return Span(starts, stops, sources)
