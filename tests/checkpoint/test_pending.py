"""Saving in the background: isolated from training, one at a time, and no failure is lost."""

import errno
import importlib
import os
import resource
import runpy
import signal
import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from dualpipe.checkpoint import CheckpointError, Checkpoints, latest, load, save, verify
from dualpipe.parallel.mesh import Mesh, build_mesh
from native import is_gone, writer_of, writers_of
from ranks import run_ranks, server

saving = importlib.import_module("dualpipe.checkpoint.save")  # the name in the package is the function


def state_of(value, size=1000):
    return {"weight": torch.full((size, 3), float(value)), "bias": torch.full((5,), value, dtype=torch.bfloat16)}


def stored(path, size=1000):
    state = state_of(0, size)
    load(path, state)
    assert not verify(path)
    return {name: tensor.flatten()[0].item() for name, tensor in state.items()}


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_isolated_from_what_changes_afterwards(tmp_path, kind):
    state, extra = state_of(1), {"position": [1]}
    with Checkpoints(tmp_path, kind=kind) as checkpoints:
        for value in (1, 2, 3):  # the memory is used again
            checkpoints.save_async(state, step=value, extra=extra)
            following = torch.rand(3)
            for tensor in state.values():
                tensor.fill_(value + 1)
            extra["position"][0] = value + 1
        assert checkpoints.wait() == tmp_path / "step-00000003"
        assert checkpoints.wait() is None
    load(tmp_path, state_of(0))
    assert torch.equal(torch.rand(3), following)  # the random state too is that of the moment
    for value in (1, 2, 3):
        path = tmp_path / f"step-{value:08}"
        assert stored(path) == {"weight": value, "bias": value}
        assert load(path, state_of(0)).manifest.extra == {"position": [value]}


@pytest.fixture
def release(monkeypatch):
    """An event that the writes of this process wait for."""
    event, write = threading.Event(), saving.write_files
    monkeypatch.setattr(saving, "write_files", lambda *given: (event.wait(10), write(*given))[1])
    return event


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_the_second_waits(tmp_path, release, how):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_async(state_of(1), step=1)
        assert latest(tmp_path) is None
        threading.Timer(0.3, release.set).start()
        getattr(checkpoints, how)(state_of(2), step=2)
        assert (tmp_path / "step-00000001").exists()
    for step in (1, 2):
        assert stored(tmp_path / f"step-{step:08}")["weight"] == step


