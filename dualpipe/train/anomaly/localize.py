"""Running a step again and looking at every result as it is made, to find the one that others are bad because of.

Within a micro-batch results follow from each other in one chain: forward through the stages and the segments of each,
then back. What is wrong with one is wrong with all behind it, on whatever ranks those are; so of all ranks' bad results
the first in the chain is the source. Ranks that exchange tokens for experts are at the same place of the chain then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from dualpipe.nn.deferral import local
from dualpipe.parallel.experts.dispatcher import Plan
from dualpipe.pipeline.microbatch import SegmentRun
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.step.step_runner import StepRunner

_SHOWN, _KNOWN = 4, 64  # names of a kind, and those that a rank tells
_END = 1 << 30  # behind all segments of a stage
K = TypeVar("K")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Spot(NamedTuple):
    """The place where a result was made; the least one is the first in the chain."""

    order: tuple[int, ...]
    microbatch: int
    rank: int
    what: str

    @staticmethod
    def of(what: Action | SegmentRun, rank: int) -> Spot:
        """The place of a result of an action, or of one of its segments."""
        forward, number = what.kind == "F", what.number if isinstance(what, SegmentRun) else None
        direction = 1 if forward else -1
        place = _END if number is None else direction * number
        return Spot((not forward, direction * what.stage, place, what.kind != "R"), what.microbatch, rank,
                    str(what) if isinstance(what, SegmentRun) else what.title)


class Watch(Observer):
    """For a `with`: what `measure` (an integer scalar on the device) gives of each result that is made inside; the host
    waits for none. An "I" counts as the "B" that it is in another order of the same work.

    results: by where they were made; calls: of what the modules in `stages` returned before, in order, by name.
    kinds: of results, those of actions and of their segments.
    """

    def __init__(
        self, recorder: Recorder, measure: Callable[[Tensor], Tensor], stages: Iterable[nn.Module] = (),
        kinds: tuple[type, ...] = (Action, SegmentRun),
    ) -> None:
        self._recorder, self._measure, self._kinds = recorder, measure, kinds
        self._modules = [pair for stage in stages for pair in stage.named_modules()]
        self.results: dict[Spot, Tensor] = {}
        self.calls: dict[Spot, dict[str, Tensor]] = {}
        self._called: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        self._hooks = [m.register_forward_hook(partial(self._call, name)) for name, m in self._modules if name]
        self._recorder.subscribe(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._recorder.unsubscribe(self)
        for hook in self._hooks:
            hook.remove()

    def _value(self, tensors: object) -> Tensor | None:
        given = tensors if isinstance(tensors, tuple) else (tensors,)
        if (plan := next((each for each in given if isinstance(each, Plan)), None)) is not None:
            # Rows for other ranks are in room for the most that there can be: what is behind them is no result.
            room, sent = len(plan.ids), int(plan.counts[:, 0].sum())
            given = tuple(t[:sent] if isinstance(t, Tensor) and t.shape[:1] == (room,) else t for t in given)
        values = [self._measure(t) for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
        return values[0] if len(values) == 1 else torch.stack(values).sum() if values else None

    def _call(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        if (value := self._value(outputs)) is not None:
            self._called[name] = value

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Measure the results of an action or a segment."""
        if isinstance(what, self._kinds) and (value := self._value(results)) is not None:
            assert isinstance(what, Action | SegmentRun), "results of these kinds alone have a place"
            if what.kind == "I":
                what = what._replace(kind="B") if isinstance(what, SegmentRun) else replace(what, kind="B")
            spot = Spot.of(what, self._recorder.rank)
            self.results[spot], self.calls[spot], self._called = value, self._called, {}


def on_host(measured: dict[K, Tensor]) -> dict[K, Any]:
    """The values; waits for the device once."""
    return dict(zip(measured, torch.stack(list(measured.values())).tolist())) if measured else {}


@torch.no_grad()
def nonfinite(tensor: Tensor) -> Tensor:
    """Count the numbers that are infinite or NaN, as an int64 scalar."""
    return (~tensor.isfinite()).sum()


@torch.no_grad()
def total(tensor: Tensor) -> Tensor:
    """The sum of its numbers, a float32 scalar: the least that tells, as all but surely, whether all are finite."""
    return tensor.sum(dtype=torch.float32)


