"""Faults planted into a training run, to test its reaction.

    "kill rank=2 step=7 action=B; delay rank=0 step=3 action=F seconds=2"

    dualpipe(folder, "train", "run.toml", before=planting(text))    the command, as processes: see command.py
    with planted(text): cli.main(["train", "run.toml"])             one rank in this process

A fault happens on one rank, once, at the begin of the first entry of its recorder that matches. No fault happens after
a restart of the job. Training knows nothing of this: the faults observe the recorder that it has anyway.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dualpipe.nn.accumulators import local
from dualpipe.pipeline.p2p import Link
from dualpipe.runtime.rank_process import restart_count
from dualpipe.runtime.recorder import Entry, Observer, Recorder
from dualpipe.train import replay, trainer

KINDS = {
    "kill": "the process is gone at once, by SIGKILL",
    "stop": "it is stopped, as by a debugger",
    "delay": "it does nothing for so many `seconds`",
    "raise": "an error is raised",
    "nan": "a result of F, B, I or segment gets a NaN, at other moments a parameter",
    "slow_disk": "every file that is written takes so many `seconds` more",
    "full_disk": "there is no space for a file",
    "lost_message": "a message to another rank never leaves",
}
ACTIONS = (
    "F", "B", "I", "W", "segment", "receive", "send", "gather", "reduce", "all_to_all", "exchange", "agree", "clip",
    "loss", "data", "optimizer", "evaluate", "save", "write", "commit", "start", "meet", "export",
)
_DEFAULTS = {"slow_disk": "write", "full_disk": "write", "lost_message": "send"}  # their actions, and no others
_RESULTS = ("F", "B", "I", "segment")


class PlantedFault(Exception):
    """Error of a planted "raise"."""


@dataclass(frozen=True)
class Fault:
    """One fault, and its trigger."""

    kind: str
    """one of `KINDS`"""
    rank: int
    """the global number of the rank"""
    step: int = 0
    """the optimizer step that is under way, from 1; 0: any, and before the first"""
    action: str = ""
    """the kind of what begins, one of `ACTIONS`; without, whatever begins first"""
    what: str = ""
    """a part of its text, such as "stage 2, micro-batch 5" or, of a start, "model\""""
    seconds: float = 1.0
    """what a delay takes, or a slow disk for each file"""
    again: bool = False
    """whether it has happened: the NaN of a result does twice, as what it comes from is run again to find it"""

    def matches(self, kind: str, what: object, step: int) -> bool:
        """Return True if the fault happens at the begin of this entry. A pair such as "FB" matches both its actions."""
        is_action = self.action in ("", kind) or (set(kind) <= set("FBIW") and self.action in kind)
        return is_action and self.step in (0, step) and self.what in str(what)

    def __str__(self) -> str:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)[1:5]]
        return " ".join([self.kind, *(f"{name}={value}" for name, value in given if value or name == "rank")])


def parse(text: str) -> tuple[Fault, ...]:
    """Parse the faults of a text, separated by semicolons."""
    return tuple(_fault(part) for part in text.split(";"))


def _fault(text: str) -> Fault:
    kind, *given = shlex.split(text)
    assert kind in KINDS, f"{kind!r} is no kind of fault; there are {', '.join(KINDS)}"
    values: dict[str, Any] = dict(each.split("=", 1) for each in given)
    action = values.setdefault("action", _DEFAULTS.get(kind, ""))
    assert action in ("", *ACTIONS), f"action = {action!r} never begins; there are {', '.join(ACTIONS)}"
    assert action == _DEFAULTS.get(kind, action), f"a {kind} happens at {_DEFAULTS[kind]!r} alone"
    for name, number in (("rank", int), ("step", int), ("seconds", float)):
        if name in values:
            values[name] = number(values[name])
    return Fault(kind, **values)


def planting(text: str) -> str:
    """Return Python code that plants these faults into the ranks of a command, for its `before`."""
    return f"import faults\nfaults.plant({text!r})\n"


