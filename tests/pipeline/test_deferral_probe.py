"""A step under a probe: how much of each parameter's work is deferred, in FLOPs counted by hand, however it is used."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dualpipe import Compute, Pipeline, WeightGradStore
from dualpipe.nn import Embedding, GroupedLinear, Linear, defer_weight_grads
from dualpipe.nn.accumulators import add_grad
from dualpipe.nn.lora import AdapterForm, LinearAdapter, adapt_matrix, freeze_all_but_adapters
from ranks import run_ranks

ROWS, WIDTH, CHUNKS = 12, 8, 3
DENSE = 2 * ROWS * WIDTH * WIDTH  # FLOPs of a square matrix's gradient in a step


def work_of(stage, schedule="dualpipev", second=None, x=None):
    """(deferred, undeferred, reason) of the parameters of `stage`, whose pipeline goes on by an identity, by name."""
    x = torch.randn(ROWS, WIDTH) if x is None else x
    stages = [stage, second or nn.Identity()] if schedule == "dualpipev" else [stage]
    pipe = Pipeline(stages, schedule=schedule)
    pipe.step(x, num_chunks=CHUNKS, criterion=lambda y, _: y.square().mean(), labels=(x,))
    assert pipe.weight_grad_store.observer is None
    return {work.name: work[3:] for work in pipe._observed.work if work.stage == 0}


@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b"])
def test_linear_layers(schedule):
    stage = nn.Sequential(Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.LayerNorm(2 * WIDTH))
    assert work_of(stage, schedule) == {
        "0.weight": (DENSE, 0, ""),
        "1.weight": (0, 2 * DENSE, "nn.Linear, not passed to defer_weight_grads"),
    }


def test_uneven_microbatches_are_added_up():
    x = torch.randn(ROWS + 1, WIDTH)
    stage = nn.Sequential(Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    per_row = DENSE // ROWS
    found = work_of(stage, x=x)
    assert found["0.weight"][0] == found["1.weight"][1] == per_row * (ROWS + 1)


def test_frozen_parameters_and_those_without_a_gradient_have_no_work():
    stage = nn.Sequential(Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    stage.requires_grad_(False)
    stage[1].unused = nn.Linear(WIDTH, WIDTH)
    assert work_of(stage, second=Linear(WIDTH, WIDTH)) == {}


class Gated(nn.Module):
    """Two GEMMs, of which the first is multiplied by zero: an indexer or an expert that this step does not train."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(x) + 0.0 * self.up(x)


def test_a_gradient_of_zeros_is_no_work():
    assert work_of(Gated()) == {"up.weight": (0, 0, "no gradient, or one of zeros, not counted"), "down.weight": (
        0, DENSE, "nn.Linear, not passed to defer_weight_grads")}


def test_a_hook_on_a_parameter():
    layer = Linear(WIDTH, WIDTH)
    layer.weight.register_post_accumulate_grad_hook(lambda param: None)
    assert work_of(layer) == {"weight": (0, DENSE, "hook on the parameter")}


