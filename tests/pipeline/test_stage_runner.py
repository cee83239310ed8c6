"""Corner cases of a stage: autocast, unread values in the carry, invalid outputs, memory after an error."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import Communicate, Compute, DualPipeV, Pipeline, PipelineError
from dualpipe.nn import Linear, defer_weight_grads
from toys import Handed


class Wide(nn.Module):
    """A layer that computes in float32 under any autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.float32)


class WideSegments(Wide):
    def segments(self) -> list:
        return [Compute(self.forward, "x", "y"), Communicate(Handed(), "y", "y"), Compute(lambda y: y * 1, "y", "x")]


@pytest.mark.parametrize("make", [Wide, WideSegments])
def test_deferred_weight_gradients_run_without_autocast(make):
    found = []
    for schedule in ("dualpipev_full", "zbv"):
        torch.manual_seed(0)
        pipe = DualPipeV([make(), make()], schedule=schedule)
        x, y = torch.randn(8, 64), torch.randn(8, 64)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, num_chunks=4, criterion=F.mse_loss, labels=(y,))
        found.append([parameter.grad for parameter in pipe.parameters()])
    for full, deferred in zip(*found):
        torch.testing.assert_close(full, deferred, rtol=1e-5, atol=1e-7)


def test_the_graph_of_a_caller_is_differentiated_as_it_was_recorded():
    before = nn.Linear(64, 64)
    hidden = before(torch.randn(1, 8, 64))
    with torch.autocast("cpu", torch.bfloat16):
        Pipeline([nn.Linear(64, 64)]).step(hidden, num_chunks=1, criterion=lambda y: y.float().square().mean())
    gradient = before.weight.grad
    assert not torch.equal(gradient.bfloat16().float(), gradient), "its products are not rounded to bfloat16"


class Equilibrium(nn.Module):
    """A layer z = f(z, x) whose backward solves for the gradient by `autograd.grad(f, z)` in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.Linear(8, 8)
        self.input = nn.Linear(8, 8)
        self.recurrent.weight.data *= 0.3

    def cell(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(z) + self.input(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            end = self.cell(start, x)

            def solve(gradient: Tensor) -> Tensor:
                solution = gradient
                for _ in range(20):
                    solution = torch.autograd.grad(end, start, solution, retain_graph=True)[0] + gradient
                return solution

            z.register_hook(solve)
        return z


class RecomputedEquilibrium(Equilibrium):
    def segments(self) -> list:
        return [Compute(lambda x: Equilibrium.forward(self, x), "x", "x", recompute=True)]


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved_1f1b"])
@pytest.mark.parametrize("make", [Equilibrium, RecomputedEquilibrium])
@pytest.mark.parametrize("dtype, grad_dtype", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_gradients_of_inputs_inside_of_the_backward_leave_accumulators_alone(schedule, make, dtype, grad_dtype):
    torch.manual_seed(0)
    stages = [make().to(dtype) for _ in range(2)]
    plain = [copy.deepcopy(stage).double() for stage in stages]
    for stage in stages:
        for parameter in defer_weight_grads(stage).parameters():
            parameter.grad_dtype = grad_dtype
    x = torch.randn(8, 8).to(dtype)
    Pipeline(stages, schedule=schedule).step(x, num_chunks=4, criterion=lambda y: y.double().square().mean())
    for part in x.double().chunk(4):
        plain[1](plain[0](part)).square().mean().backward()
    tolerance = 1e-10 if dtype is torch.float64 else 0.05
    for stage, reference in zip(stages, plain):
        for actual, expected in zip(stage.parameters(), reference.parameters()):
            assert (actual.grad - expected.grad).norm() <= tolerance * expected.grad.norm()


class Leftover(nn.Linear):
    """A stage with a communication whose result no segment reads."""

    def segments(self) -> list:
        return [
            Compute(lambda x: (nn.Linear.forward(self, x), x.sum()), "x", ("x", "total")),
            Communicate(Handed(), "total", "totals"),
            Compute(lambda x: x * 2, "x", "x"),
        ]


def test_unread_received_values_are_no_outputs():
    stage, x = Leftover(4, 4), torch.ones(4, 4)
    with torch.no_grad():
        _, outputs = Pipeline([stage]).step(x, num_chunks=2, return_outputs=True)
        torch.testing.assert_close(outputs, 2 * nn.Linear.forward(stage, x))


class Listing(nn.Linear):
    def segments(self) -> list:
        return [Compute(super().forward, "x", "y"), Communicate(Handed(), "y", "y"), Compute(lambda y: [y], "y", "x")]


def test_segments_that_return_no_tensor_raise():
    x = torch.ones(4, 4)
    with pytest.raises(PipelineError, match=r"0F0 .*must return a tensor"):
        DualPipeV([Listing(4, 4), Listing(4, 4)]).step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,))


class Swapped(nn.Linear):
    """A stage whose first segment reads the second input first."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a) + b

    def segments(self) -> list:
        return [
            Compute(lambda b, a: (a, b), ("x1", "x0"), ("a", "b")), Communicate(Handed(), "a", "a"),
            Compute(lambda a, b: nn.Linear.forward(self, a) + b, ("a", "b"), "x"),
        ]


def test_hooks_get_the_inputs_in_their_order():
    stage, told = Swapped(4, 4), []
    stage.register_forward_pre_hook(lambda module, args: told.extend(float(arg.mean()) for arg in args))
    with torch.no_grad():
        Pipeline([stage]).step(torch.zeros(2, 4), torch.ones(2, 4), num_chunks=1, return_outputs=True)
    assert told == [0.0, 1.0]


def test_an_error_keeps_neither_inputs_nor_modules():
    stage = nn.Linear(4, 4)
    pipe = Pipeline([stage])
    inputs = torch.ones(8, 4)
    kept = [weakref.ref(inputs), weakref.ref(refused := nn.Linear(4, 4))]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="cannot be split into num_chunks=9"):
            pipe.step(inputs, num_chunks=9, criterion=torch.sum)
        with pytest.raises(ValueError, match="nonsense"):
            Pipeline([refused], schedule="nonsense")
        del inputs, refused
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()
