"""Tensors stored as quantized blocks with scales, for use as parameters: see `tensor`."""

from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.quantized import operators  # noqa: F401  (registers the operators of the tensors)
from dualpipe.quantized.quantize_model import quantize_weights, requantize
from dualpipe.quantized.tensor import QuantizedTensor, strict

__all__ = ["FORMATS", "Format", "QuantizedTensor", "quantize_weights", "requantize", "strict"]
