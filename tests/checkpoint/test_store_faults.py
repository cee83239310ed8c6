"""Jobs that are killed at any request in a store that fails: committed saves stay, and no others count as complete."""

import multiprocessing
import os
import random
import signal
import warnings

import pytest
import torch

from dualpipe.checkpoint import Checkpoints, latest, load, verify
from dualpipe.checkpoint.commands import clean
from dualpipe.checkpoint.directory import StoreDirectory, scan
from dualpipe.checkpoint.manifest import MARKER
from dualpipe.runtime import storage
from object_store import objects_in, set_faults

JOBS = 12  # one after the other, in one store
MOST_REQUESTS = 250  # of a job before it is killed
KEEP_LAST = 2
ELEMENTS = 2**14  # 64 KB: an upload of two blocks


def tensors_of(value):
    """Return tensors whose bits depend on the value; all values give the same size."""
    generator = torch.Generator().manual_seed(value)
    return {"weight": torch.randn(ELEMENTS, generator=generator), "bias": torch.full((3,), float(value))}


def inject(seed, failing, requests_left):
    """Make requests of this process fail, half of them after they took effect, and kill it at one of them.

    failing: the share of requests that fail. requests_left: the number of requests before it is killed.
    """
    generator = random.Random(seed)
    left = requests_left

    def kill_or_fail(kind, key):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return generator.random() < failing / 2

    set_faults(broken=kill_or_fail, lost=lambda kind, key: generator.random() < failing / 2)


def save_until_killed(url, pipe, seed, failing, requests_left, first_step):
    """Save and clean up in a faulty store, and report every step before it is saved, and its path afterwards."""
    warnings.simplefilter("ignore")
    storage._FIRST_PAUSE = 0.0001
    inject(seed, failing, requests_left)
    step = first_step
    try:
        if seed % 3 == 0:
            list(clean(url))
        with Checkpoints(url, keep_last=KEEP_LAST) as checkpoints:
            while True:
                pipe.send(("begun", step, None))
                try:
                    path = checkpoints.save(tensors_of(step), step=step)
                except OSError:  # of the store: training goes on
                    step += 1
                    continue
                pipe.send(("saved", step, path.name))
                step += seed % 2 or random.Random(step).randrange(2)  # also the same step again
    except (OSError, ValueError):  # the store failed five times in a row: the job ends
        os._exit(1)


def run_job(url, *arguments):
    """Run a job in a process; return the steps that it began, and the steps of saves that it saw committed, by name."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=save_until_killed, args=(url, theirs, *arguments))
    process.start()
    theirs.close()
    begun = []
    saved = {}
    try:
        while True:
            kind, step, name = ours.recv()
            if kind == "begun":
                begun.append(step)
            else:
                saved[name] = step
    except EOFError:
        process.join()
    return begun, saved


def check_committed(url, saved, last_saved):
    """Check all checkpoints of the URL and return the newest step.

    saved: the steps of all saves that a job saw committed, by name. last_saved: name of the last of them.
    """
    found = scan(url)
    assert not found.damaged
    committed = {checkpoint.path.name: checkpoint for checkpoint in found.committed}
    for name, checkpoint in committed.items():
        assert not verify(checkpoint.path), name
        state = {key: torch.zeros_like(tensor) for key, tensor in tensors_of(0).items()}
        assert load(checkpoint.path, state).path == checkpoint.path
        expected = tensors_of(checkpoint.manifest.step)
        assert all(torch.equal(state[key], expected[key]) for key in expected), name
        assert saved.get(name, checkpoint.manifest.step) == checkpoint.manifest.step
    newest = found.committed[0] if found.committed else None
    assert latest(url) == (newest.path if newest else None)
    assert len(committed) >= min(KEEP_LAST, len(set(saved.values())))
    if last_saved and last_saved not in committed:  # replaced by saves that were committed without an answer
        later = [checkpoint.manifest.step for name, checkpoint in committed.items()
                 if name not in saved and checkpoint.manifest.step >= saved[last_saved]]
        assert saved[last_saved] in later or len(later) >= KEEP_LAST
    return newest.manifest.step if newest else 0


def jobs_in_a_faulty_store(folder, seed):
    """Run jobs one after the other, each until it is killed, and check the store after each."""
    url = f"object://{folder}"
    generator = random.Random(seed)
    saved = {}
    last_saved = ""
    newest = 0
    for job in range(JOBS):
        failing = generator.choice([0.0, 0.05, 0.2])
        set_faults()
        begun, new = run_job(url, 1000 * seed + job, failing, generator.randrange(1, MOST_REQUESTS), newest + 1)
        saved |= new
        last_saved = ([*new] or [last_saved])[-1]
        set_faults()
        before = newest
        newest = check_committed(url, saved, last_saved)
        assert newest >= before and (newest == before or newest in begun)
    return saved


def check_ordinary_job(folder):
    """Check that a job without faults saves, resumes and leaves nothing but its checkpoints."""
    url = f"object://{folder}"
    set_faults()
    newest = scan(url).committed[0].manifest.step if latest(url) else 0
    list(clean(url))
    with Checkpoints(url, keep_last=KEEP_LAST) as checkpoints:
        for step in (newest + 1, newest + 2, newest + 3):
            checkpoints.save(tensors_of(step), step=step)
    names = {checkpoint.path.name for checkpoint in scan(url).committed}
    assert check_committed(url, {}, "") == newest + 3 and len(names) == KEEP_LAST
    assert {key.split("/")[0] for key in objects_in(folder) if "/" in key} == names


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.0001)
    yield
    set_faults()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_jobs_that_are_killed_in_a_store_that_fails(tmp_path, seed):
    saved = jobs_in_a_faulty_store(tmp_path, seed)
    assert len(saved) >= JOBS / 3, "most jobs die, but some must have saved for the test to see anything"
    check_ordinary_job(tmp_path)


def write_marker_first(self, folder, manifest, stored, report_progress, guard, commit=StoreDirectory.commit):
    storage.write(folder / MARKER, [b"0" * 64 + b"\n"])
    return commit(self, folder, manifest, stored, report_progress, guard)


def delete_marker_last(self, save, withdraw=StoreDirectory._withdraw):
    for name in ("manifest.json", "rank-00000.safetensors", "tensors.json"):
        storage.remove(save / name)
    return withdraw(self, save)


@pytest.mark.slow
@pytest.mark.parametrize("method, fault", [("commit", write_marker_first), ("_withdraw", delete_marker_last)])
def test_planted_faults_are_seen(tmp_path, monkeypatch, method, fault):
    monkeypatch.setattr(StoreDirectory, method, fault)
    with pytest.raises(AssertionError):
        for seed in range(6):
            (tmp_path / str(seed)).mkdir()
            jobs_in_a_faulty_store(tmp_path / str(seed), seed)
