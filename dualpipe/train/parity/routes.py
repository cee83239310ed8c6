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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dualpipe.nn.routing.router import Router
from dualpipe.pipeline.lower import Instruction
from dualpipe.pipeline.microbatch_state import SegmentRun
from dualpipe.runtime.recorder import WHAT, Entry, Observer, Recorder

_TOP_K = (torch.topk, torch.Tensor.topk)


# -- positions: the micro-batch that a module runs


class Microbatch(NamedTuple):
    """A micro-batch of a pipeline. replica: number of the pipeline."""

    replica: int
    number: int


class UnpipelinedPosition:
    """The current micro-batch of a model without a pipeline, which runs one after the other."""

    def __init__(self) -> None:
        self.microbatch: Microbatch | None = None

    def __call__(self, module: nn.Module) -> Microbatch | None:
        """Return the current micro-batch."""
        return self.microbatch


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
            actions = [action for action in actions if (action.kind != "F") == in_backward()]
        return Microbatch(self._replica, actions[0].microbatch) if actions else None


def in_backward() -> bool:
    """Return True inside autograd's backward."""
    return torch._C._current_graph_task_id() != -1


Position = Callable[[nn.Module], Microbatch | None]
"""Returns the micro-batch that a module runs; None outside of one."""


# -- choices


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


class Chooser(Protocol):
    """Decides the choices of a step."""

    def begin_step(self) -> None:
        """Begin another step with the same choices."""

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Return the indices to use, instead of those that the model would choose."""


class Routes:
    """The choices of the float64 model, a `Chooser` that records them."""

    def __init__(self) -> None:
        self._choices: dict[ChoicePlace, list[Tensor]] = {}

    def begin_step(self) -> None:
        """Drop what an earlier step has chosen."""
        self._choices.clear()

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Record a choice, and return it."""
        if not in_backward():  # a recomputed choice is already recorded
            self._choices.setdefault(place, []).append(indices_RK)
        return indices_RK

    def of_columns(self, columns: Tensor | None, length: int) -> Routes:
        """Return the choices of the tokens in some columns of sequences of `length` tokens; all of them for None."""
        if columns is None:
            return self
        routes = Routes()
        for place, choices in self._choices.items():
            parts = [choice.unflatten(0, (-1, length))[:, columns].flatten(0, 1) for choice in choices]
            routes._choices[place._replace(num_rows=len(parts[0]))] = parts
        return routes

    def at(self, place: ChoicePlace) -> list[Tensor]:
        """Return the choices of a place, in order. Raises ValueError if there are none."""
        if place in self._choices:
            return self._choices[place]
        sizes = [other.size for other in self._choices if other.module == place.module]
        raise ValueError(
            f"{place.module} chooses {place.size}, and {sizes[0] if sizes else 'nothing'} in the unpipelined model; "
            "replayed routes need the same choices, for all tokens of a micro-batch at once: compare in float64")


class RouteCount(NamedTuple):
    """The number of choices of a module. changed: those that the model would have made differently."""

    made: int = 0
    changed: int = 0

    def __str__(self) -> str:
        return f"{self.changed} of {self.made}"

    def plus(self, other: RouteCount) -> RouteCount:
        """Return the sum of two counts."""
        return RouteCount(self.made + other.made, self.changed + other.changed)


class Replay:
    """Replays routes in a model, and counts the choices that it changes in a step."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._num_replayed: Counter[ChoicePlace] = Counter()
        self.counts: dict[str, RouteCount] = {}  # by module, in the order of their first choices

    def begin_step(self) -> None:
        """Begin with the first choices again."""
        self._num_replayed.clear()
        self.counts.clear()

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Return the recorded choice, instead of the model's own."""
        choices = self._routes.at(place)
        number = self._num_replayed[place]
        recorded_RK = choices[number % len(choices)].to(indices_RK.device)
        if number < len(choices):  # later choices are recomputed ones
            is_common_RK = (indices_RK.unsqueeze(2) == recorded_RK.unsqueeze(1)).any(2)  # in any order
            count = RouteCount(indices_RK.numel(), indices_RK.numel() - int(is_common_RK.sum()))
            self.counts[place.module] = self.counts.get(place.module, RouteCount()).plus(count)
        self._num_replayed[place] += 1
        return recorded_RK


