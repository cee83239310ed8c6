"""The data of a run: packing on first use, and the rows that each rank reads in its thread."""

import gzip
import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from chats import save_chat_tokenizer
from dualpipe import cli
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import DataConfig
from dualpipe.train.data import run_data
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.pack import pack
from dualpipe.train.data.run_data import check_tokenizers, ensure_packed
from dualpipe.train.data.sequences import choose_evaluation_windows
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.splits import open_splits, split_documents
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer
from dualpipe.train.metrics import read_metrics
from dualpipe.train.trainer import train
from ranks import run_ranks


def test_text_is_packed_on_first_use_and_again_when_it_or_the_key_changes(tmp_path):
    def packed(**options):
        return ensure_packed(str(folder), DataConfig(tokenizer="bytes", **options), tmp_path / "cache")

    folder = tmp_path / "texts"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        packed()
    path = folder / "a.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": text, "other": text.upper()}).encode() + b"\n" for text in "abc"))
    first = packed()
    stamp = (first / "index.json").stat().st_mtime_ns
    assert packed() == packed(text_key="text") == first and (first / "index.json").stat().st_mtime_ns == stamp
    other = packed(text_key="other")
    assert other != first
    streams = [TokenStream(PackedTokens(directory)) for directory in (first, other)]
    assert [bytes(stream.read(0, 1).tolist()) for stream in streams] == [b"a", b"A"]
    assert streams[0].fingerprint != streams[1].fingerprint
    path.write_bytes(path.read_bytes() + b'{"text": "d", "other": "D"}\n')
    assert packed() != first


def test_conversations_are_packed_again_when_the_format_of_their_masks_changes(tmp_path, monkeypatch):
    def packed():
        return ensure_packed(str(path), DataConfig(tokenizer=str(tokenizer), chat=True), tmp_path / "cache")

    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    first = packed()
    assert packed() == first
    monkeypatch.setattr(run_data, "MASKED_FORMAT", "a later format")
    assert packed() != first


def test_texts_of_different_tokenizers_are_refused(texts, tmp_path):
    """In a mixture, the ends of documents may differ."""
    paths = {}
    for name in ("a:1", "a:2", "b:1"):
        tokenizer = ByteTokenizer()
        tokenizer.identity = f"sha256:{name}"
        paths[name] = tmp_path / name
        pack(find_sources([texts / "b.txt"]), tokenizer, paths[name])
    splits = {names: open_splits(*(paths[name] for name in names), 0.0)
              for names in (("a:1", "a:1"), ("a:2", "a:1"), ("b:1", "b:1"))}
    check_tokenizers([splits["a:1", "a:1"]])
    check_tokenizers([splits["a:2", "a:1"], splits["a:1", "a:1"]])
    with pytest.raises(ValueError, match=r"with the tokenizer 'sha256:a:2', .* with 'sha256:a:1'; pack both with the"):
        check_tokenizers([splits["a:2", "a:1"]])
    with pytest.raises(ValueError, match=r"^data.sources: .* 'sha256:a:1', .* with 'sha256:b:1'; pack all with the"):
        check_tokenizers([splits["a:1", "a:1"], splits["b:1", "b:1"]])


def _prepare(rank, folder, tokenizer):
    def work():
        assert rank == 0, "only one rank packs"
        return ensure_packed(folder, DataConfig(tokenizer=tokenizer), Path(folder).parent / "cache")

    return RankSync(dist.group.WORLD).first(work)


def test_one_rank_packs_and_its_failure_reaches_all(texts):
    paths = run_ranks(_prepare, 2, str(texts), "bytes")
    assert paths[0] == paths[1] and (paths[0] / "index.json").exists()
    errors = run_ranks(_prepare, 2, str(texts), "no/such.json", check=False)
    assert [type(e) for e in errors] == [ValueError, ValueError]
    assert all("cannot read the tokenizer no/such.json" in str(e) for e in errors)


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
    loader = Loader([text], sequence_length=16, batch_size=16, seed=0)
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
