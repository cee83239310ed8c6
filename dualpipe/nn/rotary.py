"""Rotary position embedding (Su et al., arXiv:2104.09864), also stretched by YaRN (Peng et al., arXiv:2309.00071).

Computed where it is used: a buffer would have to survive meta devices, `.to(dtype)` and checkpoints.

Dimension letters: B batch, S positions, A attention heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """How a model is stretched to `factor` times the positions that it was trained on; named as in `config.json`.

    Dimensions that turn more than `beta_fast` times within the original length keep their frequency, those that turn
    less than `beta_slow` times have it divided by `factor`, and a ramp lies between. `attention_factor` multiplies cos
    and sin; None: 0.1 ln(factor) + 1 (or, with `mscale` and `mscale_all_dim`, DeepSeek's quotient of two such).
    truncate: whether the ramp's ends are rounded to whole dimensions (gpt-oss does not).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def stretch(self, frequency_d: Tensor, head_dim: int, theta: float) -> Tensor:
        """Those of the frequencies (D/2,) that are slow divided by `factor`, and some between in part."""
        low, high = (
            head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        each_d = torch.arange(head_dim // 2, dtype=frequency_d.dtype, device=frequency_d.device)
        slow_d = ((each_d - low) / (high - low if high != low else 0.001)).clamp(0, 1)  # 0: fast, 1: slow
        return frequency_d / self.factor * slow_d + frequency_d * (1 - slow_d)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 mscale ln(factor) + 1, and 1 for what is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """The angles of a head: position * theta^(-2i/D) for pair i."""

    head_dim: int
    theta: float
    yarn: Yarn | None = None

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions (...,) -> cos and sin, each (..., D) with both halves alike, in `dtype`: float64 exactly, float32
        as transformers does."""
        exponent_d = torch.arange(0, self.head_dim, 2, dtype=dtype, device=positions.device) / self.head_dim
        frequency_d = 1.0 / self.theta**exponent_d
        if self.yarn is not None:
            frequency_d = self.yarn.stretch(frequency_d, self.head_dim, self.theta)
        angles = (positions.to(dtype).unsqueeze(-1) * frequency_d).repeat(*[1] * positions.dim(), 2)
        scale = 1.0 if self.yarn is None else self.yarn.scale()
        return angles.cos() * scale, angles.sin() * scale


def apply_rotary(x_BASD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of (B, A, S, D) by its position's angle."""
    first, second = x_BASD.chunk(2, dim=-1)
    return x_BASD * cos + torch.cat((-second, first), dim=-1) * sin


def apply_rotary_interleaved(x_BASD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[2i], x[2i + 1]), as DeepSeek stores them -> the pairs' halves, first all first ones.

    Queries and keys come out in the same order, so their products do not depend on it.
    """
    return apply_rotary(rearrange(x_BASD, "B A S (pairs two) -> B A S (two pairs)", two=2), cos, sin)
