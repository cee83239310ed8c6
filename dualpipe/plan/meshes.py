"""Which runs there are on a number of GPUs, which of them fit in memory, and the best on each mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from dualpipe.models import HubConfig
from dualpipe.models.flops import meta_layer
from dualpipe.parallel.context.context_parallel import method_for
from dualpipe.plan.machines import Machine
from dualpipe.plan.memory import GB, built, estimate
from dualpipe.plan.predict import Prediction
from dualpipe.schedule.by_name.build import BUILDERS
from dualpipe.train.config.schema import Config

# What is tried. A schedule that is searched for takes its time for a single mesh: choose the mesh first.
SCHEDULES = tuple(name for name in BUILDERS if name != "auto")
RECOMPUTED: tuple[tuple[str, ...], ...] = ((), ("experts",), ("layer",), ("layer", "dispatch"))
MICRO_BATCHES = 1, 2, 4, 8  # sequences
LONG = 8192  # tokens that a rank has of a sequence, at least, where ranks share it: with fewer, sending is not hidden


@dataclass(frozen=True)
class PlanRequest:
    """What is planned for. sequences: of a step on all GPUs; by_memory: the best run is not the fastest, but the one
    that takes the least memory."""

    config: Config
    model: HubConfig
    machine: Machine
    gpus: int
    sequences: int
    by_memory: bool = False

    @property
    def capacity(self) -> float:
        """Bytes that a run may take."""
        return ((self.config.memory.capacity or self.machine.memory) - self.machine.reserve) * GB

    def score(self, run: Prediction) -> float:
        """What the best run has least of."""
        return run.peak if self.by_memory else run.step_seconds

    def floor(self, run: Prediction) -> float:
        """What `score` is not below, found in less time."""
        return 0.0 if self.by_memory else run.bound


def plan(request: PlanRequest, rows: int) -> list[Prediction]:
    """The best run on each mesh, the best mesh first: `rows` of them, among them one without a pipeline where it fits.

    Raises ValueError where nothing fits, with what comes nearest, and where there is no mesh at all.
    """
    meshes = [sorted(runs, key=request.floor) for runs in _meshes(request)]
    if not meshes:
        raise ValueError(f"no mesh of {request.gpus} GPUs takes {request.sequences} sequences a step; give other "
                         "--gpus, or --global-batch a number of tokens that they can share")
    found: list[Prediction] = []
    for runs in sorted(meshes, key=lambda runs: request.floor(runs[0])):
        enough = len(found) >= rows and request.floor(runs[0]) >= request.score(found[rows - 1])
        if (not enough or runs[0].config.parallel.pp == 1) and (best := _best(request, runs)):
            found = sorted([*found, best], key=request.score)
    if not found:
        run = min((run for runs in meshes for run in runs if _smallest(run)), key=lambda run: run.peak)
        raise ValueError(
            f"nothing fits into {request.capacity / GB:.0f} GB of a GPU; the nearest is {', '.join(described(run))}, "
            f"with {run.peak / GB:.1f} GB. Take more GPUs, or optimizer.moments = \"bf16\"")
    flat = next((run for run in found if run.config.parallel.pp == 1), None)
    return found[:rows] if flat is None or flat in found[:rows] else [*found[: rows - 1], flat]


def described(run: Prediction) -> tuple[str, str]:
    """The layout of a run, and what it computes at once."""
    p, t, rules = run.config.parallel, run.config.train, run.config.memory.recompute
    return (f"{p}, {p.schedule}",
            f"{t.num_chunks} micro-batches of {t.micro_batch_size}, recompute {' '.join(rules) or 'none'}")


def _best(request: PlanRequest, runs: list[Prediction]) -> Prediction | None:
    """The best of those that fit; they come by their floors."""
    best, least, too_large = None, inf, set[str]()  # schedules whose stages alone do not fit
    for run in runs:
        if request.floor(run) >= least:
            break
        if (schedule := run.config.parallel.schedule) in too_large:
            continue
        states = estimate(run.config, run.model, activations=False)
        if max(rank.total for rank in states) > request.capacity:
            too_large.add(schedule)
        elif run.peak <= request.capacity and request.score(run) < least:
            best, least = run, request.score(run)
    return best


def _smallest(run: Prediction) -> bool:
    """Return True if it takes less than its neighbours, which differ in the micro-batch, as a rule."""
    return run.config.train.micro_batch_size == 1 and bool(run.config.memory.recompute)


def _meshes(request: PlanRequest) -> Iterator[list[Prediction]]:
    """For each mesh, all runs on it."""
    divisors = [n for n in range(1, request.gpus + 1) if request.gpus % n == 0]
    most = request.model.num_hidden_layers + 2  # ranks of a pipeline, whose ends need no layer
    parts = request.config.parallel.dp_replicate
    shared = [cp for cp in divisors if cp == 1 or (
        request.config.train.sequence_length >= cp * LONG and _divides_heads(request, cp))]
    for pp, cp, ep in product(divisors, shared, divisors):
        dp, rest = divmod(request.gpus, pp * cp * ep)
        possible = not rest and dp and dp % parts == 0 and pp <= most and request.model.num_experts % ep == 0
        if possible and (runs := list(_runs(request, pp, dp, cp, ep))):
            yield runs


def _divides_heads(request: PlanRequest, cp: int) -> bool:
    """Return True if so many ranks can share sequences by parallel.cp_method."""
    try:
        for index in request.model.all_layers:
            method_for(meta_layer(request.model, index).self_attn, cp, request.config.parallel.cp_method)
    except ValueError:
        return False
    return True


def _runs(request: PlanRequest, pp: int, dp: int, cp: int, ep: int) -> Iterator[Prediction]:
    config, layers = request.config, request.model.num_hidden_layers
    sizes = MICRO_BATCHES[:1] if request.by_memory else MICRO_BATCHES
    for schedule, size, rules in product(SCHEDULES, sizes, RECOMPUTED):
        chunks, rest = divmod(request.sequences, size * dp * ep)
        shape = built(schedule, pp, 1)
        if rest or not chunks or shape.num_stages > layers + 2 or (rules and "dispatch" in rules and ep == 1):
            continue
        yield Prediction(replace(
            config,
            parallel=replace(config.parallel, pp=pp, dp=dp, cp=cp, ep=ep, schedule=schedule,
                             layers_per_stage=(), schedule_costs="", schedule_memory=0.0),
            train=replace(config.train, micro_batch_size=size, num_chunks=chunks, batch_size=0),
            memory=replace(config.memory, recompute=rules),
        ), request.model, request.machine)
