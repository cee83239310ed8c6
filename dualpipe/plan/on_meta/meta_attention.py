"""`F.scaled_dot_product_attention` on meta tensors, saving what a device's kernels save for the backward.

On the meta device, torch decomposes attention into GEMMs that materialize the scores. Fused kernels save the output and
one number per row of scores instead. GPUs always have a fused kernel; the CPU has one for some operands.

Dimension letters: B batch, N heads, S sequence, D head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MATH = 0  # torch.nn.attention.SDPBackend.MATH
_aten = torch.ops.aten


class DeviceAttention(TorchFunctionMode):
    """Context that runs attention on meta tensors with the fused kernels of GPUs, or of the CPU if `cpu` is True."""

    def __init__(self, cpu: bool) -> None:
        super().__init__()
        self._cpu = cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or the fused kernel of the device if `func` is attention."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(self._cpu, *args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    cpu: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """Return the output (B, N, S, D) of the kernel that the device would choose."""
    has_kernel = dropout_p == 0.0
    if cpu and has_kernel:
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in (query, key, value))
        has_kernel = _has_cpu_kernel(shapes, query.dtype, attn_mask is not None, is_causal, enable_gqa)
    if not has_kernel:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # kernels add the mask to the scores, as 0 and -inf
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    if cpu:
        output, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    elif attn_mask is None and query.shape[-1] == value.shape[-1]:
        output, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    else:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        output, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)
    return output


@lru_cache(maxsize=256)
def _has_cpu_kernel(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, has_mask: bool, is_causal: bool, enable_gqa: bool
) -> bool:
    """Return True if torch has a fused CPU kernel for operands of these shapes. shapes: without the batch dimension."""
    query, key, value = (torch.empty(1, *shape, dtype=dtype, device="cpu", requires_grad=True) for shape in shapes)
    mask = torch.empty(1, 1, shapes[0][1], shapes[1][1], dtype=dtype, device="cpu") if has_mask else None
    return torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, enable_gqa=enable_gqa) != _MATH
