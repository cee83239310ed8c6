"""Kernels of the experts and their PyTorch references; they know nothing of pipelines."""

from dualpipe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad

__all__ = ["grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"]
