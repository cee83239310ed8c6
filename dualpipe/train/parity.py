"""`dualpipe parity`: are loss and gradients of the pipelined model those of the unpipelined one?

Every rank computes the reference for itself, micro-batch by micro-batch on a model with all layers, and compares the
gradients of its own stages; rank 0 collects the differences. What [router] adds to the loss is part of both.

In bfloat16 a sum that is cut differently is rounded differently, so the two models differ by percents and neither is
right. What can be asked all the same:

    rounding       against a float64 model with the same weights, the errors of all gradients together are at most 1.5
                   times those of the unpipelined bfloat16 model, and those of one tensor 2.5 times. Measured over seeds
                   and layouts: 0.7 to 1.2 times, and up to 1.9. One rounding of the tensor itself, 2^-9, is let pass.
    accumulation   the gradient of the step is the sum of those of its micro-batches, each stepped by itself and added
                   in float64. A micro-batch has the same bits in both, so they differ by the additions alone: each
                   rounds by 2^-24 of what is added, and there are one for a micro-batch and two for a replica.

The first sees what is wrong in every micro-batch; the second, a thousand times as sharp, what goes wrong between them:
a gradient that is lost, or accumulated in bfloat16. Routes are fixed, by `EvenRoutes`: a choice of experts that
rounding turns would move everything behind it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe.kernels.formats import FORMATS
from dualpipe.nn.attention import packed_positions
from dualpipe.nn.attention.sequence_split import WHOLE, SequenceSplit
from dualpipe.nn.deferral import local
from dualpipe.nn.routing.router import Router
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel import DTypePlan, Rule
from dualpipe.pipeline.stage_program import as_tuple
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.dtypes import dtype_of, long_name
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule.draw import aligned
from dualpipe.train.config.model_config import read_own_model_config
from dualpipe.train.config.resolve import Resolved
from dualpipe.train.config.schema import Config, DTypesConfig
from dualpipe.train.data.token_stream import TokenBatch, shift_targets
from dualpipe.train.launch.distributed import Job, join
from dualpipe.train.step.dtype_plan import plan_model, plan_run
from dualpipe.train.step.loss import MicroBatchLoss, token_weight, tokens_ahead
from dualpipe.train.step.routers import build_routers
from dualpipe.train.step.stages import build_whole
from dualpipe.train.step.step_runner import PipelinedModel

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}  # relative; rounding alone stays orders of magnitude below

T = TypeVar("T")


class Bounds(NamedTuple):
    """The largest errors allowed in bfloat16, as multiples of the unpipelined model's: of all gradients together, and
    of a single one."""

    together: float
    single: float


BOUNDS = Bounds(1.5, 2.5)


class Difference(NamedTuple):
    """The distance of a tensor from its reference.

    max_abs: the largest element. relative: ||x - ref|| over ||ref|| or a larger floor.
    """

    name: str
    shape: tuple[int, ...]
    max_abs: float
    relative: float


class Rounding(NamedTuple):
    """The distance of a tensor from float64: errors and the norm of what they are errors of."""

    name: str
    shape: tuple[int, ...]
    norm: float
    pipelined: float
    unpipelined: float
    excess: float  # the pipelined error over the unpipelined, or over one rounding; NaN for NaN


class Accumulation(NamedTuple):
    """The relative distance of a step's gradient from the sum of its micro-batches', and how far it may be."""

    name: str
    relative: float
    allowed: float


# -- the command


def check_parity(config: Config, info: RankInfo, *, dtype: str, tolerance: float | None, worst: int) -> int:
    """Compare as rank `info`; rank 0 prints the table and returns 1 where a difference exceeds the tolerance."""
    if dtype == "bf16" and tolerance is not None:
        raise ValueError(f"--tolerance {tolerance:g}: that of bf16 is derived; leave it out, or compare in float32")
    read_own_model_config(config, "parity of a configuration")
    with join(config, info) as (job, resolved):
        config = resolved.config
        if dtype == "bf16":
            return check_bf16(resolved, job, worst)
        differences = compare(resolved, job, dtype_of(dtype))
    if job.rank:
        return 0
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    failed = [d for d in differences if not d.relative <= allowed]  # NaN fails
    title = f"{config.parallel.schedule}, {config.parallel}, {dtype}"
    _print("Largest differences from the unpipelined model", title, ("max abs", "relative"), [
        (d.name, str(d.shape), f"{d.max_abs:.2e}", f"{d.relative:.2e}")
        for d in worst_of(differences, lambda d: d.relative, worst)
    ])
    verdict = f"{len(failed)} of {len(differences)} differ by more than" if failed else f"all {len(differences)} within"
    say(f"parity {'FAILED' if failed else 'passed'}: {verdict} {allowed:g} relative")
    return 1 if failed else 0


def check_bf16(resolved: Resolved, job: Job, worst: int) -> int:
    """Compare in bfloat16; rank 0 prints the table and returns 1 where a bound is exceeded."""
    with deterministic():
        mine = compare_bf16(resolved, job)
    of_ranks = job.ranks.gather(lambda: mine)
    if job.rank:
        return 0
    rounding, accumulation = (list(chain.from_iterable(found)) for found in zip(*of_ranks))
    title = f"{resolved.config.parallel.schedule}, {resolved.config.parallel}, bf16"
    print_bf16(title, rounding, accumulation, BOUNDS, worst)
    failed = [*rounding_failures(rounding, BOUNDS), *accumulation_failures(accumulation)]
    say(f"parity FAILED: {'; '.join(failed)}" if failed else f"parity passed: all {len(rounding)} within")
    return 1 if failed else 0


def print_bf16(
    title: str, rounding: Sequence[Rounding], accumulation: Sequence[Accumulation], bounds: Bounds, worst: int
) -> None:
    """Print the largest errors of a comparison in bfloat16, and those of all together."""
    added: dict[str, float] = {}
    for name, relative, _ in accumulation:
        added[name] = max(added.get(name, 0.0), relative)
    rows = []
    for each in worst_of(rounding, lambda each: each.excess, worst):
        errors = (f"{error / (each.norm or 1.0):.2e}" for error in (each.pipelined, each.unpipelined))
        rows.append((each.name, str(each.shape), *errors, f"{added[each.name]:.2e}" if each.name in added else "-"))
    _print("Largest errors against float64", title, ("pipelined", "unpipelined", "accumulation"), rows)
    together = _together(rounding)
    (largest,) = worst_of(rounding, lambda each: each.excess, 1)
    (added_worst,) = worst_of(accumulation, lambda each: each.relative / each.allowed, 1)
    say(f"error of all gradients together, relative to float64: {together.pipelined / together.norm:.2e} pipelined, "
        f"{together.unpipelined / together.norm:.2e} unpipelined: {together.excess:.2f} times (allowed: "
        f"{bounds.together}), of a tensor up to {largest.excess:.2f} ({bounds.single})")
    say(f"error of accumulation: up to {added_worst.relative:.1e} (allowed: {added_worst.allowed:.1e})")


def rounding_failures(rounding: Sequence[Rounding], bounds: Bounds) -> list[str]:
    """Return the bounds that errors against float64 exceed, as text; NaN exceeds all."""
    failed = []
    (largest,) = worst_of(rounding, lambda each: each.excess, 1)
    if not largest.excess <= bounds.single:
        failed.append(f"{largest.name} is {largest.excess:.2f} times as far from float64")
    together = _together(rounding)
    if not together.pipelined <= bounds.together * together.unpipelined:  # also where the unpipelined one has no error
        failed.append("all gradients together are further from float64")
    return failed


def accumulation_failures(accumulation: Sequence[Accumulation]) -> list[str]:
    """Return the gradient that is furthest from the sum of its micro-batches', as text, if that is too far."""
    (largest,) = worst_of(accumulation, lambda each: each.relative / each.allowed, 1)
    if largest.relative <= largest.allowed:
        return []
    return [f"{largest.name} is not the sum of its micro-batches' gradients"]