def plant(text: str) -> None:
    """Plant faults into the runs and replays of this process, as long as it lives."""
    trainer.Recorder = replay.Recorder = recorder_with(text)


@contextmanager
def planted(text: str) -> Iterator[None]:
    """Plant faults into the runs of this process."""
    with mock.patch.object(trainer, "Recorder", recorder_with(text)):
        yield


class FaultInjector(Observer):
    """Triggers faults on the recorder that it observes.

    Among the tensors it sees, those made as "parameters" are the rank's.
    """

    lanes = True  # what happens there does not happen here again

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = list(faults)
        self._found: dict[Recorder, list[Fault]] = {}  # faults of the entry that begins
        self._parameters: tuple[Tensor, ...] = ()
        self._awaited: Fault | None = None  # the fault of the next result
        self._losing: Entry | None = None  # the entry in which messages are lost
        self._until_end = ExitStack()

    def before(self, recorder: Recorder, kind: str, what: object) -> None:
        """Raise a fault planted as an error; other faults happen inside of the entry."""
        found = [fault for fault in self._faults if fault.matches(kind, what, recorder.step)]
        self._found[recorder] = found
        for fault in found:
            if fault.kind != "slow_disk":
                self._faults.remove(fault)
            if fault.kind == "nan" and fault.action in _RESULTS and not fault.again:
                self._faults.append(replace(fault, step=recorder.step, what=str(what), again=True))
            print(f"planted: {fault}", flush=True)
            if fault.kind == "raise" and fault.action not in _RESULTS:
                raise PlantedFault(f"{fault}: planted")
            if fault.kind == "full_disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(what))

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Trigger the faults of this entry."""
        for fault in self._found.pop(recorder, ()):
            self._happen(fault, entry)

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """Stop losing messages."""
        if entry is self._losing:
            self._losing = None
            self._until_end.close()

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Put a NaN into the first number of a new result, or fail to make it, if that is planted."""
        tensors = tuple(each for each in results if isinstance(each, Tensor))
        if what == "parameters":
            self._parameters = tensors
        fault, found = self._awaited, [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if fault is not None and found and fault.action in ("segment", getattr(what, "kind", None)):
            self._awaited = None
            if fault.kind == "raise":
                raise PlantedFault(f"{fault}: planted")
            _spoil(found[0].data)  # `data`: unseen by autograd

    def _happen(self, fault: Fault, entry: Entry) -> None:
        if fault.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        elif fault.kind in ("delay", "slow_disk"):
            time.sleep(fault.seconds)
        elif fault.action in _RESULTS and fault.kind in ("nan", "raise"):
            self._awaited = fault
        elif fault.kind == "nan":
            # A vector, such as a norm's: every step uses all of it, while a row of an embedding may be unused.
            parts = [part for each in self._parameters if (part := local(each.detach())).numel()]
            _spoil(min(parts, key=Tensor.dim))
        elif fault.kind == "lost_message":
            self._losing = entry
            self._until_end.enter_context(_messages_lost())


def recorder_with(text: str) -> Callable[[int], Recorder]:
    """Return a factory of rank recorders that trigger that rank's faults in the first start of a job."""
    faults = parse(text)

    def make(rank: int = 0) -> Recorder:
        recorder = Recorder(rank)
        recorder.subscribe(FaultInjector(fault for fault in faults if fault.rank == rank and not restart_count()))
        return recorder

    return make


def _spoil(tensor: Tensor) -> None:
    """Make the first number a NaN."""
    tensor[(0,) * tensor.dim()] = torch.nan


class _NeverSent:
    """The work of a message that never leaves."""

    def wait(self) -> bool:
        """Return True at once."""
        return True


@contextmanager
def _messages_lost() -> Iterator[None]:
    send = Link.send
    Link.send = lambda link, tensor: _NeverSent()  # type: ignore[method-assign, assignment, return-value]
    try:
        yield
    finally:
        Link.send = send  # type: ignore[method-assign]
