"""Who writes what: every box of every tensor once, by a rank that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dualpipe.checkpoint.manifest import StoredTensor, gaps_in
from dualpipe.checkpoint.state import REPEATED, Part
from dualpipe.checkpoint.tensors import Box, as_bytes, bytes_of
from dualpipe.dtypes import short_name
from dualpipe.errors import raise_for
from dualpipe.ranks import RankSync

_SAMPLE = 64  # elements of a part


class Offer(NamedTuple):
    """What a rank could write of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box


class Planned(NamedTuple):
    """What a rank writes, which holds as long as all ranks have the same to offer."""

    offers: dict[str, Offer]  # of this rank
    names: list[str]  # that this rank writes
    stored: dict[str, StoredTensor]  # what all write, on rank 0


class _Held(NamedTuple):
    """What a rank has, with the first elements of each part: they tell copies from different tensors."""

    stages: int
    offers: dict[str, Offer]
    samples: dict[str, bytes]


def offers_of(parts: Mapping[str, Part]) -> dict[str, Offer]:
    """What a rank with these parts could write, by name."""
    return {name: Offer(part.tensor.dtype, part.shape, part.box) for name, part in parts.items()}


def plan_together(ranks: RankSync, stages: int, parts: Mapping[str, Part]) -> Planned:
    """Agree on who writes what. stages: a number that ranks with the same stages share.

    Raises ValueError, on all ranks, where they disagree on a tensor, or its parts overlap or leave a gap.
    """
    offers = offers_of(parts)

    held = ranks.collect(ranks.agree(lambda: _Held(stages, offers, _samples(parts) if ranks.size > 1 else {})))
    names, stored = ranks.agree(lambda: (None, {}) if held is None else assign(held))
    return Planned(offers, ranks.hand_out(names), stored)


def _samples(parts: Mapping[str, Part]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for device in {part.tensor.device for part in parts.values()}:
        heads = {name: as_bytes(part.tensor.reshape(-1)[:_SAMPLE].contiguous()) for name, part in parts.items()
                 if part.tensor.device == device}
        together = torch.cat([*heads.values()]).cpu()  # the host waits for the device once
        found |= {name: bytes(bytes_of(head)) for name, head in zip(heads, together.split([*map(len, heads.values())]))}
    return found


def assign(held: Sequence[_Held]) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """The names that each rank writes, and the tensors: of several that hold the same box, the one with least has it.

    Raises ValueError as `plan_together` does.
    """
    stored: dict[str, StoredTensor] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    wrong = []
    for rank, (stages, offers, samples) in enumerate(held):
        for name, (dtype, shape, box) in offers.items():
            if not box.numel and 0 not in shape:
                continue  # a shard without elements is nobody's
            first = stored.setdefault(name, StoredTensor(dtype, shape, {}))
            holding = holders.setdefault((name, box), [])
            holding.append(rank)
            other = held[holding[0]]
            if other.stages != stages and other.samples[name] != samples[name]:
                wrong.append(f"{name} has other values on rank {rank} than in an earlier one's stages; {REPEATED}")
            if (first.dtype, first.shape) != (dtype, shape):
                wrong.append(f"{name} is {short_name(dtype)} {shape} on rank {rank}, and another on an earlier one")
    raise_for("all ranks must have the same tensors:", wrong)
    names: list[list[str]] = [[] for _ in held]
    filled = [0] * len(held)
    for (name, box), ranks in sorted(holders.items(), key=lambda item: len(item[1]) > 1):  # what one alone has first
        writer = min(ranks, key=filled.__getitem__)
        filled[writer] += box.numel * stored[name].dtype.itemsize
        names[writer].append(name)
        stored[name].boxes[box] = writer
    raise_for("all ranks together must have all of every tensor; a mesh that spans them must be given, and saving be "
              "called on each:", gaps_in(stored))
    return names, stored
