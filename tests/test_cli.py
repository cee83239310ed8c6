"""The command itself: usage, mistakes in a line, and the modules that it loads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dualpipe import __version__, cli


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.stepz", "3"], "'--train.steps'"),
        (["--parallel.ep", "0"], "parallel.ep = 0"),
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
    (["trian", "run.toml"], "`dualpipe train`"),
    (["checkpoint", "verfy", "x"], "`dualpipe checkpoint verify`"),
    (["verify", "x"], "`dualpipe checkpoint verify`"),
    (["nonsense"], "`dualpipe` alone"),
])
def test_the_nearest_command_is_proposed(arguments, hint, capsys):
    assert cli.main(arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "missing"), [
    (["train"], "required: CONFIG\n"), (["parity"], "required: CONFIG\n"), (["data", "pack", "x"], "--out"),
])
def test_usage_errors(arguments, missing, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "usage: dualpipe" in err and missing in err


def python(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_itself_does_not_import_torch(tmp_path):
    code = "import sys; from dualpipe import cli; cli._parser(); print('torch' in sys.modules)"
    assert python(code, tmp_path) == "False\n"


def test_python_m_from_the_root_does_not_shadow_kernels():
    """transformers imports the Hugging Face package `kernels`, whose name the folder has too."""
    code = """
import importlib.util, runpy, sys
sys.argv = ["dualpipe", "--version"]
assert importlib.util.find_spec("kernels").origin.startswith(sys.path[0] or __import__("os").getcwd())
try:
    runpy.run_module("dualpipe", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
spec = importlib.util.find_spec("kernels")
print(spec is None or "site-packages" in spec.origin)
"""
    assert python(code, Path(cli.__file__).parents[1]).splitlines()[-1] == "True"
