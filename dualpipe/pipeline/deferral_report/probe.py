"""Watches a training step: the FLOPs of each weight's gradient that its layer hands to the store, and the others.

Layers say themselves what they hand over (`dualpipe.nn.deferral.weight_grads`), with the rows of that micro-batch. All
other weights are found in the graphs that forwards leave. A layer that hands its gradient over counts as deferred in a
"B" too, which has no need to defer it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from dualpipe.pipeline.deferral_report.graph import gemm_flops, operator_of, parameter_uses
from dualpipe.pipeline.deferral_report.reasons import HOOK, NOT_SEEN, is_computed_from, why_no_gemm, why_not_deferred


class ParameterWork(NamedTuple):
    """The FLOPs of a parameter's gradient in a step. reason: why not all are `deferred`; "" if they are."""

    stage: int
    name: str
    shape: tuple[int, ...]
    deferred: int
    undeferred: int
    reason: str


class _Place(NamedTuple):
    """Where a parameter is: `key` in its module `owner`, `name` in its stage."""

    stage: int
    name: str
    owner: nn.Module
    key: str


@dataclass
class _Uses:
    """What was seen of a parameter, in FLOPs of its gradient."""

    is_handed_over: bool = False  # by a layer of ours
    deferred: int = 0
    hooked: int = 0
    by_autograd: int = 0
    functions: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by the autograd.Function's name
    others: set[str] = field(default_factory=set)  # operators that are no GEMM


class StepProbe:
    """A `WeightGradObserver` of one step of the stages `modules`, by number."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._modules = modules
        self._uses: defaultdict[Tensor, _Uses] = defaultdict(_Uses)
        self._places: dict[Tensor, list[_Place]] = {}
        self._computing: set[nn.Parameter] = set()
        self._putting: set[str] = set()  # functions whose backwards hand gradients to the store

    # -- what a store's observer is told

    def saw_graph(self, roots: Iterable[GradientEdge]) -> None:
        """Note which operators take which parameters."""
        if not self._places:
            self._find_places()  # also those that others are computed from
        for use in parameter_uses(roots, self._computing):
            uses = self._uses_of(use.parameter)
            if use.kind == "function":
                uses.functions[use.operator] += use.flops
            elif use.kind == "other":
                uses.others.add(use.operator)
            else:
                uses.by_autograd += use.flops

    def saw_layer(self, weight: Tensor, rows: int, *, has_hooks: bool) -> None:
        """Note the gradient of a layer that can defer it."""
        uses = self._uses_of(weight)
        uses.is_handed_over = True
        flops = gemm_flops(weight.shape, rows)
        if has_hooks:
            uses.hooked += flops
        else:
            uses.deferred += flops

    def saw_put(self, node: Node | None) -> None:
        """Note a function that defers without a layer of ours."""
        if node is not None:
            self._putting.add(operator_of(node))

    # -- afterwards

    def work(self) -> tuple[ParameterWork, ...]:
        """Return the work of each matrix, or stack of matrices, of which a gradient was made."""
        found: list[ParameterWork] = []
        seen: set[tuple[int, str]] = set()
        for parameter, uses in self._uses.items():
            places = self._places[parameter]
            seen.update((place.stage, place.name) for place in places)
            if places:
                found.append(self._work_of(parameter, uses, _main(places)))
        return *found, *self._unseen(found, seen)

    def _work_of(self, parameter: Tensor, uses: _Uses, place: _Place) -> ParameterWork:
        functions = {} if uses.is_handed_over else dict(uses.functions)
        if isinstance(place.owner, nn.Embedding):
            functions = {}  # a lookup inside a compiled region
        putting = {name: flops for name, flops in functions.items() if name in self._putting}
        unknown = {name: flops for name, flops in functions.items() if name not in self._putting}
        undeferred = uses.hooked + uses.by_autograd + sum(unknown.values())
        reason = ""
        if uses.hooked:
            reason = HOOK
        elif undeferred:
            reason = why_not_deferred(place.owner, place.key, parameter.dim(), unknown)
        elif not (uses.is_handed_over or putting):
            reason = why_no_gemm(place.owner, uses.others or uses.functions)
        deferred = uses.deferred + sum(putting.values())
        return ParameterWork(place.stage, place.name, tuple(parameter.shape), deferred, undeferred, reason)

    def _unseen(self, found: list[ParameterWork], seen: set[tuple[int, str]]) -> Iterator[ParameterWork]:
        """Yield the parameters that have a gradient all the same, over as many rows as others of their stage have."""
        rows: defaultdict[int, int] = defaultdict(int)
        for work in found:
            elements = gemm_flops(torch.Size(work.shape), 1)
            rows[work.stage] = max(rows[work.stage], (work.deferred + work.undeferred) // max(1, elements))
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                if parameter.dim() < 2 or parameter.grad is None or (stage, name) in seen:
                    continue
                owner = module.get_submodule(name.rpartition(".")[0])
                flops = gemm_flops(parameter.shape, rows[stage])
                reason = NOT_SEEN
                if isinstance(owner, nn.Embedding):
                    flops = 0
                    reason = why_no_gemm(owner, ())
                yield ParameterWork(stage, name, tuple(parameter.shape), 0, flops, reason)

    # -- names

    def _uses_of(self, parameter: Tensor) -> _Uses:
        if parameter not in self._places:  # FSDP2 has other parameters during a step than between steps
            self._find_places()
            self._places.setdefault(parameter, [])  # not a parameter of a stage
        return self._uses[parameter]

    def _find_places(self) -> None:
        """Note where the parameters are that the stages have now."""
        for stage, module in self._modules.items():
            for path, owner in module.named_modules():
                for key, parameter in owner.named_parameters(recurse=False):
                    place = _Place(stage, f"{path}.{key}".lstrip("."), owner, key)
                    places = self._places.setdefault(parameter, [])
                    if place not in places:
                        places.append(place)
                    if is_computed_from(owner, key):
                        self._computing.add(parameter)


def _main(places: list[_Place]) -> _Place:
    """Return the place of a shared parameter where it is used in a GEMM: of a tied embedding, the head."""
    return next((place for place in places if not isinstance(place.owner, nn.Embedding)), places[0])
