"""The ways of tokens to their experts on other ranks and back: what `dualpipe.parallel.expert` describes.

Dimension letters as there.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dualpipe import device
from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.nn.segments import Communication, Pending
from dualpipe.parallel.all_to_all import CommStream, PendingRows, row_bytes_of

# ------------------------------------------------------------------------------------------------------- the interface


class Sizes(NamedTuple):
    """What the host knows of an exchange: rows for and from each rank, and bytes of what a row consists of."""

    sent: list[int]
    received: list[int]
    row: int  # bytes of the hidden state
    weights: int
    ids: int


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

    dispatch: Communication | None  # rows, weights, plan -> rows (R, H), weights (R, K), Received
    combine: Communication | None  # rows (R, H), Received -> rows; None, both: the plan is what is `Received`

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Rows and weights to dispatch, differentiable, and the plan. An expert of -1 is unassigned."""

    def finish(self, rows: Tensor, plan: Any) -> Tensor:
        """The tokens' results (T, H) from what combine returned, differentiable."""


class LocalDispatcher:
    """The dispatcher of a rank that has all experts."""

    dispatch: Communication | None = None
    combine: Communication | None = None

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Received]:
        """See `Dispatcher`."""
        return x_TH, weights_TK, Received(experts_TK, self._num_experts, experts_TK.numel(), None)

    def finish(self, rows: Tensor, plan: Received) -> Tensor:
        """See `Dispatcher`."""
        return rows


# ---------------------------------------------------------------------------------------------------------- many ranks


class AllToAllDispatcher:
    """The dispatcher over an `AsyncAllToAll`: see `dualpipe.parallel.expert`."""

    def __init__(self, num_experts: int, stream: CommStream) -> None:
        self._ranks, self._local = stream.size, num_experts // stream.size
        under_way: deque[_PendingDispatch] = deque()
        self.dispatch: Communication | None = _Dispatch(stream, self._local, under_way)
        self.combine: Communication | None = _Combine(stream, under_way)  # type: ignore[assignment]  # never `again`

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Plan]:
        """See `Dispatcher`: rows (T * D, H) and float32 weights (T * D, K), those to send first, sorted by rank.

        Raises ValueError for operands that do not fit.
        """
        if not (x_TH.dim() == weights_TK.dim() == 2 and experts_TK.shape == weights_TK.shape == (
            x_TH.shape[0], weights_TK.shape[1])):
            raise ValueError(f"tokens (T, H), weights (T, K) and experts (T, K) are needed; got {tuple(x_TH.shape)}, "
                             f"{tuple(weights_TK.shape)} and {tuple(experts_TK.shape)}")
        experts = self._local * self._ranks
        if experts_TK.device.type == "cpu" and ((experts_TK < -1) | (experts_TK >= experts)).any():
            raise ValueError(f"experts must be between 0 and {experts - 1}, or -1 for none; "
                             f"got {experts_TK.min()} to {experts_TK.max()}")
        ranks_TK = torch.div(experts_TK, self._local, rounding_mode="floor")  # -1 stays -1
        each_G = torch.arange(self._ranks, device=experts_TK.device)
        of_rank_TKG = ranks_TK.unsqueeze(-1) == each_G
        # The ranks that a token goes to, ascending, once each; -1 elsewhere among the D places.
        if experts_TK.shape[1] >= self._ranks:
            ranks_TD = each_G.where(of_rank_TKG.any(1), -1)
        else:
            sorted_TK = ranks_TK.sort(-1).values
            ranks_TD = sorted_TK.where(sorted_TK.diff(dim=-1, prepend=sorted_TK[:, :1] - 1) != 0, -1)
        tokens, copies = sort_tokens(ranks_TD, self._ranks), ranks_TD.shape[1]
        here_TDK = ranks_TD.unsqueeze(2) == ranks_TK.unsqueeze(1)
        ids_TDK = (experts_TK - ranks_TK * self._local).unsqueeze(1).where(here_TDK, -1)
        wide_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        weights_TDK = wide_TK.unsqueeze(1).where(here_TDK, 0)
        counts = torch.stack((tokens.offs.diff(prepend=tokens.offs.new_zeros(1)), of_rank_TKG.sum((0, 1))), 1)
        rows = dispatch_tokens(x_TH, tokens, copies)
        weights = dispatch_tokens(weights_TDK.flatten(0, 1), tokens, 1)
        ids = ids_TDK.flatten(0, 1).to(torch.int32).index_select(0, tokens.order)
        return rows, weights, Plan(tokens, copies, ids, counts)

    def finish(self, rows: Tensor, plan: Plan) -> Tensor:
        """See `Dispatcher`: adds a token's rows (S, H) in the order of the ranks, in float32 at least."""
        return combine_tokens(rows, None, plan.tokens.cut(rows.shape[0]), top_k=plan.copies)


