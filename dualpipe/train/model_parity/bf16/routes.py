"""Routes of tokens to experts: recorded in the unpipelined model in float64, and replayed in the other models.

If two experts have nearly the same score, rounding decides between them, and all later values differ. So the float64
model chooses for all models. There are two kinds of choices:

    torch.topk            called in any module. The values are gathered from the running model's own scores at the
                          recorded indices, so that gradients reach its router
    dualpipe.nn.Router    replayed by its `choice`: on a device its kernel calls no torch.topk

A choice is identified by its module's name in the unpipelined model, the micro-batch, and the size of the scores. The
module is that of the innermost method on the stack. Hooks would not find it: segments call methods of layers, whose
`__call__` never runs. A module that makes several choices of the same size in a forward makes them in the same order
wherever it runs. After the last of them the first one follows, so that a recomputed layer, or one that runs in two
parts, stays in step.

Dimension letters: R rows, which choose K of N options each. For tokens that choose experts: T, K, E.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dualpipe.nn.routing.router import Router
from dualpipe.pipeline.lower import Instruction
from dualpipe.pipeline.microbatch import SegmentRun
from dualpipe.runtime.recorder import WHAT, Entry, Observer, Recorder

_TOP_K = (torch.topk, torch.Tensor.topk)


class Microbatch(NamedTuple):
    """A micro-batch of a pipeline. replica: number of the pipeline."""

    replica: int
    number: int


class ChoicePlace(NamedTuple):
    """The place where each of R rows chooses K of N options. module: name in the unpipelined model."""

    module: str
    microbatch: Microbatch
    num_rows: int
    num_options: int
    top_k: int

    @property
    def size(self) -> str:
        """The sizes as text."""
        return f"{self.top_k} of {self.num_options} in {self.num_rows} rows"


Position = Callable[[nn.Module], Microbatch | None]
"""Returns the micro-batch that a module runs; None outside of one."""
Choose = Callable[[ChoicePlace, Tensor], Tensor]
"""Returns the indices_RK to use, for a place and the indices_RK that the model would choose."""


class Routes:
    """The choices of the float64 model."""

    def __init__(self) -> None:
        self._choices: dict[ChoicePlace, list[Tensor]] = {}

    def record(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Record a choice, and return it."""
        if not _in_backward():  # a recomputed choice is already recorded
            self._choices.setdefault(place, []).append(indices_RK)
        return indices_RK

    def at(self, place: ChoicePlace) -> Sequence[Tensor]:
        """Return the choices of a place, in order. Raises ValueError if there are none."""
        if place in self._choices:
            return self._choices[place]
        sizes = [other.size for other in self._choices if other.module == place.module]
        raise ValueError(
            f"{place.module} chooses {place.size}, and {sizes[0] if sizes else 'nothing'} in the unpipelined model; "
            "replayed routes need the same choices, for all tokens of a micro-batch at once: compare in float64")


class RouteCount(NamedTuple):
    """The number of choices of a module. changed: those that the model would have made differently."""

    made: int
    changed: int

    def __str__(self) -> str:
        return f"{self.changed} of {self.made}"


class Replay:
    """Replays routes in one step of a model, and counts the choices that it changes."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._num_replayed: Counter[ChoicePlace] = Counter()
        self.counts: dict[str, RouteCount] = {}  # by module, in the order of their first choices

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Return the recorded choice, instead of the model's own."""
        choices = self._routes.at(place)
        number = self._num_replayed[place]
        recorded_RK = choices[number % len(choices)].to(indices_RK.device)
        if number < len(choices):  # later choices are recomputed ones
            made, changed = self.counts.get(place.module, RouteCount(0, 0))
            num_changed = indices_RK.numel() - _num_common(indices_RK, recorded_RK)
            self.counts[place.module] = RouteCount(made + indices_RK.numel(), changed + num_changed)
        self._num_replayed[place] += 1
        return recorded_RK


class UnpipelinedPosition:
    """The current micro-batch of a model without a pipeline, which runs one after the other."""

    def __init__(self) -> None:
        self._microbatch: Microbatch | None = None

    def begin(self, replica: int, number: int) -> None:
        """Set the current micro-batch."""
        self._microbatch = Microbatch(replica, number)

    def __call__(self, module: nn.Module) -> Microbatch | None:
        """Return the current micro-batch."""
        return self._microbatch


