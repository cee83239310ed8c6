"""Programs of ranks: the order of messages on both sides, failures anywhere, and pairs without overlap."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from dualpipe import DualPipeV, Pipeline, PipelineError
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.pipeline import p2p
from dualpipe.pipeline.lower import ProgramCache
from dualpipe.schedule import build
from schedules import SCHEDULES
from threads import run_threads
from toys import Handed, Hooked, make_stages


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [
    (2, 4), (2, 16), (4, 12), pytest.param(8, 24, marks=pytest.mark.slow),
])
def test_messages_are_received_in_the_order_of_their_sends(name, num_ranks, num_microbatches, train):
    stages = len(build(name, num_ranks, num_ranks).rank_stages(0))
    programs = [
        ProgramCache(name, num_ranks=num_ranks, rank=rank, num_modules=stages).program(num_microbatches, train=train)
        for rank in range(num_ranks)
    ]
    sent = [[m for i in program.instructions for m in i.outgoing if m is not None] for program in programs]
    for rank, program in enumerate(programs):
        assert set(program.outgoing) == {message.stream for message in sent[rank]}
        for (src, dst, kind), messages in program.incoming.items():
            assert dst == rank
            assert messages == [m for m in sent[src] if m.stream == (src, dst, kind)]
    crossings = sum(a != b for a, b in itertools.pairwise(build(name, num_ranks, num_microbatches).placement))
    assert sum(map(len, sent)) == crossings * num_microbatches * (2 if train else 1)


class Counting(torch.nn.Linear):
    """A stage that changes its second input in place after the activation was saved for the backward."""

    def forward(self, x: torch.Tensor, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, torch.zeros(len(x), dtype=torch.long) if count is None else count.add_(1)


def in_place(rank):
    pipe = Pipeline([Counting(4, 4)], process_group=rank.group("pp", (0, 1, 2)))
    return pipe.step(torch.randn(6, 4), num_chunks=3, criterion=lambda y, _: y.sum(), return_outputs=True)[1]


def test_a_second_input_may_be_changed_in_place():
    *_, (_, counts) = run_threads(in_place, 3)
    assert counts.tolist() == [2] * 6


class HookedLinear(Hooked, torch.nn.Linear):
    pass


def hooked(rank, overlap):
    pipe = DualPipeV((HookedLinear(4, 4), HookedLinear(4, 4)), process_group=rank.group("pp", (0, 1)), overlap=overlap)
    pipe.step(torch.randn(8, 4), num_chunks=8, criterion=torch.sum)


@pytest.mark.parametrize("overlap", [True, False])
def test_pairs_run_one_after_the_other_without_overlap(overlap):
    Hooked.pairs.clear()
    run_threads(hooked, 2, overlap)
    assert bool(Hooked.pairs) == overlap


def without_memory(rank):
    stages = make_stages(4)
    pipe = DualPipeV((stages[rank.number], stages[3 - rank.number]), process_group=rank.group("pp", (0, 1)))
    x, y = torch.randn(20, 8).double(), torch.randn(20, 8).double()
    with pytest.raises(PipelineError) as raised:
        pipe.step(x, num_chunks=10, criterion=F.mse_loss, labels=y)
    return str(raised.value)


class Scarce:
    """Stand-in for the module torch in messages, of which one call runs out of memory."""

    def __init__(self, count):
        self.calls, self.count = itertools.count(), count

    def __getattr__(self, name):
        return getattr(torch, name)

    def once(self, method):
        def call(*args, **kwargs):
            if next(self.calls) == self.count:
                raise MemoryError("no room")
            return method(*args, **kwargs)

        return call


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 11, 14, 20, 25, 30])
def test_no_rank_waits_after_a_message_runs_out_of_memory(monkeypatch, count):
    scarce = Scarce(count)  # the buffers of sends and receives
    scarce.empty = scarce.once(torch.empty)
    monkeypatch.setattr(p2p, "torch", scarce)
    one, other = run_threads(without_memory, 2, timeout=3)
    assert one == other and "MemoryError: no room" in one


class ReadsTwo(torch.nn.Linear):
    def segments(self):
        return [Compute(super().forward, "x", "h"), Communicate(Handed(), "x1", "z"), Compute(lambda h: h, "h", "x")]


def given_one(rank):
    pipe = Pipeline([ReadsTwo(4, 4)], process_group=rank.group("pp", (0, 1)))
    with pytest.raises(PipelineError, match="KeyError: 'x1'"):
        pipe.step(torch.randn(8, 4), num_chunks=4, criterion=torch.sum)


def test_a_communication_of_a_missing_input_raises():
    run_threads(given_one, 2)
