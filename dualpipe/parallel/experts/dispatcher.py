"""Expert parallelism: each rank of a group holds some of the experts; tokens are dispatched to them and combined.

    route     x_TH, weights_TK, experts_TK -> rows, weights, plan     Dispatcher.plan: rows by rank, on the device
    dispatch  rows, weights, plan -> rows, weights, received          all-to-all: a rank gets the rows for its experts
    experts   rows_RH, weights_RK, received -> rows_RH                run_experts: sort, grouped GEMMs, sum
    combine   rows, received -> rows                                  all-to-all back
    finish    rows, plan -> y_TH                                      Dispatcher.finish: sum over the ranks

No token is dropped. A token with several experts on one rank is sent there once, with its weights and its K choices as
local expert ids of that rank (-1 for experts on other ranks). The rank sums the outputs of its experts, in float32 or
wider, before it returns the sum. With 8 choices over 8 ranks a token goes to 5.3 ranks on average, not to 8.

Example: 4 experts on 2 ranks, K = 2. A token with experts 2 and 3 is sent to rank 1 only, with ids [0, 1]. A token with
experts 3 and 0 is sent to rank 0 with ids [-1, 0] and to rank 1 with ids [1, -1]; its output is that of rank 0 plus
that of rank 1, in this order.

The numbers of rows for each rank are computed on the device. A small all-to-all sends them to the receivers, then they
are copied to the host; the host waits for this copy alone, and only in the forward. Dispatch and combine are
`Communication`s between the compute segments of a stage (`dualpipe.nn.segments`), overlapped with compute. Rows can be
dispatched in FP8 (`fp8_rows`), with half of the bytes.

Dimension letters: T tokens, K experts per token, E experts, G ranks of the group, D = min(K, G) copies of a token at
most, S rows that a rank sends, R rows that it receives, M received (row, expert) pairs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import quantize_rows
from dualpipe.nn.grouped_linear import GroupedLinear
from dualpipe.nn.segments import Communication, Pending
from dualpipe.parallel.all_to_all import (
    AsyncAllToAll,
    CommStream,
    GroupAllToAll,
    PendingRows,
    gradient_rows,
    row_bytes_of,
)
from dualpipe.parallel.experts.fp8_rows import SCALES, PendingFp8Rows, dequantized
from dualpipe.parallel.mesh import divisors
from dualpipe.runtime import device


class ExpertParallel:
    """Distribution of a model's experts over the ranks of a group; creates a dispatcher for each layer.

    ranks: the mesh's "ep" dimension, or an `AsyncAllToAll`; None or one rank: all experts are local, nothing is sent.
    fp8_rows: the number of elements that share a scale if rows are dispatched in FP8: 128 for weights in blocks of FP8,
    32 for mxfp8. The experts must accept the keyword `quantized`; outputs and gradients keep their dtype. None: rows
    are dispatched in their own dtype.

    Raises ValueError for experts that cannot be divided evenly, and for another block size.
    """

    def __init__(
        self, num_experts: int, ranks: DeviceMesh | AsyncAllToAll | None = None, *, fp8_rows: int | None = None
    ) -> None:
        if fp8_rows not in (None, *SCALES):
            raise ValueError(f"fp8_rows must be {', '.join(map(str, SCALES))}, elements under a scale, or None; got "
                             f"{fp8_rows!r}")
        if isinstance(ranks, DeviceMesh):
            ranks = GroupAllToAll(ranks) if ranks.size() > 1 else None
        self.size = 1 if ranks is None else ranks.size
        self.num_experts = num_experts
        self.local_experts = _experts_per_rank("the model", num_experts, self.size)
        self._fp8_rows = fp8_rows
        self._stream = CommStream(ranks) if ranks is not None and self.size > 1 else None

    @property
    def sent_bytes(self) -> int:
        """Number of bytes sent to other ranks, without the row counts (24 bytes for each rank in a forward)."""
        return 0 if self._stream is None else self._stream.sent_bytes

    def dispatcher(self) -> Dispatcher:
        """Create the dispatcher of one layer."""
        if self._stream is None:
            return Dispatcher(self.num_experts)
        return AllToAllDispatcher(self.num_experts, self._stream, self._fp8_rows)


def run_experts(
    experts: Callable[..., Tensor], rows: Tensor, weights_RK: Tensor, received: Received
) -> Tensor:
    """Return the weighted sum of the outputs of each row's local experts: (R, H), in the dtype of `rows`.

    experts: called as `experts(rows_RH, tokens, weights_M)`; returns (M, H), multiplied by the weights of the sorted
    rows. For rows that were dispatched in FP8, it also gets the quantized rows as the keyword `quantized`. rows: (R, H)
    or (B, S, H).
    """
    rows_RH = rows.flatten(0, -2)
    # M rows, sorted by expert; unassigned choices come after the last end and are not computed.
    tokens = sort_tokens(received.ids, received.num_experts).cut(received.pairs)
    weights_M = dispatch_tokens(weights_RK.reshape(-1, 1), tokens, 1).squeeze(1)  # one row for each choice
    quantized = {} if received.quantized is None else {"quantized": received.quantized}
    y_MH = experts(rows_RH, tokens, weights_M, **quantized)
    y_RH = combine_tokens(y_MH, None, tokens, top_k=weights_RK.shape[1])
    return y_RH.to(rows_RH.dtype)  # autocast may have changed the dtype


def shard_experts(module: nn.Module, mesh: DeviceMesh, *, are_local: bool = False) -> nn.Module:
    """Make the stacked parameters of all experts DTensors, Shard(0) over `mesh` ("ep"), in place; returns the module.

    Every `GroupedLinear` counts as experts, and so does a module that transformers calls through its experts interface.
    A rank keeps its slice, also on meta; with one rank nothing changes.

    are_local: the parameters contain this rank's experts only. Raises ValueError for experts that cannot be divided
    evenly, and for parameters that are sharded already.
    """
    places: list[tuple[nn.Module, str, nn.Parameter, int]] = []
    for path, layer in module.named_modules() if mesh.size() > 1 else ():
        for name, param in stacked_parameters(layer).items():
            full = f"{path}.{name}".lstrip(".")
            if isinstance(param, DTensor):
                raise ValueError(f"{full} is sharded already ({param.placements}); shard experts once, before FSDP2")
            num_experts = param.shape[0] * mesh.size() if are_local else param.shape[0]
            places.append((layer, name, param, _experts_per_rank(f"the experts of {full}", num_experts, mesh.size())))
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for layer, name, param, num_local in places:
        if param not in sharded:
            local = param.detach()
            if not are_local:
                local = local[mesh.get_local_rank() * num_local :][:num_local].clone()
            shape = torch.Size((num_local * mesh.size(), *param.shape[1:]))
            stride = param.detach().contiguous().stride()
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
            sharded[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
            if param.grad_dtype is not param.dtype:
                sharded[param].grad_dtype = param.grad_dtype
        setattr(layer, name, sharded[param])
    return module


def stacked_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that stack experts along their first dimension; {} for other modules.

    See `is_interface_experts` for modules of transformers.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if isinstance(module, GroupedLinear):
        return parameters
    if not is_interface_experts(module):
        return {}
    weights = ("gate_up_proj", "up_proj", "down_proj")
    return {name: param for name, param in parameters.items() if name.removesuffix("_bias") in weights}


def parameter_sizes(module: nn.Module, ep: int) -> tuple[int, int]:
    """Return the number of dense parameters, and the number of expert parameters on one of `ep` ranks."""
    stacked = (stacked_parameters(inner).values() for inner in module.modules())
    experts = sum(param.numel() for params in stacked for param in params)
    return sum(param.numel() for param in module.parameters()) - experts, experts // ep


def is_interface_experts(module: nn.Module) -> bool:
    """Return True for a module that transformers calls through its experts interface.

    It is recognized by the attributes that the interface sets, without an import of transformers.
    """
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "_apply_gate"))


def _experts_per_rank(owner: str, experts: int, ranks: int) -> int:
    """Return the number of experts of each rank; `owner` names the model or parameter in the error message."""
    if experts < 1 or experts % ranks:
        possible = ", ".join(map(str, divisors(experts)))
        raise ValueError(f"{owner}: {experts} experts cannot be divided evenly among {ranks} expert-parallel ranks; "
                         f"possible numbers of ranks: {possible}")
    return experts // ranks


class DispatchSizes(NamedTuple):
    """Row counts of a dispatch and its combine, on the host."""

    sent: list[int]  # rows for each rank
    received: list[int]  # rows from each rank
    row_bytes: int  # of a hidden state, before it is quantized


class Plan(NamedTuple):
    """Destination ranks and experts of a rank's tokens."""

    tokens: SortedTokens  # one for each (token, destination rank) pair: the rows to send, sorted by rank
    copies: int  # D
    ids: Tensor  # (T * D, K) int32, sorted: a row's local expert ids on its rank, -1 for experts elsewhere
    counts: Tensor  # (G, 2) int64: rows, and (row, expert) pairs, for each rank


