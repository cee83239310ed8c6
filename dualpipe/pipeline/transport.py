"""Who talks to whom: the process groups of one pipeline, and the exchange of small host records.

Two kinds of traffic. Boundary tensors go over a `Link` for each stream of messages, (source, destination, activations
or gradients), so that a receive which is posted ahead never stands in front of anything else: with gloo a link is a
tag, with NCCL, which has no tags and runs a communicator's operations one after the other, a communicator of its own.
Small host records (headers, agreement before a step, reports after it) go over gloo and never wait for the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dualpipe import device
from dualpipe.schedule.messages import Stream

RECORD_BYTES = 8192
_TAGS = {"F": 11, "B": 12}  # gloo tags of activations and gradients; any that differ
_HEADER, _RECORD = 13, 14


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between this rank and a peer: a group, the peer's rank inside it, and a tag.

    as_bytes: for NCCL, which refuses some dtypes; gloo looks at the size only.
    """

    group: ProcessGroup
    peer: int
    tag: int = 0
    as_bytes: bool = False

    def send(self, tensor: Tensor) -> Work:
        """Start to send a contiguous tensor; it must stay untouched until the work is done."""
        return self.group.send([_bytes(tensor) if self.as_bytes else tensor], self.peer, self.tag)

    def receive(self, tensor: Tensor) -> Work:
        """Start to receive into a contiguous tensor of the sent size."""
        return self.group.recv([_bytes(tensor) if self.as_bytes else tensor], self.peer, self.tag)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def pack_record(record: Any) -> Tensor:
    """A JSON value as a (RECORD_BYTES,) uint8 tensor."""
    data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(data) > RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes exceeds the {RECORD_BYTES} that travel: {data[:200]!r}...")
    return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)


def unpack_record(buffer: Tensor) -> Any:
    """The inverse of `pack_record`."""
    return json.loads(buffer.numpy().tobytes().rstrip())


def empty_record() -> Tensor:
    """A buffer to receive a record into."""
    return torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cpu")


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
        self._backends = _backends(group)
        self._control = group
        if "cpu" not in self._backends:
            key = (self._global, "control")
            self._control = create_groups([key], backend="gloo", timeout=_timeout(group))[key]
        self._peers = [dist.get_group_rank(self._control, g) for g in self._global]

    def default_device(self) -> torch.device:
        """Where a rank without a single tensor in its stages works: as its group does."""
        if self._group is not None and self._backends.get("cuda", "gloo") != "gloo":
            return device.current()
        return torch.device("cpu")

    def check_device(self, device: torch.device) -> None:
        """ValueError where the process group cannot carry tensors of `device` between ranks."""
        if self.size == 1:
            return
        backend = self._backends.get(device.type)
        if backend is None or (backend == "gloo" and device.type != "cpu"):
            raise ValueError(
                f"the stages are on {device}, but the process group's backends ({self._backends}) do not send such "
                'tensors; initialise it with "gloo" for CPU or "cpu:gloo,cuda:nccl" for GPUs, or move the stages'
            )

    def connect(self, streams: Iterable[Stream], device: torch.device, *, own_groups: bool | None = None) -> None:
        """Open a link for each stream, and use it once.

        own_groups: give each link a process group of its own; by default where the backend has no tags.
        """
        own_groups = device.type != "cpu" if own_groups is None else own_groups
        wanted = {(self._global[src], self._global[dst], kind): (src, dst, kind) for src, dst, kind in streams}
        groups = {}
        if own_groups and self.size > 1:
            keys = [((src, dst), kind) for src, dst, kind in wanted]
            groups = create_groups(keys, backend=self._backends[device.type], timeout=_timeout(self._group))
        for key, (src, dst, kind) in sorted(wanted.items()):
            if self.rank not in (src, dst):
                continue
            peer = key[1] if self.rank == src else key[0]
            group, tag = (groups[key[:2], kind], 0) if own_groups else (self._group, _TAGS[kind])
            link = Link(group, dist.get_group_rank(group, peer), tag, as_bytes=own_groups)
            self._data[src, dst, kind] = link
            # A communicator made lazily in the middle of a step can deadlock; everybody goes through the sorted links.
            probe = torch.zeros(1, device=device)
            (link.send(probe) if self.rank == src else link.receive(probe)).wait()
        if self.size > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)  # that of norms, likewise

    def data(self, stream: Stream) -> Link:
        """The link for the boundary tensors of a stream that starts or ends at this rank."""
        return self._data[stream]

    def header(self, peer: int) -> Link:
        """The link for headers to or from `peer`."""
        return Link(self._control, self._peers[peer], _HEADER)

    def exchange(self, record: Any) -> list[Any]:
        """Everybody's record, by rank; in place of that of a rank that could not be reached, the RuntimeError."""
        if self.size == 1:
            return [record]
        return _exchange(record, [Link(self._control, peer, _RECORD) for peer in self._peers], self.rank)


