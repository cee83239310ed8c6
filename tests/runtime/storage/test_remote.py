"""Objects of a store: retries, streams that are given up, and requests for ranges."""

import os
import sys

import pytest

from dualpipe.runtime.files import CHECKSUMS
from dualpipe.runtime.storage import remote
from dualpipe.runtime.storage.choose import storage_of
from dualpipe.runtime.storage.location import as_location
from object_store import ObjectStore, objects_in, set_faults


@pytest.fixture
def folder(tmp_path, monkeypatch):
    set_faults()
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.001)
    yield as_location(f"object://{tmp_path}")
    set_faults()


def test_what_fails_for_a_moment_is_done_again(folder, tmp_path):
    faults = set_faults(every=6)
    store = storage_of(folder)
    for name in "abc":
        assert store.write(folder / name, [b"123"]).size == 3  # four requests: open, write, complete, look up
    assert [kind for kind, _, _ in faults.requests].count("open") == 5
    assert objects_in(tmp_path) == ["a", "b", "c"]
    faults.every = 0
    for operation in (store.read, store.size, lambda path: list(store.names(path.parent)), store.delete):
        faults.outage = 4
        operation(folder / "a")
        assert faults.outage < 0
    assert objects_in(tmp_path) == ["b", "c"]


def test_the_last_attempt_says_what_was_done_how_often_and_why(folder, tmp_path):
    faults = set_faults(broken=lambda kind, key: kind == "complete")
    with pytest.raises(OSError, match=r"/a could not be written in 5 attempts: OSError: the store refuses to complete"):
        storage_of(folder).write(folder / "a", [b"abc"])
    assert objects_in(tmp_path) == []
    assert [kind for kind, _, _ in faults.requests].count("complete") == 5
    set_faults(broken=lambda kind, key: kind == "read")
    with pytest.raises(OSError, match="could not be read in 5 attempts"):
        storage_of(folder).read(folder / "a")


def test_what_will_not_pass_is_not_tried_again(folder, monkeypatch):
    def refuse(kind, key):
        raise PermissionError("not yours")

    faults = set_faults(broken=refuse)
    with pytest.raises(OSError, match=r"/a could not be written: PermissionError: not yours"):
        storage_of(folder).write(folder / "a", [b"abc"])
    assert len(faults.requests) == 1


def test_a_write_that_is_given_up_leaves_no_object(folder, tmp_path):
    """Closing the stream would complete an object with bytes missing, and so would Python when it is dropped."""

    def pieces():
        yield b"abc"
        raise KeyError("of the caller")

    faults = set_faults()
    with pytest.raises(KeyError):
        storage_of(folder).write(folder / "a", pieces())
    assert objects_in(tmp_path) == [] and not list(tmp_path.iterdir())
    assert [kind for kind, _, _ in faults.requests] == ["open", "write"]  # an error of the caller is not tried again


def test_an_object_that_comes_out_short_is_written_again(folder, tmp_path):
    cut = []

    def truncate(key, size):
        if size == -1 and not cut:
            cut.append(key)
            (tmp_path / "a").write_bytes(b"ab")

    set_faults(at_write=truncate)
    assert storage_of(folder).write(folder / "a", [b"abc"]).size == 3
    assert cut and (tmp_path / "a").read_bytes() == b"abc"


@pytest.mark.parametrize("answer", [TimeoutError("no answer"), FileNotFoundError("NoSuchUpload"),
                                    FileExistsError("there is such an object")])
@pytest.mark.parametrize("checksum", ["", "sha256"])
def test_an_upload_whose_answer_is_lost_is_done(folder, tmp_path, answer, checksum):
    store = storage_of(folder)
    store.write(folder / "a", [b"xyz"])  # as large as the object that replaces it

    def lose(kind, key):
        if kind == "complete":
            raise answer
        return False

    faults = set_faults(lost=lose)
    written = store.write(folder / "a", [b"12", b"3"], checksum)
    assert written == (3, CHECKSUMS["sha256"](b"123").hexdigest() if checksum else "")
    assert (tmp_path / "a").read_bytes() == b"123"
    assert [kind for kind, _, _ in faults.requests].count("complete") == 1