def _together(rounding: Iterable[Rounding]) -> Rounding:
    """Return the errors of all gradients together, as if they were one tensor."""
    gradients_only = [each for each in rounding if "loss" not in each.name]
    norm = math.hypot(*(each.norm for each in gradients_only))
    pipelined = math.hypot(*(each.pipelined for each in gradients_only))
    unpipelined = math.hypot(*(each.unpipelined for each in gradients_only))
    return Rounding("all gradients", (), norm, pipelined, unpipelined, pipelined / (unpipelined or 1.0))


def worst_of(found: Iterable[T], measure: Callable[[T], float], count: int) -> list[T]:
    """Return the `count` with the largest measure, the largest first; NaN is the largest."""
    return heapq.nlargest(count, found, key=lambda each: math.inf if math.isnan(measure(each)) else measure(each))


def _print(heading: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    say(f"{heading} ({title})")
    say(aligned([("tensor", "shape", *columns), *rows]).rstrip())  # names are never broken: they are searched for


# -- the two models


class Comparison:
    """This rank's part of a pipelined model, built as training does, and a global batch: B sequences of T tokens."""

    def __init__(
        self, resolved: Resolved, job: Job, dtypes: DTypePlan | torch.dtype, *, fixed_routes: bool = False
    ) -> None:
        """dtypes: see `build_model`. fixed_routes: of both models."""
        config, model_config = resolved.config, resolved.model
        # As the unpipelined model is built: neither compiled nor with products in FP8.
        plain = replace(config.dtypes, products="auto", fp8_weight_grad=False, fp8_dispatch=False)
        config = replace(config, train=replace(config.train, compile=False), dtypes=plain)
        train, parallel = config.train, config.parallel
        # With documents, which the ranks' chunks cut, where anything goes by them.
        with_documents = parallel.cp > 1 or model_config.mtp_depth > 0
        config = replace(config, data=replace(config.data, separate_documents=with_documents))
        self.config, self.job = config, job
        self.pipelined = PipelinedModel(resolved.with_config(config), job, dtypes=dtypes)
        self.model = self.pipelined.model
        self.routers = self.pipelined.routers
        self.pipeline = self.pipelined.pipeline
        split = self.pipelined.split
        self.fixed_routes = fixed_routes
        if fixed_routes:
            EvenRoutes(split, train.sequence_length).set_in(self.model.stages)
        generator = torch.Generator().manual_seed(train.seed)
        shards, length = parallel.batch_shards, train.sequence_length
        shape = (train.micro_batch_size * train.num_chunks * shards, length + 1)
        rows, positions = torch.randint(model_config.vocab_size, shape, generator=generator, device="cpu"), None
        if with_documents:
            bounds = torch.randint(shape[0] * length, (shape[0],), generator=generator, device="cpu").sort().values
            bounds = torch.cat((torch.zeros_like(bounds[:1]), bounds, torch.full_like(bounds[:1], shape[0] * length)))
            positions = packed_positions(bounds, shape[0], length)
        targets = shift_targets(rows.numpy(), model_config.mtp_depth, None if positions is None else positions.numpy())
        batch = [rows[:, :-1], torch.from_numpy(targets), *([] if positions is None else [positions])]
        # (B, T), or targets (B, T, 1 + D): tokens, targets, positions
        self.batch = [each.contiguous().to(job.device) for each in batch]
        self.own = [each.tensor_split(shards)[job.place.batch_shard] for each in self.batch]
        if parallel.cp > 1:
            columns = split.token_indices(length).to(job.device)
            self.own = [*(each[:, columns] for each in self.own[:2]), *self.own[2:]]
        self.weight = token_weight(split, length)
        # Balance of level "global" takes the loads of the step before, which the first step does not have.
        self.steps = 2 if config.router.balance and config.router.balance_level == "global" else 1

    def step(
        self, num_microbatches: int, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor | None:
        """One step of the pipeline; the loss of each micro-batch on the rank of the last stage, of all its tokens."""
        criterion = self._criterion(self.config.train.num_chunks / self.weight)
        batch = TokenBatch(tokens, targets, tokens if positions is None else positions)  # positions that nobody reads
        losses = self.pipelined.forward_backward(batch, criterion, num_microbatches)
        if losses is not None and (sharing := self.job.place.group("cp")) is not None:
            dist.all_reduce(losses, group=sharing)
            losses /= sharing.size()
        return losses

    def _criterion(self, num_microbatches: float) -> MicroBatchLoss:
        return MicroBatchLoss(num_microbatches, self.config.mtp.weight)

    def run(self) -> dict[str, Tensor]:
        """By name what this rank compares of a step: the gradients of its stages, what the routers add to the loss, and
        "loss", that of each micro-batch. Collective."""
        for _ in range(self.steps):
            self.pipeline.zero_grad()
            with self.routers.step():
                losses = self.step(self.config.train.num_chunks, *self.own)
        found = gradients(self.model.stages)
        if self.job.place.replica:  # pipeline 0 has the same gradients
            found.clear()
        if self.job.rank == 0:  # metrics are the same on all ranks
            found |= _router_losses(self.routers)
        return found if losses is None else found | {"loss": losses}

    def run_whole(self, whole: nn.Module) -> dict[str, Tensor]:
        """The same of the unpipelined model: forward and backward of one micro-batch after the other."""
        shards = self.config.parallel.batch_shards
        num_microbatches = self.config.train.num_chunks * shards
        criterion = self._criterion(num_microbatches)
        routers = build_routers(self.config, [whole], group=None, device=self.job.device, whole=True)
        if self.fixed_routes:
            EvenRoutes(WHOLE, self.config.train.sequence_length).set_in([whole])
        for _ in range(self.steps):
            whole.zero_grad()
            losses = []
            with routers.step():
                for tokens, targets, *positions in zip(*(each.tensor_split(num_microbatches) for each in self.batch)):
                    outputs = whole(tokens, *positions, ahead=tokens_ahead(targets))
                    loss = criterion(*as_tuple(outputs), targets)
                    loss.backward()
                    losses.append(loss.detach())
        own = torch.stack(losses).tensor_split(shards)[self.job.place.batch_shard] * shards
        return gradients([whole], by_all_names=True) | _router_losses(routers) | {"loss": own}


def _router_losses(routers: RouterSet) -> dict[str, Tensor]:
    return {name: value for name, value in routers.metrics().items() if name.endswith("_loss")}


def gradients(
    modules: Iterable[nn.Module], *, of_rank: bool = False, by_all_names: bool = False
) -> dict[str, Tensor]:
    """All parameters' gradients by name, zero where there is none; whole, which is collective, or this rank's parts.

    One that is tied within a module counts once, by its first name, unless wanted by all of them.
    """
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=not by_all_names):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) and not of_rank else local(grad)
    return found


