"""Search inside a stage for the module where its forward differs from that of the same stage without a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.parity_errors import difference


class Call(NamedTuple):
    """A call of a module inside a stage. name: of the module; outputs: the tensors that it returned."""

    name: str
    outputs: list[Tensor]


class Suspects(NamedTuple):
    """Modules of which one is wrong in a stage's forward. names: in the stage; hint: a likely cause, or ""."""

    names: list[str]
    hint: str = ""


class ModuleCalls(Observer):
    """Records the calls of a stage's modules by micro-batch; in a pipeline, as an observer of its actions."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._calls: list[Call] = []
        self.of_microbatch: dict[int, list[Call]] = {}

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Assign the calls so far to the micro-batch of a forward that has run."""
        if isinstance(what, Action) and what.kind == "F":
            self.take(what.stage, what.microbatch)

    def take(self, stage: int, microbatch: int) -> None:
        """Assign the calls so far to a micro-batch, if `stage` is the recorded one."""
        if stage == self._stage:
            self.of_microbatch[microbatch] = self._calls
            self._calls = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record calls, and observe the current recorder, during a `with` block."""
        handles = [module.register_forward_hook(partial(self._record, name))
                   for name, module in self._module.named_modules() if name]
        try:
            with Recorder.current().observed_by(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        self._calls.append(Call(name, [t.detach().clone() for t in tensors if isinstance(t, Tensor)]))


def find_suspects(
    pipelined: list[Call], expected: list[Call], modules: Mapping[str, nn.Module], tolerance: float
) -> Suspects:
    """Return the modules called after the last right output, up to the first wrong one.

    Outputs that cannot be compared, such as those of experts, which receive other tokens with expert parallelism, are
    neither right nor wrong.

    Example: norm right, router right, experts not comparable, next norm wrong -> experts, next norm.

    Args:
        pipelined: calls of a micro-batch in the pipeline.
        expected: calls of that micro-batch in the stage alone.
        modules: modules of the stage alone, by name.
        tolerance: largest relative difference of a right output.
    """
    pending: dict[str, list[Call]] = defaultdict(list)
    for call in pipelined:
        pending[call.name].append(call)
    suspects: list[str] = []
    for call in expected:
        calls = pending[call.name]
        if not calls:
            module = modules[call.name]
            if module._forward_hooks or module._forward_pre_hooks:
                return Suspects([call.name], f"{type(module).__name__} has forward hooks, and the pipeline does not "
                                "call it: its segments() must run them")
            suspects.append(call.name)
            continue
        is_right = _is_equal(calls.pop(0), call, tolerance)
        if is_right:
            suspects = []
            continue
        suspects.append(call.name)
        if is_right is False:
            break
    return Suspects(suspects)


def _is_equal(call: Call, expected: Call, tolerance: float) -> bool | None:
    """Return True if the outputs of two calls are equal within the tolerance; None if they cannot be compared."""
    pairs = [(output, reference) for output, reference in zip(call.outputs, expected.outputs)
             if reference.is_floating_point() and reference.numel()]
    if not pairs or any(output.shape != reference.shape for output, reference in pairs):
        return None
    return all(difference("", output, reference).relative <= tolerance for output, reference in pairs)