class Received(NamedTuple):
    """Rows that a rank received for its experts."""

    ids: Tensor  # (R, K): a row's experts on this rank, -1 for those on other ranks
    num_experts: int  # on this rank
    pairs: int  # M
    sizes: DispatchSizes | None  # None without other ranks
    quantized: QuantizedRows | None = None  # the rows, if they were dispatched in FP8


class Dispatcher:
    """Dispatch of one layer's tokens to their experts, and the combine. This base class has all experts on one rank.

    dispatch and combine are None without communication; the plan is then a `Received`.
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


class AllToAllDispatcher(Dispatcher):
    """Dispatcher over an `AsyncAllToAll`."""

    def __init__(self, num_experts: int, stream: CommStream, fp8_rows: int | None = None) -> None:
        super().__init__(num_experts)
        self._ranks = stream.size
        self._local = num_experts // stream.size
        self.dispatch = _Dispatch(stream, self._local, fp8_rows)
        self.combine = _Combine(stream)  # type: ignore[assignment]  # `again` is never called

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Plan]:
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
        ranks_TK = torch.div(experts_TK, self._local, rounding_mode="floor")  # -1 stays -1
        all_ranks_G = torch.arange(self._ranks, device=experts_TK.device)
        is_choice_TKG = ranks_TK.unsqueeze(-1) == all_ranks_G
        is_destination_TG = is_choice_TKG.any(1)
        # The destination ranks of a token, ascending and without duplicates; -1 in unused places among the D.
        if experts_TK.shape[1] >= self._ranks:
            ranks_TD = all_ranks_G.where(is_destination_TG, -1)
        else:
            sorted_TK = ranks_TK.sort(-1).values
            ranks_TD = sorted_TK.where(sorted_TK.diff(dim=-1, prepend=sorted_TK[:, :1] - 1) != 0, -1)
        tokens = sort_tokens(ranks_TD, self._ranks)
        copies = ranks_TD.shape[1]
        is_local_TDK = ranks_TD.unsqueeze(2) == ranks_TK.unsqueeze(1)
        ids_TDK = (experts_TK % self._local).unsqueeze(1).where(is_local_TDK, -1)
        wide_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        weights_TDK = wide_TK.unsqueeze(1).where(is_local_TDK, 0)
        counts = torch.stack((is_destination_TG.sum(0), is_choice_TKG.sum((0, 1))), 1)
        rows = dispatch_tokens(x_TH, tokens, copies)
        weights = dispatch_tokens(weights_TDK.flatten(0, 1), tokens, 1)
        ids = ids_TDK.flatten(0, 1).to(torch.int32).index_select(0, tokens.order)
        return rows, weights, Plan(tokens, copies, ids, counts)

    def finish(self, rows: Tensor, plan: Plan) -> Tensor:
        """Sum each token's rows (S, H) in rank order, in float32 or wider; returns (T, H)."""
        return combine_tokens(rows, None, plan.tokens.cut(rows.shape[0]), top_k=plan.copies)


