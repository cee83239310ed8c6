"""The progress bar of packing: on a terminal alone, with a share that reaches the end."""

import gzip
import json
import sys

import numpy as np
import pytest

from dualpipe.train.data.pack import EncodedDocument, PackProgress, pack
from dualpipe.train.data.sources import find_sources, read_documents
from dualpipe.train.data.tokenizer import ByteTokenizer


@pytest.fixture
def files(tmp_path):
    lines = "".join(json.dumps({"text": f"line {number} " * 50}) + "\n" for number in range(200))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "c.txt").write_text("text " * 1000)
    return [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]


def test_nothing_is_printed_where_stderr_is_no_terminal(files, tmp_path, capfd):
    pack(find_sources(files), ByteTokenizer(), tmp_path / "out")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_the_share_of_the_files_and_the_rate(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("dualpipe.train.data.pack.PROGRESS_INTERVAL", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    pack(find_sources(files), ByteTokenizer(), tmp_path / "out")
    shown = capsys.readouterr().err
    assert "packing" in shown and "100%" in shown and " tokens/s" in shown


def test_positions_add_up_to_the_sizes_of_the_files(files, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("dualpipe.train.data.pack.PROGRESS_INTERVAL", 0.0)
    sizes = [file.stat().st_size for file in files]
    with PackProgress(files) as progress:
        task = progress._bar.tasks[0]
        assert task.total == sum(sizes)
        for number, file in enumerate(files):
            before = sum(sizes[:number])
            for _ in read_documents(file, "text", progress.set_position):
                assert before <= task.completed <= before + sizes[number]
            progress.finish_file(file)
            assert task.completed == sum(sizes[: number + 1])
        list(progress.count_tokens([EncodedDocument(b"", "", np.zeros(7), None)] * 2))
        progress.set_position(0)
        assert task.fields["rate"].startswith("14 tokens, ")
