"""Report of the share of a rank's weight-gradient work that can wait for a "W", and of parameters that cannot.

A probe observes the first training step and counts the FLOPs of every weight gradient, deferred or not. Layers report
the gradients that they put into the store (`dualpipe.nn.deferral.return_or_defer`), with the rows of the micro-batch;
such a gradient counts as deferred, even if an action "B" computes it at once.

All other weights are found in the autograd graphs of the forwards. A graph shows uses that a list of the layers does
not: parameters that are used outside of a layer's `forward`, in slices, or expert by expert in a loop. It also shows
the number of rows of each use. Nothing is patched, and the forward is unchanged. Only shapes are read, never saved
tensors: under activation checkpointing, reading one would recompute it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils.parametrize import ParametrizationList

from dualpipe.nn.accumulators import local
from dualpipe.nn.conversion import deferring_class, is_fsdp_module
from dualpipe.nn.grouped_linear import GroupedLinear
from dualpipe.nn.head import LOSS_IN_PARTS
from dualpipe.nn.linear import Linear, TransposedLinear
from dualpipe.nn.lora import adapter_places, merged_factors
from dualpipe.schedule import Costs, Schedule, simulate

_MIN_SHARE = 0.5  # deferred share of a rank's weight-gradient work below which a pipeline warns
_SHOWN = 10  # parameters in a printed report

_NOT_OBSERVED = ("not in the autograd graph of a forward, for example inside a reentrant checkpoint; counted with as "
                 "many rows as the stage's other layers")
_NOT_PASSED = "not passed to defer_weight_grads"
_UNUSED = "no gradient, or one of zeros, not counted"
_HOOK = "hook on the parameter"
_WITH_LOSS = ("computed with the loss, in parts, so that the logits of all tokens never exist at once; "
              "memory.logits = 0 defers it")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# For each GEMM, the indices of the operands that can be weights, and for each of these the dimension over which the
# forward sums. The weight gradient has as many FLOPs as the forward: 2 * elements of the result * summed size.
_GEMMS = {
    "Mm": {0: -1, 1: -2},
    "Addmm": {1: -1, 2: -2},
    "Bmm": {0: -1, 1: -2},
    "Baddbmm": {1: -1, 2: -2},
    "GroupedMm": {0: -1, 1: -2},
    "Mv": {0: -1},
    "Addmv": {1: -1},
    "Linear": {1: -1},
}
_VIEWS = frozenset((
    "T", "Transpose", "Permute", "NumpyT", "MT", "Adjoint", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided",
    "Select", "Slice", "Narrow", "Split", "SplitWithSizes", "Unbind", "Expand", "Squeeze", "Unsqueeze", "Unfold",
    "Clone", "ToCopy", "Contiguous", "Index", "IndexSelect", "_ToTorchTensor", "_FromTorchTensor",
))  # operators whose result consists of the elements of one operand
_JOINS = frozenset(("Cat", "Stack"))  # operators whose result consists of the elements of several operands
_MAX_OPERATORS = 64  # maximum number of operators between a parameter and the weight that is computed from it


# -- the report


class ParameterWork(NamedTuple):
    """FLOPs of a parameter's gradient in a step. reason: the reason for `undeferred` work; "" without any."""

    stage: int
    name: str
    shape: tuple[int, ...]
    deferred: int
    undeferred: int
    reason: str


@dataclass(frozen=True)
class StageWork:
    """FLOPs of a stage's weight gradients in the first training step. deferred_flops: those that can wait for a "W"."""

    stage: int
    flops: int
    deferred_flops: int

    @property
    def share(self) -> float:
        """Return the share of the work that can wait for a "W"; 1 without any work."""
        return self.deferred_flops / self.flops if self.flops else 1.0


@dataclass(frozen=True)
class UndeferredParameter:
    """Parameter whose gradient autograd computes in the backward, in part or as a whole.

    flops_share: share of the rank's weight-gradient work; 0 if the gradient is no GEMM, which is not counted.
    """

    stage: int
    name: str
    shape: tuple[int, ...]
    flops_share: float
    reason: str