@pytest.fixture
def interruptible():
    """Ctrl-C is ignored in a shell's background jobs, and so in what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_what_is_in_flight_alone(tmp_path, release, interruptible):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_async(state_of(1), step=1)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
        threading.Timer(0.2, release.set).start()
        checkpoints.save_async(state_of(2), step=2)  # waits, as it needs the memory
    for step in (1, 2):
        assert stored(tmp_path / f"step-{step:08}")["weight"] == step


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_an_interrupt_that_hides_a_save_leaves_it_alone(tmp_path, monkeypatch, release, how):
    with Checkpoints(tmp_path) as checkpoints:
        submit = checkpoints._executor.submit

        def interrupted(work):
            submitted = submit(work)
            if work is not int:  # a checkpoint, which is handed over already
                raise KeyboardInterrupt
            return submitted

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._executor, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save_async(state_of(1), step=1)
        threading.Timer(0.2, release.set).start()
        getattr(checkpoints, how)(state_of(2), step=2)
    for step in (1, 2):
        assert stored(tmp_path / f"step-{step:08}")["weight"] == step


def test_an_interrupt_of_a_save_is_one(tmp_path, monkeypatch):
    write = saving.write_files
    with Checkpoints(tmp_path) as checkpoints:
        for at in range(4):  # before the header, before each of two tensors, after all

            def interrupted(folder, content, checksum, at=at):
                def pieces(of):
                    for number, piece in enumerate([*of, b""]):
                        if number == at:
                            raise KeyboardInterrupt
                        yield piece

                return write(folder, {name: pieces(of) for name, of in content.items()}, checksum)

            with monkeypatch.context() as patch:
                patch.setattr(saving, "write_files", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    checkpoints.save(state_of(1), step=1)
        checkpoints.save(state_of(2), step=2)
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000002"]


UNCLOSED = """
import time, torch
from dualpipe.checkpoint import Checkpoints
checkpoints = Checkpoints({folder!r}, kind={kind!r})
checkpoints.save_async({{"weight": torch.ones(20_000_000)}}, step=1)
{then}
"""


def unclosed(folder, kind, then=""):
    script = folder / "unclosed.py"
    script.write_text(UNCLOSED.format(folder=str(folder), kind=kind, then=then))
    return script


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_the_end_of_the_process_waits_for_a_save(tmp_path, kind):
    process = server().Process(target=runpy.run_path, args=(str(unclosed(tmp_path, kind)),))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    assert not verify(tmp_path / "step-00000001")


def test_tensors_may_change_their_sizes(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step, size in enumerate([10, 10, 20, 20, 10]):
            checkpoints.save_async(state_of(step, size), step=step)
        checkpoints.save(state_of(5, 10), step=5)
    for step, size in enumerate([10, 10, 20, 20, 10, 10]):
        assert stored(tmp_path / f"step-{step:08}", size) == {"weight": step, "bias": step}


def test_a_failure_is_raised_once_at_the_next_save_or_at_the_end(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1), step=1)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_files", fail)
        for next_call in (lambda: checkpoints.save(state_of(3), step=3), checkpoints.wait, checkpoints.close):
            checkpoints.save_async(state_of(2), step=2)
            with pytest.raises(CheckpointError, match=r"step 2 was not saved to .*No space left"):
                next_call()
    assert latest(tmp_path).name == "step-00000001" and not list(tmp_path.glob(".tmp-*"))
    with pytest.raises(KeyError) as caught, Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_files", fail)
            checkpoints.save_async(state_of(2), step=2)
            checkpoints._pending.ended.exception(10)
        raise KeyError("of the run")
    assert "step 2 was not saved to" in caught.value.__notes__[0]


def test_a_writer_that_is_killed_is_reported_and_replaced(tmp_path):
    with Checkpoints(tmp_path, kind="process") as checkpoints:
        for step in (1, 2):
            checkpoints.save_async(state_of(step, 2_000_000), step=step)
            os.kill(writer_of(os.getpid()), signal.SIGKILL)
            with pytest.raises(CheckpointError, match=rf"step {step} was not saved to .*has died \(exit status -9\)"):
                checkpoints.wait()
        checkpoints.save_async(state_of(3), step=3)
        checkpoints.wait()
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000003"] and not writers_of(os.getpid())
    assert stored(latest(tmp_path))["weight"] == 3


def test_a_writer_does_not_hear_ctrl_c(tmp_path):
    with Checkpoints(tmp_path, kind="process") as checkpoints:
        for step in (1, 2):
            checkpoints.save_async(state_of(step), step=step)
            os.kill(writer_of(os.getpid()), signal.SIGINT)  # while it still starts
            checkpoints.wait()
    assert stored(latest(tmp_path))["weight"] == 2


def test_a_writer_that_hangs_is_given_up(tmp_path):
    with Checkpoints(tmp_path, kind="process", timeout=timedelta(seconds=60)) as checkpoints:
        checkpoints._timeout = 2.0
        checkpoints.save_async(state_of(2), step=2)
        os.kill(writer_of(os.getpid()), signal.SIGSTOP)
        # It may have been stopped before or after it began to write.
        with pytest.raises(CheckpointError, match=r"gave no answer for 2 s|no progress for 2 s"):
            checkpoints.wait()
        assert not writers_of(os.getpid())
        checkpoints._timeout = 60.0
        checkpoints.save_async(state_of(3), step=3)
    assert stored(latest(tmp_path))["weight"] == 3


def test_a_writer_dies_with_its_rank(tmp_path):
    rank = server().Process(target=runpy.run_path, args=(str(unclosed(tmp_path, "process", "time.sleep(60)")),))
    rank.start()
    try:
        writer = writer_of(rank.pid)
    finally:
        rank.kill()
        rank.join()
    deadline = time.monotonic() + 30
    while not is_gone(writer):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert latest(tmp_path) is None


# -- ranks


def save_a_half(rank, folder):
    """One rank saves its share without the others, then both without saying that they belong together."""
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    half = distribute_tensor(torch.arange(8.0), Mesh.of(mesh).dense, [Shard(0)])
    messages = []
    for alone in (0, 1):
        if rank == alone:
            try:
                save(folder, {"half": half}, step=1)
            except ValueError as error:
                messages.append(str(error))
        dist.barrier()
    total = half + half
    partial = DTensor.from_local(torch.ones(2), Mesh.of(mesh).dense, [Partial()])
    try:
        save(folder, {"sum": partial}, step=1, mesh=mesh)
    except ValueError as error:
        messages.append(str(error))
    save(folder, {"half": total}, step=2, mesh=mesh)
    return messages


def test_half_a_tensor_is_not_saved(tmp_path):
    for messages in run_ranks(save_a_half, 2, str(tmp_path), fresh=True):
        assert messages[0].startswith("all ranks together must have all of every tensor")
        assert "half is incomplete: its parts have 4 of 8 elements" in messages[0]
        assert "sum is a partial sum" in messages[1]
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000002"]


def cut_short(rank, folder):
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    state, messages = {f"{rank}": torch.ones(3)}, []
    with Checkpoints(folder, mesh, timeout=timedelta(seconds=3)) as checkpoints:
        checkpoints.save(state, step=1)
        gather, calls = dist.all_gather_object, []

        def interrupted(*given, **more):
            calls.append(given)
            if len(calls) == 2:
                raise KeyboardInterrupt
            gather(*given, **more)

        if rank == 1:
            dist.all_gather_object = interrupted
        for step in (2, 3):
            try:
                checkpoints.save(state, step=step)
            except BaseException as error:
                messages.append(f"{type(error).__name__}: {error}")
        dist.all_gather_object = gather
    return messages


def test_ranks_that_an_interrupt_has_parted_say_so(tmp_path):
    first, second = run_ranks(cut_short, 2, str(tmp_path), fresh=True)
    assert first[0].startswith("CheckpointError: the checkpoint of step 2 was not saved")
    assert "from rank 1 (pp 1)" in first[0]
    assert second[0].startswith("KeyboardInterrupt")
    assert "was cut short, by an interrupt" in first[1] and "was cut short, by an interrupt" in second[1]
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000001"]


def fill_a_disk(rank, folder, kind):
    """Rank 1 cannot write more than 100 KB into a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 1 else resource.RLIM_INFINITY, -1))
    mesh, raised = build_mesh(2, 1, 1, torch.device("cpu")), []
    with Checkpoints(folder, mesh, kind=kind) as checkpoints:
        checkpoints.save({f"{rank}": torch.ones(10)}, step=1)
        big = {f"{rank}": torch.ones(100_000)}
        calls = [lambda: checkpoints.save(big, step=2),
                 lambda: (checkpoints.save_async(big, step=3), checkpoints.wait())]
        for call in calls if kind == "thread" else calls[1:]:
            try:
                call()
            except CheckpointError as error:
                raised.append(str(error))
        checkpoints.save_async({f"{rank}": torch.full((10,), 2.0)}, step=4)
    return raised


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_file_that_cannot_grow_on_one_rank(tmp_path, kind):
    first, second = run_ranks(fill_a_disk, 2, str(tmp_path), kind, fresh=True)
    assert first == second and len(first) == (2 if kind == "thread" else 1)
    assert all("rank 1 (pp 1): " in text and "File too large" in text for text in first)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000001", "step-00000004"]
    assert not verify(latest(tmp_path))


