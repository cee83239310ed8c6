"""The part of a stage in which its forward parts from that of the same stage without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.parity_errors import difference


class Call(NamedTuple):
    """A call of a module inside of a stage. outputs: its tensors."""

    name: str
    outputs: list[Tensor]


class Suspects(NamedTuple):
    """Modules in one of which a stage's forward goes wrong, by their names in the stage; hint: a likely cause."""

    names: list[str]
    hint: str = ""


class ModuleCalls(Observer):
    """Notes the calls of a stage's modules, for each micro-batch; in a pipeline as an observer of its actions."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._calls: list[Call] = []
        self.of_microbatch: dict[int, list[Call]] = {}

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Take the calls of a forward that has run."""
        if isinstance(what, Action) and what.kind == "F":
            self.take(what.stage, what.microbatch)

    def take(self, stage: int, microbatch: int) -> None:
        """Count the calls until now as those of a micro-batch."""
        if stage == self._stage:
            self.of_microbatch[microbatch] = self._calls
            self._calls = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Note calls, and observe the current recorder, while the `with` lasts."""
        handles = [module.register_forward_hook(partial(self._note, name))
                   for name, module in self._module.named_modules() if name]
        try:
            with Recorder.current().observed_by(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        self._calls.append(Call(name, [t.detach().clone() for t in tensors if isinstance(t, Tensor)]))


def find_suspects(
    pipelined: list[Call], expected: list[Call], modules: Mapping[str, nn.Module], tolerance: float
) -> Suspects:
    """Return the modules called between the last output that is right and the first that is wrong.

    pipelined, expected: the calls of one micro-batch in the pipeline, and in the stage alone. A module whose output
    cannot be compared, as that of experts over ranks, which get other tokens, is between. modules: those of the stage
    alone, by name.

    Example: norm right, router right, experts not comparable, next norm wrong -> experts, next norm.
    """
    found: dict[str, list[Call]] = {}
    for call in pipelined:
        found.setdefault(call.name, []).append(call)
    suspects: list[str] = []
    for call in expected:
        calls = found.get(call.name)
        if not calls:
            if modules[call.name]._forward_hooks or modules[call.name]._forward_pre_hooks:
                return Suspects([call.name], f"{type(modules[call.name]).__name__} has forward hooks, and the pipeline "
                                "does not call it: its segments() must run them")
            suspects.append(call.name)
            continue
        is_right = _is_same(calls.pop(0), call, tolerance)
        if is_right:
            suspects = []
            continue
        suspects.append(call.name)
        if is_right is False:
            break
    return Suspects(suspects)


def _is_same(found: Call, expected: Call, tolerance: float) -> bool | None:
    """Return whether outputs are the same; None where they cannot be compared."""
    pairs = [pair for pair in zip(found.outputs, expected.outputs) if pair[1].is_floating_point() and pair[1].numel()]
    if not pairs or any(a.shape != b.shape for a, b in pairs):
        return None
    return all(difference("", a, b).relative <= tolerance for a, b in pairs)
