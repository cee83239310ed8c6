"""`dualpipe parity --dtype bf16`: are gradients of the pipelined bfloat16 model as good as the unpipelined one's?

A sum that is cut differently is rounded differently, so the two models differ by percents and neither is right. What
can be asked all the same:

    rounding       against a float64 model with the same weights, the errors of all gradients together are at most 1.5
                   times those of the unpipelined bfloat16 model, and those of one tensor 2.5 times. Measured over seeds
                   and layouts: 0.7 to 1.2 times, and up to 1.9. One rounding of the tensor itself, 2^-9, is let pass.
    accumulation   the gradient of the step is the sum of those of its micro-batches, each stepped by itself and added
                   in float64. A micro-batch has the same bits in both, so they differ by the additions alone: each
                   rounds by 2^-24 of what is added, and there are one for a micro-batch and two for a replica.

The first sees what is wrong in every micro-batch; the second, a thousand times as sharp, what goes wrong between them:
a gradient that is lost, or accumulated in bfloat16. Routes are fixed, as with router.balanced: a choice of experts that
rounding turns would move everything behind it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dualpipe.nn.accumulate import local
from dualpipe.train.config import Config
from dualpipe.train.job import Job
from dualpipe.train.model import build_whole, micro_batch_loss, plan_model, read_model_config, rules_of
from dualpipe.train.parity import Pipelined, collect, gradient_of, router_losses, worst_of

TOGETHER, SINGLE = 1.5, 2.5  # times the unpipelined model's error
BF16 = torch.bfloat16


class Rounding(NamedTuple):
    """How far a tensor is from float64: errors and the norm of what they are errors of."""

    name: str
    shape: tuple[int, ...]
    norm: float
    pipelined: float
    unpipelined: float

    @property
    def excess(self) -> float:
        """The pipelined error over the unpipelined, or over one rounding; NaN for NaN."""
        return self.pipelined / (max(self.unpipelined, 2**-9 * self.norm) or 1.0)


class Accumulation(NamedTuple):
    """How far a rank's part of a gradient is from the sum of its micro-batches', relative, and how far it may be."""

    name: str
    relative: float
    allowed: float


def report(config: Config, job: Job, worst: int) -> int:
    """Compare, print on rank 0, and return its exit status: 1 where a bound is exceeded."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward: the same bits twice
    try:
        found = compare(config, job)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    rounding, accumulation = (collect(each, job) for each in found)
    if job.rank:
        return 0
    p = config.parallel
    _print(rounding, accumulation, worst, f"{p.schedule}, pp {p.pp}, dp {p.dp}, ep {p.ep}, bf16")
    gradients = [each for each in rounding if "loss" not in each.name]
    norm, ours, own = (math.hypot(*column) for column in zip(*(each[2:] for each in gradients)))
    (largest,) = worst_of(rounding, lambda each: each.excess, 1)
    (last,) = worst_of(accumulation, lambda each: each.relative / each.allowed, 1)
    failed = []  # NaN fails
    if not largest.excess <= SINGLE:
        failed.append(f"{largest.name} is {largest.excess:.2f} times as far from float64")
    if not ours <= TOGETHER * own:
        failed.append("all gradients together are further from float64")
    if not last.relative <= last.allowed:
        failed.append(f"{last.name} is not the sum of its micro-batches' gradients")
    print(f"error of all gradients together, relative to float64: {ours / norm:.2e} pipelined, {own / norm:.2e} "
          f"unpipelined: {ours / own:.2f} times (allowed: {TOGETHER}), of a tensor up to {largest.excess:.2f} "
          f"({SINGLE})\nerror of accumulation: up to {last.relative:.1e} (allowed: {last.allowed:.1e})")
    print(f"parity FAILED: {'; '.join(failed)}" if failed else f"parity passed: all {len(rounding)} within")
    return 1 if failed else 0


