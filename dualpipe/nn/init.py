"""Parameter initialization from names: a value depends on the seed and the parameter's name only.

A model therefore starts from the same values however it is divided: into stages, FSDP2 shards, or the experts of
expert-parallel ranks.
"""

from __future__ import annotations

import hashlib
from math import gcd, prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.quantized.quantize_model import quantized_part

_BLOCK = 2**20  # elements per draw: 4 MB, small beside any layer, and large enough that drawing dominates the time
_GROUP = 16  # torch draws normal values in groups of 16, and uses another method for fewer than one group


def name_seed(seed: int, name: str) -> int:
    """Return the generator seed of a parameter name, below 2**63."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def seeded_normal_(param: Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill `param` from N(0, std^2) with a generator seeded by (seed, name); a shard gets its slice of these values.

    Values are drawn in float32 on the CPU: they are the same on every device, and a bfloat16 or float64 model has the
    values of the float32 one, rounded or widened. Every rank draws blocks of rows up to the end of its shard; it never
    holds more than one block, and nothing is communicated.
    """
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    shard, slices = local_part(param)
    if shard.numel() == 0:
        return
    if param.ndim == 0:
        shard.copy_(torch.empty((), dtype=torch.float32, device="cpu").normal_(0, std, generator=generator))
        return
    rows, *columns = slices
    num_rows = param.shape[0]
    row_size = prod(param.shape[1:])
    rows_per_block = _rows_per_block(row_size)
    start = 0
    while start < rows.stop:
        stop = start + rows_per_block
        if (num_rows - stop) * row_size < _GROUP:  # a rest below one group belongs to this block
            stop = num_rows
        block = torch.empty(stop - start, *param.shape[1:], dtype=torch.float32, device="cpu")
        block.normal_(0, std, generator=generator)
        shard_start = max(start, rows.start)
        shard_stop = min(stop, rows.stop)
        if shard_start < shard_stop:
            values = block[shard_start - start : shard_stop - start][:, *columns]
            shard[shard_start - rows.start : shard_stop - rows.start].copy_(values)
        start = stop


def _rows_per_block(row_size: int) -> int:
    """Return the number of rows per draw.

    It is a whole number of groups, so that the values equal those of a single draw of the whole tensor.
    """
    rows_per_group = _GROUP // gcd(_GROUP, row_size)
    return rows_per_group * max(1, _BLOCK // (rows_per_group * row_size))


def local_part(param: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's shard of `param`, a plain tensor that shares its memory, and its slices in the full tensor.

    Example: rank 1 of 2 holds `(slice(2, 4), slice(0, 3))` of a (4, 3) DTensor sharded on dimension 0.

    For a quantized parameter with a master copy, returns the master: after writing to it, call
    `dualpipe.quantized.requantize`.
    """
    quantized = quantized_part(param)
    master = None if quantized is None else quantized.master
    if not isinstance(param, DTensor):
        slices = tuple(slice(0, size) for size in param.shape)
        return param.detach() if master is None else master, slices
    # The method that distributed checkpoints use; correct if several mesh dimensions shard one dimension, in any order.
    (chunk,) = param.__create_chunk_list__()
    slices = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes))
    return param.to_local().detach() if master is None else master, slices
