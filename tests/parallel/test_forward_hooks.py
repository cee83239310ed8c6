"""Forward hooks and FSDP2's casts where a stage runs as segments: as where it is called."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dualpipe import Communicate, Compute, Pipeline
from dualpipe.parallel.forward_hooks import _fsdp_state, with_forward_hooks
from ranks import run_ranks

WIDTH = 4


class Rolled:
    """A communication without ranks: rows come back rolled by one."""

    group = None

    def __init__(self, rows: Tensor | None = None) -> None:
        self._rows = rows

    def forward(self, inputs: tuple[Any, ...]) -> Rolled:
        return Rolled(inputs[0].roll(1, 0))

    def backward(self, context: Any, gradients: tuple[Any, ...]) -> Rolled:
        return Rolled(gradients[0].roll(-1, 0))

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        return (self._rows,), None


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.b = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)).roll(1, 0))

    def segments(self) -> list:
        return [
            Compute(lambda x: (x, torch.tanh(self.a(x))), "x", ("x", "rows")),
            Communicate(Rolled(), "rows", "rows"),
            Compute(lambda x, rows: x + self.b(rows), ("x", "rows"), "x"),
        ]


class TwoLayers(nn.Module):
    """The hooks of the layers inside are kept by `with_forward_hooks`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def segments(self) -> list:
        return [s for layer in self.layers for s in with_forward_hooks(layer, layer.segments(), ("x",), ("x",))]


def attach(stage: TwoLayers, told: list[Any]) -> None:
    """Hooks of every form, on the stage and on a layer."""
    stage.register_forward_pre_hook(lambda module, args: args[0] * 2)
    stage.register_forward_hook(lambda module, args, output: (told.append(args[0].detach().clone()), output.tanh())[1])
    layer = stage.layers[1]
    layer.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, kwargs, output: output - args[0].mean(), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, output: None)


def test_hooks_run_as_where_the_stage_is_called():
    torch.manual_seed(0)
    stage = TwoLayers()
    plain = copy.deepcopy(stage)
    told: list[Any] = []
    expected: list[Any] = []
    attach(stage, told)
    attach(plain, expected)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    loss, outputs = Pipeline([stage]).step(x, num_chunks=1, criterion=torch.sum, return_outputs=True)
    output = plain(x)
    output.sum().backward()
    assert torch.equal(outputs, output) and torch.equal(loss[0], output.sum())
    for mine, theirs in zip(stage.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=0)
    assert len(told) == 1 and torch.equal(told[0], expected[0]), "hooks are told the arguments of the stage"


def test_a_hook_that_is_attached_later_runs_without_arguments():
    stage = TwoLayers()
    pipe = Pipeline([stage])
    told = []
    stage.register_forward_pre_hook(lambda module, args: told.append(len(args)))
    stage.register_forward_hook(lambda module, args, output: told.append(args))
    pipe.step(torch.randn(6, WIDTH, dtype=torch.float64), num_chunks=1, criterion=torch.sum)
    assert told == [1, ()]


def test_what_cannot_work_in_segments_is_refused():
    hooked = TwoLayers()
    hooked.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a TwoLayers has backward hooks, but runs as segments"):
        Pipeline([hooked])
    compiled = TwoLayers()
    compiled.compile(backend="eager")
    with pytest.raises(ValueError, match="is compiled as a whole and has segments that communicate"):
        Pipeline([compiled])
    with pytest.raises(ValueError, match="is compiled as a whole and has segments that communicate"):
        Pipeline([torch.compile(TwoLayers(), backend="eager")])


class Changing(Layer):
    """Has other segments by `doubled`, and counts how often they are asked for."""

    doubled = False

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def segments(self) -> list:
        self.num_asked += 1
        scale = 2 if self.doubled else 1
        return [*super().segments(), Compute(lambda x: x * scale, "x", "x")]


class Keyed(Changing):
    def segments_key(self) -> bool:
        return self.doubled


