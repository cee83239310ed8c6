"""Stages that users compile or checkpoint: the gradients of the plain ones, and weight gradients deferred."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualpipe import Compute, DualPipeV
from dualpipe.nn import defer_weight_grads
from ranks import run_ranks

WIDTH, CHUNKS = 8, 4


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Checkpointed(nn.Module):
    """Computes a module again in the backward, as users do."""

    def __init__(self, module: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


WRAPPERS = {
    "plain": lambda module: module,
    "aot_eager": partial(torch.compile, backend="aot_eager"),
    "inductor": torch.compile,
    "reentrant": partial(Checkpointed, use_reentrant=True),
    "not_reentrant": partial(Checkpointed, use_reentrant=False),
    "compiled_and_checkpointed": lambda module: Checkpointed(
        torch.compile(module, backend="aot_eager"), use_reentrant=False),
}


def whole_model():
    torch.manual_seed(0)
    return [nn.Sequential(MLP(), MLP()).double() for _ in range(4)]


def step(rank, world, name):
    """A step of stages that are wrapped; the gradients of this rank's, and the share that is deferred."""
    numbers = (rank, 2 * world - 1 - rank)
    own = [defer_weight_grads(copy.deepcopy(whole_model()[number])) for number in numbers]
    pipe = DualPipeV([WRAPPERS[name](stage) for stage in own])
    x = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if name == "reentrant":  # torch's own condition: without, nothing behind the first checkpoint gets a gradient
        x.requires_grad_()
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(*((x,) if rank == 0 else ()), num_chunks=CHUNKS, criterion=F.mse_loss, labels=(2 * x.detach(),))
    grads = [[parameter.grad.tolist() for parameter in stage.parameters()] for stage in own]
    return dict(zip(numbers, grads)), pipe.deferral_report().share


@pytest.mark.parametrize("name", [
    "reentrant", "not_reentrant", "compiled_and_checkpointed", pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=pytest.mark.slow)])  # compiles C++
def test_gradients_are_those_of_the_plain_model_and_their_work_is_deferred(name):
    results = run_ranks(step, 2, 2, name, timeout=280, group_timeout=240)  # a compiler takes its time under load
    stages = whole_model()
    x = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for part in x.chunk(CHUNKS):
        y = part
        for stage in stages:
            y = stage(y)
        F.mse_loss(y, 2 * part).backward()
    for grads, share in results:
        assert share == 1.0
        for number, found in grads.items():
            for grad, parameter in zip(found, stages[number].parameters(), strict=True):
                assert torch.allclose(torch.tensor(grad, dtype=torch.float64), parameter.grad, rtol=1e-10)


class Segmented(nn.Module):
    """A stage with segments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def segments(self) -> list[Compute]:
        return [Compute(self.forward, "x", "x", recompute=True)]


class Wrapper(nn.Module):
    """Looks up attributes in the module that it wraps, as adapters do, and has a forward of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args: Tensor, **options: Tensor) -> Tensor:
        return self.scale * self.inner(*args, **options)


def test_the_forward_of_a_wrapper_runs_and_not_the_segments_of_what_it_wraps():
    torch.manual_seed(0)
    stages = [Wrapper(Segmented()), Wrapper(Segmented())]
    expected = copy.deepcopy(stages)
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    DualPipeV(stages).step(x, num_chunks=CHUNKS, criterion=lambda y: y.square().sum())
    expected[1](expected[0](x)).square().sum().backward()
    for param, other in zip(nn.ModuleList(stages).parameters(), nn.ModuleList(expected).parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
