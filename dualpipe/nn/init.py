"""Initial values that depend on a parameter's name alone, so that every cut into stages starts from the same model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


@torch.no_grad()
def seeded_normal_(param: Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill `param` from N(0, std^2) with a generator seeded by (seed, name).

    Drawn in float32 on the CPU: the values are the same on every device, and those of a bfloat16 or float64 model are
    those of the float32 one, rounded or widened.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    param.copy_(torch.empty(param.shape, dtype=torch.float32).normal_(0, std, generator=generator))
