"""Expert parallelism: every rank of a group holds some of the experts, and tokens travel to those that they chose.

    route     x_TH, weights_TK, experts_TK -> rows, weights, plan     Dispatcher.plan: what goes where, on the device
    dispatch  rows, weights, plan -> rows, weights, received          all-to-all: a rank gets the rows for its experts
    experts   rows_RH, weights_RK, received -> rows_RH                run_experts: sort, grouped products, sum
    combine   rows, received -> rows                                  all-to-all back
    finish    rows, plan -> y_TH                                      Dispatcher.finish: sum over the ranks

No token is dropped. A token with several experts on one rank is sent there once, with its K choices as that rank
numbers them (-1 for those that are elsewhere) and their weights; what its experts make of the row is summed there, in
float32 at least, before it is sent back. With 8 choices over 8 ranks a token goes to 5.3 ranks on average, not to 8.

Example: 4 experts on 2 ranks, K = 2. A token that chose experts 2 and 3 is sent to rank 1 only, with ids [0, 1]; one
that chose 3 and 0 to rank 0 with ids [-1, 0] and to rank 1 with ids [1, -1]. Its result is that of rank 0 plus that of
rank 1, in this order.

How many rows go to each rank is known on the device. One small all-to-all tells the receivers, and copies everything
that the host must know; that copy is the only thing that the host waits for, in the forward alone. Dispatch and combine
are `Communication`s in between a stage's compute segments (`dualpipe.nn.segments`), beside the computing. Rows can go
to their experts in FP8 (`fp8_rows`), half of the bytes.

Dimension letters: T tokens, K experts per token, E experts, G ranks of the group, D = min(K, G) copies of a token at
most, S rows that a rank sends, R rows that it receives, M received (row, expert) pairs, H hidden.
"""

from __future__ import annotations

from collections import deque
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
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, GroupAllToAll, PendingRows, row_bytes_of
from dualpipe.parallel.experts.fp8_rows import SCALES, PendingFp8, dequantized, scale_bytes
from dualpipe.parallel.mesh import divisors
from dualpipe.runtime import device


