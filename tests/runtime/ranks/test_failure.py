"""Failure on one rank: the end of the other ranks' waits, and the errors that they raise."""

import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import dualpipe.runtime.ranks.board as board_module
import dualpipe.runtime.ranks.failure as failure_module
from dualpipe.runtime.errors import PipelineError, RankLost, mark_names_ranks
from dualpipe.runtime.ranks.board import Board
from dualpipe.runtime.ranks.failure import Cause, FailureBoard, StepFailure, default_store, hang_up, watch
from dualpipe.runtime.recorder import Recorder
from ranks import run_ranks


def test_the_first_published_cause_is_that_of_all_ranks():
    store = dist.HashStore()
    board = FailureBoard(Board(lambda: store), "one")
    assert board.cause() is None
    assert board.publish(Cause("first")) == Cause("first")
    assert board.publish(Cause("second", is_loss=True)) == Cause("first") == board.cause()
    assert board.is_reachable()


class Gone:
    def __getattr__(self, name):
        raise RuntimeError("connection reset")


class Stopped:
    def __getattr__(self, name):
        return lambda *_: time.sleep(60)


@pytest.mark.parametrize("store", [Gone, Stopped])
def test_a_store_that_does_not_answer_is_asked_once_for_a_moment(store, monkeypatch):
    monkeypatch.setattr(board_module, "ANSWER", 0.5)
    board = FailureBoard(Board(store), "one")
    began = time.monotonic()
    assert board.publish(Cause("mine")) == Cause("mine")
    assert board.cause() is None and not board.is_any_waiting([0]) and not board.is_reachable()
    board.mark_waiting(0)
    assert time.monotonic() - began < 20


def test_a_watching_thread_hangs_up_and_ends_with_the_watched_failure(monkeypatch):
    store = dist.HashStore()
    ended = []

    class Group:
        def size(self):
            return 2

        def abort(self):
            ended.append("yes")

    group = Group()
    before = threading.active_count()
    watched = StepFailure(FailureBoard(Board(lambda: store), "one"), [group])
    watch(watched, FailureBoard(Board(lambda: store), "one"))
    FailureBoard(Board(lambda: store), "one").publish(Cause("elsewhere"))
    deadline = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(PipelineError, match=r"an earlier step failed .* It failed with: elsewhere"):
        watched.check()
    other = StepFailure(FailureBoard(Board(lambda: store), "two"), [group])
    watch(other, FailureBoard(Board(lambda: store), "two"))
    del other
    while threading.active_count() > before:
        assert time.monotonic() < deadline + 20
        time.sleep(0.01)


def test_a_failure_without_other_ranks_ends_nothing():
    failure = StepFailure(FailureBoard(Board(dist.HashStore), "one"), [])
    with pytest.raises(PipelineError, match=r"^rank 0: action: KeyError: 'x'$") as raised, \
            failure.ending_step(lambda: "action: "):
        raise KeyError("x")
    assert isinstance(raised.value.__cause__, KeyError)
    failure.check()
    with pytest.raises(KeyboardInterrupt), failure.ending_step(str):
        raise KeyboardInterrupt
    with pytest.raises(PipelineError, match=r"^ranks 0-1: they say it$"), failure.ending_step(str):
        raise mark_names_ranks(RuntimeError("ranks 0-1: they say it"))


WAITS = {
    "p2p": lambda rank, size: dist.recv(torch.empty(1), (rank + 1) % size),
    "all_to_all": lambda rank, size: dist.all_to_all_single(torch.empty(1000 * size), torch.empty(1000 * size)),
    "reduce_scatter": lambda rank, size: dist.reduce_scatter_tensor(torch.empty(5), torch.empty(5 * size)),
    "large send": lambda rank, size: dist.send(torch.empty(20_000_000), 1),
}


def hung_up(rank: int, size: int, wait: str) -> tuple[str, float]:
    """Hang up on rank 1 while the others wait; every rank that raises hangs up in turn."""
    began = time.monotonic()
    try:
        if rank != 1:
            WAITS[wait](rank, size)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        hang_up([dist.group.WORLD])
    return "", 0.0


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_in_an_ended_group_raises_at_once(wait, size):
    results = run_ranks(hung_up, size, size, wait, fresh=True, group_timeout=60)
    for rank, (text, seconds) in enumerate(results):
        if rank != 1:
            assert re.search("[Cc]losed|reset by peer", text) and seconds < 20, (rank, text, seconds)


def hung_up_in_the_middle_of_a_message(rank: int, source: int) -> float:
    """Hang up on rank 1 once a message has partly arrived; return the seconds that the other rank waits."""
    message = torch.zeros(5_000_000)
    failure_module._LINGER = 1.0  # however busy the machine is
    if rank == source:
        work = dist.isend(message.fill_(1.0), 1 - rank)
    else:
        work = dist.irecv(message, 1 - rank)
    began = time.monotonic()
    if rank == 1:
        while message[0].item() != 1.0:  # the sender does not wait: what it sends is on its way at once
            pass
        hang_up([dist.group.WORLD])
    with suppress(RuntimeError):
        work.wait()
    return time.monotonic() - began


@pytest.mark.parametrize("source", [0, 1])
def test_a_partly_received_message_is_not_cut_off(source):
    """gloo would never wake the wait for it."""
    seconds = run_ranks(hung_up_in_the_middle_of_a_message, 2, source, fresh=True, group_timeout=60)
    assert max(seconds) < 30, seconds


def lost(rank: int, size: int) -> tuple[str, bool, bool]:
    """Let ranks wait in a chain for the last one, which does not come; return their errors."""
    failure = StepFailure(FailureBoard(Board(partial(default_store, dist.group.WORLD)), "one"), [dist.group.WORLD])
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:
        store.wait([f"told {other}" for other in range(size - 1)])
        return "", False, False
    store.set(f"waits {rank}", "yes")
    store.wait([f"waits {other}" for other in range(size - 1)])  # so that the times below begin together
    waiting = Recorder.current().wait("receive", "a message", (rank + 1,))
    with pytest.raises(PipelineError) as raised, failure.ending_step(str), waiting:
        work = dist.irecv(torch.empty(1), rank + 1)
        work.wait(timedelta(seconds=1.0 + 0.2 * rank))  # the first to time out waits for a rank that is not the cause
    store.set(f"told {rank}", "yes")
    error = raised.value
    return str(error), error.is_loss, isinstance(error.__cause__, RankLost)


def test_the_missing_rank_is_named_though_other_ranks_time_out_first():
    *others, _ = run_ranks(lost, 3, 3, fresh=True, group_timeout=60)
    for text, is_loss, is_caused in others:
        assert "for a message from rank 2" in text and is_loss and is_caused, others
