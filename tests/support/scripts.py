"""Benchmarks as commands of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def run_script(
    script: str | Path, *arguments: str, launcher: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, as a path or the name of a benchmark's file, to its end.

    launcher: what stands between the interpreter and the script, such as `TORCHRUN`: two ranks.
    """
    command = [sys.executable, *launcher, str(BENCHMARKS / script), *arguments]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True)
