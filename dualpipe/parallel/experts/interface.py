"""Interface of a dispatcher, which sends one layer's tokens to their experts and brings the outputs back.

Dimension letters: T tokens, K experts per token, R received rows, M received (row, expert) pairs, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.nn.segments import Communication


class HopCounts(NamedTuple):
    """Row counts of a dispatch in two hops, on the host, for each rank of the group: 0 for ranks outside of a hop."""

    first_sent: list[int]
    first_received: list[int]
    second_sent: list[int]
    second_received: list[int]


class Hops(NamedTuple):
    """Dispatch in two hops, to repeat it. See `dualpipe.parallel.experts.two_hop`, with the dimension letters."""

    counts: HopCounts
    first_rows: Tensor  # (A,): sent row a of the first hop is row first_rows[a] of the plan
    second_rows: Tensor  # (C,): sent row c of the second hop is received row second_rows[c] of the first hop
    order: Tensor  # (R,): row r of the experts is received row order[r] of the second hop


class DispatchSizes(NamedTuple):
    """Row counts of a dispatch and its combine, on the host."""

    sent: list[int]  # rows for each rank
    received: list[int]  # rows from each rank
    row_bytes: int  # of a hidden state, before it is quantized
    hops: Hops | None = None  # of a dispatch in two hops


class Received(NamedTuple):
    """Rows that a rank received for its experts."""

    ids: Tensor  # (R, K): a row's experts on this rank, -1 for those on other ranks
    num_experts: int  # on this rank
    pairs: int  # M
    sizes: DispatchSizes | None  # None without other ranks
    quantized: QuantizedRows | None = None  # the rows, if they were dispatched in FP8


class Dispatcher:
    """Dispatch of one layer's tokens to their experts, and the combine. This base class has all experts on one rank.

    dispatch and combine are None without communication; the plan is then a `Received`. Pass the rows that combine
    returns to `finish` alone: it gives all rows of a token the same gradient, which a backward by two hops relies on.
    """

    dispatch: Communication | None = None  # rows, weights, plan -> rows (R, H), weights (R, K), Received
    combine: Communication | None = None  # rows (R, H), Received -> rows

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return rows and weights to dispatch, differentiable, and the plan. An expert of -1 is unassigned."""
        return x_TH, weights_TK, Received(experts_TK, self._num_experts, experts_TK.numel(), None)

    def finish(self, rows: Tensor, plan: Any) -> Tensor:
        """Return the outputs of the tokens (T, H) from the rows that combine returned, differentiable."""
        return rows


class LocalDispatcher(Dispatcher):
    """Dispatcher that runs a layer on one rank alone, to check it; its local experts stand in for all others."""

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return rows, weights and the plan like `Dispatcher`; expert E runs as E modulo the number of local ones."""
        local_TK = experts_TK.remainder(self._num_experts).where(experts_TK >= 0, -1)
        return super().plan(x_TH, weights_TK, local_TK)
