"""The operations of a `Storage`, the same for local files and for a store."""

import subprocess
import sys

import pytest

from dualpipe.runtime.files import CHECKSUMS
from dualpipe.runtime.storage.choose import storage_of, write_files
from dualpipe.runtime.storage.location import as_location
from object_store import set_faults


@pytest.fixture(params=["", "object://", "file://"])
def folder(request, tmp_path):
    set_faults()
    return as_location(f"{request.param}{tmp_path}")


def test_write_read_list_delete(folder):
    storage, content = storage_of(folder), bytes(range(256)) * 4
    written = storage.write(folder / "a", [content[:100], memoryview(content)[100:]], "sha256")
    assert written == (1024, CHECKSUMS["sha256"](content).hexdigest())
    assert storage.size(folder / "a") == 1024 and storage.read(folder / "a") == content
    assert storage.checksum(folder / "a", "sha256") == written.checksum
    both = write_files(folder, {"b": [b"12"], "c": [b""]}, "xxh3_128")
    assert {name: file.size for name, file in both.items()} == {"b": 2, "c": 0}
    assert sorted(storage.names(folder)) == ["a", "b", "c"]
    assert list(storage.names(folder / "none")) == []
    storage.delete(folder / "b")
    storage.delete(folder / "b")  # there is none any more
    assert sorted(storage.names(folder)) == ["a", "c"]
    for missing in (storage.size, storage.read):
        with pytest.raises(FileNotFoundError):
            missing(folder / "b")


def test_ranges(folder):
    storage, content = storage_of(folder), bytes(range(256)) * 4
    storage.write(folder / "a", [content])
    ranges = [(0, 10), (200, 50), (1000, 24)]
    with storage.open_ranges(folder / "a", lambda: ranges) as read_into:
        for start, size in ranges:
            buffer = bytearray(size)
            assert read_into(memoryview(buffer), start) == size and buffer == content[start : start + size]


def test_what_is_no_plain_file(tmp_path):
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ValueError, match="link is not a plain file; refused"):
        storage_of(tmp_path).size(tmp_path / "link")


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
