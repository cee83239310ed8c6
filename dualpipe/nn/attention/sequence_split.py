"""The split of a sequence over the ranks that share it, for context parallelism.

Lives below the layers: routers and attention need to know which tokens a rank has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # parts of a sequence, each from one token to before another


@dataclass(frozen=True)
class SequenceSplit:
    """Which tokens of a sequence are those of rank `rank` among the `size` ranks that share it.

    The sequence is cut into 2 * size consecutive chunks, as even as can be, longer ones first, and rank r has chunks r
    and 2 * size - 1 - r: an early one, whose tokens see little, and a late one, so that all ranks attend about as much.
    Example: 9 tokens on 2 ranks are chunks of 3, 2, 2, 2; rank 0 has tokens 0 1 2 7 8, rank 1 tokens 3 4 5 6.
    """

    rank: int = 0
    size: int = 1

    def own(self, length: int) -> Tensor:
        """Indices of the rank's tokens in a sequence of `length`, ascending, int64 (S_own,)."""
        return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in self.chunks(length)])

    def counts(self, length: int) -> tuple[int, ...]:
        """How many tokens each rank has."""
        ranks = (replace(self, rank=rank).chunks(length) for rank in range(self.size))
        return tuple(sum(stop - start for start, stop in chunks) for chunks in ranks)

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """(start, stop) of the rank's chunks, ascending; ValueError for a sequence with fewer tokens than chunks."""
        if self.size == 1:
            return [(0, length)]
        if length < 2 * self.size:
            raise ValueError(f"a sequence of {length} tokens cannot be shared by {self.size} ranks, each of which has "
                             f"two chunks of it; give at least {2 * self.size} tokens, or use fewer ranks")
        each, longer = divmod(length, 2 * self.size)
        starts = [number * each + min(number, longer) for number in range(2 * self.size + 1)]
        return [(starts[number], starts[number + 1]) for number in (self.rank, 2 * self.size - 1 - self.rank)]


WHOLE = SequenceSplit()  # one rank has the whole sequence


def cut(x_BS: Tensor, parts: Iterable[tuple[int, int]]) -> Tensor:
    """Parts of a sequence, each from one token to before another, behind one another; all of it, where there are none.
    Further dimensions stay."""
    each = [x_BS[:, start:stop] for start, stop in parts] or [x_BS]
    return torch.cat(each, 1) if len(each) > 1 else each[0]
