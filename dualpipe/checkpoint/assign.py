"""Assign every box of every tensor of a checkpoint to one rank that writes it, even if several ranks hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dualpipe.checkpoint.manifest import StoredTensor, find_gaps
from dualpipe.checkpoint.state import STAGE_NAMES_HINT, TensorPart
from dualpipe.checkpoint.tensors import Box, as_bytes, bytes_in_file, bytes_of
from dualpipe.kernels.formats import Format
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import raise_for
from dualpipe.runtime.ranks.rank_sync import RankSync

_SAMPLE = 64  # elements of a part that are compared with those of its copies


class Offer(NamedTuple):
    """A box of a tensor that a rank holds and could write, with dtype and shape of the complete tensor."""

    dtype: torch.dtype | Format
    shape: tuple[int, ...]
    box: Box


class RankOffers(NamedTuple):
    """The offers of a rank by name, each with a sample of its values.

    stages: identifies the rank's stages: the same number on all ranks that hold them.
    """

    stages: int
    offers: Mapping[str, tuple[Offer, bytes]]


def agree_on_writers(
    ranks: RankSync, stages: int, parts: Mapping[str, TensorPart]
) -> tuple[list[str], dict[str, StoredTensor]]:
    """Assign every box to a rank; return the names that this rank writes and, on rank 0, all tensors. Collective.

    Args:
        ranks: all ranks.
        stages: identifies this rank's stages: the same number on all ranks that hold them.
        parts: this rank's parts by name.

    Raises:
        ValueError: on all ranks, if they disagree on a tensor, or its parts overlap or leave a gap.
    """

    def sample_offers() -> RankOffers:
        samples = _sample(parts) if ranks.size > 1 else {}
        return RankOffers(stages, {name: (Offer(part.dtype, part.shape, part.box), samples.get(name, b""))
                                   for name, part in parts.items()})

    rank_offers = ranks.collect(ranks.agree(sample_offers))
    names, stored = ranks.agree(lambda: (None, {}) if rank_offers is None else assign_writers(rank_offers))
    return ranks.scatter(names), stored


def _sample(parts: Mapping[str, TensorPart]) -> dict[str, bytes]:
    """Return the bytes of the first elements of every part. They distinguish copies from tensors that differ."""
    samples: dict[str, bytes] = {}
    for device in {part.tensor.device for part in parts.values()}:
        heads = {name: as_bytes(part.tensor.reshape(-1)[:_SAMPLE].contiguous()) for name, part in parts.items()
                 if part.tensor.device == device}
        on_host = torch.cat([*heads.values()]).cpu()  # the host waits for the device once
        sizes = [len(head) for head in heads.values()]
        samples |= {name: bytes(bytes_of(head)) for name, head in zip(heads, on_host.split(sizes))}
    return samples


def assign_writers(rank_offers: Sequence[RankOffers]) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """Return the names that each rank writes, and all tensors.

    Of several ranks that hold a box, the one with the fewest bytes to write gets it.

    Args:
        rank_offers: the offers of every rank.

    Raises:
        ValueError: ranks disagree on a tensor, or its parts overlap or leave a gap.
    """
    stored: dict[str, StoredTensor] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    problems = []
    for rank, (stages, offers) in enumerate(rank_offers):
        for name, ((dtype, shape, box), sample) in offers.items():
            if not box.numel and 0 not in shape:
                continue  # nobody writes an empty shard
            box_holders = holders.setdefault((name, box), [])
            box_holders.append(rank)
            first_stages, first_offers = rank_offers[box_holders[0]]
            if first_stages != stages and first_offers[name][1] != sample:
                problems.append(f"{name} has other values on rank {rank} than on rank {box_holders[0]}, which has "
                                f"other stages; {STAGE_NAMES_HINT}")
            tensor = stored.setdefault(name, StoredTensor(dtype, shape, {}))
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                problems.append(f"{name} is {short_name(dtype)} {shape} on rank {rank}, but {short_name(tensor.dtype)} "
                                f"{tensor.shape} on an earlier one")
    raise_for("all ranks must have the same tensors, in the dtypes of one plan for the whole model:", problems)
    names: list[list[str]] = [[] for _ in rank_offers]
    filled = [0] * len(rank_offers)
    # Assign the boxes with a single holder first.
    for (name, box), box_holders in sorted(holders.items(), key=lambda item: len(item[1]) > 1):
        writer = min(box_holders, key=filled.__getitem__)
        filled[writer] += bytes_in_file(stored[name].dtype, box.shape)
        names[writer].append(name)
        stored[name].boxes[box] = writer
    raise_for("all ranks together must have all of every tensor; give a mesh that spans them, and save on each rank:",
              find_gaps(stored))
    return names, stored
