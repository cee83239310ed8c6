"""Training with nothing installed but what a plain `pip install` brings: no matplotlib and no tensorboard."""

import sys

import pytest

from command import COMMAND
from plain_install import hide_undeclared


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The environment in which the rest is hidden."""
    folder = tmp_path_factory.mktemp("plain")
    hide_undeclared(folder)
    return {"PYTHONPATH": str(folder)}


def test_what_is_not_asked_for_is_hidden(plain, tmp_path, dualpipe):
    names = ("pytest", "matplotlib", "tensorboard", "rich")
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    done = dualpipe(tmp_path, command=(sys.executable, "-c", code), environment=plain)
    assert done.stdout == "['rich']\n"


@pytest.mark.slow
def test_a_plain_install_trains_and_says_in_a_line_what_is_missing(plain, run_folder, dualpipe):
    options = ("--parallel.pp", "1", "--train.steps", "2", "--output.dir", "plain", "--export.to_hf", "plain-hf")
    done = dualpipe(run_folder, "train", "run.toml", *options, environment=plain, command=COMMAND)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert "tensorboard matplotlib" in said and "tensorboard" not in done.stderr and "matplotlib" not in done.stderr
    written = {path.name for path in (run_folder / "plain").iterdir()}
    assert {"metrics.jsonl", "schedule.svg"} <= written and not {"loss.png", "tensorboard"} & written
