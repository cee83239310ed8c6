"""The ways of tokens to their experts on other ranks and back: what `dualpipe.parallel.expert` describes.

Dimension letters as there.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.nn.segments import Communication, Pending
from dualpipe.parallel.all_to_all import Counts, Flight, Landing, Sizes, Wire, agreed_sizes, row_bytes_of

# ------------------------------------------------------------------------------------------------------- the interface


class Plan(NamedTuple):
    """Where a rank's own tokens go."""

    tokens: SortedTokens  # of (T, D) choices among ranks: the rows to send, sorted by rank
    copies: int  # D
    ids: Tensor  # (T * D, K) int32, sorted: a row's experts as its rank numbers them, -1 for those that are elsewhere
    counts: Tensor  # (G, 2) int64: rows, and (row, expert) pairs, for each rank


class Received(NamedTuple):
    """What a rank's experts got."""

    ids: Tensor  # (R, K): a row's experts on this rank, -1 for those that are elsewhere
    num_experts: int  # on this rank
    pairs: int  # M
    sizes: Sizes | None  # None without other ranks

    def sort(self) -> SortedTokens:
        """The rows by expert, for `GroupedLinear`: M of them, so that nothing past the last end is computed."""
        return sort_tokens(self.ids, self.num_experts).cut(self.pairs)


class Dispatcher(Protocol):
    """The ways of one layer's tokens to their experts and back."""

    communicates: bool  # whether there is any other rank
    dispatch: Communication  # rows, weights, plan -> rows (R, H), weights (R, K), Received
    combine: Communication  # rows (R, H), Received -> rows

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Rows and weights to dispatch, differentiable, and the plan. An expert of -1 is nobody."""

    def finish(self, rows: Tensor, plan: Any) -> Tensor:
        """The tokens' results (T, H) from what combine returned, differentiable."""


# ------------------------------------------------------------------------------------------------------------ one rank


class Done:
    """A communication that has nothing to wait for."""

    def __init__(self, results: tuple[Any, ...]) -> None:
        self._results = results

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        return self._results, None


class Alone:
    """The dispatcher of a rank that has all experts."""

    communicates = False

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self.dispatch, self.combine = _AloneDispatch(), _AloneCombine()

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Received]:
        """See `Dispatcher`."""
        return x_TH, weights_TK, Received(experts_TK, self._num_experts, experts_TK.numel(), None)

    def finish(self, rows: Tensor, plan: Received) -> Tensor:
        """See `Dispatcher`."""
        return rows


class _AloneDispatch:
    group = None

    def forward(self, inputs: tuple[Tensor, Tensor, Received] | None) -> Pending:
        return Done(inputs or (None, None, None))

    def backward(self, context: None, gradients: tuple[Tensor | None, ...] | None) -> Pending:
        return Done(gradients or (None, None, None))


class _AloneCombine:
    group = None

    def forward(self, inputs: tuple[Tensor, Received] | None) -> Pending:
        return Done(inputs[:1] if inputs else (None,))

    def backward(self, context: None, gradients: tuple[Tensor | None] | None) -> Pending:
        return Done((*(gradients or (None,)), None))


# ---------------------------------------------------------------------------------------------------------- many ranks


