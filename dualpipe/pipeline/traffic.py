"""The messages of one step: receives posted ahead, sends waited for late, shapes agreed by a header.

A message is the tuple of tensors that crosses from one stage to the next (an activation, and the step's side inputs
behind it) or back (a gradient). The first activation of each size class is preceded by a header with shapes and dtypes;
later ones must match it, and the gradients follow from it. A rank that failed keeps sending and receiving to the end of
its program, zeros in place of what it cannot compute, so that no rank is left waiting and no message of this step is
left over for the next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from dualpipe.pipeline.program import Instruction, Program, Transfer
from dualpipe.pipeline.transport import Link, Transport, empty_record, pack_record, unpack_record
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


class Boundary:
    """What crosses between two stages, for micro-batches of one size. Agreed once a step."""

    __slots__ = ("agreed", "backward", "forward")

    def __init__(self) -> None:
        self.agreed = False
        self.forward: Signature | None = None  # None once agreed: the sender failed before it knew
        self.backward: Signature | None = None

    def agree(self, signature: Signature | None) -> None:
        self.agreed = True
        self.forward = signature
        self.backward = None if signature is None else tuple(meta for meta in signature if meta.requires_grad)

    def expects(self, message: Message) -> Signature | None:
        return self.forward if message.kind == "F" else self.backward


class Arrival:
    """A receive in progress: the buffers and their works, or a header that says what to post."""

    __slots__ = ("header", "header_work", "tensors", "transfer", "works")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.header: Tensor | None = None
        self.header_work: Work | None = None
        self.tensors: tuple[Tensor, ...] | None = None
        self.works: list[Work] = []


class Incoming:
    """A stream of messages to this rank."""

    def __init__(self, transfers: Sequence[Transfer], link: Link) -> None:
        self.transfers, self.link = iter(transfers), link
        self.ahead: Arrival | None = None
        self.taken = 0


class Outgoing:
    """A stream of messages from this rank; `in_flight` keeps what was sent alive until its send is done."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.in_flight: deque[list[tuple[Work, Tensor]]] = deque()
        self.sent = 0


