"""The messages between the ranks of a pipeline: the connections, and the messages of one step.

Boundary tensors go over a `Link` for each stream of messages, (source, destination, activations or gradients), so that
a receive which is posted ahead never stands in front of anything else: with gloo a link is a tag, with NCCL, which has
no tags and runs a communicator's operations one after the other, a communicator of its own. Headers go over gloo and
never wait for the device.

A kernel of NCCL keeps the device busy until its peer's has come, and to load a kernel the host waits for the whole
device: where CUDA loads lazily, and for Triton's in any case. So two hosts could wait for each other's next launch for
ever: behind a receive that is posted ahead, and as well behind a send of more than NCCL's buffers hold. Therefore the
first step of a kind on a device, in which its kernels are loaded, sends by the host's memory, over gloo. Shapes are of
one kind where the same kernels run for them (`kernel_class`), so steps of many lengths are soon of few kinds.

A message is the tuple of tensors that crosses from one stage to the next (an activation, and the step's side inputs
behind it) or back (a gradient). The first activation of each size class is preceded by a header with shapes and dtypes;
later ones must match it, and the gradients follow from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dualpipe.pipeline.lower import Program
from dualpipe.runtime import device as devices
from dualpipe.runtime.dtypes import dtype_of, long_name
from dualpipe.runtime.nccl import LINK
from dualpipe.runtime.ranks.failure import default_store
from dualpipe.runtime.ranks.process_groups import backends, create_groups, new_gloo_group, timeout_of
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.ranks.records import HostMessages, empty_record, pack_json, unpack_json
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule.messages import Message, MessageStream

SENDS_IN_FLIGHT = 2  # messages per link whose buffers are kept; the one before them is waited for
_TAGS = {"F": 11, "B": 12, "header": 15}  # gloo's; any that differ


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
        return self.group.send([tensor.view(-1).view(torch.uint8) if self.as_bytes else tensor], self.peer, self.tag)

    def receive(self, tensor: Tensor) -> Work:
        """Start to receive into a contiguous tensor of the sent size."""
        return self.group.recv([tensor.view(-1).view(torch.uint8) if self.as_bytes else tensor], self.peer, self.tag)


class P2PGroups:
    """The connections of one pipeline rank.

    `members[r]` is the rank inside `group` of pipeline rank r. Where `group` cannot carry host tensors (NCCL alone) a
    gloo group is created beside it. No rank of another pipeline takes part in any of this.
    """

    global_ranks: tuple[int, ...] = ()  # by pipeline rank; none without a group

    def __init__(self, group: ProcessGroup | None, members: Sequence[int], rank: int) -> None:
        self._rank, self._size = rank, len(members)
        self._group: Any = group
        self._control: Any = group  # carries host tensors
        self._peers, self._links = [0], dict[MessageStream, Link]()
        if group is None:
            return
        self.global_ranks = tuple(dist.get_global_rank(group, member) for member in members)
        Recorder.current().rank = dist.get_rank()  # by which this rank is named in errors
        self._backends = backends(group)
        if "cpu" not in self._backends:
            self._control = new_gloo_group(group)
        self._peers = [dist.get_group_rank(self._control, g) for g in self.global_ranks]

    def messages(self) -> HostMessages:
        """Return the ranks of the pipeline, numbered as such, for messages between hosts."""
        return HostMessages(self._control, self._peers)

    def ranks(self) -> RankSync:
        """Return the ranks of the pipeline, for objects of any size."""
        return RankSync(self._control, self._peers)

    def store(self) -> dist.Store:
        """Return the store of the job, for the cause of a failure."""
        return default_store(self._group)

    def groups(self) -> list[ProcessGroup]:
        """Return the process groups that messages go over."""
        groups = [self._group, self._control, *(link.group for link in self._links.values())]
        return [group for group in dict.fromkeys(groups) if group is not None]

    def checked_device(self, device: torch.device | None) -> torch.device:
        """The device of the stages, by default the one on which the group works; ValueError where the group cannot
        carry its tensors between ranks."""
        if device is None:
            on_gpu = self._group is not None and self._backends.get("cuda", "gloo") != "gloo"
            device = devices.current() if on_gpu else torch.device("cpu")
        backend = self._backends.get(device.type) if self._size > 1 else device.type
        if backend is None or (backend == "gloo" and device.type != "cpu"):
            raise ValueError(
                f"the stages are on {device}, but the process group's backends ({self._backends}) do not send such "
                'tensors; initialise it with "gloo" for CPU or "cpu:gloo,cuda:nccl" for GPUs, or move the stages'
            )
        return device

    def connect(self, placement: Sequence[int], device: torch.device, *, own_groups: bool | None = None) -> None:
        """Open a link for each stream between stages that are on the ranks of `placement`, and use it once.

        own_groups: give each link a process group of its own; by default where the backend has no tags.
        """
        own_groups = device.type != "cpu" if own_groups is None else own_groups
        boundaries = [(a, b) for a, b in pairwise(placement) if a != b]
        rounds = in_rounds(sorted({stream for a, b in boundaries for stream in ((a, b, "F"), (b, a, "B"))}))
        mine = [each.get(self._rank) for each in rounds]
        groups = [self._group] * len(mine)
        if own_groups and mine:
            ends = [(self._rank,) if stream is None else stream[:2] for stream in mine]
            wanted = [([self.global_ranks[rank] for rank in ranks], LINK) for ranks in ends]
            groups = create_groups(
                wanted, parent=self._control, timeout=timeout_of(self._group), backend=self._backends[device.type]
            )
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self._control)  # NCCL would wait for ever for who fails
        for stream, group in zip(mine, groups):
            if stream is None:
                continue
            src, dst, kind = stream
            peer = dist.get_group_rank(group, self.global_ranks[dst if self._rank == src else src])
            link = self._links[stream] = Link(group, peer, 0 if own_groups else _TAGS[kind], as_bytes=own_groups)
            # A communicator made lazily in the middle of a step can deadlock; everybody goes through the rounds.
            probe = torch.zeros(1, device=device)
            (link.send(probe) if self._rank == src else link.receive(probe)).wait()
        if self._size > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)  # that of norms, likewise

    def link(self, stream: MessageStream, *, by_host: bool = False) -> Link:
        """Return the link of a stream that starts or ends at this rank. by_host: for tensors in host memory."""
        if not by_host:
            return self._links[stream]
        src, dst, kind = stream
        return Link(self._control, self._peers[dst if self._rank == src else src], _TAGS[kind])

    def exchange(self, peer: int, tensor: Tensor, *, around: tuple[int, int]) -> Tensor:
        """Send a contiguous tensor to `peer`, and return the tensor that it sends here.

        Both call it between steps, with tensors of one shape and dtype. around: the two ranks, as neighbours in the
        placement that was connected.
        """
        found, (src, dst) = torch.empty_like(tensor), around
        there, back = self.link((src, dst, "F")), self.link((dst, src, "B"))
        incoming, outgoing = (there, back) if peer == src else (back, there)
        recorder, ranks = Recorder.current(), self.global_ranks[peer : peer + 1]
        with recorder.wait("exchange", "the other end's gradient of a tied parameter", ranks, tensor.nbytes):
            for work in (incoming.receive(found), outgoing.send(tensor)) if tensor.numel() else ():
                work.wait()
        return found

    def header(self, peer: int) -> Link:
        """The link for headers to or from `peer`."""
        return Link(self._control, self._peers[peer], _TAGS["header"])


def in_rounds(streams: Iterable[MessageStream]) -> list[dict[int, MessageStream]]:
    """Rounds of streams by the ranks at both ends, of which each has one in a round: 8 rounds for any length of a V."""
    rounds: list[dict[int, MessageStream]] = []
    for stream in streams:
        ends = dict.fromkeys(stream[:2], stream)
        free = next((others for others in rounds if not others.keys() & ends.keys()), None)
        if free is None:
            rounds.append(ends)
        else:
            free.update(ends)
    return rounds


# -- the messages of a step


class TensorMeta(NamedTuple):
    """The description of a tensor that its receiver needs."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """Describe a tensor."""
        return TensorMeta(tensor.shape, tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{long_name(self.dtype)}{list(self.shape)}{'' if self.requires_grad else ' without grad'}"


Metas = tuple[TensorMeta, ...]


def header_of(metas: Metas) -> dict[str, list[Any]]:
    """Return what travels ahead of tensors, as a JSON value; by column, as it has little room."""
    return {
        "shapes": [list(meta.shape) for meta in metas],
        "dtypes": [long_name(meta.dtype) for meta in metas],
        "requires_grad": [meta.requires_grad for meta in metas],
    }


def metas_of(header: dict[str, list[Any]]) -> Metas:
    """Return the inverse of `header_of`."""
    columns = zip(header["shapes"], header["dtypes"], header["requires_grad"], strict=True)
    return tuple(TensorMeta(torch.Size(shape), dtype_of(name), grad) for shape, name, grad in columns)


class Crossing(NamedTuple):
    """The tensors of a message between two stages, forward or back, and their bytes in all."""

    metas: Metas
    nbytes: int

    @staticmethod
    def of(metas: Metas) -> Crossing:
        """Add up the bytes of tensors."""
        return Crossing(metas, sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas))


class PostedReceive(NamedTuple):
    """A message whose receives are posted: where its tensors arrive, and what to wait for."""

    tensors: tuple[Tensor, ...]
    works: Sequence[Work]
    crossing: Crossing


class StartedSend(NamedTuple):
    """A message whose sends have started. buffers: what is sent, which must stay until `works` are done."""

    works: list[Work]
    buffers: list[Tensor]


@dataclass(slots=True)
class Channel:
    """A stream of messages to or from this rank. peer: the global number of the other end, alone in a tuple."""

    link: Link
    peer: tuple[int, ...]
    incoming: Iterator[Message]  # those whose receives are not posted
    ahead: Message | None = None  # the one whose receive is posted, or that of its header, which says what to post
    header: tuple[Work, Tensor] | None = None
    posted: PostedReceive | None = None
    in_flight: deque[StartedSend] = field(default_factory=deque)


class P2PMessages:
    """One rank's messages of one step of `program`. The first `num_larger` micro-batches are larger than the others.

    by_host: send by the host's memory, as the first step of its kind on a device must, on all ranks.
    """

    def __init__(
        self, groups: P2PGroups, program: Program, *, num_larger: int, device: torch.device, by_host: bool
    ) -> None:
        self._groups, self._num_larger, self._device = groups, num_larger, device
        self._memory = torch.device("cpu") if by_host else device  # what is sent and received
        self._channels: dict[MessageStream, Channel] = {}
        for stream in (*program.incoming, *program.outgoing):
            peer = stream[0] if stream in program.incoming else stream[1]
            self._channels[stream] = Channel(
                groups.link(stream, by_host=by_host), groups.global_ranks[peer : peer + 1],
                iter(program.incoming.get(stream, ())),
            )
        # What crosses forward and back between two stages, agreed once a step for the micro-batches of one size: by the
        # second stage and whether they are larger.
        self._agreed: dict[tuple[int, bool], tuple[Crossing, Crossing]] = {}
        self._recorder = Recorder.current()

    def start(self) -> None:
        """Post the first receive of every stream."""
        for channel in self._channels.values():
            self._post_next(channel)

    def take(self, message: Message) -> tuple[Tensor, ...]:
        """Wait for a message, and post the receive of the one after it."""
        channel = self._channels[message.src, message.dst, message.kind]
        assert channel.ahead is message, f"took {message.route} out of order"
        posted = channel.posted
        if posted is None:  # the shapes were not known when it could have been posted ahead
            if channel.header is not None:
                self._take_header(channel, message)
            posted = self._post(channel, message, self._known_crossing(message))
        channel.posted = None
        tensors, works, crossing = posted
        del posted
        if works:
            self._wait("receive", message, works, channel, crossing.nbytes)
        self._post_next(channel)
        if self._memory is not self._device:
            tensors = tuple([tensor.to(self._device) for tensor in tensors])
        if message.kind == "F":
            for tensor, meta in zip(tensors, crossing.metas):
                if meta.requires_grad:
                    tensor.requires_grad_()
        return tensors

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start to send the result of an action.

        Raises ValueError for tensors that cannot be sent or do not match what was agreed for micro-batches of this
        size.
        """
        channel = self._channels[message.src, message.dst, message.kind]
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.device != self._device:
                raise ValueError(f"a result for stage {message.stage} is {tensor.layout} on {tensor.device}; only "
                                 f"dense tensors on {self._device} go between ranks")
        started = StartedSend([], [])
        if message.kind == "F":
            if self._boundary(message) not in self._agreed:
                self._send_header(channel, message, tensors, started)
            crossing = self._check(message.stage, message.microbatch, tensors)
        else:
            crossing = self._known_crossing(message)
        channel.in_flight.append(started)
        self._recorder.begin("send", message, channel.peer, crossing.nbytes)
        for tensor in tensors:
            if tensor.numel():
                buffer = _sendable(tensor)
                if self._memory is not self._device:
                    buffer = buffer.to(self._memory)
                started.works.append(self._started(channel.link.send, buffer, message, channel))
                started.buffers.append(buffer)
        self._recorder.end()
        # After the new send has started, which raises if the peer has closed. gloo never wakes a wait for a send that
        # was partly written then.
        if len(channel.in_flight) > SENDS_IN_FLIGHT:
            self._wait_for_oldest_send(channel)

    def hand_over(self, stage: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Hold an output that stays on this rank, for `stage`, to the same: ValueError where it differs from that of an
        earlier micro-batch of its size, as one does that is detached."""
        boundary = stage, microbatch < self._num_larger
        if boundary not in self._agreed:
            self._agree(boundary, tuple(map(TensorMeta.of, tensors)))
        self._check(stage, microbatch, tensors)

    def finish(self) -> None:
        """Wait for all sends, after a step in which all ranks have taken all messages.

        A peer that fails before then closes its connection, and gloo (torch 2.13) never wakes a wait for a send that is
        partly written at that moment.
        """
        for channel in self._channels.values():
            while channel.in_flight:
                self._wait_for_oldest_send(channel)

    # -- what crosses

    def _boundary(self, message: Message) -> tuple[int, bool]:
        """Return where a message crosses, and whether it is a larger one: the key of what was agreed for it."""
        # A gradient has the shapes of the activation that crossed there.
        return message.stage + (message.kind == "B"), message.microbatch < self._num_larger

    def _crossing(self, message: Message) -> Crossing | None:
        """Return the shapes and dtypes of a message; None where they are not known yet."""
        both = self._agreed.get(self._boundary(message))
        return None if both is None else both[message.kind == "B"]

    def _known_crossing(self, message: Message) -> Crossing:
        """Return the shapes and dtypes of a message that is sent, or whose header has come."""
        return self._agreed[self._boundary(message)][message.kind == "B"]

    def _take_header(self, channel: Channel, message: Message) -> None:
        """Wait for the shapes and dtypes of the first activation of its size."""
        assert channel.header is not None, "its receive was posted"
        work, header = channel.header
        channel.header = None
        with self._recorder.wait("receive", message, channel.peer):
            work.wait()
        self._agree(self._boundary(message), metas_of(unpack_json(header)))

    def _send_header(
        self, channel: Channel, message: Message, tensors: Sequence[Tensor], started: StartedSend
    ) -> None:
        """Start to send shapes and dtypes, which the receiver does not know, as a part of `started`."""
        metas = tuple(map(TensorMeta.of, tensors))
        header = pack_json(header_of(metas))
        self._agree(self._boundary(message), metas)
        started.works.append(self._started(self._groups.header(message.dst).send, header, message, channel))
        started.buffers.append(header)

    def _agree(self, boundary: tuple[int, bool], metas: Metas) -> None:
        """Fix what crosses forward, and so what comes back."""
        back = tuple(meta for meta in metas if meta.requires_grad)
        self._agreed[boundary] = Crossing.of(metas), Crossing.of(back)

    def _check(self, stage: int, microbatch: int, tensors: Sequence[Tensor]) -> Crossing:
        """Return what crosses to `stage`; ValueError where the tensors differ from it."""
        crossing = self._agreed[stage, microbatch < self._num_larger][0]
        metas = crossing.metas
        fits = len(tensors) == len(metas)
        for tensor, (shape, dtype, grad) in zip(tensors, metas):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.requires_grad is not grad:
                fits = False
        if not fits:
            given = _described(map(TensorMeta.of, tensors))
            earlier = _described(metas)
            raise ValueError(
                f"the output for stage {stage} changed within the step: micro-batch {microbatch} gives {given}, an "
                f"earlier one gave {earlier}, side inputs included. Micro-batches of one size must give outputs of one "
                "shape and dtype"
            )
        return crossing

    def _post_next(self, channel: Channel) -> None:
        message = channel.ahead = next(channel.incoming, None)
        if message is None:
            return
        crossing = self._crossing(message)
        if crossing is not None:
            self._post(channel, message, crossing)
        elif message.kind == "F":
            header = empty_record()
            receive = self._groups.header(message.src).receive
            channel.header = self._started(receive, header, message, channel), header

    def _post(self, channel: Channel, message: Message, crossing: Crossing) -> PostedReceive:
        """Post the receive of a message whose shapes are known."""
        receive = channel.link.receive
        tensors = []
        works = []
        for shape, dtype, _ in crossing.metas:
            tensor = torch.empty(shape, dtype=dtype, device=self._memory)
            tensors.append(tensor)
            if tensor.numel():
                works.append(self._started(receive, tensor, message, channel))
        channel.posted = PostedReceive(tuple(tensors), works, crossing)
        return channel.posted

    def _started(self, start: Callable[[Tensor], Work], tensor: Tensor, message: Message, channel: Channel) -> Work:
        """Start to send or receive a tensor; RankLost where the connection has closed."""
        try:
            return start(tensor)
        except RuntimeError as error:
            with self._recorder.wait("start", message, channel.peer):
                raise error

    def _wait_for_oldest_send(self, channel: Channel) -> None:
        """Wait until the oldest message of a channel that is on its way has been taken."""
        started = channel.in_flight.popleft()
        self._wait("send", "what was sent to be taken", started.works, channel)

    def _wait(self, kind: str, what: object, works: Sequence[Work], channel: Channel, nbytes: int = 0) -> None:
        """Wait for sends or receives that have started, as one entry of the record; RankLost where the peer is gone."""
        recorder = self._recorder
        entry = recorder.begin(kind, what, channel.peer, nbytes)
        try:
            for work in works:
                work.wait()
        except BaseException as error:
            recorder.end_wait(entry, error)
            raise
        recorder.end()


def _sendable(tensor: Tensor) -> Tensor:
    """Return the values of a tensor contiguous in memory."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def _described(metas: Iterable[TensorMeta]) -> str:
    return f"({', '.join(map(str, metas))})"
