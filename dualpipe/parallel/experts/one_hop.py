"""Dispatch and combine by one all-to-all each: a row goes directly from the rank of its token to that of its experts.

`dualpipe.parallel.experts.dispatcher` has an overview, with the dimension letters.

Routing weights and choices are sent side by side, in an exchange of their own beside that of the rows. A single one for
all would need a copy of the rows at both ends: over gloo, with 512 to 4,096 rows on 2 and 4 ranks, it took 1.2 to 4
times as long as the two.

Rows can be sent in FP8: one exchange sends the elements, another their scales packed with the routing weights. Received
rows are returned twice: quantized, for GEMMs in FP8, and dequantized, as the tensor that has a gradient. Method:
DeepSeek-V3 (arXiv:2412.19437, section 3.3), which also keeps outputs and gradients in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import ROW_FORMATS, dequantize_rows, quantize_rows
from dualpipe.kernels.routing import find_destinations
from dualpipe.nn.segments import Pending
from dualpipe.parallel.all_to_all import CommStream, PendingRows, gradient_rows, row_bytes_of
from dualpipe.parallel.experts.interface import Dispatcher, DispatchSizes, Received
from dualpipe.runtime import device

SCALES = {block: format.scale for block, format in ROW_FORMATS.items()}  # scale dtype by block size


class NodeRows(NamedTuple):
    """Rows for nodes, sorted by node, each node's in the order of their tokens; see `two_hop` for the letters."""

    rows: Tensor  # (T * B,): a row of the plan with the same hidden state
    weights: Tensor  # (T * B, K): all weights of the token
    ids: Tensor  # (T * B, K) int32: a row's expert ids on its node, -1 for experts elsewhere


class DispatchPlan(NamedTuple):
    """Destination ranks and experts of a rank's tokens."""

    tokens: SortedTokens  # one for each (token, destination rank) pair: the rows to send, sorted by rank
    copies: int  # D
    ids: Tensor  # (T * D, K) int32, sorted: a row's local expert ids on its rank, -1 for experts elsewhere
    counts: Tensor  # (G, 2) int64: rows, and (row, expert) pairs, for each rank; two hops append more columns
    node_rows: NodeRows | None = None  # with two hops


