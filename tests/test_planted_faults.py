"""The pretend device finds faults: its documented example, and faults planted into steps of the library.

Faults are planted where a rewrite of the library does not move them: in `dualpipe.runtime.device`, which all streams,
events and pinned memory go through, in the stand-ins for the transports, in FSDP2, and in a stage of the user's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from traceback import walk_stack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import threads
from device_book import Event, Timeline
from device_steps import Toy, as_process, as_training, by_threads, qwen, toys, write_run
from dualpipe.quantized import QuantizedTensor
from pretend_cuda import pretend_cuda
from pretend_nccl import Work
from ranks import run_ranks

# -- the checker alone


def kinds(faults: list[str]) -> list[str]:
    return sorted(fault.partition(":")[0] for fault in faults)


def test_the_example():
    with pretend_cuda() as pretended:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        assert main.clock == {main.number: 1}
        with torch.cuda.stream(side):
            y = x + 1
            assert side.clock == {side.number: 1}
            assert kinds(pretended.report({})) == ["race"]
            side.wait_stream(main)
            assert side.clock == {side.number: 1, main.number: 1}
            z = x + 1
            assert side.clock == {side.number: 2, main.number: 1}
        assert kinds(pretended.report({})) == ["race"]
        del x
        assert kinds(pretended.report({})) == ["free", "race"]
        assert y.tolist() == z.tolist() == [1, 1, 1, 1]


def test_bytes_and_reads_beside_each_other_are_no_race():
    with pretend_cuda() as pretended:
        side = torch.cuda.Stream()
        x = torch.zeros(4, 4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        x[:2] += 1
        assert x.sum().device.type == "cuda"
        with torch.cuda.stream(side):
            assert x[2:].sum().is_cuda
            assert pretended.report({}) == []
            x[1:].sum()  # a row that the other stream writes
        assert kinds(pretended.report({})) == ["race"]
        x.record_stream(side)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_given_back_while_another_stream_uses_it(strict, recorded):
    with pretend_cuda(strict) as pretended:
        side = torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if recorded:
            x.record_stream(side)
        del x
        assert kinds(pretended.report({})) == ["free"] * (strict and not recorded)
        torch.zeros(4, device="cuda")  # may get the memory
        assert kinds(pretended.report({})) == ([] if recorded else ["free"] if strict else ["reuse"])
        torch.cuda.current_stream().wait_stream(side)
        torch.zeros(4, device="cuda")
        assert len(pretended.report({})) == (not recorded)


def test_a_quantized_tensor_is_its_bytes():
    with pretend_cuda() as pretended:
        side, weight = torch.cuda.Stream(), QuantizedTensor.quantize(torch.randn(64, 64), "mxfp8").to("cuda")
        side.wait_stream(torch.cuda.current_stream())
        weight.quantize_(torch.zeros(64, 64, device="cuda"))
        with torch.cuda.stream(side):
            assert weight.clone().is_cuda
        assert kinds(pretended.report({})) == ["race"]
        torch.cuda.current_stream().wait_stream(side)


def test_memory_belongs_to_the_stream_it_is_made_on():
    """New memory may still be in use on its stream; another stream that writes to it must come after that use."""
    with pretend_cuda() as pretended:
        side = torch.cuda.Stream()
        torch.zeros(4, device="cuda")
        x = torch.empty(4, device="cuda")
        with torch.cuda.stream(side):
            x.fill_(1)
        assert kinds(pretended.report({})) == ["reuse"]
        torch.cuda.current_stream().wait_stream(side)


def test_waits_of_the_host_are_as_listed():
    where = "tests/test_planted_faults.py: test_waits_of_the_host_are_as_listed"
    with pretend_cuda() as pretended:
        x = torch.arange(4, device="cuda")
        x.tolist()
        assert pretended.report({}) == []  # not watched
        with pretended.watched():
            assert x[x > 1].cpu().sum().item() == 5  # a mask, and a copy; then the sum is on the host
        assert pretended.report({f"index in {where}": 1, f"copy in {where}": 1}) == []
        assert kinds(pretended.report({f"index in {where}": 2})) == ["sync", "sync"]


# -- faults in steps


@contextmanager
def instead(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace a function or method by `make(real)`."""
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def caller(*names: str, depth: int = 1) -> bool:
    """Return True if one of the `depth` innermost callers of the planted function has one of these qualified names."""
    frames = islice(walk_stack(sys._getframe(2)), depth)
    return any(frame.f_code.co_qualname in names for frame, _ in frames)


def without_waits(*callers: str, depth: int = 1) -> AbstractContextManager:
    """Drop the waits of streams that these functions ask for."""
    return instead(Timeline, "wait_event", lambda real: lambda *a: None if caller(*callers, depth=depth) else real(*a))


def nothing(*_: Any) -> None:
    pass


def earlier(record: Callable) -> Callable:
    """Return the previous call's event instead of the current one."""
    last: dict[int, Event] = {}

    def stale(stream: Timeline) -> Event:
        before, last[stream.number] = last.get(stream.number), record(stream)
        return before if before is not None and caller("record") else last[stream.number]

    return stale


def elsewhere(record: Callable) -> Callable:
    return lambda stream: record(torch.cuda.default_stream() if caller("record") else stream)


def and_synchronize(record: Callable) -> Callable:
    def call(stream: Timeline) -> Event:
        event = record(stream)
        if caller("record"):
            torch.cuda.synchronize()
        return event

    return call


def not_for_what_is_sent(wait: Callable) -> Callable:
    def call(stream: Timeline, event: Event) -> None:
        if not (caller("wait") and caller("use_stream", depth=2)):
            wait(stream, event)

    return call


def not_for_what_arrives(wait: Callable) -> Callable:
    def call(stream: Timeline, event: Event) -> None:
        if not caller("wait") or caller("use_stream", depth=2):
            wait(stream, event)

    return call


DEVICE = {  # name: (kind of the fault, how to plant it), in torch calls of dualpipe/runtime/device.py
    "no stream waits": ("race", lambda: without_waits("wait")),
    "rows are sent before they are made": ("race", lambda: instead(Timeline, "wait_event", not_for_what_is_sent)),
    "rows are read before they arrive": ("race", lambda: instead(Timeline, "wait_event", not_for_what_arrives)),
    "rows that arrived are given back too early": ("free", lambda: instead(Tensor, "record_stream", lambda _: nothing)),
    "events are recorded too early": ("race", lambda: instead(Timeline, "record_event", earlier)),
    "events are recorded on another stream": ("race", lambda: instead(Timeline, "record_event", elsewhere)),
    "the host reads numbers before they are copied": ("race", lambda: instead(Event, "synchronize", lambda _: nothing)),
    "numbers are copied to pageable memory": (
        "sync", lambda: instead(torch, "empty", lambda real: lambda *a, pin_memory=False, **k: real(*a, **k))),
    "the host waits for a copy": (
        "sync", lambda: instead(Tensor, "copy_", lambda real: lambda a, b, non_blocking=False: real(a, b))),
    "the host waits whenever an event is recorded": (
        "sync", lambda: instead(Timeline, "record_event", and_synchronize)),
}
ROW_COUNTS = "Event.synchronize in dualpipe/parallel/experts/one_hop.py: PendingDispatch.start_rows"
COUNTS = {ROW_COUNTS: 48}


@pytest.mark.slow
@pytest.mark.parametrize("kind, plant", DEVICE.values(), ids=DEVICE)
def test_in_the_streams_of_expert_parallelism(kind, plant):
    assert kind in kinds(by_threads(qwen, 1, 2, plant=plant).report(COUNTS))


@pytest.mark.slow
@pytest.mark.parametrize("kind, plant", DEVICE.values(), ids=DEVICE)
def test_in_the_streams_of_two_hops(kind, plant):
    assert kind in kinds(by_threads(qwen, 1, 4, plant=plant, per_node=2).report({ROW_COUNTS: 96}))


def unwaited(name: str) -> AbstractContextManager:
    """Drop the waits of streams for transfers whose name contains `name`."""

    def make(real: Callable) -> Callable:
        def wait(transfer: threads.Transfer) -> bool:
            if name not in transfer._what:
                return real(transfer)
            with mock.patch.object(torch.cuda.current_stream(), "wait_event", nothing):
                return real(transfer)

        return wait

    return instead(threads.Transfer, "wait", make)


class Unwaited:
    def wait(self) -> bool:
        return True


