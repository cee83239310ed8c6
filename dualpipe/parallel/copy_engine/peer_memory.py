"""Interface of memory that the ranks of a group write into, and the places of their messages in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 16  # bytes; copies of aligned memory are the fastest
# Bytes of a rank's slots by device. On CUDA one round is enough for 4096 tokens of width 2048 in bfloat16 on 8 ranks,
# wherever they go: a token goes to a rank once, so a message has at most 4096 rows, 16 MiB, and two such slots for each
# of 7 peers take 224 MiB.
BUFFER_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}


class PeerMemory(Protocol):
    """Slots in the memory of every rank of a group, which its peers write into, and signals between the ranks."""

    rank: int
    size: int
    device: torch.device
    slot_bytes: int

    def slot(self, owner: int, source: int, number: int) -> Tensor:
        """Return the slot, as bytes, in the memory of `owner` that `source` writes its message `number` into."""

    def meet(self, peers: Sequence[int]) -> None:
        """Signal each of the peers, then wait for a signal from each of them.

        The k-th meeting of two ranks is the same on both. All work of the exchange before the meeting of one rank comes
        before all work after the meeting of the other.
        """

    def meet_all(self) -> None:
        """Meet all peers; every rank of the group calls this. A call of `meet` on another rank does not match it."""

    def hang_up(self) -> None:
        """End the peers' waits for this rank, and this rank's own waits, now and later, if the memory can."""

    def run(self, exchange: Callable[[], None]) -> dist.Work:
        """Run an exchange after all earlier ones: on CUDA on the current stream, on the CPU on a thread.

        `wait` of the result is as described in `AsyncAllToAll.start`.
        """


class SlotLayout(NamedTuple):
    """Layout of one rank's memory: for each peer two slots, so that it fills one while the other one is read.

    Example: 3 ranks, slots of 32 bytes. In the memory of rank 1, rank 0 writes at 0 and 64, and rank 2 at 32 and 96.
    """

    ranks: int
    slot_bytes: int

    @staticmethod
    def within(ranks: int, buffer_bytes: int) -> SlotLayout:
        """Return the layout with the largest slots that fit into `buffer_bytes`. Raises ValueError if none do."""
        num_slots = 2 * max(1, ranks - 1)  # a rank without peers has two, which it does not use
        slot_bytes = buffer_bytes // num_slots // ALIGNMENT * ALIGNMENT
        if slot_bytes == 0:
            raise ValueError(f"a buffer of {buffer_bytes} bytes has no room for {num_slots} slots of {ALIGNMENT} "
                             f"bytes, two for each of {ranks - 1} peers; give at least {ALIGNMENT * num_slots}")
        return SlotLayout(ranks, slot_bytes)

    @property
    def nbytes(self) -> int:
        """Return the size of a rank's memory in bytes."""
        return 2 * max(1, self.ranks - 1) * self.slot_bytes

    def slot(self, memory: Tensor, owner: int, source: int, number: int) -> Tensor:
        """Return the slot in the bytes of `owner` for message `number` from `source`."""
        place = source - (source > owner)  # among the peers of the owner
        index = number % 2 * (self.ranks - 1) + place
        return memory[index * self.slot_bytes :][: self.slot_bytes]