def compare(config: Config, job: Job) -> tuple[list[Rounding], list[Accumulation]]:
    """One step against float64 and against its micro-batches; complete when all ranks' are put together."""
    config = dataclasses.replace(config, router=dataclasses.replace(config.router, balanced=True))
    model_config, replicas, rules = read_model_config(config), config.parallel.replicas, rules_of(config)
    p = Pipelined.build(config, job, BF16, plan_model(model_config, BF16, replicas=replicas, rules=rules))
    loss = p.run()
    found = {name: gradient_of(param).cpu() for name, param in _parameters(p.model.stages).items()}
    names, metrics = list(found), router_losses(p.routers)
    accumulation = _accumulation(p)

    # One whole model after the other, and of each what this rank compares: two would not fit where one does.
    def run(whole: nn.Module) -> dict[str, Tensor]:
        losses, of_routers = p.run_whole(whole)
        gradients = {name: gradient_of(param) for name, param in _parameters([whole]).items() if name in names}
        return {name: value.cpu() for name, value in (gradients | of_routers | {"loss": losses}).items()}

    make_whole = partial(build_whole, model_config, seed=config.train.seed, device=job.device)
    unstored = [dataclasses.replace(rule, storage=None) for rule in rules if rule.given.keys() != {"storage"}]
    plan = plan_model(model_config, BF16, replicas=1, rules=unstored)
    whole = make_whole(dtype=BF16, plan=plan)
    unpipelined, state = run(whole), {name: tensor.cpu() for name, tensor in whole.state_dict().items()}
    del whole
    exact_model = make_whole(dtype=torch.float64)
    exact_model.load_state_dict(state)
    exact = run(exact_model)
    if job.place.replica:  # pipeline 0 has the same gradients
        found.clear()
    if job.rank == 0:  # metrics are the same on all ranks
        found |= {name: value.cpu() for name, value in metrics.items()}
    if loss is not None and job.place.replica == 0:
        found["loss"] = loss.cpu()
    rounding = []
    for name, value in found.items():
        errors = (float((each.double() - exact[name]).norm()) for each in (value, unpipelined[name]))
        rounding.append(Rounding(name, tuple(exact[name].shape), float(exact[name].norm()), *errors))
    return rounding, accumulation


def _parameters(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: param for stage in stages for name, param in stage.named_parameters() if param.requires_grad}


def _local_gradient(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(local(param.detach())) if param.grad is None else local(param.grad)


def _accumulation(p: Pipelined) -> list[Accumulation]:
    """This rank's part of the gradients of the step that was run, against the sum of its micro-batches'."""
    parameters, problem, replicas = _parameters(p.model.stages), p.part(), p.config.parallel.replicas
    found = {name: _local_gradient(param).clone() for name, param in parameters.items()}
    sums = {name: torch.zeros_like(grad, dtype=torch.float64) for name, grad in found.items()}
    sizes = {name: torch.zeros_like(total) for name, total in sums.items()}
    has_first, has_last, count = p.model.has_first, p.model.has_last, problem.num_chunks
    with p.routers.step():
        for tokens, targets in zip(problem.tokens.tensor_split(count), problem.targets.tensor_split(count)):
            p.pipeline.zero_grad()
            p.pipeline.step(
                *((tokens,) if has_first else ()), num_chunks=1,
                criterion=micro_batch_loss(count) if has_last else None, labels=(targets,) if has_last else (),
            )
            for name, param in parameters.items():
                gradient = _local_gradient(param).double()
                sums[name] += gradient
                sizes[name] += gradient.abs()
    result = []
    for name, grad in found.items():
        dtypes = [p.model.plan.reduce_dtype(name)]  # gradients accumulate in it, and FSDP2 hands them out in another
        dtypes += [p.model.plan.of(name).storage] if replicas > 1 else []
        unit_roundoff = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
        relative = float((grad - sums[name]).norm() / (sizes[name].norm() or 1.0))
        result.append(Accumulation(name, relative, (count + 2 * replicas) * unit_roundoff))
    return result


def _print(rounding: list[Rounding], accumulation: list[Accumulation], worst: int, title: str) -> None:
    table = Table(title=f"Largest errors against float64 ({title})")
    for column in ("tensor", "shape", "pipelined", "unpipelined", "accumulation"):
        table.add_column(column, justify="right" if column not in ("tensor", "shape") else "left", overflow="fold")
    added: dict[str, float] = {}
    for name, relative, _ in accumulation:
        added[name] = max(added.get(name, 0.0), relative)
    for each in worst_of(rounding, lambda each: each.excess, worst):
        errors = (f"{error / (each.norm or 1.0):.2e}" for error in (each.pipelined, each.unpipelined))
        of_sum = f"{added[each.name]:.2e}" if each.name in added else "-"
        table.add_row(each.name, str(each.shape), *errors, of_sum)
    Console().print(table)