class ExpertParallel:
    """The experts of a model over the ranks of a group; layers take a dispatcher each.

    ranks: the mesh's "ep" dimension, or an `AsyncAllToAll`; None or one rank: all experts are here, nothing is sent.
    fp8_rows: dispatch rows in FP8 with a scale for so many numbers, 128 for weights in blocks of FP8, 32 for mxfp8, to
    experts that take `quantized` besides; results and gradients go as they are. None: rows too.
    Raises ValueError for experts that cannot be divided evenly, and scales for other numbers.
    """

    def __init__(
        self, num_experts: int, ranks: DeviceMesh | AsyncAllToAll | None = None, *, fp8_rows: int | None = None
    ) -> None:
        if fp8_rows not in (None, *SCALES):
            raise ValueError(f"fp8_rows must be {', '.join(map(str, SCALES))}, numbers under a scale, or None; got "
                             f"{fp8_rows!r}")
        self._fp8_rows = fp8_rows
        size = 1 if ranks is None else ranks.size() if isinstance(ranks, DeviceMesh) else ranks.size
        self.num_experts, self.local_experts, self.size = num_experts, _share("the model", num_experts, size), size
        self._stream: CommStream | None = None
        if ranks is not None and size > 1:
            self._stream = CommStream(GroupAllToAll(ranks) if isinstance(ranks, DeviceMesh) else ranks)

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others, but for the numbers of rows (24 bytes to each rank in a forward)."""
        return 0 if self._stream is None else self._stream.sent_bytes

    def dispatcher(self) -> Dispatcher:
        """A new one, for one layer."""
        if self._stream is None:
            return Dispatcher(self.num_experts)
        return AllToAllDispatcher(self.num_experts, self._stream, self._fp8_rows)


def run_experts(
    experts: Callable[..., Tensor], rows: Tensor, weights_RK: Tensor, received: Received
) -> Tensor:
    """The weighted sum of each received row's local experts (R, H), in the dtype of the rows, (R, H) or (B, S, H).

    `experts(rows_RH, tokens, weights_M)` returns (M, H), multiplied with the weights of the sorted rows; rows that came
    in FP8 it gets besides as they came, as `quantized`.
    """
    # The rows by expert, M of them, so that nothing past the last end is computed.
    rows_RH, tokens = rows.flatten(0, -2), sort_tokens(received.ids, received.num_experts).cut(received.pairs)
    weights_M = dispatch_tokens(weights_RK.reshape(-1, 1), tokens, 1).squeeze(1)  # one row for each choice
    as_they_came = {} if received.quantized is None else {"quantized": received.quantized}
    y_MH = experts(rows_RH, tokens, weights_M, **as_they_came)
    return combine_tokens(y_MH, None, tokens, top_k=weights_RK.shape[1]).to(rows_RH.dtype)  # may differ under autocast


def shard_experts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make the stacked parameters of every `GroupedLinear` DTensors, Shard(0) over `mesh` ("ep"), in place; returns it.

    A rank keeps its part, on meta too; one rank alone changes nothing. Raises ValueError for experts that cannot be
    divided evenly, and for parameters that are sharded already.
    """
    places: list[tuple[nn.Module, str, nn.Parameter, int]] = []
    for path, layer in module.named_modules() if mesh.size() > 1 else ():
        if isinstance(layer, GroupedLinear):
            for name, param in layer.named_parameters(recurse=False):
                full = f"{path}.{name}".lstrip(".")
                if isinstance(param, DTensor):
                    raise ValueError(f"{full} is sharded already ({param.placements}); shard experts once, before "
                                     "FSDP2")
                places.append((layer, name, param, _share(f"the experts of {full}", param.shape[0], mesh.size())))
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for layer, name, param, each in places:
        if param not in sharded:
            local = param.detach()[mesh.get_local_rank() * each :][:each].clone()
            stride = param.detach().contiguous().stride()
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=stride)
            sharded[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
            if param.grad_dtype is not param.dtype:
                sharded[param].grad_dtype = param.grad_dtype
        setattr(layer, name, sharded[param])
    return module


def _share(what: str, experts: int, ranks: int) -> int:
    """Experts of each rank."""
    if experts < 1 or experts % ranks:
        possible = ", ".join(map(str, divisors(experts)))
        raise ValueError(f"{what}: {experts} experts cannot be divided evenly among {ranks} expert-parallel ranks; "
                         f"possible numbers of ranks: {possible}")
    return experts // ranks


class Sizes(NamedTuple):
    """What the host knows of an exchange: rows for and from each rank, and bytes of what a row consists of."""

    sent: list[int]
    received: list[int]
    row: int  # bytes of the hidden state
    weights: int
    ids: int
    there: int  # of the hidden state on its way to the experts: less than `row` in FP8
    scales: int  # which then travel with the weights


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
    quantized: QuantizedRows | None = None  # the rows, where they came in FP8


class Dispatcher:
    """The ways of one layer's tokens to their experts and back, here on a rank that has all experts."""

    dispatch: Communication | None = None  # rows, weights, plan -> rows (R, H), weights (R, K), Received
    combine: Communication | None = None  # rows (R, H), Received -> rows; None, both: the plan is what is `Received`

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Rows and weights to dispatch, differentiable, and the plan. An expert of -1 is unassigned."""
        return x_TH, weights_TK, Received(experts_TK, self._num_experts, experts_TK.numel(), None)

    def finish(self, rows: Tensor, plan: Any) -> Tensor:
        """The tokens' results (T, H) from what combine returned, differentiable."""
        return rows


class AllToAllDispatcher(Dispatcher):
    """The dispatcher over an `AsyncAllToAll`."""

    def __init__(self, num_experts: int, stream: CommStream, fp8_rows: int | None = None) -> None:
        super().__init__(num_experts)
        self._ranks, self._local = stream.size, num_experts // stream.size
        under_way: deque[_PendingDispatch] = deque()
        self.dispatch = _Dispatch(stream, self._local, under_way, fp8_rows)
        self.combine = _Combine(stream, under_way)  # type: ignore[assignment]  # never `again`

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Plan]:
        """Rows (T * D, H) and float32 weights (T * D, K), those to send first, sorted by rank; ValueError for operands
        that do not fit."""
        if not (x_TH.dim() == weights_TK.dim() == 2 and experts_TK.shape == weights_TK.shape == (
            x_TH.shape[0], weights_TK.shape[1])):
            raise ValueError(f"tokens (T, H), weights (T, K) and experts (T, K) are needed; got {tuple(x_TH.shape)}, "
                             f"{tuple(weights_TK.shape)} and {tuple(experts_TK.shape)}")
        if experts_TK.device.type == "cpu" and ((experts_TK < -1) | (experts_TK >= self._num_experts)).any():
            raise ValueError(f"experts must be between 0 and {self._num_experts - 1}, or -1 for none; "
                             f"got {experts_TK.min()} to {experts_TK.max()}")
        ranks_TK = torch.div(experts_TK, self._local, rounding_mode="floor")  # -1 stays -1
        each_G = torch.arange(self._ranks, device=experts_TK.device)
        of_rank_TKG = ranks_TK.unsqueeze(-1) == each_G
        there_TG = of_rank_TKG.any(1)
        # The ranks that a token goes to, ascending, once each; -1 elsewhere among the D places.
        if experts_TK.shape[1] >= self._ranks:
            ranks_TD = each_G.where(there_TG, -1)
        else:
            sorted_TK = ranks_TK.sort(-1).values
            ranks_TD = sorted_TK.where(sorted_TK.diff(dim=-1, prepend=sorted_TK[:, :1] - 1) != 0, -1)
        tokens, copies = sort_tokens(ranks_TD, self._ranks), ranks_TD.shape[1]
        here_TDK = ranks_TD.unsqueeze(2) == ranks_TK.unsqueeze(1)
        ids_TDK = (experts_TK % self._local).unsqueeze(1).where(here_TDK, -1)
        wide_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
        weights_TDK = wide_TK.unsqueeze(1).where(here_TDK, 0)
        counts = torch.stack((there_TG.sum(0), of_rank_TKG.sum((0, 1))), 1)
        rows = dispatch_tokens(x_TH, tokens, copies)
        weights = dispatch_tokens(weights_TDK.flatten(0, 1), tokens, 1)
        ids = ids_TDK.flatten(0, 1).to(torch.int32).index_select(0, tokens.order)
        return rows, weights, Plan(tokens, copies, ids, counts)

    def finish(self, rows: Tensor, plan: Plan) -> Tensor:
        """Adds a token's rows (S, H) in the order of the ranks, in float32 at least."""
        return combine_tokens(rows, None, plan.tokens.cut(rows.shape[0]), top_k=plan.copies)


