"""Stages of a rank, compiled: the segments of a stage in order, with the names that each one reads, writes and saves.

A stage is compiled once, when the pipeline is built. If a module has `segments()` that communicate or are recomputed,
it is run as these segments, with neighbouring compute segments merged. Any other module becomes one compute segment
that calls the module, so that its forward hooks and `torch.compile` work as usual.

A compiled segment takes named values and returns named values. The criterion is one more segment after the last one of
the last stage, merged with it: both are in the same autograd graph. The criterion and the labels of a micro-batch are
in the carry as `TARGET`. A criterion with `takes_head_rows` gets `HeadRows` in place of logits that are more than its
`part_bytes`, if the last stage has a plain head and nobody else wants the logits.

Side inputs of a step are tensors without a gradient, such as position ids, that every stage may read. They go through
all stages together with the activations, after them in a message, sorted by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import Parameter, signature
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.head import PART_BYTES, HeadRows, LinearHead
from dualpipe.nn.loss import cross_entropy_loss
from dualpipe.nn.segments import (
    Communicate,
    Communication,
    Compute,
    Names,
    Segment,
    as_results,
    input_names,
    is_boundary,
    is_reserved,
    output_names,
    run_segments,
    validate_segments,
)
from dualpipe.parallel.forward_hooks import has_other_hooks, is_compiled, output_dtype, with_forward_hooks
from dualpipe.parallel.fsdp.stage_parameters import StageParameters

TARGET = "(target)"  # name of a `Target` in the last stage's carry; no identifier, so that no user's name is the same


class Target(NamedTuple):
    """Criterion and labels of one micro-batch, for the last stage.

    may_take_rows: the criterion takes `HeadRows`, and the caller does not want the logits. keep_outputs: keep what the
    criterion gets beside the loss, for the caller or for observers: the outputs, or the rows of a head in parts.
    """

    criterion: Callable[..., Tensor] | None
    labels: tuple[Any, ...]
    may_take_rows: bool = False
    keep_outputs: bool = False


@dataclass(frozen=True, slots=True)
class CompiledSegment:
    """One segment of a `CompiledStage`.

    Attributes:
        number: index in the program.
        reads: names of its arguments, as far as they are known before a forward.
        writes: names of its results, as far as they are known before a forward.
        is_open: True for a module that is called as a whole, and for the segment with the criterion, whose results are
            known only after a forward: `fn` takes the whole carry, and its results replace the carry.
        fn: function of a compute segment, from arguments by name to results by name.
        communication: communication of a communication segment.
        recompute: run the forward again before the backward.
        needed: names that stay in the carry after it.
        saved: names of arguments that are saved in the forward for the recomputation.
        region: numbers of the segments that are recomputed before the backward of this one.
        between_ranks: it computes data of other ranks, like experts between dispatch and combine.
    """

    number: int
    reads: Names
    writes: Names
    is_open: bool
    fn: Callable[[Mapping[str, Any]], dict[str, Any]] | None
    communication: Communication | None
    recompute: bool
    needed: frozenset[str]
    saved: Names
    region: tuple[int, ...]
    between_ranks: bool


@dataclass(frozen=True)
class CompiledStage:
    """Segments of a stage in the order of the forward.

    backward_order: their numbers in the order of the backward.
    """

    segments: tuple[CompiledSegment, ...]
    backward_order: tuple[int, ...]

    @cached_property
    def is_module(self) -> bool:
        """Return True if the stage is a module that is called as a whole."""
        return self.segments[0].is_open and len(self.segments) == 1 and not self.segments[0].reads

    @cached_property
    def num_communications(self) -> int:
        """Return the number of communications of a forward."""
        return sum(segment.communication is not None for segment in self.segments)


class SideSpec(NamedTuple):
    """Side inputs that one stage takes, or several stages together."""

    names: tuple[str, ...]
    takes_all: bool  # a `forward` has **kwargs
    is_hooked: bool = False  # pairs run by DeepSeek's `overlapped_forward_backward`, which takes no side inputs

    @staticmethod
    def of(module: nn.Module) -> SideSpec:
        """Return the parameters of the module's `forward` after the first, which is the activation."""
        module = getattr(module, "_orig_mod", module)  # a compiled module has (*args, **kwargs)
        try:
            parameters = list(signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # Python cannot see the signature
            return SideSpec((), False)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters[1:] if p.kind in by_name and not is_reserved(p.name))
        takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        return SideSpec(names, takes_all)

    def takes(self, name: str) -> bool:
        """Return True if the stage takes a side input of this name."""
        return self.takes_all or name in self.names