class _Dispatched(NamedTuple):
    """What dispatch's backward needs."""

    sizes: Sizes
    places: int = 0  # rows that `plan` returned: T * D
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)  # of rows and weights
    weights: Tensor | None = None  # (R, K), these two for a second time
    received: Received | None = None


class _Dispatch:
    """Communication of rows and weights to their experts."""

    def __init__(self, stream: CommStream, num_experts: int, under_way: deque[_PendingDispatch]) -> None:
        self._stream, self._num_experts, self._under_way, self.group = stream, num_experts, under_way, stream.group

    def forward(self, inputs: tuple[Tensor, Tensor, Plan] | None) -> Pending:
        pending = _PendingDispatch(self._stream, self._num_experts, inputs)
        self._under_way.append(pending)
        return pending

    def backward(self, context: _Dispatched, gradients: tuple[Tensor | None, ...] | None) -> Pending:
        sizes, places, dtypes, *_ = context
        d_rows, d_weights, _ = gradients or (None, None, None)
        pending = PendingRows(self._stream, besides=(None,))
        # The gradients have the shapes of what `plan` returned; rows past those that were sent are unassigned.
        pending.send(d_rows, sizes.row, sizes.received, sizes.sent, dtypes[0], places)
        pending.send(d_weights, sizes.weights, sizes.received, sizes.sent, dtypes[1], places)
        return pending

    def again(self, context: _Dispatched, inputs: tuple[Tensor, Tensor, Plan] | None) -> Pending:
        """The rows alone: how many, their weights and their choices are known from the first time."""
        sizes = context.sizes
        pending = PendingRows(self._stream, besides=(context.weights, context.received))
        rows = None if inputs is None else inputs[0][: sum(sizes.sent)]
        pending.send(rows, sizes.row, sizes.sent, sizes.received, context.dtypes[0])
        return pending


