"""The messages of one step: receives posted ahead, sends waited for late, shapes agreed by a header.

A message is the tuple of tensors that crosses from one stage to the next (an activation) or back (a gradient). The
first activation of each size class is preceded by a header with shapes and dtypes; later ones must match it, and the
gradients follow from it. A rank that failed keeps sending and receiving to the end of its program, zeros in place of
what it cannot compute, so that no rank is left waiting and no message of this step is left over for the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from dualpipe.pipeline.program import stream_of
from dualpipe.pipeline.transport import Stream, Transport, empty_record, pack_record, unpack_record
from dualpipe.schedule.messages import Message

SENDS_IN_FLIGHT = 2  # messages per link whose buffers are kept; the one before them is waited for


class TensorMeta(NamedTuple):
    """What a receiver must know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tensor.shape, tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}{'' if self.requires_grad else ' without grad'}"


Signature = tuple[TensorMeta, ...]


def _pack_signature(signature: Signature | None) -> Tensor:
    return pack_record(signature and [(list(m.shape), str(m.dtype).removeprefix("torch."), m[2]) for m in signature])


def _unpack_signature(header: Tensor) -> Signature | None:
    metas = unpack_record(header)
    return metas and tuple(TensorMeta(torch.Size(shape), getattr(torch, dtype), grad) for shape, dtype, grad in metas)


class Arrival:
    """A receive in progress: the buffers and their works, or a header that says what to post."""

    __slots__ = ("header", "header_work", "message", "tensors", "works")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.header: Tensor | None = None
        self.header_work: Work | None = None
        self.tensors: tuple[Tensor, ...] | None = None
        self.works: list[Work] = []


