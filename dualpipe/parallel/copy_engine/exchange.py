"""An `AsyncAllToAll` that copies rows into slots in the memory of its peers.

    write   rows for each peer -> this rank's slot in the memory of the peer
    meet    signal all peers, and wait for their signals: their rows have arrived
    read    slots in this rank's memory -> the received rows

Two ranks know the numbers of rows that they send to each other, but not those of other ranks. So any two ranks have
slots of their own, at places that follow from the ranks alone. A message longer than a slot goes in rounds: as many as
the longer of their two messages needs. No rank has to know the sizes of others, no buffer ever grows, and nothing is
agreed on after the start.

Between two ranks, each direction has two slots, used in turn, and this makes a signal do two things: it says that rows
have arrived, and that the sender has read those of the round before. Write k + 2 goes to the slot of write k. It comes
after meeting k + 1, before which the peer has read k:

    rank 0   write 0 | meet 0 | read 0 | write 1 | meet 1 | read 1 | write 2 | meet 2 | ...
    rank 1   write 0 | meet 0 | read 0 | write 1 | meet 1 | read 1 | write 2 | meet 2 | ...
                       slot 0                      slot 1            slot 0: both have read 0 before meet 1

In the first round of an exchange all ranks meet, even with nothing to send; in later rounds, only ranks that still
have rows for each other. Round k of an exchange waits only for writes of the same round, and these only for earlier
rounds: exchanges that all ranks start in the same order cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.parallel.copy_engine.peer_memory import BUFFER_BYTES, PeerMemory
from dualpipe.parallel.copy_engine.shared_memory import SharedMemory
from dualpipe.parallel.copy_engine.symmetric_memory import SymmetricMemory

METHODS = ("nccl", "copy_engine")  # values of parallel.all_to_all


def expert_ranks(mesh: DeviceMesh, method: str) -> DeviceMesh | CopyEngineAllToAll:
    """Return the ranks of an "ep" mesh for `ExpertParallel`, whose rows travel by one of `METHODS`.

    Collective over the mesh for "copy_engine". Raises ValueError for another method, and like
    `CopyEngineAllToAll.connect`.
    """
    check_method(method)
    return CopyEngineAllToAll.connect(mesh) if method == "copy_engine" and mesh.size() > 1 else mesh


def check_method(method: str) -> None:
    """Raise ValueError for a method that is none of `METHODS`."""
    if method not in METHODS:
        raise ValueError(f"all_to_all must be one of {', '.join(METHODS)}; got {method!r}")


class CopyEngineAllToAll:
    """An `AsyncAllToAll` over the memory of peers. One object for each group: its exchanges are one sequence.

    Args:
        memory: the memory of this rank and its peers, used by nothing else.
        group: the process group of these ranks, to name them in errors; None: not a group of torch.distributed.
    """

    def __init__(self, memory: PeerMemory, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = memory.rank
        self.size = memory.size
        self.device = memory.device
        self._memory = memory
        # From the next rank on, so that the ranks write to different peers at the same time.
        self._peers = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        self._rounds = [0] * self.size  # rounds so far with each peer, the same at both ends

    @classmethod
    def connect(cls, mesh: DeviceMesh, buffer_bytes: int | None = None) -> CopyEngineAllToAll:
        """Allocate the memory of the ranks of a one-dimensional mesh. Collective.

        buffer_bytes: the size of each rank's slots, the same on all ranks (default: `BUFFER_BYTES`). Raises ValueError
        if the ranks cannot map each other's memory: on the CPU on all of them; on CUDA a rank may fail alone, and the
        others then wait for it in the rendezvous.
        """
        group = mesh.get_group()
        buffer_bytes = buffer_bytes or BUFFER_BYTES[mesh.device_type]
        memory: PeerMemory
        if mesh.device_type == "cuda":
            memory = SymmetricMemory(group, buffer_bytes)
        else:
            memory = SharedMemory(group, buffer_bytes)
        return cls(memory, group)

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> dist.Work:
        """Start the exchange; see `AsyncAllToAll.start`."""
        exchange = partial(self._exchange, _split_bytes(received, received_rows), _split_bytes(sent, sent_rows))
        return self._memory.run(exchange)

    def hang_up(self) -> None:
        """End the waits of peers for this rank after a failure, and its own; see `PeerMemory.hang_up`."""
        self._memory.hang_up()

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Send bytes `sent[r]` to each rank r, and fill `received` in the same order."""
        received[self.rank].copy_(sent[self.rank])
        slot_bytes = self._memory.slot_bytes
        longest = {peer: max(len(sent[peer]), len(received[peer])) for peer in self._peers}
        num_rounds = {peer: max(1, ceil(nbytes / slot_bytes)) for peer, nbytes in longest.items()}
        for round_number in range(max(num_rounds.values(), default=0)):
            peers = [peer for peer in self._peers if num_rounds[peer] > round_number]
            start = round_number * slot_bytes
            for peer in peers:
                self._copy(self._slot(peer, self.rank, peer), sent[peer][start:], is_write=True)
            if round_number == 0:
                self._memory.meet_all()
            else:
                self._memory.meet(peers)  # a peer may also meet ranks in this round that are not among `peers`
            for peer in peers:
                self._copy(self._slot(self.rank, peer, peer), received[peer][start:], is_write=False)
                self._rounds[peer] += 1

    def _slot(self, owner: int, source: int, peer: int) -> Tensor:
        """Return the slot of this round with `peer`."""
        return self._memory.slot(owner, source, self._rounds[peer])

    @staticmethod
    def _copy(slot: Tensor, message: Tensor, *, is_write: bool) -> None:
        """Copy the next part of a message into a slot, or from it; nothing if the message has ended."""
        part = message[: len(slot)]
        if len(part) == 0:
            return
        if is_write:
            slot[: len(part)].copy_(part)
        else:
            part.copy_(slot[: len(part)])


def _split_bytes(tensor: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the bytes of a contiguous tensor, split into these numbers of rows."""
    assert sum(rows) == len(tensor), f"{len(tensor)} rows of a tensor, but {sum(rows)} are exchanged"
    row_bytes = prod(tensor.shape[1:]) * tensor.itemsize
    return tensor.detach().view(-1).view(torch.uint8).split([number * row_bytes for number in rows])
