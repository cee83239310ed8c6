"""Copies between devices on the pretend device: rows, the order of writes and reads, and faults that are planted."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from device_steps import by_threads, qwen
from dualpipe.parallel.copy_engine.peer_memory import SlotLayout
from dualpipe.parallel.copy_engine.symmetric_memory import SymmetricMemory
from dualpipe.runtime import device as runtime_device
from pretend_cuda import pretend_cuda
from pretend_symmetric import Handle, copy_engine, pretend_symmetric_memory
from threads import Rank, run_threads

# Rows of 16 bytes, of exchanges one after the other; by slots of 32 bytes some take several rounds.
COUNTS = (
    [[1, 2, 1], [2, 1, 2], [1, 1, 1]],
    [[0, 7, 0], [0, 0, 9], [5, 0, 2]],
    [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    [[3, 3, 3], [3, 3, 3], [3, 3, 3]],
)
THREE_RANKS = 4 * 32  # bytes of slots


def on_rank(rank: Rank, num_streams: int) -> list[bool]:
    """Whether each exchange brings the rows; the exchanges take turns on this many streams."""
    all_to_all = copy_engine(rank, "ep", range(3), THREE_RANKS)
    compute = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(num_streams)]
    results = []
    for number, counts in enumerate(COUNTS):
        sent_rows = counts[rank.number]
        received_rows = [row[rank.number] for row in counts]
        sent = torch.full((sum(sent_rows), 4), 10 * number + rank.number, dtype=torch.int32, device="cuda")
        stream = streams[number % num_streams]
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            received = torch.zeros(sum(received_rows), 4, dtype=torch.int32, device="cuda")
            work = all_to_all.start(received, sent, received_rows, sent_rows)
        work.wait()
        sent.record_stream(stream)
        received.record_stream(compute)
        senders = torch.arange(3, device="cuda").repeat_interleave(
            torch.tensor(received_rows, device="cuda"), output_size=sum(received_rows))
        results.append((received - 10 * number, senders))
    torch.cuda.synchronize()
    return [rows.tolist() == [[sender] * 4 for sender in senders.tolist()] for rows, senders in results]


def exchanged(num_streams: int, plant: Callable[[], AbstractContextManager] = nullcontext) -> list[str]:
    """Faults of exchanges between three ranks."""
    with pretend_cuda() as device, pretend_symmetric_memory(), plant():
        assert run_threads(on_rank, 3, num_streams, device="cuda") == [[True] * len(COUNTS)] * 3
        return device.report({})


@pytest.mark.parametrize("num_streams", [1, 2])
def test_rows_arrive_in_order(num_streams):
    assert exchanged(num_streams) == []


@contextmanager
def instead(owner: object, name: str, replacement: object) -> Iterator[None]:
    with mock.patch.object(owner, name, replacement):
        yield


def one_slot(layout: SlotLayout, memory: Tensor, owner: int, source: int, number: int, real=SlotLayout.slot) -> Tensor:
    return real(layout, memory, owner, source, 0)


def without_last(event: object, on: torch.device, real=runtime_device.wait) -> None:
    """Wait for no event that an exchange has recorded, except in `wait` of its work."""


def before_writes(memory: SymmetricMemory, exchange: Callable[[], None], real=SymmetricMemory.run):
    memory._last = None
    return real(memory, exchange)


PLANTED = {  # name: (number of streams, how to plant it)
    "a rank does not wait for its peers' signals": (
        1, lambda: instead(Handle, "order", lambda *_: None)),
    "a slot is written again before it is read": (1, lambda: instead(SlotLayout, "slot", one_slot)),
    "an exchange on another stream does not wait for the last one": (
        2, lambda: instead(SymmetricMemory, "run", before_writes)),
}


@pytest.mark.parametrize("num_streams, plant", PLANTED.values(), ids=PLANTED)
def test_finds_planted_faults(num_streams, plant):
    assert any(fault.startswith("race: copy_") for fault in exchanged(num_streams, plant))
