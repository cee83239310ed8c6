"""`dualpipe parity`: are loss and gradients of the pipelined model those of the unpipelined one?

Every rank computes the reference for itself, micro-batch by micro-batch on a model with all layers, and compares the
gradients of its own stages; rank 0 collects the differences. What [router] adds to the loss is part of both. In
bfloat16 rounding would hide too much: see `parity_bf16`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe import Pipeline
from dualpipe.dtypes import dtype_of, long_name
from dualpipe.nn.router_set import RouterSet
from dualpipe.parallel import DTypePlan
from dualpipe.schedule import build
from dualpipe.train.config import Config, fit_world
from dualpipe.train.console import Console, say
from dualpipe.train.job import Job, join
from dualpipe.train.launch import RankInfo
from dualpipe.train.model import Model, build_model, build_whole, micro_batch_loss, read_model_config
from dualpipe.train.routers import build_routers

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}  # relative; rounding alone stays orders of magnitude below


T = TypeVar("T")


class Difference(NamedTuple):
    """How far one tensor is from its reference: the largest element, and ||x - ref|| over ||ref|| or a larger floor."""

    name: str
    shape: tuple[int, ...]
    max_abs: float
    relative: float


class Problem(NamedTuple):
    """One global batch: B sequences of T tokens."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    num_chunks: int

    def part(self, number: int, count: int) -> Problem:
        """What pipeline `number` of `count` gets of it."""
        tokens, targets = (rows.tensor_split(count)[number] for rows in (self.tokens, self.targets))
        return Problem(tokens, targets, self.num_chunks // count)


def check(config: Config, info: RankInfo, *, dtype: str, tolerance: float | None, worst: int) -> int:
    """Compare as rank `info`; rank 0 prints the table and returns 1 where a difference exceeds the tolerance."""
    if dtype == "bf16" and tolerance is not None:
        raise ValueError(f"--tolerance {tolerance:g}: that of bf16 is derived; leave it out, or compare in float32")
    with join(config, info) as job:
        config = fit_world(config, job.ranks.size)
        if dtype == "bf16":
            from dualpipe.train.parity_bf16 import report

            return report(config, job, worst)
        differences = compare(config, job, dtype_of(dtype))
    p, allowed = config.parallel, TOLERANCES[dtype] if tolerance is None else tolerance
    if job.rank != 0:
        return 0
    failed = [d for d in differences if not d.relative <= allowed]  # NaN fails
    ranks = f"pp {p.pp}, dp {p.dp}, ep {p.ep}"
    _print(differences, worst, title=f"{p.schedule}, {ranks}, {dtype}")
    verdict = f"{len(failed)} of {len(differences)} differ by more than" if failed else f"all {len(differences)} within"
    say(f"parity {'FAILED' if failed else 'passed'}: {verdict} {allowed:g} relative")
    return 1 if failed else 0


def compare(config: Config, job: Job, dtype: torch.dtype) -> list[Difference]:
    """Loss and gradients of one step against the unpipelined model, on random tokens; complete on rank 0."""
    p = Pipelined.build(config, job, dtype)
    whole = build_whole(p.model.config, seed=config.train.seed, dtype=dtype, device=job.device)
    loss = p.run()
    reference, expected = p.run_whole(whole)
    found = compare_gradients(p.model.stages, whole, floor=rounding_floor(whole))
    if job.place.replica:  # pipeline 0 has the same gradients
        found.clear()
    if job.rank == 0:  # metrics are the same on all ranks
        found += [difference(name, value, expected[name]) for name, value in router_losses(p.routers).items()]
    if loss is not None:
        of_replica = f" of pipeline {job.place.replica}" if config.parallel.replicas > 1 else ""
        found.append(difference(f"loss of the micro-batches{of_replica}", loss, reference))
    return collect(found, job)


class Pipelined(NamedTuple):
    """This rank's part of the run that is compared, and the global batch."""

    config: Config
    job: Job
    model: Model
    pipeline: Pipeline
    routers: RouterSet
    problem: Problem

    @classmethod
    def build(cls, config: Config, job: Job, dtype: torch.dtype, plan: DTypePlan | None = None) -> Pipelined:
        """Build the stages as training does; `plan`: see `build_model`."""
        train, parallel, model_config = config.train, config.parallel, read_model_config(config)
        model = build_model(
            model_config, build(parallel.schedule, parallel.pp, train.num_chunks), job.place.rank("pp"), mesh=job.mesh,
            seed=train.seed, dtype=dtype, device=job.device, recompute=config.memory.recompute,
            layers_per_stage=parallel.layers_per_stage, plan=plan,
        )
        pipeline = Pipeline(
            model.stages, process_group=job.place.group("pp"), schedule=parallel.schedule, overlap=parallel.overlap
        )
        routers = build_routers(config, model.stages, group=job.group, device=job.device)
        return cls(config, job, model, pipeline, routers, _random_problem(config, model_config.vocab_size, job.device))

    def part(self) -> Problem:
        """What this rank's pipeline gets of the batch."""
        return self.problem.part(self.job.place.replica, self.config.parallel.replicas)

    def run(self) -> Tensor | None:
        """One step; the loss of each micro-batch on the rank of the last stage."""
        for _ in range(_steps_of(self.config)):
            self.pipeline.zero_grad()
            with self.routers.step():
                losses = pipelined_step(self.model, self.pipeline, self.part())
        return losses

    def run_whole(self, whole: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        """The step of the unpipelined model: losses of this pipeline's micro-batches, and what the routers add."""
        replicas = self.config.parallel.replicas
        routers = build_routers(self.config, [whole], group=None, device=self.job.device, whole=True)
        for _ in range(_steps_of(self.config)):
            whole.zero_grad()
            with routers.step():
                losses = unpipelined_step(whole, self.problem)
        return losses.tensor_split(replicas)[self.job.place.replica] * replicas, router_losses(routers)


def pipelined_step(model: Model, pipeline: Pipeline, problem: Problem) -> Tensor | None:
    """One step of the pipeline; the loss of each micro-batch on the rank of the last stage."""
    losses, _ = pipeline.step(
        *((problem.tokens,) if model.has_first else ()),
        num_chunks=problem.num_chunks,
        criterion=micro_batch_loss(problem.num_chunks) if model.has_last else None,
        labels=(problem.targets,) if model.has_last else (),
    )
    return losses


def unpipelined_step(whole: nn.Module, problem: Problem) -> Tensor:
    """The same step without a pipeline: forward and backward of one micro-batch after the other."""
    criterion = micro_batch_loss(problem.num_chunks)
    losses = []
    for tokens, targets in zip(*(t.tensor_split(problem.num_chunks) for t in (problem.tokens, problem.targets))):
        loss = criterion(whole(tokens), targets)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _steps_of(config: Config) -> int:
    """Balance of level "global" takes the loads of the step before, which the first step does not have."""
    return 2 if config.router.balance and config.router.balance_level == "global" else 1


def compare_gradients(stages: Iterable[nn.Module], whole: nn.Module, floor: float = 0.0) -> list[Difference]:
    """The gradient of every parameter of `stages` against that of the same name in `whole`; `floor`: see there."""
    reference = dict(whole.named_parameters(remove_duplicate=False))
    return [
        difference(name, gradient_of(parameter), gradient_of(reference[name]), floor)
        for stage in stages
        for name, parameter in stage.named_parameters()
    ]


def rounding_floor(whole: nn.Module) -> float:
    """The norm that a gradient tensor of `whole` is taken to have at least: what rounding leaves of zero is within the
    tolerance relative to it.

    A gradient can be zero but for rounding, as a router's is with one expert per token and norm_topk_prob: its terms
    cancel, and what they leave differs by as much as it is from one order of sums to another. Measured: up to 0.06 eps
    of the whole gradient's norm, in float32 and in float64 (4 to 8 layers, hidden size 16 to 256). So one eps of it
    is let pass, 2e-16 or 1e-7 of the whole gradient; an error beyond that is seen whatever tensor it is in.
    """
    gradients = [gradient_of(parameter) for parameter in whole.parameters()]
    dtype = gradients[0].dtype
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    return norm * torch.finfo(dtype).eps / TOLERANCES[long_name(dtype)]


def difference(name: str, value: Tensor, reference: Tensor, floor: float = 0.0) -> Difference:
    """Measure `value` against `reference`, whose norm counts as at least `floor`, and as 1 where both are zero."""
    delta = value - reference
    scale = max(reference.norm().item(), floor) or 1.0
    return Difference(name, tuple(value.shape), delta.abs().max().item(), delta.norm().item() / scale)


def gradient_of(parameter: Tensor) -> Tensor:
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def router_losses(routers: RouterSet) -> dict[str, Tensor]:
    """What [router] adds to the loss, by name."""
    return {name: value for name, value in routers.metrics().items() if name.endswith("_loss")}


def _random_problem(config: Config, vocab_size: int, device: torch.device) -> Problem:
    train = config.train
    generator = torch.Generator().manual_seed(train.seed)
    num_chunks = train.num_chunks * config.parallel.replicas
    shape = (train.micro_batch_size * num_chunks, train.sequence_length + 1)
    rows = torch.randint(vocab_size, shape, generator=generator, device="cpu").to(device)
    return Problem(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), num_chunks)


def collect(found: list[T], job: Job) -> list[T]:
    """What all ranks have found."""
    return list(chain.from_iterable(job.ranks.gather(lambda: found)))


def worst_of(found: Iterable[T], measure: Callable[[T], float], count: int) -> list[T]:
    """The `count` with the largest measure; NaN is the largest."""
    return heapq.nlargest(count, found, key=lambda each: math.inf if math.isnan(measure(each)) else measure(each))


def _print(differences: list[Difference], worst: int, *, title: str) -> None:
    table = Table(title=f"Largest differences from the unpipelined model ({title})")
    for column in ("tensor", "shape", "max abs", "relative"):
        table.add_column(column, justify="left" if column in ("tensor", "shape") else "right", overflow="fold")
    for d in worst_of(differences, lambda d: d.relative, worst):
        table.add_row(d.name, str(d.shape), f"{d.max_abs:.2e}", f"{d.relative:.2e}")
    Console().print(table)
