"""Kernels of the experts and their PyTorch references; they know nothing of pipelines."""

from dualpipe.kernels.cross_entropy import cross_entropy
from dualpipe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_swiglu, grouped_gemm_wgrad
from dualpipe.kernels.routing import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu

__all__ = [
    "SortedTokens", "clamped_swiglu", "combine_tokens", "cross_entropy", "dispatch_tokens", "grouped_gemm",
    "grouped_gemm_dgrad", "grouped_gemm_swiglu", "grouped_gemm_wgrad", "sort_tokens", "swiglu",
]
