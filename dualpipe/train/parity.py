"""`dualpipe parity`: are loss and gradients of the pipelined model those of the unpipelined one?

Every rank computes the reference for itself, micro-batch by micro-batch on a model with all layers, and compares the
gradients of its own stages; rank 0 collects the differences. What [router] adds to the loss is part of both. In
bfloat16 rounding would hide too much: see `parity_bf16`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe import Pipeline
from dualpipe.nn.router_set import RouterSet
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
        config = fit_world(config, job.world_size)
        if dtype == "bf16":
            from dualpipe.train.parity_bf16 import report

            return report(config, job, worst)
        differences = compare(config, job, getattr(torch, dtype))
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
    train, parallel = config.train, config.parallel
    model_config = read_model_config(config)
    schedule = build(parallel.schedule, parallel.pp, train.num_chunks)
    common = {"seed": train.seed, "dtype": dtype, "device": job.device}
    replicas, replica = parallel.replicas, job.replica
    model = build_model(
        model_config, schedule, job.rank_along("pp"), mesh=job.mesh, recompute=config.memory.recompute,
        layers_per_stage=parallel.layers_per_stage, **common,
    )
    whole = build_whole(model_config, **common)
    problem = _random_problem(config, model_config.vocab_size, job.device)
    pipeline = Pipeline(
        model.stages, process_group=job.group_along("pp"), schedule=parallel.schedule, overlap=parallel.overlap
    )
    routers = build_routers(config, model.stages, group=job.group, device=job.device)
    whole_routers = build_routers(config, [whole], group=None, device=job.device, whole=True)
    for _ in range(_steps_of(config)):
        pipeline.zero_grad()
        whole.zero_grad()
        with routers.step():
            loss = pipelined_step(model, pipeline, problem.part(replica, replicas))
        with whole_routers.step():
            reference = unpipelined_step(whole, problem).tensor_split(replicas)[replica] * replicas
    found = compare_gradients(model.stages, whole, floor=rounding_floor(whole))
    if replica:  # pipeline 0 has the same gradients
        found.clear()
    if job.rank == 0:  # metrics are the same on all ranks
        found += _compare_router_losses(routers, whole_routers)
    if loss is not None:
        of_replica = f" of pipeline {replica}" if replicas > 1 else ""
        found.append(difference(f"loss of the micro-batches{of_replica}", loss, reference))
    return _collect(found, job)


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
        difference(name, _gradient(parameter), _gradient(reference[name]), floor)
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
    gradients = [_gradient(parameter) for parameter in whole.parameters()]
    dtype = gradients[0].dtype
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    return norm * torch.finfo(dtype).eps / TOLERANCES[str(dtype).removeprefix("torch.")]


def difference(name: str, value: Tensor, reference: Tensor, floor: float = 0.0) -> Difference:
    """Measure `value` against `reference`, whose norm counts as at least `floor`, and as 1 where both are zero."""
    delta = value - reference
    scale = max(reference.norm().item(), floor) or 1.0
    return Difference(name, tuple(value.shape), delta.abs().max().item(), delta.norm().item() / scale)


def _gradient(parameter: Tensor) -> Tensor:
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _compare_router_losses(routers: RouterSet, whole: RouterSet) -> list[Difference]:
    found, expected = routers.metrics(), whole.metrics()
    return [difference(name, found[name], expected[name]) for name in found if name.endswith("_loss")]


def _random_problem(config: Config, vocab_size: int, device: torch.device) -> Problem:
    train = config.train
    generator = torch.Generator().manual_seed(train.seed)
    num_chunks = train.num_chunks * config.parallel.replicas
    shape = (train.micro_batch_size * num_chunks, train.sequence_length + 1)
    rows = torch.randint(vocab_size, shape, generator=generator, device="cpu").to(device)
    return Problem(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), num_chunks)


def _collect(found: list[T], job: Job) -> list[T]:
    """What all ranks have found."""
    if job.group is None:
        return found
    everywhere: list[list[T]] = [[] for _ in range(job.world_size)]
    dist.all_gather_object(everywhere, found, group=job.group)
    return [each for of_rank in everywhere for each in of_rank]


def _badness(relative: float) -> float:
    return math.inf if math.isnan(relative) else relative


def _print(differences: list[Difference], worst: int, *, title: str) -> None:
    table = Table(title=f"Largest differences from the unpipelined model ({title})")
    for column, justify in (("tensor", "left"), ("shape", "left"), ("max abs", "right"), ("relative", "right")):
        table.add_column(column, justify=justify, overflow="fold")
    for d in sorted(differences, key=lambda d: _badness(d.relative), reverse=True)[:worst]:
        table.add_row(d.name, str(d.shape), f"{d.max_abs:.2e}", f"{d.relative:.2e}")
    Console().print(table)