def test_exclusive_creation_after_a_lost_answer(folder, tmp_path):
    """The store refuses to overwrite, so the second attempt finds the object of the first."""

    def refuse(kind, key):
        if kind in ("open", "complete") and os.path.exists(key):
            raise FileExistsError("objects are not overwritten")
        return kind == "read" and len([kind for kind, _, _ in faults.requests if kind == "read"]) == 1

    faults = set_faults(broken=refuse, lost=lambda kind, key: kind == "complete")
    assert storage_of(folder).write(folder / "a", [b"123"]).size == 3
    assert [kind for kind, _, _ in faults.requests].count("open") == 2
    (tmp_path / "b").write_bytes(b"abc")
    with pytest.raises(OSError, match="/b could not be written: FileExistsError: objects are not overwritten"):
        storage_of(folder).write(folder / "b", [b"123"])
    assert (tmp_path / "b").read_bytes() == b"abc"


def test_an_upload_that_the_store_has_forgotten_is_repeated(folder, tmp_path):
    """S3 answers that there is no such upload, and there is no object either."""
    refusals = []

    def forget(kind, key):
        if kind == "complete" and len(refusals) < 2:
            refusals.append(key)
            raise FileNotFoundError("NoSuchUpload")
        return False

    set_faults(broken=forget)
    assert storage_of(folder).write(folder / "a", [b"123"]).size == 3
    assert (tmp_path / "a").read_bytes() == b"123" and len(refusals) == 2


def test_near_ranges_are_one_request_and_far_ones_are_not_read_between(folder, monkeypatch):
    monkeypatch.setattr(remote, "_GAP", 10)
    content = bytes(range(250)) * 4
    store = storage_of(folder)
    store.write(folder / "a", [content])
    faults = set_faults()
    ranges = [(0, 20), (25, 20), (50, 10), (500, 40)]
    with store.open_ranges(folder / "a", lambda: ranges) as read_into:
        for start, size in ranges:
            buffer = bytearray(size)
            assert read_into(memoryview(buffer), start) == size and buffer == content[start : start + size]
    assert [size for kind, _, size in faults.requests if kind == "read"] == [60, 40]


def test_a_window_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(remote, "_WINDOW", 40)
    monkeypatch.setattr(remote, "_REQUEST", 16)
    content = bytes(range(100))
    store = storage_of(folder)
    written = store.write(folder / "a", [content], "xxh3_128")
    faults = set_faults()
    assert store.checksum(folder / "a", "xxh3_128") == written.checksum
    assert [size for kind, _, size in faults.requests if kind == "read"] == [16, 16, 8, 16, 16, 8, 16, 4]
    buffer, start = bytearray(90), 5
    with store.open_ranges(folder / "a", lambda: [(5, 90)]) as read_into:
        while start < 95:
            start += read_into(memoryview(buffer)[start - 5 :], start)
    assert buffer == content[5:95]


def test_a_range_whose_request_fails_is_read_again(folder, monkeypatch):
    """fsspec returns the error in place of the bytes in some releases."""
    store = storage_of(folder)
    store.write(folder / "a", [b"abc"])
    answers = [[FileNotFoundError("not there")], [TimeoutError("too slow")], [b"abc"]]
    monkeypatch.setattr(ObjectStore, "cat_ranges", lambda *arguments, **options: answers.pop())
    assert store.checksum(folder / "a", "sha256") == CHECKSUMS["sha256"](b"abc").hexdigest()
    answers.append([TimeoutError("too slow")])
    answers.append([FileNotFoundError("not there")])
    with pytest.raises(FileNotFoundError, match="/a does not exist"):
        store.checksum(folder / "a", "sha256")


def test_a_store_that_cannot_be_entered(folder, monkeypatch):
    def refuse(self, **options):
        raise RuntimeError("no keys")

    monkeypatch.setattr(ObjectStore, "__init__", refuse)
    with pytest.raises(OSError, match="/a could not be read in 5 attempts: RuntimeError: no keys"):
        storage_of(folder).read(folder / "a")


def test_without_fsspec(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"/a is a URL, .* not installed; run pip install 'dualpipe\[remote\]'"):
        storage_of(folder).read(folder / "a")


@pytest.mark.parametrize("url", ["nonsense://a/b", "oss://bucket/a"])
def test_protocols_that_cannot_be_opened(url):
    with pytest.raises(ValueError, match=r"cannot be opened: .*; give a URL that fsspec knows, and install"):
        storage_of(as_location(url)).read(as_location(url))