class AllToAllDispatcher(Dispatcher):
    """Dispatcher over an `AllToAll`."""

    def __init__(self, num_experts: int, stream: CommStream, fp8_rows: int | None = None) -> None:
        super().__init__(num_experts)
        self._ranks = stream.size
        self._local = num_experts // stream.size
        self.dispatch = Dispatch(stream, self._local, fp8_rows)
        self.combine = Combine(stream)  # type: ignore[assignment]  # `recompute` is never called

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, DispatchPlan]:
        """Return rows (T * D, H), float32 or wider weights (T * D, K) and the plan.

        The rows to send come first, sorted by rank; the rest is unassigned. Raises ValueError for operands of wrong
        shapes and, on the CPU, for experts out of range.
        """
        if not (x_TH.dim() == weights_TK.dim() == 2 and experts_TK.shape == weights_TK.shape == (
            x_TH.shape[0], weights_TK.shape[1])):
            raise ValueError(f"got tokens, weights and experts of shapes {tuple(x_TH.shape)}, "
                             f"{tuple(weights_TK.shape)} and {tuple(experts_TK.shape)}, expected (T, H), (T, K) and "
                             "(T, K); give one row of each for every token")
        if experts_TK.device.type == "cpu" and ((experts_TK < -1) | (experts_TK >= self._num_experts)).any():
            raise ValueError(f"experts must be between 0 and {self._num_experts - 1}, or -1 for none; "
                             f"got {experts_TK.min()} to {experts_TK.max()}")
        destinations = find_destinations(experts_TK, weights_TK, self._ranks, self._local)
        tokens = sort_tokens(destinations.ranks, self._ranks)
        copies = destinations.ranks.shape[1]
        rows = dispatch_tokens(x_TH, tokens, copies)
        weights = dispatch_tokens(destinations.weights.flatten(0, 1), tokens, 1)
        ids = destinations.local_experts.flatten(0, 1).index_select(0, tokens.order)
        plan = DispatchPlan(tokens, copies, ids, destinations.counts)
        return rows, weights, self._with_node_rows(plan, weights_TK.detach(), experts_TK, destinations.ranks)

    def _with_node_rows(
        self, plan: DispatchPlan, weights_TK: Tensor, experts_TK: Tensor, ranks_TD: Tensor
    ) -> DispatchPlan:
        """Return the plan as it is: one hop has no rows for nodes."""
        return plan

    def finish(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Sum each token's rows (S, H) in rank order, in float32 or wider; returns (T, H)."""
        return combine_tokens(rows, None, plan.tokens.cut(rows.shape[0]), top_k=plan.copies)


class DispatchContext(NamedTuple):
    """Context of a dispatch for its recompute and its backward."""

    sizes: DispatchSizes
    num_plan_rows: int  # T * D
    width: int  # H
    dtype: torch.dtype  # of the rows
    weights_RK: Tensor
    received: Received


class Dispatch:
    """Communication of rows and weights to their experts."""

    def __init__(self, stream: CommStream, num_experts: int, fp8_rows: int | None) -> None:
        self._stream = stream
        self._num_experts = num_experts
        self._fp8_rows = fp8_rows
        self.group = stream.group

    def forward(self, inputs: tuple[Tensor, Tensor, DispatchPlan]) -> Pending:
        pending = self._start(inputs)
        if self._stream.device.type == "cpu":
            pending.start_rows()  # the engine would do so only after the host has computed other work
        return pending

    def _start(self, inputs: tuple[Tensor, Tensor, DispatchPlan]) -> PendingDispatch:
        return PendingDispatch(self._stream, self._num_experts, inputs, self._fp8_rows)

    def backward(self, context: DispatchContext, gradients: tuple[Tensor | None, ...]) -> Pending:
        sizes = context.sizes
        weights_RK = context.weights_RK
        shape = (sum(sizes.received), context.width)
        d_rows_RH = gradient_rows(gradients[0], shape, context.dtype, self._stream.device)
        weights_shape = (shape[0], weights_RK.shape[1])
        d_weights_RK = gradient_rows(gradients[1], weights_shape, weights_RK.dtype, self._stream.device)
        pending = PendingRows(self._stream, extra=(None,))
        # The results have the shapes of the plan's rows and weights; rows that were not sent are unassigned.
        pending.send(d_rows_RH, sizes.received, sizes.sent, capacity=context.num_plan_rows)
        pending.send(d_weights_RK, sizes.received, sizes.sent, capacity=context.num_plan_rows)
        return pending

    def recompute(self, context: DispatchContext, inputs: tuple[Tensor, Tensor, DispatchPlan]) -> Pending:
        """Send the rows alone: row counts, weights and choices are known from the forward."""
        sizes = context.sizes
        rows_SH = inputs[0][: sum(sizes.sent)]
        if self._fp8_rows is None:
            pending = PendingRows(self._stream, extra=(context.weights_RK, context.received))
            return pending.send(rows_SH, sizes.sent, sizes.received)
        return PendingFp8Rows(self._stream, self._fp8_rows, rows_SH, sizes.sent, sizes.received,
                              context.weights_RK, context.received)


class PendingDispatch(PendingRows):
    """Dispatch in flight: first the row counts, then the rows, with weights and choices as bytes beside them."""

    def __init__(
        self, stream: CommStream, num_experts: int, inputs: tuple[Tensor, Tensor, DispatchPlan], fp8_rows: int | None
    ) -> None:
        super().__init__(stream)
        self._num_experts = num_experts
        self._fp8_rows = fp8_rows
        self._inputs: tuple[Tensor, Tensor, DispatchPlan] | None = inputs
        self._sizes: DispatchSizes | None = None  # known once the rows are sent
        rows, weights, plan = inputs
        row_format = _packed_format(rows, weights, plan.ids, fp8_rows)
        # (2, G, 3), sent and received: for each rank the number of rows and of (row, expert) pairs, and the row format;
        # two hops have more numbers before the format.
        columns = plan.counts.shape[1]
        with stream.beside(self._ready, plan.counts):
            records = torch.empty(2, stream.size, columns + 1, dtype=torch.int64, device=plan.counts.device)
            records[0, :, :columns] = plan.counts
            records[0, :, columns].fill_(row_format)
            ones = [1] * stream.size
            self._records = records
            self._received_records = records[1]  # on the device
            self._records_exchange = stream.start(records[1], records[0], ones, ones)
            self._copied: device.Event | None = None
            if self._records_exchange[0] is None:  # on a device
                self._records, self._copied = device.to_host(records)

    def advance(self) -> None:
        """Send the rows, unless that was done."""
        self.start_rows()

    def start_rows(self) -> None:
        """Start to send the rows, once; the host waits for the row counts."""
        if self._sizes is not None:
            return
        assert self._inputs is not None, "inputs are kept until wait"
        if self._copied is None:
            self._stream.wait(self._records_exchange)
        else:
            self._copied.synchronize()  # orders: the copy, then the host; no stream waits
        sent, received = self._records.tolist()
        formats = {record[-1] for record in (*sent, *received)}
        if len(formats) > 1:
            raise ValueError("the ranks' rows have different formats (bytes of hidden state, weights and choices; FP8 "
                             f"format or 0): {sorted(map(_unpacked_format, formats))}; give the layer the same sizes, "
                             "dtypes and fp8_rows everywhere")
        row_bytes = row_bytes_of(self._inputs[0])
        self._pairs = sum(record[1] for record in received)
        self._sizes = self._send_rows(
            DispatchSizes([record[0] for record in sent], [record[0] for record in received], row_bytes),
            sent, received)

    def _send_rows(
        self, sizes: DispatchSizes, sent: list[list[int]], received: list[list[int]]
    ) -> DispatchSizes:
        """Send the rows and return the sizes. sent, received: for each rank the record of its rows, see `__init__`."""
        assert self._inputs is not None, "inputs are kept until wait"
        rows, weights, plan = self._inputs
        total = sum(sizes.sent)
        rows_SH, packed = self._packed_rows(rows[:total], weights[:total], plan.ids[:total])
        self.send(rows_SH, sizes.sent, sizes.received)
        self.send(packed, sizes.sent, sizes.received)
        return sizes

    def _packed_rows(self, rows_SH: Tensor, weights_SK: Tensor, ids_SK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows to send, and their weights, choices and FP8 scales as bytes side by side."""
        with self._stream.beside(self._ready, rows_SH, weights_SK, ids_SK):
            if self._fp8_rows is None:
                parts = [weights_SK.view(torch.int32), ids_SK.view(torch.int32)]
                return rows_SH, torch.cat(parts, 1).view(torch.uint8)
            elements, scales = quantize_rows(rows_SH, self._fp8_rows)
            return elements, torch.cat([part.view(torch.uint8) for part in (weights_SK, ids_SK, scales)], 1)

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return rows, weights and `Received`, and the context."""
        self.advance()
        rows_RH, packed = self.receive()
        sizes = self._sizes
        inputs = self._inputs
        assert sizes is not None and inputs is not None, "advance sets the sizes"
        self._inputs = None  # frees the memory of sent rows
        rows = inputs[0]
        weights_RK, ids_RK, scales = self._unpacked(packed, inputs)
        received = Received(ids_RK, self._num_experts, self._pairs, sizes)
        context = DispatchContext(sizes, len(rows), rows.shape[1], rows.dtype, weights_RK, received)
        if self._fp8_rows is None:
            return (rows_RH, weights_RK, received), context
        scales = _copied_columns(scales, 0, scales.shape[1])
        return dequantized(rows_RH, scales, self._fp8_rows, rows.dtype, weights_RK, received), context

    def _unpacked(self, packed: Tensor, inputs: tuple[Tensor, Tensor, DispatchPlan]) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, choices and FP8 scales of received rows; the scales as a view of bytes, of 0 without FP8."""
        _, weights, plan = inputs
        weights_end = row_bytes_of(weights)
        ids_end = weights_end + row_bytes_of(plan.ids)
        weights_RK = _copied_columns(packed, 0, weights_end).view(weights.dtype)
        ids_RK = _copied_columns(packed, weights_end, ids_end).view(torch.int32)
        return weights_RK, ids_RK, packed[:, ids_end:]


class PendingFp8Rows(PendingRows):
    """Repeated dispatch of rows (S, H) in flight, for a recompute.

    weights_RK, received: results of the first dispatch.
    """

    def __init__(
        self, stream: CommStream, block: int, rows_SH: Tensor, sent: Sequence[int], received_rows: Sequence[int],
        weights_RK: Tensor, received: Any,
    ) -> None:
        super().__init__(stream)
        self._block = block
        self._dtype = rows_SH.dtype
        self._weights_RK = weights_RK
        self._dispatched = received
        with stream.beside(self._ready, rows_SH):
            elements, scales = quantize_rows(rows_SH, block)
        self.send(elements, sent, received_rows)
        self.send(scales, sent, received_rows)

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return rows, weights and `Received`, without a context."""
        elements, scales = self.receive()
        results = dequantized(elements, scales, self._block, self._dtype, self._weights_RK, self._dispatched)
        return results, None


def dequantized(
    elements: Tensor, scales: Tensor, block: int, dtype: torch.dtype, weights_RK: Tensor, received: Any
) -> tuple[Tensor, Tensor, Any]:
    """Return the results of a dispatch: rows (R, H) in `dtype`, weights, and a `Received` with the quantized rows.

    elements, scales: the received rows, as bytes or in their dtypes. block: elements that share a scale. `received`
    is not changed, since it outlives the rows; the returned copy refers to them.
    """
    rows = QuantizedRows(elements.view(torch.float8_e4m3fn), scales.view(SCALES[block]))
    return dequantize_rows(rows, dtype), weights_RK, received._replace(quantized=rows)


def _copied_columns(packed: Tensor, start: int, end: int) -> Tensor:
    """Return a contiguous copy of columns, which can be viewed in a wider dtype.

    A slice of a single row counts as contiguous, but its stride does not allow a wider dtype.
    """
    return packed[:, start:end].clone(memory_format=torch.contiguous_format)


def _packed_format(rows: Tensor, weights: Tensor, ids: Tensor, fp8_rows: int | None) -> int:
    """Return the format of a dispatched row as one integer, so that a single kernel writes it.

    Its fields are the bytes of the hidden state, of the weights and of the choices, and the FP8 format. The FP8 format
    is 0 for rows in their own dtype, else 16 * (bytes of an unquantized element) + (elements that share a scale) / 32.
    """
    fp8 = 0 if fp8_rows is None else rows.itemsize << 4 | fp8_rows // 32
    return row_bytes_of(rows) << 32 | row_bytes_of(weights) << 20 | row_bytes_of(ids) << 8 | fp8


def _unpacked_format(packed: int) -> tuple[int, int, int, int]:
    """Return the fields of a row format."""
    return packed >> 32, packed >> 20 & 0xFFF, packed >> 8 & 0xFFF, packed & 0xFF


class CombineContext(NamedTuple):
    """Context of a combine for its backward."""

    sizes: DispatchSizes
    width: int
    dtype: torch.dtype


class Combine:
    """Communication that returns rows to the ranks of their tokens."""

    def __init__(self, stream: CommStream) -> None:
        self._stream = stream
        self.group = stream.group

    def forward(self, inputs: tuple[Tensor, Received]) -> Pending:
        rows, received = inputs
        sizes = received.sizes
        assert sizes is not None, "a dispatch over ranks sets the sizes"
        if (rows.shape[0], row_bytes_of(rows)) != (sum(sizes.received), sizes.row_bytes):
            raise ValueError(f"combine takes one row of {sizes.row_bytes} bytes for each of {sum(sizes.received)} "
                             f"received rows; got {tuple(rows.shape)} in {rows.dtype}: keep shape and dtype")
        context = CombineContext(sizes, rows.shape[1], rows.dtype)
        return PendingRows(self._stream, context=context).send(rows, sizes.received, sizes.sent)

    def backward(self, context: CombineContext, gradients: tuple[Tensor | None, ...]) -> Pending:
        sizes = context.sizes
        shape = (sum(sizes.sent), context.width)
        d_rows_SH = gradient_rows(gradients[0], shape, context.dtype, self._stream.device)
        return PendingRows(self._stream, extra=(None,)).send(d_rows_SH, sizes.sent, sizes.received)
