"""Stand-in for the dispatch to experts on other ranks: nothing is sent, and all ranks have the same number of tokens.

It allocates what `dualpipe.parallel.experts` allocates, for tokens that choose their experts at random, and notes the
bytes of each communication.

Example: 8 of 128 experts on 8 ranks. A token has experts on 5.3 ranks on average. The tensor to send has 8 rows for
each token, as many as there can be, of which 5.3 are sent; as many are received.

Dimension letters: those of `dualpipe.parallel.experts.dispatcher` and `two_hop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dualpipe.nn.routing.router import Router
from dualpipe.parallel.all_to_all import row_bytes_of
from dualpipe.parallel.experts.interface import DispatchSizes, HopCounts, Hops, Received


class ExpertChoice(NamedTuple):
    """Choice of a token's experts at random: `top_k` of those in `topk_group` of `n_group` groups."""

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1

    @staticmethod
    def of(gate: Router) -> ExpertChoice:
        """Return the choice of a router."""
        return ExpertChoice(gate.out_features, gate.top_k, gate.n_group, gate.topk_group)

    def expected_places(self, places: int) -> float:
        """Return how many ranks or nodes hold experts of a token on average, of `places` that share them evenly.

        The experts are in the places of `topk_group` groups alone. If a place has several groups, these are taken to be
        spread evenly over as many places as they can be in.
        """
        allowed = min(places, self.topk_group * max(1.0, places / self.n_group))
        candidates = self.num_experts * self.topk_group / self.n_group
        per_place = candidates / allowed
        # Probability that none of the experts is in a given place.
        none = prod(max(0.0, candidates - per_place - i) / (candidates - i) for i in range(self.top_k))
        return allowed * (1 - none)


class Transfer(NamedTuple):
    """Bytes that a rank sends in a communication, to all ranks together, itself included.

    rows: of hidden states or their gradients. beside: of the weights and choices of a dispatch, or of the gradients of
    weights.
    """

    kind: Literal["dispatch", "recompute", "combine", "dispatch backward", "combine backward"]
    rows: int
    beside: int = 0

    @property
    def by_node(self) -> bool:
        """True if equal rows go to all ranks with experts of a token, so that two hops need one for each node first."""
        return self.kind in ("dispatch", "recompute", "combine backward")

    @property
    def is_dispatch(self) -> bool:
        """True if the rows are those that FP8 dispatch quantizes."""
        return self.kind in ("dispatch", "recompute")


