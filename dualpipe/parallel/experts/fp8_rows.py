"""Dispatch of rows in FP8: one exchange sends the elements, another their scales packed with the routing weights.

A dispatch returns received rows twice: quantized, for GEMMs in FP8, and dequantized, as the tensor that has a gradient.
Method: DeepSeek-V3 (arXiv:2412.19437, section 3.3), which also keeps outputs and gradients in 16 bits.

Dimension letters: S sent rows, R received rows, K experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import ROW_FORMATS, dequantize_rows, quantize_rows
from dualpipe.parallel.all_to_all import CommStream, PendingRows

SCALES = {block: format.scale for block, format in ROW_FORMATS.items()}  # scale dtype by block size


def dequantized(
    elements: Tensor, scales: Tensor, block: int, dtype: torch.dtype, weights_RK: Tensor, received: Any
) -> tuple[Tensor, Tensor, Any]:
    """Return the results of a dispatch: rows (R, H) in `dtype`, weights, and a `Received` with the quantized rows.

    elements, scales: the received rows, as bytes or in their dtypes. block: elements that share a scale. `received`
    is not changed, since it outlives the rows; the returned copy refers to them.
    """
    rows = QuantizedRows(elements.view(torch.float8_e4m3fn), scales.view(SCALES[block]))
    return dequantize_rows(rows, dtype), weights_RK, received._replace(quantized=rows)


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
