"""A stage, compiled: its segments in order, and what each of them reads, keeps and hands on.

A stage is compiled once, when the pipeline is built. A module with `segments()` that communicate or are recomputed
becomes these segments; neighbouring compute segments are merged. Any other module becomes one compute segment that
calls the module, so that its forward hooks and `torch.compile` work as everywhere.

The last segment of the last stage also applies the criterion, in the same autograd graph. What the step gives it, the
criterion and the labels of a micro-batch, is in the carry as `TARGET`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from dualpipe.nn.segments import (
    Communicate,
    Communication,
    Compute,
    Names,
    Segment,
    as_results,
    input_names,
    is_boundary,
    output_names,
    run_segments,
    validate_segments,
)
from dualpipe.parallel.fsdp.forward_hooks import with_forward_hooks
from dualpipe.pipeline.side_inputs import SideSpec

# Names in a carry that no segment of a user's can have: they are no identifiers.
SIDE = "(side inputs)"  # those of a plain module, by name
TARGET = "(target)"  # a `Target`, in the last stage


class Target(NamedTuple):
    """The labels and the criterion of the last stage, for one micro-batch."""

    criterion: Callable[..., Tensor] | None
    labels: tuple[Any, ...]
    keep_outputs: bool


@dataclass(frozen=True, slots=True)
class ProgramSegment:
    """One segment of a `StageProgram`.

    reads: names of its arguments; None: everything in the carry, in order. writes: names of its results; None: `fn`
    returns them as a dict, which replaces the carry. needed: names that stay in the carry after it.
    """

    number: int
    reads: Names | None
    writes: Names | None
    fn: Callable[..., Any] | None  # of a compute segment
    communication: Communication | None
    recompute: bool
    needed: frozenset[str]
    kept: Names  # what it reads that a recomputed region must keep from the forward
    region: tuple[int, ...]  # the segments that run again before the backward of this one; none: nothing does
    between_ranks: bool  # whether it computes what came from other ranks, as experts do

    def named(self, results: Any) -> dict[str, Any]:
        """Return the results by name."""
        if self.writes is None:
            return results
        return dict(zip(self.writes, as_results(self.writes, results)))


@dataclass(frozen=True)
class StageProgram:
    """The segments of a stage, in the order of a forward.

    backward_order: their numbers in the order of a backward. outputs: the names that a forward leaves in the carry;
    None where the last segment decides (see `ProgramSegment.writes`).
    """

    segments: tuple[ProgramSegment, ...]
    backward_order: tuple[int, ...]
    outputs: Names | None

    @cached_property
    def is_module(self) -> bool:
        """Return True for a module that is called as a whole."""
        return self.segments[0].reads is None

    @cached_property
    def num_communications(self) -> int:
        """The number of communications that a forward starts."""
        return sum(segment.communication is not None for segment in self.segments)


class OfferedSegments:
    """The segments that a module offers, and the process groups that they communicate over.

    An error of `segments()` is raised when they are asked for, so that the groups of other stages are known before.
    """

    def __init__(self, module: nn.Module) -> None:
        offered = getattr(module, "segments", None)
        self._error: Exception | None = None
        self._segments: list[Segment] | None = None
        try:
            self._segments = None if offered is None else list(offered())
        except Exception as raised:
            self._error = raised
        communications = [s.communication for s in self._segments or () if isinstance(s, Communicate)]
        self.groups = [c.group for c in communications if c.group is not None]

    def take(self) -> list[Segment] | None:
        """Return the segments; None where the module offers none. Raises the error of `segments()`."""
        if self._error is not None:
            raise self._error
        return self._segments


def compile_stage(module: nn.Module, offered: OfferedSegments, side: SideSpec, *, is_last: bool) -> StageProgram:
    """Compile a stage; ValueError for `segments()` that do not fit together."""
    segments = stage_segments(module, offered, side)
    if segments is None:
        return compile_module(module, is_last=is_last)
    outputs = output_names(segments)
    if not is_last:
        return compile_segments(segments, outputs)
    if isinstance(segments[-1], Communicate) or segments[-1].recompute:  # the criterion is not to be computed twice
        segments.append(Compute(_identity, outputs, outputs))
    *before, last = _merged(segments, outputs)
    assert isinstance(last, Compute), "a compute segment was appended behind a communication"
    writes = tuple(last.writes)
    end = Compute(partial(_end_stage, last.fn, writes, outputs), (*last.reads, TARGET), writes)
    program = compile_segments([*before, end], writes)
    ending = replace(program.segments[-1], writes=None)
    return StageProgram((*program.segments[:-1], ending), program.backward_order, None)


def compile_module(module: nn.Module, *, is_last: bool) -> StageProgram:
    """Compile a module that is called as a whole: one compute segment, which reads the whole carry."""
    call = ProgramSegment(
        number=0, reads=None, writes=None, fn=partial(_call_last_module if is_last else _call_module, module),
        communication=None, recompute=False,
        needed=frozenset(), kept=(), region=(), between_ranks=False,
    )
    return StageProgram((call,), (0,), None)


def compile_segments(segments: Sequence[Segment], results: Names) -> StageProgram:
    """Compile segments that leave `results` in the carry."""
    merged = _merged(segments, results)
    return StageProgram(tuple(_compiled(merged, results)), tuple(backward_order(merged)), results)


def segments_key(module: nn.Module) -> Hashable:
    """Return what the segments of a stage depend on besides the stage itself.

    A stage whose `segments()` differ from step to step has a method `segments_key()`; it is asked at the start of each
    step, and a stage with a new key is compiled again. Without the method, segments are taken once.
    """
    key = getattr(module, "segments_key", None)
    return None if key is None else key()


def stage_segments(module: nn.Module, offered: OfferedSegments, side: SideSpec) -> list[Segment] | None:
    """Return the segments of a stage between its forward hooks; None where the module is to be called as a whole."""
    taken = offered.take()
    if taken is None:
        return None
    segments = validate_segments(taken, side.names)
    if not any(isinstance(segment, Communicate) or segment.recompute for segment in segments):
        return None
    return with_forward_hooks(module, segments, _inputs(segments), output_names(segments))


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    """Return what a stage returned as a tuple; ValueError where it is not one or several tensors."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        kinds = [type(t).__name__ for t in outputs] if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise ValueError(f"a stage must return a tensor or a tuple of tensors, not {kinds}")
    if not outputs:
        raise ValueError("a stage must return a tensor or a tuple of tensors, not an empty one; return what it was "
                         "given where it has nothing to add")
    return tuple(outputs)


