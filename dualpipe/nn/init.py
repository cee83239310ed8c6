"""Initial values that depend on a parameter's name alone, so that every cut of a model starts from the same values:
into stages, into shards (FSDP2), into experts (expert parallelism)."""

from __future__ import annotations

import hashlib
from math import gcd, prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.quantized.quantize_model import quantized_part

_BLOCK = 2**20  # elements drawn at a time: 4 MB, little beside any layer, and enough that the drawing takes the time
_GROUP = 16  # torch draws normal values in groups of this many, and fewer than one group by another method


def name_seed(seed: int, name: str) -> int:
    """Return the seed of the values of one name, below 2**63."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def seeded_normal_(param: Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill `param` from N(0, std^2) with a generator seeded by (seed, name); a shard with its part of the same values.

    Drawn in float32 on the CPU: the values are the same on every device, and those of a bfloat16 or float64 model are
    those of the float32 one, rounded or widened. Every rank draws, in blocks of rows, what comes before the end of its
    part; it never holds more than a block, and nothing is communicated.
    """
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    local, part = local_part(param)
    if local.numel() == 0:
        return
    if param.ndim == 0:
        local.copy_(torch.empty((), dtype=torch.float32, device="cpu").normal_(0, std, generator=generator))
        return
    rows, columns, row_size = part[0], part[1:], prod(param.shape[1:])
    # Drawing block by block gives what drawing all at once gives: the blocks are whole groups, and leave no small rest.
    step = _GROUP // gcd(_GROUP, row_size)
    step *= max(1, _BLOCK // (step * row_size))
    start = 0
    while start < rows.stop:
        stop = start + step
        if (param.shape[0] - stop) * row_size < _GROUP:
            stop = param.shape[0]
        block = torch.empty(stop - start, *param.shape[1:], dtype=torch.float32, device="cpu")
        block.normal_(0, std, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            local[first - rows.start : last - rows.start].copy_(block[first - start : last - start][:, *columns])
        start = stop


def local_part(param: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of `param`, as a plain tensor that shares its memory, and where that lies in the whole.

    Example: rank 1 of 2 holds `(slice(2, 4), slice(0, 3))` of a (4, 3) DTensor sharded on dimension 0.

    Of a quantized one it is the master, if there is one: after filling that, call `dualpipe.quantized.requantize`.
    """
    quantized = quantized_part(param)
    master = None if quantized is None else quantized.master
    if not isinstance(param, DTensor):
        return param.detach() if master is None else master, tuple(slice(0, size) for size in param.shape)
    (chunk,) = param.__create_chunk_list__()  # what distributed checkpoints go by; right for every order of the shards
    place = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes))
    return param.to_local().detach() if master is None else master, place
