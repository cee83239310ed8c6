"""Jobs that hang end by themselves in time, and the rank at fault is named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from dualpipe import DualPipeV
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import KIND, Recorder
from dualpipe.train.launch import watchdog as watchdog_module
from dualpipe.train.launch.diagnose import FOLDER
from dualpipe.train.launch.watchdog import PeerStore, Watchdog
from run_files import MODEL, write_files
from toys import make_stages

TIMEOUT, ALLOWANCE = 3.0, 5.0  # seconds: parallel.timeout, and the time from then until all processes have ended
LAYOUTS = {"pp2": (2, 1, 1), "pp4": (4, 1, 1), "pp2 x dp2": (2, 2, 1), "pp2 x ep2": (2, 1, 2)}
SLEEPS = """
import os, time
from dualpipe.nn.deferral import WeightGradStore
take, calls = WeightGradStore.take, []
def sleeping(self, slot):
    calls.append(slot)
    if os.environ.get("RANK") == "1" and len(calls) == 12:
        time.sleep(60)
    return take(self, slot)
WeightGradStore.take = sleeping
"""
# Locks a mutex twice, which never ends. A sleep in C would end with the first signal, and release the lock.
HOLDS_THE_LOCK = SLEEPS.replace("time.sleep(60)", """import ctypes
        mutex = ctypes.create_string_buffer(256)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)""")
DOES_NOT_MEET = """
import os, time
from dualpipe.train.launch import join
settings = join.run_settings
def sleeping(*arguments):
    time.sleep(60 * (os.environ.get("RANK") == "1"))
    return settings(*arguments)
join.run_settings = sleeping
"""
DIFFERS = """
import os, torch, torch.distributed as dist
from dualpipe import Pipeline
from dualpipe.runtime.recorder import Recorder
clip, calls = Pipeline.clip_grad_norm_, []
def once_more(self, *args):
    calls.append(args)
    recorder = Recorder.current()
    if os.environ.get("RANK") == "1" and len(calls) == 3:
        with recorder.collective("user", "one more", recorder.members(dist.group.WORLD)):
            dist.all_reduce(torch.zeros(5))
    return clip(self, *args)