class EvenDispatcher:
    """Dispatcher of one of `ep` ranks.

    Args:
        num_experts: number of experts on all ranks.
        ep: number of ranks, 2 or more.
        nodes: number of nodes that these ranks are on, if rows are dispatched in two hops; 1: in one hop.
        n_group: number of groups of experts.
        topk_group: number of groups that the experts of a token are chosen from.

    Attributes:
        transfers: communications so far.
    """

    def __init__(self, num_experts: int, ep: int, *, nodes: int = 1, n_group: int = 1, topk_group: int = 1) -> None:
        self._num_experts = num_experts
        self._ranks = ep
        self._nodes = nodes
        self._groups = (n_group, topk_group)
        self.transfers: list[Transfer] = []
        self.dispatch = _Dispatch(self.transfers)
        self.combine = _Combine(self.transfers)

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return rows (T * D, H), weights (T * D, K) and the plan. The rows to send come first.

        Args:
            x_TH: hidden states.
            weights_TK: weights of the chosen experts.
            experts_TK: indices of the chosen experts.
        """
        num_tokens, top_k = experts_TK.shape
        choice = ExpertChoice(self._num_experts, top_k, *self._groups)
        if top_k * choice.n_group > choice.num_experts * choice.topk_group:  # the router does not use its groups
            choice = ExpertChoice(self._num_experts, top_k)
        num_rows = round(num_tokens * choice.expected_places(self._ranks))
        hops = None
        if self._nodes > 1:
            hops = _HopRows(
                first=round(num_tokens * choice.expected_places(self._nodes)),
                planned=num_tokens * min(top_k, self._nodes),
                per_node=self._ranks // self._nodes,
            )
        capacity = num_tokens * min(top_k, self._ranks)
        ids = experts_TK.index_select(0, experts_TK.new_zeros(num_rows)).int()
        received = Received(ids, self._num_experts // self._ranks, experts_TK.numel(), None)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        rows = _SendBuffer.apply(x_TH, num_rows, capacity, x_TH.dtype)
        weights = _SendBuffer.apply(weights_TK, num_rows, capacity, wide)
        return rows, weights, _EvenPlan(received, capacity, hops)

    def finish(self, rows: Tensor, plan: _EvenPlan) -> Tensor:
        """Return the hidden states (T, H): the sum of the combined rows (S, H) of each token."""
        tokens = plan.received.pairs // plan.received.ids.shape[1]
        token_S = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, token_S, rows)


class _HopRows(NamedTuple):
    """Rows of a dispatch in two hops: sent in the first, planned for it (T * B), and the ranks P of a node."""

    first: int
    planned: int
    per_node: int


class _EvenPlan(NamedTuple):
    """Plan of a dispatch: its results beside the rows, the rows of the tensor to send, and those of two hops."""

    received: Received
    capacity: int
    hops: _HopRows | None


class _SendBuffer(torch.autograd.Function):
    """Copies of tokens (T, C) to the first `num_rows` rows of a tensor of `capacity` rows in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int, capacity: int, dtype: torch.dtype) -> Tensor:
        ctx.num_tokens = len(x)
        ctx.num_rows = num_rows
        ctx.dtype = x.dtype
        x.index_select(0, _token_of_rows(x, num_rows))  # recorded with the bytes of the rows that are written
        return x.new_empty(capacity, x.shape[1], dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (gradient,) = gradients
        d_x = gradient.new_zeros(ctx.num_tokens, gradient.shape[1])
        token_S = _token_of_rows(gradient, ctx.num_rows)
        d_x.index_add_(0, token_S, gradient[: ctx.num_rows])
        return d_x.to(ctx.dtype), None, None, None


def _token_of_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return the token of each row: on meta, any."""
    return rows.new_empty(num_rows, dtype=torch.int64)


class _DispatchContext(NamedTuple):
    """Context of a dispatch for its recompute and its backward. capacity: rows of the tensor that was sent."""

    capacity: int
    weights_RK: Tensor
    received: Received


class _Dispatch:
    """Communication of rows, weights and choices to experts."""

    group = None

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def forward(self, inputs: tuple[Tensor, Tensor, _EvenPlan]) -> _Pending:
        rows, weights, plan = inputs
        ids = plan.received.ids
        num_rows = len(ids)
        beside = num_rows * (row_bytes_of(weights) + row_bytes_of(ids))
        self._transfers.append(Transfer("dispatch", num_rows * row_bytes_of(rows), beside))

        def receive() -> tuple[tuple[Any, ...], _DispatchContext]:
            first_rows = 0 if plan.hops is None else plan.hops.first
            rows_RH, weights_RK, ids_RK = _receive((rows, weights, ids), num_rows, first_rows)
            received = plan.received._replace(ids=ids_RK, sizes=_sizes(rows, num_rows, plan.hops))
            return (rows_RH, weights_RK, received), _DispatchContext(plan.capacity, weights_RK, received)

        return _Pending(receive, is_late=plan.hops is not None)

    def recompute(self, context: _DispatchContext, inputs: tuple[Tensor, Tensor, _EvenPlan]) -> _Pending:
        """Send the rows alone, as the dispatchers of `dualpipe.parallel.experts` do."""
        rows = inputs[0]
        num_rows = len(context.received.ids)
        first_rows = _first_rows(context.received)
        self._transfers.append(Transfer("recompute", num_rows * row_bytes_of(rows)))

        def receive() -> tuple[tuple[Any, ...], None]:
            (rows_RH,) = _receive((rows,), num_rows, first_rows)
            return (rows_RH, context.weights_RK, context.received), None

        return _Pending(receive, is_late=first_rows > 0)

    def backward(self, context: _DispatchContext, gradients: tuple[Tensor | None, ...]) -> _Pending:
        """Return gradients of all rows of the tensor that was sent; those of unassigned rows are never read."""
        sent = [gradient for gradient in gradients[:2] if gradient is not None]
        self._transfers.append(Transfer("dispatch backward", *(len(rows) * row_bytes_of(rows) for rows in sent)))
        results = [None if gradient is None else gradient.new_empty(context.capacity, gradient.shape[1])
                   for gradient in gradients[:2]]
        return _Pending(lambda: ((*results, None), None))


class _Combine:
    """Communication that returns the outputs of experts by one hop. Its backward takes the hops of the dispatch."""

    group = None

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def forward(self, inputs: tuple[Tensor, Received]) -> _Pending:
        rows, received = inputs
        self._transfers.append(Transfer("combine", len(rows) * row_bytes_of(rows)))
        combined = torch.empty_like(rows)
        return _Pending(lambda: ((combined,), received))

    def backward(self, context: Received, gradients: tuple[Tensor | None, ...]) -> _Pending:
        (gradient,) = gradients
        assert gradient is not None, "all outputs of experts have gradients"
        num_rows = len(gradient)
        first_rows = _first_rows(context)
        self._transfers.append(Transfer("combine backward", num_rows * row_bytes_of(gradient)))
        return _Pending(lambda: ((*_receive((gradient,), num_rows, first_rows), None), None), is_late=first_rows > 0)


class _Pending:
    """Communication whose results `receive` allocates: at once, or if `is_late` with its second part."""

    def __init__(self, receive: Callable[[], tuple[tuple[Any, ...], Any]], *, is_late: bool = False) -> None:
        self._receive: Callable[[], tuple[tuple[Any, ...], Any]] | None = receive
        self._received: tuple[tuple[Any, ...], Any] = ((), None)
        if not is_late:
            self.advance()

    def advance(self) -> None:
        """Allocate the results, once."""
        if self._receive is not None:
            self._received = self._receive()
            self._receive = None

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return the received values, and the context of the backward."""
        self.advance()
        return self._received


def _receive(sent: Sequence[Tensor], num_rows: int, first_rows: int) -> list[Tensor]:
    """Allocate `num_rows` received rows for each sent tensor, after what two hops hold until these are in order.

    first_rows: rows that the first of two hops sends, and brings; 0 for one hop.
    """
    if not first_rows:
        return _rows_like(sent, num_rows)
    sent_first = _rows_like(sent, first_rows)
    received_first = _rows_like(sent, first_rows)
    del sent_first
    forwarded = _rows_like(sent, num_rows)
    unordered = _rows_like(sent, num_rows)
    del forwarded
    received = _rows_like(sent, num_rows)
    del unordered, received_first
    return received


def _rows_like(tensors: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """Allocate tensors of `num_rows` rows as wide as these."""
    return [tensor.new_empty(num_rows, tensor.shape[1]) for tensor in tensors]


def _sizes(rows: Tensor, num_rows: int, hops: _HopRows | None) -> DispatchSizes:
    """Return the row counts of a dispatch, and with two hops the indices that repeat it.

    Two of these are slices of tensors with an entry for each row that there could be.
    """
    if hops is None:
        return DispatchSizes([num_rows], [num_rows], row_bytes_of(rows))
    counts = HopCounts([hops.first], [hops.first], [num_rows], [num_rows])
    first_rows = rows.new_empty(hops.planned, dtype=torch.int32)
    second_rows = rows.new_empty(hops.first * hops.per_node, dtype=torch.int32)
    order = rows.new_empty(num_rows, dtype=torch.int64)
    repeated = Hops(counts, first_rows[: hops.first], second_rows[:num_rows], order)
    return DispatchSizes([num_rows], [num_rows], row_bytes_of(rows), repeated)


def _first_rows(received: Received) -> int:
    """Return the rows of the first of two hops; 0 for one hop."""
    sizes = received.sizes
    assert sizes is not None, "a dispatch sets them"
    return 0 if sizes.hops is None else sum(sizes.hops.counts.first_sent)
