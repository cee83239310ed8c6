"""Point-to-point messages between the ranks of a pipeline: the connections, and the messages of one step.

Every message stream, (source, destination, activations or gradients), has its own `Link`, so that a receive that is
posted ahead never blocks another message. A message stream is not a CUDA stream. With gloo, a link is a tag. NCCL has
no tags and runs the operations of a communicator one after the other, so a link is a communicator. Headers go over gloo
and never wait for the device.

Loading a kernel while an NCCL kernel runs can deadlock. An NCCL kernel keeps the device busy until the peer's kernel
runs, be it a receive that is posted ahead or a send that exceeds NCCL's buffers. To load another kernel, the host waits
for the whole device: always for Triton's kernels, and for all kernels if CUDA loads them lazily. If two hosts wait like
this, neither launches the NCCL kernel that the other waits for. Therefore the first step of a kind
(`StepAgreement.kind`) on a device, which loads the kernels, sends through host memory, over gloo. Shapes that run the
same kernels (`kernel_class`) give the same kind, so a training run with many sequence lengths has few such steps.

A message is the tuple of tensors that goes from one stage to the next (an activation, followed by the side inputs of
the step) or back (gradients). The first activation of each size of micro-batch is preceded by a header with shapes and
dtypes; later activations must match it, and the gradients have the same shapes and dtypes.
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
from torch.distributed.tensor import DTensor

from dualpipe.pipeline.lower import Program
from dualpipe.runtime import device as devices
from dualpipe.runtime.dtypes import dtype_of, long_name
from dualpipe.runtime.nccl import LINK
from dualpipe.runtime.ranks.failure import default_store
from dualpipe.runtime.ranks.process_groups import (
    backends,
    create_groups,
    let_gloo_wait_its_turn,
    new_gloo_group,
    timeout_of,
    yield_to_gloo,
)
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.ranks.records import empty_record, pack_json, unpack_json
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule.messages import Message, MessageStream

SENDS_IN_FLIGHT = 2  # unfinished sends per link, or `messages_in_flight` if the schedule needs more
_TAGS = {"F": 11, "B": 12, "header": 15}  # gloo tags that no other message uses


class Link(NamedTuple):
    """One direction of messages between this rank and a peer.

    Attributes:
        group: the process group.
        peer: rank of the peer in the group.
        tag: tag of gloo.
        as_bytes: send bytes, for NCCL, which refuses some dtypes; gloo looks at the size only.
    """

    group: ProcessGroup
    peer: int
    tag: int = 0
    as_bytes: bool = False

    def send(self, tensor: Tensor) -> Work:
        """Start sending a contiguous tensor, which must not change until the work is done."""
        return self.group.send([tensor.view(-1).view(torch.uint8) if self.as_bytes else tensor], self.peer, self.tag)

    def receive(self, tensor: Tensor) -> Work:
        """Start receiving into a contiguous tensor of the size that is sent."""
        return self.group.recv([tensor.view(-1).view(torch.uint8) if self.as_bytes else tensor], self.peer, self.tag)


class P2PGroups:
    """Connections of one pipeline rank. No rank of another pipeline takes part in making them.

    Args:
        group: the process group of the pipeline. If it cannot carry host tensors (NCCL alone), a gloo group of the same
            ranks is created. None: this rank alone.
        members: the rank in `group` of each pipeline rank.
        rank: the pipeline rank of this process.
    """

    global_ranks: tuple[int, ...] = ()  # by pipeline rank; empty without a group

    def __init__(self, group: ProcessGroup | None, members: Sequence[int], rank: int) -> None:
        self._rank = rank
        self._size = len(members)
        self._group: Any = group
        self._control: Any = group  # carries host tensors
        self._peers = [0]  # ranks in `_control`, by pipeline rank
        self._links: dict[MessageStream, Link] = {}
        if group is None:
            return
        self.global_ranks = tuple(dist.get_global_rank(group, member) for member in members)
        Recorder.current().rank = dist.get_rank()  # names this rank in errors
        self._backends = backends(group)
        if "cpu" not in self._backends:
            self._control = new_gloo_group(group, LINK)
        self._peers = [dist.get_group_rank(self._control, g) for g in self.global_ranks]

    def ranks(self, replicas: Iterable[ProcessGroup]) -> RankSync:
        """Return a `RankSync` of the pipeline's ranks, numbered by pipeline rank. replicas: see `RankSync`."""
        return RankSync(self._control, self._peers, replicas=replicas)

    def store(self) -> dist.Store:
        """Return a connection to the store of the job, for the cause of a failure."""
        return default_store(self._group)

    def groups(self) -> list[ProcessGroup]:
        """Return the process groups of all messages."""
        groups = [self._group, self._control, *(link.group for link in self._links.values())]
        return [group for group in dict.fromkeys(groups) if group is not None]

    def resolve_device(self, device: torch.device | None) -> torch.device:
        """Return the device of the stages; for None, the device of the group.

        Raises ValueError if the group cannot carry tensors of the device.
        """
        if device is None:
            on_gpu = self._group is not None and self._backends.get("cuda", "gloo") != "gloo"
            device = devices.current() if on_gpu else torch.device("cpu")
        if self._size == 1:
            return device
        backend = self._backends.get(device.type)
        if backend is None or (backend == "gloo" and device.type != "cpu"):
            raise ValueError(
                f"the stages are on {device}, but the process group's backends ({self._backends}) do not send such "
                'tensors; initialise it with "gloo" for CPU or "cpu:gloo,cuda:nccl" for GPUs, or move the stages'
            )
        return device

    def connect(self, placement: Sequence[int], device: torch.device, *, own_groups: bool | None = None) -> None:
        """Open a link for each message stream, and send one message over it.

        A communicator that is made lazily in the middle of a step could deadlock. The streams are opened in rounds, the
        same on all ranks; see `stream_rounds`.

        Args:
            placement: rank of each stage.
            device: device of the stages.
            own_groups: create a process group for each link; default: if the backend has no tags.
        """
        if own_groups is None:
            own_groups = device.type != "cpu"
        boundaries = [(a, b) for a, b in pairwise(placement) if a != b]
        rounds = stream_rounds(sorted({stream for a, b in boundaries for stream in ((a, b, "F"), (b, a, "B"))}))
        streams = [streams_by_rank.get(self._rank) for streams_by_rank in rounds]
        groups = [self._group] * len(streams)
        if own_groups and streams:
            groups = self._create_link_groups(streams, device)
        for stream, group in zip(streams, groups):
            if stream is None:
                continue
            src, dst, kind = stream
            peer = dist.get_group_rank(group, self.global_ranks[dst if self._rank == src else src])
            link = Link(group, peer, 0 if own_groups else _TAGS[kind], as_bytes=own_groups)
            self._links[stream] = link
            probe = torch.zeros(1, device=device)
            work = link.send(probe) if self._rank == src else link.receive(probe)
            work.wait()
        if self._size > 1:  # make the communicator of gradient norms, too
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        let_gloo_wait_its_turn()

    def _create_link_groups(
        self, streams: Sequence[MessageStream | None], device: torch.device
    ) -> list[ProcessGroup]:
        """Create a process group for each round: of both ranks of this rank's stream, or of this rank alone.

        streams: this rank's message stream in each round; None in a round without one.
        """
        members = [(self._rank,) if stream is None else stream[:2] for stream in streams]
        requests = [([self.global_ranks[rank] for rank in ranks], LINK) for ranks in members]
        groups = create_groups(
            requests, parent=self._control, timeout=timeout_of(self._group), backend=self._backends[device.type])
        # NCCL would wait forever for a rank that has failed by now; this collective has a timeout.
        dist.all_reduce(torch.zeros(1, device="cpu"), group=self._control)
        return groups

    def link(self, stream: MessageStream, *, by_host: bool = False) -> Link:
        """Return the link of a stream that begins or ends at this rank. by_host: for tensors in host memory."""
        if not by_host:
            return self._links[stream]
        src, dst, kind = stream
        return Link(self._control, self._peers[dst if self._rank == src else src], _TAGS[kind])

    def exchange(self, peer: int, tensor: Tensor, *, around: tuple[int, int]) -> Tensor:
        """Send a contiguous tensor to a rank, and return the tensor that the rank sends.

        Both ranks call this between steps, with tensors of the same shape and dtype.

        Args:
            peer: the other rank.
            tensor: the tensor to send.
            around: both ranks, in the order in which they follow each other in the placement passed to `connect`.
        """
        src, dst = around
        incoming = self.link((src, dst, "F"))
        outgoing = self.link((dst, src, "B"))
        if peer != src:
            incoming, outgoing = outgoing, incoming
        received = torch.empty_like(tensor)
        if not tensor.numel():
            return received
        ranks = self.global_ranks[peer : peer + 1]
        with Recorder.current().wait("exchange", "the peer's gradient of a tied parameter", ranks, tensor.nbytes):
            works = [incoming.receive(received), outgoing.send(tensor)]
            for work in works:
                work.wait()
        return received

    def header_link(self, peer: int) -> Link:
        """Return the link for headers to or from a rank."""
        return Link(self._control, self._peers[peer], _TAGS["header"])