class EvenRoutes:
    """A `Choice` of routers that does not depend on rounding: the T * K choices go round the experts.

    The experts of a token are about E / K apart, so that it is sent to many ranks. Example: K = 2 of E = 4: tokens go
    to (0, 3), (2, 1), (0, 3), ... split, length: of ranks that share sequences of so many tokens; a token's choices do
    not depend on them.
    """

    def __init__(self, split: SequenceSplit, length: int) -> None:
        self._split = split
        self._length = length

    def __call__(self, experts_TK: Tensor, num_experts: int) -> Tensor:
        device, top_k = experts_TK.device, experts_TK.shape[1]
        stride = next(n for n in itertools.count(num_experts // top_k + 1) if math.gcd(n, num_experts) == 1)
        own = self._split.token_indices(self._length).to(device)
        starts = torch.arange(len(experts_TK) // len(own), device=device) * self._length
        tokens_T1 = (starts.unsqueeze(1) + own).view(-1, 1)  # numbers among those of whole sequences
        return (tokens_T1 * top_k + torch.arange(top_k, device=device)) * stride % num_experts

    def set_in(self, modules: Iterable[nn.Module]) -> None:
        """Have the routers in modules choose so."""
        for router in chain.from_iterable(module.modules() for module in modules):
            if isinstance(router, Router):
                router.choice = self


# -- how far they are from each other


def compare(resolved: Resolved, job: Job, dtype: torch.dtype) -> list[Difference]:
    """Loss and gradients of one step against the unpipelined model, on random tokens; of all ranks. Weights that
    [dtypes] quantizes are compared with what they dequantize to, in a model that is not quantized."""
    config, model_config = resolved.config, resolved.model
    formats = [Rule(rule.pattern, storage=rule.storage if rule.storage in FORMATS else None, gather=rule.gather)
               for rule in config.dtypes.rules if rule.gather or rule.storage in FORMATS]
    make_plan = partial(plan_model, model_config, dtype, rules=formats)
    make_whole = partial(build_whole, model_config, seed=config.train.seed, device=job.device)
    p = Comparison(resolved, job, make_plan(replicas=config.parallel.replicas))
    found = p.run()
    whole = make_whole(dtypes=dtype)
    if formats:
        whole.load_state_dict(make_whole(dtypes=make_plan(replicas=1)).state_dict())
    expected = p.run_whole(whole)
    # A gradient can be zero but for rounding, as a router's is with one expert per token and norm_topk_prob: its terms
    # cancel, and what they leave differs by as much as it is from one order of sums to another. Measured: up to 0.06
    # eps of the whole gradient's norm, in float32 and in float64 (4 to 8 layers, hidden size 16 to 256). So one eps of
    # it is let pass, 2e-16 or 1e-7 of the whole gradient; an error beyond that is seen whatever tensor it is in.
    norm = torch.stack([gradient.norm() for gradient in gradients([whole]).values()]).norm().item()
    floor = norm * torch.finfo(dtype).eps / TOLERANCES[long_name(dtype)]
    of_replica = f" of pipeline {job.place.replica}" if config.parallel.replicas > 1 else ""
    differences = []
    for name, value in found.items():
        title = f"loss of the micro-batches{of_replica}" if name == "loss" else name
        differences.append(difference(title, value, expected[name], 0.0 if "loss" in name else floor))
    return list(chain.from_iterable(job.ranks.gather(lambda: differences)))


def difference(name: str, value: Tensor, reference: Tensor, floor: float = 0.0) -> Difference:
    """Measure `value` against `reference`, whose norm counts as at least `floor`, and as 1 where both are zero."""
    delta = value - reference
    scale = max(reference.norm().item(), floor) or 1.0
    return Difference(name, tuple(value.shape), delta.abs().max().item(), delta.norm().item() / scale)


def compare_bf16(resolved: Resolved, job: Job) -> tuple[list[Rounding], list[Accumulation]]:
    """One step against float64 and against its micro-batches; complete when all ranks' are put together."""
    config = replace(resolved.config, train=replace(resolved.config.train, dtype="bf16"))
    resolved = resolved.with_config(config)
    p = Comparison(resolved, job, plan_run(resolved, {}), fixed_routes=True)
    found = {name: value.cpu() for name, value in p.run().items()}
    accumulation = _accumulation(p)
    if job.place.replica:  # pipeline 0 compares
        found.clear()

    # One whole model after the other, and of each what this rank compares: two would not fit where one does.
    def run(whole: nn.Module) -> dict[str, Tensor]:
        values = p.run_whole(whole)
        return {name: values[name].cpu() for name in found}

    make_whole = partial(build_whole, resolved.model, seed=config.train.seed, device=job.device)
    unstored = [replace(r, storage=r.storage if r.storage in FORMATS else None) for r in config.dtypes.rules
                if any((r.storage in FORMATS, r.gather, r.compute, r.reduce, r.save, r.output))]
    alone = replace(config, parallel=replace(config.parallel, dp=1, cp=1, ep=1), dtypes=DTypesConfig(tuple(unstored)))
    whole = make_whole(dtypes=plan_run(resolved.with_config(alone), {}))
    unpipelined, state = run(whole), {name: tensor.cpu() for name, tensor in whole.state_dict().items()}
    del whole
    exact_model = make_whole(dtypes=torch.float64)
    exact_model.load_state_dict(state)
    exact = run(exact_model)
    rounding = [measure_rounding(name, value, unpipelined[name], exact[name]) for name, value in found.items()]
    return rounding, accumulation


def measure_rounding(
    name: str, pipelined: Tensor, unpipelined: Tensor, exact: Tensor, floor: float = 2**-9
) -> Rounding:
    """Measure a tensor of both bfloat16 models against float64.

    floor: what the unpipelined model's relative error counts as at least.
    """
    norm = float(exact.norm())
    error = float((pipelined.double() - exact).norm())
    unpipelined_error = float((unpipelined.double() - exact).norm())
    excess = error / (max(unpipelined_error, floor * norm) or 1.0)
    return Rounding(name, tuple(pipelined.shape), norm, error, unpipelined_error, excess)


def _accumulation(p: Comparison) -> list[Accumulation]:
    """Compare this rank's part of each gradient of the step that was run with the sum of its micro-batches'."""
    count, replicas, plan = p.config.train.num_chunks, p.config.parallel.replicas, p.model.plan
    found = {name: gradient.clone() for name, gradient in gradients(p.model.stages, of_rank=True).items()}
    sums = {name: torch.zeros_like(gradient, dtype=torch.float64) for name, gradient in found.items()}
    sizes = {name: torch.zeros_like(total) for name, total in sums.items()}
    with p.routers.step(), p.pipeline.in_order(deferred=False):
        for part in zip(*(each.tensor_split(count) for each in p.own)):
            p.pipeline.zero_grad()
            p.step(1, *part)
            for name, gradient in gradients(p.model.stages, of_rank=True).items():
                sums[name] += gradient.double()
                sizes[name] += gradient.double().abs()
    result = []
    for name, gradient in found.items():
        dtypes = [plan.reduce_dtype(name)]  # gradients accumulate in it, and FSDP2 hands them out in another
        dtypes += [plan.of(name).storage] if replicas > 1 else []
        unit_roundoff = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
        relative = float((gradient - sums[name]).norm() / (sizes[name].norm() or 1.0))
        result.append(Accumulation(name, relative, (count + 2 * replicas) * unit_roundoff))
    return result
