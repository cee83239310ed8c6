"""A connection to the job's store whose calls may hang: their order, silence, and the end of the store."""

import socket
import threading
import time

import pytest
import torch.distributed as dist

import dualpipe.runtime.ranks.board as board_module
from dualpipe.runtime.ranks.board import Board, request_interval


def test_calls_are_made_in_their_order_and_the_thread_ends_when_there_are_none(monkeypatch):
    monkeypatch.setattr(board_module, "_IDLE", 0.1)
    before = threading.active_count()
    store = dist.HashStore()
    board = Board(lambda: store)
    for number in range(20):
        board.post(lambda store, number=number: store.set("last", str(number)))
    assert board.ask(lambda store: store.get("last"), b"", 20.0) == b"19"
    deadline = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert board.ask(lambda store: store.get("last"), b"", 20.0) == b"19", "a new thread"


def test_a_silent_board_is_not_waited_for_until_it_answers():
    board = Board(dist.HashStore)
    released = threading.Event()
    assert board.ask(lambda store: released.wait(60), default=False, seconds=0.1) is False and board.is_silent
    began = time.monotonic()
    assert board.ask(lambda store: 1, 0, 60.0) == 0 and time.monotonic() - began < 20
    done = board.post(lambda store: 2)
    released.set()
    assert done.result(20) == 2 and not board.is_silent and not board.gone
    assert board.ask(lambda store: 3, 0, 20.0) == 3


def test_a_store_whose_connection_has_ended_is_gone_and_not_called():
    here, there = socket.socketpair()
    board = Board(dist.HashStore, here)
    assert board.ask(lambda store: 1, 0, 20.0) == 1
    there.close()
    assert board.ask(lambda store: 2, 0, 20.0) == 0 and board.gone and board.is_silent
    board.post(lambda store: 1 / 0)
    here.close()


def test_the_board_of_one_rank_never_answers():
    board = Board(None)
    assert board.is_silent and board.ask(lambda store: 1, 0) == 0
    board.post(lambda store: 1 / 0)


@pytest.mark.parametrize("num_ranks", [10_000, 100_000])
def test_all_ranks_together_ask_as_often_in_a_job_of_any_size(num_ranks):
    assert request_interval(1.0, 2) == request_interval(1.0, 1000) == 1.0
    assert num_ranks / request_interval(1.0, num_ranks) == num_ranks / request_interval(0.25, num_ranks) == 5000