class OfferedSegments:
    """Result of a module's `segments()`, and the process groups over which they communicate.

    An error of `segments()` is raised by `take`, not by the constructor, so that the groups of all stages are collected
    even if one of them is invalid.
    """

    def __init__(self, module: nn.Module) -> None:
        self._error: Exception | None = None
        self._segments: list[Segment] | None = None
        try:
            method = optional_method(module, "segments")
            if method is not None and hasattr(type(module), "overlapped_forward_backward"):
                raise ValueError(f"{type(module).__name__} has segments() and overlapped_forward_backward, two ways to "
                                 "overlap, of which one would not run; remove one of them")
            self._segments = None if method is None else list(method())
        except Exception as raised:
            self._error = raised
        communications = [s.communication for s in self._segments or () if isinstance(s, Communicate)]
        self.groups = [c.group for c in communications if c.group is not None]

    def take(self) -> list[Segment] | None:
        """Return the segments; None if the module has no `segments()`. Raises the error of `segments()`."""
        if self._error is not None:
            raise self._error
        return self._segments


def compile_stage(module: nn.Module, offered: OfferedSegments, side: SideSpec, *, is_last: bool) -> CompiledStage:
    """Compile a stage. Raises ValueError for inconsistent `segments()`. is_last: the last stage of the pipeline."""
    segments = stage_segments(module, offered, side)
    if segments is None:
        return compile_module(module)
    outputs = output_names(segments)
    if not is_last:
        return compile_segments(segments, outputs)
    if isinstance(segments[-1], Communicate) or segments[-1].recompute:  # the criterion must not be recomputed
        segments.append(Compute(_identity, outputs, outputs))
    compiled = compile_segments(segments, (*outputs, TARGET))
    last = compiled.segments[-1]
    assert last.fn is not None, "a compute segment was appended after a communication"
    fn = partial(_apply_criterion, module, last.fn, outputs)
    with_criterion = replace(last, reads=(*last.reads, TARGET), is_open=True, fn=fn)
    return CompiledStage((*compiled.segments[:-1], with_criterion), compiled.backward_order)


def compile_module(module: nn.Module) -> CompiledStage:
    """Compile a module that is called as a whole into one compute segment."""
    call = CompiledSegment(
        number=0, reads=(), writes=(), is_open=True, fn=partial(_call_module, module), communication=None,
        recompute=False, needed=frozenset(), saved=(), region=(), between_ranks=False,
    )
    return CompiledStage((call,), (0,))


def compile_segments(segments: Sequence[Segment], results: Names) -> CompiledStage:
    """Compile segments that leave `results` in the carry."""
    merged = _merge_neighbours(segments, results)
    return CompiledStage(tuple(_compile_merged(merged, results)), tuple(backward_order(merged)))


