"""Benchmarks and examples as commands of their own."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ranks import server

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def run_script(
    script: str | Path, *arguments: str, launcher: Sequence[str] = (), folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, as a path or the name of a benchmark's file, to its end, in an interpreter of its own.

    launcher: what stands between the interpreter and the script, such as `TORCHRUN`: two ranks. folder: the working
    directory.
    """
    command = [sys.executable, *launcher, str(BENCHMARKS / script), *arguments]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"} | environment
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)


def fork_script(
    script: str | Path, *arguments: str, folder: Path | None = None, timeout: float = 280.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as `run_script` does, forked from a server that has imported everything: seconds of CPU less.

    folder: the working directory. Raises `subprocess.TimeoutExpired`, and kills the script, after `timeout` seconds.
    """
    path = str(BENCHMARKS / script)
    env = dict(os.environ) | environment
    with tempfile.TemporaryDirectory() as written:
        streams = [Path(written, name) for name in ("stdout", "stderr")]
        process = server().Process(target=_run_script, args=(path, arguments, env, str(folder or written), streams))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(path, timeout, *(stream.read_bytes() for stream in streams))
        out, err = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess([path, *arguments], process.exitcode, out, err)


def _run_script(
    path: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str, streams: Sequence[Path]
) -> NoReturn:
    """Run the script in this process as a new interpreter would, and leave with its status."""
    import torch

    for number, stream in enumerate(streams, 1):
        with open(stream, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    torch.set_num_threads(1)
    # The processes that a script starts are forked from it, instead of importing everything again.
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: context
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
