"""Who talks to whom: the process groups of one pipeline, and the exchange of small host records.

Two kinds of traffic. Boundary tensors go over a `Link` for each direction of each pair of neighbouring ranks, so that a
receive which is posted ahead never stands in front of a send: with gloo a link is a tag, with NCCL, which has no tags
and runs a communicator's operations one after the other, a communicator of its own. Small host records (headers,
agreement before a step, reports after it) go over gloo and never wait for the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

RECORD_BYTES = 8192
_DATA, _HEADER, _RECORD = 11, 12, 13  # gloo tags; any three that differ


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between this rank and a peer: a group, the peer's rank inside it, and a tag."""

    group: ProcessGroup
    peer: int
    tag: int = 0

    def send(self, tensor: Tensor) -> Work:
        """Start to send a contiguous tensor; it must stay untouched until the work is done."""
        return self.group.send([tensor], self.peer, self.tag)

    def receive(self, tensor: Tensor) -> Work:
        """Start to receive into a contiguous tensor of the sent size."""
        return self.group.recv([tensor], self.peer, self.tag)


def pack_record(record: Any) -> Tensor:
    """A JSON value as a (RECORD_BYTES,) uint8 tensor."""
    data = json.dumps(record).encode()
    if len(data) > RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes exceeds the {RECORD_BYTES} that travel: {data[:200]!r}...")
    return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)


def unpack_record(buffer: Tensor) -> Any:
    """The inverse of `pack_record`."""
    return json.loads(buffer.numpy().tobytes().rstrip())


def empty_record() -> Tensor:
    """A buffer to receive a record into."""
    return torch.empty(RECORD_BYTES, dtype=torch.uint8)


class Transport:
    """The connections of one pipeline rank.

    `members[r]` is the rank inside `group` of pipeline rank r. Where `group` cannot carry host tensors (NCCL alone) a
    gloo group is created beside it. Creating groups is collective over the default group, so there all of its ranks
    must build their pipelines at the same time.
    """

    def __init__(self, group: ProcessGroup | None, members: Sequence[int], rank: int) -> None:
        self.rank, self.size = rank, len(members)
        self._group, self._data = group, {}
        if group is None:
            return
        self._global = tuple(dist.get_global_rank(group, member) for member in members)
        carries_host_tensors = "cpu:" in dist.get_backend_config(group)
        self._control = group if carries_host_tensors else create_groups([self._global], backend="gloo")[self._global]
        self._peers = [dist.get_group_rank(self._control, g) for g in self._global]

    def connect(self, edges: Iterable[tuple[int, int]], device: torch.device, *, own_groups: bool) -> None:
        """Open a link for each edge, a (source, destination) pair of pipeline ranks, and use it once.

        own_groups: give each link a process group of its own; needed wherever the backend has no tags.
        """
        pairs = {(src, dst): (self._global[src], self._global[dst]) for src, dst in edges}
        groups = create_groups(pairs.values(), backend=None) if own_groups else {}
        for (src, dst), pair in sorted(pairs.items()):
            if self.rank not in (src, dst):
                continue
            peer = pair[1] if self.rank == src else pair[0]
            group, tag = (groups[pair], 0) if own_groups else (self._group, _DATA)
            link = self._data[src, dst] = Link(group, dist.get_group_rank(group, peer), tag)
            # A communicator made lazily in the middle of a step can deadlock; everybody goes through the sorted edges.
            probe = torch.zeros(1, device=device)
            (link.send(probe) if self.rank == src else link.receive(probe)).wait()

    def data(self, src: int, dst: int) -> Link:
        """The link for boundary tensors from rank `src` to rank `dst`, one of which is this rank."""
        return self._data[src, dst]

    def header(self, peer: int) -> Link:
        """The link for headers to or from `peer`."""
        return Link(self._control, self._peers[peer], _HEADER)

    def exchange(self, record: Any) -> list[Any]:
        """Everybody's record, by rank; in place of that of a rank that could not be reached, the RuntimeError."""
        if self.size == 1:
            return [record]
        packed = pack_record(record)
        records = [unpack_record(packed)] * self.size
        peers = [r for r in range(self.size) if r != self.rank]
        buffers = {peer: empty_record() for peer in peers}
        links = {peer: Link(self._control, self._peers[peer], _RECORD) for peer in peers}
        receives = {peer: _attempt(links[peer].receive, buffers[peer]) for peer in peers}
        sends = {peer: _attempt(links[peer].send, packed) for peer in peers}
        for peer in peers:
            failed = _finish(receives[peer]) or _finish(sends[peer])
            records[peer] = failed or unpack_record(buffers[peer])
        return records


def _attempt(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, or the error that it raised: one dead peer must not keep us from the others."""
    try:
        return call(*args)
    except RuntimeError as error:
        return error


def _finish(work: Work | RuntimeError) -> RuntimeError | None:
    error = work if isinstance(work, RuntimeError) else _attempt(work.wait)
    return error if isinstance(error, RuntimeError) else None


def create_groups(
    wanted: Iterable[tuple[int, ...]], *, backend: str | None
) -> dict[tuple[int, ...], ProcessGroup]:
    """A process group for each tuple of global ranks that this rank wants.

    `new_group` must be called by every rank of the default group in one order, also for groups that it is not in; so
    the ranks first tell each other what they want.
    """
    wanted = list(wanted)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    created = {ranks: dist.new_group(list(ranks), backend=backend) for ranks in sorted({r for w in everyone for r in w})}
    return {ranks: created[ranks] for ranks in wanted}