class Replicas:
    """The ranks that share parameters with this one: exchanges of host records over each of their groups in turn.

    A group that cannot carry host tensors (NCCL alone) gets a gloo group beside it.
    """

    def __init__(self, groups: Iterable[ProcessGroup]) -> None:
        self._groups = [group if "cpu" in _backends(group) else _beside(group) for group in groups]

    @property
    def sizes(self) -> list[int]:
        """The ranks of each group."""
        return [group.size() for group in self._groups]

    def agree(self, failure: str | None, value: Any) -> str | None:
        """Tell them of a failure on this side, and of a JSON value that must be the same on all.

        Returns what is wrong anywhere, or None: where one rank returns something all do, if not all the same.
        """
        for group in self._groups:
            records = _exchange([failure, value], [Link(group, p, _RECORD) for p in range(group.size())], group.rank())
            failure = failure or _first_failure(records)
        return failure


def _first_failure(records: Sequence[Any]) -> str | None:
    """What is wrong among the records [failure, value] of some ranks."""
    for peer, record in enumerate(records):
        if isinstance(record, RuntimeError):
            return f"data-parallel rank {peer}: cannot be reached: {record}"
        if record[0] is not None:
            return f"data-parallel rank {peer}: {record[0]}"
    if any(value != records[0][1] for _, value in records):
        return f"data-parallel ranks disagree: by rank {[value for _, value in records]}"
    return None


def _beside(group: ProcessGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=_timeout(group), backend="gloo", use_local_synchronization=True)


def _backends(group: ProcessGroup) -> dict[str, str]:
    """Backend by device type: the configuration is such as "cpu:gloo,cuda:nccl"."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def _timeout(group: ProcessGroup) -> timedelta:
    """The timeout that the caller gave the process group; torch has no public call for it."""
    device = "cuda" if _backends(group).get("cuda") == "nccl" else "cpu"
    return group._get_backend(torch.device(device)).options._timeout


def _exchange(record: Any, links: Sequence[Link], own: int) -> list[Any]:
    """Everybody's record over a link to each, `own` excepted."""
    packed = pack_record(record)
    records = [unpack_record(packed)] * len(links)
    peers = [peer for peer in range(len(links)) if peer != own]
    buffers = {peer: empty_record() for peer in peers}
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
    wanted: Iterable[tuple[tuple[int, ...], str]], *, backend: str, timeout: timedelta
) -> dict[tuple[tuple[int, ...], str], ProcessGroup]:
    """A process group for each (global ranks, purpose) that this rank wants.

    `new_group` must be called by every rank of the default group in one order, also for groups that it is not in; so
    the ranks first tell each other what they want.
    """
    wanted = list(wanted)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    created = {}
    for ranks, purpose in sorted(set(chain(*everyone))):
        created[ranks, purpose] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return {key: created[key] for key in wanted}