class _DispatchContext(NamedTuple):
    """Context of a dispatch for its recompute and its backward."""

    sizes: DispatchSizes
    num_plan_rows: int  # T * D
    width: int  # H
    dtype: torch.dtype  # of the rows
    weights_RK: Tensor
    received: Received


class _Dispatch:
    """Communication of rows and weights to their experts."""

    def __init__(self, stream: CommStream, num_experts: int, fp8_rows: int | None) -> None:
        self._stream = stream
        self._num_experts = num_experts
        self._fp8_rows = fp8_rows
        self.group = stream.group
        self.hang_up = stream.hang_up

    def forward(self, inputs: tuple[Tensor, Tensor, Plan]) -> Pending:
        pending = _PendingDispatch(self._stream, self._num_experts, inputs, self._fp8_rows)
        if self._stream.device.type == "cpu":
            pending.advance()  # the engine would do so only after the host has computed other work
        return pending

    def backward(self, context: _DispatchContext, gradients: tuple[Tensor | None, ...]) -> Pending:
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

    def again(self, context: _DispatchContext, inputs: tuple[Tensor, Tensor, Plan]) -> Pending:
        """Send the rows alone: row counts, weights and choices are known from the forward."""
        sizes = context.sizes
        rows_SH = inputs[0][: sum(sizes.sent)]
        if self._fp8_rows is None:
            pending = PendingRows(self._stream, extra=(context.weights_RK, context.received))
            return pending.send(rows_SH, sizes.sent, sizes.received)
        return PendingFp8Rows(self._stream, self._fp8_rows, rows_SH, sizes.sent, sizes.received,
                              context.weights_RK, context.received)


