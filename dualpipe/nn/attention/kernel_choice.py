"""Choose the kernel that torch's `scaled_dot_product_attention` runs on a GPU.

torch prefers FlashAttention 2 on every device. Which kernel is the fastest depends on the GPU, the releases and the
sizes of the heads, so those that are installed are timed with the model's sizes.

    choice = choose_attention_kernel("auto", device, [HeadSize(128, 128)], ranks)
    with use_attention_kernel(choice):    # for the whole process, until the end of the `with`
        ...

Attention over documents, in windows or with sinks is FlexAttention's and does not depend on the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualpipe.nn.pick_fastest import check_runs, pick_fastest
from dualpipe.runtime.ranks.rank_sync import RankSync

AUTO = "auto"
DEFAULT = "default"  # torch's own order

_TRIAL_HEADS = 16
_TRIAL_TOKENS = 4096
_FLASH_RELEASES = {"fa3": "FA3", "fa4": "FA4"}  # names by which torch activates them
_BACKENDS = {
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ATTENTION_KERNELS = (AUTO, DEFAULT, *_BACKENDS)


class HeadSize(NamedTuple):
    """Dimensions of a head: of queries and keys, and of values."""

    qk_dim: int
    v_dim: int


def head_size(module: nn.Module) -> HeadSize | None:
    """Return the size of the heads of an attention module, of this library or transformers; None for others."""
    for qk_name, v_name in (("qk_dim", "v_dim"), ("qk_head_dim", "v_head_dim"), ("head_dim", "head_dim")):
        qk_dim = getattr(module, qk_name, None)
        v_dim = getattr(module, v_name, None)
        if isinstance(qk_dim, int) and isinstance(v_dim, int):
            return HeadSize(qk_dim, v_dim)
    return None


class AttentionChoice(NamedTuple):
    """The kernel that was chosen: one of `ATTENTION_KERNELS` other than "auto"; and why, for the log."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"attention by {self.kernel!r}: {self.reason}"


def choose_attention_kernel(
    kernel: str, device: torch.device, head_sizes: Iterable[HeadSize], ranks: RankSync, *,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionChoice:
    """Choose the kernel for causal attention on a CUDA device. Collective over `ranks`.

    Args:
        kernel: "auto", "default" for torch's own order, or a kernel by name.
        device: device of the model.
        head_sizes: sizes of the heads of this rank's layers. Each is run, forward and backward.
        ranks: ranks that use the same kernel.
        dtype: dtype of queries, keys and values.

    On other devices, and for a dtype that no fused kernel takes, the choice is torch's own order.

    Raises:
        ValueError: on every rank, if `kernel` is unknown, or was asked for by name and does not run.
    """
    sizes = list(dict.fromkeys(head_sizes))
    if kernel == AUTO and device.type != "cuda":
        return AttentionChoice(DEFAULT, f"fused kernels are for CUDA, the model is on {device.type}")
    if kernel == AUTO and dtype not in (torch.bfloat16, torch.float16):
        return AttentionChoice(DEFAULT, f"the faster kernels take bfloat16 and float16, the model computes in {dtype}")
    if kernel == AUTO:
        run = partial(_run_attention, sizes=sizes, device=device, dtype=dtype)
        choice = pick_fastest(tuple(_BACKENDS), run if sizes else None, device, ranks, default=DEFAULT)
        reason = f"a forward and a backward of {_TRIAL_HEADS} heads and {_TRIAL_TOKENS} tokens take {choice}"
        if choice.name == DEFAULT:
            reason = f"no fused kernel runs: {choice}" if sizes else "no layer has heads"
        return AttentionChoice(choice.name, reason)
    ranks.agree(lambda: _check_kernel(kernel, sizes, device, dtype))
    return AttentionChoice(kernel, "torch's own order, as configured" if kernel == DEFAULT else "as configured")


def _check_kernel(kernel: str, sizes: list[HeadSize], device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if a kernel is unknown or does not run heads of these sizes."""
    if kernel == DEFAULT:
        return
    if kernel not in _BACKENDS:
        raise ValueError(f"unknown attention kernel {kernel!r}; expected one of {', '.join(ATTENTION_KERNELS)}")
    if device.type != "cuda":
        raise ValueError(f"attention kernel {kernel!r} needs a CUDA device, got {device}; use {AUTO!r}")
    check_runs(lambda: _run_attention(kernel, sizes, device, dtype), f"attention kernel {kernel!r}",
               f"one that is installed and takes heads of {_described(sizes)} in {dtype}; use {AUTO!r}")


def _run_attention(kernel: str, sizes: list[HeadSize], device: torch.device, dtype: torch.dtype) -> None:
    """Run causal attention of each size of heads by a kernel, forward and backward; raise an error if it cannot."""
    if kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic algorithms are on, and its backward is not deterministic")
    with _activated(kernel), sdpa_kernel(_BACKENDS[kernel]):
        for size in sizes:
            _run_heads(size, device, dtype)


def _run_heads(size: HeadSize, device: torch.device, dtype: torch.dtype) -> None:
    """Run causal attention, forward and backward."""
    q, k, v = (
        torch.zeros(1, _TRIAL_HEADS, _TRIAL_TOKENS, dim, device=device, dtype=dtype).requires_grad_()
        for dim in (size.qk_dim, size.qk_dim, size.v_dim)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(y, (q, k, v), torch.ones_like(y))


@contextmanager
def use_attention_kernel(choice: AttentionChoice) -> Iterator[None]:
    """Have `scaled_dot_product_attention` prefer the chosen kernel in the whole process.

    A call that the kernel does not take, such as one in float32, goes to the next in torch's order.
    """
    if choice.kernel == DEFAULT:
        yield
        return
    preferred = _BACKENDS[choice.kernel]
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.are_deterministic_algorithms_enabled():
        others.remove(SDPBackend.CUDNN_ATTENTION)
    order = list(dict.fromkeys((preferred, *others)))
    with _activated(choice.kernel), sdpa_kernel(order, set_priority=True):
        yield


@contextmanager
def _activated(kernel: str) -> Iterator[None]:
    """Activate the FlashAttention release that `kernel` names, if it names one, inside of the `with`."""
    release = _FLASH_RELEASES.get(kernel)
    if release is None:
        yield
        return
    before = torch_attention.current_flash_attention_impl()
    torch_attention.activate_flash_attention_impl(release)
    try:
        yield
    finally:
        torch_attention.restore_flash_attention_impl()
        if before is not None:
            torch_attention.activate_flash_attention_impl(before)


def _described(sizes: Iterable[HeadSize]) -> str:
    """Return sizes of heads as text."""
    return ", ".join(f"{size.qk_dim} (queries and keys) and {size.v_dim} (values)" for size in sizes)