@dataclass(frozen=True)
class DeferralReport:
    """Weight-gradient work of a rank in its first training step, and the share that can wait for a "W".

    Work is counted in FLOPs of the GEMMs for gradients of matrices: 2 * rows * elements. `print(report)` shows a table.

    Attributes:
        rank: pipeline rank.
        stages: work by stage, in ascending order.
        parameters: undeferred parameters, the largest work first.
        schedule: schedule of the pipeline for the number of micro-batches of that step.
    """

    rank: int
    stages: tuple[StageWork, ...]
    parameters: tuple[UndeferredParameter, ...]
    schedule: Schedule

    @classmethod
    def of(cls, rank: int, work: Sequence[ParameterWork], schedule: Schedule) -> DeferralReport:
        """Return the report of a rank from the work that a probe has observed."""
        stages = [_stage_work(stage, work) for stage in sorted(schedule.rank_stages(rank))]
        return cls(rank, tuple(stages), tuple(undeferred(work)), schedule)

    @property
    def share(self) -> float:
        """Return the share of the rank's work that can wait for a "W"; 1 without any work."""
        return _total(self.stages).share

    @cached_property
    def bubble(self) -> float:
        """Return the bubble of a simulation, as a share of all ranks' time.

        A forward costs 1, and a whole backward 2, of which all weight gradients are 1. Stages of other ranks are
        assumed to defer the share of this rank.
        """
        stages = {work.stage: _costs(work.share) for work in self.stages}
        costs = Costs(W=self.share, I=2 - self.share, per_stage=stages)
        return simulate(self.schedule, costs).bubble_fraction

    @cached_property
    def bubble_if_all_deferred(self) -> float:
        """Return the same bubble with all weight gradients deferred."""
        return simulate(self.schedule, _costs(1.0)).bubble_fraction

    def __str__(self) -> str:
        """Return the report as a table."""
        lines = [f"weight gradients of rank {self.rank} that can wait for a \"W\": {self.share:.1%} of the FLOPs"]
        lines += [f"  stage {work.stage}: {work.share:.1%}" for work in self.stages]
        if self.parameters:
            lines += _table(self.parameters)
        schedule = self.schedule
        lines.append(f"simulated bubble of {schedule.name} (ranks {schedule.num_ranks}, micro-batches "
                     f"{schedule.num_microbatches}): {self.bubble:.1%}; with all deferred "
                     f"{self.bubble_if_all_deferred:.1%}")
        return "\n".join(lines)


def shortfall(rank: int, work: Sequence[ParameterWork]) -> str | None:
    """Return the text of a warning of little deferred work; None if at least `_MIN_SHARE` of it is deferred.

    The work of a head in parts does not count: it is not deferred in order to save memory.

    rank: pipeline rank.
    """
    work = [parameter for parameter in work if parameter.reason != _WITH_LOSS]
    share = _total([_stage_work(stage, work) for stage in {parameter.stage for parameter in work}]).share
    if share >= _MIN_SHARE:
        return None
    largest = undeferred(work)[0]
    where = f"{largest.name} {largest.shape} of stage {largest.stage}"
    remedy = "call defer_weight_grads(stage), or " if largest.reason.endswith(_NOT_PASSED) else ""
    return (f"only {share:.0%} of the weight-gradient work of pipeline rank {rank} can wait for a \"W\" and fill the "
            f"bubble; the largest parameter that cannot is {where} ({largest.reason}): {remedy}see "
            "pipe.deferral_report() and docs/overlap.md")


def undeferred(work: Iterable[ParameterWork]) -> list[UndeferredParameter]:
    """Return the undeferred parameters, the largest work first."""
    total = sum(parameter.deferred + parameter.undeferred for parameter in work)
    parameters = [
        UndeferredParameter(
            stage=parameter.stage,
            name=parameter.name,
            shape=parameter.shape,
            flops_share=parameter.undeferred / total if total else 0.0,
            reason=parameter.reason,
        )
        for parameter in work if parameter.reason
    ]
    return sorted(parameters, key=lambda parameter: (-parameter.flops_share, parameter.stage, parameter.name))


def _stage_work(stage: int, work: Iterable[ParameterWork]) -> StageWork:
    """Return the work of one stage."""
    parameters = [parameter for parameter in work if parameter.stage == stage]
    deferred = sum(parameter.deferred for parameter in parameters)
    undeferred = sum(parameter.undeferred for parameter in parameters)
    return StageWork(stage, flops=deferred + undeferred, deferred_flops=deferred)


def _total(stages: Iterable[StageWork]) -> StageWork:
    """Return the total work of several stages."""
    stages = list(stages)
    return StageWork(-1, sum(work.flops for work in stages), sum(work.deferred_flops for work in stages))


