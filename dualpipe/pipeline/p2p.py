"""What crosses from one rank of a pipeline to another: who talks to whom, and the messages of one step.

Boundary tensors go over a `Link` for each stream of messages, (source, destination, activations or gradients), so that
a receive which is posted ahead never stands in front of anything else: with gloo a link is a tag, with NCCL, which has
no tags and runs a communicator's operations one after the other, a communicator of its own. Headers go over gloo and
never wait for the device.

A message is the tuple of tensors that crosses from one stage to the next (an activation, and the step's side inputs
behind it) or back (a gradient). The first activation of each size class is preceded by a header with shapes and dtypes;
later ones must match it, and the gradients follow from it. A rank that failed keeps sending and receiving to the end of
its program, zeros in place of what it cannot compute, so that no rank is left waiting and no message of this step is
left over for the next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dualpipe import device as devices
from dualpipe.dtypes import dtype_of, long_name
from dualpipe.pipeline.lower import BOTH, Instruction, Program, Transfer
from dualpipe.ranks import RankSync, backends, empty_record, pack_record, timeout_of, unpack_record
from dualpipe.schedule.messages import Message, Stream

SENDS_IN_FLIGHT = 2  # messages per link whose buffers are kept; the one before them is waited for
PACKED_BYTES = 1 << 17  # a message of several tensors goes as one up to here: gloo's calls cost more than copying
_ALIGNMENT = 64  # bytes, of each tensor in it
_TAGS = {"F": 11, "B": 12, BOTH: 13}  # gloo tags of activations, gradients and both in one; any that differ
_HEADER = 15


class Link(NamedTuple):
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


class P2PGroups:
    """The connections of one pipeline rank.

    `members[r]` is the rank inside `group` of pipeline rank r. Where `group` cannot carry host tensors (NCCL alone) a
    gloo group is created beside it. Creating groups is collective over the default group, so there all of its ranks
    must build their pipelines at the same time.
    """

    def __init__(self, group: ProcessGroup | None, members: Sequence[int], rank: int) -> None:
        self._rank, self._size, self.packs = rank, len(members), False
        self._group: Any = group
        self._control: Any = group  # carries host tensors
        self._peers, self._links = [0], dict[Stream, Link]()
        if group is None:
            return
        self._global = tuple(dist.get_global_rank(group, member) for member in members)
        self._backends = backends(group)
        if "cpu" not in self._backends:
            key = (self._global, "control")
            self._control = create_groups([key], backend="gloo", timeout=timeout_of(group))[key]
        self._peers = [dist.get_group_rank(self._control, g) for g in self._global]

    def sync(self, replicas: Iterable[ProcessGroup]) -> RankSync:
        """The ranks of the pipeline, and those that share parameters with this one, as they agree on a step."""
        return RankSync(self._control, self._peers, replicas)

    def default_device(self) -> torch.device:
        """Where a rank without a single tensor in its stages works: as its group does."""
        if self._group is not None and self._backends.get("cuda", "gloo") != "gloo":
            return devices.current()
        return torch.device("cpu")

    def check_device(self, device: torch.device) -> None:
        """ValueError where the process group cannot carry tensors of `device` between ranks."""
        if self._size == 1:
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
        # On a device it would be a copy for each message, and calls cost little.
        self.packs = self._size > 1 and not own_groups
        wanted = {(self._global[src], self._global[dst], kind): (src, dst, kind) for src, dst, kind in streams}
        groups = {}
        if own_groups and self._size > 1:
            keys = [((src, dst), kind) for src, dst, kind in wanted]
            groups = create_groups(keys, backend=self._backends[device.type], timeout=timeout_of(self._group))
        for key, (src, dst, kind) in sorted(wanted.items()):
            if self._rank not in (src, dst):
                continue
            peer = key[1] if self._rank == src else key[0]
            group, tag = (groups[key[:2], kind], 0) if own_groups else (self._group, _TAGS[kind])
            link = Link(group, dist.get_group_rank(group, peer), tag, as_bytes=own_groups)
            self._links[src, dst, kind] = link
            if self.packs:
                self._links[src, dst, BOTH] = link._replace(tag=_TAGS[BOTH])
            # A communicator made lazily in the middle of a step can deadlock; everybody goes through the sorted links.
            probe = torch.zeros(1, device=device)
            (link.send(probe) if self._rank == src else link.receive(probe)).wait()
        if self._size > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)  # that of norms, likewise

    def link(self, stream: Stream) -> Link:
        """That of a stream that starts or ends at this rank."""
        return self._links[stream]

    def header(self, peer: int) -> Link:
        """The link for headers to or from `peer`."""
        return Link(self._control, self._peers[peer], _HEADER)


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


# -- what a message consists of


class TensorMeta(NamedTuple):
    """What a receiver must know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tensor.shape, tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{long_name(self.dtype)}{list(self.shape)}{'' if self.requires_grad else ' without grad'}"