def optional_method(stage: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return a method that a stage may have; None if it has none. Raises ValueError for an attribute of that name.

    A wrapper that looks up attributes in the module that it wraps, such as PEFT's, has none: its own forward is called.
    """
    method = getattr(stage, name, None)
    owner = getattr(method, "__self__", None)
    is_inner = isinstance(owner, nn.Module) and owner is not stage and name not in vars(stage)
    if is_inner and not hasattr(type(stage), name) and not is_compiled(stage):
        return None
    if method is not None and (not callable(method) or isinstance(method, nn.Module)):
        raise ValueError(f"{type(stage).__name__}.{name} is a {type(method).__name__}, but a stage's {name} is a "
                         "method that the pipeline calls; rename the attribute")
    return method


def stage_segments(module: nn.Module, offered: OfferedSegments, side: SideSpec) -> list[Segment] | None:
    """Return the segments of a stage, with its forward hooks; None if the module is called as a whole."""
    segments = offered.take()
    if segments is None:
        return None
    segments = validate_segments(segments, side.names)
    if not any(isinstance(segment, Communicate) or segment.recompute for segment in segments):
        return None
    return with_forward_hooks(module, segments, _inputs(segments), output_names(segments))


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    """Return the outputs of a stage as a tuple. Raises ValueError unless they are one or several tensors."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        kinds = [type(t).__name__ for t in outputs] if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise ValueError(f"a stage must return a tensor or a tuple of tensors, got {kinds}")
    if not outputs:
        raise ValueError("a stage must return a tensor or a tuple of tensors, got an empty tuple; return its inputs if "
                         "it has nothing to add")
    return tuple(outputs)


# -- the functions of segments


def _call_module(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Call a module with its inputs, and with the side inputs of the step by name; return the stage's results."""
    inputs: list[Any] = []
    side: dict[str, Any] = {}
    for name, value in values.items():
        if is_boundary(name):
            inputs.append(value)
        elif name != TARGET and value is not None:
            side[name] = value
    target = values.get(TARGET)
    head = plain_head(module) if target is not None and target.may_take_rows else None
    with nullcontext() if head is None else cast(Any, module).without_head():
        outputs = as_tuple(module(*inputs, **side))
    if target is None:
        return dict(zip(input_names(len(outputs)), outputs))
    return _stage_results(outputs, target, head)


def _run_segment(fn: Callable[..., Any], reads: Names, writes: Names, values: Mapping[str, Any]) -> dict[str, Any]:
    """Run the function of a user's compute segment; return its results by name."""
    return dict(zip(writes, as_results(writes, fn(*[values[name] for name in reads]))))


def _apply_criterion(
    module: nn.Module, fn: Callable[[Mapping[str, Any]], dict[str, Any]], outputs: Names, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the last compute segment of the last stage, and apply the criterion."""
    target = values[TARGET]
    head = plain_head(module) if target.may_take_rows else None
    with nullcontext() if head is None else cast(Any, module).without_head():
        results = fn(values)
    return _stage_results([results[name] for name in outputs], target, head)


def _stage_results(outputs: Sequence[Tensor], target: Target, head: LinearHead | None) -> dict[str, Any]:
    """Return the outputs by name; with a criterion, the loss, and the outputs only if they are kept or observed.

    head: the head of which `outputs` are the rows; None: they are the stage's outputs.
    """
    if target.criterion is None:
        return dict(zip(input_names(len(outputs)), outputs))
    logits: Sequence[Tensor | HeadRows] = outputs
    if head is not None:
        limit = getattr(_without_partial(target.criterion), "part_bytes", PART_BYTES)
        if _needs_parts(outputs, head, limit):
            logits = [HeadRows(rows, head, limit) for rows in outputs]
        else:
            logits = outputs = list(map(head.logits, outputs))
    results = {"loss": target.criterion(*map(_changeable, logits), *target.labels)}
    if target.keep_outputs:
        results |= zip(input_names(len(outputs)), (output.detach() for output in outputs))
    return results


def _needs_parts(outputs: Sequence[Tensor], head: LinearHead, limit: int) -> bool:
    """Return True if the logits of rows are more than a part of `limit` bytes: less of them are faster deferred."""
    return any(head.needs_parts(rows.shape[:-1].numel(), rows.dtype, limit) for rows in outputs)


def takes_head_rows(criterion: Callable[..., Any] | None) -> bool:
    """Return True if a criterion takes `HeadRows` like logits: `cross_entropy_loss`, or one with `takes_head_rows`."""
    criterion = _without_partial(criterion)
    return criterion is cross_entropy_loss or getattr(criterion, "takes_head_rows", False) is True


def _without_partial(criterion: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return the function that a `functools.partial` calls, or any other criterion itself."""
    while isinstance(criterion, partial):
        criterion = criterion.func
    return criterion


def plain_head(module: nn.Module) -> LinearHead | None:
    """Return the head of a last stage that can run in parts; None if the stage must return logits.

    It must where hooks of the user's see logits, where the stage or the head is compiled as a whole, and where the head
    is no plain linear layer, for example with an adapter or a quantized weight, or where its logits are cast to another
    dtype.
    """
    method = None if is_compiled(module) else optional_method(module, "linear_head")
    head: LinearHead | None = None if method is None else method()
    if head is None or is_compiled(head.layer) or has_other_hooks(module) or has_other_hooks(head.layer):
        return None
    if any(output_dtype(caster) not in (None, head.layer.weight.dtype) for caster in (module, head.layer)):
        return None
    return head if head.can_run_in_parts else None


def _identity(*values: Any) -> tuple[Any, ...]:
    """Return the arguments."""
    return values


def _changeable(output: Tensor | HeadRows) -> Tensor | HeadRows:
    """Return an output as a tensor that a criterion may change in place, which a leaf with a gradient is not."""
    if isinstance(output, HeadRows) or not (output.is_leaf and output.requires_grad):
        return output
    changeable: Tensor = _NonLeaf.apply(output)
    return changeable


class _NonLeaf(torch.autograd.Function):
    """Autograd function that returns its input, in the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data  # no view, as autograd refuses to change a view of a leaf in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _run_merged(parts: Sequence[Segment], reads: Names, writes: Names, *values: Any) -> tuple[Any, ...]:
    """Run merged compute segments; return the results that are needed later."""
    carry = run_segments(parts, dict(zip(reads, values)))
    return tuple(carry[name] for name in writes)


# -- compiling


def _inputs(segments: Sequence[Segment]) -> Names:
    """Return the names of a stage's inputs in their order: those that are read before a segment writes them."""
    written: set[str] = set()
    inputs: dict[str, None] = {}
    for segment in segments:
        inputs.update(dict.fromkeys(name for name in segment.reads if is_boundary(name) and name not in written))
        written.update(segment.writes)
    return tuple(sorted(inputs, key=lambda name: int(name[1:] or 0)))


def _compile_merged(segments: Sequence[Segment], results: Names) -> Iterable[CompiledSegment]:
    """Yield the compiled segments of a stage after its neighbouring compute segments have been merged."""
    needed = needed_after(segments, results)
    saved: dict[int, Names] = {}
    regions: dict[int, tuple[int, ...]] = {}  # by number of the last segment
    for region in recomputed_regions(segments):
        saved |= region
        regions[max(region)] = tuple(region)
    is_dispatch_or_combine = [isinstance(s, Communicate) and not s.of_attention for s in segments]
    num_before = list(accumulate(is_dispatch_or_combine))  # odd between a dispatch and its combine
    for number, segment in enumerate(segments):
        is_compute = isinstance(segment, Compute)
        reads = tuple(segment.reads)
        writes = tuple(segment.writes)
        yield CompiledSegment(
            number=number,
            reads=reads,
            writes=writes,
            is_open=False,
            fn=partial(_run_segment, segment.fn, reads, writes) if isinstance(segment, Compute) else None,
            communication=segment.communication if isinstance(segment, Communicate) else None,
            recompute=segment.recompute,
            needed=frozenset(needed[number]),
            saved=saved.get(number, ()),
            region=regions.get(number, ()),
            between_ranks=is_compute and num_before[number] % 2 == 1,
        )


def needed_after(segments: Sequence[Segment], results: Names) -> list[set[str]]:
    """Return for each segment the names whose values are read later, or are results."""
    needed = set(results)
    after = []
    for segment in reversed(segments):
        after.append(needed)
        needed = (needed - set(segment.writes)) | set(segment.reads)
    return after[::-1]


def recomputed_regions(segments: Sequence[Segment]) -> list[dict[int, Names]]:
    """Return the regions of neighbouring segments that are recomputed together.

    A region maps the number of each of its segments to the names that must have been saved for it: those that it reads,
    and that no earlier segment of the region writes.
    """
    regions: list[dict[int, Names]] = []
    for recompute, group in groupby(enumerate(segments), key=lambda pair: pair[1].recompute):
        if not recompute:
            continue
        written: set[str] = set()
        region: dict[int, Names] = {}
        for number, segment in group:
            region[number] = tuple(name for name in segment.reads if name not in written)
            written |= set(segment.writes)
        regions.append(region)
    return regions


def backward_order(segments: Sequence[Segment]) -> list[int]:
    """Return the numbers of the segments in the order of their backwards.

    Compute segments run backward from the last to the first. The backward of a communication starts as soon as all
    segments that use its results have run theirs, so that its gradients are in flight while other segments compute.
    """
    order: list[int] = []
    waiting: list[tuple[int, int]] = []  # a communication, and the compute segment that it follows in the backward
    for number, segment in enumerate(segments):
        if isinstance(segment, Communicate):
            waiting.append((number, _first_dependent(segment, number, segments)))
    for number in reversed(range(len(segments))):
        if isinstance(segments[number], Compute):
            order.append(number)
        while waiting and waiting[-1][1] >= number:
            order.append(waiting.pop()[0])
    return order


def _first_dependent(communicate: Communicate, number: int, segments: Sequence[Segment]) -> int:
    """Return the number of the first compute segment that uses a communication's results or overwrites its arguments.

    Returns `len(segments)` if there is none. number: the number of the communication.
    """
    for later in range(number + 1, len(segments)):
        segment = segments[later]
        if not isinstance(segment, Compute):
            continue
        uses_results = {*segment.reads, *segment.writes}.intersection(communicate.writes)
        if uses_results or set(segment.writes).intersection(communicate.reads):
            return later
    return len(segments)


def _merge_neighbours(segments: Sequence[Segment], results: Names) -> list[Segment]:
    """Merge neighbouring compute segments with the same `recompute`, so that tensors between them need no leaves.

    The first segment that reads the results of a communication is not merged with those before it, which run while the
    communication is in flight.
    """
    in_flight: set[str] = set()
    num_finished = 0
    keys: list[tuple[bool, bool, int]] = []
    for segment in segments:
        if isinstance(segment, Communicate):
            in_flight = set(segment.writes)
        elif in_flight.intersection(segment.reads):
            num_finished += 1
            in_flight = set()
        keys.append((isinstance(segment, Compute), segment.recompute, num_finished))
    merged: list[Segment] = []
    rows = zip(segments, needed_after(segments, results), keys)
    for (is_compute, recompute, _), group in groupby(rows, itemgetter(2)):
        parts, needed, _ = zip(*group)
        if not is_compute or len(parts) == 1:
            merged += parts
        else:
            merged.append(_merge(parts, needed[-1], recompute))
    return merged


def _merge(parts: Sequence[Segment], needed: set[str], recompute: bool) -> Compute:
    """Merge compute segments into one that writes the results that are needed later."""
    reads: dict[str, None] = {}
    written: dict[str, None] = {}
    for segment in parts:
        reads.update(dict.fromkeys(name for name in segment.reads if name not in written))
        written.update(dict.fromkeys(segment.writes))
    writes = tuple(name for name in written if name in needed)
    return Compute(partial(_run_merged, parts, tuple(reads), writes), tuple(reads), writes, recompute)


@dataclass(frozen=True)
class RankStages:
    """Stages of a rank, by stage number.

    Attributes:
        modules: the stages.
        specs: side inputs that the stages take.
        parameters: parameters of the stages under FSDP2.
        users: for each stage, the other stages that use parameters which FSDP2 manages in it.
        count: number of stages of the whole pipeline.
        device: device of all stages.
        batch_dim: dimension along which batches are split.
        compiled: the compiled stages; filled by `compile_stages`.
        known_groups: process groups over which the segments communicated when the pipeline was built; a failed step
            ends them.
    """

    modules: Mapping[int, nn.Module]
    specs: Mapping[int, SideSpec]
    parameters: Mapping[int, StageParameters]
    users: Mapping[int, set[int]]
    count: int
    device: torch.device
    batch_dim: int
    compiled: dict[int, CompiledStage] = field(default_factory=dict)
    known_groups: list[ProcessGroup] = field(default_factory=list)
    _key_methods: dict[int, Callable[[], Hashable] | None] = field(default_factory=dict)
    _keys: dict[int, Hashable] = field(default_factory=dict)

    @cached_property
    def is_hooked(self) -> bool:
        """Return True if the stages have one type with `overlapped_forward_backward`."""
        types = set(map(type, self.modules.values()))
        return len(types) == 1 and hasattr(types.pop(), "overlapped_forward_backward")

    def compile_stages(self, offered: Mapping[int, OfferedSegments] | None = None) -> None:
        """Compile the stages that have not been compiled yet, or whose segments have changed.

        A stage whose `segments()` change between steps has a method `segments_key()`. It is called at the start of
        every step, and a stage with a new key is compiled again. Without the method, a stage is compiled once.

        offered: the segments of the stages; only when the pipeline is built. Raises ValueError if a stage communicates
        over another process group than when the pipeline was built.
        """
        for number, module in self.modules.items():
            if offered is not None:
                self._key_methods[number] = optional_method(module, "segments_key")
            key_method = self._key_methods[number]
            key = None if key_method is None else key_method()
            if number in self.compiled and key == self._keys[number]:
                continue
            segments = OfferedSegments(module) if offered is None else offered[number]
            compiled = compile_stage(module, segments, self.specs[number], is_last=number == self.count - 1)
            groups = communication_groups(compiled)
            if offered is not None:
                self.known_groups.extend(groups)
            elif not set(groups) <= set(self.known_groups):
                raise ValueError(f"the segments of stage {number} communicate over another process group than when the "
                                 "pipeline was built; build the pipeline anew")
            self.compiled[number] = compiled
            self._keys[number] = key


def communication_groups(stage: CompiledStage) -> list[ProcessGroup]:
    """Return the groups over which a stage's segments communicate."""
    communications = [segment.communication for segment in stage.segments]
    return [each.group for each in communications if each is not None and each.group is not None]