class Experts(nn.Module):
    """Two experts, of which the second gets a third of the rows."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.down = GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x):
        first = len(x) * 2 // 3
        hidden = torch.cat([x[:first] @ self.up[0], x[first:] @ self.up[1]])
        return self.down(hidden, torch.tensor([first, len(x)], dtype=torch.int32))


def test_stacked_experts_count_the_rows_that_they_had():
    assert work_of(Experts()) == {
        "up": (0, DENSE, "3-D parameter of Experts, used outside a deferring layer"),
        "down.weight": (DENSE, 0, ""),
    }


class Tied(nn.Module):
    def __init__(self, embedding, head):
        super().__init__()
        self.embed, self.head = embedding(WIDTH, WIDTH), head(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x):
        return self.head(self.embed(x.argmax(1)) + self.position)


NO_GEMM = "used by Add: no GEMM, not counted"


def test_a_tied_embedding_counts_for_its_head():
    assert work_of(Tied(Embedding, Linear)) == {"head.weight": (DENSE, 0, ""), "position": (0, 0, NO_GEMM)}
    assert work_of(Tied(nn.Embedding, nn.Linear)) == {
        "head.weight": (0, DENSE, "nn.Linear, not passed to defer_weight_grads"),
        "position": (0, 0, NO_GEMM),
    }


class Deferring(torch.autograd.Function):
    """A function of the user's that defers, as those written for DeepSeek's store, or `at_once` does not."""

    @staticmethod
    def forward(ctx, x, weight, at_once):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.at_once = weight, at_once
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.at_once:
            return dy @ weight, dy.T @ x, None
        WeightGradStore.current().put(lambda: add_grad(ctx.weight, dy.T @ x))
        return dy @ weight, None, None


class Own(nn.Module):
    def __init__(self, at_once):
        super().__init__()
        self.weight, self.at_once = nn.Parameter(torch.randn(WIDTH, WIDTH)), at_once

    def forward(self, x):
        return Deferring.apply(x, self.weight, self.at_once)


def test_functions_that_put_gradients_into_the_store_themselves():
    assert work_of(Own(at_once=False)) == {"weight": (DENSE, 0, "")}
    reason = "parameter of Own, used outside a deferring layer; inside Deferring, counted as one GEMM"
    assert work_of(Own(at_once=True)) == {"weight": (0, DENSE, reason)}


class PlainMatrix(nn.Module):
    """A matrix that the module's own forward reads, as the router of a model of transformers."""

    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(WIDTH // 2, WIDTH)), factor

    def forward(self, x):
        return x + self.factor * F.linear(x, self.weight).repeat(1, 2)


def adapted_matrix(factor=1.0):
    """Return a matrix with an adapter of rank 2 whose second factor is zero, as before the first step."""
    module = PlainMatrix(factor)
    adapt_matrix(module, "weight", AdapterForm(rank=2, scaling=1.0))
    nn.init.zeros_(module.adapter.lora_B.weight)
    freeze_all_but_adapters(module)
    return module


def test_the_factors_of_an_adapted_matrix_have_gradients_although_the_first_is_zero():
    """The gradient of the merged matrix sums over the rows; those of its factors follow from it in every forward."""
    stage = nn.Sequential(Linear(WIDTH, WIDTH), adapted_matrix())
    factor = CHUNKS * 2 * (WIDTH // 2) * WIDTH * 2
    reason = "Linear defers, but its weight is used outside its forward"
    assert work_of(stage) == {
        "0.weight": (DENSE, 0, ""),
        "1.adapter.lora_A.weight": (0, DENSE // 2 + factor, reason),
        "1.adapter.lora_B.weight": (0, factor, reason),
    }
    assert not stage[1].adapter.lora_A.weight.grad.any() and stage[1].adapter.lora_B.weight.grad.any()


def test_an_adapted_matrix_without_effect_has_no_work():
    found = work_of(nn.Sequential(Linear(WIDTH, WIDTH), adapted_matrix(factor=0.0)))
    unused = (0, 0, "no gradient, or one of zeros, not counted")
    assert found == {"0.weight": (DENSE, 0, "")} | {f"1.adapter.lora_{name}.weight": unused for name in "AB"}


def test_the_first_factor_of_an_adapter_of_a_layer_is_deferred():
    layer = Linear(WIDTH, WIDTH)
    layer.add_module("adapter", LinearAdapter(WIDTH, WIDTH, AdapterForm(rank=2, scaling=1.0)))
    nn.init.zeros_(layer.adapter.lora_B.weight)
    freeze_all_but_adapters(layer)
    deferred = (DENSE * 2 // WIDTH, 0, "")
    assert work_of(layer) == {"adapter.lora_A.weight": deferred, "adapter.lora_B.weight": deferred}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.inner, self.use_reentrant = Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)


def test_activation_checkpoints():
    reason = "nn.Linear, not passed to defer_weight_grads"
    assert work_of(Checkpointed(False)) == {"first.weight": (DENSE, 0, ""), "inner.weight": (0, DENSE, reason)}
    deferred, undeferred, reason = work_of(Checkpointed(True))["inner.weight"]
    assert (deferred, undeferred) == (0, DENSE // CHUNKS * CHUNKS) and "reentrant checkpoint" in reason
    stage = Checkpointed(True)
    defer_weight_grads(stage)
    assert work_of(stage)["inner.weight"] == (DENSE, 0, "")


class Recomputed(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.first, self.second = Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x):
        return self.second(self.first(x))

    def segments(self):
        return [Compute(self.first, "x", "x", recompute=self.recompute),
                Compute(self.second, "x", "x", recompute=self.recompute)]


@pytest.mark.parametrize("recompute", [False, True])
def test_segments_count_once(recompute):
    reason = "nn.Linear, not passed to defer_weight_grads"
    assert work_of(Recomputed(recompute)) == {"first.weight": (DENSE, 0, ""), "second.weight": (0, DENSE, reason)}


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(WIDTH, WIDTH), Own(at_once=True)
        self.second.forward = torch.compile(lambda x: F.linear(x, self.second.weight).tanh(), backend="aot_eager")

    def forward(self, x):
        return self.second(self.first(x))


def test_compiled_layers():
    reason = "parameter of Own, used outside a deferring layer; inside torch.compile, counted as one GEMM"
    assert work_of(Compiled()) == {"first.weight": (DENSE, 0, ""), "second.weight": (0, DENSE, reason)}


def sharded_work(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stages = [nn.Sequential(Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    for stage in stages:
        fully_shard(stage, mesh=mesh["dp"])
    pipe = Pipeline(stages, process_group=mesh["pp"].get_group(), schedule="dualpipev")
    x = torch.randn(ROWS, WIDTH)
    pipe.step(x, num_chunks=CHUNKS, criterion=F.mse_loss, labels=(x,))
    return [tuple(work) for work in pipe._observed.work]


def test_sharded_parameters_are_named_as_in_their_stage():
    reason = "nn.Linear, not passed to defer_weight_grads"
    shape = (WIDTH, WIDTH)
    for work in run_ranks(sharded_work, 2):
        assert sorted(work) == [
            (stage, f"{layer}.weight", shape, *rest) for stage in range(2)
            for layer, rest in enumerate([(DENSE, 0, ""), (0, DENSE, reason)])]


