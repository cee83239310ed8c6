"""Rotary position embedding (Su et al., arXiv:2104.09864), in the half-split layout of transformers.

Computed where it is used: a buffer would have to survive meta devices, `.to(dtype)` and checkpoints.

Dimension letters: B batch, T positions, A attention heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/D), each (T, D) with both halves alike, in dtype and on device of `like`.

    Angles are computed in `promote_types(dtype, float32)`: for float32 as transformers does, for float64 exactly.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponent_d = torch.arange(0, head_dim, 2, dtype=dtype, device=like.device) / head_dim
    positions_T = torch.arange(length, dtype=dtype, device=like.device)
    angles_TD = torch.outer(positions_T, 1.0 / theta**exponent_d).repeat(1, 2)
    return angles_TD.cos().to(like.dtype), angles_TD.sin().to(like.dtype)


def apply_rotary(x_BATD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of (B, A, T, D) by its position's angle."""
    first, second = x_BATD.chunk(2, dim=-1)
    return x_BATD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD
