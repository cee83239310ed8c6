"""Copies between devices on the pretend device: rows, the order of writes and reads, and planted faults."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from device_steps import LAYERS_WITH_EXPERTS, MICRO_BATCHES, STEPS, by_threads, qwen
from dualpipe.parallel.copy_engine.exchange import CopyEngineAllToAll
from dualpipe.parallel.copy_engine.peer_memory import SlotLayout
from dualpipe.parallel.copy_engine.symmetric_memory import QueuedWork, SymmetricMemory
from pretend_cuda import pretend_cuda
from pretend_symmetric import Handle, copy_engine, pretend_symmetric_memory
from threads import Rank, run_threads

# Rows of 16 bytes, of consecutive exchanges; with slots of 32 bytes some take several rounds.
COUNTS = (
    [[1, 2, 1], [2, 1, 2], [1, 1, 1]],
    [[0, 7, 0], [0, 0, 9], [5, 0, 2]],
    [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    [[3, 3, 3], [3, 3, 3], [3, 3, 3]],
)
THREE_RANKS = 4 * 32  # bytes of slots


def on_rank(rank: Rank, num_streams: int) -> list[bool]:
    """Return, per exchange in flight, whether it brings its rows; they alternate between `num_streams` streams."""
    all_to_all = copy_engine(rank, "ep", range(3), THREE_RANKS)
    compute = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(num_streams)]
    under_way = []
    for number, counts in enumerate(COUNTS):
        sent_rows = counts[rank.number]
        received_rows = [row[rank.number] for row in counts]
        stream = streams[number % num_streams]
        with torch.cuda.stream(stream):
            sent = torch.full((sum(sent_rows), 4), 10 * number + rank.number, dtype=torch.int32, device="cuda")
            received = torch.zeros(sum(received_rows), 4, dtype=torch.int32, device="cuda")
            under_way.append((all_to_all.start(received, sent, received_rows, sent_rows), received, received_rows))
    results = []
    for work, received, _ in under_way:
        work.wait()
        results.append(received + 0)
        received.record_stream(compute)
    torch.cuda.synchronize()
    return [rows.tolist() == [[10 * number + sender] * 4 for sender in range(3) for _ in range(received_rows[sender])]
            for number, (rows, (_, _, received_rows)) in enumerate(zip(results, under_way))]


def exchanged(num_streams: int, plant: Callable[[], AbstractContextManager] = nullcontext) -> tuple[bool, list[str]]:
    """Return whether all rows of exchanges between three ranks arrived, and the faults."""
    with pretend_cuda() as device, pretend_symmetric_memory(), plant():
        arrived = run_threads(on_rank, 3, num_streams, device="cuda")
        return all(map(all, arrived)), device.report({})


@pytest.mark.parametrize("num_streams", [1, 2])
def test_rows_arrive_in_order(num_streams):
    assert exchanged(num_streams) == (True, [])


@contextmanager
def steps_by_copies() -> Iterator[None]:
    """Make `by_threads` send rows by copies, into slots of 128 bytes."""
    def all_to_all(rank: Rank, name: str, members: Sequence[int]) -> CopyEngineAllToAll:
        return copy_engine(rank, name, members, 256 * (len(members) - 1))

    with pretend_symmetric_memory(), mock.patch.object(Rank, "all_to_all", all_to_all):
        yield


HOST_WAITS = "Event.synchronize in dualpipe/parallel/experts/one_hop.py: PendingDispatch.start_rows"


@pytest.mark.slow
def test_steps_of_a_pipeline_wait_for_the_counts_alone():
    """Each rank waits once for each layer, micro-batch and step, as with the other all-to-all."""
    waits = 2 * LAYERS_WITH_EXPERTS * MICRO_BATCHES * STEPS
    assert by_threads(qwen, 1, 2, plant=steps_by_copies).report({HOST_WAITS: waits}) == []


# -- planted faults


def one_slot(layout: SlotLayout, memory: Tensor, owner: int, source: int, number: int, real=SlotLayout.slot) -> Tensor:
    return real(layout, memory, owner, source, 0)


def not_after_the_last(memory: SymmetricMemory, exchange: Callable[[], None], real=SymmetricMemory.run) -> dist.Work:
    memory._last = None
    return real(memory, exchange)


PLANTED = {  # name: (number of streams, start of the fault, what is replaced, by what)
    "rows are read before their signal": (1, "race: read by copy_", Handle, "order", lambda *_: None),
    "a slot is written before its rows are read": (1, "race: write by copy_", SlotLayout, "slot", one_slot),
    "an exchange does not wait for the last one on another stream": (
        2, "race: ", SymmetricMemory, "run", not_after_the_last),
    "rows are used before they arrive": (1, "race: read by add", QueuedWork, "wait", lambda *_: True),
}


@pytest.mark.parametrize("num_streams, fault, owner, name, planted", PLANTED.values(), ids=PLANTED)
def test_planted_faults_are_found(num_streams, fault, owner, name, planted):
    _, found = exchanged(num_streams, lambda: mock.patch.object(owner, name, planted))
    assert any(text.startswith(fault) and "exchange.py" in text for text in found)


# -- torch's own


def test_the_stand_in_has_the_arguments_of_torch():
    """The stand-in's handles have the arguments in the docstrings of the installed torch; no GPU is needed."""
    for name in ("barrier", "put_signal", "wait_signal"):
        text = getattr(_SymmetricMemory, name).__doc__
        names = [argument for argument in inspect.signature(getattr(Handle, name)).parameters if argument != "self"]
        assert all(f"{argument}: " in text for argument in names), text