def sends_unwaited(post: Callable) -> Callable:
    def call(world, kind, key, side, role):
        transfer = post(world, kind, key, side, role)
        return Unwaited() if (kind, role) == ("links", "send") and side.tensor.is_cuda else transfer

    return call


def copies_sent(kind: str) -> Callable:
    def change(post: Callable) -> Callable:
        def call(world, of, key, side, role):
            copied = of == kind and role == "send" and side.tensor.is_cuda
            return post(world, of, key, threads.Side.of(side.tensor.clone()) if copied else side, role)

        return call

    return change


TRANSFERS = {
    "activations are read before they arrive": ("race", lambda: unwaited(": F")),
    "gradients are read before they arrive": ("race", lambda: unwaited(": B")),
    "what is sent is given back before it is sent": ("free", lambda: instead(threads.World, "post", sends_unwaited)),
    "a copy is sent that nobody keeps": ("free", lambda: instead(threads.World, "post", copies_sent("links"))),
    "rows are read while they are sent": ("race", lambda: unwaited("ep of ")),
    "rows are copied, and nobody keeps the copy": (
        "free", lambda: instead(threads.World, "post", copies_sent("all_to_all"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, plant", TRANSFERS.values(), ids=TRANSFERS)
def test_in_messages(kind, plant):
    assert kind in kinds(by_threads(toys, 2, 2, plant=plant).report({}))


# -- of ranks as processes


def forgotten(name: str) -> AbstractContextManager:
    """Drop the wait of the stream that waits for this operation of a process group."""

    def make(real: Callable) -> Callable:
        def call(*args: Any) -> Any:
            work = real(*args)
            if isinstance(work, Work):
                work._done = Event()
            return work

        return call

    return instead(ProcessGroup, name, make)


PROCESSES = {
    "messages are read before they arrive": ((2, 1, 1), "race", lambda: forgotten("recv")),
    "messages are sent before they are made, received into memory in use": (
        (2, 1, 1), "race", lambda: without_waits("Timeline.wait_stream")),
    "memory that is in use is received into": ((2, 1, 1), "reuse", lambda: without_waits("Timeline.wait_stream")),
    "rows are read before they arrive": ((1, 1, 2), "race", lambda: forgotten("all_to_all_single")),
    "parameters are read before they are gathered": ((1, 2, 1), "race", lambda: forgotten("all_gather_single")),
    "parameters are gathered before they are updated": (
        (1, 2, 1), "race", lambda: without_waits("Timeline.wait_stream")),
    "gradients are reduced before they are computed": (
        (1, 2, 1), "race", lambda: without_waits("foreach_reduce", depth=2)),
    "gradients are used before they are reduced": (
        (1, 2, 1), "race", lambda: without_waits(
            "FSDPState._root_post_backward_final_callback", "FSDPParamGroup.finalize_backward")),
}


def planted_process(rank: int, name: str) -> list[str]:
    shape, _, plant = PROCESSES[name]
    return as_process(rank, shape, plant=plant)[0].report({})


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_in_processes(name):
    shape, kind, _ = PROCESSES[name]
    found = run_ranks(planted_process, math.prod(shape), name, timeout=150, group_timeout=100, fresh=True)
    assert any(kind in kinds(faults) for faults in found), found


# -- of training


def reading(step: Callable) -> Callable:
    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        assert optimizer.param_groups[0]["params"][0].sum().item() is not None
        return step(optimizer, *args, **kwargs)

    return call


def not_waited_for(*callers: str) -> AbstractContextManager:
    """Drop the host's waits for events in these functions."""
    return instead(Event, "synchronize", lambda real: lambda event: None if caller(*callers) else real(event))


TRAINING = {  # name: (how the fault's text starts, how to plant it)
    "a batch is read before it is copied": ("race", lambda: without_waits("_Uploader.finish", depth=2)),
    "a batch is given back before it is read": ("free", lambda: instead(Tensor, "record_stream", lambda _: nothing)),
    "a batch is written over the one that is copied": ("race", lambda: not_waited_for("_Uploader.start")),
    "numbers are read before they are copied": ("race", lambda: not_waited_for("Trainer._read")),
    "numbers are copied to pageable memory": (
        "sync: pageable copy in dualpipe/train/trainer.py: Trainer._step",
        lambda: instead(torch, "empty", lambda real: lambda *a, pin_memory=False, **k: real(*a, **k))),
    "a checkpoint is written before it is copied": (  # as bytes, not by operators: a wait that is listed is not there
        "sync: synchronize in dualpipe/checkpoint/", lambda: instead(torch.cuda, "synchronize", lambda _: nothing)),
    "the optimizer reads a parameter": (
        "sync: _local_scalar_dense in tests/test_planted_faults.py: reading",
        lambda: instead(torch.optim.AdamW, "step", reading)),
}
LISTED = {
    "Event.synchronize in dualpipe/train/trainer.py: Trainer._read": 2,
    "_local_scalar_dense in dualpipe/train/evaluate.py: evaluate": 1,
    "tolist in dualpipe/checkpoint/state.py: find_non_finite": 1,
    "synchronize in dualpipe/checkpoint/writer.py: HostMemory.fill": 1,
}


def planted_training(rank: int, folder: str, name: str) -> list[str]:
    # Several batches to evaluate: those of training are kept until their steps are read.
    short = "--train.num_chunks", "1", "--train.steps", "2", "--train.eval_batches", "6"
    return as_training(rank, folder, *short, plant=TRAINING[name][1]).report(LISTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_in_training(name, tmp_path):
    write_run(tmp_path)
    [faults] = run_ranks(planted_training, 1, str(tmp_path), name, fresh=True)
    assert any(fault.startswith(TRAINING[name][0]) for fault in faults)


# -- of a user's stage


def on_another_stream(x: Tensor, *, before: bool = True, after: bool = True, keep: bool = True) -> Tensor:
    """Use another stream as a stage may do, if it waits before and after and keeps its intermediate result."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    made = x.detach() * 2
    if before:
        side.wait_stream(current)
    with torch.cuda.stream(side):
        result = made * 0
    if keep:
        made.record_stream(side)
    del made
    if after:
        current.wait_stream(side)
    result.record_stream(current)
    return x + result


def overwritten(x: Tensor) -> Tensor:
    pinned = torch.zeros(x.shape, pin_memory=True)
    copied = pinned.to(x.device, non_blocking=True)
    pinned.fill_(1)
    return x + copied


def read_too_early(x: Tensor) -> Tensor:
    pinned = torch.empty(x.shape, pin_memory=True)
    pinned.copy_(x.detach(), non_blocking=True)
    return x + sum(pinned.flatten().tolist()) * 0


STAGES = {
    "nothing": (None, lambda x: x),
    "another stream": (None, on_another_stream),
    "another stream that waits for nothing": ("race", partial(on_another_stream, before=False)),
    "another stream that nothing waits for": ("race", partial(on_another_stream, after=False)),
    "another stream, and memory that is not kept": ("free", partial(on_another_stream, keep=False)),
    "pinned memory is overwritten while it is copied": ("race", overwritten),
    "pinned memory is read while it is copied": ("race", read_too_early),
    "a number is read": ("sync", lambda x: x * float(x.detach().sum().item() * 0 + 1)),
    "a list is read": ("sync", lambda x: x + sum(x.detach().flatten().tolist()) * 0),
    "a condition is read": ("sync", lambda x: x + 1 if (x.detach() > 1e9).any() else x),
    "rows are chosen by a mask": ("sync", lambda x: x + x.detach()[x.detach() > 0].sum() * 0),
    "indices are searched for": ("sync", lambda x: x + len(x.detach().nonzero()) * 0),
    "a tensor is made of values": ("sync", lambda x: x * torch.tensor([1.0], device=x.device)),
    "a tensor comes from pageable memory": ("sync", lambda x: x + torch.zeros(x.shape).to(x.device, non_blocking=True)),
    "a tensor goes to the host": ("sync", lambda x: x + float(x.detach().cpu().sum()) * 0),
    "the stream is waited for": ("sync", lambda x: (torch.cuda.current_stream().synchronize(), x)[1]),
    "the device is waited for": ("sync", lambda x: (torch.cuda.synchronize(), x)[1]),
    "a tensor is on the host": ("device", lambda x: x + torch.zeros(x.shape)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, besides", STAGES.values(), ids=STAGES)
def test_in_a_stage(kind, besides):
    def plant() -> AbstractContextManager:
        return mock.patch.object(Toy, "besides", staticmethod(besides))

    found = kinds(by_threads(toys, 1, 2, plant=plant).report({}))
    assert kind in found if kind else not found
