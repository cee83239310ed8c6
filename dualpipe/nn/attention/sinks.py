"""Attention sinks (gpt-oss): one learned score per head that only adds to the denominator of the softmax."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks(y_BASV: Tensor, lse_BAS: Tensor, sinks_A: Tensor) -> Tensor:
    """Add sinks to the result of attention without them, from the log-sum-exp of its scores.

    A sink s adds e^s to the softmax's denominator Z = e^lse, so it scales the result by Z / (Z + e^s), which is
    sigmoid(lse - s). Returns (B, A, S, V) in the dtype of `y_BASV`.
    """
    share_BAS = torch.sigmoid(lse_BAS - sinks_A.to(lse_BAS.dtype).unsqueeze(-1))
    return (y_BASV * share_BAS.unsqueeze(-1)).to(y_BASV.dtype)