Pipeline.clip_grad_norm_ = once_more
"""


@pytest.fixture
def start(start_dualpipe, tmp_path):
    """Start a run of many steps with a short timeout, and wait until it has done some."""
    write_files(tmp_path, MODEL | {"num_hidden_layers": 6})

    def start(layout=(2, 1, 1), *arguments, steps=3, before="", timeout=TIMEOUT):
        pp, dp, ep = layout
        process = start_dualpipe(
            tmp_path, "train", "run.toml", "--parallel.pp", pp, "--parallel.dp", dp, "--parallel.ep", ep,
            "--parallel.timeout", timeout, "--train.steps", 100_000, "--train.eval_interval", 0,
            "--train.num_chunks", 4, *arguments, before=before,
        )
        metrics, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 200
        while steps and (not metrics.exists() or len(metrics.read_text().splitlines()) < steps):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        return process, ranks_of(process.pid)

    return start


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the ranks, by rank: the kernel lists them in the order of forks. Numbers wrap around."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return list(map(int, children))


def over(process) -> tuple[float, str]:
    """Return the seconds until all processes have ended, and their output."""
    start = time.monotonic()
    _, err = process.communicate(TIMEOUT + ALLOWANCE + 30)
    return time.monotonic() - start, err


def cases():
    for name, layout in LAYOUTS.items():
        for rank in range(layout[0] * layout[1] * layout[2]):
            fast = (name, rank) == ("pp2", 1)
            yield pytest.param(layout, rank, id=f"{name}, rank {rank}", marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("layout", "rank"), list(cases()))
def test_a_stopped_rank_is_named_and_all_is_over_in_time(start, layout, rank):
    process, ranks = start(layout)
    os.kill(ranks[rank], signal.SIGSTOP)
    seconds, err = over(process)
    assert process.returncode == 1 and seconds < TIMEOUT + ALLOWANCE, (seconds, err)
    assert f"\nerror: rank {rank} (" in f"\n{err}" and "is stopped (SIGSTOP)" in err and "Traceback" not in err
    assert not any(Path(f"/proc/{each}").exists() for each in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout, names, locks", [
    ((1, 2, 1), ("rank 0 (dp 0)", "rank 1 (dp 1)"), False),
    *(pytest.param((2, 2, 1), ("rank 0 (pp 0, dp 0)", "rank 1 (pp 0, dp 1)"), locks, marks=pytest.mark.slow)
      for locks in (False, True)),
])
def test_a_rank_that_does_not_come_back_from_user_code(start, tmp_path, dualpipe, layout, names, locks):
    """The rank is named from the states of all, with its stack; or without it, if it blocks its watchdog thread."""
    process, _ = start(layout, steps=0, before=HOLDS_THE_LOCK if locks else SLEEPS)
    _, err = over(process)
    error = next(line for line in err.splitlines() if line.startswith("error: "))
    # Under load some ranks are still between two entries when the first one gives up.
    assert process.returncode == 1, err
    assert re.match(rf"error: (everything waits|ranks? [\d, -]+ waits?) for {re.escape(names[1])}: it ", error), err
    assert ("holds Python's lock" if locks else "has been in W(stage 0, micro-batch ") in error, err
    assert "in sleeping" in err and "Traceback" not in err
    again = dualpipe(tmp_path, "why", "out")
    assert f"waits for {names[1]}: it " in again.stdout and f"{names[0]}, process" in again.stdout


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_meet_the_others(start):
    process, _ = start((2, 2, 1), "--watchdog.timeout", 1, steps=0, before=DOES_NOT_MEET, timeout=6)
    _, err = over(process)
    assert process.returncode == 1, err
    said = "watchdog: no progress for 1 s: everything waits for rank 1: it has been in start (rendezvous)"
    assert said in err
    assert "wait for rank 1 in meet number 1 of ranks 0-3 (the settings of all ranks)" in err and "in sleeping" in err
    assert "error: rank 0 waited 6 s for rank 1 of 4" in err


@pytest.mark.slow
def test_a_rank_that_runs_another_program(start):
    process, _ = start((2, 2, 1), steps=0, before=DIFFERS)
    _, err = over(process)
    assert process.returncode == 1 and "rank 1 (pp 0, dp 1)" in err and "user number 1 of ranks 0-3 (one more)" in err
    assert "the programs of the ranks differ" in err


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_without_a_launcher_the_first_to_know_says_it_and_all_end(start_dualpipe, tmp_path, free_port, stops):
    """Ranks learn of a lost one from the store alone, as with torchrun or SLURM."""
    write_files(tmp_path)
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port}"}
    before = SLEEPS.replace("time.sleep(60)", "os.kill(os.getpid(), 19)") if stops else SLEEPS
    ranks = [
        start_dualpipe(
            tmp_path, "train", "run.toml", "--parallel.pp", 2, "--parallel.dp", 2, "--train.steps", 100_000,
            "--parallel.timeout", TIMEOUT, before=before, environment={**place, "RANK": f"{rank}"},
        )
        for rank in range(4)
    ]
    alive = [rank for rank in range(4) if rank != 1 or not stops]
    said = [ranks[rank].communicate(250)[1] for rank in alive]
    ranks[1].kill()
    assert [ranks[rank].returncode for rank in alive] == [1] * len(alive), said
    cause = f"error: everything waits for rank 1 (pp 0, dp 1): it {'is stopped' if stops else 'has been in W(stage 0'}"
    assert sum(cause in err for err in said) == 1, said
    for unwanted in ("Traceback", "has ended"):  # all are there until it is said
        assert unwanted not in "".join(said), "".join(said)


def test_sigusr2_to_one_rank_has_all_write_their_states_and_a_good_end_takes_them_away(start, tmp_path):
    process, ranks = start(timeout=60, steps=2)
    folder = tmp_path / "out" / FOLDER
    os.kill(ranks[1], signal.SIGUSR2)
    deadline = time.monotonic() + 20
    while len(list(folder.glob("rank-*.json"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    for rank in range(2):
        state = json.loads((folder / f"rank-{rank:05}.json").read_text())
        assert state["rank"] == rank and state["name"] == f"rank {rank} (pp {rank})" and state["pid"] == ranks[rank]
        assert any("trainer.py" in frame for frame in state["stacks"]["MainThread"]) and state["step"] > 1
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(250)
    assert process.returncode == 143 and not folder.exists()


@pytest.mark.parametrize("disk", [pytest.param("writes", marks=pytest.mark.slow), "hangs"])
def test_a_wait_that_does_not_end_by_itself_is_ended(tmp_path, disk):
    """A wait for a device has no timeout, for example. It runs in a process of its own, which the watchdog ends."""
    recorder = Recorder(0, {"pp": 2})
    if (child := os.fork()) == 0:
        if disk == "hangs":
            watchdog_module.replace_file = lambda *_, **__: time.sleep(60)
        os.environ["DUALPIPE_ERROR_FILE"] = str(tmp_path / "word.json")
        with Watchdog(recorder) as watchdog:
            watchdog.watch(None, RankInfo(0, 1, 0, 1), tmp_path, patience=60.0, limit=-1.5)
            with recorder.doing("F", "a kernel of its own"):
                time.sleep(1.5)  # which is no wait
            with recorder.wait("receive", "the activation for stage 1, micro-batch 0", (1,)):
                time.sleep(30)
    deadline, status = time.monotonic() + 20, (0, 0)
    while not status[0] and time.monotonic() < deadline:
        time.sleep(0.05)
        status = os.waitpid(child, os.WNOHANG)
    if not status[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == (child, 1 << 8)
    word = json.loads((tmp_path / "word.json").read_text())
    assert (word["kind"], word["rank"]) == ("watchdog", 0)
    assert word["message"].endswith(" s for the activation for stage 1, micro-batch 0 from rank 1 (pp 1)")
    assert word["wait"] == [0, [1], word["message"]]
    assert (tmp_path / FOLDER / "rank-00000.json").exists() == (disk == "writes")


def test_states_that_came_before_the_store_went_are_kept(monkeypatch):
    monkeypatch.setattr(watchdog_module, "_COLLECT", 0.5)
    store = mock.Mock()
    store.clone.return_value, store.add.return_value, store.get.return_value = store, 0, '{"asked": 0}'
    store.check.side_effect = lambda keys: keys != ["state 2"]
    there = PeerStore(store, 0)
    assert there.states(3) == {0: None, 1: {"asked": 0}, 2: None}
    store.check.side_effect = [True, RuntimeError("the store is gone")]
    assert PeerStore(store, 0).states(3) == {1: {"asked": 0}}


def test_an_action_has_few_entries():
    """One rank without messages records the actions of a step, and one wait and reduction per stage."""
    stages, (x, y) = make_stages(2), torch.randn(2, 8, 8).double()
    with Recorder().activate() as recorder:
        pipe = DualPipeV(stages)
        before = len(recorder._ring)
        pipe.step(x, num_chunks=4, criterion=F.mse_loss, labels=(y,))
    kinds = Counter(entry[KIND] for entry in list(recorder._ring)[before:])
    assert kinds["F"] == 2 * 4 and kinds["F"] + kinds["B"] + kinds["I"] + kinds["W"] <= 2 * 4 * 3
    assert kinds.total() <= 2 * 4 * 3 + 4 * 2, kinds