def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with Checkpoints(disk / "checkpoints") as checkpoints:
            checkpoints.save(state_of(1, 50_000), step=1)
            for step in (2, 3):  # 0.6 MB fits once more: the first goes only when the next is there
                checkpoints.save(state_of(step, 50_000), step=step)
            with pytest.raises(CheckpointError, match=r"step 4 was not saved to .*No space left"):
                checkpoints.save(state_of(4, 50_000), step=4)
            checkpoints.save_async(state_of(5, 50_000), step=5)
            with pytest.raises(CheckpointError, match=r"step 5 was not saved to .*No space left"):
                checkpoints.wait()
            checkpoints.save(state_of(6, 10), step=6)
        assert stored(disk / "checkpoints" / "step-00000003", 50_000)["weight"] == 3
        assert stored(latest(disk / "checkpoints"), 10)["weight"] == 6
    finally:
        subprocess.run(["umount", disk], check=True)


def damaged_for_all(rank, folder):
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    wide = distribute_tensor(torch.zeros(1000, 3), Mesh.of(mesh).dense, [Shard(0)])
    state = {"weight": wide, "bias": torch.zeros(5, dtype=torch.bfloat16)}
    raised = ""
    try:
        loaded = load(folder, state, mesh=mesh)
    except ValueError as error:
        raised = str(error)
    assert isinstance(wide, DTensor)
    found = None if raised else (loaded.manifest.step, [*loaded.damaged.values()])
    return raised, found, wide.to_local()[0, 0].item()


def test_ranks_agree_on_what_is_damaged(tmp_path):
    for step in (1, 2):
        save(tmp_path, state_of(step), step=step)
    (tmp_path / "step-00000002" / "tensors.json").write_text("{}")  # read by rank 1 alone
    results = run_ranks(damaged_for_all, 2, str(tmp_path))
    assert results[0] == results[1] and results[0][1][0] == 1 and results[0][2] == 1
    assert "tensors.json has 2 bytes" in results[0][1][1][0]
    (tmp_path / "step-00000001" / "rank-00000.safetensors").write_text("")
    results = run_ranks(damaged_for_all, 2, str(tmp_path))
    assert results[0] == results[1] and "no complete checkpoint" in results[0][0] and results[0][2] == 0


def beside_training(rank, folder):
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    with Checkpoints(folder, mesh) as checkpoints:
        for step in range(5):
            checkpoints.save_async({f"{rank}": torch.full((100_000,), float(step))}, step=step)
            for _ in range(30):
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total == 2
    return True


def test_collectives_of_training_are_not_disturbed(tmp_path):
    assert run_ranks(beside_training, 2, str(tmp_path)) == [True, True]
    assert len(list(tmp_path.glob("step-*"))) == 5 and not verify(latest(tmp_path))


def one_is_gone(rank, folder):
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    checkpoints = Checkpoints(folder, mesh, timeout=timedelta(seconds=3))
    checkpoints.save({f"{rank}": torch.ones(3)}, step=1)
    if rank == 1:
        time.sleep(6)  # alive, but never comes
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"step 2 was not saved to .* from rank 1 \(pp 1\)"):
        checkpoints.save({f"{rank}": torch.ones(3)}, step=2)
    return time.monotonic() - start


def test_a_rank_that_does_not_come_is_noticed(tmp_path):
    waited, _ = run_ranks(one_is_gone, 2, str(tmp_path), check=False, fresh=True)
    assert 2 < waited < 6
    assert latest(tmp_path).name == "step-00000001" and not verify(latest(tmp_path))
