"""The example for users runs as its docstring says, and finds its own gradients right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "wrap_your_model.py"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_wrap_your_model(ranks, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), EXAMPLE]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    # Ranks share a pipe, so one's line may go on behind another's number.
    errors = [float(x) for x in re.findall(r"largest relative error ([\d.]+(?:e[-+]\d+)?)", done.stdout)]
    assert len(errors) == 2 * ranks and max(errors) < 1e-10


def test_without_torchrun_it_says_how_to_run_it(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "run me with: torchrun" in done.stderr
