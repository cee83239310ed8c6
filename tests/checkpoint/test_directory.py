"""SIGKILL at random moments while checkpoints are written: what was committed stays whole, and the next run goes on."""

import json
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dualpipe.checkpoint import CheckpointError, Checkpoints, latest, load, verify
from dualpipe.checkpoint.directory import scan
from dualpipe.parallel.mesh import build_mesh
from native import is_of_step, of_step, state_on, whole_state, writers_of
from ranks import run_ranks

# Waits a while, then for a checkpoint that is being written if it is asked to, and kills.
KILLER = """
import os, signal, sys, time
folder, delay, wait_for_a_write, *victims = sys.argv[1:]
time.sleep(float(delay))
end = time.monotonic() + 30
while wait_for_a_write == "yes" and time.monotonic() < end:
    if any(entry.name.startswith(".tmp-step-") for entry in os.scandir(folder)):
        break
for victim in victims:
    os.kill(int(victim), signal.SIGKILL)
"""


def save_until_killed(rank, folder, how, victims, delay, in_a_write):
    """Go on from the newest checkpoint and save every step; `victims` are killed `delay` s after the first save,
    or with `in_a_write` at the first write after that."""
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    state, step = state_on(mesh), 0
    kind = "process" if how == "process" else "thread"
    with Checkpoints(folder, mesh, kind=kind, keep_last=2, timeout=timedelta(seconds=40)) as checkpoints:
        if latest(folder) is not None:
            step = load(folder, state, mesh=mesh).manifest.step
            assert is_of_step(state, step)
        pids = [None, None]
        for attempt in range(1000):
            step += 1
            save = checkpoints.save if how == "sync" else checkpoints.save_async
            save(of_step(state, step), step=step)
            if attempt == 0:
                checkpoints.wait()
                dist.all_gather_object(pids, os.getpid())
                if rank == 0:
                    Path(folder, "ranks.json").write_text(json.dumps(pids))
                    targets = [str(pids[victim]) for victim in victims]
                    arguments = [folder, f"{delay:.3f}", "yes" if in_a_write else "no", *targets]
                    subprocess.Popen([sys.executable, "-I", "-S", "-c", KILLER, *arguments])
    return step


def kill(folder, how, victims, delay, in_a_write):
    """One run that is killed: (its newest step, whether it left something half done); fails unless that is whole."""
    outcome = run_ranks(save_until_killed, 2, str(folder), how, victims, delay, in_a_write, check=False,
                        timeout=120, fresh=True)
    for rank, result in enumerate(outcome):
        assert isinstance(result, ChildProcessError if rank in victims else (CheckpointError, RuntimeError)), result
    for rank in json.loads((folder / "ranks.json").read_text()):
        wait_until_none_writes_for(rank)
    for path in folder.glob("step-*"):
        assert not verify(path), path
    assert not scan(folder).damaged
    state = whole_state()
    loaded = load(folder, state)
    assert loaded.path == latest(folder) and not loaded.damaged
    assert is_of_step(state, loaded.manifest.step)
    return loaded.manifest.step, bool(list(folder.glob(".*-step*")))


def wait_until_none_writes_for(rank):
    for _ in range(100):
        if not writers_of(rank):
            return
        time.sleep(0.05)
    raise AssertionError(f"a writer of {rank} lives on")


def kill_often(folder, how, times):
    """Kill so many runs, every second one within a write; return how many of them left something half done."""
    generator = random.Random(how)
    before = 0
    halves = 0
    for attempt in range(times):
        victims = [(0, 1), (0,), (1,)][attempt % 3]
        step, half = kill(folder, how, victims, generator.uniform(0, 0.4), in_a_write=attempt % 2 == 0)
        assert step > before  # the run before was resumed from
        before = step
        halves += half
    return halves


@pytest.mark.parametrize("how", ["thread", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sync", "process"))])
def test_killed_at_several_moments(tmp_path, how):
    assert kill_often(tmp_path, how, 3) or how == "process"  # some hit the writing itself
