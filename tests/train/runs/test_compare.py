"""`dualpipe compare`: two runs as a table, their settings that differ, and a picture."""

import json
import re

import pytest

from dualpipe.train.runs.compare import compare
from dualpipe.train.runs.run_file import Start, record_start


def write_run(folder, rows, settings=None, step=0):
    """Write what a run leaves: rows of (step, values)."""
    folder.mkdir()
    lines = [json.dumps({"step": number, **values}) + "\n" for number, values in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if settings is not None:
        record_start(folder, Start(step, "", {"torch": "2.13.0"}, settings))
    return folder


def values(loss, speed, **others):
    return {"loss": loss, "tokens_per_second": speed, "memory_bytes": 2**30, "grad_norm": 1.0, **others}


def table(lines):
    """The rows of the table by name: values of both runs, and the change."""
    rows = [re.split(r"  +", line.strip()) for line in lines[0].splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def test_the_table(tmp_path):
    slow = [(step, values(4 - step / 100, 1.0 if step < 3 else 100.0)) for step in range(1, 41)]
    fast = [(step, values(4 - step / 50, 9e9 if step < 3 else 150.0)) for step in range(1, 21)]
    slow[19][1]["eval_loss"] = 3.9
    fast[9][1].update(eval_loss=3.5, memory_bytes=3 * 2**29)
    settings = {"run": {"train": {"dtype": "fp32", "steps": 40}, "output": {"dir": "a"}}, "model": {"layers": 2}}
    others = {"run": {"train": {"dtype": "bf16", "steps": 40}, "output": {"dir": "b"}}, "model": {"layers": 2}}
    first = write_run(tmp_path / "first", slow, settings)
    lines = list(compare(first, write_run(tmp_path / "second", fast, others)))
    assert lines[0].splitlines()[0].split() == ["first", "second", "change"]
    rows = table(lines)
    assert rows["steps"] == ["40", "20"]
    assert rows["loss at step 20"] == ["3.8000", "3.6000", "-5.3%"]
    assert rows["mean loss of the last 2"] == ["3.8050", "3.6100", "-5.1%"]
    assert rows["lowest validation loss"] == ["3.9000", "3.5000", "-10.3%"]
    assert rows["tokens/s (median)"] == ["100", "150", "+50.0%"]
    assert rows["memory (most)"] == ["1 GiB", "1.5 GiB", "+50.0%"]
    assert rows["MFU (median)"] == ["-", "-"]
    assert lines[1] == "losses, gradient norm and expert load are compared at steps 1 to 20, which both have"
    assert lines[2] == "settings that differ:"
    assert [line.split() for line in lines[3].splitlines()] == [
        ["first", "second"], ["train.dtype", "'fp32'", "'bf16'"]]


def test_the_speed_of_a_resumed_run_is_that_after_its_last_start(tmp_path):
    rows = [(step, values(1.0, 10.0 if step <= 6 else 50.0)) for step in range(1, 11)]
    first = write_run(tmp_path / "first", rows, {}, step=4)
    second = write_run(tmp_path / "second", rows[:1], {})  # shorter than the warm-up: all there is
    assert table(list(compare(first, second)))["tokens/s (median)"] == ["50", "10", "-80.0%"]


def test_training_is_compared_over_the_steps_that_both_have(tmp_path):
    def row(step, eval_loss):
        return step, values(1.0, 1.0, grad_norm=float(step), load_max_over_mean=10.0 - step, eval_loss=eval_loss)

    long = write_run(tmp_path / "long", [row(step, 5.0 - step) for step in range(1, 5)], {}, step=3)
    rows = table(list(compare(long, write_run(tmp_path / "short", [row(1, 4.0), row(2, 3.5)], {}))))
    assert rows["gradient norm (median)"] == ["1.5", "1.5", "+0.0%"]
    assert rows["largest expert load over the mean"] == ["8.5", "8.5", "+0.0%"]
    assert rows["lowest validation loss"] == ["3.0000", "3.5000", "+16.7%"]


def test_steps_that_were_trained_with_other_settings_are_named(tmp_path):
    def start(step, steps, lr):
        return Start(step, "", {"torch": "2.13.0"}, {"run": {"train": {"steps": steps}, "optimizer": {"lr": lr}}})

    rows = [(step, values(1.0, 1.0)) for step in range(1, 7)]
    straight = write_run(tmp_path / "straight", rows)
    record_start(straight, start(0, 6, 0.1))
    halves = write_run(tmp_path / "halves", rows)
    # The start at step 5 was replaced from step 4 on, and the last one had nothing left to train.
    for entry in (start(0, 3, 0.1), start(3, 3, 0.2), start(5, 9, 0.9), start(4, 6, 0.1), start(6, 8, 0.3)):
        record_start(halves, entry)
    expected = ["the last starts of the runs have the same settings and versions",
                "halves trained steps 1 to 3 with train.steps = 3",
                "halves trained step 4 with optimizer.lr = 0.2, train.steps = 3"]
    assert list(compare(straight, halves))[1:] == expected
    record_start(straight, start(0, 6, 0.4))
    assert list(compare(straight, halves))[1] == "settings that differ:"
    assert list(compare(straight, halves))[3:] == expected[1:]


def test_runs_without_a_step_in_common_without_settings_and_with_a_loss_that_is_not_finite(tmp_path):
    first = write_run(tmp_path / "first", [(1, values(None, 1.0))])
    second = write_run(tmp_path / "second", [(2, values(1.0, 1.0))], {})
    lines = list(compare(first, second / "metrics.jsonl"))
    assert lines[1:] == ["the runs have no step in common: losses at the same step cannot be compared",
                         "the settings of first are not known: there is no run.json"]
    again = list(compare(first, first))
    assert table(again)["loss at step 1"] == ["-", "-"] and again[0].split()[:2] == ["A", "B"]


def test_names_begin_where_the_paths_differ(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "run", [(1, values(1.0, 1.0))], {})
    lines = list(compare(tmp_path / "one" / "run", tmp_path / "two" / "run"))
    assert lines[0].split()[:2] == ["one/run", "two/run"]
    assert lines[-1] == "the runs have the same settings and versions"


def test_the_picture(tmp_path):
    run = write_run(tmp_path / "run", [(1, values(2.0, 1.0, eval_loss=1.0)), (2, values(None, 2.0))], {})
    assert list(compare(run, run, tmp_path / "both.svg"))[-1] == f"wrote {tmp_path / 'both.svg'}"
    assert "<svg" in (tmp_path / "both.svg").read_text()
    for name in ("both.txt", "none/both.png"):
        with pytest.raises(ValueError, match=r"cannot be written: .*; give a \.png, \.svg or \.pdf"):
            list(compare(run, run, tmp_path / name))


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; give output\.dir of a run"):
        list(compare(tmp_path, tmp_path))
    with pytest.raises(ValueError, match="has no step; give a run that has trained"):
        empty = write_run(tmp_path / "empty", [])
        list(compare(empty, empty))


def test_two_runs_of_the_command(run_folder, dualpipe):
    options = ("train", "run.toml", "--parallel.pp", "1", "--train.eval_batches", "0", "--checkpoint.interval", "2")
    for name, *others in (("one", "--train.steps", "3"), ("two", "--train.steps", "2", "--optimizer.lr", "1e-4")):
        assert dualpipe(run_folder, *options, "--output.dir", name, *others).returncode == 0
    done = dualpipe(run_folder, "compare", "one", "two")
    assert done.returncode == 0 and "loss at step 2" in done.stdout, done.stderr
    assert re.search(r"^  optimizer.lr +0.003 +0.0001$", done.stdout, re.M), done.stdout
    assert dualpipe(run_folder, *options, "--output.dir", "two", "--train.steps", "3").returncode == 0  # resumes
    starts = json.loads((run_folder / "two" / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 2]
    wrong = dualpipe(run_folder, "compare", "one", "three")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: three has no metrics.jsonl"), wrong.stderr
