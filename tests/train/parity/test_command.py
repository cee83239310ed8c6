"""`dualpipe parity --model`, as a user runs it."""

import shutil
from pathlib import Path

import pytest

import own_model
from dualpipe import cli
from hf_families import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with own_model.py, a model of transformers, and a directory without one."""
    found = tmp_path_factory.mktemp("own")
    shutil.copy(own_model.__file__, found)
    save_tiny(found / "qwen", "qwen3_moe")
    (found / "empty").mkdir()
    return found


def test_a_model_of_ones_own_passes_on_ranks_that_the_command_starts(folder, dualpipe):
    done = dualpipe(folder, "parity", "--model", "own_model:right", "--ep", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity passed: all 26 within 1e-10 relative" in done.stdout


def test_a_model_of_transformers_passes(folder, capsys):
    assert cli.main(["parity", "--model", str(folder / "qwen"), "--worst", "2"]) == 0
    out = capsys.readouterr().out
    assert "parity passed: all 48 within 1e-10 relative" in out and "model.layers." in out


@pytest.mark.parametrize("dtype", ["float64", "bf16"])
def test_dropout_is_named_and_left_out(monkeypatch, capsys, dtype):
    monkeypatch.syspath_prepend(Path(own_model.__file__).parent)
    assert cli.main(["parity", "--model", "own_model:dropout", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layers.0.dropout (Dropout) draws random numbers in training: ") and "eval mode" in out
    assert cli.main(["parity", "--model", "own_model:right", "--dtype", dtype]) == 0
    assert "eval mode" not in capsys.readouterr().out


def test_dropout_of_a_model_of_transformers_is_left_out(folder, capsys):
    config_file = folder / "qwen" / "config.json"
    config = config_file.read_text()
    config_file.write_text(config.replace('"attention_dropout": 0.0', '"attention_dropout": 0.2'))
    assert cli.main(["parity", "--model", str(folder / "qwen")]) == 0
    config_file.write_text(config)
    out = capsys.readouterr().out
    assert out.startswith("model.layers.0.self_attn (Qwen3MoeAttention) draws random numbers") and "all 48" in out


@pytest.mark.slow
def test_a_model_of_transformers_passes_with_experts_over_ranks(folder, dualpipe):
    done = dualpipe(folder, "parity", "--model", "qwen", "--pp", "2", "--ep", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_float32_and_other_tolerances(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(own_model.__file__).parent)
    assert cli.main(["parity", "--model", "own_model:right", "--dtype", "float32"]) == 0
    assert "all 25 within 1e-05 relative" in capsys.readouterr().out
    assert cli.main(["parity", "--model", "own_model:lost_microbatch"]) == 0, "one rank places nothing"


def test_bf16_passes(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(own_model.__file__).parent)
    assert cli.main(["parity", "--model", "own_model:right", "--dtype", "bf16", "--worst", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["tensor", "stage", "shape", "pipelined", "unpipelined", "accumulation"]
    assert len(lines) == 8
    assert lines[-2].startswith("routes of 4 modules replayed from float64; bfloat16 alone would have changed ")
    assert lines[-1] == "parity passed: all 25 within"


def test_bf16_fails_with_the_place(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(own_model.__file__).parent)
    assert cli.main(["parity", "--model", "own_model:wrong_cut", "--dtype", "bf16"]) == 1
    *_, verdict, place = capsys.readouterr().out.splitlines()
    assert verdict.startswith("parity FAILED: ") and "times as far from float64" in verdict
    assert place.startswith("first: norm.") and "F(stage 1, micro-batch 0), in norm" in place


@pytest.mark.slow
def test_bf16_passes_for_a_model_of_transformers_with_experts_over_ranks(folder, dualpipe):
    done = dualpipe(folder, "parity", "--model", "qwen", "--pp", "2", "--ep", "2", "--dtype", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "routes of 4 modules replayed" in done.stdout and "parity passed: all 49 within" in done.stdout


@pytest.mark.parametrize(("arguments", "error"), [
    (["own_model:no_model", "--tolerance", "1"], "error: --model 'own_model:no_model' returned a str"),
    (["own_model:right", "--dtype", "bf16", "--tolerance", "1"], "error: --tolerance 1: the bounds of bf16"),
    (["own_model:always_dropping"], "error: layers.0 (AlwaysDroppingLayer) draws random numbers also in eval mode"),
    (["own_model:right", "--pp", "0"], "error: --pp 0 must be at least 1"),
    (["own_model:right", "--cp", "2"], "error: --cp 2 is not for --model"),
    (["own_model:right", "run.toml"], "error: --model own_model:right: got run.toml as well"),
    (["own_model:right", "run.toml", "--x", "3"], "error: --model own_model:right: got run.toml --x 3 as well"),
])
def test_wrong_inputs_are_said_in_one_line(monkeypatch, capsys, arguments, error):
    monkeypatch.syspath_prepend(Path(own_model.__file__).parent)
    assert cli.main(["parity", "--model", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(error) and err.count("\n") == 1


def test_wrong_inputs_end_all_ranks(folder, dualpipe):
    done = dualpipe(folder, "parity", "--model", "empty", "--pp", "2")
    assert done.returncode == 2 and done.stderr == (
        "error: --model 'empty' has no config.json; give a directory that transformers loads a causal language model "
        "from, or module:function\n")


def test_ranks_that_do_not_divide_are_refused(folder, dualpipe):
    done = dualpipe(folder, "parity", "--model", "own_model:right", "--ep", "3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "3" in done.stderr and "expert" in done.stderr
