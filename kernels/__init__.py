"""Triton kernels of layers, and their PyTorch references. They are independent of pipelines."""

from dualpipe.kernels.cross_entropy import cross_entropy
from dualpipe.kernels.grouped_gemm import (
    WgradOperands,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_merged,
)
from dualpipe.kernels.grouped_gemm_quantized import grouped_gemm_dequantize, grouped_gemm_fp8
from dualpipe.kernels.norm import rms_norm, rms_norm_backward
from dualpipe.kernels.rotary import rotate_heads, rotate_heads_backward
from dualpipe.kernels.routing import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu
from dualpipe.kernels.top_k import softmax_top_k, softmax_top_k_backward

__all__ = [
    "SortedTokens", "WgradOperands", "clamped_swiglu", "combine_tokens", "cross_entropy", "dispatch_tokens",
    "grouped_gemm", "grouped_gemm_dequantize", "grouped_gemm_dgrad", "grouped_gemm_fp8", "grouped_gemm_swiglu",
    "grouped_gemm_wgrad", "grouped_gemm_wgrad_merged", "rms_norm", "rms_norm_backward", "rotate_heads",
    "rotate_heads_backward", "softmax_top_k", "softmax_top_k_backward", "sort_tokens", "swiglu",
]
