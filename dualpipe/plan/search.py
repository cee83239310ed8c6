"""Search over the runs of a model on N GPUs: the best run that fits in memory on each mesh.

A run is a mesh with a schedule, a micro-batch size and recompute rules. A `Prediction` estimates the time of its step
and its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from dualpipe.models import HubConfig
from dualpipe.models.flops import meta_layer
from dualpipe.parallel.context.context_parallel import method_for
from dualpipe.parallel.mesh import check_replicate
from dualpipe.plan.machines import Machine
from dualpipe.plan.memory import GB, cached_schedule, check_run, estimate
from dualpipe.plan.predict import Prediction
from dualpipe.schedule.by_name import BUILDERS
from dualpipe.train.config.schema import Config
from dualpipe.train.optim.optimizer import check_optimizer

# Candidates. Two schedules are left out. The search of "auto" takes long for a single mesh, so choose the mesh first.
# "gpipe" is as fast as "1f1b" and holds more.
SCHEDULES = tuple(name for name in BUILDERS if name not in ("auto", "gpipe"))
RECOMPUTED: tuple[tuple[str, ...], ...] = ((), ("experts",), ("layer",), ("layer", "dispatch"))
MICRO_BATCHES = 1, 2, 4, 8  # sequences per micro-batch
LONG = 8192  # minimum tokens of a sequence per context-parallel rank: with fewer, communication is not hidden


@dataclass(frozen=True)
class PlanRequest:
    """Request for a plan.

    sequences: sequences per step on all GPUs. by_memory: True to prefer the run with the least memory to the fastest.
    """

    config: Config
    model: HubConfig
    machine: Machine
    gpus: int
    sequences: int
    by_memory: bool = False

    @property
    def capacity(self) -> float:
        """Bytes that a run may take on a GPU."""
        return ((self.config.memory.capacity or self.machine.memory) - self.machine.reserve) * GB

    def score(self, run: Prediction) -> float:
        """Return the quantity to minimize: bytes of the worst rank, or seconds of a step."""
        return run.peak if self.by_memory else run.step_seconds

    def floor(self, run: Prediction) -> float:
        """Return a lower bound of `score` that takes less time to compute."""
        return 0.0 if self.by_memory else run.bound


def plan(
    request: PlanRequest, rows: int, progress: Callable[[float], None] = lambda fraction_done: None
) -> list[Prediction]:
    """Return the best run on each mesh, the best mesh first.

    rows: maximum number of runs, 1 or more. progress: called with the fraction of the meshes that are done.

    If a run without a pipeline fits, the best of them is included, in place of the last row if need be.

    Raises:
        ValueError: a run would refuse the groups of the optimizer, or the sequences cannot be divided over any mesh of
            the GPUs, or no run fits in memory. Then the message names the run that comes nearest.
    """
    check_optimizer(request.config.optimizer, request.model, request.config.lora)
    check_replicate(request.gpus, request.config.parallel.dp_replicate, "parallel.dp_replicate")
    progress(0.0)
    refused: list[str] = []  # errors with which a run would refuse meshes
    meshes = [sorted(runs, key=request.floor) for runs in _meshes(request, refused)]
    if not meshes and refused:
        raise ValueError(refused[0])
    if not meshes:
        unit = request.gpus * request.config.train.sequence_length
        raise ValueError(f"no mesh of {request.gpus} GPUs takes {request.sequences} sequences a step; give another "
                         f"number of --gpus, or a --global-batch that is a multiple of {unit} tokens")
    best_runs: list[Prediction] = []
    for number, runs in enumerate(sorted(meshes, key=lambda runs: request.floor(runs[0]))):
        progress(number / len(meshes))
        has_enough = len(best_runs) >= rows and request.floor(runs[0]) >= request.score(best_runs[rows - 1])
        if has_enough and runs[0].config.parallel.pp > 1:
            continue
        best = _best(request, runs)
        if best is not None:
            best_runs = sorted([*best_runs, best], key=request.score)
    if not best_runs:
        smallest = min((run for runs in meshes for run in runs if _is_small(run)), key=lambda run: run.peak)
        raise ValueError(
            f"nothing fits into {request.capacity / GB:.0f} GB of a GPU; the nearest is "
            f"{', '.join(describe(smallest))}, with {smallest.peak / GB:.1f} GB. Take more GPUs, "
            "optimizer.moments = \"bf16\", or (with adamw) optimizer.offload = true")
    unpipelined = next((run for run in best_runs if run.config.parallel.pp == 1), None)
    if unpipelined is None or unpipelined in best_runs[:rows]:
        return best_runs[:rows]
    return [*best_runs[: rows - 1], unpipelined]


def describe(run: Prediction) -> tuple[str, str]:
    """Return the layout of a run with its schedule, and its micro-batches with their recompute rules."""
    p = run.config.parallel
    t = run.config.train
    rules = " ".join(run.config.memory.recompute) or "none"
    return f"{p}, {p.schedule}", f"{t.num_chunks} micro-batches of {t.micro_batch_size}, recompute {rules}"


def _best(request: PlanRequest, runs: list[Prediction]) -> Prediction | None:
    """Return the best run that fits, or None. runs: sorted by `request.floor`."""
    best: Prediction | None = None
    best_score = inf
    too_large = set[str]()  # schedules whose parameters, gradients and optimizer states alone do not fit
    for run in runs:
        if request.floor(run) >= best_score:
            break
        schedule = run.config.parallel.schedule
        if schedule in too_large:
            continue
        without_activations = estimate(
            run.config, run.model, activations=False, ranks_per_node=request.machine.node)
        if max(rank.total for rank in without_activations) > request.capacity:
            too_large.add(schedule)
        elif run.peak <= request.capacity and request.score(run) < best_score:
            best = run
            best_score = request.score(run)
    return best


def _is_small(run: Prediction) -> bool:
    """Return True for the smallest micro-batch with recompute, which as a rule takes the least memory on its mesh."""
    return run.config.train.micro_batch_size == 1 and bool(run.config.memory.recompute)


def _meshes(request: PlanRequest, refused: list[str]) -> Iterator[list[Prediction]]:
    """Yield the runs of each mesh that has any. Appends the errors of meshes that a run would refuse to `refused`."""
    config = request.config
    divisors = [n for n in range(1, request.gpus + 1) if request.gpus % n == 0]
    max_pp = request.model.num_hidden_layers + 2  # the first and the last stage need no layer
    context_sizes = [cp for cp in divisors if cp == 1 or (
        config.train.sequence_length >= cp * LONG and _supports_context(request, cp))]
    for pp, cp, ep in product(divisors, context_sizes, divisors):
        dp, rest = divmod(request.gpus, pp * cp * ep)
        if rest or not dp or dp % config.parallel.dp_replicate or pp > max_pp or request.model.num_experts % ep:
            continue
        runs = list(_runs(request, pp, dp, cp, ep))
        if not runs:
            continue
        try:
            check_run(runs[0].config, request.model, request.machine.node)
        except ValueError as error:
            refused.append(str(error))
            continue
        yield runs


def _supports_context(request: PlanRequest, cp: int) -> bool:
    """Return True if `cp` ranks can share the sequences of all layers by parallel.cp_method."""
    try:
        for index in request.model.all_layers:
            method_for(meta_layer(request.model, index).self_attn, cp, request.config.parallel.cp_method)
    except ValueError:
        return False
    return True


def _runs(request: PlanRequest, pp: int, dp: int, cp: int, ep: int) -> Iterator[Prediction]:
    """Yield the runs on a mesh, fitting or not: all schedules, sizes of micro-batches and recompute rules."""
    config = request.config
    max_stages = request.model.num_hidden_layers + 2
    sizes = MICRO_BATCHES[:1] if request.by_memory else MICRO_BATCHES
    for schedule, size, rules in product(SCHEDULES, sizes, RECOMPUTED):
        num_microbatches, rest = divmod(request.sequences, size * dp * ep)
        num_stages = cached_schedule(schedule, pp, 1).num_stages
        is_redundant = "dispatch" in rules and ep == 1
        if rest or not num_microbatches or num_stages > max_stages or is_redundant:
            continue
        run_config = replace(
            config,
            parallel=replace(config.parallel, pp=pp, dp=dp, cp=cp, ep=ep, schedule=schedule,
                             layers_per_stage=(), schedule_costs="", schedule_memory=0.0),
            train=replace(config.train, micro_batch_size=size, num_chunks=num_microbatches, batch_size=0),
            memory=replace(config.memory, recompute=rules),
        )
        yield Prediction(run_config, request.model, request.machine)
