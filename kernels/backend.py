"""Where a kernel runs: Triton on CUDA, and everywhere under TRITON_INTERPRET=1; the PyTorch reference otherwise.

Kernel files import `triton` and `tl` from here, so that they can be imported where Triton is not installed (it exists
for Linux only).
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when it is imported, so once

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(jit=lambda fn: fn, cdiv=lambda a, b: -(-a // b))
    tl = None

__all__ = ["INTERPRET", "architecture", "num_sms", "tl", "triton", "use_triton"]


def use_triton(tensor: Tensor) -> bool:
    """Whether the kernel for `tensor` is the Triton one."""
    return tl is not None and (INTERPRET or tensor.is_cuda)


def architecture(device: torch.device) -> int:
    """Compute capability as a number: 90 for Hopper; the interpreter counts as 80 (no tensor descriptors)."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device, for persistent kernels; a few under the interpreter, which runs them in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