class Signature:
    """The tensors of a message, and how they travel: each by itself, or all in one buffer."""

    __slots__ = ("metas", "places", "size")

    def __init__(self, metas: Iterable[TensorMeta], *, packs: bool) -> None:
        self.metas = tuple(metas)
        sizes = [prod(meta.shape) * meta.dtype.itemsize for meta in self.metas]
        ends, end = [], 0
        for size in sizes:
            ends.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.places = ends if packs and sum(map(bool, sizes)) > 1 and end <= PACKED_BYTES else None
        self.size = end  # bytes

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are such tensors."""
        return len(tensors) == len(self.metas) and all(
            t.shape == shape and t.dtype is dtype and t.requires_grad is grad
            for t, (shape, dtype, grad) in zip(tensors, self.metas)
        )

    def empty(self, device: torch.device) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The tensors of a message that is to come, and the buffers that they come in."""
        if self.places is None:
            tensors = tuple([torch.empty(m.shape, dtype=m.dtype, device=device) for m in self.metas])
            return tensors, [t for t in tensors if t.numel()]
        buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        places = zip(self.metas, self.places)
        # `data`: what a stage does in place to one of them is no change of the others, which autograd may have saved.
        return tuple(buffer[start:end].view(m.dtype).view(m.shape).data for m, (start, end) in places), [buffer]

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What is sent of these."""
        ready = [t.detach().contiguous().resolve_conj().resolve_neg() for t in tensors if t.numel()]
        if self.places is None:
            return ready
        buffer = torch.empty(self.size, dtype=torch.uint8, device=ready[0].device)
        for tensor, (start, end) in zip(ready, (place for place in self.places if place[0] < place[1])):
            buffer[start:end] = _bytes(tensor)
        return [buffer]

    def zeros(self, device: torch.device) -> list[Tensor]:
        """A message of a rank that has failed."""
        return [buffer.zero_() for buffer in self.empty(device)[1]]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.metas))})"


class Boundary:
    """What crosses between two stages, for micro-batches of one size. Agreed once a step."""

    __slots__ = ("agreed", "backward", "forward")

    def __init__(self) -> None:
        self.agreed = False
        self.forward: Signature | None = None  # None once agreed: the sender failed before it knew
        self.backward: Signature | None = None

    def agree(self, metas: Sequence[TensorMeta] | None, *, packs: bool) -> None:
        """Fix what crosses forward, and so what comes back."""
        self.agreed = True
        if metas is not None:
            self.forward = Signature(metas, packs=packs)
            self.backward = Signature([meta for meta in metas if meta.requires_grad], packs=packs)

    def expects(self, message: Message) -> Signature | None:
        return self.forward if message.kind == "F" else self.backward


# -- the messages of a step


class Arrival:
    """A receive in progress: the buffers and their works, or a header that says what to post."""

    __slots__ = ("header", "header_work", "tensors", "transfer", "works")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.header: Tensor | None = None
        self.header_work: Work | None = None
        self.tensors: tuple[Tensor, ...] | None = None
        self.works: list[tuple[Work, Tensor]] = []


class Incoming:
    """A stream of messages to this rank."""

    def __init__(self, transfers: Sequence[Transfer], link: Link) -> None:
        self.transfers, self.link = iter(transfers), link
        self.ahead: Arrival | None = None
        self.taken = self.settled = 0


class Outgoing:
    """A stream of messages from this rank; `in_flight` keeps what was sent alive until its send is done."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.in_flight: deque[list[tuple[Work, Tensor]]] = deque()
        self.sent = self.settled = 0


