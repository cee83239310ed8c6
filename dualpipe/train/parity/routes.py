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

Replaying would hide a router that chooses wrongly, so the choices that the models would have made differently are
counted.

Dimension letters: R rows, which choose K of N options each. For tokens that choose experts: T, K, E.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dualpipe.nn.routing.router import Router

_TOP_K = (torch.topk, torch.Tensor.topk)
# A module of the pipeline may change twice as many choices as in the unpipelined model, and this many (or 1%) more.
MORE_CHANGED = 8


class Microbatch(NamedTuple):
    """A micro-batch of a pipeline. replica: number of the pipeline."""

    replica: int
    number: int


Position = Callable[[nn.Module], Microbatch | None]
"""Returns the micro-batch that a module runs; None outside of one."""


def in_backward() -> bool:
    """Return True inside autograd's backward."""
    return torch._C._current_graph_task_id() != -1


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


class Routes:
    """Records the choices of the float64 model, in order by place."""

    def __init__(self) -> None:
        self.choices: dict[ChoicePlace, list[Tensor]] = {}

    def begin_step(self) -> None:
        """Drop what an earlier step has chosen."""
        self.choices.clear()

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Record a choice, and return it."""
        if not in_backward():  # a recomputed choice is already recorded
            self.choices.setdefault(place, []).append(indices_RK)
        return indices_RK


class RouteCounts(NamedTuple):
    """Numbers of choices by module, in order. changed: those that the model would have made differently."""

    made: Counter[str]
    changed: Counter[str]


class Replay:
    """Replays routes in a model, and counts the choices that it changes in a step.

    Args:
        columns: numbers of the tokens in each sequence that the model has; None for all.
        length: number of tokens in a sequence, if it has some of them.
    """

    def __init__(self, routes: Routes, columns: Tensor | None = None, length: int = 0) -> None:
        self._routes = routes
        self._columns = columns
        self._length = length
        self._num_replayed: Counter[ChoicePlace] = Counter()
        self.counts = RouteCounts(Counter(), Counter())

    def begin_step(self) -> None:
        """Begin with the first choices again."""
        self._num_replayed.clear()
        self.counts = RouteCounts(Counter(), Counter())

    def choose(self, place: ChoicePlace, indices_RK: Tensor) -> Tensor:
        """Return the recorded choice, instead of the model's own. Raises ValueError if there is none of its size."""
        choices = self._find(place)
        if not choices:
            sizes = [other.size for other in self._routes.choices if other.module == place.module]
            raise ValueError(
                f"{place.module} chooses {place.size}, and {sizes[0] if sizes else 'nothing'} in the unpipelined "
                "model; replayed routes need the same choices, for all tokens of a micro-batch at once: compare in "
                "float64")
        number = self._num_replayed[place]
        recorded_RK = choices[number % len(choices)].to(indices_RK.device)
        if number < len(choices):  # later choices are recomputed ones
            is_common_RK = (indices_RK.unsqueeze(2) == recorded_RK.unsqueeze(1)).any(2)  # in any order
            self.counts.made[place.module] += indices_RK.numel()
            self.counts.changed[place.module] += indices_RK.numel() - int(is_common_RK.sum())
        self._num_replayed[place] += 1
        return recorded_RK

    def _find(self, place: ChoicePlace) -> list[Tensor]:
        """Return the recorded choices of a place, in order."""
        columns = self._columns
        if columns is None:
            return self._routes.choices.get(place, [])
        num_rows = place.num_rows * self._length // len(columns)
        return [choice.unflatten(0, (-1, self._length))[:, columns].flatten(0, 1)
                for choice in self._routes.choices.get(place._replace(num_rows=num_rows), [])]


@contextmanager
def choosing(modules: Mapping[nn.Module, str], position: Position, chooser: Routes | Replay | None) -> Iterator[None]:
    """Replace the choices of `modules` by those of `chooser` during a `with` block; leave them alone for None.

    modules: names in the unpipelined model, by module. position: returns the micro-batch that a module runs.
    """
    if chooser is None:
        yield
        return

    def choose(module: nn.Module, indices_RK: Tensor, num_options: int) -> Tensor:
        microbatch = position(module)
        if microbatch is None:
            return indices_RK
        num_rows, top_k = indices_RK.shape
        return chooser.choose(ChoicePlace(modules[module], microbatch, num_rows, num_options, top_k), indices_RK)

    routers = [module for module in modules if isinstance(module, Router)]
    choices = [router.choice for router in routers]
    for router in routers:
        router.choice = partial(choose, router)
    try:
        with _TopKMode(modules, choose):
            yield
    finally:
        for router, choice in zip(routers, choices):
            router.choice = choice


class _TopKMode(TorchFunctionMode):
    """Replaces the results of torch.topk in `modules` by those of `choose`, which gets the model's own."""

    def __init__(self, modules: Mapping[nn.Module, str], choose: Callable[[nn.Module, Tensor, int], Tensor]) -> None:
        super().__init__()
        self._modules = modules
        self._choose = choose

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and replace the result of torch.topk."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        module = _running_module(self._modules)
        scores, dim = _scores_and_dim(*args, **(kwargs or {}))
        if module is None or isinstance(module, Router) or not scores.is_floating_point():
            return result
        model_indices = result.indices.movedim(dim, -1)
        chosen_RK = self._choose(module, model_indices.flatten(0, -2), scores.shape[dim])
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


# -- the choices of all modules


class RouteReport(NamedTuple):
    """The choices of all modules in the two models."""

    unpipelined: RouteCounts
    pipelined: RouteCounts

    @property
    def unreplayed(self) -> list[str]:
        """Names of the modules that made no choice in the pipeline."""
        return [name for name in self.unpipelined.made if name not in self.pipelined.made]

    def failures(self) -> list[str]:
        """Return a text about the first module that changes more choices than rounding explains, if there is one."""
        for name, unpipelined_made in self.unpipelined.made.items():
            made = self.pipelined.made[name]
            changed = self.pipelined.changed[name]
            unpipelined_changed = self.unpipelined.changed[name]
            expected = unpipelined_changed / unpipelined_made * made
            if changed > 2 * expected + max(MORE_CHANGED, made / 100):
                return [f"{name} would choose {changed} of {made} experts differently than in float64, and "
                        f"{unpipelined_changed} of {unpipelined_made} in the unpipelined model"]
        return []

    def describe(self) -> str:
        """Return lines about the routes that were replayed, and those that were not."""
        num_modules = len(self.unpipelined.made)
        if not num_modules:
            return ("no routes were recorded: no module calls torch.topk on scores or is a dualpipe.nn.Router; if the "
                    "model chooses experts in another way (argmax, sort), choices that rounding changes count as "
                    "errors: make its routers call torch.topk, or compare in float64")
        unpipelined, pipelined = (f"{counts.changed.total()} of {counts.made.total()}" for counts in self)
        lines = [f"routes of {num_modules} modules replayed from float64; bfloat16 alone would have changed "
                 f"{pipelined} choices pipelined, {unpipelined} unpipelined"]
        unreplayed = self.unreplayed
        if unreplayed:
            names = ", ".join(unreplayed[:3])
            lines.append(f"routes of {len(unreplayed)} modules were recorded and not replayed, such as {names}: in the "
                         "pipeline they call no torch.topk; choices that rounding changes there count as errors")
        return "\n".join(lines)
