"""Locations, and the operations on files: the same for local ones and for a store, which fails at times."""

import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dualpipe.checkpoint import Checkpoints
from dualpipe.runtime import storage
from dualpipe.runtime.files import CHECKSUMS
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.storage import RemotePath, absolute, as_location, check_shared, contains, resolve, write_files
from object_store import ObjectStore, objects_in, set_faults
from ranks import run_ranks


def test_strings_with_a_protocol_are_urls():
    run = as_location("s3://bucket/run/")
    assert isinstance(run, RemotePath) and str(run) == "s3://bucket/run" and run == as_location("s3://bucket/run")
    save = run / "step-00000001"
    assert (str(save), save.name, save.parent) == ("s3://bucket/run/step-00000001", "step-00000001", run)
    assert as_location(save) is save and absolute(save) is save and resolve(save) is save
    assert pickle.loads(pickle.dumps(save)) == save
    assert str(as_location("file:///a/b").parent) == "file:///a"
    assert str(as_location("memory://run").parent / "other") == "memory://other"


@pytest.mark.parametrize("path", ["out/checkpoints", Path("out"), "a:b", "/s3/x", "."])
def test_all_else_is_a_path(path):
    assert as_location(path) == Path(path)


def test_it_is_no_path_of_this_machine():
    with pytest.raises(TypeError):
        Path(as_location("s3://bucket/run"))
    with pytest.raises(TypeError):
        os.stat(as_location("s3://bucket/run"))


def test_refused():
    with pytest.raises(ValueError, match=r"s3:/bucket/run looks like a URL that was made a Path.*give it as a string"):
        as_location(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match="is a chain of stores; give the URL of the store itself"):
        as_location("simplecache::s3://bucket/run")


@pytest.mark.parametrize("url", ["file://shared/run", "file://localhost/shared/run", "local://run"])
def test_files_of_another_host(url):
    with pytest.raises(ValueError, match=rf"{url} names '\w+' as the host .*; give {url.partition(':')[0]}:///path"):
        as_location(url)


def test_contains(tmp_path):
    run = as_location("s3://bucket/run")
    assert contains(run, run) and contains(run, run / "step-00000001")
    assert not contains(run, as_location("s3://bucket/run2")) and not contains(run, tmp_path)
    assert contains(tmp_path, tmp_path / "a") and not contains(tmp_path / "a", tmp_path)


@pytest.fixture(params=["", "object://", "file://"])
def folder(request, tmp_path):
    set_faults()
    return as_location(f"{request.param}{tmp_path}")


def test_write_read_list_delete(folder):
    content = bytes(range(256)) * 4
    written = storage.write(folder / "a", [content[:100], memoryview(content)[100:]], "sha256")
    assert written == (1024, CHECKSUMS["sha256"](content).hexdigest())
    assert storage.size(folder / "a") == 1024 and storage.read(folder / "a") == content
    assert storage.checksum(folder / "a", "sha256") == written.checksum
    both = write_files(folder, {"b": [b"12"], "c": [b""]}, "xxh3_128")
    assert {name: file.size for name, file in both.items()} == {"b": 2, "c": 0}
    assert storage.list_names(folder) == ["a", "b", "c"]
    assert storage.list_names(folder / "none") == []
    storage.remove(folder / "b")
    storage.remove(folder / "b")  # there is none any more
    assert storage.list_names(folder) == ["a", "c"]
    for missing in (storage.size, storage.read):
        with pytest.raises(FileNotFoundError):
            missing(folder / "b")
    assert storage.exists(folder / "a") and not storage.exists(folder / "b")
    storage.remove_folder(folder, lambda: None)
    assert storage.list_names(folder) == []


def test_ranges(folder):
    content = bytes(range(256)) * 4
    storage.write(folder / "a", [content])
    ranges = [(0, 10), (200, 50), (1000, 24)]
    with storage.open_ranges(folder / "a", lambda: ranges) as read_into:
        for start, size in ranges:
            buffer = bytearray(size)
            assert read_into(memoryview(buffer), start) == size and buffer == content[start : start + size]


def test_what_is_no_plain_file(tmp_path):
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ValueError, match="link is not a plain file; refused"):
        storage.size(tmp_path / "link")


LOCAL_ONLY = """
import sys
sys.modules["fsspec"] = None  # importing it raises
import torch
from dualpipe.checkpoint import Checkpoints, latest, load, verify
from dualpipe.checkpoint.commands import check, clean, ls, show
from dualpipe.train.trainer import Trainer
folder = sys.argv[1]
for kind in ("thread", "process"):
    with Checkpoints(folder, kind=kind) as checkpoints:
        checkpoints.save_async({"a": torch.ones(3)}, step=1)
state = {"a": torch.zeros(3)}
load(folder, state)
assert state["a"].sum() == 3 and not verify(latest(folder))
for command in (ls, check, show, clean):
    list(command(folder))
assert not [name for name in sys.modules if name.startswith("fsspec.")]
"""


