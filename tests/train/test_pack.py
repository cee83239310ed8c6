"""What is left where packing fails: on a full disk, after an interrupt, by a folder that cannot be read."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dualpipe import cli
from dualpipe.train.data import PackedTokens, TokenStream
from dualpipe.train.pack import ByteTokenizer, find_sources, pack


@contextmanager
def largest_file(size):
    """No file may have more bytes: what a full disk does, but for the words of the error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    return tmp_path / "text"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sizes, file", [
    ([60, 4000, 60], "tokens-00001.bin"), ([300_000], "tokens-00000.bin"), ([1] * 100, "documents.npy"),
    ([60] * 3, "index.json"),
])
def test_a_full_disk_is_a_line_that_names_the_file(tmp_path, text, capsys, monkeypatch, sizes, file):
    """Where a write fails, and where only closing does; with something packed there, and with nothing."""
    monkeypatch.setitem(pack.__kwdefaults__, "shard_tokens", 50)
    for i, size in enumerate(sizes):
        (text / f"{i:03}").write_bytes(b"x" * size)
    run = ["data", "pack", str(text), "--out", str(tmp_path / "out")]
    for before in ("nothing", "packed"):
        if before == "packed":
            assert cli.main(run) == 0
        here = contents(tmp_path)
        capsys.readouterr()
        with largest_file(600):
            assert cli.main(run) == 2
        said = capsys.readouterr().err
        assert said == f"error: {tmp_path}/out/{file} cannot be written: File too large; choose another place\n"
        assert contents(tmp_path) == here and len(list(tmp_path.iterdir())) == 1 + (before == "packed")


class Interrupted(ByteTokenizer):
    def encode(self, text):
        if text == b"2":
            raise KeyboardInterrupt
        return super().encode(text)


def test_an_interrupt_leaves_what_was_there(tmp_path, text, monkeypatch):
    for i in range(4):
        (text / f"{i}").write_text(f"{i}")
    for expected in (["text"], ["out", "text"]):
        with pytest.raises(KeyboardInterrupt):
            pack(find_sources([text]), Interrupted(), tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == expected
        packed = pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
        assert packed["documents"] == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_the_old_comes_back_where_the_new_cannot_take_its_place(tmp_path, text, monkeypatch, error):
    def fail(self, target):
        if self.name == "new":
            raise error
        return rename(self, target)

    rename = Path.rename
    (text / "a").write_text("old")
    pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    (text / "a").write_text("new text")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises((KeyboardInterrupt, ValueError)) as raised:
            pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    if isinstance(raised.value, ValueError):
        assert str(raised.value) == f"{tmp_path}/out cannot be written: No space left on device; choose another place"
    assert sorted(os.listdir(tmp_path)) == ["out", "text"]
    stream = TokenStream(PackedTokens(tmp_path / "out"))
    assert bytes(stream.read(0, 3).astype(np.uint8)) == b"old"


def test_a_folder_that_cannot_be_read_is_named(text, monkeypatch):
    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    scandir = os.scandir
    (text / "closed").mkdir()
    (text / "a.txt").write_text("open")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=f"^cannot read {text}/closed: Permission denied$"):
        find_sources([text])
