"""The start-up time is reported by phase."""

import re

import pytest

RUN = ("train", "run.toml", "--train.eval_batches", "1", "--train.eval_interval", "0")


SLOW_TO_LOAD = """
import time
from dualpipe.train import saver
real = vars(saver).setdefault("real_load", saver.load)
def load(*arguments, **options):
    time.sleep(0.7)
    return real(*arguments, **options)
saver.load = load
"""


@pytest.mark.slow
def test_a_start_is_reported_by_its_parts(run_folder, dualpipe):
    command = (*RUN, "--output.dir", "started", "--checkpoint.interval", "4")
    for resumed in (False, True):
        process = dualpipe(run_folder, *command, "--train.steps", "8" if resumed else "4", before=SLOW_TO_LOAD)
        lines = [line for line in process.stdout.splitlines() if line.startswith("first step ")]
        assert process.returncode == 0 and len(lines) == 1, process.stdout
        total, parts = re.fullmatch(r"first step ([\d.]+) s after the start: (.*)", lines[0]).groups()
        parts = {name: float(seconds) for name, seconds in (part.rsplit(" ", 1) for part in parts.split(", "))}
        assert list(parts) == ["imports", "rendezvous", "model", "data", "checkpoint", "step"]
        assert sum(parts.values()) == pytest.approx(float(total), abs=0.5)
        assert (parts["checkpoint"] >= 0.7) is resumed
        assert process.stdout.index(lines[0]) < process.stdout.index(f"step {6 if resumed else 2}/")
