"""Work that the library gives to streams never deadlocks, by a model of devices (tests/support/device_waits.py).

Reported deadlocks of others are shown in the terms of the model, and the two rules that follow from it: all ranks
launch the kernels of a communicator in one order, and those that can wait at once fit the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import device_waits
from device_book import the_device
from device_steps import as_process, by_threads, qwen, toys
from device_waits import COLLECTIVE, LINK, MULTIPROCESSORS, Launch, Trace, run
from dualpipe import Pipeline
from dualpipe.pipeline import engine, executor
from dualpipe.pipeline.overlap import Task
from dualpipe.pipeline.p2p import P2PMessages
from dualpipe.runtime.nccl import waiting_blocks
from pretend_cuda import pretend_cuda
from ranks import run_ranks
from schedules import SCHEDULES
from threads import Group, Rank, run_threads

# -- the model alone


def ranks(*programs: str, one_stream: bool = False) -> list[Trace]:
    """Return a trace for each program.

    A program launches computing such as "mm", kernels of NCCL such as "send 01" or "reduce 0123" with the ranks of the
    communicator, each of which has a stream of its own, and "wait" for the device.
    """
    traces = []
    for number, program in enumerate(programs):
        trace = Trace(f"rank {number}")
        for what in program.split(" | "):
            name, _, members = what.partition(" ")
            if name == "wait":
                trace.host_waits(trace.everything())
            elif not members:
                trace.launch("main", name)
            elif one_stream:
                trace.launch("main", name, members, len(members))
            else:
                trace.communicate(name, members, len(members), current="main")
        traces.append(trace)
    return traces


def test_the_example_of_the_model(monkeypatch):
    monkeypatch.setattr(device_waits, "LINK", 4)  # blocks of a link, more than a multiplication takes
    ahead = ranks("recv 10 | mm | send 01", "recv 01 | mm | send 10")
    assert run(ahead).stuck == [
        "rank 0: the host, at step 2 of 5: Launch(stream='main', name='mm', communicator=None, size=0)",
        "rank 0: recv, number 0 of 10, where only rank 0 is",
        "rank 1: the host, at step 2 of 5: Launch(stream='main', name='mm', communicator=None, size=0)",
        "rank 1: recv, number 0 of 01, where only rank 1 is",
    ]
    assert run(ahead, loading=0) == ([], 8)  # a receive and a send at once, 4 CTAs each
    assert len(run(ahead, loading=0, multiprocessors=5).stuck) == 4  # mm has run; the send has no room
    assert len(run(ahead, loading=0, multiprocessors=4).stuck) == 6  # each receive, mm, and what comes after it
    assert run(ranks("mm | send 01 | recv 10", "mm | send 10 | recv 01")) == ([], 8)


def test_a_send_waits_for_its_receive_as_well():
    """Late receives are not enough: with none ahead, "first" and "other" are loaded behind a send."""
    traces = ranks("send 01 | first | recv 10", "send 10 | other | recv 01")
    assert len(run(traces).stuck) == 4 and run(traces, loading=0).stuck == []


def test_kernels_that_do_not_match_and_hosts_that_do_not_meet():
    assert run(ranks("send 01", "send 01")).stuck == ["number 0 of 01: rank 0 send, rank 1 send"]
    [told] = run(ranks("gather 01 | reduce 01", "reduce 01 | gather 01")).stuck
    assert told == "number 0 of 01: rank 0 gather, rank 1 reduce"
    first, second = Trace("rank 0"), Trace("rank 1")
    first.wait_for(first.meet("header", "recv"))
    assert len(run([first, second]).stuck) == 1
    second.meet("header", "send")
    assert run([first, second]).stuck == []


def test_streams_that_share_a_queue():
    """One queue is too few for a receive, the work after it, and a send that need not wait for it."""
    traces = []
    for number, (incoming, outgoing) in enumerate((("10", "01"), ("01", "10"))):
        traces.append(trace := Trace(f"rank {number}"))
        trace.launch("in", "recv", incoming, 2)
        trace.after("main", trace.event("in"))
        trace.launch("out", "send", outgoing, 2)
    assert run(traces).stuck == run(traces, connections=2).stuck == run(traces, connections=2, depth=1).stuck == []
    assert len(run(traces, connections=1).stuck) == 4  # each rank's receive, and the work after it
    assert len(run(traces, connections=1, depth=1).stuck) == 6  # and the host, which cannot launch the send


# -- what others have met


def test_two_collectives_that_may_start_at_once():
    """NVIDIA/Megatron-LM#1810 (open) deadlocks if ranks launch two collectives of one communicator in different orders.

    One event gates both communications of a layer, so that both may start at once, and ranks are reported to launch
    them in different orders on one communicator. Our ranks launch in the order of the schedule, whatever the device has
    done (`different_orders`, below).
    """
    assert run(ranks("dispatch 01 | combine 01", "combine 01 | dispatch 01")).stuck
    assert not run(ranks("dispatch 01 | combine 01", "dispatch 01 | combine 01")).stuck


def test_an_all_to_all_and_a_reduction_on_one_stream():
    """NVIDIA/Megatron-LM#5749 (open): an all-to-all and a reduce-scatter on one stream hang after some hundred steps.

    At ep 4 and dp 16 they are the all-to-all of tokens and the reduce-scatter of gradients. The model needs different
    orders on ranks to hang, which were not shown there. Pairs of ep are 01 and 23, of dp 02 and 13; two ranks reduce
    first. With a stream for each, as ours have, the device must also be too small for both. In one order, as ours are,
    not even that hurts.
    """
    orders = "tokens 01 | reduce 02", "reduce 13 | tokens 01", "reduce 02 | tokens 23", "tokens 23 | reduce 13"
    assert len(run(ranks(*orders, one_stream=True)).stuck) == 4
    assert run(ranks(*orders)) == ([], 2 * COLLECTIVE)
    assert run(ranks(*orders), multiprocessors=2 * COLLECTIVE - 1).stuck
    same = "tokens 01 | reduce 02", "tokens 01 | reduce 13", "tokens 23 | reduce 02", "tokens 23 | reduce 13"
    assert not run(ranks(*same, one_stream=True), multiprocessors=COLLECTIVE).stuck


def test_messages_beside_collectives_from_another_thread():
    """pytorch/pytorch#175145 (open): messages and an all-reduce of four ranks, from two threads each, hang.

    They have their own communicators and streams; the cause is not known, and one channel for each did not help. Two
    threads launch in any order. That alone is harmless if both have room; it is not if one has to end first, or if a
    host waits for its device in between. One thread launches ours; that they have room is the second rule, below.
    """
    orders = "send 01 | sum ab", "sum ab | recv 01"
    assert run(ranks(*orders)) == ([], LINK + COLLECTIVE)
    assert run(ranks(*orders), multiprocessors=LINK + COLLECTIVE - 1).stuck
    assert run(ranks("send 01 | wait | sum ab", "sum ab | wait | recv 01")).stuck


# -- the library


def stuck(traces: Sequence[Trace]) -> list[str]:
    """Return the waits that never end if the first step loads its kernels, each as late as possible."""
    return run(traces, loading=None).stuck + run(traces, loading=1).stuck


def different_orders(traces: Sequence[Trace]) -> list[str]:
    """Return the communicators whose kernels are not launched in one order by all of their ranks."""
    orders: dict = {}
    for trace in traces:
        launched: dict = {}
        for step in trace.steps:
            if isinstance(step, Launch) and step.communicator is not None:
                name = "message" if step.name in ("send", "recv") else step.name
                launched.setdefault((step.communicator, step.size), []).append(name)
        for communicator, names in launched.items():
            orders.setdefault(communicator, []).append(names)
    assert orders, "nothing was launched"
    return [f"{communicator}: {by_rank}" for communicator, by_rank in orders.items()
            if len(by_rank) != communicator[1] or any(names != by_rank[0] for names in by_rank)]


def ctas(trace: Trace) -> int:
    """Return the CTAs of all communicators of a rank, each of which runs one kernel at a time."""
    kernels = {step.communicator: step.ctas for step in trace.steps if isinstance(step, Launch) and step.communicator}
    return sum(kernels.values())


def check(traces: Sequence[Trace]) -> None:
    assert stuck(traces) == []
    assert run(traces, loading=0, connections=1, depth=1).stuck == []  # streams that share a queue only take longer
    assert different_orders(traces) == []
    most = run(traces, loading=0).most_ctas
    assert most <= max(map(ctas, traces)) <= MULTIPROCESSORS
    assert most <= waiting_blocks() < MULTIPROCESSORS  # what `dualpipe doctor` prints


FAST, *REST = product((2, 3, 4), SCHEDULES)


@cache
def toy_traces(pp: int, schedule: str) -> list[Trace]:
    return by_threads(toys, pp, 2, schedule=schedule).traces


@pytest.mark.parametrize("pp, schedule", [FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)])
def test_pipelines_beside_expert_parallelism(pp, schedule):
    check(toy_traces(pp, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("recompute", [(), ("layer", "dispatch")], ids=str)
def test_layers_that_dispatch_tokens(overlapped, recompute):
    check(by_threads(qwen, 2, 2, overlapped, recompute).traces)


def traced(rank: int, shape: tuple[int, int, int]) -> Trace:
    return as_process(rank, shape)[0].of_thread.trace


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (3, 1, 2)], ids=str)
def test_ranks_as_processes_with_sharded_parameters(shape):
    check(run_ranks(traced, math.prod(shape), shape, timeout=300, group_timeout=200, fresh=True))


# -- which steps send by the host


def several_steps(rank: Rank) -> None:
    pipe = Pipeline([nn.Linear(4, 4).to(rank.device)], process_group=rank.group("pp", (0, 1)), schedule="1f1b")

    def step(  # not mse_loss, whose backward refuses labels of another dtype in torch 2.11
        rows: int, num_chunks: int = 2, criterion: Callable = F.l1_loss, sync: bool = True,
        labels: torch.dtype = torch.float32,
    ) -> None:
        x = torch.ones(rows, 4).to(rank.device)
        pipe.step(x, num_chunks=num_chunks, criterion=criterion, labels=(x.to(labels),), sync=sync)

    step(4), step(4), step(6), step(6), step(4), step(4, num_chunks=4), step(4, sync=False)
    with torch.no_grad():
        step(4), step(4)
    step(8), step(8)
    step(8, labels=torch.float64), step(8, labels=torch.float64)
    with torch.autocast(rank.device.type, torch.bfloat16):
        step(8), step(8)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_first_step_of_a_kind_sends_by_the_host(device):
    """Shapes that run other kernels, dtypes, numbers of micro-batches and evaluations are other kinds of steps."""
    found = steps_by_host(several_steps, device)
    expected = [1, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0] if device == "cuda" else [0] * 15
    assert found == {0: expected, 1: expected}


def steps_by_host(steps: Callable[[Rank], None], device: str) -> dict[int, list[int]]:
    """Return, for each rank and step, whether its messages go by the host."""
    found: dict[int, list[int]] = {0: [], 1: []}
    messages = engine.P2PMessages

    def noted(groups: Group, *args: Any, by_host: bool, **kwargs: Any) -> P2PMessages:
        found[groups.of.number].append(int(by_host))
        return messages(groups, *args, by_host=by_host, **kwargs)

    with pretend_cuda() if device == "cuda" else nullcontext(), mock.patch.object(engine, "P2PMessages", noted):
        run_threads(steps, 2, device=device)
    return found


LENGTHS = [16 * (1 + 7 * i % 20) for i in range(20)]  # 16 to 320, unordered


def many_lengths(rank: Rank) -> None:
    pipe = Pipeline([nn.Linear(4, 4).to(rank.device)], process_group=rank.group("pp", (0, 1)), schedule="1f1b")
    for length in LENGTHS * 2:
        x = torch.ones(4, length, 4).to(rank.device)
        pipe.step(x, num_chunks=2, criterion=F.l1_loss, labels=(x,))


def test_a_run_with_many_lengths_sends_by_the_device_after_its_first_steps():
    """Lengths of one power of two run the same kernels: 20 lengths are of five kinds."""
    for by_host in steps_by_host(many_lengths, "cuda").values():
        assert sum(by_host[:20]) == 5 and by_host[20:] == [0] * 20


# -- that the model finds what is wrong


def on_the_device_from_the_first_step() -> AbstractContextManager:
    messages = engine.P2PMessages
    return mock.patch.object(engine, "P2PMessages", lambda *a, by_host, **kwargs: messages(*a, by_host=False, **kwargs))


def test_messages_on_the_device_from_the_first_step_wait_for_ever():
    """Receives are posted ahead, and kernels are loaded behind them, while the peer's host does the same."""
    traces = by_threads(toys, 2, 2, plant=on_the_device_from_the_first_step).traces
    assert len(run(traces).stuck) >= 4 and len(run(traces, loading=1).stuck) >= 4
    assert run(traces, loading=0).stuck == [] and different_orders(traces) == []


