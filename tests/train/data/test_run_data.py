"""The data of a run: a single file, files of records, and the rows that each rank reads in its thread."""

import gzip
import json
import os
import re
import threading

import pytest
import torch.distributed as dist

from dualpipe import cli
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.config.load import load_config
from dualpipe.train.data import run_data
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.sequences import choose_evaluation_windows
from dualpipe.train.data.splits import split_documents
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.metrics import read_metrics
from dualpipe.train.trainer import train
from ranks import run_ranks


@pytest.mark.slow
def test_a_single_file_of_records_trains_with_the_default_validation_fraction(run_toml, capsys):
    """A single file trains as in nanoGPT. A run resumes only with the same validation tokens."""
    folder = run_toml.parent
    record = {"body": "the quick brown fox jumps over the lazy dog. " * 300}
    (folder / "one.jsonl.gz").write_bytes(gzip.compress(json.dumps(record).encode()))
    text = re.sub("validation_fraction.*", 'text_key = "body"', run_toml.read_text())
    run_toml.write_text(text.replace('"text"', '"one.jsonl.gz"', 1))
    run = ["train", str(run_toml), "--parallel.pp", "1", "--output.dir", str(folder / "out")]
    run += ["--checkpoint.interval", "1"]
    assert cli.main([*run, "--train.steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "data: 13,231 tokens in 1 documents for training, 270 in 1 for validation" in said
    assert "a unigram model of the same text has a validation loss of " in said
    assert read_metrics(folder / "out" / "metrics.jsonl")[-1]["eval_loss"] > 0
    assert cli.main([*run, "--train.steps", "3", "--data.validation_fraction", "0.03"]) == 2
    assert "the loader's state is of another run: data '" in capsys.readouterr().err
    assert cli.main([*run, "--train.steps", "3"]) == 0
    assert cli.main([*run, "--data.text_key", "text", "--checkpoint.resume", "never"]) == 2
    assert "it has no 'text', but 'body'; name the key" in capsys.readouterr().err


def _train(rank, folder, port):
    """Return the windows that this rank read, with the name of the thread."""

    def read(self, start, stop):
        if stop - start == 17:  # without the windows of the unigram model
            seen.append((self.num_documents, start, threading.current_thread().name.partition("_0")[0]))
        return read_tokens(self, start, stop)

    dist.destroy_process_group()
    seen, read_tokens, TokenStream.read = [], TokenStream.read, read
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    train(load_config("run.toml", ["--train.steps", "3", "--parallel.dp", "2"]), RankInfo(rank, 4, rank, 4))
    return seen


@pytest.mark.slow
def test_ranks_read_their_own_rows_in_a_thread_and_middle_ranks_nothing(run_toml, free_port):
    folder = run_toml.parent
    seen = run_ranks(_train, 4, str(folder), free_port, fresh=True)
    assert seen[2] == seen[3] == [], "the ranks with the middle of the V"
    assert {thread for rank in seen[:2] for _, _, thread in rank} == {"read_ahead"}
    (packed,) = folder.glob("out/data-*")
    text, validation = split_documents(PackedTokens(packed), 0.2)
    loader = Loader(text, sequence_length=16, batch_size=16, seed=0)
    evaluated = choose_evaluation_windows(validation, sequence_length=16, batch_size=16, limit=2)
    for rank in range(2):
        rows_of_rank = slice(8 * rank, 8 * rank + 8)
        windows = [window for step in range(3) for window in loader.windows(step)[rows_of_rank].tolist()]
        read = [start // 17 for documents, start, _ in seen[rank] if documents == text.num_documents]
        assert read == windows
        read = [start // 17 for documents, start, _ in seen[rank] if documents == validation.num_documents]
        assert read == [start // 17 for _ in range(2) for batch in evaluated for start in batch.starts[rows_of_rank]]


def test_a_run_reports_the_validation_tokens_of_a_short_text(dualpipe, run_toml):
    (run_toml.parent / "short.txt").write_text("the cat sat on the mat. " * 125)
    options = ("--parallel.pp", "1", "--train.steps", "1", "--train.sequence_length", "128")
    done = dualpipe(run_toml.parent, "train", "run.toml", *options, "--data.path", "short.txt",
                    "--data.validation_fraction", "0.02")
    assert done.returncode == 0, done.stderr
    said = "129 of 3001 tokens are for validation, enough for one sequence: "
    assert f"{said}data.validation_fraction = 0.02 would be 60\n" in done.stdout
    rows = [json.loads(line) for line in (run_toml.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval_loss"] > 0


def _train_without_files(rank, folder, port):
    """Return the error of this rank, where rank 1 cannot open the packed text."""
    def open_splits(path, *options, **more):
        raise ValueError(f"{path} is not here")

    dist.destroy_process_group()
    if rank == 1:
        run_data.open_splits = open_splits
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    with pytest.raises(ValueError) as raised:
        train(load_config("run.toml"), RankInfo(rank, 2, rank, 2))
    return str(raised.value)


def test_text_that_one_rank_cannot_open_is_an_error_on_all(run_toml, free_port):
    said = run_ranks(_train_without_files, 2, str(run_toml.parent), free_port, fresh=True)
    assert said[0] == said[1] and re.fullmatch(r"rank 1 \(pp 1\): out/data-\w+ is not here", said[0])