class PipelinePosition(Observer):
    """The current micro-batch of every module in a pipeline's stages, from the open entries of the recorder.

    stages: stage number of each module.
    """

    def __init__(self, replica: int, stages: Mapping[nn.Module, int]) -> None:
        self._replica = replica
        self._stages = stages
        self._open: list[Entry] = []

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Add an entry that has begun."""
        self._open.append(entry)

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """Remove an entry that has ended."""
        if self._open and self._open[-1] is entry:
            self._open.pop()

    def __call__(self, module: nn.Module) -> Microbatch | None:
        """Return the micro-batch that the module's stage runs."""
        for entry in reversed(self._open):
            running = entry[WHAT]
            if isinstance(running, SegmentRun):
                return Microbatch(self._replica, running.microbatch)
            if isinstance(running, Instruction):
                return self._in_instruction(running, self._stages[module])
        return None

    def _in_instruction(self, instruction: Instruction, stage: int) -> Microbatch | None:
        """Return the micro-batch of a stage's action in an instruction; of two actions, that of the running one."""
        actions = [action for action in instruction.actions if action.stage == stage]
        if len(actions) > 1:
            actions = [action for action in actions if (action.kind != "F") == _in_backward()]
        return Microbatch(self._replica, actions[0].microbatch) if actions else None


@contextmanager
def choosing(modules: Mapping[nn.Module, str], position: Position, choose: Choose) -> Iterator[None]:
    """Replace the choices of `modules` by those of `choose` during a `with` block.

    modules: names in the unpipelined model, by module. position: returns the micro-batch that a module runs.
    """
    routers = [module for module in modules if isinstance(module, Router)]
    choices = [router.choice for router in routers]
    for router in routers:
        router.choice = partial(_choose_experts, modules[router], partial(position, router), choose)
    try:
        with _TopKMode(modules, position, choose):
            yield
    finally:
        for router, choice in zip(routers, choices):
            router.choice = choice


def _choose_experts(
    name: str, position: Callable[[], Microbatch | None], choose: Choose, experts_TK: Tensor, num_experts: int
) -> Tensor:
    """Return the experts that a router of this library is to use (T, K)."""
    microbatch = position()
    if microbatch is None:
        return experts_TK
    num_tokens, top_k = experts_TK.shape
    return choose(ChoicePlace(name, microbatch, num_tokens, num_experts, top_k), experts_TK)


class _TopKMode(TorchFunctionMode):
    """Replaces the results of torch.topk in `modules` by the choices of `choose`."""

    def __init__(self, modules: Mapping[nn.Module, str], position: Position, choose: Choose) -> None:
        super().__init__()
        self._modules = modules
        self._position = position
        self._choose = choose

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and replace the result of torch.topk."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        module = _running_module(self._modules)
        if module is None or isinstance(module, Router):
            return result
        microbatch = self._position(module)
        scores, dim = _scores_and_dim(*args, **(kwargs or {}))
        if microbatch is None or not scores.is_floating_point():
            return result
        model_indices = result.indices.movedim(dim, -1)
        model_RK = model_indices.flatten(0, -2)
        place = ChoicePlace(self._modules[module], microbatch, len(model_RK), scores.shape[dim], model_RK.shape[1])
        chosen_RK = self._choose(place, model_RK)
        indices = chosen_RK.view(model_indices.shape).movedim(-1, dim)
        return torch.return_types.topk((scores.gather(dim, indices), indices))


def _scores_and_dim(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> tuple[Tensor, int]:
    """Return the scores and the dimension in the arguments of torch.topk."""
    return input, dim


def _running_module(modules: Mapping[nn.Module, str]) -> nn.Module | None:
    """Return the innermost module of `modules` that is the first argument of a function on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module) and first in modules:
                return first
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _num_common(model_RK: Tensor, recorded_RK: Tensor) -> int:
    """Return the number of the model's choices that are among the recorded ones of their row, in any order."""
    is_common_RK = (model_RK.unsqueeze(2) == recorded_RK.unsqueeze(1)).any(2)
    return int(is_common_RK.sum())


def _in_backward() -> bool:
    """Return True inside autograd's backward."""
    return torch._C._current_graph_task_id() != -1
