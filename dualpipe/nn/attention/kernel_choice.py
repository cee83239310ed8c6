"""Choose the kernel that torch's `scaled_dot_product_attention` runs on a GPU.

torch prefers FlashAttention 2 on every device. `KERNELS_BY_ARCHITECTURE` orders the kernels by what is known of each
architecture instead; the first of them that is installed and runs a small attention of the model's sizes is chosen.

    choice = choose_attention_kernel("auto", device, [HeadSize(128, 128)])
    with use_attention_kernel(choice):    # for the whole process, until the end of the `with`
        ...

Attention over documents, in windows or with sinks is FlexAttention's and does not depend on the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualpipe.kernels.common import architecture
from dualpipe.runtime.errors import first_line

AUTO = "auto"
DEFAULT = "default"  # torch's own order

_TRIAL_TOKENS = 128
_FLASH_RELEASES = {"fa3": "FA3", "fa4": "FA4"}  # names by which torch activates them
_BACKENDS = {
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ATTENTION_KERNELS = (AUTO, DEFAULT, *_BACKENDS)


class Candidate(NamedTuple):
    """A kernel and why it has its place in the order."""

    kernel: str
    reason: str


_EFFICIENT = Candidate("efficient", "takes head dimensions that the others refuse")
_FLASH_2 = Candidate("flash", "FlashAttention 2, which is part of torch")

# By the major number of the compute capability; the fastest first.
KERNELS_BY_ARCHITECTURE = {
    9: (
        Candidate("fa3", "FlashAttention 3 is written for Hopper: 1.5 to 2 times FlashAttention 2 (arXiv:2407.08608)"),
        Candidate("cudnn", "1.7 to 2.3 times FlashAttention 2 for training shapes on an H100 (transformers PR 48163)"),
        Candidate("fa4", "FlashAttention 4 runs on Hopper too, and is written for Blackwell"),
        _FLASH_2,
        _EFFICIENT,
    ),
    10: (
        Candidate("fa4", "FlashAttention 4 is written for Blackwell"),
        Candidate("cudnn", "cuDNN has kernels for Blackwell; FlashAttention 2 has none"),
        _FLASH_2,
        _EFFICIENT,
    ),
}
# cuDNN takes 1.2 times the time of FlashAttention 2 on an A100 and is even with it on an L40S (transformers PR 48163).
_ON_OTHER_ARCHITECTURES = (_FLASH_2, _EFFICIENT)


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
    """The kernel that was chosen.

    kernel: one of `ATTENTION_KERNELS` other than "auto". reason: why it was chosen. passed_over: preferred kernels that
    do not run, each with the reason.
    """

    kernel: str
    reason: str
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"attention by {self.kernel!r}: {self.reason}"
        if self.passed_over:
            text += f" (passed over: {'; '.join(self.passed_over)})"
        return text


def choose_attention_kernel(
    kernel: str, device: torch.device, head_sizes: Iterable[HeadSize], *, dtype: torch.dtype = torch.bfloat16
) -> AttentionChoice:
    """Choose the kernel for causal attention on a CUDA device.

    Args:
        kernel: "auto", "default" for torch's own order, or a kernel by name.
        device: device of the model.
        head_sizes: sizes of the model's heads. Each is tried, forward and backward.
        dtype: dtype of queries, keys and values.

    On other devices, and for a dtype that no fused kernel takes, the choice is torch's own order.

    Raises:
        ValueError: `kernel` is unknown, or was asked for by name and does not run.
    """
    if kernel not in ATTENTION_KERNELS:
        raise ValueError(f"unknown attention kernel {kernel!r}; expected one of {', '.join(ATTENTION_KERNELS)}")
    sizes = list(dict.fromkeys(head_sizes))
    if kernel == DEFAULT:
        return AttentionChoice(DEFAULT, "torch's own order, as configured")
    if device.type != "cuda":
        if kernel != AUTO:
            raise ValueError(f"attention kernel {kernel!r} needs a CUDA device, got {device}; use {AUTO!r}")
        return AttentionChoice(DEFAULT, f"fused kernels are for CUDA, the model is on {device.type}")
    if dtype not in (torch.bfloat16, torch.float16) and kernel == AUTO:
        return AttentionChoice(DEFAULT, f"the faster kernels take bfloat16 and float16, the model computes in {dtype}")
    if kernel != AUTO:
        failure = _failure(kernel, device, sizes, dtype)
        if failure:
            raise ValueError(f"attention kernel {kernel!r} does not run on {device}: {failure}; expected one that is "
                             f"installed and takes heads of {_described(sizes)} in {dtype}; use {AUTO!r}")
        return AttentionChoice(kernel, "as configured")
    candidates = KERNELS_BY_ARCHITECTURE.get(architecture(device) // 10, _ON_OTHER_ARCHITECTURES)
    return _first_that_runs(candidates, device, sizes, dtype)


def _first_that_runs(
    candidates: Iterable[Candidate], device: torch.device, sizes: list[HeadSize], dtype: torch.dtype
) -> AttentionChoice:
    """Return the first candidate that runs all sizes of heads."""
    passed_over: list[str] = []
    for candidate in candidates:
        failure = _failure(candidate.kernel, device, sizes, dtype)
        if not failure:
            return AttentionChoice(candidate.kernel, candidate.reason, tuple(passed_over))
        passed_over.append(f"{candidate.kernel!r}, {failure}")
    return AttentionChoice(DEFAULT, "no fused kernel runs", tuple(passed_over))


def _failure(kernel: str, device: torch.device, sizes: list[HeadSize], dtype: torch.dtype) -> str:
    """Return why a kernel does not run a small attention with heads of these sizes, "" if it does."""
    if kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic, which is asked for"
    try:
        with _activated(kernel), sdpa_kernel(_BACKENDS[kernel]):
            for size in sizes:
                _run_small_attention(size, device, dtype)
    except Exception as error:  # whatever the kernel's package raises: it is not installed, or refuses the operands
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _run_small_attention(size: HeadSize, device: torch.device, dtype: torch.dtype) -> None:
    """Run causal attention of 2 heads, forward and backward."""
    dims = (size.qk_dim, size.qk_dim, size.v_dim)
    q, k, v = (torch.zeros(1, 2, _TRIAL_TOKENS, dim, device=device, dtype=dtype).requires_grad_() for dim in dims)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(y.sum(), (q, k, v))


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
    """Have torch's flash attention be the release that `kernel` names, if it names one."""
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
