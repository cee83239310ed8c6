"""Tensors of blocks with scales, as parameters: see `tensor`.

Imports `kernels` and `runtime`.
"""

from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.quantized import operators  # noqa: F401  (which the tensors need)
from dualpipe.quantized.quantize_model import quantize_weights, requantize
from dualpipe.quantized.tensor import QuantizedTensor, strict

__all__ = ["FORMATS", "Format", "QuantizedTensor", "quantize_weights", "requantize", "strict"]