def _costs(share: float) -> Costs:
    """Return the costs of a stage of which `share` of the weight gradients is deferred."""
    return Costs(F=1.0, B=2.0, W=share, I=2.0 - share)


def _table(parameters: Sequence[UndeferredParameter]) -> list[str]:
    """Return a table with the largest work, as lines."""
    rows = [("not deferred", "shape", "FLOPs", "reason")]
    for parameter in parameters[:_SHOWN]:
        title = f"stage {parameter.stage} {parameter.name}"
        shape = " x ".join(map(str, parameter.shape))
        flops = f"{parameter.flops_share:.1%}" if parameter.flops_share else "-"
        rows.append((title, shape, flops, parameter.reason))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {flops:>{widths[2]}}  {reason}"
        for name, shape, flops, reason in rows
    ]
    if len(parameters) > _SHOWN:
        lines.append(f"  and {len(parameters) - _SHOWN} more in `parameters`")
    return lines


# -- the observation of a step


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
        self._computed_from: set[nn.Parameter] = set()
        self._partners: dict[nn.Module, nn.Module] = {}  # of each `lora_A` of an adapter, its `lora_B`
        self._deferring: set[str] = set()  # autograd.Functions whose backwards put gradients into the store

    # -- interface of an observer

    def saw_graph(self, roots: Iterable[GradientEdge]) -> None:
        """Record the uses of parameters in a graph."""
        if not self._places:
            self._find_places()  # also finds the parameters from which weights are computed
        for use in parameter_uses(roots, self._computed_from):
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
            functions = {}  # lookups inside compiled regions, which are no GEMMs
        deferring = {name: flops for name, flops in functions.items() if name in self._deferring}
        unknown = {name: flops for name, flops in functions.items() if name not in self._deferring}
        undeferred = uses.hooked + uses.by_autograd + sum(unknown.values())
        is_unused = undeferred > 0 and not self._has_gradient(parameter, place)
        if is_unused:
            undeferred = 0
        reason = ""
        if is_unused:
            reason = _UNUSED
        elif uses.hooked:
            reason = _HOOK
        elif LOSS_IN_PARTS in unknown:
            reason = _WITH_LOSS
        elif undeferred:
            reason = undeferred_reason(place.owner, place.key, parameter.dim(), unknown)
        elif not (uses.has_layer or deferring):
            reason = uncounted_reason(place.owner, uses.others or uses.functions)
        deferred = uses.deferred + sum(deferring.values())
        return ParameterWork(place.stage, place.name, tuple(parameter.shape), deferred, undeferred, reason)

    def _unobserved(self, observed: list[ParameterWork], names: set[tuple[int, str]]) -> Iterator[ParameterWork]:
        """Yield the work of parameters that have a gradient without an observed use.

        Each is assumed to have as many rows as the parameter with the most rows in its stage.

        names: stages and names of all parameters with observed uses.
        """
        rows: defaultdict[int, int] = defaultdict(int)
        for work in observed:
            flops_per_row = gemm_flops(torch.Size(work.shape), 1)
            rows[work.stage] = max(rows[work.stage], (work.deferred + work.undeferred) // max(1, flops_per_row))
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                owner = module.get_submodule(name.rpartition(".")[0])
                place = _Place(stage, name, owner, name.rpartition(".")[2])
                if parameter.dim() < 2 or (stage, name) in names or not self._has_gradient(parameter, place):
                    continue
                flops = gemm_flops(parameter.shape, rows[stage])
                reason = _NOT_OBSERVED
                if isinstance(owner, nn.Embedding):
                    flops = 0
                    reason = uncounted_reason(owner, ())
                yield ParameterWork(stage, name, tuple(parameter.shape), 0, flops, reason)

    def _has_gradient(self, parameter: Tensor, place: _Place) -> bool:
        """Return False if a parameter has no gradient after the step, or one of zeros, as FSDP2 gives unused ones.

        For the first factor of an adapter, the gradient of the second one counts: as long as the second is zero, the
        gradient of the first is.

        parameter: the tensor that was used in the step, which FSDP2 may have replaced since.
        """
        partner = self._partners.get(place.owner)
        current = getattr(partner or place.owner, place.key, None)
        tensors = [] if partner is not None else [parameter]
        if isinstance(current, nn.Parameter):
            tensors.append(current)
        if any(tensor._post_accumulate_grad_hooks for tensor in tensors):
            return True  # the hook may have taken the gradient
        gradients = [local(tensor.grad) for tensor in tensors if tensor.grad is not None]
        return any(not gradient.numel() or bool(gradient.count_nonzero()) for gradient in gradients)

    # -- places of parameters

    def _uses_of(self, parameter: Tensor) -> _Uses:
        """Return the observed uses of a parameter."""
        if not self._places.get(parameter):  # FSDP2 replaces the parameters during a step
            self._find_places()
            self._places.setdefault(parameter, [])  # not a parameter of a stage
        return self._uses[parameter]

    def _find_places(self) -> None:
        """Record the places of the current parameters of the stages."""
        for stage, module in self._modules.items():
            self._computed_from.update(merged_factors(module))
            self._partners.update((place.adapter.lora_A, place.adapter.lora_B) for place in adapter_places(module))
            for path, owner in module.named_modules():
                for key, parameter in owner.named_parameters(recurse=False):
                    place = _Place(stage, f"{path}.{key}".lstrip("."), owner, key)
                    places = self._places.setdefault(parameter, [])
                    if place not in places:
                        places.append(place)
                    if is_computed_from(owner, key):
                        self._computed_from.add(parameter)


def _main_place(places: list[_Place]) -> _Place:
    """Return the place where a shared parameter is used in a GEMM: for a tied embedding, the head."""
    return next((place for place in places if not isinstance(place.owner, nn.Embedding)), places[0])


# -- uses of parameters in the autograd graph of a forward


class Use(NamedTuple):
    """Use of a parameter, or of a view of it, by one operator.

    Attributes:
        parameter: the parameter.
        operator: name of the operator.
        kind: "gemm"; "computed" for a GEMM with a weight that is computed from the parameter; "function" for an
            `autograd.Function` or a compiled region, whose content is unknown; "other".
        flops: FLOPs of the weight gradient; for a "function", those of one GEMM over the rows of the result; 0 for
            "other".
    """

    parameter: nn.Parameter
    operator: str
    kind: Literal["gemm", "computed", "function", "other"]
    flops: int


def parameter_uses(roots: Iterable[GradientEdge], computed_from: Collection[nn.Parameter] = ()) -> Iterator[Use]:
    """Yield the uses of matrices and stacks of matrices, not of vectors, in the graph of `roots`.

    computed_from: parameters from which weights are computed.
    """
    pending = [root.node for root in roots]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        yield from _uses_by(node, computed_from)
        pending.extend(source for source, _ in node.next_functions if source is not None)


def _uses_by(node: Node, computed_from: Collection[nn.Parameter]) -> Iterator[Use]:
    """Yield the uses by the operator of a backward node."""
    operator = operator_of(node)
    if operator in _VIEWS or operator in _JOINS:
        return  # counted for the operators that take their results
    for index, (source, number) in enumerate(node.next_functions):
        if source is None:
            continue
        parameters = [parameter for parameter in _origins(source) if parameter.dim() > 1]
        summed_size = _summed_size(operator, index, source, number)
        if summed_size is not None:
            flops = 2 * _shape(node, 0).numel() * summed_size
            if parameters:
                yield from _shared(parameters, operator, flops)
            elif computed_from:
                yield from _computed(source, computed_from, operator, flops)
        elif isinstance(node, BackwardCFunction):
            rows = _shape(node, 0)[:-1].numel()
            for parameter in parameters:
                yield Use(parameter, operator, "function", gemm_flops(parameter.shape, rows))
        else:
            for parameter in parameters:
                yield Use(parameter, operator, "other", 0)


def gemm_flops(shape: torch.Size, rows: int) -> int:
    """Return the FLOPs of the weight gradient of a matrix, or of a stack of matrices that share the rows."""
    matrix = shape if len(shape) == 2 else shape[1:]
    return 2 * rows * prod(matrix)


def operator_of(node: Node) -> str:
    """Return the operator of a backward node: "Addmm" for AddmmBackward0."""
    return node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _summed_size(operator: str, index: int, source: Node, number: int) -> int | None:
    """Return the size over which a GEMM sums; None if the operator is no GEMM, or the operand cannot be a weight.

    Args:
        operator: name of the operator.
        index: index of the operand.
        source: backward node of the operator that has made the operand.
        number: index of the operand among the results of that operator.
    """
    if operator == "Convolution":
        return prod(_shape(source, number)[1:]) if index == 1 else None
    dimension = _GEMMS.get(operator, {}).get(index)
    return None if dimension is None else _shape(source, number)[dimension]


def _shape(node: Node, number: int) -> torch.Size:
    """Return the shape of a result of the forward operator whose backward is `node`."""
    return torch.Size(node._input_metadata[number].shape)


def _origins(source: Node) -> list[nn.Parameter]:
    """Return the parameters that an operand consists of; none if it is made by more than views and joins."""
    parameters: list[nn.Parameter] = []
    pending = [source]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            parameters.append(variable)
        elif operator_of(node) in _VIEWS or operator_of(node) in _JOINS:
            pending.extend(origin for origin, _ in node.next_functions if origin is not None)
        else:
            return []
    return parameters


def _shared(parameters: list[nn.Parameter], operator: str, flops: int) -> Iterator[Use]:
    """Yield the uses of a GEMM whose weight is joined from parameters; their FLOPs are in proportion to elements."""
    elements = sum(parameter.numel() for parameter in parameters)
    for parameter in parameters:
        yield Use(parameter, operator, "gemm", flops * parameter.numel() // max(1, elements))


def _computed(source: Node, computed_from: Collection[nn.Parameter], operator: str, flops: int) -> Iterator[Use]:
    """Yield the use of the largest parameter from which the weight of a GEMM is computed, if any."""
    origins: list[nn.Parameter] = []
    pending = [source]
    visited: set[Node] = set()
    while pending and len(visited) < _MAX_OPERATORS:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if operator_of(node) in _GEMMS:  # of an adapter's factors, or one whose result is no weight
            operands = (_origins(operand) for operand, _ in node.next_functions if operand is not None)
            origins += (parameter for parameters in operands for parameter in parameters if parameter in computed_from)
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and variable in computed_from:
            origins.append(variable)
        pending.extend(origin for origin, _ in node.next_functions if origin is not None)
    if origins:
        yield Use(max(origins, key=torch.numel), operator, "computed", flops)


# -- reasons why the weight gradient of a parameter is not deferred


def is_computed_from(owner: nn.Module, name: str) -> bool:
    """Return True if a weight is computed from a parameter. name: of the parameter in its module `owner`."""
    return isinstance(owner, ParametrizationList) or name in ("weight_orig", "weight_g", "weight_v")


def uncounted_reason(owner: nn.Module, operators: Collection[str]) -> str:
    """Return the reason why a parameter is not counted. operators: those that use it."""
    if isinstance(owner, nn.Embedding):
        return "embedding: its gradient is no GEMM, not counted"
    return f"used by {', '.join(sorted(operators))}: no GEMM, not counted"


def undeferred_reason(owner: nn.Module, name: str, dim: int, functions: Collection[str]) -> str:
    """Return the reason why autograd computes the gradient of a weight.

    Args:
        owner: module of the weight.
        name: its name in the module.
        dim: its number of dimensions.
        functions: `autograd.Function`s that take it, whose content is unknown.
    """
    reason = _reason_by_owner(owner, name, dim)
    if not functions:
        return reason
    titles = ["torch.compile" if function == "CompiledFunction" else function for function in functions]
    return f"{reason}; inside {', '.join(sorted(titles))}, counted as one GEMM"


def _reason_by_owner(owner: nn.Module, name: str, dim: int) -> str:
    """Return the reason that follows from the module of a weight."""
    kind = type(owner).__name__
    if is_computed_from(owner, name):
        how = "parametrized" if isinstance(owner, ParametrizationList) else "pruned, or by a norm"
        return f"weight computed from others ({how})"
    if isinstance(owner, Linear | TransposedLinear | GroupedLinear):
        return f"{kind} defers, but its weight is used outside its forward"
    if type(owner) is nn.Linear:
        return f"nn.Linear, {_NOT_PASSED}"
    if deferring_class(owner) is not None:
        return f"{kind}, {_NOT_PASSED}"
    if isinstance(owner, nn.Linear) and is_fsdp_module(owner):
        return f"{kind}: call defer_weight_grads before fully_shard"
    if isinstance(owner, nn.Linear):
        return f"subclass {kind} of nn.Linear with its own forward"
    if type(owner) in _CONVOLUTIONS:
        return f"nn.{kind}"
    if isinstance(owner, nn.Embedding):
        return "weight of an embedding, used in a GEMM outside a deferring layer"
    stacked = f"{dim}-D parameter" if dim > 2 else "parameter"
    return f"{stacked} of {kind}, used outside a deferring layer"
