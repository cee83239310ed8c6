"""The examples for users run as their docstrings say, and find their own gradients right."""

import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from command import Command
from ranks import run_ranks
from scripts import fork_script

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL, MOE = EXAMPLES / "wrap_your_model.py", EXAMPLES / "wrap_your_moe.py"
FINE_TUNE = EXAMPLES / "fine_tune.py"
FINE_TUNING = EXAMPLES.parent / "docs/fine-tuning.md"


def errors_by_torchrun(example, ranks, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), example]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    # Ranks share a pipe, so one's line may go on behind another's number.
    return [float(x) for x in re.findall(r"largest relative error ([\d.]+(?:e[-+]\d+)?)", done.stdout)]


def run_example(rank, example):
    return runpy.run_path(str(example))["run"](torch.device("cpu"))


@pytest.mark.parametrize(("example", "ranks"), [
    (MODEL, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((MODEL, 4), (MOE, 2), (MOE, 4))),
], ids=lambda value: getattr(value, "stem", value))
def test_finds_its_gradients_right(example, ranks):
    assert 0 < max(run_ranks(run_example, ranks, example, fresh=True)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("example", "ranks", "checks"), [(MODEL, 2, 2), (MOE, 4, 1)])
def test_by_torchrun(example, ranks, checks, tmp_path):
    errors = errors_by_torchrun(example, ranks, tmp_path)
    assert len(errors) == checks * ranks and max(errors) < 1e-10


@pytest.mark.parametrize("example", [MODEL, MOE], ids=lambda example: example.stem)
def test_without_torchrun_it_says_how_to_run_it(example, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    done = fork_script(example, folder=tmp_path)
    assert done.returncode != 0 and "run me with: torchrun" in done.stderr
    assert example.name in done.stderr


def learned(out):
    return "What colour is snow? white\nWhat colour is the sky? blue\n" in out


def run_dualpipe(folder, arguments):
    process = Command(folder, arguments, os.environ)
    _, err = process.communicate(250)
    assert process.returncode == 0, err


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory):
    """The folder in which fine_tune.py has run, with forked ranks, and its output."""
    folder = tmp_path_factory.mktemp("fine_tuned")

    def run(command, check):
        assert command[:4] == [sys.executable, "-P", "-m", "dualpipe"] and check
        run_dualpipe(folder, command[4:])

    main = runpy.run_path(str(FINE_TUNE))["main"]
    main.__globals__["subprocess"] = SimpleNamespace(run=run)
    with redirect_stdout(io.StringIO()) as out:
        main(folder / "out/fine-tune")
    return folder, out.getvalue()


@pytest.mark.slow
def test_fine_tunes_a_model_and_exports_it(fine_tuned):
    """The answers come from transformers."""
    _, out = fine_tuned
    assert learned(out)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_teach_it_other_colours(fine_tuned, monkeypatch, capsys):
    """With the commands and the code of docs/fine-tuning.md, of which the second command exports the merged model."""
    pytest.importorskip("peft", reason='needs peft: pip install "dualpipe[hf]"')
    from transformers import AutoModelForCausalLM

    folder, _ = fine_tuned
    monkeypatch.chdir(folder)
    Path("examples").mkdir()
    for file in EXAMPLES.glob("lora-tiny.*"):
        shutil.copy(file, "examples")
    text = FINE_TUNING.read_text(encoding="utf-8")
    train, merge = re.findall(r"^    dualpipe (train examples/lora-tiny.*)$", text, re.M)
    (code,) = re.findall(r"```py\n(from peft .*?)```", text, re.S)
    Path("ask.py").write_text(code)
    run_dualpipe(folder, train.split())
    capsys.readouterr()
    answer = runpy.run_path("ask.py")["answer"]
    assert capsys.readouterr().out == "white\nblack\n"
    run_dualpipe(folder, merge.split())
    assert answer(AutoModelForCausalLM.from_pretrained("out/lora-tiny/merged")) == "black"


@pytest.mark.long
@pytest.mark.slow
def test_fine_tunes_by_itself(tmp_path):
    done = subprocess.run([sys.executable, FINE_TUNE, "here"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and learned(done.stdout), done.stderr
    assert (tmp_path / "here/out/hf/chat_template.jinja").is_file()
