"""Who writes what of a checkpoint: every box of every tensor once, also where several ranks hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dualpipe.checkpoint.manifest import StoredTensor, gaps_in
from dualpipe.checkpoint.state import REPEATED, TensorPart
from dualpipe.checkpoint.tensors import Box, as_bytes, bytes_in_file, bytes_of
from dualpipe.kernels.formats import Format
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import raise_for
from dualpipe.runtime.rank_sync import RankSync

_SAMPLE = 64  # elements of a part
# What a rank could write of a tensor: its dtype and shape, a box.
Offer = tuple[torch.dtype | Format, tuple[int, ...], Box]


def plan_together(
    ranks: RankSync, stages: int, parts: Mapping[str, TensorPart]
) -> tuple[list[str], dict[str, StoredTensor]]:
    """Who writes what, every box of every tensor once: the names that this rank writes and, on rank 0, all tensors.

    stages: a number that ranks with the same stages share. Raises ValueError, on all ranks, where they disagree on a
    tensor, or its parts overlap or leave a gap.
    """

    def sampled() -> tuple[int, dict[str, tuple[Offer, bytes]]]:
        """What this rank has, with the first elements of each part: they tell copies from different tensors."""
        samples: dict[str, bytes] = {}
        for device in {part.tensor.device for part in parts.values()} if ranks.size > 1 else ():
            heads = {name: as_bytes(part.tensor.reshape(-1)[:_SAMPLE].contiguous()) for name, part in parts.items()
                     if part.tensor.device == device}
            together = torch.cat([*heads.values()]).cpu()  # the host waits for the device once
            samples |= {name: bytes(bytes_of(head))
                        for name, head in zip(heads, together.split([*map(len, heads.values())]))}
        return stages, {name: ((part.dtype, part.shape, part.box), samples.get(name, b""))
                        for name, part in parts.items()}

    held = ranks.collect(ranks.agree(sampled))
    names, stored = ranks.agree(lambda: (None, {}) if held is None else assign(held))
    return ranks.hand_out(names), stored


def assign(
    held: Sequence[tuple[int, Mapping[str, tuple[Offer, bytes]]]],
) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """The names that each rank writes, and the tensors: of several that hold a box, the one with least writes it.

    held: of each rank the number of its stages, and by name what it offers, with a sample of the values. Raises
    ValueError where ranks disagree on a tensor, or its parts overlap or leave a gap.
    """
    stored: dict[str, StoredTensor] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    wrong = []
    for rank, (stages, offers) in enumerate(held):
        for name, ((dtype, shape, box), sample) in offers.items():
            if not box.numel and 0 not in shape:
                continue  # a shard without elements is nobody's
            holding = holders.setdefault((name, box), [])
            holding.append(rank)
            other_stages, others = held[holding[0]]
            if other_stages != stages and others[name][1] != sample:
                wrong.append(f"{name} has other values on rank {rank} than in an earlier one's stages; {REPEATED}")
            if stored.setdefault(name, StoredTensor(dtype, shape, {}))[:2] != (dtype, shape):
                wrong.append(f"{name} is {short_name(dtype)} {shape} on rank {rank}, and another on an earlier one")
    raise_for("all ranks must have the same tensors, in the dtypes of one plan for the whole model:", wrong)
    names: list[list[str]] = [[] for _ in held]
    filled = [0] * len(held)
    for (name, box), ranks in sorted(holders.items(), key=lambda item: len(item[1]) > 1):  # what one alone has first
        writer = min(ranks, key=filled.__getitem__)
        filled[writer] += bytes_in_file(stored[name].dtype, box.shape)
        names[writer].append(name)
        stored[name].boxes[box] = writer
    raise_for("all ranks together must have all of every tensor; a mesh that spans them must be given, and saving be "
              "called on each:", gaps_in(stored))
    return names, stored
