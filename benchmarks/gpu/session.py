"""Run parts one after the other, each in its own process that ends at its share of the remaining time.

    Session.run -> a part that the JSON does not have yet -> its share of the time -> a process: gpu_session.py --part
      -> messages, one a line, through a pipe -> report.add, which writes the file -> its end, crash, or kill -> next

Later parts share the time that a part leaves unused. A part that hangs is killed with all processes that it started.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dualpipe.runtime.errors import die_with
from gpu.report import ENDED, Row, SessionReport

LEAST = 5.0  # seconds: a part whose share is less waits for the next call
SOFT = 0.85  # of a part's share: after it a part starts no further setting
SHOWN = 8  # lines of a failed part's log
PROGRAM = Path(__file__).parents[1] / "gpu_session.py"


@dataclass(frozen=True)
class Part:
    """One part of a session, which answers one question.

    run: "module:function" of a function that takes an `Output`; weight: relative share of the time.
    """

    name: str
    question: str
    run: str
    weight: float


class Output:
    """Output channel of a part: sends its rows, failures, skips and verdicts.

    dry: use tiny sizes; left: the seconds in which a further setting may start.
    """

    def __init__(self, send: Callable[[Row], None], *, dry: bool, seconds: float) -> None:
        self.dry = dry
        self.seconds = seconds
        self._send = send
        self._end = time.monotonic() + SOFT * seconds

    def row(self, **fields: Any) -> None:
        self._send({"row": fields})

    def failure(self, **fields: Any) -> None:
        self._send({"failure": fields})

    def skip(self, **fields: Any) -> None:
        self._send({"skip": fields})

    def goal(self, text: str, measured: int, missed: int) -> None:
        """Send how many rows a goal applies to, and how many miss it; a later verdict replaces an earlier one."""
        self._send({"goal": text, "measured": measured, "missed": missed})

    @property
    def left(self) -> float:
        """Remaining seconds in which a further setting may start."""
        return self._end - time.monotonic()


class Session:
    """A run of parts within `seconds`, with their results in a report. arguments: for every part's process."""

    def __init__(self, report: SessionReport, seconds: float, arguments: Sequence[str] = ()) -> None:
        self._report = report
        self._end = time.monotonic() + seconds
        self._arguments = arguments

    def run(self, parts: Sequence[Part]) -> None:
        """Run the parts that the report does not have yet, as far as the time allows."""
        to_run = [part for part in parts if part.name not in self._report.parts]
        for position, part in enumerate(to_run):
            weights = sum(other.weight for other in to_run[position:])
            share = (self._end - time.monotonic()) * part.weight / weights
            if share < LEAST:
                return
            self._run_part(part, share)

    def _run_part(self, part: Part, seconds: float) -> None:
        print(f"== {part.name}: {part.question} (at most {seconds:.0f} s)", flush=True)
        self._report.begin(part.name, part.question, seconds)
        start = time.monotonic()
        log = self._report.path.with_name(f"{part.name}.log")
        status = self._follow(part, start + seconds, log)
        self._report.end(part.name, status, time.monotonic() - start)
        if status != ENDED:
            tail = log.read_text(errors="replace").splitlines()[-SHOWN:]
            print("\n".join([f"   {status}; the end of {log}:", *(f"   | {line}" for line in tail)]), flush=True)

    def _follow(self, part: Part, deadline: float, log: Path) -> str:
        """Run the part's process, book all its messages, and return how it ended."""
        read, write = os.pipe()
        seconds = deadline - time.monotonic()
        command = [sys.executable, "-P", str(PROGRAM), "--part", part.run, "--pipe", str(write),
                   "--seconds", f"{seconds:.1f}", *self._arguments]
        with open(log, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, pass_fds=[write], start_new_session=True)
        os.close(write)
        try:
            for message in _messages(read, process, deadline):
                self._report.add(part.name, message)
            if process.poll() is None:
                return f"killed at its share of {seconds:.0f} s"
            if process.returncode:
                return f"its process ended with status {process.returncode}"
            return ENDED
        finally:
            os.close(read)
            _kill_group(process)


def _messages(pipe: int, process: subprocess.Popen, deadline: float) -> Iterator[Row]:
    """Yield the messages of the pipe until the process has ended or the time is over.

    It does not wait for the end of the pipe, which a process that the part has left behind may keep open.
    """
    buffered = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            has_ended = process.poll() is not None  # before the last look at the pipe
            readable = selector.select(timeout=0 if has_ended else 0.1)
            received = os.read(pipe, 2**16) if readable else b""
            *lines, buffered = (buffered + received).split(b"\n")
            yield from map(json.loads, lines)
            if not received and (has_ended or time.monotonic() > deadline):
                return
            if not received and readable:  # the pipe has ended, the process not yet
                time.sleep(0.05)
            if time.monotonic() > deadline:
                return


def _kill_group(process: subprocess.Popen) -> None:
    """Kill the remains of a part: its process, and the processes that it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_in_process(run: str, pipe: int, *, dry: bool, seconds: float) -> None:
    """Run a part in this process, which ends with the session's process, and send its messages to the pipe."""
    die_with(os.getppid())

    def send(message: Row) -> None:
        os.write(pipe, json.dumps(message, default=str).encode() + b"\n")

    module, _, function = run.partition(":")
    getattr(import_module(module), function)(Output(send, dry=dry, seconds=seconds))
