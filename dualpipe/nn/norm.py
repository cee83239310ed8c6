"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    The normalisation runs in `promote_types(dtype, float32)` and is rounded to the dtype of `x` before the weight is
    applied, as in transformers' Qwen3: bfloat16 gains precision, and float64 stays float64.
    """

    def __init__(
        self, size: int, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> the same shape and dtype."""
        # A node of its own in every dtype: the norm's two gradients of x are added before those of other readers, so
        # that the bits do not depend on where a graph is cut.
        wide = x.view_as(x).to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
