"""Few messages: what a pair, or a micro-batch's tensors, send to one rank is one message, and nothing else changes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from dualpipe import DualPipeV, Pipeline, PipelineError
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.pipeline.lower import BOTH, Programs
from dualpipe.pipeline.p2p import PACKED_BYTES, Link, Signature, TensorMeta
from dualpipe.schedule import build
from ranks import run_ranks
from threads import run_threads
from toys import Stage, gradient_error, make_stages, reference, relative_error


def programs(name: str, num_ranks: int, num_microbatches: int):
    stages = len(build(name, num_ranks, 1).rank_stages(0))
    found = [Programs(name, num_ranks=num_ranks, rank=rank, num_modules=stages) for rank in range(num_ranks)]
    for each in found:
        each.packs = True
    return [each.programs(num_microbatches, train=True) for each in found]


@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 4), (2, 16), (4, 9), (8, 20)])
def test_both_sides_pack_the_same_and_in_one_order(num_ranks, num_microbatches):
    plain, packed = zip(*programs("dualpipev", num_ranks, num_microbatches))
    sent = {rank: [t for i in program.instructions for t in i.sends()] for rank, program in enumerate(packed)}
    for rank, program in enumerate(packed):
        for (src, dst, kind), transfers in program.incoming.items():
            assert dst == rank
            assert [t for t in sent[src] if t.stream == (src, dst, kind)] == list(transfers)
    before, after = (sum(len(i.sends()) for p in each for i in p.instructions) for each in (plain, packed))
    messages = [m for ts in sent.values() for t in ts for m in (t, t.second) if m is not None]
    assert len(messages) == before, "each message is sent once, by itself or in another one"
    both = sum(t.stream[2] == BOTH for ts in sent.values() for t in ts)
    assert after == before - both and (both > 0.3 * before or num_microbatches < 3 * num_ranks)


@pytest.mark.parametrize("name", ["zbv", "1f1b", "interleaved_1f1b"])
def test_schedules_without_pairs_send_as_before(name):
    for plain, packed in programs(name, 2, 8):
        assert [i.outgoing for i in plain.instructions] == [i.outgoing for i in packed.instructions]


def test_a_message_of_small_tensors_is_one_buffer():
    half = torch.randn(2, dtype=torch.half)
    tensors = (torch.randn(3, 5), torch.tensor(True), torch.zeros(0, 4), torch.arange(7), half)
    signature = Signature(map(TensorMeta.of, tensors), packs=True)
    (sent,) = signature.buffers(tensors)
    received, (buffer,) = signature.empty(torch.device("cpu"))
    assert sent.shape == buffer.shape
    buffer.copy_(sent)
    for tensor, arrived in zip(tensors, received, strict=True):
        assert arrived.dtype == tensor.dtype and arrived.shape == tensor.shape and arrived.equal(tensor)
        assert arrived.data_ptr() % 16 == 0 or not arrived.numel()
    large = (torch.zeros(PACKED_BYTES, dtype=torch.uint8), torch.zeros(1))
    assert len(Signature(map(TensorMeta.of, large), packs=True).buffers(large)) == 2
    assert len(Signature(map(TensorMeta.of, tensors), packs=False).buffers(tensors)) == 4


def counted(rank: int, num_chunks: int, rows: int) -> tuple[Counter, float, list]:
    """How many buffers go over each kind of link in a step, the error of gradients, and all losses."""
    stages, expected = make_stages(4), make_stages(4)
    pipe = DualPipeV((stages[rank], stages[3 - rank]))
    x, y = torch.randn(rows, 8).double(), torch.randn(rows, 8).double()
    found, losses, send = Counter(), [], Link.send

    def counting(link: Link, tensor: torch.Tensor):
        found[link.tag] += 1
        return send(link, tensor)

    Link.send = counting
    try:
        loss, _ = pipe.step(x, num_chunks=num_chunks, criterion=F.mse_loss, labels=(y,))
    finally:
        Link.send = send
    wanted, _ = reference(expected, x, y, num_chunks)
    if loss is not None:
        losses = [relative_error(loss, wanted)]
    return found, max(gradient_error(stages[s], expected[s]) for s in (rank, 3 - rank)), losses


@pytest.mark.parametrize("rows", [32, 33])
def test_a_step_with_packed_messages(rows):
    """Micro-batches of two sizes go each by themselves: one of the smaller ones may be the first to cross."""
    results = run_ranks(counted, 2, 16, rows, reuse=True)
    for found, error, losses in results:
        assert error < 1e-10 and all(loss < 1e-12 for loss in losses)
        assert (found[13] > 0) == (rows == 32)
        assert found[11] + found[12] + 2 * found[13] == 32


class Fragile(Stage):
    """Fails at the n-th forward or backward since `armed` was set."""

    armed: dict[str, int] = {}  # noqa: RUF012 (replaced, never changed)

    def tick(self, what: str) -> None:
        if what in self.armed:
            self.armed[what] -= 1
            if self.armed[what] < 0:
                raise ZeroDivisionError(f"boom in {what}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tick("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.tick("backward"))
        return y


def failing(rank: int) -> list[tuple[str, float]]:
    stages, expected = make_stages(4, Fragile), make_stages(4)
    pipe = DualPipeV((stages[rank], stages[3 - rank]))
    x, y = torch.randn(20, 8).double(), torch.randn(20, 8).double()
    call = dict(num_chunks=10, criterion=F.mse_loss, labels=(y,))
    reference(expected, x, y, 10)
    found = []
    for stage, what, count in itertools.product(range(4), ("forward", "backward"), (0, 1, 5, 9)):
        stages[stage].armed = {what: count}
        try:
            pipe.step(x, **call)
            text = ""
        except PipelineError as error:
            text = str(error)
        stages[stage].armed = {}
        pipe.zero_grad()
        pipe.step(x, **call)
        assert f"rank {min(stage, 3 - stage)}: {stage}" in text and f"boom in {what}" in text, (what, count, text)
        found.append((text, max(gradient_error(stages[s], expected[s]) for s in (rank, 3 - rank))))
    return found


def test_a_failure_anywhere_leaves_no_rank_waiting_and_nothing_behind():
    one, other = run_ranks(failing, 2, group_timeout=20)
    assert [text for text, _ in one] == [text for text, _ in other]
    assert max(error for _, error in (*one, *other)) < 1e-10


class Counting(torch.nn.Linear):
    """Changes what came beside the activation in place, when the activation is saved for the backward."""

    def forward(self, x: torch.Tensor, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, torch.zeros(len(x), dtype=torch.long) if count is None else count.add_(1)


def in_place(rank):
    pipe = Pipeline([Counting(4, 4)], process_group=rank.group("pp", (0, 1, 2)))
    return pipe.step(torch.randn(6, 4), num_chunks=3, criterion=lambda y, _: y.sum(), return_outputs=True)[1]


def test_a_change_in_place_is_none_of_what_came_in_the_same_buffer():
    *_, (_, counts) = run_threads(in_place, 3)
    assert counts.tolist() == [2] * 6


class Hooked(torch.nn.Linear):
    pairs: list[int] = []  # noqa: RUF012 (threads share it)

    @classmethod
    def overlapped_forward_backward(cls, ahead, inputs, criterion, labels, behind, loss, outputs, gradients):
        cls.pairs.append(1)
        y = ahead(*inputs)
        torch.autograd.backward(outputs if loss is None else loss, gradients or None)
        return y, criterion(y, *labels) if criterion else None


def hooked(rank, overlap):
    pipe = DualPipeV((Hooked(4, 4), Hooked(4, 4)), process_group=rank.group("pp", (0, 1)), overlap=overlap)
    pipe.step(torch.randn(8, 4), num_chunks=8, criterion=torch.sum)


@pytest.mark.parametrize("overlap", [True, False])
def test_pairs_stay_apart_where_they_are_not_to_overlap(overlap):
    Hooked.pairs.clear()
    run_threads(hooked, 2, overlap)
    assert bool(Hooked.pairs) == overlap


def without_memory(rank):
    stages = make_stages(4)
    pipe = DualPipeV((stages[rank.number], stages[3 - rank.number]), process_group=rank.group("pp", (0, 1)))
    x, y = torch.randn(20, 8).double(), torch.randn(20, 8).double()
    with pytest.raises(PipelineError) as raised:
        pipe.step(x, num_chunks=10, criterion=F.mse_loss, labels=y)
    pipe.step(x, num_chunks=10, criterion=F.mse_loss, labels=y)
    return str(raised.value)


@pytest.mark.parametrize("what", ["buffers", "empty"])
@pytest.mark.parametrize("count", [0, 1, 6, 11, 14])
def test_a_message_for_which_there_is_no_memory_leaves_no_rank_waiting(monkeypatch, what, count):
    calls, method = itertools.count(), getattr(Signature, what)

    def failing_once(*args):
        if next(calls) == count:
            raise MemoryError("no room")
        return method(*args)

    monkeypatch.setattr(Signature, what, failing_once)
    one, other = run_threads(without_memory, 2, timeout=3)
    assert one == other and "MemoryError: no room" in one


class Nowhere:
    """A communication that goes nowhere."""

    group = None

    def forward(self, inputs):
        return self

    def backward(self, context, gradients):
        return self

    def advance(self):
        pass

    def wait(self):
        return (torch.zeros(1),), None


class ReadsTwo(torch.nn.Linear):
    def segments(self):
        return [Compute(super().forward, "x", "h"), Communicate(Nowhere(), "x1", "z"), Compute(lambda h: h, "h", "x")]


def given_one(rank):
    pipe = Pipeline([ReadsTwo(4, 4)], process_group=rank.group("pp", (0, 1)))
    with pytest.raises(PipelineError, match="KeyError: 'x1'"):
        pipe.step(torch.randn(8, 4), num_chunks=4, criterion=torch.sum)


def test_a_communication_of_an_input_that_is_not_there_is_told():
    run_threads(given_one, 2)