@contextmanager
def choosing(modules: Mapping[nn.Module, str], position: Position, chooser: Chooser | None) -> Iterator[None]:
    """Replace the choices of `modules` by those of `chooser` during a `with` block; leave them alone for None.

    modules: names in the unpipelined model, by module. position: returns the micro-batch that a module runs.
    """
    if chooser is None:
        yield
        return
    routers = [module for module in modules if isinstance(module, Router)]
    choices = [router.choice for router in routers]
    for router in routers:
        router.choice = partial(_choose_experts, modules[router], partial(position, router), chooser)
    try:
        with _TopKMode(modules, position, chooser):
            yield
    finally:
        for router, choice in zip(routers, choices):
            router.choice = choice


def _choose_experts(
    name: str, position: Callable[[], Microbatch | None], chooser: Chooser, experts_TK: Tensor, num_experts: int
) -> Tensor:
    """Return the experts that a router of this library is to use (T, K)."""
    microbatch = position()
    if microbatch is None:
        return experts_TK
    num_tokens, top_k = experts_TK.shape
    return chooser.choose(ChoicePlace(name, microbatch, num_tokens, num_experts, top_k), experts_TK)


class _TopKMode(TorchFunctionMode):
    """Replaces the results of torch.topk in `modules` by the choices of `chooser`."""

    def __init__(self, modules: Mapping[nn.Module, str], position: Position, chooser: Chooser) -> None:
        super().__init__()
        self._modules = modules
        self._position = position
        self._chooser = chooser

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
        chosen_RK = self._chooser.choose(place, model_RK)
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


# -- names of modules


class _Key(NamedTuple):
    """Identity of a module.

    parameters: names in the unpipelined model of the parameters inside the module or, if it has none, inside the
    nearest module around it that has some. path: from that module to this one.
    """

    parameters: frozenset[str]
    path: str


class ModuleNames:
    """Maps modules of a stage to names in the unpipelined model, by the parameters inside them.

    Modules with the same parameters inside, such as a module and its wrapper, all get the name of the outermost one.

    names: in the unpipelined model, by the names of the parameters of `whole`; tied parameters have one of them.
    """

    def __init__(self, whole: nn.Module, names: Mapping[str, str]) -> None:
        self._names: dict[_Key, str] = {}
        for path, key in _keys(whole, names).items():
            self._names.setdefault(key, path)  # outer modules come first

    def of(self, module: nn.Module, names: Mapping[str, str]) -> dict[nn.Module, str]:
        """Return the names of the modules inside `module` that the unpipelined model has too.

        names: names in the unpipelined model, by the names of the parameters in `module`.
        """
        modules = dict(module.named_modules())
        return {modules[path]: self._names[key] for path, key in _keys(module, names).items() if key in self._names}


def _keys(module: nn.Module, names: Mapping[str, str]) -> dict[str, _Key]:
    """Return the keys of the modules inside `module`, by their names in it, outer modules first."""
    parameters: dict[str, set[str]] = {}
    for parameter_name, name in names.items():
        for prefix in _prefixes(parameter_name):
            parameters.setdefault(prefix, set()).add(name)
    keys: dict[str, _Key] = {}
    for path, _ in module.named_modules():
        anchor = next(prefix for prefix in reversed([*_prefixes(path), path]) if not prefix or prefix in parameters)
        keys[path] = _Key(frozenset(parameters.get(anchor, ())), path[len(anchor):].lstrip("."))
    return keys


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a module or parameter: "a.b.c" -> "", "a", "a.b"."""
    parts = name.split(".")[:-1]
    return ["", *accumulate(parts, lambda prefix, part: f"{prefix}.{part}")]
