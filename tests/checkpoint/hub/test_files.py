"""Broken checkpoints and failing ranks: one clear error on every rank, nothing half-loaded, nothing left behind."""

import fcntl
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dualpipe.checkpoint import load_hf, save_hf
from dualpipe.checkpoint.hub import save
from dualpipe.checkpoint.hub.files import INDEX, SINGLE, Reader
from hub import read_all, save_qwen, stages_on_meta
from ranks import run_ranks


def shard(folder, number=2):
    return sorted(folder.glob("model-*.safetensors"))[number - 1]


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rename_in_index(folder, new):
    old = shard(folder).name
    edit_index(folder, lambda mapped: mapped.update({k: new for k, v in mapped.items() if v == old}))


def truncated(folder):
    shard(folder).write_bytes(shard(folder).read_bytes()[:-3])


def missing_file(folder):
    shard(folder).unlink()


def wrong_file(folder):
    name = next(iter(json.loads((folder / INDEX).read_text())["weight_map"]))
    edit_index(folder, lambda mapped: mapped.update({name: sorted(set(mapped.values()) - {mapped[name]})[0]}))


def traversal(folder):
    shutil.copy(shard(folder), folder.parent / "outside.safetensors")
    rename_in_index(folder, "../outside.safetensors")


def absolute(folder):
    rename_in_index(folder, "/etc/passwd")


def dead_link(folder):
    shard(folder).unlink()
    (folder / "model-00002-of-00007.safetensors").symlink_to(folder.parent / "gone.safetensors")


def no_name(folder):
    rename_in_index(folder, {"not": "a name"})


def no_json(folder):
    (folder / INDEX).write_text('{"weight_map": ')


def no_map(folder):
    (folder / INDEX).write_text("[]")


def no_config(folder):
    (folder / "config.json").unlink()


def other_family(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


def twice(folder):
    first, second = (load_file(shard(folder, number)) for number in (1, 2))
    save_file(second | {"model.norm.weight": torch.zeros(32)} | {k: first[k] for k in list(first)[:1]},
              shard(folder), metadata={"format": "pt"})


def overlapping(folder):
    entry = {"dtype": "F32", "shape": [2]}
    header = json.dumps({"a": entry | {"data_offsets": [0, 8]}, "b": entry | {"data_offsets": [4, 12]}}).encode()
    shard(folder).write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))


def misshapen(folder):
    tensors = read_all(folder) | {"model.norm.weight": torch.zeros(33)}
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def no_folder(folder):
    shutil.rmtree(folder)


BROKEN = {
    truncated: "cannot be opened as safetensors",
    missing_file: "has no file model-00002-of-00007.safetensors",
    wrong_file: f"where {INDEX} says it is",
    traversal: "'../outside.safetensors'",
    absolute: "'/etc/passwd'",
    dead_link: "gone.safetensors",
    no_name: "not the plain name of a file",
    no_json: INDEX,
    no_map: "holds a list",
    no_config: "config.json",
    other_family: "'llama'",
    twice: "is in both",
    overlapping: "cannot be opened as safetensors",
    misshapen: "model.norm.weight: (33,)",
    no_folder: "there is no directory",
}


def load_each(rank, good, cases):
    """Return the error and whether the stages are unchanged for each broken checkpoint; then load a good one."""
    stages, mesh, plan = stages_on_meta(good, (2, 1, 1))
    results = []
    for folder in cases:
        try:
            load_hf(stages, folder, mesh, plan)
            results.append(("", False))
        except ValueError as error:
            results.append((str(error), all(p.device.type == "meta" for s in stages for p in s.parameters())))
    load_hf(stages, good, mesh, plan)
    return results


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    base = tmp_path_factory.mktemp("broken")
    save_qwen(base / "good")
    folders = []
    for case in BROKEN:
        folder = base / case.__name__ / "checkpoint"
        shutil.copytree(base / "good", folder)
        case(folder)
        folders.append(str(folder))
    return dict(zip(BROKEN, zip(*run_ranks(load_each, 2, str(base / "good"), folders, timeout=200))))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.__name__)
def test_broken_checkpoint(broken, case):
    (first, untouched), (second, also) = broken[case]
    assert BROKEN[case] in first
    assert first == second
    assert untouched and also


def load_apart(rank, good, bad):
    """Return each rank's error and whether its stages are untouched, where ranks see different files or fail alone."""
    results = []

    def attempt(change):
        stages, mesh, plan = stages_on_meta(good, (2, 1, 1))
        try:
            change(stages, mesh, plan)
            results.append(("", False))
        except Exception as error:
            untouched = all(p.device.type == "meta" for s in stages for p in s.parameters())
            results.append((f"{type(error).__name__}: {error}", untouched))

    attempt(lambda stages, mesh, plan: load_hf(stages, bad if rank == 1 else good, mesh, plan))
    attempt(lambda stages, mesh, plan: load_hf([] if rank == 1 else stages, good, mesh, plan))
    if rank == 1:
        Reader.__call__ = fails
    attempt(lambda stages, mesh, plan: load_hf(stages, good, mesh, plan))
    dist.barrier()
    return results


def fails(reader, name, box):
    raise OSError("the disk is gone")


