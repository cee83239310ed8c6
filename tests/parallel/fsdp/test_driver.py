"""FSDP2 under the pipeline: the gradients of the unpipelined model, one fp32 buffer each, and no rank left waiting."""

from __future__ import annotations

import copy
import gc
import os
import re
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dualpipe import DualPipeV, Pipeline
from dualpipe.nn import GroupedLinear, defer_weight_grads
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard, shard_experts, shard_stages
from dualpipe.parallel.fsdp import driver
from dualpipe.parallel.fsdp.stage_parameters import StageParameters
from dualpipe.pipeline import PipelineError
from ranks import run_ranks
from refusals import refusal
from toys import Stage, make_stages, num_stages, param_groups, reference, relative_error, stages_of_rank

WIDTH = 8


def full(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def shard_whole(stage: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    return fully_shard(stage, mesh=mesh, **options)


def shard_children(stage: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """Wrap the children as units, without a unit around them; the norm stays unsharded."""
    fully_shard(stage.up, mesh=mesh, **options)
    fully_shard(stage.down, mesh=mesh, **options)
    return stage


def shard_nested(stage: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    fully_shard(stage.up, mesh=mesh, **options)
    return fully_shard(stage, mesh=mesh, **options)


SHARD = {"whole": shard_whole, "children": shard_children, "nested": shard_nested}


def gradient_errors(stages: list[nn.Module], numbers: tuple[int, ...], expected: list[nn.Module]) -> float:
    return max(
        relative_error(full(p.grad), q.grad)
        for stage, number in zip(stages, numbers)
        for p, q in zip(stage.parameters(), expected[number].parameters(), strict=True)
    )


def batch(microbatches: int, replicas: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2 * microbatches * replicas, WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


class Training:
    """A pipeline of this rank's sharded stages, and the unpipelined model with the mean over the global batch.

    wrap: shards a stage over the data-parallel mesh.
    """

    def __init__(self, pp: int = 1, microbatches: int = 3, *, name: str = "dualpipev", make=Stage, wrap=None,
                 unreduced: tuple[str, ...] = ()) -> None:
        self.mesh = init_device_mesh("cpu", (pp, torch.distributed.get_world_size() // pp), mesh_dim_names=("pp", "dp"))
        self.replicas, self.microbatches = self.mesh["dp"].size(), microbatches
        self.expected = make_stages(num_stages(name, pp), make)
        self.numbers = stages_of_rank(name, pp, self.mesh["pp"].get_local_rank())
        wrap = wrap or shard_nested
        self.stages = [wrap(copy.deepcopy(self.expected[i]), self.mesh["dp"]) for i in self.numbers]
        group = self.mesh["pp"].get_group()
        self.pipe = Pipeline(self.stages, process_group=group, schedule=name, unreduced=unreduced)
        self.x, self.y = batch(microbatches, self.replicas)
        first = 2 * microbatches * self.mesh["dp"].get_local_rank()
        self.mine = slice(first, first + 2 * microbatches)  # the rows of this replica

    def step(self, criterion=F.mse_loss, **options) -> tuple:
        return self.pipe.step(self.x[self.mine], num_chunks=self.microbatches, criterion=criterion,
                              labels=(self.y[self.mine],), **options)

    def step_expected(self) -> None:
        reference(self.expected, self.x, self.y, self.microbatches * self.replicas,
                  criterion=lambda a, b: F.mse_loss(a, b) / self.replicas)

    def error(self) -> float:
        """Return the worst gradient error of this rank."""
        return gradient_errors(self.stages, self.numbers, self.expected)

    def zero_grad(self) -> None:
        for model in (*self.expected, self.pipe):
            model.zero_grad()


def parity(rank: int, pp: int, shard: str, microbatches: int) -> float:
    """Return the worst gradient error of three steps."""
    run = Training(pp, microbatches, wrap=SHARD[shard], unreduced=("norm",) if shard == "children" else ())
    worst = 0.0
    for step in range(3):
        run.step_expected()
        run.step()
        if shard == "children":
            for stage in run.stages:
                for p in stage.norm.parameters():
                    torch.distributed.all_reduce(p.grad, group=run.mesh["dp"].get_group())
                    p.grad /= run.replicas
        worst = max(worst, run.error())
        run.zero_grad()
        run.x = run.x + step
    return worst


@pytest.mark.parametrize("shard", SHARD)
@pytest.mark.parametrize("pp, world, microbatches", [(2, 4, 5), (1, 2, 1)])
def test_gradients_are_the_mean_over_the_global_batch(pp, world, microbatches, shard):
    assert max(run_ranks(parity, world, pp, shard, microbatches)) < 1e-10


# -- the accumulators

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class UserLinear(torch.autograd.Function):
    """A weight gradient written the way users of DeepSeek's WeightGradStore write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        w = ctx.weight

        def closure():
            g = (dy.t() @ x).to(w.dtype)
            w.grad = g if w.grad is None else w.grad.add_(g)

        store = WeightGradStore.current()
        store.put(closure) if store.deferring else closure()  # as DeepSeek's examples do
        return dy @ weight, None


class UserStage(nn.Module):
    """bf16 weights with closures, biases and a norm by autograd, an expert that may get no token, a frozen part."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.ones(width))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x):
        return x + torch.tanh(UserLinear.apply(self.norm(x), self.up.weight) + self.up.bias) * self.frozen


def user_closures(rank: int, microbatches: int) -> list[tuple]:
    """Return name, dtype, whether there is a gradient, and the error against float64 sums of the same GEMMs."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"]
    torch.manual_seed(0)
    stages = [fully_shard(UserStage(), mesh=mesh, mp_policy=BF16) for _ in range(2)]
    products: dict[int, list[Tensor]] = {}
    apply = UserLinear.backward

    def recording(ctx, dy):
        x, _ = ctx.saved_tensors
        products.setdefault(id(ctx.weight), []).append((dy.t() @ x).double())
        return apply(ctx, dy)

    UserLinear.backward = staticmethod(recording)
    seen = set()
    gathered = []

    def criterion(a, b):
        gathered[:] = [p for stage in stages for p in stage.parameters() if p.requires_grad]
        seen.update(p.grad.dtype for p in gathered if p.grad is not None)
        return F.mse_loss(a, b)

    x, y = batch(microbatches, 2, torch.bfloat16)
    mine = slice(rank * 2 * microbatches, (rank + 1) * 2 * microbatches)
    pipe = DualPipeV(stages, process_group=torch.distributed.new_subgroups(1)[0])
    pipe.step(x[mine], num_chunks=microbatches, criterion=criterion, labels=(y[mine],))
    found = []
    for stage, weight in zip(stages, [p for p in gathered if id(p) in products]):
        total = torch.stack(products[id(weight)]).sum(0)
        torch.distributed.all_reduce(total)
        error = relative_error(full(stage.up.weight.grad).double(), total / 2)
        found += [(n, p.dtype, p.grad is not None and p.grad.dtype, error) for n, p in stage.named_parameters()]
    return [*found, ("accumulators", None, seen, 0.0)]


@pytest.mark.parametrize("microbatches", [1, 6])
def test_a_users_bf16_closures_accumulate_in_fp32_and_lose_nothing(microbatches):
    for found in run_ranks(user_closures, 2, microbatches, fresh=True):
        *params, accumulators = found
        assert accumulators[2] <= {torch.float32}
        assert microbatches == 1 or accumulators[2] == {torch.float32}
        for name, dtype, grad, error in params:
            if name in ("unused", "frozen"):
                assert (dtype, grad) == (torch.float32, False)
            else:
                assert (dtype, grad) == (torch.float32, torch.float32), name
            assert error < 1e-6, (name, error)  # bf16 accumulation: 1e-3


def gradient_bytes(rank: int) -> tuple[int, int, int]:
    """Return the bytes of accumulators in a step, the parameters' elements, and the largest tensor that is neither."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layers = [defer_weight_grads(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))) for _ in range(2)]
    stages = [fully_shard(layer, mesh=mesh, mp_policy=BF16) for layer in layers]
    pipe = DualPipeV(stages, process_group=torch.distributed.new_subgroups(1)[0])
    counts = []

    def criterion(a, b):
        parameters = [p for stage in stages for p in stage.parameters()]
        pointers = {p.grad.data_ptr(): p.grad.nbytes for p in parameters if p.grad is not None}
        gc.collect()
        shapes = {p.shape for p in parameters}
        known = {p.data_ptr() for p in parameters} | pointers.keys()
        others = [t for t in gc.get_objects() if type(t) is Tensor and t.shape in shapes and t.data_ptr() not in known]
        counts.append((sum(pointers.values()), sum(p.numel() for p in parameters), len(others)))
        return F.mse_loss(a, b)

    x = torch.randn(8, 64, dtype=torch.bfloat16)
    gc.collect()
    gc.freeze()  # exclude what exists already
    pipe.step(x, num_chunks=4, criterion=criterion, labels=(x,))
    return counts[-1]


def test_gradients_take_one_fp32_buffer_per_parameter():
    for in_accumulators, elements, others in run_ranks(gradient_bytes, 2):
        assert in_accumulators == 4 * elements
        assert others == 0


def unsharded(rank: int) -> list[tuple[torch.dtype, float]]:
    """Return dtypes and errors of bf16 modules without FSDP2 whose parameters have an fp32 `grad_dtype`.

    The gradients come from closures, Linear and autograd.
    """
    torch.manual_seed(0)
    stages = [UserStage().bfloat16(), defer_weight_grads(nn.Linear(WIDTH, WIDTH)).bfloat16()]
    exact = copy.deepcopy(stages)
    for stages_, dtype in ((stages, torch.float32), (exact, torch.float64)):
        for p in (p for stage in stages_ for p in stage.parameters()):
            p.grad_dtype = dtype
    x, y = batch(8, 1, torch.bfloat16)
    for model in (stages, exact):
        DualPipeV(model).step(x, num_chunks=8, criterion=F.mse_loss, labels=(y,))
    pairs = [(p, q) for a, b in zip(stages, exact) for p, q in zip(a.parameters(), b.parameters())]
    return [(p.grad.dtype, relative_error(p.grad.double(), q.grad)) for p, q in pairs if p.grad is not None]


def test_unsharded_modules_accumulate_by_the_same_mechanism():
    found = run_ranks(unsharded, 1)[0]
    assert len(found) == 6, "all but the unused one"
    for dtype, error in found:
        assert dtype is torch.float32 and error < 1e-6


# -- gradients that were left elsewhere, or in the parameters' dtype

LEFT, STEP, MICROBATCHES = 256.0, 1.0, 4  # in bfloat16, 256 + 1 is 256


class Scaled(nn.Module):
    """Computes x * weight + bias, initially x: every gradient of a micro-batch is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * self.weight + self.bias


class LeavesNarrow(torch.autograd.Function):
    """Computes x * weight; the deferred weight gradient replaces any present gradient by a bfloat16 one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        (x,), w = ctx.saved_tensors, ctx.weight

        def closure():
            total = (dy * x).sum(0) if w.grad is None else w.grad + (dy * x).sum(0)
            w.grad, w.grad_dtype = None, None  # any
            w.grad = total.to(w.dtype)

        WeightGradStore.current().put(closure)
        return dy * w.detach(), None


class Narrow(Scaled):
    def forward(self, x):
        return LeavesNarrow.apply(x, self.weight) + self.bias


def backward_by_fsdp2(stage: nn.Module, x: Tensor) -> None:
    """Run a backward outside of a step; in some torch releases FSDP2 keeps the gradient for a later reduction."""
    stage.set_requires_gradient_sync(False)
    (LEFT * stage(x).float()).sum().backward()


def backward_by_hand(stage: nn.Module, x: Tensor) -> None:
    """Run a backward on unsharded parameters, without FSDP2's hooks."""
    stage.unshard()
    (LEFT * type(stage).forward(stage, x).float()).sum().backward()


def left(rank: int) -> dict[str, tuple]:
    """Return the dtype and values of each parameter's reduced gradient, after gradients from before a step."""
    mesh, alone = init_device_mesh("cpu", (2,)), torch.distributed.new_subgroups(1)[0]
    x, found = torch.ones(MICROBATCHES, WIDTH, dtype=torch.bfloat16), {}

    def step(pipe: DualPipeV, **options) -> None:
        pipe.step(x, num_chunks=MICROBATCHES, criterion=lambda a, _: a.float().sum(), labels=(x,), **options)

    def check(name: str, stages: list[nn.Module]) -> None:
        found[name] = tuple((p.grad.dtype, set(full(p.grad).tolist())) for s in stages for p in s.parameters())

    def built(kind: type[Scaled]) -> tuple[list[nn.Module], DualPipeV]:
        stages = [fully_shard(kind(), mesh=mesh, mp_policy=BF16) for _ in range(2)]
        return stages, DualPipeV(stages, process_group=alone)

    for backward in (backward_by_fsdp2, backward_by_hand):
        for dropped in (False, True):
            stages, pipe = built(Scaled)
            for when in ("before the first step", "between steps"):
                for stage in stages:
                    backward(stage, x[:1])
                if dropped:
                    pipe.zero_grad()
                step(pipe)
                check(f"{backward.__name__}, {when}, {'dropped by zero_grad' if dropped else 'then a step'}", stages)
                pipe.zero_grad()
    stages, pipe = built(Narrow)
    for sync in (False, True):
        step(pipe, sync=sync)
    check("left in bfloat16 by the last closure of two steps", stages)
    return found


def test_gradients_left_elsewhere_or_in_bf16_are_added_in_fp32_and_reduced_with_the_others():
    steps = {"then a step": LEFT + MICROBATCHES * STEP, "dropped by zero_grad": MICROBATCHES * STEP,
             "left in bfloat16 by the last closure of two steps": 2 * MICROBATCHES * STEP}
    for found in run_ranks(left, 2, fresh=True):
        assert len(found) == 9
        for name, gradients in found.items():
            expected = (torch.float32, {steps[name.split(", ")[-1]]})
            assert gradients == (expected,) * 4, name


# -- what FSDP2 is told to do, and when


def collectives(rank: int, microbatches: int) -> list[str]:
    """Return what one rank does in a step, in order."""
    run = Training(microbatches=microbatches)
    log = []

    def logged(owner, name, entry):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            log.append(entry)
            return original(*args, **kwargs)

        setattr(owner, name, call)

    newer = hasattr(torch.distributed, "all_gather_single")
    logged(torch.distributed, "all_gather_single" if newer else "all_gather_into_tensor", "gather")
    logged(torch.distributed, "reduce_scatter_single" if newer else "reduce_scatter_tensor", "reduce")
    logged(_fsdp_state.FSDPState, "_root_post_backward_final_callback", "callback")
    for i, stage in enumerate(run.stages):
        logged(stage, "forward", f"F{i}")
    run.step()
    assert all(isinstance(p, DTensor) for p in run.pipe.parameters())
    return log


def test_each_unit_is_gathered_and_reduced_once_a_step_and_autograd_calls_nothing_back():
    for log in run_ranks(collectives, 2, 3, fresh=True):
        assert [entry for entry in log if entry != "callback"][:5] == ["gather"] * 4 + ["F0"]
        assert log.count("gather") == log.count("reduce") == 4
        assert log.count("callback") in (0, 2), "once for each stage, or not at all where torch has a public call"
        # DualPipeV on one rank with three micro-batches ends with W of stage 1 and then of stage 0.
        assert log.index("reduce") > len(log) - 1 - log[::-1].index("F1")


def sequences(rank: int) -> dict[str, float]:
    """Return the errors of gradients after steps that follow others."""
    run = Training(pp=2)
    errors = {}

    def check(name: str, steps: int) -> None:
        for _ in range(steps):
            run.step_expected()
        errors[name] = run.error()
        run.zero_grad()

    run.step()
    run.step()
    check("two steps add up", 2)
    run.step(sync=False)
    errors["kept apart"] = float(any(p.grad is not None for p in run.pipe.parameters()))
    run.step(sync=False)
    run.step(sync=True)
    check("accumulated over steps", 3)
    run.step(sync=False)
    run.pipe.zero_grad()
    run.step()
    check("zero_grad drops what was accumulated", 1)
    with torch.no_grad():
        _, outputs = run.step(return_outputs=True)
        if run.mesh["pp"].get_local_rank() == 0:
            errors["evaluation"] = relative_error(outputs, nn.Sequential(*run.expected)(run.x[run.mine]))
    errors["sharded after evaluation"] = float(not all(isinstance(p, DTensor) for p in run.pipe.parameters()))
    with torch.no_grad():  # like an optimizer
        for p in (*run.pipe.parameters(), *(p for stage in run.expected for p in stage.parameters())):
            p *= 0.5
    run.step()
    check("after an evaluation and an update", 1)
    return errors


def test_steps_in_a_row():
    for errors in run_ranks(sequences, 4):
        assert {name: error for name, error in errors.items() if error > 1e-10} == {}


# -- failures


class Failing(Stage):
    fail = ""

    def forward(self, x):
        if self.fail == "forward":
            raise RuntimeError("out of luck")
        y = super().forward(x)
        if self.fail == "backward":
            y.register_hook(lambda grad: 1 / 0)
        return y


def failing_steps(rank: int, failing_rank: int, local: int, where: str) -> tuple[str, float, str]:
    """Return the error for arguments that do not fit, the next step's gradient error, and the error of a failure."""
    run = Training(pp=2, microbatches=4, make=Failing)
    if rank == failing_rank:
        run.microbatches = 5
    wrong_arguments = refusal(run.step)
    run.microbatches = 4
    run.step_expected()
    run.step()
    error = run.error()
    run.stages[local].fail = where if rank == failing_rank else ""
    return wrong_arguments, error, refusal(run.step)


@pytest.mark.parametrize("failing_rank, local, where", [
    (3, 0, "backward"),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in ((0, 1, "forward"), (1, 0, "forward"), (2, 1, "backward"))),
])
def test_a_failure_in_one_pipeline_raises_in_all(failing_rank, local, where):
    for wrong_arguments, error, failure in run_ranks(failing_steps, 4, failing_rank, local, where, fresh=True):
        assert wrong_arguments.startswith("ValueError") and "disagree" in wrong_arguments
        assert error < 1e-10
        assert failure.startswith("PipelineError")
        assert ("out of luck" if where == "forward" else "division") in failure


def abandoned(rank: int, ranks: int, where: str) -> tuple[list[bool], float]:
    """Abandon a step, rank 0 at `where` and the others before; return what is left, and the next step's error."""
    mesh = init_device_mesh("cpu", (ranks,))
    expected = Failing().double()
    stage = shard_nested(copy.deepcopy(expected), mesh)
    stages = {0: StageParameters(stage)}
    x, _ = batch(1, ranks)
    mine = slice(rank * 2, rank * 2 + 2)

    def begin() -> driver.ParametersStep:
        stages[0].check()
        step = driver.ParametersStep(stages, {0: set()}, train=True, reduce=True)
        step.gather()
        return step

    step = begin()
    if where != "gather" and rank == 0:
        step.wait(0)
        stage.fail = "" if where == "reduce" else where
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            stage(x[mine]).square().sum().backward()
            raise RuntimeError("before the reduction")
        stage.fail = ""
    with patch.object(torch.distributed.Work, "wait", side_effect=AssertionError("abandon waits for nobody")):
        step.abandon()
    left = [isinstance(p, DTensor) and p.grad is None for p in stage.parameters()]
    left += [param.grad is None for param, _ in stages[0].unsharded()]
    with torch.no_grad():  # so that parameters gathered before the update show
        for p in (*stage.parameters(), *expected.parameters()):
            p *= 0.5
    step = begin()
    step.wait(0)
    stage(x[mine]).square().sum().backward()
    step.complete([0])
    step.finish()
    (expected(x).square().sum() / ranks).backward()
    return left, gradient_errors([stage], (0,), [expected])


@pytest.mark.parametrize("where", ["gather", "forward", "backward", "reduce"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_abandoned_step_leaves_nothing_behind_and_needs_no_other_rank(ranks, where):
    for left, error in run_ranks(abandoned, ranks, ranks, where, fresh=True):
        assert left and all(left)
        assert error < 1e-10


def failing_collective(rank: int, pp: int, method: str) -> tuple[str, float]:
    """Return a rank's error and its seconds, where rank 1 fails in the midst of a gather or of a reduction."""
    run = Training(pp, microbatches=4)
    owner = FSDPModule if method == "unshard" else FSDPParamGroup
    plain, calls = getattr(owner, method), []

    def planted(*args, **options):
        calls.append(args)
        if rank == 1 and len(calls) == 2:
            raise MemoryError("planted")
        return plain(*args, **options)

    began = time.monotonic()
    with patch.object(owner, method, planted):
        return refusal(run.step), time.monotonic() - began


@pytest.mark.parametrize("pp, method", [
    (1, "unshard"), (1, "post_backward"),
    *(pytest.param(2, method, marks=pytest.mark.slow) for method in ("unshard", "post_backward")),
])
def test_a_failure_in_the_midst_of_a_collective_ends_those_that_wait_for_it(pp, method):
    results = run_ranks(failing_collective, 2 * pp, pp, method, group_timeout=40, fresh=True)
    for rank, (message, seconds) in enumerate(results):
        assert seconds < 20 and "rank 1" in message
        if rank == 1:
            assert "MemoryError: planted" in message
        elif rank == 0:
            assert re.search(r"of stage \d from rank 1, which has left|rank 1.*MemoryError: planted", message)


class Relay(nn.Module):
    """A stage without parameters, so that its rank shares none with another pipeline."""

    def forward(self, x):
        return x * 2.0


def failing_elsewhere(rank: int) -> list[str]:
    """Return the errors of a rank whose stage is unsharded, and of the others, where another pipeline fails."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage_rank = mesh["pp"].get_local_rank()
    stage = shard_whole(Failing(), mesh["dp"]).double() if stage_rank == 0 else Relay()
    pipe = Pipeline([stage], process_group=mesh["pp"].get_group(), schedule="1f1b")
    x, y = batch(3, 1)
    messages = []
    for where in ("arguments", "forward"):
        if stage_rank == 0:
            stage.fail = where if rank == 0 else ""
        rows = x[:1] if where == "arguments" and rank == 0 else x
        messages.append(refusal(lambda rows=rows: pipe.step(rows, num_chunks=3, criterion=F.mse_loss, labels=(y,))))
    return messages


def test_a_rank_without_sharded_parameters_hears_of_failures_in_other_pipelines():
    for arguments, forward in run_ranks(failing_elsewhere, 4, group_timeout=20, fresh=True):
        assert "cannot be split" in arguments and "out of luck" in forward


def killed(rank: int) -> None:
    def criterion(a, b):
        if rank == 1:
            os._exit(3)
        return F.mse_loss(a, b)

    Training(pp=2, microbatches=4).step(criterion)


def test_a_killed_rank_raises_in_all_pipelines():
    results = run_ranks(killed, 4, check=False, timeout=50, group_timeout=10, fresh=True)
    assert isinstance(results.pop(1), ChildProcessError)
    for error in results:
        assert isinstance(error, PipelineError), error


def lost(rank: int) -> str:
    run = Training(microbatches=2)
    with patch.object(type(param_groups(run.stages[0])[0]), "post_backward", lambda group: None):
        return refusal(run.step)


def test_a_gradient_that_fsdp2_drops_is_noticed():
    """`finalize_backward` of torch 2.15 silently drops every gradient for which `post_backward` was not called."""
    for message in run_ranks(lost, 2, fresh=True):
        assert "FSDP2 reduced no gradient for" in message and "up.weight" in message


# -- other layouts of the parameters


class ByMethod(nn.Module):
    """Calls a method of a sharded module instead of the module, so that none of FSDP2's hooks runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Stage.forward(self.inner, x)


def several_groups(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrap a stage as one unit with two parameter groups.

    Biases and norms are sharded over two ranks and replicated over the two others.
    """
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = _fsdp_common.HSDPMeshInfo(hybrid, shard_mesh_dim=1, replicate_mesh_dim=0)
    return fully_shard(stage, mesh=mesh, shard_placement_fn=lambda p: (
        _fsdp_common.ShardPlacementResult(Shard(0), other) if p.dim() == 1 else None))


def other_units(rank: int, layout: str) -> float:
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Training(wrap={
        "several groups": several_groups,
        "replicas": lambda stage, mesh: shard_nested(stage, replicas),
        "called by a method": lambda stage, mesh: ByMethod(shard_nested(stage, mesh)),
    }[layout])
    if layout == "several groups":
        assert len(param_groups(run.stages[0])) == 2
    for _ in range(2):
        run.step()
        run.step_expected()
    return run.error()


@pytest.mark.parametrize("layout", ["several groups", "replicas", "called by a method"])
def test_other_units(layout):
    if layout == "several groups" and not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip(f"torch {torch.__version__} has one parameter group per unit")
    assert max(run_ranks(other_units, 4, layout)) < 1e-10


class Optional(nn.Module):
    """A layer and, if `uses_extra`, experts and a scale beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.uses_extra = False
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.extra = GroupedLinear(4, WIDTH, WIDTH)
        self.scale = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.uses_extra:
            return y
        num_local = self.extra.weight.shape[0]
        if isinstance(self.extra.weight, DTensor):
            num_local = self.extra.weight.to_local().shape[0]
        rows = torch.full((num_local,), len(x), dtype=torch.int32)  # all rows to the first expert of this rank
        return y + self.scale(self.extra(x, rows))


# By step: the ranks that use the extra parameters, and whether the step reduces its gradients.
USES = ((), True), ((), False), ((1,), False), ((), True), ((0, 2), True), ((), True)


def unused(rank: int, world: int, dtype: torch.dtype, ep: int) -> list[list[float]]:
    """Train with parameters that only some ranks use in some steps; return the errors of all parameters by update.

    The reference is one process, with the mean of the ranks' gradients, None where no rank has one.
    """
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    expected = [Optional().to(dtype) for _ in range(2)]
    stages = copy.deepcopy(expected)
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    plan = resolve_dtypes(stages, DTypePolicy(dtype, reduce_dtype, dtype), sharded=False)
    for stage in stages:
        defer_weight_grads(stage)
        if ep > 1:
            shard_experts(stage, mesh["ep"])
    if world > 1:
        shard_stages(stages, mesh._flatten(), plan, expert_mesh=mesh["dp"])
    else:
        for stage in stages:
            shard(stage, None, plan)
    pipe = DualPipeV(stages, process_group=torch.distributed.new_subgroups(1)[0])
    settings = {"lr": 0.1, "weight_decay": 0.5, "foreach": False}
    # AdamW cannot update bfloat16 parameters from float32 gradients.
    kind = torch.optim.SGD if dtype is torch.bfloat16 else torch.optim.AdamW
    optimizer = kind(pipe.parameters(), **settings)
    expected_optimizer = kind([p for stage in expected for p in stage.parameters()], **settings)
    errors: list[list[float]] = []
    for number, (users, reduces) in enumerate(USES):
        x, y = (part.to(dtype) for part in batch(4 * world, 1))
        x, y = x + number, y - number
        for stage in stages:
            stage.uses_extra = rank in users
        mine = slice(rank * 8, rank * 8 + 8)
        pipe.step(x[mine], num_chunks=2, criterion=F.mse_loss, labels=(y[mine],), sync=reduces)
        for other in range(world):
            for a, b in zip(x[other * 8 : other * 8 + 8].chunk(2), y[other * 8 : other * 8 + 8].chunk(2)):
                for stage in expected:
                    stage.uses_extra = other in users
                    local_experts = 4 // ep
                    first = torch.zeros(4, dtype=torch.int32)
                    first[other % ep * local_experts :] = len(a)
                    a = expected_forward(stage, a, first)
                (F.mse_loss(a, b) / world).backward()
        if reduces:
            pipe.clip_grad_norm_(1e9)
            optimizer.step()
            expected_optimizer.step()
            optimizer.zero_grad()
            expected_optimizer.zero_grad()
            pairs = zip(pipe.parameters(), expected_optimizer.param_groups[0]["params"], strict=True)
            errors.append([relative_error(full(p.detach()).double(), q.detach().double()) for p, q in pairs])
    return errors


def expected_forward(stage: Optional, x: Tensor, rows: Tensor) -> Tensor:
    """Compute `Optional` with all experts on one rank. rows: the end of each expert's rows."""
    y = stage.layer(x)
    return y + stage.scale(stage.extra(x, rows)) if stage.uses_extra else y


@pytest.mark.parametrize("world, dtype, ep", [
    (1, torch.float64, 1), (2, torch.float64, 1), (2, torch.float64, 2), (2, torch.bfloat16, 1),
    (1, torch.bfloat16, 1), pytest.param(4, torch.float64, 2, marks=pytest.mark.slow),
])
def test_parameters_that_no_rank_uses_have_no_gradient_and_do_not_decay(world, dtype, ep):
    for errors in run_ranks(unused, world, world, dtype, ep):
        assert len(errors) == 4
        assert max(map(max, errors)) < (1e-10 if dtype is torch.float64 else 0.5)
        assert errors[0][2:5] == [0.0] * 3, "weights that nobody has used are what they were"


class PartlyUsed(nn.Module):
    """Three layers: used on both ranks, on rank 0 alone, on none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(3)])
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.layers[1](x) if self.rank == 0 else self.layers[0](x)


def with_hooks(rank: int) -> tuple[list[float], list[bool]]:
    """Run a step with hooks on sharded parameters of which rank 0 alone uses some, and no rank others."""
    stages = [PartlyUsed(rank), PartlyUsed(rank)]
    for stage in stages:
        fully_shard(stage, mesh=init_device_mesh("cpu", (2,)))
    seen: list[float] = []
    params = [layer.weight for stage in stages for layer in stage.layers]
    for param in params:
        param.register_post_accumulate_grad_hook(lambda param: seen.append(float(full(param.grad).abs().sum())))
    pipe = DualPipeV(stages, process_group=torch.distributed.new_subgroups(1)[0])
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for _ in range(2):
        pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,))
        pipe.zero_grad()
    pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,))
    return seen, [param.grad is None for param in params]


def test_hooks_of_sharded_parameters_see_reduced_gradients_and_none_of_unused_ones():
    for seen, missing in run_ranks(with_hooks, 2):
        assert missing == [False, False, True] * 2
        assert len(seen) == 3 * 4 and min(seen) > 0, "two parameters of each of two stages, in each of three steps"


def changed_between_steps(rank: int) -> dict[str, str | float]:
    """Change sharded stages between two steps; return the error of the second, or of its gradients."""
    results: dict[str, str | float] = {}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    for change in ("module", "parameter", "parameter at once", "frozen module", "unreduced", "call", "clip"):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double() for _ in range(2)]
        for stage in stages:
            shard_nested_first(stage)
        params = [param for stage in stages for param in stage.parameters()]
        pipe = DualPipeV(stages, process_group=torch.distributed.new_subgroups(1)[0],
                         unreduced=("1.*",) if change == "unreduced" else ())
        if change != "parameter at once":
            pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,))
        grads = [full(param.grad) for param in params]
        if change in ("module", "frozen module", "unreduced"):
            stages[1][1] = nn.Linear(WIDTH, WIDTH).double().requires_grad_(change != "frozen module")
        elif change in ("parameter", "parameter at once"):
            stages[1][1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH).double())
        else:
            with torch.no_grad():
                stages[1](stages[0](x))
        if change == "clip":
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            results[change] = relative_error(pipe.clip_grad_norm_(1e9), norm)
            continue
        pipe.zero_grad()
        text = refusal(lambda pipe=pipe: pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,)))
        results[change] = text or relative_error(full(params[0].grad), grads[0])
    return results


def shard_nested_first(stage: nn.Sequential) -> None:
    fully_shard(stage[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(stage, mesh=init_device_mesh("cpu", (2,)))


def test_a_change_of_a_sharded_stage_between_steps_is_refused_or_gives_the_right_gradients():
    for results in run_ranks(changed_between_steps, 2):
        assert "1.weight, 1.bias" in results["module"]
        for change in ("parameter", "parameter at once"):
            assert "weight of a Linear was replaced" in results[change]
        assert isinstance(results["frozen module"], float) and isinstance(results["unreduced"], float)
        assert results["call"] < 1e-12, "zero_grad has dropped the gradients of the first step"
        assert results["clip"] < 1e-12


def handed_over(rank: int) -> tuple[list[bool], float]:
    """Return whether each gradient is in its accumulator's memory, and the largest gradient error of two steps.

    The gradients of the two steps add up.
    """
    run, same = Training(microbatches=2), []
    complete = driver.StageStep.complete

    def watched(self, **how):
        parameters = self._parameters
        places = [param.grad.data_ptr() for param, _ in parameters.unsharded()]
        first = all(each.sharded_param.grad is None for each in parameters.fsdp_params())
        complete(self, **how)
        if first:
            same.extend(each.sharded_param.grad.to_local().data_ptr() == place
                        for each, place in zip(parameters.fsdp_params(), places, strict=True))

    with patch.object(driver.StageStep, "complete", watched):
        for _ in range(2):
            run.step()
            run.step_expected()
    return same, run.error()


def test_a_group_of_one_rank_keeps_its_accumulators_as_gradients():
    """Nothing is copied; FSDP2 reduces what a second step adds to."""
    for same, error in run_ranks(handed_over, 1):
        assert same and all(same)
        assert error < 1e-10


class Caching(Stage):
    """Makes a table in its first forward and keeps it."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
        return super().forward(x) * self.table


def inference_first(rank: int) -> tuple[float, list[bool]]:
    """Evaluate under inference_mode, by the pipeline and by a stage alone, then train: return the gradient error, and
    whether losses are those of no_grad.
    """
    kinds = iter([Stage, Caching])
    run = Training(microbatches=2, make=lambda: next(kinds)())
    with torch.inference_mode():
        run.stages[0](run.x[run.mine])
        losses, outputs = run.step(return_outputs=True)
        run.stages[1](run.x[run.mine])
        run.x = run.x + 0  # an inference tensor as input
        again, _ = run.step()
    run.x, _ = batch(2, 2)
    with torch.no_grad():
        losses_no_grad, outputs_no_grad = run.step(return_outputs=True)
    same = [torch.equal(losses, losses_no_grad), torch.equal(outputs, outputs_no_grad), torch.equal(losses, again)]
    run.step()
    run.step_expected()
    return run.error(), same


def test_inference_mode_before_the_first_training_step():
    for error, same in run_ranks(inference_first, 2):
        assert error < 1e-10 and all(same)


def outside(rank: int) -> tuple[float, float, bool]:
    """Use a stage without the pipeline, before and after steps of it: it behaves as under FSDP2 alone."""
    run = Training(microbatches=2)
    errors = []
    for _ in range(2):
        run.step()
        run.pipe.zero_grad()
        for _ in range(2):
            run.stages[0](run.x[run.mine]).square().mean().backward()
        for part in run.x.split(4):
            for _ in range(2):
                (run.expected[0](part).square().mean() / 2).backward()
        errors.append(gradient_errors(run.stages[:1], (0,), run.expected))
        run.zero_grad()
    return *errors, all(isinstance(p, DTensor) for p in run.pipe.parameters())


def test_a_stage_can_be_used_without_its_pipeline_between_steps():
    for first, second, sharded in run_ranks(outside, 2):
        assert first < 1e-10 and second < 1e-10 and sharded


def policies(rank: int) -> list[tuple[str, set, set]]:
    """Return the dtypes that the criterion sees and those of the gradients, for policies that leave something out."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for options in ({}, {"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float32},
                    {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}):
        policy = MixedPrecisionPolicy(**options)
        stages = [shard_whole(Stage(dtype=torch.float32), mesh, mp_policy=policy) for _ in range(2)]
        pipe = DualPipeV(stages, process_group=torch.distributed.new_subgroups(1)[0])
        seen = set()

        def criterion(a, b, seen=seen):
            seen.add(a.dtype)
            return F.mse_loss(a.float(), b)

        x, y = batch(5, 1, torch.float32)
        for _ in range(2):
            pipe.step(x, num_chunks=5, criterion=criterion, labels=(y,))
        found.append((sorted(options), seen, {p.grad.dtype for p in pipe.parameters()}))
    return found


def test_policies_that_leave_something_out():
    for found in run_ranks(policies, 2):
        outputs = [torch.float32, torch.bfloat16, torch.float32, torch.float32]
        for (options, seen, gradients), output in zip(found, outputs, strict=True):
            assert seen == {output}, (options, "the same for every micro-batch")
            assert gradients == {torch.float32}, options


def foreign(rank: int) -> bool:
    """Train with a DTensor that FSDP2 does not manage: it has no gradient, and no rank waits for one."""
    mesh = init_device_mesh("cpu", (2,))
    stage = Stage()
    stage.extra = nn.Parameter(distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, [Shard(0)]))
    shard_children(stage, mesh)
    pipe = Pipeline([stage], process_group=torch.distributed.new_subgroups(1)[0], unreduced="norm")
    x, y = batch(1, 1)
    pipe.step(x, num_chunks=1, criterion=F.mse_loss, labels=(y,))
    return stage.extra.grad is None and stage.up.weight.grad is not None


def test_parameters_that_are_not_fsdp2s_are_not_missed():
    assert all(run_ranks(foreign, 2))


class WithTower(nn.Module):
    """A frozen tower in bfloat16 below a layer that is trained in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).bfloat16().requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x.to(self.tower[0].weight.dtype)).to(self.head.weight.dtype))


def frozen_by_hand(rank: int) -> list[str]:
    """Return a pipeline's errors for a tower that fully_shard leaves in another dtype; "" for ways that are right."""
    mesh = init_device_mesh("cpu", (1,))
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    said: list[str] = []
    for options in ({}, {"cast_forward_inputs": False}, bf16):
        stage = fully_shard(WithTower(), mesh=mesh, mp_policy=MixedPrecisionPolicy(**options))
        said.append(refusal(lambda stage=stage: Pipeline([stage]).step(
            torch.ones(1, WIDTH), num_chunks=1, criterion=lambda a: a.float().square().mean())))
    buffered = WithTower()
    buffered.tower.append(_Offset())
    buffered.forward = lambda x: buffered.head(buffered.tower(x.to(torch.bfloat16)))
    pipe = Pipeline([fully_shard(buffered, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16))])
    said.append(refusal(lambda: pipe.step(torch.ones(1, WIDTH), num_chunks=1, criterion=torch.sum)))
    return said


class _Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def test_a_frozen_tower_that_fully_shard_does_not_cast_is_refused_with_the_remedy():
    refused, by_itself, cast, in_a_forward = run_ranks(frozen_by_hand, 1)[0]
    assert all(word in refused for word in ("tower (Sequential)", "bf16", "fp32", "cast_forward_inputs=False"))
    assert by_itself == cast == ""
    assert "neither buffers nor the outputs of a module of another dtype" in in_a_forward


def refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    offloaded = fully_shard(Stage(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    pair = Stage()
    fully_shard([pair.up, pair.down], mesh=mesh)
    moved = Pipeline([fully_shard(Stage(), mesh=mesh)])
    a, b = Stage(), Stage()
    fully_shard([a.up, b.up], mesh=mesh)
    late = Pipeline([Stage()])
    fully_shard(late.module[0], mesh=mesh)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    messages = [refusal(call) for call in (
        lambda: Pipeline([offloaded]), lambda: Pipeline([pair]),
        lambda: Pipeline([fully_shard(a, mesh=mesh), fully_shard(b, mesh=mesh)], schedule="zbv"),
        lambda: late.step(x, num_chunks=1, criterion=torch.sum))]
    with patch.object(_fsdp_state.FSDPState, "_lazy_init", new_callable=PropertyMock, side_effect=AttributeError):
        return [*messages, refusal(lambda: moved.step(x, num_chunks=1, criterion=torch.sum))]


def test_what_cannot_work_is_refused_with_the_remedy():
    offload, pair, apart, late, moved = run_ranks(refused, 1)[0]
    assert "two stages" in apart and "after the pipeline was built" in late
    assert "offload_policy" in offload and "several modules" in pair
    assert "FSDPState._lazy_init" in moved and torch.__version__ in moved


def test_a_plain_stage_that_sees_a_sharded_parameter_is_prepared_once_that_is_gathered():
    calls = []

    class NotedStep:
        def __init__(self, parameters):
            for what in ("gather", "wait", "prepare"):
                setattr(self, what, partial(calls.append, (what, parameters.number)))

    def stage(number, is_sharded):
        return SimpleNamespace(number=number, is_sharded=is_sharded, allows_several_groups=True, ranks=())

    stages = {0: stage(0, True), 1: stage(1, False), 2: stage(2, False)}
    with patch.object(driver, "StageStep", NotedStep):
        step = driver.ParametersStep(stages, {0: {2}, 1: set(), 2: set()}, train=True, reduce=True)
    assert [step.must_wait(number) for number in stages] == [True, False, True]
    step.gather()
    assert calls == [("gather", 0), ("prepare", 1)]
    step.wait(0)
    step.wait(2)
    assert calls[2:] == [("wait", 0), ("prepare", 0), ("prepare", 2)]
