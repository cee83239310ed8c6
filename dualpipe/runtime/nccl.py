"""NCCL's communicators: what each is for, how many blocks its kernels may take, and how many can wait at once."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist


class Traffic(NamedTuple):
    """The limits of an NCCL communicator, by its use.

    ctas: the most blocks in its kernels, of which each has a multiprocessor for itself as long as it waits. urgent:
    they are given one before the blocks of other kernels.
    """

    ctas: int
    urgent: bool


# A communicator runs one kernel at a time, and any may wait for its peer: all of them together must fit the device, and
# leave most of it to computing. NCCL by itself takes a block for each 10 GB/s of NVLink, 32 on an H100.
LINK = Traffic(4, urgent=True)  # between two stages, one direction; and what little all ranks of a pipeline exchange
TOTALS = Traffic(4, urgent=False)  # what little all ranks exchange
EXPERTS = Traffic(16, urgent=True)  # rows to experts and back
CONTEXT = Traffic(8, urgent=True)  # keys and values, or heads, between the ranks that share a sequence
SHARDS = Traffic(16, urgent=False)  # parameters and gradients of FSDP2
MOST_LINKS = 8  # of a rank in the middle of a V: to and from both neighbours, activations and gradients


def nccl_options(traffic: Traffic, timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    """Options for one process group: torch writes the group's name and ranks into them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=traffic.urgent)
    options.config.max_ctas, options._timeout = traffic.ctas, timeout
    return options


def waiting_blocks(links: int = MOST_LINKS) -> int:
    """Return the number of blocks of NCCL's kernels that can wait at once on a rank with so many links.

    There is a communicator for each, and one for "pp", "ep", "dp", "dp" with "ep", and all ranks; where there is "cp"
    those of CONTEXT are more. NCCL_MAX_CTAS replaces our limits, NCCL_MAX_NCHANNELS lowers them; what is no number
    counts as not set.
    """
    given = (os.environ.get(f"NCCL_MAX_{name}", "") for name in ("CTAS", "NCHANNELS"))
    instead, most = (int(value) if value.isdecimal() else 0 for value in given)
    wanted = (instead or traffic.ctas for traffic in (*[LINK] * links, LINK, EXPERTS, SHARDS, SHARDS, TOTALS))
    return sum(min(blocks, most or blocks) for blocks in wanted)
