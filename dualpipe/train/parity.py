"""`dualpipe parity`: compare loss and gradients of the pipelined model with those of the unpipelined one.

Every rank computes the reference itself, one micro-batch after the other on a model with all layers, and compares the
gradients of its own stages; rank 0 collects the differences. The losses that [router] adds are part of both models.

In bfloat16 a sum that is split differently is rounded differently: the two models differ by percents, and neither is
exact. Two checks still hold:

    rounding       against a float64 model with the same weights, the error of all gradients together is at most 1.5
                   times that of the unpipelined bfloat16 model, and the error of one tensor at most 2.5 times. Measured
                   over seeds and layouts: 0.7 to 1.2 times for all gradients, up to 1.9 times for one tensor. An error
                   of one rounding of the tensor itself, 2^-9, is always allowed.
    accumulation   the gradient of the step is the sum of those of its micro-batches, each run in a step of its own and
                   added in float64. A micro-batch has the same bits in both, so they differ by the additions alone:
                   each rounds by 2^-24 of the sum, and there is one addition per micro-batch and two per replica.

The first detects an error that every micro-batch has. The second, a thousand times as sensitive, detects an error in
the sum over micro-batches: a gradient that is lost, or accumulated in bfloat16. Routes are fixed by `EvenRoutes`: one
expert chosen differently after rounding would change all later layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from dualpipe.kernels.formats import FORMATS
from dualpipe.parallel import Rule
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.dtypes import dtype_of, long_name
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.model_config import read_own_model_config
from dualpipe.train.config.schema import Config, DTypesConfig
from dualpipe.train.launch.distributed import Job, join
from dualpipe.train.parity_errors import (
    BOUNDS,
    TOLERANCES,
    Accumulation,
    Difference,
    Rounding,
    accumulation_failures,
    difference,
    measure_rounding,
    print_bf16,
    print_table,
    rounding_failures,
    worst_of,
)
from dualpipe.train.parity_models import ParityModels, gradients
from dualpipe.train.step.dtype_plan import resolve_model_dtypes, resolve_run_dtypes
from dualpipe.train.step.model import build_whole


def check_parity(config: Config, info: RankInfo, *, dtype: str, tolerance: float | None, worst: int) -> int:
    """Compare the two models as rank `info` and return the exit status: 1 if a difference exceeds the tolerance.

    Rank 0 prints the table and returns that status; the others return 0.

    Args:
        dtype: "float64", "float32" or "bf16".
        tolerance: largest relative difference; None for the default of the dtype. Not for bf16.
        worst: number of differences to print.
    """
    if dtype == "bf16" and tolerance is not None:
        raise ValueError(
            f"--tolerance {tolerance:g}: the bounds of bf16 are derived; leave it out, or compare in float32")
    read_own_model_config(config, "parity of a configuration")
    with join(config, info) as (job, resolved):
        config = resolved.config
        if dtype == "bf16":
            return check_bf16(resolved, job, worst)
        differences = compare(resolved, job, dtype_of(dtype))
    if job.rank:
        return 0
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    failures = [diff for diff in differences if not diff.relative <= allowed]  # NaN fails
    title = f"{config.parallel.schedule}, {config.parallel}, {dtype}"
    print_table("Largest differences from the unpipelined model", title, ("max abs", "relative"), [
        (diff.name, str(diff.shape), f"{diff.max_abs:.2e}", f"{diff.relative:.2e}")
        for diff in worst_of(differences, lambda diff: diff.relative, worst)
    ])
    if failures:
        say(f"parity FAILED: {len(failures)} of {len(differences)} differ by more than {allowed:g} relative")
        return 1
    say(f"parity passed: all {len(differences)} within {allowed:g} relative")
    return 0


def check_bf16(resolved: Resolved, job: Job, worst: int) -> int:
    """Compare in bfloat16; rank 0 prints the table and returns 1 if a bound is exceeded."""
    with deterministic():
        rank_errors = compare_bf16(resolved, job)
    errors_by_rank = job.ranks.gather(lambda: rank_errors)
    if job.rank:
        return 0
    rounding = [error for rank_rounding, _ in errors_by_rank for error in rank_rounding]
    accumulation = [error for _, rank_accumulation in errors_by_rank for error in rank_accumulation]
    title = f"{resolved.config.parallel.schedule}, {resolved.config.parallel}, bf16"
    print_bf16(title, rounding, accumulation, BOUNDS, worst)
    failures = [*rounding_failures(rounding, BOUNDS), *accumulation_failures(accumulation)]
    if failures:
        say(f"parity FAILED: {'; '.join(failures)}")
        return 1
    say(f"parity passed: all {len(rounding)} within")
    return 0


def compare(resolved: Resolved, job: Job, dtype: torch.dtype) -> list[Difference]:
    """Run one step on random tokens and return the differences of loss and gradients on all ranks. Collective.

    Quantized weights are replaced by their dequantized values in the unpipelined model.
    """
    config = resolved.config
    quantized_rules = [
        Rule(rule.pattern, storage=rule.storage if rule.storage in FORMATS else None, gather=rule.gather)
        for rule in config.dtypes.rules if rule.gather or rule.storage in FORMATS
    ]
    make_plan = partial(resolve_model_dtypes, resolved.model, dtype, rules=quantized_rules)
    make_whole = partial(build_whole, resolved.model, seed=config.train.seed, device=job.device)
    models = ParityModels(resolved, job, make_plan(replicas=config.parallel.replicas))
    values = models.run()
    whole = make_whole(dtypes=dtype)
    if quantized_rules:
        whole.load_state_dict(make_whole(dtypes=make_plan(replicas=1)).state_dict())
    expected = models.run_whole(whole)
    # Some gradients are zero up to rounding, such as a router's with one expert per token and norm_topk_prob: their
    # terms cancel, and the rest depends on the order of summation. Measured: up to 0.06 eps of the norm of the whole
    # gradient, in float32 and in float64 (4 to 8 layers, hidden size 16 to 256). So an error of one eps of that norm,
    # 2e-16 or 1e-7 relative to it, is always allowed; a larger error is detected in any tensor.
    norm = torch.stack([grad.norm() for grad in gradients([whole]).values()]).norm().item()
    floor = norm * torch.finfo(dtype).eps / TOLERANCES[long_name(dtype)]
    of_replica = f" of pipeline {job.place.replica}" if config.parallel.replicas > 1 else ""
    differences = []
    for name, value in values.items():
        title = f"loss of the micro-batches{of_replica}" if name == "loss" else name
        differences.append(difference(title, value, expected[name], 0.0 if "loss" in name else floor))
    return list(chain.from_iterable(job.ranks.gather(lambda: differences)))


def compare_bf16(resolved: Resolved, job: Job) -> tuple[list[Rounding], list[Accumulation]]:
    """Compare one step with float64 and with its micro-batches. Collective.

    Returns the errors of the tensors that this rank compares. All ranks together compare every tensor.
    """
    resolved = resolved.with_config(replace(resolved.config, train=replace(resolved.config.train, dtype="bf16")))
    models = ParityModels(resolved, job, resolve_run_dtypes(resolved, {}), fixed_routes=True)
    values = {name: value.cpu() for name, value in models.run().items()}
    accumulation = _compare_with_microbatches(models)
    if job.place.replica:  # pipeline 0 compares
        values.clear()

    # Two whole models may not fit in memory: run one after the other, and keep only the tensors compared by this rank.
    def run(whole: nn.Module) -> dict[str, Tensor]:
        whole_values = models.run_whole(whole)
        return {name: whole_values[name].cpu() for name in values}

    make_whole = partial(build_whole, resolved.model, seed=resolved.config.train.seed, device=job.device)
    whole = make_whole(dtypes=resolve_run_dtypes(_single_rank(resolved), {}))
    unpipelined = run(whole)
    state = {name: tensor.cpu() for name, tensor in whole.state_dict().items()}
    del whole
    exact_model = make_whole(dtypes=torch.float64)
    exact_model.load_state_dict(state)
    exact = run(exact_model)
    rounding = [measure_rounding(name, value, unpipelined[name], exact[name]) for name, value in values.items()]
    return rounding, accumulation


def _single_rank(resolved: Resolved) -> Resolved:
    """Return the configuration of the unpipelined model: one rank, and storage rules only for quantized formats."""
    config = resolved.config
    rules = []
    for rule in config.dtypes.rules:
        storage = rule.storage if rule.storage in FORMATS else None
        if any((storage, rule.gather, rule.compute, rule.reduce, rule.save, rule.output)):
            rules.append(replace(rule, storage=storage))
    parallel = replace(config.parallel, dp=1, cp=1, ep=1)
    return resolved.with_config(replace(config, parallel=parallel, dtypes=DTypesConfig(tuple(rules))))


def _compare_with_microbatches(models: ParityModels) -> list[Accumulation]:
    """Compare this rank's shard of each gradient of the last step with the sum over its micro-batches. Collective."""
    num_microbatches = models.config.train.num_chunks
    replicas = models.config.parallel.replicas
    plan = models.model.plan
    grads = {name: grad.clone() for name, grad in gradients(models.model.stages, of_rank=True).items()}
    sums = {name: torch.zeros_like(grad, dtype=torch.float64) for name, grad in grads.items()}
    magnitudes = {name: torch.zeros_like(total) for name, total in sums.items()}  # sums of absolute values
    with models.routers.step(), models.pipeline.in_order(deferred=False):
        for microbatch in zip(*(tensor.tensor_split(num_microbatches) for tensor in models.rank_batch)):
            models.pipeline.zero_grad()
            models.step(1, *microbatch)
            for name, grad in gradients(models.model.stages, of_rank=True).items():
                sums[name] += grad.double()
                magnitudes[name] += grad.double().abs()
    errors = []
    for name, grad in grads.items():
        dtypes = [plan.reduce_dtype(name)]  # gradients accumulate in it
        if replicas > 1:
            dtypes.append(plan.of(name).storage)  # and FSDP2 returns them in this one
        unit_roundoff = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
        relative = float((grad - sums[name]).norm() / (magnitudes[name].norm() or 1.0))
        errors.append(Accumulation(name, relative, (num_microbatches + 2 * replicas) * unit_roundoff))
    return errors
