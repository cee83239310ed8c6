"""Faults that are planted into a run on purpose, to see what it does then: `dualpipe train --faults TEXT CONFIG`.

    "kill rank=2 step=7 action=B; delay rank=0 step=3 action=F seconds=2"

A fault happens on one rank, once, when that begins what is named: the first entry of its recorder that matches. Where
the job is started again, after a failure, none happens any more. Training knows nothing of this: the recorder that it
has anyway is another one.
"""

from __future__ import annotations

import errno
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from dualpipe.errors import nearest, raise_for
from dualpipe.nn.deferral import local
from dualpipe.pipeline.p2p import Link
from dualpipe.recorder import Entry, Recorder
from dualpipe.train.launch import starts_before

KINDS = {
    "kill": "the process is gone at once, by SIGKILL",
    "stop": "it is stopped, as by a debugger",
    "delay": "it does nothing for so many `seconds`",
    "raise": "an error is raised",
    "nan": "a result of F, B, I or segment gets a NaN, at other moments a parameter",
    "bitflip": "one bit of a parameter of this rank changes",
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
    """What a planted "raise" raises."""


@dataclass(frozen=True)
class Fault:
    """One fault, and when it happens."""

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
        """Whether it happens where this begins. A pair of computations, such as "FB", is both."""
        is_action = self.action in ("", kind) or (set(kind) <= set("FBIW") and self.action in kind)
        return is_action and self.step in (0, step) and self.what in str(what)

    def __str__(self) -> str:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)[1:5]]
        return " ".join([self.kind, *(f"{name}={value}" for name, value in given if value or name == "rank")])


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a text, which a semicolon separates. Raises ValueError, which lists what there is, for another."""
    return tuple(_fault(part.strip()) for part in text.split(";") if part.strip())


def _fault(text: str) -> Fault:
    try:
        kind, *given = shlex.split(text)
    except ValueError:
        raise ValueError(f"--faults: {text!r}: a quotation is not closed before the fault ends; close it") from None
    values, problems = {"action": _DEFAULTS.get(kind, "")}, []
    if kind not in KINDS:
        problems.append(f"{kind!r} is no kind of fault{_meant(kind, KINDS)}; there are {', '.join(KINDS)}")
    types: dict[str, Callable[[str], str | float]] = {
        "rank": int, "step": int, "action": str, "what": str, "seconds": float,
    }
    for name, sign, value in (each.partition("=") for each in given):
        try:
            values[name] = found = types[name](value)  # type: ignore[assignment]
            if not isinstance(found, str) and not 0 <= found < math.inf:
                raise ValueError
        except KeyError:
            problems.append(f"{name + sign + value!r} is no NAME=VALUE{_meant(name, types)} with one of the names "
                            f"{', '.join(types)}")
        except ValueError:
            problems.append(f"{name} = {value!r} must be a number, 0 or more")
    action = values["action"]
    if action not in ("", *ACTIONS):
        problems.append(f"action = {action!r} never begins{_meant(action, ACTIONS)}; there are {', '.join(ACTIONS)}")
    elif action != _DEFAULTS.get(kind, action):
        problems.append(f"action = {action!r}: a {kind} happens at {_DEFAULTS[kind]!r} alone; leave it out")
    if "rank" not in values:
        problems.append("rank=N is missing, the global number of the rank on which it happens")
    raise_for(f"--faults: {text!r}:", problems)
    return Fault(kind, **values)  # type: ignore[arg-type]


def _meant(name: str, known: Iterable[str]) -> str:
    found = nearest(name, list(known))
    return f" (did you mean {found[0]}?)" if found else ""


def recorder_of(rank: int, world_size: int, faults: Sequence[Fault]) -> Recorder:
    """The recorder of a rank, on which those of the faults happen that are its own; in the first start of a job, none
    after a restart. Raises ValueError, on every rank, for one on a rank that the job lacks."""
    raise_for("--faults:", [f"{fault}: the job has ranks 0 to {world_size - 1}; give one of them" for fault in faults
                            if not 0 <= fault.rank < world_size])
    mine = [fault for fault in faults if fault.rank == rank and not starts_before()]
    return FaultyRecorder(rank, faults=mine) if mine else Recorder(rank)


class FaultyRecorder(Recorder):
    """A recorder on which faults happen. Of the tensors that it sees, those made as "parameters" are the rank's."""

    def __init__(
        self, rank: int = 0, sizes: Mapping[str, int] | None = None, faults: Iterable[Fault] = ()
    ) -> None:
        super().__init__(rank, sizes)
        self._faults = list(faults)
        self._parameters: tuple[Tensor, ...] = ()
        self._awaited: Fault | None = None  # what happens with the next result
        self._until_end = ExitStack()

    def report(self) -> None:
        """Say, once all is done, which faults have not happened, as nothing that matches them has begun."""
        for fault in self._faults:
            if not fault.again and fault.kind != "slow_disk":
                print(f"planted, but has not happened: {fault}", flush=True)

    def lane(self, name: str) -> Self:
        """As of a recorder; what happens there does not happen here again."""
        lane: Self = super().lane(name)  # type: ignore[assignment]
        lane._faults, lane._parameters = self._faults, self._parameters
        return lane

    def begin(self, kind: str, what: object = "", ranks: Sequence[int] = (), nbytes: int = 0) -> Entry:
        """As of a recorder. What is raised is so before the entry is there, the rest happens inside of it."""
        found = [fault for fault in self._faults if fault.matches(kind, what, self.step)]
        for fault in found:
            if fault.kind != "slow_disk":
                self._faults.remove(fault)
            if fault.kind == "nan" and fault.action in _RESULTS and not fault.again:
                self._faults.append(replace(fault, step=self.step, what=str(what), again=True))
            print(f"planted: {fault}", flush=True)
            if fault.kind == "raise" and fault.action not in _RESULTS:
                raise PlantedFault(f"{fault}: planted by --faults")
            if fault.kind == "full_disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(what))
        entry = super().begin(kind, what, ranks, nbytes)
        for fault in found:
            self._happen(fault)
        return entry

    def end(self) -> None:
        """As of a recorder."""
        super().end()
        self._until_end.close()

    def made(self, what: object, *results: object) -> None:
        """Put a NaN into the first number of what was just made, or fail to make it, where that was planted."""
        tensors = tuple(each for each in results if isinstance(each, Tensor))
        if what == "parameters":
            self._parameters = tensors
        fault, found = self._awaited, [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if fault is not None and found and fault.action in ("segment", getattr(what, "kind", None)):
            self._awaited = None
            if fault.kind == "raise":
                raise PlantedFault(f"{fault}: planted by --faults")
            _change(found[0].data, flip=False)  # `data`: unseen by autograd

    def _happen(self, fault: Fault) -> None:
        if fault.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        elif fault.kind in ("delay", "slow_disk"):
            time.sleep(fault.seconds)
        elif fault.action in _RESULTS and fault.kind in ("nan", "raise"):
            self._awaited = fault
        elif fault.kind in ("nan", "bitflip"):
            # A vector, as of a norm: all of it is used in every step, which a row of an embedding may not be.
            parts = [part for each in self._parameters if (part := local(each.detach())).numel()]
            _change(min(parts, key=Tensor.dim), flip=fault.kind == "bitflip")
        elif fault.kind == "lost_message":
            self._until_end.enter_context(_messages_lost())


def _change(tensor: Tensor, *, flip: bool) -> None:
    """Make the first number a NaN, or change a bit of it that leaves it finite."""
    first = (0,) * tensor.dim()
    if flip:
        size = tensor.element_size()
        tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])[first] ^= 1 << 2 * size
    else:
        tensor[first] = torch.nan


class _NeverSent:
    """The work of a message that never leaves."""

    def wait(self) -> bool:
        """Done at once."""
        return True


@contextmanager
def _messages_lost() -> Iterator[None]:
    send = Link.send
    Link.send = lambda link, tensor: _NeverSent()  # type: ignore[method-assign, assignment, return-value]
    try:
        yield
    finally:
        Link.send = send  # type: ignore[method-assign]