class Traffic:
    """One rank's messages of one step of `program`. The first `num_larger` micro-batches are larger than the others."""

    def __init__(self, transport: Transport, program: Program, *, num_larger: int, device: torch.device) -> None:
        self._transport, self._program, self._num_larger, self._device = transport, program, num_larger, device
        self._boundaries: defaultdict[tuple[int, bool], Boundary] = defaultdict(Boundary)
        self._incoming = {s: Incoming(transfers, transport.data(s)) for s, transfers in program.incoming.items()}
        self._outgoing = {s: Outgoing(transport.data(s)) for s in program.outgoing}
        self._broken: set[int] = set()  # peers that an operation failed with

    def start(self) -> None:
        """Post the first receive of every stream."""
        for stream in self._incoming.values():
            self._post_next(stream)

    def take(self, transfer: Transfer) -> tuple[Tensor, ...] | None:
        """Wait for a message, post the receive of the one after it; None where its sender has failed."""
        stream = self._incoming[transfer.stream]
        if stream.ahead is None:
            self._post_next(stream)
        arrival, stream.ahead = stream.ahead, None
        stream.taken += 1
        assert arrival is not None and arrival.transfer is transfer, f"took {transfer.message} out of order"
        if arrival.tensors is None:
            self._learn(stream, arrival)
        for work in arrival.works:
            work.wait()
        self._post_next(stream)
        return arrival.tensors

    def send(self, transfer: Transfer, tensors: Sequence[Tensor] | None) -> None:
        """Start to send a message; None sends zeros, or word of the failure where no shape was agreed yet.

        Raises ValueError, having sent nothing, for tensors that cannot be sent or do not match what was agreed for
        micro-batches of this size.
        """
        message, stream, boundary = transfer.message, self._outgoing[transfer.stream], self._boundary(transfer)
        if tensors is not None:
            _check_sendable(message, tensors, self._device)
        works = [] if boundary.agreed else [self._agree(message, boundary, tensors)]
        if tensors is None:
            tensors = [meta.empty(self._device).zero_() for meta in boundary.expects(message) or ()]
        elif message.kind == "F":
            _check(message.stage, message.microbatch, tensors, boundary.forward)
        stream.sent += 1
        if len(stream.in_flight) == SENDS_IN_FLIGHT:
            _wait(stream.in_flight.popleft())
        for tensor in tensors:
            if tensor.numel():
                ready = tensor.detach().contiguous().resolve_conj().resolve_neg()
                works.append((stream.link.send(ready), ready))
        stream.in_flight.append(works)

    def hand_over(self, stage: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Hold an output that stays on this rank, for `stage`, to the same: ValueError where it differs from that of an
        earlier micro-batch of its size, as one does that is detached."""
        boundary = self._boundaries[stage, microbatch < self._num_larger]
        if not boundary.agreed:
            boundary.agree(tuple(map(TensorMeta.of, tensors)))
        _check(stage, microbatch, tensors, boundary.forward)

    def finish(self) -> None:
        """Wait for all sends."""
        for stream in self._outgoing.values():
            while stream.in_flight:
                _wait(stream.in_flight.popleft())

    def drain(self, then: Callable[[Instruction], None]) -> None:
        """After a failure: receive and send, in program order, everything that the step still owes its peers.

        `then` is called after each instruction's messages, for what other ranks are owed besides.
        """
        taken, sent = dict.fromkeys(self._incoming, 0), dict.fromkeys(self._outgoing, 0)
        for instruction in self._program.instructions:
            for transfer in instruction.incoming:
                taken[transfer.stream] += 1
                if taken[transfer.stream] > self._incoming[transfer.stream].taken:
                    self._guarded(transfer.message.src, self.take, transfer)
            for transfer in instruction.sends():
                sent[transfer.stream] += 1
                if sent[transfer.stream] > self._outgoing[transfer.stream].sent:
                    self._guarded(transfer.message.dst, self.send, transfer, None)
            then(instruction)
        for (_, dst, _), stream in self._outgoing.items():
            while stream.in_flight:
                self._guarded(dst, _wait, stream.in_flight.popleft())

    def _guarded(self, peer: int, call: Callable[..., object], *args: object) -> None:
        if peer not in self._broken:
            try:
                call(*args)
            except Exception:  # the peer is gone; what is owed to the others is still owed
                self._broken.add(peer)

    def _boundary(self, transfer: Transfer) -> Boundary:
        return self._boundaries[transfer.boundary, transfer.message.microbatch < self._num_larger]

    def _agree(self, message: Message, boundary: Boundary, tensors: Sequence[Tensor] | None) -> tuple[Work, Tensor]:
        """Fix the signature of a boundary and start to send its header."""
        assert message.kind == "F", "a gradient follows an activation"
        signature = None if tensors is None else tuple(map(TensorMeta.of, tensors))
        header = _pack_signature(signature)  # may refuse; nothing is agreed then
        boundary.agree(signature)
        return self._transport.header(message.dst).send(header), header

    def _post_next(self, stream: Incoming) -> None:
        transfer = next(stream.transfers, None)
        if transfer is None:
            return
        stream.ahead = arrival = Arrival(transfer)
        if self._boundary(transfer).agreed:
            self._post(stream, arrival)
        elif transfer.message.kind == "F":
            arrival.header = empty_record()
            arrival.header_work = self._transport.header(transfer.message.src).receive(arrival.header)

    def _learn(self, stream: Incoming, arrival: Arrival) -> None:
        """Post a receive whose shapes were not known when it could have been posted ahead."""
        if arrival.header_work is not None:
            arrival.header_work.wait()
            self._boundary(arrival.transfer).agree(_unpack_signature(arrival.header))
        self._post(stream, arrival)

    def _post(self, stream: Incoming, arrival: Arrival) -> None:
        message = arrival.transfer.message
        signature = self._boundary(arrival.transfer).expects(message)
        if signature is None:
            return
        arrival.tensors = tuple(meta.empty(self._device) for meta in signature)
        arrival.works = [stream.link.receive(t) for t in arrival.tensors if t.numel()]
        if message.kind == "F":
            for tensor, meta in zip(arrival.tensors, signature):
                tensor.requires_grad_(meta.requires_grad)


def _check_sendable(message: Message, tensors: Sequence[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device != device:
            raise ValueError(
                f"a result for stage {message.stage} is {tensor.layout} on {tensor.device}; only dense tensors on "
                f"{device} go between ranks"
            )


def _check(stage: int, microbatch: int, tensors: Sequence[Tensor], signature: Signature | None) -> None:
    agreed = signature or ()
    if len(tensors) == len(agreed) and all(
        t.shape == m.shape and t.dtype is m.dtype and t.requires_grad is m.requires_grad
        for t, m in zip(tensors, agreed)
    ):
        return
    raise ValueError(
        f"the output for stage {stage} changed within the step: micro-batch {microbatch} gives "
        f"({', '.join(str(TensorMeta.of(t)) for t in tensors)}), an earlier one gave "
        f"({', '.join(map(str, agreed))}), side inputs included. Micro-batches of one size must give outputs of one "
        "shape and dtype"
    )


def _wait(sends: list[tuple[Work, Tensor]]) -> None:
    for work, _ in sends:
        work.wait()
