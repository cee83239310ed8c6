"""A step of a pipeline with expert parallelism, whose ranks are threads, and the same step without either."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.parallel.all_to_all import AllToAll
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from threads import Rank, run_threads
from toys import relative_error, stages_of_rank


class Problem(NamedTuple):
    """Stages, their batches (x, y) by expert-parallel rank, and how a stage gets its part of the experts."""

    stages: Sequence[nn.Module]
    batches: Sequence[tuple[Tensor, Tensor]]
    num_microbatches: int
    criterion: Callable[[Tensor, Tensor], Tensor]
    connect: Callable[[Any, AllToAll], None]


class Result(NamedTuple):
    """Losses by micro-batch, None where the last stage is not, and gradients by stage and name."""

    loss: Tensor | None
    gradients: dict[str, Tensor]


def share_experts(stage: Any, all_to_all: AllToAll, num_experts: int, **options: Any) -> None:
    """Keep only the experts of this rank."""
    for layer in stage.modules():
        if not isinstance(layer, GroupedLinear):
            continue
        for name, param in list(layer.named_parameters(recurse=False)):
            part = nn.Parameter(param.detach().chunk(all_to_all.size)[all_to_all.rank].clone())
            part.grad_dtype = param.grad_dtype
            setattr(layer, name, part)
    stage.use_expert_parallelism(ExpertParallel(num_experts, all_to_all, **options))


def accumulating(stages: Sequence[nn.Module], device: torch.device | str = "cpu") -> list[Any]:
    """Return copies on a device whose accumulators are in float32 or wider."""
    stages = copy.deepcopy(list(stages))
    for stage in stages:
        for param in stage.to(device).parameters():
            param.grad_dtype = torch.promote_types(param.dtype, torch.float32)
    return stages


def gradients_of(stages: Sequence[nn.Module], numbers: Sequence[int]) -> dict[str, Tensor]:
    found = {f"{n}.{name}": p.grad for n, stage in zip(numbers, stages) for name, p in stage.named_parameters()}
    assert all(type(gradient) is Tensor for gradient in found.values())
    return {name: gradient.cpu() for name, gradient in found.items()}


def step(rank: Rank, it: Problem, pp: int, ep: int, overlap: bool = True, recompute: Sequence[str] = ()) -> Result:
    """Run one step as rank (pipeline rank) * ep + (expert-parallel rank)."""
    mine, replica = divmod(rank.number, ep)
    numbers = stages_of_rank("dualpipev", pp, mine)
    all_to_all = rank.all_to_all(f"ep of {mine}", [mine * ep + e for e in range(ep)])
    stages = accumulating([it.stages[number] for number in numbers], rank.device)
    for stage in stages:
        stage.recompute = Recompute(recompute)
        it.connect(stage, all_to_all)
        rank.slow_down(stage, (nn.Linear, Linear, GroupedLinear))
    group = rank.group(f"pp of {replica}", [p * ep + replica for p in range(pp)])
    pipe = Pipeline(stages, process_group=group, schedule="dualpipev", overlap=overlap)
    x, y = (t.to(rank.device) for t in it.batches[replica])
    for _ in range(2):  # the second time, memory of the first is used again
        pipe.zero_grad()
        loss, _ = pipe.step(x, num_chunks=it.num_microbatches, criterion=it.criterion, labels=(y,))
    return Result(None if loss is None else loss.cpu(), gradients_of(stages, numbers))


def run(it: Problem, pp: int, ep: int, *args: Any, **options: Any) -> Result:
    """Run `step` on pp * ep ranks and join their results."""
    return joined(run_threads(step, pp * ep, it, pp, ep, *args, **options), ep)


def joined(results: Sequence[Result], ep: int) -> Result:
    """Join the gradients of experts; sum all others over the expert-parallel ranks."""
    whole = {}
    for first in range(0, len(results), ep):
        for name in results[first].gradients:
            parts = [result.gradients[name] for result in results[first : first + ep]]
            whole[name] = torch.cat(parts) if ".experts." in name else torch.stack(parts).sum(0)
    assert all(result.loss is None for result in results[ep:]), "the first pipeline rank has the last stage of a V"
    return Result(torch.stack([result.loss for result in results[:ep]]), whole)


def reference(it: Problem) -> Result:
    """Return the losses by expert-parallel rank, and the gradients summed over all their data."""
    losses, stages = [], accumulating(it.stages)
    for x, y in it.batches:
        for xs, ys in zip(x.tensor_split(it.num_microbatches), y.tensor_split(it.num_microbatches)):
            for stage in stages:
                xs = stage(xs)
            losses.append(it.criterion(xs, ys))
            losses[-1].backward()
    return Result(torch.stack(losses).detach().view(len(it.batches), -1), gradients_of(stages, range(len(stages))))


def worst(found: Result, expected: Result) -> float:
    """Return the largest relative error of the losses and of any gradient; infinite where one is NaN."""
    assert found.gradients.keys() == expected.gradients.keys()
    errors = [relative_error(found.gradients[name], gradient) for name, gradient in expected.gradients.items()]
    errors.append(relative_error(found.loss, expected.loss))
    return max(float("inf") if error != error else error for error in errors)


def same_bits(one: Result, other: Result) -> bool:
    assert one.gradients.keys() == other.gradients.keys()
    if (one.loss is None) != (other.loss is None) or (one.loss is not None and not torch.equal(one.loss, other.loss)):
        return False
    return all(torch.equal(other.gradients[name], gradient) for name, gradient in one.gradients.items())
