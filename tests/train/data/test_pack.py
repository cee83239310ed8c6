"""What is left where packing fails: on a full disk, after an interrupt, by a folder that cannot be read."""

import os
import resource
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dualpipe import cli
from dualpipe.train.data import pack as train_pack
from dualpipe.train.data.loader import PackedTokens, TokenStream
from dualpipe.train.data.pack import ByteTokenizer, find_sources, pack


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
            run.append("--overwrite")
        here = contents(tmp_path)
        capsys.readouterr()
        with largest_file(600):
            assert cli.main(run) == 2
        said = capsys.readouterr().err
        assert said == f"error: {tmp_path}/out/{file} cannot be written: File too large; choose another place\n"
        assert contents(tmp_path) == here and len(list(tmp_path.iterdir())) == 1 + (before == "packed")


def test_memory_does_not_grow_with_the_documents(tmp_path, text):
    """Their records, of 28 bytes each, are on disk until the file with them can be written, whose bytes are numpy's."""
    number = 8_000
    (text / "many.jsonl").write_text('{"text": "ab"}\n' * number)
    tracemalloc.start()
    pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 28 * number, peak
    assert sorted(contents(tmp_path / "out")) == ["documents.npy", "index.json", "tokens-00000.bin"]
    records = np.load(tmp_path / "out/documents.npy")
    assert records["offset"].tolist() == list(range(0, 3 * number, 3))
    np.save(tmp_path / "again.npy", records)
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "out/documents.npy").read_bytes()


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
            pack(find_sources([text]), Interrupted(), tmp_path / "out", overwrite=True)
        assert sorted(os.listdir(tmp_path)) == expected
        packed = pack(find_sources([text]), ByteTokenizer(), tmp_path / "out", overwrite=True)
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
            pack(find_sources([text]), ByteTokenizer(), tmp_path / "out", overwrite=True)
    if isinstance(raised.value, ValueError):
        assert str(raised.value) == f"{tmp_path}/out cannot be written: No space left on device; choose another place"
    assert sorted(os.listdir(tmp_path)) == ["out", "text"]
    stream = TokenStream(PackedTokens(tmp_path / "out"))
    assert bytes(stream.read(0, 3).astype(np.uint8)) == b"old"


def test_what_was_packed_is_replaced_where_that_is_asked_for(tmp_path, text, capsys):
    (text / "a").write_text("first")
    run = ["data", "pack", str(text), "--out", str(tmp_path / "out")]
    assert cli.main(run) == 0
    here = contents(tmp_path)
    (text / "a").write_text("second text")
    assert cli.main(run) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/out is a packed directory already, with 6 tokens in 1 documents; give another --out, or "
        "--overwrite to replace it\n")
    assert contents(tmp_path) == here | {"text/a": b"second text"}
    assert cli.main([*run, "--overwrite"]) == 0
    assert "12 tokens in 1 documents" in capsys.readouterr().out
    (tmp_path / "out/index.json").write_text("{")
    assert cli.main(run) == 2 and "already, which is damaged; give another" in capsys.readouterr().err


def test_what_another_process_has_packed_meanwhile_is_not_replaced(tmp_path, text, monkeypatch):
    (text / "a").write_text("ours")
    write = train_pack._write

    def write_beside_another(*arguments):
        monkeypatch.setattr(train_pack, "_write", write)
        pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
        (tmp_path / "out/theirs").touch()
        return write(*arguments)

    monkeypatch.setattr(train_pack, "_write", write_beside_another)
    with pytest.raises(ValueError, match="out is a packed directory already, with 5 tokens in 1 documents"):
        pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    assert (tmp_path / "out/theirs").exists() and sorted(os.listdir(tmp_path)) == ["out", "text"]


def test_files_of_a_folder_that_are_no_text_are_left_out_and_named(tmp_path, text, capsys):
    (text / "a.md").write_text("text")
    (text / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (text / "late").write_bytes(b"x" * 100_000 + b"\0")
    (text / "z.zip").write_bytes(b"PK\x03\x04....")
    run = ["data", "pack", "--out", str(tmp_path / "out"), "--overwrite"]
    with pytest.warns(UserWarning) as said:
        assert cli.main([*run, str(text)]) == 0
    assert [str(warning.message) for warning in said] == [
        "files that are no text are left out: 3: b.png (NUL bytes), z.zip (a zip file), late (NUL bytes)"]
    assert capsys.readouterr().out == f"{tmp_path}/out: 5 tokens in 1 documents\n"
    for name in ("b.png", "late"):
        assert cli.main([*run, str(text), str(text / name)]) == 2, "one that is given by its name"
        assert f"error: {text}/{name} is not text: it has NUL bytes" in capsys.readouterr().err
    (text / "records.jsonl").write_bytes(b"\x1f\x8b")
    assert cli.main([*run, str(text)]) == 2, "what is called records may not be lost"
    assert "records.jsonl is a gzip file" in capsys.readouterr().err
    for name in ("records.jsonl", "a.md"):
        (text / name).unlink()
    for number in range(12):
        (text / f"{number:02}.png").write_bytes(b"\0")
    assert cli.main([*run, str(text)]) == 2
    error = capsys.readouterr().err
    assert "there is no text to pack: " in error and "no text are 15: 00.png" in error and "and 5 more" in error


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
