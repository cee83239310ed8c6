"""Dispatch and combine by DeepEP (https://github.com/deepseek-ai/DeepEP), where its package `deep_ep` is installed.

**This has never run with DeepEP itself**, which needs CUDA: it is written for the interface of `deep_ep.Buffer` as its
repository documents it, and tested on CPU ranks with a stand-in of the same signatures.

DeepEP's kernels send a token once to each node over the network while they forward it within the node over NVLink, and
sum the outputs of a token's experts on the way back, first in the node, then at the rank of the token. So its sums, and
those of gradients, round in other places than those of `one_hop` and `two_hop`. Rows are in bfloat16, or in FP8 with
one scale for 128 elements; weights are in float32. Its kernels run on a stream of their own; the host waits only in the
first dispatch of a layer's forward, for the row counts. `ExpertParallel` does not count the bytes that it sends. The
loss of a rank shows as an error of CUDA after DeepEP's own timeout.

Dimension letters: T tokens, K experts per token, R received rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import quantize_rows
from dualpipe.nn.segments import Pending
from dualpipe.parallel.all_to_all import AsyncAllToAll, gradient_rows
from dualpipe.parallel.experts.fp8_rows import dequantized
from dualpipe.parallel.experts.interface import Dispatcher, Received

_BLOCK = 128  # elements under a scale


def create_buffer(ranks: AsyncAllToAll, hidden_size: int | None) -> Any:
    """Create the `deep_ep.Buffer` of the ranks; collective.

    Raises ValueError without the package, CUDA, a process group, or the number of columns of the rows.
    """
    if hidden_size is None:
        raise ValueError("dispatch = 'deep_ep' without hidden_size, by which DeepEP allocates its buffers; give the "
                         "number of columns of the rows")
    buffer_class = load_buffer_class(ranks.device.type, has_group=ranks.group is not None)
    row_bytes = hidden_size * torch.bfloat16.itemsize
    configs = (buffer_class.get_dispatch_config(ranks.size), buffer_class.get_combine_config(ranks.size))
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, ranks.size) for config in configs)
    network_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, ranks.size) for config in configs)
    return buffer_class(ranks.group, nvlink_bytes, network_bytes)


def load_buffer_class(device: str, *, has_group: bool = True) -> Any:
    """Return `deep_ep.Buffer`. Raises ValueError without the package, CUDA, or a process group of the ranks."""
    if device != "cuda" or not has_group:
        raise ValueError(f"dispatch = 'deep_ep' on {device} ranks, but DeepEP needs CUDA and a process group; give "
                         "'auto'")
    try:
        from deep_ep import Buffer
    except ModuleNotFoundError as error:
        raise ValueError("dispatch = 'deep_ep', but the package deep_ep is not installed; install it from "
                         "https://github.com/deepseek-ai/DeepEP, or give 'auto'") from error
    return Buffer


def check_rows(num_columns: int, dtype: torch.dtype, fp8_rows: int | None = None) -> None:
    """Raise ValueError for rows that DeepEP does not send. fp8_rows: see `ExpertParallel`."""
    if fp8_rows not in (None, _BLOCK):
        raise ValueError(f"fp8_rows is {fp8_rows} with dispatch = 'deep_ep', which takes rows in FP8 with a scale "
                         f"for {_BLOCK} elements; give {_BLOCK} or None, or dispatch = 'auto'")
    if dtype is not torch.bfloat16 or (fp8_rows is not None and num_columns % _BLOCK):
        of_fp8 = "" if fp8_rows is None else f", with a multiple of {_BLOCK} columns in FP8"
        raise ValueError(f"dispatch = 'deep_ep' got rows of {num_columns} columns in {dtype}, expected bfloat16{of_fp8}"
                         "; give dispatch = 'auto'")


class DeepEPDispatcher(Dispatcher):
    """Dispatcher over a `deep_ep.Buffer`. fp8_rows: 128 to dispatch rows in FP8, or None; see `ExpertParallel`."""

    def __init__(self, num_experts: int, buffer: Any, fp8_rows: int | None = None) -> None:
        super().__init__(num_experts)
        check_rows(_BLOCK, torch.bfloat16, fp8_rows)
        self.dispatch = _Dispatch(buffer, num_experts, fp8_rows is not None)
        self.combine = _Combine(buffer)  # type: ignore[assignment]  # `recompute` is never called

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the tokens, their weights in float32, and their experts."""
        return x_TH, weights_TK.float(), experts_TK.long()


class _Context(NamedTuple):
    """Context of a dispatch for its recompute and its backward."""

    width: int  # H
    received: Received
    weights_RK: Tensor


