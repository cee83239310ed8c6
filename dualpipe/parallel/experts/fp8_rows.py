"""Rows on their way to other ranks' experts in FP8: their elements by themselves, scales with what travels besides.

What arrives is given out twice: as it came, for products in FP8, and dequantized, as the tensor that has a gradient.
Method: DeepSeek-V3 (arXiv:2412.19437, section 3.3), where results and gradients go in half precision as well.

Dimension letters: S rows that are sent, R rows that are received, K experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import ROW_FORMATS, dequantize_rows, quantize_rows
from dualpipe.parallel.all_to_all import CommStream, PendingRows

SCALES = {block: format.scale for block, format in ROW_FORMATS.items()}  # by how many numbers have one


def scale_bytes(columns: int, block: int) -> int:
    """Bytes that the scales of a row of so many numbers take."""
    return ROW_FORMATS[block].scales_per_row(columns) * SCALES[block].itemsize


def dequantized(
    elements: Tensor, scales: Tensor, block: int, dtype: torch.dtype, weights_RK: Tensor, received: Any
) -> tuple[Tensor, Tensor, Any]:
    """What a dispatch returns, of the bytes of rows (R, H). `received`, which is kept longer, is not to hold them."""
    rows = QuantizedRows(elements.view(torch.float8_e4m3fn), scales.view(SCALES[block]))
    return dequantize_rows(rows, dtype), weights_RK, received._replace(quantized=rows)


class PendingFp8(PendingRows):
    """Rows (S, H) that are sent once more; None: zeros. besides: the weights and what else was received before."""

    def __init__(
        self, stream: CommStream, block: int, rows: Tensor | None, columns: int, sent: Sequence[int],
        received: Sequence[int], besides: tuple[Any, ...],
    ) -> None:
        super().__init__(stream, besides=besides)
        elements = scales = dtype = None
        if rows is not None:
            with stream.beside(self._made, rows):
                (elements, scales), dtype = quantize_rows(rows, block), torch.uint8
        self.send(elements, columns, sent, received, dtype)
        self.send(scales, scale_bytes(columns, block), sent, received, dtype)
        self._block, self._dtype = block, None if rows is None else rows.dtype

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Rows, weights and `Received`."""
        elements, scales = self.receive()
        if self._dtype is None or self.failure is not None:
            return (None, *self._besides), None
        return dequantized(elements, scales, self._block, self._dtype, *self._besides), None