# -- the functions of segments


def _call_module(module: nn.Module, *values: Any) -> dict[str, Any]:
    """Call a whole module with its inputs and its side inputs; return the outputs by name."""
    *inputs, side = values
    outputs = as_tuple(module(*inputs, **side))
    return dict(zip(input_names(len(outputs)), outputs))


def _call_last_module(module: nn.Module, *values: Any) -> dict[str, Any]:
    """Call the module of the last stage, and apply the criterion."""
    *inputs, side, target = values
    outputs = as_tuple(module(*inputs, **side))
    return _stage_results(outputs, target)


def _stage_results(outputs: Sequence[Tensor], target: Target) -> dict[str, Any]:
    """Return the outputs by name; with a criterion the loss, and the outputs where they are kept."""
    if target.criterion is None:
        return dict(zip(input_names(len(outputs)), outputs))
    results = {"loss": target.criterion(*outputs, *target.labels)}
    if target.keep_outputs:
        results |= zip(input_names(len(outputs)), (output.detach() for output in outputs))
    return results


def _end_stage(fn: Callable[..., Any], writes: Names, outputs: Names, *values: Any) -> dict[str, Any]:
    """Run the last compute segment of the last stage, and apply the criterion."""
    *inputs, target = values
    results = dict(zip(writes, as_results(writes, fn(*inputs))))
    return _stage_results([results[name] for name in outputs], target)


def _identity(*values: Any) -> tuple[Any, ...]:
    return values


def _run_merged(parts: Sequence[Segment], reads: Names, writes: Names, *values: Any) -> tuple[Any, ...]:
    carry = run_segments(parts, dict(zip(reads, values)))
    return tuple(carry[name] for name in writes)


