"""Rotary position embedding (Su et al., arXiv:2104.09864), with YaRN scaling (Peng et al., arXiv:2309.00071).

Angles are computed when they are needed: a buffer would have to survive meta devices, `.to(dtype)` and checkpoints.

Dimension letters: B batch, S sequence, A query heads, G key/value heads, D head dimension, d pairs of its dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe.kernels.rotary import rotate_heads, rotate_heads_backward, rotate_reference
from dualpipe.nn.deferral import needs_plain_autograd, return_or_defer
from dualpipe.nn.norm import SUM_OF_PARTS, PartialSums, RMSNorm


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of a model to `factor` times its training length; fields are named as in `config.json`.

    Dimensions with more than `beta_fast` rotations within the original length keep their frequency, those with fewer
    than `beta_slow` rotations have it divided by `factor`, and a ramp lies between. `attention_factor` multiplies cos
    and sin; None: `yarn_mscale(factor)`, or, with `mscale` and `mscale_all_dim` (DeepSeek),
    `yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)`.
    truncate: round the ends of the ramp to whole dimensions (gpt-oss does not).
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
        """Return the factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def stretch(self, frequency_d: Tensor, head_dim: int, theta: float) -> Tensor:
        """Return the frequencies (D/2,), slow ones divided by `factor` and those on the ramp partly."""
        low, high = (
            head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        pair_d = torch.arange(head_dim // 2, dtype=frequency_d.dtype, device=frequency_d.device)
        slow_d = ((pair_d - low) / (high - low if high != low else 0.001)).clamp(0, 1)  # 0: fast, 1: slow
        return frequency_d / self.factor * slow_d + frequency_d * (1 - slow_d)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's sqrt(1/t) for a temperature t: 0.1 mscale ln(factor) + 1, and 1 for a factor up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotation angles of a head: position * theta^(-2i/D) for pair i."""

    head_dim: int
    theta: float
    yarn: Yarn | None = None

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of positions (...,) -> (..., D) each, with two equal halves.

        dtype: dtype of the computation and the result. float64 is exact, float32 equals transformers.
        """
        exponent_d = torch.arange(0, self.head_dim, 2, dtype=dtype, device=positions.device) / self.head_dim
        frequency_d = 1.0 / self.theta**exponent_d
        if self.yarn is not None:
            frequency_d = self.yarn.stretch(frequency_d, self.head_dim, self.theta)
        angles = (positions.to(dtype).unsqueeze(-1) * frequency_d).repeat(*[1] * positions.dim(), 2)
        scale = 1.0 if self.yarn is None else self.yarn.scale()
        return angles.cos() * scale, angles.sin() * scale


def apply_rope(
    q_BSAD: Tensor, k_BSGD: Tensor, cos: Tensor, sin: Tensor, norms: Sequence[RMSNorm] = (), *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding to queries and keys -> (B, A, S, D) and (B, G, S, D), after their norms if given.

    cos, sin: (S, D), or (B, 1, S, D) if rows differ, in at least float32; see `Rotary.tables`.
    norms: the norms of queries and of keys; empty: none.
    interleaved: pairs are (x[2i], x[2i + 1]), as DeepSeek stores them, instead of (x[i], x[i + D/2]); the result has
        the halves of the pairs one after the other.
    """
    q_weight, k_weight = (norm.weight for norm in norms) if norms else (None, None)
    eps = norms[0].eps if norms else 0.0
    if torch.compiler.is_compiling() or needs_plain_autograd(q_weight, k_weight):
        q, k = (rotate_reference(x, cos, sin, weight, eps, interleaved)[0]
                for x, weight in ((q_BSAD, q_weight), (k_BSGD, k_weight)))
    else:
        q, k = _Rotate.apply(q_BSAD, q_weight, k_weight, k_BSGD, cos, sin, eps, interleaved)
    return q.transpose(1, 2), k.transpose(1, 2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, k: Tensor, cos: Tensor, sin: Tensor,
        eps: float, interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out, *scales = rotate_heads(q, k, cos, sin, q_weight, k_weight, eps, interleaved)
        # Named as `return_or_defer` expects; the parameters themselves, because saved tensors may come back as copies.
        ctx.weight = q_weight
        ctx.bias = k_weight
        ctx.interleaved = interleaved
        ctx.save_for_backward(*((None, None) if q_weight is None else (q, k)), cos, sin, q_weight, k_weight, *scales)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, *parts = rotate_heads_backward(dq, dk, *ctx.saved_tensors, ctx.interleaved)
        dq_weight, dk_weight = return_or_defer(ctx, PartialSums(*parts), SUM_OF_PARTS)
        return dq, dq_weight, dk_weight, dk, None, None, None, None
