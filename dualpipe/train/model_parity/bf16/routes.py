"""Routes of tokens to experts: recorded in the uncut model in float64, and replayed where rounding would turn them.

Where two experts have nearly the same score, the last bit decides between them, and all that follows differs. So the
float64 model chooses for every other one. A choice is taken where it is made:

    torch.topk            called in any module. Values are gathered from the running model's own scores, at the indices
                          that were recorded, so that gradients reach its router
    dualpipe.nn.Router    by its `choice`: its kernel on a device calls no torch.topk

A choice is known by the module that makes it, with its name in the uncut model, the micro-batch, and the size of the
scores. The module is found on the stack, as the innermost running method's. Hooks would not do: segments call methods
of layers whose `__call__` never runs. A module that makes several choices of one size in a forward makes them in the
same order wherever it runs; after the last one the first comes again, so that a layer which runs in two parts, or is
recomputed, stays in step.

Dimension letters: R rows, which choose among N, each K of them. Tokens that choose experts: T, E, K.
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
    """A micro-batch of one of the pipelines. replica: the number of the pipeline."""

    replica: int
    number: int


class ChoicePlace(NamedTuple):
    """The place of a choice of K of N by each of R rows. module: its name in the uncut model."""

    module: str
    microbatch: Microbatch
    num_rows: int
    num_options: int
    top_k: int

    @property
    def size(self) -> str:
        """The size as text."""
        return f"{self.top_k} of {self.num_options} in {self.num_rows} rows"


Position = Callable[[nn.Module], Microbatch | None]
"""The micro-batch that a module runs for; None outside of one."""
Choose = Callable[[ChoicePlace, Tensor], Tensor]
"""(place, indices_RK that the model would choose) -> indices_RK that it is to use"""


class Routes:
    """The choices of the float64 model."""

    def __init__(self) -> None:
        self._choices: dict[ChoicePlace, list[Tensor]] = {}

    def record(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Keep a choice, and return it."""
        if not _in_backward():  # what a checkpoint computes once more has been recorded
            self._choices.setdefault(place, []).append(indices_RK)
        return indices_RK

    def at(self, place: ChoicePlace) -> Sequence[Tensor]:
        """Return the choices of a place, in their order. Raises ValueError where there are none."""
        if place in self._choices:
            return self._choices[place]
        sizes = [other.size for other in self._choices if other.module == place.module]
        raise ValueError(
            f"{place.module} chooses {place.size}, and {sizes[0] if sizes else 'nothing'} in the uncut model; a stage "
            "must choose as the uncut model does, for all tokens of a micro-batch at once, for its routes to be "
            "replayed: compare in float64")


class RouteCount(NamedTuple):
    """The number of choices that were made, and of those that a model would have made otherwise."""

    made: int
    turned: int

    def __str__(self) -> str:
        return f"{self.turned} of {self.made}"


class Replay:
    """Replays routes in one step of a model, and counts the choices that the model would have made otherwise."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._made: Counter[ChoicePlace] = Counter()
        self.counts: dict[str, RouteCount] = {}  # by module, in the order of their first choices

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Return the recorded choice in place of the model's own."""
        choices = self._routes.at(place)
        recorded_RK = choices[self._made[place] % len(choices)].to(indices_RK.device)
        if self._made[place] < len(choices):  # the rest is a recomputation
            made, turned = self.counts.get(place.module, RouteCount(0, 0))
            num_turned = indices_RK.numel() - _num_common(indices_RK, recorded_RK)
            self.counts[place.module] = RouteCount(made + indices_RK.numel(), turned + num_turned)
        self._made[place] += 1
        return recorded_RK


class UncutPosition:
    """The position of an uncut model, which runs one micro-batch after the other."""

    def __init__(self) -> None:
        self._microbatch: Microbatch | None = None

    def begin(self, replica: int, number: int) -> None:
        """Go on to a micro-batch."""
        self._microbatch = Microbatch(replica, number)

    def __call__(self, module: nn.Module) -> Microbatch | None:
        """Return the micro-batch."""
        return self._microbatch


class PipelinePosition(Observer):
    """The position of each module of a pipeline's stages, known from the record of what is running.

    stages: of each module the number of its stage.
    """

    def __init__(self, replica: int, stages: Mapping[nn.Module, int]) -> None:
        self._replica = replica
        self._stages = stages
        self._open: list[Entry] = []

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Note an entry that has begun."""
        self._open.append(entry)

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """Drop an entry that has ended."""
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
        """Return the micro-batch of the stage's action, or of the one that is running of two."""
        actions = [action for action in instruction.actions if action.stage == stage]
        if len(actions) > 1:
            actions = [action for action in actions if (action.kind != "F") == _in_backward()]
        return Microbatch(self._replica, actions[0].microbatch) if actions else None


@contextmanager
def choosing(modules: Mapping[nn.Module, str], position: Position, choose: Choose) -> Iterator[None]:
    """Have `choose` decide on the choices that `modules` make while the `with` lasts.

    modules: with their names in the uncut model.
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
    """Decide for a router of this library."""
    microbatch = position()
    if microbatch is None:
        return experts_TK
    num_tokens, top_k = experts_TK.shape
    return choose(ChoicePlace(name, microbatch, num_tokens, num_experts, top_k), experts_TK)


class _TopKMode(TorchFunctionMode):
    """Has `choose` decide on what torch.topk returns in the given modules."""

    def __init__(self, modules: Mapping[nn.Module, str], position: Position, choose: Choose) -> None:
        super().__init__()
        self._modules = modules
        self._position = position
        self._choose = choose

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; of torch.topk change the result."""
        own = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return own
        module = _running_module(self._modules)
        if module is None or isinstance(module, Router):
            return own
        microbatch = self._position(module)
        scores, dim = _scores_and_dim(*args, **(kwargs or {}))
        if microbatch is None or not scores.is_floating_point():
            return own
        own_indices = own.indices.movedim(dim, -1)
        own_RK = own_indices.flatten(0, -2)
        place = ChoicePlace(self._modules[module], microbatch, len(own_RK), scores.shape[dim], own_RK.shape[1])
        indices_RK = self._choose(place, own_RK)
        indices = indices_RK.view(own_indices.shape).movedim(-1, dim)
        return torch.return_types.topk((scores.gather(dim, indices), indices))


def _scores_and_dim(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> tuple[Tensor, int]:
    """Return the scores that torch.topk is called with, and the dimension that it chooses in."""
    return input, dim


def _running_module(modules: Mapping[nn.Module, str]) -> nn.Module | None:
    """Return the innermost module of `modules` that a running function has as its first argument."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module) and first in modules:
                return first
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _num_common(own_RK: Tensor, recorded_RK: Tensor) -> int:
    """Return how many of the rows' own choices are among the recorded ones, in any order."""
    is_common_RK = (own_RK.unsqueeze(2) == recorded_RK.unsqueeze(1)).any(2)
    return int(is_common_RK.sum())


def _in_backward() -> bool:
    """Return True inside of autograd's backward."""
    return torch._C._current_graph_task_id() != -1