def another_order() -> AbstractContextManager:
    """Make rank 1 take the parts of a pair in another order than the other ranks."""
    walk = executor.walk

    def changed(tasks: Sequence[Task], turn: Callable[[int], None]) -> None:
        walk(tasks[::-1] if the_device().of_thread.trace.name == "rank 1" else tasks, turn)

    return mock.patch.object(executor, "walk", changed)


def test_another_order_on_one_rank():
    traces = by_threads(toys, 2, 2, plant=another_order).traces
    assert [told.partition(":")[0] for told in different_orders(traces)] == ["('ep of 0', 2)"]
    [told] = run(traces, loading=0).stuck
    assert "rank 0 Exchanged.__init__ < Exchange.forward < Exchange.backward" in told, told


def with_retries(trace: Trace, *, of_device: bool) -> Trace:
    """Make the host wait before each kernel after the first step: for the device, or for the stream."""
    changed = Trace(trace.name)
    for at, step in enumerate(trace.steps):
        if at >= trace.ends[0] and isinstance(step, Launch):
            changed.host_waits(changed.everything() if of_device else changed.event(step.stream))
        changed.add(step)
    return changed


def test_memory_that_is_freed_in_the_midst_of_a_later_step():
    """A retried allocation in a later step may deadlock: its `cudaFree` waits for the device.

    If memory grows in place (`expandable_segments`), torch waits for the stream that owns the memory: harmless at any
    time.
    """
    traces = toy_traces(*FAST)
    assert run([with_retries(trace, of_device=True) for trace in traces], loading=0).stuck
    assert not run([with_retries(trace, of_device=False) for trace in traces], loading=0).stuck