def test_local_checkpoints_do_not_import_fsspec(tmp_path):
    run = subprocess.run([sys.executable, "-P", "-c", LOCAL_ONLY, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _check_shared(rank, folder):
    """Return the error for a directory that rank 1 does not have."""
    ranks = RankSync(dist.group.WORLD)
    check_shared(Path(folder), ranks)
    if rank == 1:
        Path.exists = lambda path: False
    with pytest.raises(ValueError) as raised:
        check_shared(Path(folder), ranks, patience=0.2)
    sys.modules[Checkpoints.__module__].check_shared = partial(check_shared, patience=0.2)
    with pytest.raises(ValueError, match="system that all nodes see"), Checkpoints(
        folder, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ):
        pass
    return str(raised.value)


def test_a_directory_that_is_another_one_on_some_rank_is_refused_on_all(tmp_path):
    """As on the disks of two nodes: otherwise the first checkpoint would fail, after hours."""
    said = run_ranks(_check_shared, 2, str(tmp_path), fresh=True)
    assert said[0] == said[1] == (f"rank 1: {tmp_path} is not the directory that rank 0 has by this name; give one on "
                                  "a file system that all nodes see")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.fixture
def store(tmp_path, monkeypatch):
    set_faults()
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.001)
    yield as_location(f"object://{tmp_path}")
    set_faults()


def test_what_fails_for_a_moment_is_done_again(store, tmp_path):
    faults = set_faults(every=6)
    for name in "abc":
        assert storage.write(store / name, [b"123"]).size == 3  # four requests: open, write, complete, look up
    assert [kind for kind, _, _ in faults.requests].count("open") == 5
    assert objects_in(tmp_path) == ["a", "b", "c"]
    faults.every = 0
    for operation in (storage.read, storage.size, lambda path: storage.list_names(path.parent), storage.remove):
        faults.outage = 4
        operation(store / "a")
        assert faults.outage < 0
    assert objects_in(tmp_path) == ["b", "c"]


def test_the_last_attempt_says_what_was_done_how_often_and_why(store, tmp_path):
    faults = set_faults(broken=lambda kind, key: kind == "complete")
    with pytest.raises(OSError, match=r"/a could not be written in 5 attempts: OSError: the store refuses to complete"):
        storage.write(store / "a", [b"abc"])
    assert objects_in(tmp_path) == []
    assert [kind for kind, _, _ in faults.requests].count("complete") == 5
    set_faults(broken=lambda kind, key: kind == "read")
    with pytest.raises(OSError, match="could not be read in 5 attempts"):
        storage.read(store / "a")


def test_what_will_not_pass_is_not_tried_again(store, monkeypatch):
    def refuse(kind, key):
        raise PermissionError("not yours")

    faults = set_faults(broken=refuse)
    with pytest.raises(OSError, match=r"/a could not be written: PermissionError: not yours"):
        storage.write(store / "a", [b"abc"])
    assert len(faults.requests) == 1


def test_a_write_that_is_given_up_leaves_no_object(store, tmp_path):
    """Closing the stream would complete an object with bytes missing, and so would Python when it is dropped."""

    def pieces():
        yield b"abc"
        raise KeyError("of the caller")

    faults = set_faults()
    with pytest.raises(KeyError):
        storage.write(store / "a", pieces())
    assert objects_in(tmp_path) == [] and not list(tmp_path.iterdir())
    assert [kind for kind, _, _ in faults.requests] == ["open", "write"]  # an error of the caller is not tried again


def test_an_object_that_comes_out_short_is_written_again(store, tmp_path):
    cut = []

    def truncate(key, size):
        if size == -1 and not cut:
            cut.append(key)
            (tmp_path / "a").write_bytes(b"ab")

    set_faults(at_write=truncate)
    assert storage.write(store / "a", [b"abc"]).size == 3
    assert cut and (tmp_path / "a").read_bytes() == b"abc"


@pytest.mark.parametrize("answer", [TimeoutError("no answer"), FileNotFoundError("NoSuchUpload"),
                                    FileExistsError("there is such an object")])
@pytest.mark.parametrize("checksum", ["", "sha256"])
def test_an_upload_whose_answer_is_lost_is_done(store, tmp_path, answer, checksum):
    storage.write(store / "a", [b"xyz"])  # as large as the object that replaces it

    def lose(kind, key):
        if kind == "complete":
            raise answer
        return False

    faults = set_faults(lost=lose)
    written = storage.write(store / "a", [b"12", b"3"], checksum)
    assert written == (3, CHECKSUMS["sha256"](b"123").hexdigest() if checksum else "")
    assert (tmp_path / "a").read_bytes() == b"123"
    assert [kind for kind, _, _ in faults.requests].count("complete") == 1


def test_exclusive_creation_after_a_lost_answer(store, tmp_path):
    """The store refuses to overwrite, so the second attempt finds the object of the first."""

    def refuse(kind, key):
        if kind in ("open", "complete") and os.path.exists(key):
            raise FileExistsError("objects are not overwritten")
        return kind == "read" and len([kind for kind, _, _ in faults.requests if kind == "read"]) == 1

    faults = set_faults(broken=refuse, lost=lambda kind, key: kind == "complete")
    assert storage.write(store / "a", [b"123"]).size == 3
    assert [kind for kind, _, _ in faults.requests].count("open") == 2
    (tmp_path / "b").write_bytes(b"abc")
    with pytest.raises(OSError, match="/b could not be written: FileExistsError: objects are not overwritten"):
        storage.write(store / "b", [b"123"])
    assert (tmp_path / "b").read_bytes() == b"abc"


def test_an_upload_that_the_store_has_forgotten_is_repeated(store, tmp_path):
    """S3 answers that there is no such upload, and there is no object either."""
    refusals = []

    def forget(kind, key):
        if kind == "complete" and len(refusals) < 2:
            refusals.append(key)
            raise FileNotFoundError("NoSuchUpload")
        return False

    set_faults(broken=forget)
    assert storage.write(store / "a", [b"123"]).size == 3
    assert (tmp_path / "a").read_bytes() == b"123" and len(refusals) == 2


def test_near_ranges_are_one_request_and_far_ones_are_not_read_between(store, monkeypatch):
    monkeypatch.setattr(storage, "_GAP", 10)
    content = bytes(range(250)) * 4
    storage.write(store / "a", [content])
    faults = set_faults()
    ranges = [(0, 20), (25, 20), (50, 10), (500, 40)]
    with storage.open_ranges(store / "a", lambda: ranges) as read_into:
        for start, size in ranges:
            buffer = bytearray(size)
            assert read_into(memoryview(buffer), start) == size and buffer == content[start : start + size]
    assert [size for kind, _, size in faults.requests if kind == "read"] == [60, 40]


def test_a_window_at_a_time(store, monkeypatch):
    monkeypatch.setattr(storage, "_WINDOW", 40)
    monkeypatch.setattr(storage, "_REQUEST", 16)
    content = bytes(range(100))
    written = storage.write(store / "a", [content], "xxh3_128")
    faults = set_faults()
    assert storage.checksum(store / "a", "xxh3_128") == written.checksum
    assert [size for kind, _, size in faults.requests if kind == "read"] == [16, 16, 8, 16, 16, 8, 16, 4]
    buffer, start = bytearray(90), 5
    with storage.open_ranges(store / "a", lambda: [(5, 90)]) as read_into:
        while start < 95:
            start += read_into(memoryview(buffer)[start - 5 :], start)
    assert buffer == content[5:95]


def test_a_range_whose_request_fails_is_read_again(store, monkeypatch):
    """fsspec returns the error in place of the bytes in some releases."""
    storage.write(store / "a", [b"abc"])
    answers = [[FileNotFoundError("not there")], [TimeoutError("too slow")], [b"abc"]]
    monkeypatch.setattr(ObjectStore, "cat_ranges", lambda *arguments, **options: answers.pop())
    assert storage.checksum(store / "a", "sha256") == CHECKSUMS["sha256"](b"abc").hexdigest()
    answers.append([TimeoutError("too slow")])
    answers.append([FileNotFoundError("not there")])
    with pytest.raises(FileNotFoundError, match="/a does not exist"):
        storage.checksum(store / "a", "sha256")


def test_a_store_that_cannot_be_entered(store, monkeypatch):
    def refuse(self, **options):
        raise RuntimeError("no keys")

    monkeypatch.setattr(ObjectStore, "__init__", refuse)
    with pytest.raises(OSError, match="/a could not be read in 5 attempts: RuntimeError: no keys"):
        storage.read(store / "a")


def test_without_fsspec(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"/a is a URL, .* not installed; run pip install 'dualpipe\[remote\]'"):
        storage.read(store / "a")


@pytest.mark.parametrize("url", ["nonsense://a/b", "oss://bucket/a"])
def test_protocols_that_cannot_be_opened(url):
    with pytest.raises(ValueError, match=r"cannot be opened: .*; give a URL that fsspec knows, and install"):
        storage.read(as_location(url))