class AllToAllDispatcher:
    """The dispatcher over an `AllToAll`; see the top of this file."""

    communicates = True

    def __init__(self, num_experts: int, wire: Wire) -> None:
        self._ranks, self._local = wire.size, num_experts // wire.size
        under_way: deque[_Dispatching] = deque()
        self.dispatch, self.combine = _Dispatch(wire, self._local, under_way), _Combine(wire, under_way)

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Plan]:
        """See `Dispatcher`: rows (T * D, H) and float32 weights (T * D, K), those to send first, sorted by rank.

        Raises ValueError for operands that do not fit.
        """
        self._check(x_TH, weights_TK, experts_TK)
        ranks_TK = torch.div(experts_TK, self._local, rounding_mode="floor")  # -1 stays -1
        of_rank_TKG = ranks_TK.unsqueeze(-1) == torch.arange(self._ranks, device=experts_TK.device)
        ranks_TD = _distinct(ranks_TK, of_rank_TKG)
        tokens, copies = sort_tokens(ranks_TD, self._ranks), ranks_TD.shape[1]
        here_TDK = ranks_TD.unsqueeze(2) == ranks_TK.unsqueeze(1)
        ids_TDK = (experts_TK - ranks_TK * self._local).unsqueeze(1).where(here_TDK, -1)
        weights_TDK = _at_least_float32(weights_TK).unsqueeze(1).where(here_TDK, 0)
        counts = torch.stack((tokens.offs.diff(prepend=tokens.offs.new_zeros(1)), of_rank_TKG.sum((0, 1))), 1)
        rows = dispatch_tokens(x_TH, tokens, copies)
        weights = dispatch_tokens(weights_TDK.flatten(0, 1), tokens, 1)
        ids = ids_TDK.flatten(0, 1).to(torch.int32).index_select(0, tokens.order)
        return rows, weights, Plan(tokens, copies, ids, counts)

    def finish(self, rows: Tensor, plan: Plan) -> Tensor:
        """See `Dispatcher`: adds a token's rows (S, H) in the order of the ranks, in float32 at least."""
        return combine_tokens(rows, None, plan.tokens.cut(rows.shape[0]), top_k=plan.copies)

    def _check(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> None:
        if not (x_TH.dim() == weights_TK.dim() == 2 and experts_TK.shape == weights_TK.shape == (
            x_TH.shape[0], weights_TK.shape[1])):
            raise ValueError(f"tokens (T, H), weights (T, K) and experts (T, K) are needed; got {tuple(x_TH.shape)}, "
                             f"{tuple(weights_TK.shape)} and {tuple(experts_TK.shape)}")
        experts = self._local * self._ranks
        if experts_TK.device.type == "cpu" and ((experts_TK < -1) | (experts_TK >= experts)).any():
            raise ValueError(f"experts must be between 0 and {experts - 1}, or -1 for none; "
                             f"got {experts_TK.min()} to {experts_TK.max()}")


def _distinct(ranks_TK: Tensor, of_rank_TKG: Tensor) -> Tensor:
    """The ranks that each token goes to, ascending, once each; -1 elsewhere among the D = min(K, G) places."""
    if of_rank_TKG.shape[1] >= of_rank_TKG.shape[2]:
        each_G = torch.arange(of_rank_TKG.shape[2], device=ranks_TK.device)
        return each_G.where(of_rank_TKG.any(1), -1)
    sorted_TK = ranks_TK.sort(-1).values
    return sorted_TK.where(sorted_TK.diff(dim=-1, prepend=sorted_TK[:, :1] - 1) != 0, -1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Dispatch:
    """Communication of rows and weights to their experts."""

    def __init__(self, wire: Wire, num_experts: int, under_way: deque[_Dispatching]) -> None:
        self._wire, self._num_experts, self._under_way, self.group = wire, num_experts, under_way, wire.group

    def forward(self, inputs: tuple[Tensor, Tensor, Plan] | None) -> Pending:
        pending = _Dispatching(self._wire, self._num_experts, inputs)
        self._under_way.append(pending)
        return pending

    def backward(self, context: _Dispatched, gradients: tuple[Tensor | None, ...] | None) -> Pending:
        sizes, dtypes = context.sizes, context.dtypes
        d_rows, d_weights, _ = gradients or (None, None, None)
        flight = Flight(self._wire, self._wire.mark())
        # The gradients have the shapes of what `plan` returned; rows past those that were sent are nobody's.
        flight.add(d_rows, sizes.row, sizes.received, sizes.sent, room=context.places)
        flight.add(d_weights, sizes.weights, sizes.received, sizes.sent, room=context.places)
        return Landing(flight, (*dtypes, None), None)

    def again(self, context: _Dispatched, inputs: tuple[Tensor, Tensor, Plan] | None) -> Pending:
        """The rows alone: how many, their weights and their choices are known from the first time."""
        sizes, flight = context.sizes, Flight(self._wire, self._wire.mark())
        flight.add(None if inputs is None else inputs[0][: sum(sizes.sent)], sizes.row, sizes.sent, sizes.received)
        return _Again(flight, context)


class _Again:
    """The rows of a dispatch under way for a second time."""

    def __init__(self, flight: Flight, context: _Dispatched) -> None:
        self._landing, self._known = Landing(flight, context.dtypes[:1], None), (context.weights, context.received)

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        rows, _ = self._landing.wait()
        return (*rows, *self._known), None


class _Dispatched(NamedTuple):
    """What dispatch's backward needs."""

    sizes: Sizes
    places: int  # rows that `plan` returned: T * D
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    weights: Tensor | None = None  # (R, K), these two for a second time
    received: Received | None = None


class _Dispatching:
    """Dispatch under way: the numbers of rows first, then the rows.

    A rank without inputs sends none, and takes in as bytes what the others send.
    """

    def __init__(self, wire: Wire, num_experts: int, inputs: tuple[Tensor, Tensor, Plan] | None) -> None:
        self._wire, self._num_experts, self._inputs = wire, num_experts, inputs
        self._flight: Flight | None = None
        self.sizes: Sizes | None = None  # known when rows are under way
        self._made = wire.mark()
        counts, row = None, (0, 0, 0)
        if inputs is not None:
            rows, weights, plan = inputs
            counts, row = plan.counts, (row_bytes_of(rows), row_bytes_of(weights), row_bytes_of(plan.ids))
        self._counts = Counts(wire, counts, row, self._made)
        if wire.device.type == "cpu":
            self.advance()  # the host computes, so rows must be on their way before it does

    def advance(self) -> None:
        if self._flight is not None:
            return
        sent, received = self._counts.read()
        sizes = self.sizes = agreed_sizes(sent, received)
        self._pairs, total = sum(record[1] for record in received), sum(sizes.sent)
        rows = packed = None
        if self._inputs is not None:
            rows, weights, plan = self._inputs
            rows = rows[:total]
            with self._wire.beside(self._made, weights, plan.ids):
                packed = torch.cat((weights[:total].view(torch.int32), plan.ids[:total]), 1)
        self._flight = Flight(self._wire, self._made)
        self._flight.add(rows, sizes.row, sizes.sent, sizes.received)
        self._flight.add(packed, sizes.weights + sizes.ids, sizes.sent, sizes.received)

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        self.advance()
        rows_RH, packed = self._flight.land()
        if self._inputs is None:
            return (None, None, None), _Dispatched(self.sizes, 0, (None, None))
        (rows, weights, _), self._inputs = self._inputs, None  # what was sent may be freed
        weights_RK, ids_RK = (  # copied: a part of one row has a stride that a wider dtype cannot have
            part.clone(memory_format=torch.contiguous_format)
            for part in packed.split((self.sizes.weights, self.sizes.ids), 1)
        )
        received = Received(ids_RK.view(torch.int32), self._num_experts, self._pairs, self.sizes)
        weights_RK = weights_RK.view(weights.dtype)
        context = _Dispatched(self.sizes, rows.shape[0], (rows.dtype, weights.dtype), weights_RK, received)
        return (rows_RH.view(rows.dtype), weights_RK, received), context


class _Combine:
    """Communication of rows back to where they came from."""

    def __init__(self, wire: Wire, under_way: deque[_Dispatching]) -> None:
        self._wire, self._under_way, self.group = wire, under_way, wire.group

    def forward(self, inputs: tuple[Tensor, Received] | None) -> Pending:
        rows, received = inputs or (None, None)
        sizes = self._sizes(received)
        if rows is not None and (rows.shape[0], row_bytes_of(rows)) != (sum(sizes.received), sizes.row):
            raise ValueError(f"combine takes one row of {sizes.row} bytes for each of {sum(sizes.received)} received "
                             f"ones; got {tuple(rows.shape)} in {rows.dtype}: keep shape and dtype")
        flight, dtype = Flight(self._wire, self._wire.mark()), None if rows is None else rows.dtype
        flight.add(rows, sizes.row, sizes.received, sizes.sent)
        return Landing(flight, (dtype,), (sizes, dtype))

    def backward(
        self, context: tuple[Sizes, torch.dtype | None], gradients: tuple[Tensor | None] | None
    ) -> Pending:
        (sizes, dtype), (d_rows,) = context, gradients or (None,)
        flight = Flight(self._wire, self._wire.mark())
        flight.add(d_rows, sizes.row, sizes.sent, sizes.received)
        return Landing(flight, (dtype, None), None)

    def _sizes(self, received: Received | None) -> Sizes:
        """Those of the dispatch that this combine answers: the oldest without an answer.

        A rank without inputs has nothing else to go by. One with inputs passes by those that an exception left over.
        """
        dispatching = self._under_way.popleft()
        while received is not None and dispatching.sizes is not received.sizes:
            dispatching = self._under_way.popleft()
        return dispatching.sizes