class Incoming:
    """A stream of messages to this rank."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = iter(messages)
        self.ahead: Arrival | None = None
        self.taken = 0


class Outgoing:
    """A stream of messages from this rank; `in_flight` keeps what was sent alive until its send is done."""

    def __init__(self) -> None:
        self.in_flight: deque[list[tuple[Work, Tensor]]] = deque()
        self.sent = 0


class Traffic:
    """One rank's messages of one step. `size_class(microbatch)` tells micro-batches of different sizes apart."""

    def __init__(
        self,
        transport: Transport,
        incoming: dict[Stream, Sequence[Message]],
        outgoing: Iterable[Stream],
        *,
        size_class: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self._transport, self._size_class, self._device = transport, size_class, device
        self._signatures: dict[tuple[int, int], Signature | None] = {}  # None: its sender failed before it knew
        self._incoming = {stream: Incoming(messages) for stream, messages in incoming.items()}
        self._outgoing = {stream: Outgoing() for stream in outgoing}
        self._broken: set[int] = set()  # peers that an operation failed with

    def start(self) -> None:
        """Post the first receive of every stream."""
        for stream in self._incoming.values():
            self._post_next(stream)

    def take(self, message: Message) -> tuple[Tensor, ...] | None:
        """Wait for `message`, post the receive of the one after it; None where its sender has failed."""
        stream = self._incoming[stream_of(message)]
        if stream.ahead is None:
            self._post_next(stream)
        arrival, stream.ahead = stream.ahead, None
        stream.taken += 1
        assert arrival is not None and arrival.message is message, f"took {message} out of order"
        if arrival.tensors is None:
            self._learn(arrival)
        for work in arrival.works:
            work.wait()
        self._post_next(stream)
        return arrival.tensors

    def send(self, message: Message, tensors: Sequence[Tensor] | None) -> None:
        """Start to send `message`; None sends zeros, or word of the failure where no shape was agreed yet.

        Raises ValueError where the tensors do not match what was agreed for micro-batches of this size.
        """
        stream = self._outgoing[stream_of(message)]
        key = self._key(message)
        works = [] if message.kind == "B" or key in self._signatures else [self._agree(message, tensors)]
        signature = self._expected(message)
        if tensors is None:
            tensors = [meta.empty(self._device).zero_() for meta in signature or ()]
        elif message.kind == "F":
            _check(message, tensors, signature)
        stream.sent += 1
        if len(stream.in_flight) == SENDS_IN_FLIGHT:
            _wait(stream.in_flight.popleft())
        link = self._transport.data(stream_of(message))
        for tensor in tensors:
            if tensor.numel():
                ready = tensor.detach().contiguous()
                works.append((link.send(ready), ready))
        stream.in_flight.append(works)

    def finish(self) -> None:
        """Wait for all sends."""
        for stream in self._outgoing.values():
            while stream.in_flight:
                _wait(stream.in_flight.popleft())

    def drain(self, program: Iterable[tuple[Sequence[Message], Sequence[Message]]]) -> None:
        """After a failure: receive and send, in program order, everything that the step still owes its peers."""
        taken, sent = dict.fromkeys(self._incoming, 0), dict.fromkeys(self._outgoing, 0)
        for incoming, outgoing in program:
            for message in incoming:
                taken[stream_of(message)] += 1
                if taken[stream_of(message)] > self._incoming[stream_of(message)].taken:
                    self._guarded(message.src, self.take, message)
            for message in outgoing:
                sent[stream_of(message)] += 1
                if sent[stream_of(message)] > self._outgoing[stream_of(message)].sent:
                    self._guarded(message.dst, self.send, message, None)
        for (_, dst, _), stream in self._outgoing.items():
            while stream.in_flight:
                self._guarded(dst, _wait, stream.in_flight.popleft())

    def _guarded(self, peer: int, call: Callable[..., object], *args: object) -> None:
        if peer not in self._broken:
            try:
                call(*args)
            except Exception:  # the peer is gone; what is owed to the others is still owed
                self._broken.add(peer)

    def _key(self, message: Message) -> tuple[int, int]:
        """Boundaries are named by the stage after them: gradients have the signature of the activations there."""
        stage = message.stage if message.kind == "F" else message.stage + 1
        return stage, self._size_class(message.microbatch)

    def _expected(self, message: Message) -> Signature | None:
        signature = self._signatures[self._key(message)]
        if signature is None or message.kind == "F":
            return signature
        return tuple(meta for meta in signature if meta.requires_grad)

    def _agree(self, message: Message, tensors: Sequence[Tensor] | None) -> tuple[Work, Tensor]:
        """Fix the signature of a size class and start to send its header."""
        signature = None if tensors is None else tuple(map(TensorMeta.of, tensors))
        header = _pack_signature(signature)
        self._signatures[self._key(message)] = signature
        return self._transport.header(message.dst).send(header), header

    def _post_next(self, stream: Incoming) -> None:
        message = next(stream.messages, None)
        if message is None:
            return
        stream.ahead = arrival = Arrival(message)
        if self._key(message) in self._signatures:
            self._post(arrival)
        elif message.kind == "F":
            arrival.header = empty_record()
            arrival.header_work = self._transport.header(message.src).receive(arrival.header)

    def _learn(self, arrival: Arrival) -> None:
        """Post a receive whose shapes were not known when it could have been posted ahead."""
        if arrival.header_work is not None:
            arrival.header_work.wait()
            self._signatures[self._key(arrival.message)] = _unpack_signature(arrival.header)
        self._post(arrival)

    def _post(self, arrival: Arrival) -> None:
        signature = self._expected(arrival.message)
        if signature is None:
            return
        arrival.tensors = tuple(meta.empty(self._device) for meta in signature)
        link = self._transport.data(stream_of(arrival.message))
        arrival.works = [link.receive(t) for t in arrival.tensors if t.numel()]
        if arrival.message.kind == "F":
            for tensor, meta in zip(arrival.tensors, signature):
                tensor.requires_grad_(meta.requires_grad)


def _check(message: Message, tensors: Sequence[Tensor], signature: Signature | None) -> None:
    agreed = signature or ()
    if len(tensors) != len(agreed) or any(
        t.shape != m.shape or t.dtype != m.dtype or t.requires_grad != m.requires_grad for t, m in zip(tensors, agreed)
    ):
        raise ValueError(
            f"the output for stage {message.stage} changed within the step: micro-batch {message.microbatch} gives "
            f"({', '.join(str(TensorMeta.of(t)) for t in tensors)}), an earlier one gave "
            f"({', '.join(map(str, agreed))}). Micro-batches of one size must give outputs of one shape and dtype"
        )


def _wait(sends: list[tuple[Work, Tensor]]) -> None:
    for work, _ in sends:
        work.wait()
