"""Checkpoints in a store that cannot rename: whole or not there, whatever fails."""

import shutil
import subprocess
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dualpipe.checkpoint import CheckpointError, Checkpoints, latest, load, save, tensors, verify
from dualpipe.checkpoint.commands import check, clean, ls, show
from dualpipe.checkpoint.directory import find, scan
from dualpipe.checkpoint.manifest import MARKER
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime import storage
from dualpipe.runtime.storage import RemotePath, as_location
from native import Trainee, is_of_step, is_step, of_step, state_of, state_on, steps_in, whole_state
from object_store import FAULTS, kill_when, objects_in, set_faults
from ranks import run_ranks

OBJECTS = [MARKER, "manifest.json", "rank-00000.safetensors", "tensors.json"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No faults at first, and no long pauses between attempts."""
    set_faults()
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(storage, "_GAP", storage._GAP)  # which a test changes
    monkeypatch.setattr(tensors, "_LIKELY_HEADER", tensors._LIKELY_HEADER)
    yield
    set_faults()


@pytest.fixture
def url(tmp_path):
    return f"object://{tmp_path}"


def saves_on_disk(folder):
    """The names of the saves of which there is any object, each with its objects."""
    found = {}
    for key in objects_in(folder):
        if "/" in key:
            found.setdefault(key.split("/")[0], []).append(key.split("/")[1])
    return found


# -- what it offers, as a local directory does


@pytest.mark.parametrize("kind", ["memory://", "object://", "file://"])
def test_save_and_load(kind, tmp_path):
    url = f"{kind}{tmp_path}"
    with Checkpoints(url, keep_last=2, keep_every=3) as checkpoints:
        assert latest(url) is None
        for step in (1, 2, 3, 4, 5):
            checkpoints.save_async(state_of(step), step=step, extra={"loader": [step]})
        path = checkpoints.wait()
        assert isinstance(path, RemotePath) and path.name.startswith("step-00000005.") and latest(url) == path
        assert steps_in(url) == [3, 4, 5]
        again = checkpoints.save(state_of(40), step=4)
        assert steps_in(url) == [3, 4, 5] and latest(url) == again
        checkpoints.keep_before_anomaly(4)
        for step in (6, 7):
            checkpoints.save(state_of(step), step=step)
        assert steps_in(url) == [3, 6, 7]
    for source in (url, latest(url), str(latest(url))):
        state = state_of(0)
        loaded = load(source, state)
        assert is_step(state, 7) and loaded.path == latest(url) and loaded.manifest.step == 7
        assert loaded.random_restored and not verify(loaded.path)
    state = state_of(0)
    assert load(find(url).committed[1].path, state).manifest.step == 6 and is_step(state, 6)


def test_the_objects_of_a_checkpoint_can_be_copied_to_a_directory(url, tmp_path):
    path = save(url, state_of(3), step=3)
    assert saves_on_disk(tmp_path) == {path.name: OBJECTS}
    assert (tmp_path / "latest").read_text() == f"{path.name}\n"
    state = state_of(0)
    assert load(tmp_path / path.name, state).manifest.step == 3 and is_step(state, 3)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_writers(tmp_path, kind):
    with Checkpoints(f"file://{tmp_path}", kind=kind) as checkpoints:
        for step in (1, 2):
            checkpoints.save_async(state_of(step), step=step)
    state = state_of(0)
    assert load(f"file://{tmp_path}", state).manifest.step == 2 and is_step(state, 2)


def test_no_other_process_writes_to_memory():
    with pytest.raises(ValueError, match=r"memory://run is in the memory of this process.*give kind='thread'"):
        Checkpoints("memory://run", kind="process")


def use_memory(rank):
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    errors = []
    for use in (lambda: Checkpoints("memory://run", mesh), lambda: load("memory://run", state_of(0), mesh=mesh)):
        with pytest.raises(ValueError) as caught:
            use()
        errors.append(str(caught.value))
    return errors


def test_several_processes_share_no_memory():
    for errors in run_ranks(use_memory, 2):
        assert all("memory of one process, and this job has 2" in error for error in errors)


def test_commands(url, tmp_path):
    for step in (1, 2):
        path = save(url, state_of(step), step=step)
    head, *rows = ls(url)
    assert head.split()[0] == "step" and [row.split()[0] for row in rows] == ["2", "1"]
    assert all(row.endswith("complete") for row in rows)
    assert [line.endswith("verified") for line in check(url)] == [True, True]
    assert next(show(url)).startswith(f"{path}: step 2, saved at 20")
    (tmp_path / path.name / MARKER).unlink()
    rows = list(ls(url))
    assert rows[1].split()[0] == "1" and rows[1].split()[-2] == str(scan(url).committed[0].path)
    assert f"{path}  not complete: it is being written" in rows[2]
    assert list(clean(url)) == [f"{path}: removed", f"{url}: 1 removed"]
    assert list(clean(url)) == [f"{url}: nothing removed"]
    assert path.name not in saves_on_disk(tmp_path) and steps_in(url) == [1]
    with pytest.raises(ValueError, match="is one checkpoint; give the directory that holds it"):
        list(clean(latest(url)))
    for command in (ls, check, show, clean):
        with pytest.raises(ValueError, match=r"none has no checkpoints; give the URL that a run saves to"):
            list(command(f"{url}/none"))


def test_a_copy_of_a_local_checkpoint_is_kept_until_it_has_a_marker(url, tmp_path):
    run = f"{url}/run"
    first = save(run, state_of(1), step=1)
    local = save(tmp_path / "local", state_of(5), step=5)
    copy = as_location(run) / local.name
    copied = tmp_path / "run" / local.name
    copied.mkdir()
    (copied / "tensors.json").write_bytes((local / "tensors.json").read_bytes())
    with pytest.warns(UserWarning, match=rf"{copy} has no {MARKER}"), Checkpoints(run) as checkpoints:
        checkpoints.save(state_of(4), step=4)  # while it is being copied
    shutil.copytree(local, copied, dirs_exist_ok=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match=rf"{copy} has no {MARKER}, so it is not used, and not removed.*sha256sum"):
            list(clean(run))
    with pytest.warns(UserWarning, match=rf"{copy} has no {MARKER}"), Checkpoints(run) as checkpoints:
        checkpoints.save(state_of(2), step=2)
    assert len(list(copied.iterdir())) == 3
    assert f"{copy}  not complete: it has no {MARKER}, and no job wrote it here: a copy of a local" in list(ls(run))[-1]
    with pytest.raises(ValueError, match=rf"{local.name} has no {MARKER}.*; for a copy of a complete one") as caught:
        load(copy, state_of(0))
    subprocess.run(str(caught.value).partition("make the object by ")[2], shell=True, check=True, cwd=copied)
    state = state_of(0)
    assert load(copy, state).path == copy and is_step(state, 5)
    assert {checkpoint.path for checkpoint in scan(run).committed} > {copy, first}
    save(run, state_of(5), step=5)  # the same step again replaces it
    assert not copied.exists() or not list(copied.iterdir())


def test_clean_of_a_local_directory(tmp_path):
    save(tmp_path, state_of(1), step=1)
    (tmp_path / ".tmp-step-00000002-ab").mkdir()
    assert list(clean(tmp_path)) == [f"{tmp_path}/.tmp-step-00000002-ab: removed", f"{tmp_path}: 1 removed"]
    with Checkpoints(tmp_path), pytest.raises(ValueError, match="another job saves to"):
        list(clean(tmp_path))


# -- committed by its marker, verified as it is read


def test_without_its_marker_there_is_no_checkpoint(url, tmp_path):
    save(url, state_of(1), step=1)
    second = save(url, state_of(2), step=2)
    marker = tmp_path / second.name / MARKER
    content = marker.read_bytes()
    for torn in (content[:-1], b"", None):  # half written, by a store that shows that; and not there
        marker.write_bytes(torn) if torn is not None else marker.unlink()
        found = scan(url)
        assert [checkpoint.manifest.step for checkpoint in found.committed] == [1] and not found.damaged
        with pytest.raises(ValueError, match=rf"{second.name} has no {MARKER}, so it is no complete checkpoint"):
            load(second, state_of(0))
    save(url, state_of(3), step=3)
    assert second.name not in saves_on_disk(tmp_path)


@pytest.mark.parametrize("name, change, problem", [
    ("rank-00000.safetensors", lambda content: content[:-1] + b"x", "its checksum differs"),
    ("rank-00000.safetensors", lambda content: content[:-1], r"has \d+ bytes, expected"),
    ("tensors.json", None, "is missing"),
    ("manifest.json", lambda content: content.replace(b'"step": 2', b'"step": 3'), f"does not match {MARKER}"),
    ("manifest.json", None, f"it has a {MARKER} and no manifest.json"),
])
def test_what_is_damaged_is_passed_over_and_not_cleaned(url, tmp_path, name, change, problem):
    save(url, state_of(1), step=1)
    second = save(url, state_of(2), step=2)
    file = tmp_path / second.name / name
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    state = state_of(0)
    with pytest.warns(UserWarning, match=problem):
        loaded = load(url, state)
    assert is_step(state, 1) and list(loaded.damaged) == [second]
    list(clean(url))
    assert second.name in saves_on_disk(tmp_path)
    save(url, state_of(2), step=2)  # the same step again replaces it
    assert second.name not in saves_on_disk(tmp_path) and steps_in(url) == [1, 2]


def out_of_reach_after(count, name):
    """Faults of a store that answers `count` requests to read the objects of a name, and no others."""
    reads = []

    def refuse(kind, key):
        if kind != "read" or not key.endswith(name):
            return False
        reads.append(key)
        return len(reads) > count

    return set_faults(broken=refuse)


def test_an_outage_while_it_is_read_is_no_damage(url):
    for step in (1, 2):
        path = save(url, state_of(step), step=step)
    refused = f"{path.name}/tensors.json"
    outage = r"tensors\.json could not be read in 5 attempts: OSError: the store refuses to read"
    state = state_of(0)
    out_of_reach_after(1, refused)  # once to verify it
    with pytest.raises(OSError, match=outage):
        load(url, state)
    assert is_step(state, 0)
    out_of_reach_after(1, refused)
    with pytest.raises(OSError, match=outage):
        verify(path)
    for command in (ls, show):
        out_of_reach_after(0, refused)
        with pytest.raises(OSError, match=outage):
            list(command(url))
    set_faults()
    assert not verify(path)


def test_verify_reports_damage_and_an_outage(url, tmp_path):
    first, second, third = [save(url, state_of(step), step=step) for step in (1, 2, 3)]
    (tmp_path / third.name / "tensors.json").unlink()
    out_of_reach_after(0, f"{second.name}/rank-00000.safetensors")
    lines = []
    with pytest.raises(OSError, match=rf"{second} is not verified, as the store cannot be reached: .*; try") as info:
        lines += check(url)
    assert lines == [f"{third}: DAMAGED"]
    assert info.value.__notes__ == [f"{third / 'tensors.json'} is missing"]
    set_faults()
    with pytest.raises(ValueError, match=r"tensors\.json is missing"):
        list(check(url))
    assert not verify(first)


@pytest.mark.parametrize("error", [PermissionError("forbidden"), ConnectionError("refused"), TimeoutError("too slow"),
                                   RuntimeError("of the store's package")])
def test_whatever_the_store_raises_is_no_damage(url, error):
    path = save(url, state_of(1), step=1)

    def refuse(kind, key):
        if path.name in key:
            raise error
        return False

    set_faults(broken=refuse)
    for command in (load, verify):
        with pytest.raises((OSError, ValueError), match=type(error).__name__):
            command(*((url, state_of(0)) if command is load else (path,)))
    with pytest.raises((OSError, ValueError), match=type(error).__name__):
        list(check(url))


# -- a store that is slow or fails


def test_what_fails_for_a_moment_stops_no_save(url):
    set_faults(every=11)
    with Checkpoints(url, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state_of(step), step=step)
        state = state_of(0)
        load(url, state)
        assert is_step(state, 3) and steps_in(url) == [2, 3]
    assert len(FAULTS.requests) > 100


@pytest.mark.parametrize("kind, name", [
    ("write", "rank-00000.safetensors"), ("complete", "manifest.json"), ("write", MARKER),
    ("look up", "rank-00000.safetensors"),
])
def test_what_fails_for_good_leaves_the_one_before(url, tmp_path, kind, name):
    with Checkpoints(url) as checkpoints:
        first = checkpoints.save(state_of(1), step=1)
        set_faults(broken=lambda asked, key: asked == kind and key.endswith(name) and first.name not in key)
        with pytest.raises(CheckpointError, match=rf"step 2 was not saved to object://.*{name} could not be .* in 5 "
                                                  rf"attempts: OSError: the store refuses to {kind}"):
            checkpoints.save(state_of(2), step=2)
        set_faults()
        assert latest(url) == first and set(saves_on_disk(tmp_path)) == {first.name}
        checkpoints.save(state_of(3), step=3)
    assert steps_in(url) == [1, 3]


def test_an_old_checkpoint_that_cannot_be_deleted_is_removed_by_the_next_save(url, tmp_path):
    with Checkpoints(url, keep_last=1) as checkpoints:
        first = checkpoints.save(state_of(1), step=1)
        set_faults(broken=lambda kind, key: kind == "delete" and key.endswith("rank-00000.safetensors"))
        with pytest.warns(UserWarning, match=rf"{first.name} cannot be deleted"):
            second = checkpoints.save(state_of(2), step=2)
        assert MARKER not in saves_on_disk(tmp_path)[first.name] and latest(url) == second  # the marker goes first
        set_faults()
        third = checkpoints.save(state_of(3), step=3)
    assert set(saves_on_disk(tmp_path)) == {third.name}


def test_a_marker_that_the_store_does_not_delete_keeps_all_files(url, tmp_path):
    """The store confirms the deletion, and has the marker nevertheless."""
    with Checkpoints(url, keep_last=1) as checkpoints:
        first = checkpoints.save(state_of(1), step=1)
        content = (tmp_path / first.name / MARKER).read_bytes()

        def restore(kind, key):
            if kind == "delete" and key.endswith(f"{first.name}/{MARKER}"):
                (tmp_path / first.name / MARKER).write_bytes(content)
            return False

        set_faults(lost=restore)
        with pytest.warns(UserWarning, match=rf"{first.name} cannot be deleted: .*{MARKER} is still there"):
            checkpoints.save(state_of(2), step=2)
        assert saves_on_disk(tmp_path)[first.name] == OBJECTS and not verify(first)
        set_faults()
        third = checkpoints.save(state_of(3), step=3)
    assert set(saves_on_disk(tmp_path)) == {third.name}


def test_a_checkpoint_whose_deletion_failed_is_not_counted_as_kept(url, tmp_path):
    """The marker is gone, but the answers to the requests that deleted it were lost."""
    with Checkpoints(url, keep_last=3) as checkpoints:
        for step in (1, 2, 3):
            replaced = checkpoints.save(state_of(step), step=step)
        set_faults(lost=lambda kind, key: kind == "delete" and key.endswith(MARKER),
                   broken=lambda kind, key: kind == "look up" and key.endswith(f"{replaced.name}/{MARKER}"))
        with pytest.warns(UserWarning, match=rf"{replaced.name} cannot be deleted"):
            checkpoints.save(state_of(3), step=3)
        set_faults()
        checkpoints.save(state_of(4), step=4)
    assert steps_in(url) == [2, 3, 4] and len(saves_on_disk(tmp_path)) == 3


# -- one job at a time


def test_a_job_that_finds_a_save_of_another_one_says_so(url, tmp_path):
    with Checkpoints(url) as first, Checkpoints(url) as second:
        path = second.save(state_of(1), step=1)
        for step in (2, 3):
            with pytest.raises(CheckpointError, match=rf"step {step} was not saved to object://.*: {path} was begun by "
                                                      r"another job that saves to object://.*; end one of the two, or"):
                first.save(state_of(step), step=step)
        path = second.save(state_of(4), step=4)
        assert latest(url) == path
    with Checkpoints(url) as checkpoints:  # a job that is started later goes on
        checkpoints.save(state_of(5), step=5)
    assert steps_in(url) == [1, 4, 5] and len(saves_on_disk(tmp_path)) == 3


def test_two_jobs_that_save_at_the_same_time_commit_nothing_over_each_other(url, tmp_path):
    """The second begins while the first writes, and takes its files for those of a job that died."""
    others = []

    def start_another(key, size):
        if key.endswith("manifest.json") and size == -1:
            set_faults()
            others.append(save(url, state_of(2), step=2))

    with Checkpoints(url) as first:
        set_faults(at_write=start_another)
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors does not exist any more: was it deleted by "
                                                  "another job"):
            first.save(state_of(1), step=1)
        with pytest.raises(CheckpointError, match=f"{others[0]} was begun by another job"):
            first.save(state_of(3), step=3)
    assert steps_in(url) == [2] and set(saves_on_disk(tmp_path)) == {others[0].name} and not verify(others[0])


def test_a_save_that_another_job_begins_meanwhile_is_seen_before_the_commit(url, tmp_path):
    other = tmp_path / "step-00000002.123456789"

    def start_another(key, size):
        if key.endswith("manifest.json") and size == -1:
            other.mkdir()
            (other / "rank-00000.safetensors").touch()

    with Checkpoints(url) as checkpoints:
        set_faults(at_write=start_another)
        with pytest.raises(CheckpointError, match=rf"{other} was begun by another job"):
            checkpoints.save(state_of(1), step=1)
    assert latest(url) is None and set(saves_on_disk(tmp_path)) == {other.name}


# -- several ranks


def fill(trainee, url, seed, kind):
    with Checkpoints(url, trainee.mesh) as checkpoints:
        trainee.fill(seed)
        (checkpoints.save if kind == "sync" else checkpoints.save_async)(trainee.state, step=seed, plan=trainee.plan)


def save_in_layout(rank, url, shape):
    set_faults(delay=0.002, every=29)
    storage._FIRST_PAUSE = 0.001
    fill(Trainee(shape), url, 1, "sync")
    fill(Trainee(shape), url, 2, "async")


def load_in_layout(rank, url, shape):
    """The tensors that are wrong, and the bytes of tensor files that were read."""
    faults = set_faults(delay=0.002)
    storage._GAP = tensors._LIKELY_HEADER = 0
    trainee = Trainee(shape)
    trainee.wreck()
    loaded = load(url, trainee.state, mesh=trainee.mesh)
    trainee.optimizer.round_parameters()
    read = sum(size for kind, key, size in faults.requests if kind == "read" and key.endswith(".safetensors"))
    return loaded.manifest.step, trainee.wrong(2), read


@pytest.mark.slow
def test_any_layout_and_each_rank_its_own_part(url, tmp_path):
    run_ranks(save_in_layout, 2, url, (2, 1, 1))
    (newest,) = [checkpoint for checkpoint in scan(url).committed if checkpoint.manifest.step == 2]
    size = sum(file.size for name, file in newest.manifest.files.items() if name.startswith("rank-"))
    for world, shape in ((1, (1, 1, 1)), (2, (1, 1, 2)), (2, (2, 1, 1)), (2, (1, 2, 1))):
        results = ([load_in_layout(0, url, shape)] if world == 1 else run_ranks(load_in_layout, world, url, shape))
        assert all(step == 2 and not wrong for step, wrong, _ in results)
        # Every byte is read once to verify it, by all ranks together, and then by those that hold it.
        read = sum(bytes_read for *_, bytes_read in results)
        assert size * 1.9 < read < size * (2.3 if world == 1 or shape[0] == 2 else 2.7), (shape, read / size)


def fail_on_one_rank(rank, url, how):
    storage._FIRST_PAUSE = 0.001
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    state = state_on(mesh)
    with Checkpoints(url, mesh, timeout=timedelta(seconds=20)) as checkpoints:
        write = checkpoints.save if how == "sync" else checkpoints.save_async
        write(of_step(state, 1), step=1)
        checkpoints.wait()
        if rank == 1:
            set_faults(broken=lambda kind, key: kind == "write" and "step-00000002" in key)
        with pytest.raises(CheckpointError) as caught:
            write(of_step(state, 2), step=2)
            checkpoints.wait()
        dist.barrier()
        set_faults()
        after_failure = latest(url).name.partition(".")[0]
        write(of_step(state, 3), step=3)
        checkpoints.wait()
        return str(caught.value), after_failure


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_failure_of_one_rank_is_that_of_all(url, tmp_path, how):
    for message, after_failure in run_ranks(fail_on_one_rank, 2, url, how):
        assert "step 2 was not saved" in message and after_failure == "step-00000001"
        assert "rank-00001.safetensors could not be written in 5 attempts: OSError: the store refuses" in message
    assert steps_in(url) == [1, 3] and len(saves_on_disk(tmp_path)) == 2


# -- killed


def save_and_be_killed(rank, url, how, victim, name, at):
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    state = state_on(mesh)
    storage._FIRST_PAUSE = 0.001
    set_faults(delay=0.002)
    with Checkpoints(url, mesh, keep_last=2, timeout=timedelta(seconds=20)) as checkpoints:
        write = checkpoints.save if how == "sync" else checkpoints.save_async
        for step in (1, 2):
            write(of_step(state, step), step=step)
            checkpoints.wait()
        if rank == victim:
            FAULTS.at_write = kill_when(name, at)
        write(of_step(state, 3), step=3)
        checkpoints.wait()
        if rank == victim:  # the last objects are written after the commit
            raise AssertionError("it was not killed")


MOMENTS = [  # the rank that is killed, the object that it writes, when, and the step that is the newest afterwards
    (0, "rank-00000.safetensors", "half", 2), (1, "rank-00001.safetensors", "begun", 2),
    (1, "rank-00001.safetensors", "half", 2), (1, "rank-00001.safetensors", "closed", 2),
    (0, "tensors.json", "closed", 2), (0, "manifest.json", "half", 2), (0, "manifest.json", "closed", 2),
    (0, MARKER, "half", 2), (0, MARKER, "closed", 3), (0, "latest", "half", 3),
]
FAST_MOMENTS = (MOMENTS[0], MOMENTS[6], MOMENTS[7], MOMENTS[8])  # around the marker, which commits


@pytest.mark.parametrize("how, moment", [
    *(pytest.param("async", moment, marks=[] if moment in FAST_MOMENTS else pytest.mark.slow) for moment in MOMENTS),
    *(pytest.param("sync", moment, marks=pytest.mark.slow) for moment in MOMENTS),
])
def test_killed_in_a_save(url, tmp_path, how, moment):
    victim, name, at, newest = moment
    outcome = run_ranks(save_and_be_killed, 2, url, how, victim, name, at, check=False, fresh=True)
    assert isinstance(outcome[victim], ChildProcessError), outcome
    set_faults()
    state = whole_state()
    loaded = load(url, state)
    assert loaded.manifest.step == newest and not loaded.damaged and loaded.path == latest(url)
    assert is_of_step(state, newest)
    list(clean(url))
    kept = [checkpoint.path.name for checkpoint in scan(url).committed]
    assert set(saves_on_disk(tmp_path)) == set(kept)
    assert all(not verify(checkpoint.path) for checkpoint in scan(url).committed)
    with Checkpoints(url, keep_last=2) as checkpoints:  # the next run is not hindered
        checkpoints.save(of_step(whole_state(), 4), step=4)
    assert steps_in(url) == [newest, 4] and len(saves_on_disk(tmp_path)) == 2
    assert [key for key in objects_in(tmp_path) if "/" not in key] == ["latest"]