class _Dispatch:
    """Communication of tokens and weights to their experts."""

    def __init__(self, buffer: Any, num_experts: int, in_fp8: bool) -> None:
        self._buffer = buffer
        self._num_experts = num_experts
        self._in_fp8 = in_fp8
        self.group: ProcessGroup | None = buffer.group

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Pending:
        x_TH, weights_TK, experts_TK = inputs
        buffer = self._buffer
        rows = self._rows(x_TH)
        ready = buffer.capture()

        def start() -> _Started:
            layout = buffer.get_dispatch_layout(
                experts_TK, self._num_experts, previous_event=ready, async_finish=True, allocate_on_comm_stream=True)
            rows_per_rank, rows_per_node, rows_per_expert, is_in_rank, laid_out = layout
            received_rows, ids_RK, weights_RK, pairs_by_expert, handle, arrived = buffer.dispatch(
                rows, num_tokens_per_rank=rows_per_rank, num_tokens_per_rdma_rank=rows_per_node,
                is_token_in_rank=is_in_rank, num_tokens_per_expert=rows_per_expert, topk_idx=experts_TK,
                topk_weights=weights_TK, previous_event=laid_out, async_finish=True, allocate_on_comm_stream=True)
            num_local = self._num_experts // buffer.group_size
            received = Received(ids_RK, num_local, sum(pairs_by_expert), None, handle=handle)
            context = _Context(x_TH.shape[1], received, weights_RK)
            return _Started(arrived, lambda: self._results(received_rows, context), context)

        return _Pending(start)

    def recompute(self, context: _Context, inputs: tuple[Tensor, Tensor, Tensor]) -> Pending:
        """Send the tokens alone, to the same ranks as in the forward."""
        buffer = self._buffer
        received_rows, *_, arrived = buffer.dispatch(
            self._rows(inputs[0]), handle=context.received.handle, previous_event=buffer.capture(), async_finish=True,
            allocate_on_comm_stream=True)
        return _Started(arrived, lambda: self._results(received_rows, context))

    def backward(self, context: _Context, gradients: tuple[Tensor | None, ...]) -> Pending:
        buffer = self._buffer
        received = context.received
        weights_RK = context.weights_RK
        shape = (weights_RK.shape[0], context.width)
        d_rows_RH = gradient_rows(gradients[0], shape, torch.bfloat16, weights_RK.device)
        d_weights_RK = gradient_rows(
            gradients[1], (weights_RK.shape[0], weights_RK.shape[1]), weights_RK.dtype, weights_RK.device)
        d_weights_RK = d_weights_RK.masked_fill(received.ids < 0, 0)  # the expert's rank alone has the gradient
        d_x_TH, d_weights_TK, arrived = buffer.combine(
            d_rows_RH.contiguous(), received.handle, topk_weights=d_weights_RK, previous_event=buffer.capture(),
            async_finish=True, allocate_on_comm_stream=True)
        return _Started(arrived, lambda: (d_x_TH, d_weights_TK, None))

    def _rows(self, x_TH: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rows to send: the tokens, or in FP8 their elements and scales."""
        check_rows(x_TH.shape[1], x_TH.dtype, _BLOCK if self._in_fp8 else None)
        return tuple(quantize_rows(x_TH, _BLOCK)) if self._in_fp8 else x_TH.contiguous()

    def _results(self, rows: Tensor | tuple[Tensor, Tensor], context: _Context) -> tuple[Any, ...]:
        """Return the results of a dispatch whose rows have arrived."""
        if isinstance(rows, Tensor):
            return rows, context.weights_RK, context.received
        quantized = QuantizedRows(*rows)
        return dequantized(
            quantized.elements, quantized.scales, _BLOCK, torch.bfloat16, context.weights_RK, context.received)


class _Combine:
    """Communication that returns the outputs of experts to their tokens, summed."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.group: ProcessGroup | None = buffer.group

    def forward(self, inputs: tuple[Tensor, Received]) -> Pending:
        rows, received = inputs
        rows_RH = rows.flatten(0, -2)
        if rows_RH.dtype is not torch.bfloat16:
            raise ValueError(f"combine got rows in {rows.dtype}, expected bfloat16: keep the dtype of the dispatch")
        y_TH, _, arrived = self._buffer.combine(
            rows_RH.contiguous(), received.handle, previous_event=self._buffer.capture(), async_finish=True,
            allocate_on_comm_stream=True)
        return _Started(arrived, lambda: (y_TH,), (received, y_TH.shape))

    def backward(self, context: tuple[Received, tuple[int, int]], gradients: tuple[Tensor | None, ...]) -> Pending:
        received, shape = context
        d_y_TH = gradient_rows(gradients[0], shape, torch.bfloat16, received.ids.device)
        d_rows_RH, *_, arrived = self._buffer.dispatch(
            d_y_TH.contiguous(), handle=received.handle, previous_event=self._buffer.capture(), async_finish=True,
            allocate_on_comm_stream=True)
        return _Started(arrived, lambda: (d_rows_RH, None))


class _Started:
    """Communication on DeepEP's stream. arrived: its `EventOverlap`. results: called once it is waited for."""

    def __init__(self, arrived: Any, results: Callable[[], tuple[Any, ...]], context: Any = None) -> None:
        self._arrived = arrived
        self._results = results
        self._context = context

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        self._arrived.current_stream_wait()
        return self._results(), self._context


class _Pending:
    """Communication that `advance` starts, because the host waits in `start` for the work before it."""

    def __init__(self, start: Callable[[], _Started]) -> None:
        self._start = start
        self._started: _Started | None = None

    def advance(self) -> None:
        if self._started is None:
            self._started = self._start()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        self.advance()
        assert self._started is not None, "advance starts it"
        return self._started.wait()
