"""Observation of a training step: the FLOPs of every weight gradient, deferred or not.

Layers report the gradients that they put into the store (`dualpipe.nn.deferral.weight_grads`), with the rows of the
micro-batch. All other weights are found in the graphs of the forwards. A layer that puts its gradient into the store
counts as deferred in a "B" as well, which need not defer it.
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
from dualpipe.pipeline.deferral_report.reasons import (
    HOOK,
    NOT_OBSERVED,
    is_computed_from,
    uncounted_reason,
    undeferred_reason,
)


class ParameterWork(NamedTuple):
    """FLOPs of a parameter's gradient in a step. reason: the reason for `undeferred` work; "" without any."""

    stage: int
    name: str
    shape: tuple[int, ...]
    deferred: int
    undeferred: int
    reason: str


class _Place(NamedTuple):
    """Place of a parameter: `key` is its name in its module `owner`, `name` that in its stage."""

    stage: int
    name: str
    owner: nn.Module
    key: str


@dataclass
class _Uses:
    """Observed uses of a parameter; integers are FLOPs of its gradient."""

    has_layer: bool = False  # used by a layer that puts the gradient into the store
    deferred: int = 0
    hooked: int = 0  # not deferred because of a hook on the parameter
    by_autograd: int = 0
    functions: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by name of the autograd.Function
    others: set[str] = field(default_factory=set)  # operators that are no GEMM


class StepProbe:
    """A `WeightGradObserver` of one step. modules: the stages, by number."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._modules = modules
        self._uses: defaultdict[Tensor, _Uses] = defaultdict(_Uses)
        self._places: dict[Tensor, list[_Place]] = {}
        self._computing: set[nn.Parameter] = set()
        self._deferring: set[str] = set()  # autograd.Functions whose backwards put gradients into the store

    # -- interface of an observer

    def saw_graph(self, roots: Iterable[GradientEdge]) -> None:
        """Record the uses of parameters in a graph."""
        if not self._places:
            self._find_places()  # also finds the parameters from which weights are computed
        for use in parameter_uses(roots, self._computing):
            uses = self._uses_of(use.parameter)
            if use.kind == "function":
                uses.functions[use.operator] += use.flops
            elif use.kind == "other":
                uses.others.add(use.operator)
            else:
                uses.by_autograd += use.flops

    def saw_layer(self, weight: Tensor, rows: int, *, has_hooks: bool) -> None:
        """Record the gradient of a layer that can defer it."""
        uses = self._uses_of(weight)
        uses.has_layer = True
        flops = gemm_flops(weight.shape, rows)
        if has_hooks:
            uses.hooked += flops
        else:
            uses.deferred += flops

    def saw_put(self, node: Node | None) -> None:
        """Record an autograd.Function that puts a gradient into the store without a layer of this library."""
        if node is not None:
            self._deferring.add(operator_of(node))

    # -- results

    def work(self) -> tuple[ParameterWork, ...]:
        """Return the work of every matrix, or stack of matrices, with a gradient."""
        observed: list[ParameterWork] = []
        names: set[tuple[int, str]] = set()
        for parameter, uses in self._uses.items():
            places = self._places[parameter]
            names.update((place.stage, place.name) for place in places)
            if places:
                observed.append(self._work_of(parameter, uses, _main_place(places)))
        return (*observed, *self._unobserved(observed, names))

    def _work_of(self, parameter: Tensor, uses: _Uses, place: _Place) -> ParameterWork:
        """Return the work of a parameter with observed uses."""
        functions = {} if uses.has_layer else dict(uses.functions)
        if isinstance(place.owner, nn.Embedding):
            functions = {}  # a lookup inside a compiled region
        deferring = {name: flops for name, flops in functions.items() if name in self._deferring}
        unknown = {name: flops for name, flops in functions.items() if name not in self._deferring}
        undeferred = uses.hooked + uses.by_autograd + sum(unknown.values())
        reason = ""
        if uses.hooked:
            reason = HOOK
        elif undeferred:
            reason = undeferred_reason(place.owner, place.key, parameter.dim(), unknown)
        elif not (uses.has_layer or deferring):
            reason = uncounted_reason(place.owner, uses.others or uses.functions)
        deferred = uses.deferred + sum(deferring.values())
        return ParameterWork(place.stage, place.name, tuple(parameter.shape), deferred, undeferred, reason)

    def _unobserved(self, observed: list[ParameterWork], names: set[tuple[int, str]]) -> Iterator[ParameterWork]:
        """Yield the work of parameters that have a gradient without an observed use.

        Their rows are assumed to be those of other parameters of their stage.

        names: stages and names of all parameters with observed uses.
        """
        rows: defaultdict[int, int] = defaultdict(int)
        for work in observed:
            elements = gemm_flops(torch.Size(work.shape), 1)
            rows[work.stage] = max(rows[work.stage], (work.deferred + work.undeferred) // max(1, elements))
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                if parameter.dim() < 2 or parameter.grad is None or (stage, name) in names:
                    continue
                owner = module.get_submodule(name.rpartition(".")[0])
                flops = gemm_flops(parameter.shape, rows[stage])
                reason = NOT_OBSERVED
                if isinstance(owner, nn.Embedding):
                    flops = 0
                    reason = uncounted_reason(owner, ())
                yield ParameterWork(stage, name, tuple(parameter.shape), 0, flops, reason)

    # -- places of parameters

    def _uses_of(self, parameter: Tensor) -> _Uses:
        """Return the observed uses of a parameter."""
        if parameter not in self._places:  # FSDP2 replaces the parameters during a step
            self._find_places()
            self._places.setdefault(parameter, [])  # not a parameter of a stage
        return self._uses[parameter]

    def _find_places(self) -> None:
        """Record the places of the current parameters of the stages."""
        for stage, module in self._modules.items():
            for path, owner in module.named_modules():
                for key, parameter in owner.named_parameters(recurse=False):
                    place = _Place(stage, f"{path}.{key}".lstrip("."), owner, key)
                    places = self._places.setdefault(parameter, [])
                    if place not in places:
                        places.append(place)
                    if is_computed_from(owner, key):
                        self._computing.add(parameter)


def _main_place(places: list[_Place]) -> _Place:
    """Return the place where a shared parameter is used in a GEMM: for a tied embedding, the head."""
    return next((place for place in places if not isinstance(place.owner, nn.Embedding)), places[0])