class _Dispatch:
    """Communication of rows and weights to their experts. Context: sizes, T * D, dtypes of rows and weights, and what
    `again` returns besides the rows."""

    def __init__(
        self, stream: CommStream, num_experts: int, under_way: deque[_PendingDispatch], fp8_rows: int | None
    ) -> None:
        self._stream, self._num_experts, self._under_way, self.group = stream, num_experts, under_way, stream.group
        self._fp8_rows = fp8_rows

    def forward(self, inputs: tuple[Tensor, Tensor, Plan] | None) -> Pending:
        pending = _PendingDispatch(self._stream, self._num_experts, inputs, self._fp8_rows)
        self._under_way.append(pending)
        if self._stream.device.type == "cpu":  # the host computes, so rows must be on their way before it does
            try:
                pending.advance()
            except BaseException as error:  # the counts are sent: the next `advance` sends the rows
                pending.failure = pending.failure or error
        return pending

    def backward(self, context: tuple[Any, ...], gradients: tuple[Tensor | None, ...] | None) -> Pending:
        sizes, places, dtypes, _ = context
        pending = PendingRows(self._stream, besides=(None,))
        # The gradients have the shapes of what `plan` returned; rows past those that were sent are unassigned.
        for gradient, row_bytes, dtype in zip(gradients or (None, None), (sizes.row, sizes.weights), dtypes):
            pending.send(gradient, row_bytes, sizes.received, sizes.sent, dtype, places)
        return pending

    def again(self, context: tuple[Any, ...], inputs: tuple[Tensor, Tensor, Plan] | None) -> Pending:
        """The rows alone: how many, their weights and their choices are known from the first time."""
        sizes, _, (dtype, _), besides = context
        rows = None if inputs is None else inputs[0][: sum(sizes.sent)]
        if self._fp8_rows is None:
            return PendingRows(self._stream, besides=besides).send(rows, sizes.row, sizes.sent, sizes.received, dtype)
        return PendingFp8(self._stream, self._fp8_rows, rows, sizes.there, sizes.sent, sizes.received, besides)