def test_one_rank_fails(tmp_path):
    """Rank 1 sees other files than rank 0, is called with nothing, and cannot read in the middle."""
    save_qwen(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    for number in range(1, 7):
        file = shard(tmp_path / "bad", number)
        file.write_bytes(file.read_bytes()[:-1])
    first, second = run_ranks(load_apart, 2, str(tmp_path / "good"), str(tmp_path / "bad"), fresh=True)
    for (error, untouched), (same, also), message in zip(first, second, (
        r"ValueError: rank 1 \(pp 1\): .*not the same for all ranks.*cannot be opened",
        r"ValueError: rank 1 \(pp 1\): stages must be", r"RuntimeError: rank 1 \(pp 1\): OSError: the disk is gone",
    ), strict=True):
        assert error == same
        assert re.match(message, error, re.DOTALL), error
        assert (untouched and also) == ("disk" not in message)


# -- writing


def save_failing(rank, source, folder):
    """Return each rank's errors where writing fails in some way on some rank; then save successfully."""
    stages, mesh, plan = stages_on_meta(source, (2, 1, 1))
    load_hf(stages, source, mesh, plan)
    write, finish, results = save.write_box, save._finish, []

    def attempt(target, **options):
        try:
            save_hf(stages, f"{folder}/{target}", mesh, plan, **options)
            results.append("")
        except BaseException as error:
            results.append(f"{type(error).__name__}: {error}")

    def no_space(*args):
        raise OSError(28, "No space left on device")

    def interrupted(*args):
        raise KeyboardInterrupt

    attempt("occupied")
    attempt("file")
    attempt("file/inside")
    attempt("new", max_shard_bytes=0)
    if rank == 1:
        save.write_box = no_space
    attempt("new")
    if rank == 1:
        save.write_box = interrupted
    attempt("new")
    save.write_box, save._finish = write, no_space
    attempt("new")
    save._finish = finish
    left = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    attempt("empty")
    attempt("new")
    return results, left


def test_failing_writes_leave_nothing(tmp_path):
    save_qwen(tmp_path / "source")
    folder = tmp_path / "out"
    (folder / "occupied").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "occupied" / "precious").touch()
    (folder / "file").touch()
    (first, left), (second, _) = run_ranks(save_failing, 2, str(tmp_path / "source"), str(folder), fresh=True)
    expected = [
        ("ValueError", "occupied exists already"), ("ValueError", "file exists already"),
        ("RuntimeError", "rank 0 (pp 0): "), ("ValueError", "max_shard_bytes must be at least 1; got 0"),
        ("RuntimeError", f"rank 1 (pp 1): OSError: [Errno 28] No space left on device: '{folder}/.new."),
        ("RuntimeError", "rank 1 (pp 1): KeyboardInterrupt"),
        ("RuntimeError", "rank 0 (pp 0): OSError: [Errno 28] No space left"), ("", ""), ("", ""),
    ]
    for index, (kind, text) in enumerate(expected):
        assert first[index].startswith(kind) and text in first[index], first[index]
        assert second[index] == ("KeyboardInterrupt: " if index == 5 else first[index])
    assert first[4].endswith("partial/model.safetensors'")
    assert left == ["empty", "file", "occupied"]
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "file", "new", "occupied"]
    assert [path.name for path in (folder / "occupied").iterdir()] == ["precious"]
    assert read_all(folder / "new").keys() == read_all(tmp_path / "source").keys()


def killed(rank, source, target):
    stages, mesh, plan = stages_on_meta(source)
    load_hf(stages, source, mesh, plan)
    save.write_box = lambda *arguments: os._exit(9)
    save_hf(stages, target, mesh, plan)


def test_what_a_killed_writer_left_goes_and_another_ones_stays(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    save_qwen(source)
    run_ranks(killed, 1, str(source), str(out / "a[b]"), check=False, fresh=True)
    (left,) = out.iterdir()
    other, alien = out / ".a[b].0123abcd.partial", out / ".ab.0123abcd.partial"
    other.mkdir(), alien.mkdir()
    writing = os.open(other, os.O_RDONLY)
    fcntl.flock(writing, fcntl.LOCK_EX)
    stages, mesh, plan = stages_on_meta(source)
    load_hf(stages, source, mesh, plan)
    save_hf(stages, out / "a[b]", mesh, plan)
    assert left.name.endswith(".partial") and set(out.iterdir()) == {out / "a[b]", other, alien}
    os.close(writing)


def test_stages_that_nobody_has(tmp_path):
    save_qwen(tmp_path / "source")
    stages, mesh, plan = stages_on_meta(tmp_path / "source")
    load_hf(stages, tmp_path / "source", mesh, plan)
    with pytest.raises(ValueError, match=r"no rank holds embed_tokens.weight, .* pass the mesh, and all stages"):
        save_hf(stages[1:], tmp_path / "target", mesh, plan)
    assert not (tmp_path / "target").exists()


def test_links_are_followed(tmp_path):
    """The cache of huggingface_hub 2.x links a snapshot's files to blobs, and these to blobs of all repositories."""
    repository = tmp_path / "models--a--b"
    blobs, snapshot, shared = repository / "blobs", repository / "snapshots" / "1234", tmp_path / "blobs" / "ab"
    save_qwen(tmp_path / "source")
    for folder in (blobs, snapshot, shared):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "source").iterdir())):
        shutil.copy(path, shared / str(number))
        (blobs / str(number)).symlink_to(Path("../../blobs/ab") / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    loaded = [stages_on_meta(folder) for folder in (tmp_path / "source", snapshot)]
    for folder, (stages, mesh, plan) in zip((tmp_path / "source", snapshot), loaded):
        load_hf(stages, folder, mesh, plan)
    (original, _, _), (linked, _, _) = loaded
    for stage, copy in zip(original, linked):
        for name, tensor in stage.state_dict().items():
            assert torch.equal(copy.state_dict()[name], tensor), name