@pytest.mark.parametrize("make, scale, num_asked", [(Changing, 1, 1), (Keyed, 2, 2)])
def test_segments_are_taken_once_for_each_key(make, scale, num_asked):
    stage = make()
    pipe = Pipeline([stage])
    x = torch.randn(6, WIDTH, dtype=torch.float64)

    def output() -> Tensor:
        with torch.no_grad():
            return pipe.step(x, num_chunks=1, return_outputs=True)[1]

    first = output()
    stage.doubled = True
    assert torch.equal(output(), scale * first) and torch.equal(output(), scale * first)
    assert stage.num_asked == num_asked


class Mixed(TwoLayers):
    """Its second layer is an FSDP2 unit of its own, in bfloat16, that casts what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(torch.float32) for _ in range(2))


def sharded(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of a stage that is called, and of one that runs as segments."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))["pp"].get_group()
    found = []
    for in_segments in (False, True):
        torch.manual_seed(0)
        stage = Mixed()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        fully_shard(stage.layers[1], mesh=mesh, mp_policy=policy)
        fully_shard(stage, mesh=mesh)
        stage.register_forward_hook(lambda _, __, output: output * 2)  # after that of FSDP2
        if not in_segments:
            stage.segments = None
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
        pipe = Pipeline([stage], process_group=alone)
        _, outputs = pipe.step(x, num_chunks=1, criterion=lambda y: y.square().mean(), return_outputs=True)
        found.append([outputs.detach(), *(p.grad.full_tensor() for p in stage.parameters())])
    return [[tensor.numpy() for tensor in tensors] for tensors in found]


def test_the_casts_of_a_units_policy_are_those_of_a_call():
    for called, segments in run_ranks(sharded, 2):
        assert called[0].dtype == "float32"
        for mine, theirs in zip(segments, called, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=0, atol=0)


def wrap(function: Callable) -> Callable:
    """Wrap a function as torch 2.11 to 2.15 wrap hooks, under different names."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


class FSDPState:
    """Has hooks as methods, like that of torch."""

    def plain(self) -> None: ...

    @wrap
    def wrapped(self) -> None: ...

    @wrap
    @wrap
    def wrapped_twice(self) -> None: ...


@pytest.mark.parametrize("name", ["plain", "wrapped", "wrapped_twice"])
@pytest.mark.parametrize("of_group", [
    lambda hook: hook, wrap, lambda hook: wrap(wrap(hook)), torch._dynamo.disable,
], ids=["one module", "several", "several, wrapped", "disabled"])
def test_hooks_of_fsdp_are_recognized_in_every_form(name, of_group):
    state = FSDPState()
    assert _fsdp_state(of_group(getattr(state, name))) is state


def test_other_hooks_are_not_of_fsdp():
    assert [_fsdp_state(hook) for hook in (wrap(len), Rolled().forward, wrap(Rolled().forward))] == [None] * 3


def of_units(rank: int) -> str:
    """Recognize the hooks of units of one and of two modules; return the error for a unit without such hooks."""
    mesh = init_device_mesh("cpu", (2,))
    stage = TwoLayers()
    fully_shard([stage.layers[0].a, stage.layers[0].b], mesh=mesh)
    fully_shard(stage, mesh=mesh)
    for unit in (module for module in stage.modules() if isinstance(module, FSDPModule)):
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
            assert [_fsdp_state(hook) for hook in hooks.values()] == [unit._get_fsdp_state()]
    stage._forward_hooks[next(iter(stage._forward_hooks))] = lambda module, args, output: None
    with pytest.raises(RuntimeError) as raised:
        with_forward_hooks(stage, stage.segments(), ("x",), ("x",))
    return str(raised.value)


def test_a_unit_without_hooks_of_fsdp_is_refused():
    for error in run_ranks(of_units, 2):
        assert "a FSDPTwoLayers has no forward hook of an FSDPState by torch 2." in error
