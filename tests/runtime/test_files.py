"""Files: atomic writes, checksums while writing, and locks."""

import errno
import hashlib
import os
import subprocess
import sys

import pytest
import xxhash

from dualpipe.runtime import files
from dualpipe.runtime.files import checksum_of, hold, lock, name_file_in_errors, replace_file, write_file


@pytest.mark.parametrize("checksum, reference", [("xxh3_128", xxhash.xxh3_128), ("sha256", hashlib.sha256)])
def test_a_file_is_hashed_as_it_is_written(tmp_path, checksum, reference):
    pieces = [b"head", memoryview(os.urandom(9 * 2**20)), b""]
    written = write_file(tmp_path / "x", pieces, checksum)
    content = b"".join(map(bytes, pieces))
    assert (tmp_path / "x").read_bytes() == content
    assert written == (len(content), reference(content).hexdigest())
    assert checksum_of(tmp_path / "x", checksum) == written.checksum
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x", [b""])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    replace_file(tmp_path / "x", "one")
    (tmp_path / ".tmp-x").write_text("left by a process that died")
    replace_file(tmp_path / "x", "two")

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_file", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "x", "three")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "two"


def test_processes_that_replace_the_same_file_write_aside_under_names_of_their_own(tmp_path):
    (tmp_path / ".tmp-x").write_text("another's")
    replace_file(tmp_path / "x", [b"one ", memoryview(b"two")], is_shared=True)
    replace_file(tmp_path / "y", "not flushed", flush=False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "x": "one two", "y": "not flushed", ".tmp-x": "another's"}


def test_an_error_names_the_file(tmp_path):
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"), name_file_in_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


HOLDER = """
import pathlib, sys
from dualpipe.runtime.files import lock
held = lock(pathlib.Path(sys.argv[1]), 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_freed_with_its_process(tmp_path):
    command = [sys.executable, "-P", "-c", HOLDER, str(tmp_path / ".lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=rf"another job saves to {tmp_path}; end it, or give every job"):
            lock(tmp_path / ".lock", 0)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    held = lock(tmp_path / ".lock", 10)
    held.release()
    lock(tmp_path / ".lock", 0).release()


def test_a_directory_is_held_while_it_is_renamed(tmp_path):
    folder = tmp_path / "partial"
    folder.mkdir()
    held = hold(folder)
    with pytest.raises(BlockingIOError):
        hold(folder)
    folder.rename(tmp_path / "whole")
    with pytest.raises(BlockingIOError):
        hold(tmp_path / "whole", patience=0.2)
    held.release()
    hold(tmp_path / "whole").release()
    assert not any((tmp_path / "whole").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            lock(tmp_path / ".lock", 0)
    else:
        with pytest.warns(UserWarning, match="is on a file system without locks"):
            assert lock(tmp_path / ".lock", 0) is None