@torch.no_grad()
def bits(tensor: Tensor) -> Tensor:
    """The sum of its bits, taken as integers, modulo 2^64: an int64 scalar that any single changed bit changes."""
    if (part := quantized_part(tensor)) is not None:
        tensor = part.block_rows
    plain = local(tensor.detach()).contiguous()
    return plain.view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)


class Again(NamedTuple):
    """The result of running a step again, the same on every rank."""

    loss: float
    norm: float
    sums: list[int]  # the bits of each rank's gradients
    first: str  # where the first result that is not finite was made; "" for nowhere
    parameters: list[str]  # that were not finite before
    gradients: list[str]  # that are not finite

    def record(self) -> dict[str, Any]:
        """Return the loss, the norm and the sums in full, as a bundle keeps them."""
        return {"loss": self.loss.hex(), "norm": self.norm.hex(), "sums": [f"{each:016x}" for each in self.sums]}

    def text(self, then: str = "") -> str:
        """Return the finding as text.

        then: where the first result that was not finite was made in the step itself, if known.
        """
        if not any((self.first, self.parameters, self.gradients)) and math.isfinite(self.loss + self.norm):
            where = then.partition(",")[0] or "a rank"
            return (f"not repeatable: {f'first in {then}, but ' if then else ''}run again, all of the step is finite; "
                    f"suspect the device or the memory of {where}")
        found = [self.first and f"first in {self.first}"]
        for what, names in (("parameters before the step", self.parameters), ("gradients", self.gradients)):
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            found.append(f"{what} that are not finite: {', '.join(names[:_SHOWN])}{more}" if names else "")
        return "; ".join(filter(None, found))


def run_again(runner: StepRunner, batch: TokenBatch, step: int) -> Again:
    """Run a batch as the step did, counted from 1, from the state before it, and look at what is not finite; nothing is
    updated but routers. Collective."""
    stages = runner.model.stages
    parameters = where_nonfinite({name: local(p) for stage in stages for name, p in stage.named_parameters()})
    with Watch(runner.recorder, nonfinite, stages) as watch:
        losses = runner.run_step(batch, step)
    loss = None if losses is None else losses[0]
    runner.drop_scores()
    grads = named_gradients(stages)
    norm = float(runner.pipeline.clip_grad_norm_(math.inf))

    def look() -> tuple[Spot | None, float | None, int, *tuple[list[str], ...]]:
        """Return this rank's findings."""
        bad = [spot for spot, count in on_host(watch.results).items() if count]
        if losses is not None and not bool(losses.isfinite().all()):
            bad.append(Spot((0, _END), 0, runner.recorder.rank, "the loss"))  # behind all forwards
        if bad:  # of modules that are inside of each other the inner one returns first
            counts = on_host(watch.calls.get(min(bad), {}))
            inner = next((f", in {name}" for name, count in counts.items() if count), "")
            bad = [min(bad)._replace(what=min(bad).what + inner)]
        total = sum(int(bits(grad)) for grad in grads.values()) % 2**64
        names = [found[:_KNOWN] for found in (parameters, where_nonfinite(grads))]
        return min(bad, default=None), None if loss is None else float(loss), total, *names

    told = runner.job.ranks.gather(look)
    runner.optimizer.zero_grad()
    first, name = min((spot for spot, *_ in told if spot is not None), default=None), runner.recorder.name

    def by_rank(which: int) -> list[str]:
        """Names with their ranks, first those of the rank where it began."""
        named = [each[3:] for each in told]
        order = sorted(range(len(named)), key=lambda rank: first is None or rank != first.rank)
        return [f"{parameter} on {name(rank)}" for rank in order for parameter in named[rank][which]]

    return Again(next(value for _, value, *_ in told if value is not None), norm, [each[2] for each in told],
                 f"{name(first.rank)}, {first.what}" if first else "", by_rank(0), by_rank(1))


def named_gradients(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """This rank's parts of the gradients that there are, by the parameters' names."""
    return {name: local(p.grad) for stage in stages for name, p in stage.named_parameters() if p.grad is not None}


def where_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that have a number which is infinite or NaN."""
    counts = {name: nonfinite(t) for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    return [name for name, count in on_host(counts).items() if count]
