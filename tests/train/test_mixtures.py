"""Runs on several sources: shares in the metrics, resuming with the same and with other weights, refusals."""

import dataclasses
import json
import re

import pytest

from chats import random_chats, save_chat_tokenizer, write_chats
from dualpipe import cli
from dualpipe.train.config.load import load_config, recorded_config
from dualpipe.train.config.schema import DataSource
from dualpipe.train.metrics import read_metrics

SOURCES = """
[[data.sources]]
path = "text"
weight = 3
[[data.sources]]
path = "more"
"""
MIXED = ["--data.sources", "text,weight=3", "more"]


@pytest.fixture
def folder(run_toml, monkeypatch):
    """The folder of a run on two sources."""
    folder = run_toml.parent
    (folder / "more").mkdir()
    (folder / "more" / "numbers.txt").write_text("0123456789 " * 600)
    text = run_toml.read_text().replace('path = "text"\n', "")
    run_toml.write_text(text.replace("[parallel]", SOURCES + "[parallel]"))
    monkeypatch.chdir(folder)
    return folder


def rows_of(folder, out="out"):
    return read_metrics(folder / out / "metrics.jsonl")


def test_settings(folder):
    config = load_config("run.toml")
    assert config.data.sources == (DataSource("text", 3.0), DataSource("more", 1.0))
    assert recorded_config(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert load_config("run.toml", MIXED) == config
    assert load_config(str(folder / "run.toml")).data.sources[1].path == str(folder / "more")
    written = ["--data.sources", str(config.data.sources[0]), "a,b=c.jsonl"]
    assert load_config("run.toml", written).data.sources == (config.data.sources[0], DataSource("a,b=c.jsonl"))


@pytest.mark.slow
def test_shares_that_were_drawn_and_the_same_bits_after_a_restart(folder, dualpipe):
    options = ["--optimizer.schedule", "constant", "--train.eval_interval", "0"]
    for out, steps in (("straight", "6"), ("halves", "3"), ("halves", "6")):
        saved = ["--checkpoint.interval", "1"] if out == "halves" else []
        done = dualpipe(folder, "train", "run.toml", "--output.dir", out, "--train.steps", steps, *options, *saved)
        assert done.returncode == 0, done.stderr
        assert "WARNING" not in done.stdout
    assert "sources, by their share of the tokens:\n   75.00%  text: " in done.stdout
    assert "\n   25.00%  more: " in done.stdout
    straight, halves = rows_of(folder, "straight"), rows_of(folder, "halves")
    keys = ("loss", "grad_norm", "source_shares")
    assert [[row[key] for key in keys] for row in straight] == [[row[key] for key in keys] for row in halves]
    assert all(sum(row["source_shares"]) == pytest.approx(1) for row in straight)
    assert straight[-1]["source_shares"][0] == pytest.approx(0.75, abs=0.15), "of 48 sequences"
    assert straight[-1]["eval_loss"] == halves[-1]["eval_loss"] > 0


@pytest.mark.slow
def test_batches_do_not_depend_on_the_layout(folder, dualpipe):
    losses = []
    for out, layout in (("pp", []), ("dp", ["--parallel.pp", "1", "--parallel.dp", "2", "--train.num_chunks", "2"])):
        done = dualpipe(folder, "train", "run.toml", "--output.dir", out, *layout)
        assert done.returncode == 0, done.stderr
        losses.append([value for row in rows_of(folder, out) for value in (row["loss"], row.get("eval_loss", 0))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_weights_that_change(folder, capsys):
    run = ["train", "run.toml", "--parallel.pp", "1", "--checkpoint.interval", "1", "--train.eval_batches", "0"]
    assert cli.main([*run, "--train.steps", "2"]) == 0
    capsys.readouterr()
    changed = ["--data.sources", "text,weight=1", "more,weight=1e6"]
    assert cli.main([*run, "--train.steps", "12", *changed]) == 0
    said = capsys.readouterr().out
    assert "from step 3 on: 1, 1e+06 (before: 3, 1)\n" in said
    rows = rows_of(folder)
    drawn = [[round(share * 8 * row["step"]) for share in row["source_shares"]] for row in rows]
    assert drawn[-1][0] - drawn[1][0] <= 1, "nearly all that was read since is of the second"
    assert cli.main([*run, "--train.steps", "13", *changed]) == 0
    assert "new weights" not in capsys.readouterr().out
    assert cli.main([*run, "--train.steps", "14", "--data.sources", "more", "text"]) == 2
    assert "the loader's state is of another run: data [" in capsys.readouterr().err


@pytest.mark.slow
def test_text_and_packed_conversations_of_one_tokenizer(folder, capsys):
    save_chat_tokenizer(folder / "tokenizer")
    write_chats(folder / "chats.jsonl", random_chats(40))
    pack = ["data", "pack", "--tokenizer", "tokenizer"]
    assert cli.main([*pack, "chats.jsonl", "--chat", "--out", "chats"]) == 0
    assert cli.main([*pack, "text", "--end-of-document", "<|endoftext|>", "--out", "packed"]) == 0
    model = json.loads((folder / "config.json").read_text()) | {"vocab_size": 266}
    (folder / "wide.json").write_text(json.dumps(model))
    run = ["train", "run.toml", "--parallel.pp", "1", "--model.config", "wide.json"]
    run += ["--data.separate_documents", "True", "--train.sequence_length", "64", "--train.steps", "2"]
    assert cli.main([*run, "--data.sources", "packed", "chats"]) == 0
    rows = rows_of(folder)
    assert all(0 < row["counted_tokens"] < 8 * 64 for row in rows) and rows[-1]["eval_loss"] > 0
    own = {}
    capsys.readouterr()
    for name in ("packed", "chats"):
        evaluated = [*run, "--data.validation_path", name, "--output.dir", f"on-{name}", "--optimizer.lr", "1e-12"]
        assert cli.main([*evaluated, "--data.sources", "packed", "chats"]) == 0, capsys.readouterr().err
        own[name] = rows_of(folder, f"on-{name}")[-1]["eval_loss"]
        assert cli.main([*evaluated, "--data.sources", name, "--output.dir", f"of-{name}"]) == 0
        of_both, *of_one = re.findall(r"conversations: packed whole into ([\d,]+) sequences", capsys.readouterr().out)
        assert of_one == ([of_both] if name == "chats" else []), "text has none"
        assert own[name] == pytest.approx(rows_of(folder, f"of-{name}")[-1]["eval_loss"], rel=1e-6)
    assert own["packed"] != own["chats"]
    texts = ["--data.sources", "packed", "packed", "--data.validation_path", "chats", "--output.dir", "texts"]
    assert cli.main([*run, *texts]) == 2
    assert "data.validation_path: chats holds conversations" in capsys.readouterr().err
    assert cli.main([*run, "--data.sources", "packed", "more", "--output.dir", "other"]) == 2
    assert "packed was packed with the tokenizer 'sha256:" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "text"), [
    (["--data.path", "text"], "data.path = 'text': leave it out"),
    (["--data.sources", "text,weight=0"], "'text,weight=0'"),
    (["--data.sources", "text,weight=x"], "weight = 'x'"),
    (["--data.sources", "a,wieght=3"], "unknown key 'wieght'; the nearest valid name is 'weight'"),
    (["--data.sources", ",weight=1"], "data.sources: path = ''"),
    (["--data.sources", "text", "nowhere"], "nowhere"),
])
def test_what_is_refused(folder, capsys, options, text):
    assert cli.main(["train", "run.toml", "--parallel.pp", "1", *options]) == 2
    assert text in capsys.readouterr().err