class _PendingDispatch(PendingRows):
    """Dispatch in flight: first the row counts, then the rows, with weights and choices as bytes beside them."""

    def __init__(
        self, stream: CommStream, num_experts: int, inputs: tuple[Tensor, Tensor, Plan], fp8_rows: int | None
    ) -> None:
        super().__init__(stream)
        self._num_experts = num_experts
        self._fp8_rows = fp8_rows
        self._inputs: tuple[Tensor, Tensor, Plan] | None = inputs
        self._sizes: DispatchSizes | None = None  # known once the rows are sent
        rows, weights, plan = inputs
        row_format = _packed_format(rows, weights, plan.ids, fp8_rows)
        # (2, G, 3), sent and received: for each rank the number of rows and of (row, expert) pairs, and the row format.
        with stream.beside(self._ready, plan.counts):
            records = torch.empty(2, stream.size, 3, dtype=torch.int64, device=stream.device)
            records[0, :, :2] = plan.counts
            records[0, :, 2].fill_(row_format)
            ones = [1] * stream.size
            self._records = records
            self._records_exchange = stream.start(records[1], records[0], ones, ones)
            self._copied: device.Event | None = None
            if self._records_exchange[0] is None:  # on a device
                self._records, self._copied = device.to_host(records)

    def advance(self) -> None:
        """Send the rows; the host waits for the row counts."""
        if self._sizes is not None:
            return
        assert self._inputs is not None, "inputs are kept until wait"
        if self._copied is None:
            self._stream.wait(self._records_exchange)
        else:
            self._copied.synchronize()  # orders: the copy, then the host; no stream waits
        sent, received = self._records.tolist()
        formats = {record[2] for record in (*sent, *received)}
        if len(formats) > 1:
            raise ValueError("the ranks' rows have different formats (bytes of hidden state, weights and choices; FP8 "
                             f"format or 0): {sorted(map(_unpacked_format, formats))}; give the layer the same sizes, "
                             "dtypes and fp8_rows everywhere")
        rows, weights, plan = self._inputs
        sizes = DispatchSizes([record[0] for record in sent], [record[0] for record in received], row_bytes_of(rows))
        self._pairs = sum(record[1] for record in received)
        total = sum(sizes.sent)
        rows_SH, packed = self._packed_rows(rows[:total], weights[:total], plan.ids[:total])
        self.send(rows_SH, sizes.sent, sizes.received)
        self.send(packed, sizes.sent, sizes.received)
        self._sizes = sizes

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
        rows, weights, plan = inputs
        weights_end = row_bytes_of(weights)
        ids_end = weights_end + row_bytes_of(plan.ids)
        weights_RK = _copied_columns(packed, 0, weights_end).view(weights.dtype)
        ids_RK = _copied_columns(packed, weights_end, ids_end).view(torch.int32)
        received = Received(ids_RK, self._num_experts, self._pairs, sizes)
        context = _DispatchContext(sizes, len(rows), rows.shape[1], rows.dtype, weights_RK, received)
        if self._fp8_rows is None:
            return (rows_RH, weights_RK, received), context
        scales = _copied_columns(packed, ids_end, packed.shape[1])
        return dequantized(rows_RH, scales, self._fp8_rows, rows.dtype, weights_RK, received), context


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


class _CombineContext(NamedTuple):
    """Context of a combine for its backward."""

    sizes: DispatchSizes
    width: int
    dtype: torch.dtype


class _Combine:
    """Communication that returns rows to the ranks of their tokens."""

    def __init__(self, stream: CommStream) -> None:
        self._stream = stream
        self.group = stream.group
        self.hang_up = stream.hang_up

    def forward(self, inputs: tuple[Tensor, Received]) -> Pending:
        rows, received = inputs
        sizes = received.sizes
        assert sizes is not None, "a dispatch over ranks sets the sizes"
        if (rows.shape[0], row_bytes_of(rows)) != (sum(sizes.received), sizes.row_bytes):
            raise ValueError(f"combine takes one row of {sizes.row_bytes} bytes for each of {sum(sizes.received)} "
                             f"received rows; got {tuple(rows.shape)} in {rows.dtype}: keep shape and dtype")
        context = _CombineContext(sizes, rows.shape[1], rows.dtype)
        return PendingRows(self._stream, context=context).send(rows, sizes.received, sizes.sent)

    def backward(self, context: _CombineContext, gradients: tuple[Tensor | None, ...]) -> Pending:
        sizes = context.sizes
        shape = (sum(sizes.sent), context.width)
        d_rows_SH = gradient_rows(gradients[0], shape, context.dtype, self._stream.device)
        return PendingRows(self._stream, extra=(None,)).send(d_rows_SH, sizes.sent, sizes.received)