class P2PMessages:
    """One rank's messages of one step of `program`. The first `num_larger` micro-batches are larger than the others."""

    def __init__(self, groups: P2PGroups, program: Program, *, num_larger: int, device: torch.device) -> None:
        self._groups, self._num_larger, self._device = groups, num_larger, device
        self._boundaries: defaultdict[tuple[int, bool], Boundary] = defaultdict(Boundary)
        self._both: dict[tuple[int, int], Signature] = {}  # of an activation and a gradient in one message
        self._incoming = {s: Incoming(transfers, groups.link(s)) for s, transfers in program.incoming.items()}
        self._outgoing = {s: Outgoing(groups.link(s)) for s in program.outgoing}
        self._broken: set[int] = set()  # peers that an operation failed with

    def start(self) -> None:
        """Post the first receive of every stream."""
        for stream in self._incoming.values():
            self._post_next(stream)

    def take(self, transfer: Transfer) -> tuple[tuple[Message, tuple[Tensor, ...]], ...] | None:
        """Wait for a message, or two in one, post the receive of the one after it; None where its sender has failed."""
        stream = self._incoming[transfer.stream]
        if stream.ahead is None:
            self._post_next(stream)
        arrival = stream.ahead
        assert arrival is not None and arrival.transfer is transfer, f"took {transfer.message} out of order"
        if arrival.tensors is None:
            self._learn(stream, arrival)  # may lack the memory; then it is still to be taken
        stream.ahead = None
        stream.taken += 1
        _wait(arrival.works)
        self._post_next(stream)
        tensors, second = arrival.tensors, transfer.second
        if tensors is None:
            return None
        if second is None:
            return ((transfer.message, tensors),)
        first = self._boundary(transfer).forward
        if first is None or self._boundary(second).backward is None:
            return None
        count = len(first.metas)
        return (transfer.message, tensors[:count]), (second.message, tensors[count:])

    def send(self, transfer: Transfer, results: Sequence[Sequence[Tensor]] | None) -> None:
        """Start to send a message: the result of an action, or of two. None sends zeros, or word of the failure where
        no shape was agreed yet.

        Raises ValueError, having sent nothing, for tensors that cannot be sent or do not match what was agreed for
        micro-batches of this size.
        """
        message, stream, boundary = transfer.message, self._outgoing[transfer.stream], self._boundary(transfer)
        if results is not None:
            _check_sendable(message, results[0], self._device)
            if transfer.second is not None:
                _check_sendable(transfer.second.message, results[1], self._device)
        works = [] if boundary.agreed else [self._tell(message, boundary, None if results is None else results[0])]
        if results is not None and message.kind == "F":
            _check(message.stage, message.microbatch, results[0], boundary.forward)
        signature = self._signature(transfer)
        if len(stream.in_flight) == SENDS_IN_FLIGHT:
            _wait(stream.in_flight.popleft())
        buffers: list[Tensor] = []
        if signature is not None and results is None:
            buffers = signature.zeros(self._device)
        elif signature is not None and results is not None:
            buffers = signature.buffers(results[0] if len(results) == 1 else (*results[0], *results[1]))
        stream.sent += 1  # not before: what could not be made is still to be sent
        stream.in_flight.append(works)
        works += [(stream.link.send(buffer), buffer) for buffer in buffers]

    def hand_over(self, stage: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Hold an output that stays on this rank, for `stage`, to the same: ValueError where it differs from that of an
        earlier micro-batch of its size, as one does that is detached."""
        boundary = self._boundaries[stage, microbatch < self._num_larger]
        if not boundary.agreed:
            boundary.agree(tuple(map(TensorMeta.of, tensors)), packs=False)
        _check(stage, microbatch, tensors, boundary.forward)

    def finish(self) -> None:
        """Wait for all sends."""
        for stream in self._outgoing.values():
            while stream.in_flight:
                _wait(stream.in_flight.popleft())

    # -- after a failure

    def settle(self, instruction: Instruction) -> None:
        """Receive and send what an instruction of the program still owes its peers; for one after the other."""
        for transfer in instruction.incoming:
            coming = self._incoming[transfer.stream]
            coming.settled += 1
            if coming.settled > coming.taken:
                self._guarded(transfer.message.src, self.take, transfer)
        for transfer in instruction.sends():
            going = self._outgoing[transfer.stream]
            going.settled += 1
            if going.settled > going.sent:
                self._guarded(transfer.message.dst, self.send, transfer, None)

    def settle_sends(self) -> None:
        """Wait for all sends to those who are there."""
        for (_, dst, _), stream in self._outgoing.items():
            while stream.in_flight:
                self._guarded(dst, _wait, stream.in_flight.popleft())

    def _guarded(self, peer: int, call: Callable[..., object], *args: object) -> None:
        if peer not in self._broken:
            try:
                call(*args)
            except Exception:  # the peer is gone; what is owed to the others is still owed
                self._broken.add(peer)

    # -- what crosses

    def _boundary(self, transfer: Transfer) -> Boundary:
        return self._boundaries[transfer.boundary, transfer.message.microbatch < self._num_larger]

    def _signature(self, transfer: Transfer) -> Signature | None:
        """What a transfer consists of; None where nothing can cross, because a rank failed before it knew."""
        first = self._boundary(transfer).expects(transfer.message)
        if transfer.second is None:
            return first
        key = transfer.boundary, transfer.second.boundary
        if key not in self._both:
            second = self._boundary(transfer.second).backward
            if first is None or second is None:
                return first or second
            gradients = [meta._replace(requires_grad=False) for meta in second.metas]
            self._both[key] = Signature((*first.metas, *gradients), packs=True)
        return self._both[key]

    def _agreed(self, transfer: Transfer) -> bool:
        """Whether it is known what a transfer consists of."""
        second = transfer.second
        return self._boundary(transfer).agreed and (second is None or self._boundary(second).agreed)

    def _tell(self, message: Message, boundary: Boundary, tensors: Sequence[Tensor] | None) -> tuple[Work, Tensor]:
        """Fix the signature of a boundary and start to send its header."""
        assert message.kind == "F", "a gradient follows an activation"
        metas = None if tensors is None else tuple(map(TensorMeta.of, tensors))
        header = pack_record(metas and [(m.shape, long_name(m.dtype), m.requires_grad) for m in metas])  # may refuse
        boundary.agree(metas, packs=self._groups.packs)
        return self._groups.header(message.dst).send(header), header

    def _post_next(self, stream: Incoming) -> None:
        transfer = next(stream.transfers, None)
        if transfer is None:
            return
        stream.ahead = arrival = Arrival(transfer)
        if self._agreed(transfer):
            self._post(stream, arrival)
        elif transfer.message.kind == "F" and transfer.second is None:
            arrival.header = empty_record()
            arrival.header_work = self._groups.header(transfer.message.src).receive(arrival.header)

    def _learn(self, stream: Incoming, arrival: Arrival) -> None:
        """Post a receive whose shapes were not known when it could have been posted ahead."""
        if arrival.header_work is not None and arrival.header is not None:
            arrival.header_work.wait()
            arrival.header_work = None
            told = unpack_record(arrival.header)
            metas = told and [TensorMeta(torch.Size(shape), dtype_of(dtype), grad) for shape, dtype, grad in told]
            self._boundary(arrival.transfer).agree(metas, packs=self._groups.packs)
        self._post(stream, arrival)

    def _post(self, stream: Incoming, arrival: Arrival) -> None:
        message, signature = arrival.transfer.message, self._signature(arrival.transfer)
        if signature is None:
            return
        arrival.tensors, buffers = signature.empty(self._device)
        arrival.works = [(stream.link.receive(buffer), buffer) for buffer in buffers]
        if message.kind == "F":
            for tensor, meta in zip(arrival.tensors, signature.metas):
                if meta.requires_grad:
                    tensor.requires_grad_()


def _check_sendable(message: Message, tensors: Sequence[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device != device:
            raise ValueError(
                f"a result for stage {message.stage} is {tensor.layout} on {tensor.device}; only dense tensors on "
                f"{device} go between ranks"
            )


def _check(stage: int, microbatch: int, tensors: Sequence[Tensor], agreed: Signature | None) -> None:
    if agreed is None or not agreed.matches(tensors):
        raise ValueError(
            f"the output for stage {stage} changed within the step: micro-batch {microbatch} gives "
            f"({', '.join(str(TensorMeta.of(t)) for t in tensors)}), an earlier one gave {agreed or '()'}, side inputs "
            "included. Micro-batches of one size must give outputs of one shape and dtype"
        )


def _wait(works: list[tuple[Work, Tensor]]) -> None:
    for work, _ in works:
        work.wait()