def stream_rounds(streams: Iterable[MessageStream]) -> list[dict[int, MessageStream]]:
    """Divide streams into rounds in which every rank has at most one; return the streams of each round by rank.

    A V of any length has 8 rounds.
    """
    rounds: list[dict[int, MessageStream]] = []
    for stream in streams:
        by_rank = dict.fromkeys(stream[:2], stream)
        free_round = next((other for other in rounds if not other.keys() & by_rank.keys()), None)
        if free_round is None:
            rounds.append(by_rank)
        else:
            free_round.update(by_rank)
    return rounds


# -- the messages of a step


class TensorMeta(NamedTuple):
    """Shape, dtype and gradient flag of a tensor, for its receiver."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """Return the description of a tensor."""
        return TensorMeta(tensor.shape, tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        text = f"{long_name(self.dtype)}{list(self.shape)}"
        return text if self.requires_grad else f"{text} without grad"


Metas = tuple[TensorMeta, ...]


def make_header(metas: Metas) -> dict[str, list[Any]]:
    """Return the header of a message as a JSON value; in columns, which take less room."""
    return {
        "shapes": [list(meta.shape) for meta in metas],
        "dtypes": [long_name(meta.dtype) for meta in metas],
        "requires_grad": [meta.requires_grad for meta in metas],
    }


def parse_header(header: dict[str, list[Any]]) -> Metas:
    """Return the descriptions of the tensors of a message from its header."""
    columns = zip(header["shapes"], header["dtypes"], header["requires_grad"], strict=True)
    return tuple(TensorMeta(torch.Size(shape), dtype_of(name), grad) for shape, name, grad in columns)


class MessageLayout(NamedTuple):
    """Descriptions of the tensors of a message, and their total bytes."""

    metas: Metas
    nbytes: int

    @staticmethod
    def of(metas: Metas) -> MessageLayout:
        """Return the layout of a message with these tensors."""
        return MessageLayout(metas, sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas))


class PostedReceive(NamedTuple):
    """Posted receives of a message, and the tensors that they fill."""

    tensors: tuple[Tensor, ...]
    works: Sequence[Work]
    layout: MessageLayout


class StartedSend(NamedTuple):
    """Started sends of a message. buffers: the sent tensors, kept until `works` are done."""

    works: list[Work]
    buffers: list[Tensor]


@dataclass(slots=True)
class Channel:
    """State of a message stream to or from this rank during a step.

    Attributes:
        link: link of the message stream.
        peer: global rank of the other end, in a tuple.
        incoming: messages to receive after `ahead`.
        ahead: the next message to receive.
        header: posted receive of the header of `ahead`.
        posted: posted receive of `ahead`; None until its layout is known.
        in_flight: unfinished sends, the oldest first.
    """

    link: Link
    peer: tuple[int, ...]
    incoming: Iterator[Message]
    ahead: Message | None = None
    header: tuple[Work, Tensor] | None = None
    posted: PostedReceive | None = None
    in_flight: deque[StartedSend] = field(default_factory=deque)


class P2PMessages:
    """Messages of one rank in one step.

    Args:
        groups: the connections.
        program: the rank's program.
        num_larger: number of micro-batches that are larger than the rest; they come first.
        device: device of the stages.
        by_host: send through host memory; required on all ranks in the first step of a kind on a device.
    """

    def __init__(
        self, groups: P2PGroups, program: Program, *, num_larger: int, device: torch.device, by_host: bool
    ) -> None:
        self._groups = groups
        self._num_larger = num_larger
        self._sends_in_flight = max(SENDS_IN_FLIGHT, program.messages_in_flight)
        self._device = device
        self._buffer_device = torch.device("cpu") if by_host else device
        self._channels: dict[MessageStream, Channel] = {}
        for stream in (*program.incoming, *program.outgoing):
            peer = stream[0] if stream in program.incoming else stream[1]
            self._channels[stream] = Channel(
                groups.link(stream, by_host=by_host), groups.global_ranks[peer : peer + 1],
                iter(program.incoming.get(stream, ())),
            )
        # Layouts (activation, gradient) at each boundary between stages, set once a step for each size of micro-batch.
        # Keys: the stage after the boundary, and True for the larger micro-batches.
        self._layouts: dict[tuple[int, bool], tuple[MessageLayout, MessageLayout]] = {}
        self._recorder = Recorder.current()

    def start(self) -> None:
        """Post the first receive of every message stream."""
        for channel in self._channels.values():
            self._post_next(channel)

    def take(self, message: Message) -> tuple[Tensor, ...]:
        """Wait for a message, and post the receive of the next one of its message stream."""
        channel = self._channels[message.src, message.dst, message.kind]
        assert channel.ahead is message, f"took {message.route} out of order"
        posted = channel.posted
        if posted is None:  # the layout was not known when it could have been posted ahead
            if channel.header is not None:
                self._take_header(channel, message)
            posted = self._post(channel, message, self._known_layout(message))
        channel.posted = None
        tensors, works, layout = posted
        del posted
        if works:
            self._wait("receive", message, works, channel, layout.nbytes)
        self._post_next(channel)
        if self._buffer_device is not self._device:
            tensors = tuple([tensor.to(self._device) for tensor in tensors])
        if message.kind == "F":
            for tensor, meta in zip(tensors, layout.metas):
                if meta.requires_grad:
                    tensor.requires_grad_()
        return tensors

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start sending the result of an action.

        Raises ValueError for tensors that cannot be sent, or differ from those of earlier micro-batches of this size.
        """
        channel = self._channels[message.src, message.dst, message.kind]
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.device != self._device:
                raise ValueError(f"a result for stage {message.stage} is {tensor.layout} on {tensor.device}; return "
                                 f"dense tensors on {self._device}, as no others go between ranks")
        started = StartedSend([], [])
        if message.kind == "F":
            if self._boundary(message) not in self._layouts:
                self._send_header(channel, message, tensors, started)
            layout = self._check(message.stage, message.microbatch, tensors)
        else:
            layout = self._known_layout(message)
        channel.in_flight.append(started)
        self._recorder.begin("send", message, channel.peer, layout.nbytes)
        for tensor in tensors:
            if tensor.numel():
                # A copy: the stage may fill the memory of its result again before the message has left.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._buffer_device)
                buffer.copy_(tensor.detach())
                started.works.append(self._start(channel.link.send, buffer, message, channel))
                started.buffers.append(buffer)
        self._recorder.end()
        if self._buffer_device.type == "cpu":
            yield_to_gloo()
        # Wait only after the new send has started, as starting raises if the peer has closed its connection. A wait
        # might not: gloo never wakes a wait for a send that was partly written when the peer closed.
        if len(channel.in_flight) > self._sends_in_flight:
            self._wait_for_oldest_send(channel)

    def check_local(self, stage: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Check an output for a stage on this rank like one that is sent.

        Raises ValueError if it differs from that of an earlier micro-batch of its size, for example by being detached.
        """
        boundary = stage, microbatch < self._num_larger
        if boundary not in self._layouts:
            _refuse_dtensors(stage, tensors)
            self._set_layouts(boundary, tuple(map(TensorMeta.of, tensors)))
        self._check(stage, microbatch, tensors)

    def finish(self) -> None:
        """Wait for all sends. Call it only after all ranks have taken all messages of the step.

        Before that, a peer can still fail and close its connection, and gloo (torch 2.13) never wakes a wait for a send
        that was partly written when the peer closed.
        """
        for channel in self._channels.values():
            while channel.in_flight:
                self._wait_for_oldest_send(channel)

    # -- layouts

    def _boundary(self, message: Message) -> tuple[int, bool]:
        """Return the key of a message in `_layouts`, which an activation and its gradient share."""
        return message.stage + (message.kind == "B"), message.microbatch < self._num_larger

    def _layout(self, message: Message) -> MessageLayout | None:
        """Return the layout of a message; None if it is not known yet."""
        layouts = self._layouts.get(self._boundary(message))
        return None if layouts is None else layouts[message.kind == "B"]

    def _known_layout(self, message: Message) -> MessageLayout:
        """Return the layout of a message that is sent, or whose header has arrived."""
        return self._layouts[self._boundary(message)][message.kind == "B"]

    def _take_header(self, channel: Channel, message: Message) -> None:
        """Wait for the header of the first activation of its size."""
        assert channel.header is not None, "its receive was posted"
        work, header = channel.header
        channel.header = None
        with self._recorder.wait("receive", message, channel.peer):
            work.wait()
        self._set_layouts(self._boundary(message), parse_header(unpack_json(header)))

    def _send_header(
        self, channel: Channel, message: Message, tensors: Sequence[Tensor], started: StartedSend
    ) -> None:
        """Start sending the header of the first activation of its size, as a part of `started`."""
        _refuse_dtensors(message.stage, tensors)
        metas = tuple(map(TensorMeta.of, tensors))
        header = pack_json(make_header(metas))
        self._set_layouts(self._boundary(message), metas)
        started.works.append(self._start(self._groups.header_link(message.dst).send, header, message, channel))
        started.buffers.append(header)

    def _set_layouts(self, boundary: tuple[int, bool], metas: Metas) -> None:
        """Set the layouts of the activation and of its gradient at a boundary."""
        gradients = tuple(meta for meta in metas if meta.requires_grad)
        self._layouts[boundary] = (MessageLayout.of(metas), MessageLayout.of(gradients))

    def _check(self, stage: int, microbatch: int, tensors: Sequence[Tensor]) -> MessageLayout:
        """Return the layout of the activation for `stage`. Raises ValueError if the tensors differ from it."""
        layout = self._layouts[stage, microbatch < self._num_larger][0]
        metas = layout.metas
        fits = len(tensors) == len(metas)
        for tensor, (shape, dtype, grad) in zip(tensors, metas):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.requires_grad is not grad:
                fits = False
        if not fits:
            raise ValueError(
                f"the output for stage {stage} changed within the step: micro-batch {microbatch} gives "
                f"{_describe(map(TensorMeta.of, tensors))}, an earlier one gave {_describe(metas)}, side inputs "
                "included; return outputs of one shape and dtype for all micro-batches of one size"
            )
        return layout

    # -- sends and receives

    def _post_next(self, channel: Channel) -> None:
        """Post the receive of the next message of a channel, or of its header if its layout is not known."""
        message = next(channel.incoming, None)
        channel.ahead = message
        if message is None:
            return
        layout = self._layout(message)
        if layout is not None:
            self._post(channel, message, layout)
        elif message.kind == "F":
            header = empty_record()
            receive = self._groups.header_link(message.src).receive
            channel.header = (self._start(receive, header, message, channel), header)

    def _post(self, channel: Channel, message: Message, layout: MessageLayout) -> PostedReceive:
        """Post the receives of a message."""
        receive = channel.link.receive
        tensors = []
        works = []
        for shape, dtype, _ in layout.metas:
            tensor = torch.empty(shape, dtype=dtype, device=self._buffer_device)
            tensors.append(tensor)
            if tensor.numel():
                works.append(self._start(receive, tensor, message, channel))
        channel.posted = PostedReceive(tuple(tensors), works, layout)
        return channel.posted

    def _start(self, start: Callable[[Tensor], Work], tensor: Tensor, message: Message, channel: Channel) -> Work:
        """Start sending or receiving a tensor. Raises RankLost if the connection has closed."""
        try:
            return start(tensor)
        except RuntimeError as error:
            with self._recorder.wait("start", message, channel.peer):  # raises RankLost in its place
                raise error

    def _wait_for_oldest_send(self, channel: Channel) -> None:
        """Wait for the oldest unfinished send of a channel."""
        started = channel.in_flight.popleft()
        self._wait("send", "the receipt of a message", started.works, channel)

    def _wait(self, kind: str, what: object, works: Sequence[Work], channel: Channel, nbytes: int = 0) -> None:
        """Wait for started sends or receives, with one recorder entry. Raises RankLost if the peer is gone."""
        recorder = self._recorder
        entry = recorder.begin(kind, what, channel.peer, nbytes)
        try:
            for work in works:
                work.wait()
        except BaseException as error:
            recorder.end_wait(entry, error)
            raise
        recorder.end()


def _refuse_dtensors(stage: int, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError for a DTensor among the tensors that another stage hands to `stage`."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise ValueError(f"a result for stage {stage} is a DTensor placed {tensor.placements}; return a plain "
                             "tensor, by its full_tensor() or to_local(), as no other goes from stage to stage")


def _describe(metas: Iterable[TensorMeta]) -> str:
    """Return descriptions of tensors as text."""
    return f"({', '.join(map(str, metas))})"
