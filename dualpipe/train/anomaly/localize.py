"""Find the first bad result of a step by rerunning it and measuring every result as it is made.

Within a micro-batch, results depend on each other in one chain: forward through the stages and the segments of each,
then backward. A bad result makes all later results bad, on whatever rank they are. So the origin is the first bad
result in the chain, over all ranks. Ranks that exchange tokens for experts are at the same place in the chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from dualpipe.nn.deferral import local
from dualpipe.parallel.experts.one_hop import DispatchPlan
from dualpipe.pipeline.microbatch_state import SegmentRun
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.step.step_runner import StepRunner

_MAX_SHOWN = 4  # names in a message
_MAX_SENT = 64  # names that a rank sends to the others
_AFTER_SEGMENTS = 1 << 30  # sorts after all segments of a stage
K = TypeVar("K")
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class ResultLocation(NamedTuple):
    """The place where a result was made. Locations sort in the order of the chain.

    order: sort key within a micro-batch.
    microbatch: its number.
    rank: global rank.
    label: text, such as "F(stage 1, micro-batch 0)".
    """

    order: tuple[int, ...]
    microbatch: int
    rank: int
    label: str

    @staticmethod
    def of(source: Action | SegmentRun, rank: int) -> ResultLocation:
        """Return the location of a result of an action, or of one of its segments, on a rank."""
        is_forward = source.kind == "F"
        direction = 1 if is_forward else -1
        if isinstance(source, SegmentRun):
            segment_order = direction * source.number
            label = str(source)
        else:
            segment_order = _AFTER_SEGMENTS
            label = source.title
        # A segment that is recomputed ("R") comes before its backward.
        order = (not is_forward, direction * source.stage, segment_order, source.kind != "R")
        return ResultLocation(order, source.microbatch, rank, label)


class ResultWatch(Observer):
    """A context manager that measures every result made inside. The host does not wait.

    An action "I" is recorded as the "B" that does the same work in another order.

    Attributes:
        results: measurements by location.
        calls: for each location, the measured outputs of modules in `stages` since the result before it, by module
            name, in the order of the calls.

    Args:
        recorder: reports the results.
        measure: returns an integer or float scalar on the device for a tensor.
        stages: modules whose outputs are measured too.
        kinds: types of the sources of results to measure.
    """

    def __init__(
        self, recorder: Recorder, measure: Callable[[Tensor], Tensor], stages: Iterable[nn.Module] = (),
        kinds: tuple[type, ...] = (Action, SegmentRun),
    ) -> None:
        self.results: dict[ResultLocation, Tensor] = {}
        self.calls: dict[ResultLocation, dict[str, Tensor]] = {}
        self._recorder = recorder
        self._measure = measure
        self._kinds = kinds
        self._modules = [named_module for stage in stages for named_module in stage.named_modules()]
        self._current_calls: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        self._hooks = [module.register_forward_hook(partial(self._record_call, name))
                       for name, module in self._modules if name]
        self._recorder.subscribe(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._recorder.unsubscribe(self)
        for hook in self._hooks:
            hook.remove()

    def _measure_all(self, outputs: object) -> Tensor | None:
        """Return the sum of the measurements of all floating-point tensors in `outputs`, None without one."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        plan = next((value for value in values if isinstance(value, DispatchPlan)), None)
        if plan is not None:
            # Rows for other ranks are in a buffer of the maximum size: those after the sent ones are not results.
            buffer_size = len(plan.ids)
            num_sent = int(plan.counts[:, 0].sum())
            values = tuple(value[:num_sent] if isinstance(value, Tensor) and value.shape[:1] == (buffer_size,)
                           else value for value in values)
        measured = [self._measure(value) for value in values
                    if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]
        if not measured:
            return None
        return measured[0] if len(measured) == 1 else torch.stack(measured).sum()

    def _record_call(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        """Forward hook: measure the outputs of a module."""
        value = self._measure_all(outputs)
        if value is not None:
            self._current_calls[name] = value

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Measure the results of an action or a segment."""
        if not isinstance(what, self._kinds):
            return
        value = self._measure_all(results)
        if value is None:
            return
        assert isinstance(what, Action | SegmentRun), "only results of these kinds have a location"
        if what.kind == "I":
            what = what._replace(kind="B") if isinstance(what, SegmentRun) else replace(what, kind="B")
        location = ResultLocation.of(what, self._recorder.rank)
        self.results[location] = value
        self.calls[location] = self._current_calls
        self._current_calls = {}


def read_values(measured: dict[K, Tensor]) -> dict[K, Any]:
    """Return scalars on the device as Python numbers. The host waits for the device once."""
    if not measured:
        return {}
    return dict(zip(measured, torch.stack(list(measured.values())).tolist()))


@torch.no_grad()
def count_nonfinite(tensor: Tensor) -> Tensor:
    """Return the number of elements that are infinite or NaN, an int64 scalar."""
    return (~tensor.isfinite()).sum()


@torch.no_grad()
def sum_in_fp32(tensor: Tensor) -> Tensor:
    """Return the sum of the elements, a float32 scalar: the cheapest test that all are finite.

    It is never finite if an element is not. Finite elements may overflow it, but hardly ever do.
    """
    return tensor.sum(dtype=torch.float32)


@torch.no_grad()
def checksum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the elements' bits as integers, modulo 2^64, an int64 scalar. Any flipped bit changes it."""
    quantized = quantized_part(tensor)
    if quantized is not None:
        tensor = quantized.block_rows
    plain = local(tensor.detach()).contiguous()
    return plain.view(_INTEGER_DTYPES[plain.element_size()]).sum(dtype=torch.int64)


class Rerun(NamedTuple):
    """The result of a rerun of a step, equal on all ranks.

    loss: loss of the step.
    norm: gradient norm.
    checksums: checksum of the gradients of every rank.
    origin: rank and place of the first non-finite result, or "".
    parameters: names, with ranks, of parameters that were not finite before the step.
    gradients: names, with ranks, of gradients that are not finite.
    """

    loss: float
    norm: float
    checksums: list[int]
    origin: str
    parameters: list[str]
    gradients: list[str]

    def to_record(self) -> dict[str, Any]:
        """Return loss, norm and checksums without rounding, as JSON for a bundle."""
        checksums = [f"{checksum:016x}" for checksum in self.checksums]
        return {"loss": self.loss.hex(), "norm": self.norm.hex(), "sums": checksums}

    def describe(self, first_origin: str = "") -> str:
        """Return the findings as text.

        Args:
            first_origin: rank and place of the first non-finite result in the step itself, or "" if unknown.
        """
        is_finite = math.isfinite(self.loss + self.norm)
        if is_finite and not (self.origin or self.parameters or self.gradients):
            rank = first_origin.partition(",")[0] or "a rank"
            first = f"first in {first_origin}, but " if first_origin else ""
            return (f"not repeatable: {first}in a rerun the whole step is finite; suspect the device or the memory of "
                    f"{rank}")
        findings = [f"first in {self.origin}"] if self.origin else []
        for kind, names in (("parameters before the step", self.parameters), ("gradients", self.gradients)):
            if names:
                more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
                findings.append(f"{kind} that are not finite: {', '.join(names[:_MAX_SHOWN])}{more}")
        return "; ".join(findings)


class _RankFindings(NamedTuple):
    """The findings of one rank in a rerun.

    origin: location of its first non-finite result.
    loss: None on ranks without the last stage.
    checksum: of its gradients.
    parameters: names of parameters that were not finite before the step.
    gradients: names of gradients that are not finite.
    """

    origin: ResultLocation | None
    loss: float | None
    checksum: int
    parameters: list[str]
    gradients: list[str]


def rerun_step(runner: StepRunner, batch: TokenBatch, step: int) -> Rerun:
    """Run a step from the state before it, and find what is not finite. Changes nothing but routers. Collective.

    Args:
        runner: runs the step.
        batch: of the step.
        step: counted from 1.
    """
    stages = runner.model.stages
    named_parameters = {name: local(param) for stage in stages for name, param in stage.named_parameters()}
    bad_parameters = names_of_nonfinite(named_parameters)
    with ResultWatch(runner.recorder, count_nonfinite, stages) as watch:
        losses = runner.run_step(batch, step)
    runner.drop_scores()
    gradients = local_gradients(stages)
    norm = float(runner.pipeline.clip_grad_norm_(math.inf))

    def collect_findings() -> _RankFindings:
        return _RankFindings(
            origin=_first_nonfinite(watch, losses, runner.recorder.rank),
            loss=None if losses is None else float(losses[0]),
            checksum=sum(int(checksum_bits(gradient)) for gradient in gradients.values()) % 2**64,
            parameters=bad_parameters[:_MAX_SENT],
            gradients=names_of_nonfinite(gradients)[:_MAX_SENT],
        )

    by_rank = runner.job.ranks.gather(collect_findings)
    runner.pipeline.zero_grad()
    return _merge_findings(by_rank, norm, runner.recorder)


def _first_nonfinite(watch: ResultWatch, losses: Tensor | None, rank: int) -> ResultLocation | None:
    """Return the location of this rank's first non-finite result, with the innermost module that made it."""
    nonfinite = [location for location, count in read_values(watch.results).items() if count]
    if losses is not None and not bool(losses.isfinite().all()):
        nonfinite.append(ResultLocation((0, _AFTER_SEGMENTS), 0, rank, "the loss"))  # after all forwards
    if not nonfinite:
        return None
    first = min(nonfinite)
    counts = read_values(watch.calls.get(first, {}))
    module = next((name for name, count in counts.items() if count), "")  # inner modules return before outer ones
    return first._replace(label=f"{first.label}, in {module}") if module else first


def _merge_findings(by_rank: Sequence[_RankFindings], norm: float, recorder: Recorder) -> Rerun:
    """Return the result of a rerun from the findings of all ranks. Names start with those of the origin's rank."""
    first = min((findings.origin for findings in by_rank if findings.origin is not None), default=None)
    ranks = sorted(range(len(by_rank)), key=lambda rank: first is None or rank != first.rank)
    return Rerun(
        loss=next(findings.loss for findings in by_rank if findings.loss is not None),
        norm=norm,
        checksums=[findings.checksum for findings in by_rank],
        origin=f"{recorder.name(first.rank)}, {first.label}" if first else "",
        parameters=[f"{name} on {recorder.name(rank)}" for rank in ranks for name in by_rank[rank].parameters],
        gradients=[f"{name} on {recorder.name(rank)}" for rank in ranks for name in by_rank[rank].gradients],
    )


def local_gradients(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's shards of the gradients, by parameter name."""
    return {name: local(param.grad) for stage in stages for name, param in stage.named_parameters()
            if param.grad is not None}


def names_of_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors with an infinite or NaN element."""
    counts = {name: count_nonfinite(tensor) for name, tensor in tensors.items()
              if tensor.is_floating_point() and tensor.numel()}
    return [name for name, count in read_values(counts).items() if count]
