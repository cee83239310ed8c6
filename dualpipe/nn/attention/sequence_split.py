"""Split of a sequence over the ranks that share it, for context parallelism.

Part of `nn`, because routers and attention need to know the tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # (start, stop) of parts of a sequence


@dataclass(frozen=True)
class SequenceSplit:
    """Tokens of a sequence that belong to rank `rank` of the `size` ranks that share it.

    The sequence is split into 2 * size consecutive chunks of nearly equal length, longer ones first. Rank r has chunks
    r and 2 * size - 1 - r: an early one, whose tokens see few others, and a late one, so that all ranks attend about
    equally much. Example: 9 tokens on 2 ranks are chunks of 3, 2, 2, 2; rank 0 has tokens 0 1 2 7 8, rank 1 tokens
    3 4 5 6.
    """

    rank: int = 0
    size: int = 1

    def token_indices(self, length: int) -> Tensor:
        """Return the indices of the rank's tokens in a sequence of `length`, ascending, int64 (S_rank,)."""
        return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in self.chunks(length)])

    def counts(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens of every rank."""
        chunks_by_rank = (replace(self, rank=rank).chunks(length) for rank in range(self.size))
        return tuple(sum(stop - start for start, stop in chunks) for chunks in chunks_by_rank)

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the rank's chunks, ascending; raise ValueError for fewer tokens than chunks."""
        if self.size == 1:
            return [(0, length)]
        num_chunks = 2 * self.size
        if length < num_chunks:
            raise ValueError(f"a sequence of {length} tokens cannot be shared by {self.size} ranks, each of which has "
                             f"two chunks of it; pass at least {num_chunks} tokens, or use fewer ranks")
        chunk_length, num_longer = divmod(length, num_chunks)
        starts = [number * chunk_length + min(number, num_longer) for number in range(num_chunks + 1)]
        return [(starts[number], starts[number + 1]) for number in (self.rank, num_chunks - 1 - self.rank)]


WHOLE = SequenceSplit()  # one rank has the whole sequence


def slice_sequence(x_BS: Tensor, parts: Iterable[tuple[int, int]]) -> Tensor:
    """Concatenate parts of a sequence, (start, stop) each; without parts return the whole. Other dimensions stay."""
    slices = [x_BS[:, start:stop] for start, stop in parts] or [x_BS]
    return torch.cat(slices, 1) if len(slices) > 1 else slices[0]
