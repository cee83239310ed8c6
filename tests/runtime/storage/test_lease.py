"""One job at a time saves to a URL, though a store has no locks."""

import json
import multiprocessing
import time

import pytest

from dualpipe.runtime.storage import lease, remote
from dualpipe.runtime.storage.lease import LOCK, Lease, LeaseLost
from dualpipe.runtime.storage.location import as_location
from object_store import objects_in, set_faults


@pytest.fixture
def folder(tmp_path, monkeypatch):
    set_faults()
    monkeypatch.setattr(lease, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    return as_location(f"object://{tmp_path}")


def test_one_at_a_time(folder, tmp_path):
    first = Lease(folder, 0.0)
    with pytest.raises(ValueError, match=r"another job saves to object://.*; end it, or give every job its own"):
        Lease(folder, 0.0)
    first.check()
    first.release()
    start = time.monotonic()
    second = Lease(folder, 0.0)
    assert time.monotonic() - start < 0.5  # nobody is watched
    second.release()
    assert len(objects_in(tmp_path)) == 2  # the lock and the last heartbeat: nothing piles up


def test_one_that_ends_meanwhile_is_waited_for(folder):
    import threading

    first = Lease(folder, 0.0)
    threading.Timer(0.5, first.release).start()
    second = Lease(folder, 30.0)
    second.check()
    second.release()


def test_a_silent_holder_is_taken_for_dead_and_learns_of_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Lease, "_beat", lambda self: None)
    first = Lease(folder, 0.0)
    start = time.monotonic()
    second = Lease(folder, 0.0)
    assert time.monotonic() - start > 1.0  # it was watched
    second.check()
    with pytest.raises(LeaseLost, match="another job saves to"):
        first.check()
    first.release()  # takes nothing from the second
    second.check()
    second.release()
    assert len(objects_in(tmp_path)) == 2


def test_a_release_whose_answer_is_lost_leaves_the_lease_of_the_next_job(folder, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(Lease, "_beat", lambda self: None)
    first = Lease(folder, 0.0)
    others = []

    def take_over(kind, key):
        """Lose the answer to the request that releases the lease, after another job has taken the lease."""
        if others or kind not in ("delete", "complete"):
            return False
        set_faults()
        others.append(Lease(folder, 0.0))
        return True

    set_faults(lost=take_over)
    first.release()
    (second,) = others
    second.check()
    second.release()


def _hold(folder, pipe):
    Lease(folder, 0.0)
    pipe.send("held")
    time.sleep(60)


def test_a_killed_holder_on_this_machine_is_not_waited_for(folder, tmp_path):
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(folder, theirs))
    process.start()
    assert ours.recv() == "held"
    process.kill()
    process.join()
    assert json.loads((tmp_path / LOCK).read_text())["process"] == process.pid
    start = time.monotonic()
    second = Lease(folder, 0.0)
    assert time.monotonic() - start < 0.5
    second.release()
    assert len(objects_in(tmp_path)) == 2


def test_half_a_lock_is_watched(folder, tmp_path):
    (tmp_path / LOCK).write_text('{"id": "ab')
    lease = Lease(folder, 0.0)
    lease.check()
    lease.release()