class _PendingDispatch(PendingRows):
    """A dispatch under way: the numbers of rows first, then the rows.

    A rank without inputs sends none, and takes in as bytes what the others send.
    """

    def __init__(self, stream: CommStream, num_experts: int, inputs: tuple[Tensor, Tensor, Plan] | None) -> None:
        super().__init__(stream)
        self._num_experts, self._inputs = num_experts, inputs
        self.sizes: Sizes | None = None  # known when rows are under way
        # How many rows the other ranks get and what is in one, for them and the host, which must know.
        with stream.beside(self._made, None if inputs is None else inputs[2].counts):
            both = torch.zeros(2, stream.size, 5, dtype=torch.int64, device=stream.device)  # sent, received
            if inputs is not None:
                rows, weights, plan = inputs
                both[0, :, :2] = plan.counts
                for column, matrix in enumerate((rows, weights, plan.ids), 2):
                    both[0, :, column].fill_(row_bytes_of(matrix))
            each = [1] * stream.size
            self._counts, self._told = both, stream.all_to_all.start(both[1], both[0], each, each)
            self._copied: device.Event | None = None
            if stream.after(self._told) is not None:
                self._counts = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
                self._counts.copy_(both, non_blocking=True)
                self._copied = device.record(stream.device)
        if stream.device.type == "cpu":
            self.advance()  # the host computes, so rows must be on their way before it does

    def advance(self) -> None:
        """Send the rows, once it is known how many; the host waits for that."""
        if self.sizes is not None:
            return
        if self._copied is None:
            self._told.wait()
        else:
            self._copied.synchronize()  # orders: the copy, then the host, which alone waits here
        sent, received = self._counts.tolist()  # the records for and from each rank
        told = {tuple(record[2:]) for record in (*sent, *received)} - {(0, 0, 0)}  # nothing from one without inputs
        if len(told) > 1:
            raise ValueError(f"the ranks' rows consist of different numbers of bytes (hidden state, weights, choices): "
                             f"{sorted(told)}; give the layer the same sizes and dtypes everywhere")
        row, weight, ids = told.pop() if told else (0, 0, 0)
        sizes = Sizes([record[0] for record in sent], [record[0] for record in received], row, weight, ids)
        self.sizes, self._pairs, total = sizes, sum(record[1] for record in received), sum(sizes.sent)
        rows = packed = dtype = None
        if self._inputs is not None:
            rows, weights, plan = self._inputs
            rows, dtype = rows[:total], torch.uint8
            with self._stream.beside(self._made, weights, plan.ids):
                packed = torch.cat((weights[:total].view(torch.int32), plan.ids[:total]), 1)
        self.send(rows, sizes.row, sizes.sent, sizes.received, dtype)
        self.send(packed, sizes.weights + sizes.ids, sizes.sent, sizes.received, dtype)

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Rows, weights and `Received`, and what the way back needs."""
        self.advance()
        rows_RH, packed = self.receive()
        sizes = self.sizes
        assert sizes is not None
        if self._inputs is None:
            return (None, None, None), _Dispatched(sizes)
        (rows, weights, _), self._inputs = self._inputs, None  # what was sent may be freed
        weights_RK, ids_RK = (  # copied: a part of one row has a stride that a wider dtype cannot have
            part.clone(memory_format=torch.contiguous_format)
            for part in packed.split((sizes.weights, sizes.ids), 1)
        )
        received = Received(ids_RK.view(torch.int32), self._num_experts, self._pairs, sizes)
        weights_RK = weights_RK.view(weights.dtype)
        context = _Dispatched(sizes, rows.shape[0], (rows.dtype, weights.dtype), weights_RK, received)
        return (rows_RH.view(rows.dtype), weights_RK, received), context


class _Combine:
    """Communication of rows back to where they came from."""

    def __init__(self, stream: CommStream, under_way: deque[_PendingDispatch]) -> None:
        self._stream, self._under_way, self.group = stream, under_way, stream.group

    def forward(self, inputs: tuple[Tensor, Received] | None) -> Pending:
        rows, received = inputs or (None, None)
        # Of the dispatch that this answers, the oldest without an answer: a rank without inputs has nothing else to go
        # by, and one with inputs passes by those that an exception left over.
        sizes = self._under_way.popleft().sizes
        while received is not None and sizes is not received.sizes:
            sizes = self._under_way.popleft().sizes
        assert sizes is not None, "its dispatch has not got through"
        if rows is not None and (rows.shape[0], row_bytes_of(rows)) != (sum(sizes.received), sizes.row):
            raise ValueError(f"combine takes one row of {sizes.row} bytes for each of {sum(sizes.received)} received "
                             f"ones; got {tuple(rows.shape)} in {rows.dtype}: keep shape and dtype")
        dtype = None if rows is None else rows.dtype
        pending = PendingRows(self._stream, context=(sizes, dtype))
        pending.send(rows, sizes.row, sizes.received, sizes.sent, dtype)
        return pending

    def backward(
        self, context: tuple[Sizes, torch.dtype | None], gradients: tuple[Tensor | None] | None
    ) -> Pending:
        (sizes, dtype), (d_rows,) = context, gradients or (None,)
        pending = PendingRows(self._stream, besides=(None,))
        pending.send(d_rows, sizes.row, sizes.sent, sizes.received, dtype)
        return pending