class _PendingDispatch(PendingRows):
    """A dispatch under way: the numbers of rows first, then the rows. A rank without inputs sends none, and takes in as
    bytes what the others send."""

    def __init__(
        self, stream: CommStream, num_experts: int, inputs: tuple[Tensor, Tensor, Plan] | None, fp8_rows: int | None
    ) -> None:
        super().__init__(stream)
        self._num_experts, self._inputs, self._fp8_rows = num_experts, inputs, fp8_rows
        self.sizes: Sizes | None = None  # known when rows are under way
        # How many rows the other ranks get and what is in one, for them and the host, which must know.
        with stream.beside(self._made, None if inputs is None else inputs[2].counts):
            make = torch.zeros if inputs is None else torch.empty
            both = make(2, stream.size, 3, dtype=torch.int64, device=stream.device)  # sent, received
            if inputs is not None:
                rows, weights, plan = inputs
                both[0, :, :2] = plan.counts
                fp8 = 0 if self._fp8_rows is None else rows.itemsize << 4 | self._fp8_rows // 32
                row, weight, ids = map(row_bytes_of, (rows, weights, plan.ids))
                both[0, :, 2].fill_(_packed(row, weight, ids, fp8))
            each = [1] * stream.size
            self._counts, self._told = both, stream.start(both[1], both[0], each, each)
            self._copied: device.Event | None = None
            if self._told[0] is None:
                try:
                    self._counts, self._copied = device.to_host(both)
                except BaseException as error:  # the numbers are sent: `advance` reads them where they are
                    self.failure = error

    def advance(self) -> None:
        """Send the rows, once it is known how many; the host waits for that."""
        if self.sizes is not None:
            return
        if self._copied is None:
            self._stream.wait(self._told)
        else:
            self._copied.synchronize()  # orders: the copy, then the host, which alone waits here
        sent, received = self._counts.tolist()  # the records for and from each rank
        told = {_unpacked(record[2]) for record in (*sent, *received) if record[2]}  # 0 from one without inputs
        if len(told) > 1:
            raise ValueError("the ranks' rows consist of different numbers of bytes (hidden state, weights, choices; "
                             f"in FP8: not 0): {sorted(told)}; give the layer the same sizes, dtypes and fp8_rows "
                             "everywhere")
        row, weight, ids, fp8 = told.pop() if told else (0, 0, 0, 0)
        there = row // (fp8 >> 4) if fp8 else row
        sizes = Sizes([record[0] for record in sent], [record[0] for record in received], row, weight, ids, there,
                      scale_bytes(there, fp8 % 16 * 32) if fp8 else 0)
        self._pairs, total = sum(record[1] for record in received), sum(sizes.sent)
        rows = packed = dtype = None
        if self._inputs is not None:
            try:
                rows, packed = self._packed_rows(*self._inputs, total)
                dtype = torch.uint8
            except BaseException as error:  # the others know how many rows come
                self.failure = self.failure or error
        self.send(rows, sizes.there, sizes.sent, sizes.received, dtype)
        row_bytes = sizes.weights + sizes.ids + sizes.scales
        self.send(packed, row_bytes, sizes.sent, sizes.received, dtype, fill=0xFF)  # of ids: no expert's
        self.sizes = sizes  # not before: after an error the next call sends the rows

    def _packed_rows(self, rows: Tensor, weights: Tensor, plan: Plan, total: int) -> tuple[Tensor, Tensor]:
        """The rows to send, `total` of them, and their weights, choices and scales as bytes beside each other."""
        rows = rows[:total]
        with self._stream.beside(self._made, rows, weights, plan.ids):
            parts, word = [weights[:total], plan.ids[:total]], torch.int32
            if self._fp8_rows is not None:
                rows, scales = quantize_rows(rows, self._fp8_rows)
                parts, word = [*parts, scales], torch.uint8
            return rows, torch.cat([part.view(word) for part in parts], 1)

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Rows, weights and `Received`, and what the way back needs."""
        self.advance()
        rows_RH, packed = self.receive()
        sizes = self.sizes
        assert sizes is not None, "advance makes the sizes"
        if self._inputs is None or self.failure is not None:
            return (None, None, None), (sizes, sum(sizes.sent), (None, None), (None, None))
        (rows, weights, _), self._inputs = self._inputs, None  # what was sent may be freed
        weights_RK, ids_RK, *scales = (  # copied: a part of one row has a stride that a wider dtype cannot have
            part.clone(memory_format=torch.contiguous_format)
            for part in packed.split((sizes.weights, sizes.ids, *[sizes.scales] * bool(sizes.scales)), 1)
        )
        received = Received(ids_RK.view(torch.int32), self._num_experts, self._pairs, sizes)
        besides = weights_RK.view(weights.dtype), received
        context = sizes, len(rows), (rows.dtype, weights.dtype), besides
        if scales and self._fp8_rows is not None:
            return dequantized(rows_RH, scales[0], self._fp8_rows, rows.dtype, *besides), context
        return (rows_RH.view(rows.dtype), *besides), context


def _packed(row: int, weights: int, ids: int, fp8: int) -> int:
    """Three sizes in one number, for a single launch to tell; weights and ids of a row are a few bytes an expert. fp8:
    16 times the bytes of a number before it is quantized, and how many times 32 have a scale; 0: rows as they are."""
    return row << 32 | weights << 20 | ids << 8 | fp8


def _unpacked(sizes: int) -> tuple[int, int, int, int]:
    return sizes >> 32, sizes >> 20 & 0xFFF, sizes >> 8 & 0xFFF, sizes & 0xFF


class _Combine:
    """Communication of rows back to where they came from."""

    def __init__(self, stream: CommStream, under_way: deque[_PendingDispatch]) -> None:
        self._stream, self._under_way, self.group = stream, under_way, stream.group

    def forward(self, inputs: tuple[Tensor, Received] | None) -> Pending:
        rows, received = inputs or (None, None)
        # Of the dispatch that this answers, the oldest without an answer: a rank without inputs has nothing else to go
        # by, and one with inputs passes by those that an exception left over.
        while received is not None and self._under_way[0].sizes is not received.sizes:
            self._under_way.popleft()
        sizes = self._under_way[0].sizes
        assert sizes is not None, "its dispatch has not got through"
        if rows is not None and (rows.shape[0], row_bytes_of(rows)) != (sum(sizes.received), sizes.row):
            raise ValueError(f"combine takes one row of {sizes.row} bytes for each of {sum(sizes.received)} received "
                             f"ones; got {tuple(rows.shape)} in {rows.dtype}: keep shape and dtype")
        dtype = None if rows is None else rows.dtype
        pending = PendingRows(self._stream, context=(sizes, dtype))
        self._under_way.popleft()  # not before: where this has failed it is called again, without inputs
        return pending.send(rows, sizes.row, sizes.received, sizes.sent, dtype)

    def backward(self, context: tuple[Sizes, torch.dtype | None], gradients: tuple[Tensor | None] | None) -> Pending:
        (sizes, dtype), (d_rows,) = context, gradients or (None,)
        return PendingRows(self._stream, besides=(None,)).send(d_rows, sizes.row, sizes.sent, sizes.received, dtype)

    def forget(self) -> None:
        """See `dualpipe.nn.segments.Communication`."""
        self._under_way.clear()