# -- compiling


def _inputs(segments: Sequence[Segment]) -> Names:
    """Return the names of a stage's inputs in their order: what segments read before one of them writes it."""
    written: set[str] = set()
    inputs: dict[str, None] = {}
    for segment in segments:
        inputs.update(dict.fromkeys(name for name in segment.reads if is_boundary(name) and name not in written))
        written.update(segment.writes)
    return tuple(sorted(inputs, key=lambda name: int(name[1:] or 0)))


def _compiled(segments: Sequence[Segment], results: Names) -> Iterable[ProgramSegment]:
    needed = needed_after(segments, results)
    kept: dict[int, Names] = {}
    region_of: dict[int, tuple[int, ...]] = {}
    for region in recomputed_regions(segments):
        kept |= region
        region_of[max(region)] = tuple(region)
    to_experts = [isinstance(segment, Communicate) and not segment.of_attention for segment in segments]
    sent = list(accumulate(to_experts))
    for number, segment in enumerate(segments):
        is_compute = isinstance(segment, Compute)
        yield ProgramSegment(
            number=number,
            reads=tuple(segment.reads),
            writes=tuple(segment.writes),
            fn=segment.fn if isinstance(segment, Compute) else None,
            communication=segment.communication if isinstance(segment, Communicate) else None,
            recompute=segment.recompute,
            needed=frozenset(needed[number]),
            kept=kept.get(number, ()),
            region=region_of.get(number, ()),
            between_ranks=is_compute and sent[number] % 2 == 1,
        )


def needed_after(segments: Sequence[Segment], results: Names) -> list[set[str]]:
    """Return, for each segment, the names that a later one reads before it is written again, or that are results."""
    needed = set(results)
    after = []
    for segment in reversed(segments):
        after.append(needed)
        needed = (needed - set(segment.writes)) | set(segment.reads)
    return after[::-1]


def recomputed_regions(segments: Sequence[Segment]) -> list[dict[int, Names]]:
    """Return the runs of neighbouring segments that are recomputed together: by number, the names that each reads and
    none of them has written before it."""
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

    The last segment comes first, but a communication comes as soon as all segments that use its results are through, so
    that its gradients travel while the segments before them compute.
    """
    order: list[int] = []
    waiting: list[tuple[int, int]] = []  # a communication, and the first compute segment whose backward comes before
    for number, sent in enumerate(segments):
        if isinstance(sent, Communicate):  # which uses what it brings, or renews what it has sent
            until = (later for later in range(number + 1, len(segments)) if isinstance(segments[later], Compute) and (
                {*segments[later].reads, *segments[later].writes}.intersection(sent.writes)
                or set(segments[later].writes).intersection(sent.reads)))
            waiting.append((number, next(until, len(segments))))
    for number in reversed(range(len(segments))):
        if isinstance(segments[number], Compute):
            order.append(number)
        while waiting and waiting[-1][1] >= number:
            order.append(waiting.pop()[0])
    return order


def _merged(segments: Sequence[Segment], results: Names) -> list[Segment]:
    """Merge neighbouring compute segments that are alike in `recompute`: tensors between them are not kept apart.

    A segment that is the first to read what a communication brings is not merged with those before it, which run while
    the communication is under way.
    """
    under_way: set[str] = set()
    num_arrived = 0
    keys: list[tuple[bool, bool, int]] = []
    for segment in segments:
        if isinstance(segment, Communicate):
            under_way = set(segment.writes)
        elif under_way.intersection(segment.reads):
            num_arrived += 1
            under_way = set()
        keys.append((isinstance(segment, Compute), segment.recompute, num_arrived))
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
    """Merge compute segments into one that writes those of their results that are needed later."""
    reads: dict[str, None] = {}
    written: dict[str, None] = {}
    for segment in parts:
        reads.update(dict.fromkeys(name for name in segment.reads if name not in written))
        written.update(dict.fromkeys(segment.writes))
    writes = tuple(name for name in written if name in needed)
    return Compute(partial(_run_merged, parts, tuple(reads), writes), tuple(reads), writes, recompute)
