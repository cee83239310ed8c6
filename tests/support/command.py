"""The `dualpipe` command as processes, without the seconds that each of its interpreters takes to start.

The launcher is forked from a server that has imported everything (see ranks.py), and forks its ranks where it would
start interpreters. All else is what the command does: environment, streams, signals, exit statuses. How real
interpreters start is for the tests that give a `command` of their own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from default_signals import set_default_signals
from ranks import server

COMMAND = (sys.executable, "-m", "dualpipe")  # in an interpreter of its own


class Command:
    """A running `dualpipe *arguments`: the part of `subprocess.Popen` that tests use, with text streams."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], environment: Mapping[str, str], before: str = ""
    ) -> None:
        """before: Python for the launcher and each rank to run first."""
        pipes = [server().Pipe(duplex=False) for _ in range(2)]
        self._process = server().Process(
            target=_launch,
            args=(str(folder), list(map(str, arguments)), dict(environment), before, *(w for _, w in pipes)),
        )
        self._process.start()
        self.pid = self._process.pid
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired` where it does not end in `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("dualpipe", timeout)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL to the launcher alone."""
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(stdout, stderr), once all processes that write to them have ended."""
        texts = ["", ""]

        def read(i: int, stream) -> None:
            texts[i] = stream.read()

        deadline = None if timeout is None else time.monotonic() + timeout
        streams = enumerate((self.stdout, self.stderr))
        readers = [threading.Thread(target=read, args=stream, daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("dualpipe", timeout)
        self.wait(timeout)
        return texts[0], texts[1]


class _Rank:
    """A forked rank: what `start` uses of `subprocess.Popen`."""

    def __init__(self, before: str, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        """pass_fds: what of the launcher's is open in a rank; a fork has all that is open, which is no more."""
        assert list(command[:4]) == [sys.executable, "-P", "-m", "dualpipe"], command
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(command[4:], env, before)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("dualpipe", timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _launch(folder: str, arguments: list[str], environment: dict[str, str], before: str, out, err) -> NoReturn:
    from dualpipe.train.launch import start

    start.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": partial(_Rank, before)})
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    _run(arguments, environment, before)


def _run(arguments: Sequence[str], environment: Mapping[str, str], before: str) -> NoReturn:
    """Run the command in this process as a new interpreter would, and leave with its status."""
    import numpy as np
    import torch

    from dualpipe import cli

    try:
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))
        set_default_signals()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        for seed in (random.seed, np.random.seed, torch.seed):  # as different in each as in an interpreter of its own
            seed()
        exec(before, {})
        status = cli.main(arguments)
    except SystemExit as left:
        status = left.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
