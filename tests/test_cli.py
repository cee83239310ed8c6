"""The command itself: usage, mistakes in a line, and what it loads."""

import os
import re
import subprocess
import sys

import pytest

from dualpipe import __version__, cli


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.stepz", "3"], "error: unknown option '--train.stepz'; the nearest valid name is '--train.steps'"),
        (["--parallel.ep", "0"], "error: parallel.ep = 0: must be at least 1"),
        (["--optimizer.lr", "inf"], "error: optimizer.lr = inf: must be finite"),
    ],
)
def test_bad_options(run_toml, capsys, options, message):
    assert cli.main(["train", str(run_toml), *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_missing_config(capsys):
    assert cli.main(["train", "none.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read the config none.toml")


def test_a_command_whose_reader_has_gone_ends_without_a_word(run_toml, capsys, monkeypatch):
    for command in (["memory", str(run_toml)], ["schedule", "--ranks", "2", "--microbatches", "4"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stdout:
            monkeypatch.setattr("sys.stdout", stdout)
            assert cli.main(command) == 1
            stdout.flush()  # as the interpreter does at its end
        assert capsys.readouterr().err == ""


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"dualpipe {__version__}\n"


@pytest.mark.parametrize(("arguments", "commands"), [
    ([], ["train", "parity", "checkpoint", "doctor"]), (["data"], ["pack", "show"]), (["hf"], ["check", "import"]),
])
def test_the_command_alone_prints_its_commands(arguments, commands, capsys):
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\s", out, re.M) for command in commands)


@pytest.mark.parametrize(("arguments", "hint"), [
    (["trian", "run.toml"], "'trian'; did you mean `dualpipe train`?"),
    (["chekpoint", "ls"], "'chekpoint'; did you mean `dualpipe checkpoint`?"),
    (["checkpoint", "verfy", "x"], "'checkpoint verfy'; did you mean `dualpipe checkpoint verify`?"),
    (["verify", "x"], "'verify'; did you mean `dualpipe checkpoint verify`?"),
    (["shedule", "--ranks", "2"], "'shedule'; did you mean `dualpipe schedule`?"),
    (["nonsense"], "'nonsense'; `dualpipe` alone lists all"),
])
def test_the_nearest_command_is_proposed(arguments, hint, capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"error: there is no command {hint}\n"


@pytest.mark.parametrize("arguments", [["train"], ["data", "pack", "x"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: dualpipe" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "parity"])
def test_only_the_config_is_required(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command])
    assert "required: CONFIG\n" in capsys.readouterr().err


def python(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_itself_does_not_import_torch(tmp_path):
    code = "import sys; from dualpipe import cli; cli._parser(); print('torch' in sys.modules)"
    assert python(code, tmp_path) == "False\n"
