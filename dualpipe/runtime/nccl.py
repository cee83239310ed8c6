"""NCCL communicators: limits by use, options of process groups, and the blocks that can wait at once."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist


class Traffic(NamedTuple):
    """Limits of an NCCL communicator for one use.

    ctas: maximum number of blocks of its kernels; a waiting block occupies a multiprocessor. urgent: its blocks are
    scheduled before those of other kernels.
    """

    ctas: int
    urgent: bool


# A communicator runs one kernel at a time, and any kernel may wait for its peer: all of them together must fit the
# device and leave most of it to computing. By default NCCL takes a block for every 10 GB/s of NVLink, 32 on an H100.
#
# A rank in the middle of a pipeline always has four receives posted, whose blocks hold their multiprocessors until the
# messages come: with one block for a link 3% of an H100's 132, with four 12%. One block takes 1.7 ms instead of 0.4 for
# an activation of 4096 tokens of width 2048, by NCCL's 10 GB/s for a block. Only the hops of the first and the last
# micro-batch add that to a step: 14 of them, 18 ms on 4 ranks, of about 0.8 s with 32 micro-batches of 6 layers of
# Qwen3-30B-A3B. These are estimates; `make gpu` measures the price of blocks.
LINK = Traffic(1, urgent=True)  # messages between two stages in one direction, and small ones of a whole pipeline
TOTALS = Traffic(4, urgent=False)  # small messages of all ranks
EXPERTS = Traffic(16, urgent=True)  # dispatch and combine
CONTEXT = Traffic(8, urgent=True)  # keys and values, or heads, between the ranks that share a sequence
SHARDS = Traffic(16, urgent=False)  # parameters and gradients of FSDP2
MAX_LINKS = 8  # of a rank in the middle of a V: to and from both neighbours, activations and gradients


def nccl_options(traffic: Traffic, timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    """Return new options for one process group.

    Two groups cannot share options: torch writes the group's name and ranks into them.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=traffic.urgent)
    options.config.max_ctas = traffic.ctas
    options._timeout = timeout
    return options


def waiting_blocks(links: int = MAX_LINKS) -> int:
    """Return the maximum number of blocks of NCCL's kernels that can wait at once on a rank.

    There is a communicator for each of the rank's `links`, and one for "pp", "ep", "dp", "dp" with "ep", and all ranks;
    with "cp" those of CONTEXT come on top. NCCL_MAX_CTAS replaces the limits of this module, NCCL_MAX_NCHANNELS lowers
    them; a value that is no number is ignored.
    """
    max_ctas = _environment_number("NCCL_MAX_CTAS")
    max_channels = _environment_number("NCCL_MAX_NCHANNELS")
    total = 0
    for traffic in (*[LINK] * links, LINK, EXPERTS, SHARDS, SHARDS, TOTALS):
        blocks = max_ctas or traffic.ctas
        total += min(blocks, max_channels or blocks)
    return total


def _environment_number(name: str) -> int:
    """Return the number in an environment variable; 0 if it is not set or no number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
