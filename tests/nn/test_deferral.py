"""Deferred weight gradients: when they are made, what they are added to, and what stays alive."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dualpipe.kernels import swiglu
from dualpipe.nn import Embedding, GroupedLinear, GroupedSwiGLU, Linear, RMSNorm, defer_weight_grads
from dualpipe.nn.accumulators import add_grad
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.grouped_linear import grouped_linear
from linears import Conv1D, assert_same_grads, backward, pair


def test_deferred_gradients_wait_for_run():
    _, ours = pair()
    store, x = WeightGradStore(), torch.randn(5, 6, requires_grad=True)
    backward(ours, x, torch.ones(5, 4), store)
    assert x.grad is not None
    assert ours.weight.grad is None and ours.bias.grad is None
    store.run("I")
    assert ours.weight.grad is not None and ours.bias.grad is not None


def test_accumulates_in_place_and_aliases_nothing():
    _, ours = pair()
    store, dy = WeightGradStore(), torch.ones(4)
    backward(ours, torch.randn(6), dy, store)
    store.run("I")
    accumulator = ours.weight.grad
    backward(ours, torch.randn(6), dy, store)
    store.run("I")
    assert ours.weight.grad is accumulator
    assert torch.equal(dy, torch.ones(4))
    assert (ours.bias.grad == 2).all()


def test_a_gradient_of_the_input_inside_of_a_forward_leaves_accumulators_alone():
    """A layer that differentiates in its forward, such as a force: only a backward of the pipeline accumulates."""
    _, ours = pair(torch.bfloat16)
    ours.weight.grad_dtype = torch.float32
    x, store = torch.randn(5, 6, requires_grad=True).bfloat16(), WeightGradStore()
    with store.activate():
        torch.autograd.grad(ours(x).sum(), [x])
    assert ours.weight.grad is None


def test_deferred_gradients_keep_no_graph_alive():
    from weakref import ref

    first, second = Linear(6, 6), Linear(6, 4)
    x = torch.randn(5, 6, requires_grad=True)
    hidden = first(x)
    y, store = second(hidden), WeightGradStore()
    with store.activate(), store.defer("I"):
        y.sum().backward()
    graph = ref(hidden.grad_fn)
    del hidden, y
    assert graph() is None
    assert store.pending() == {"I": 2}


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_of_autograd_nodes_of_parameters_see_gradients_that_would_be_deferred(register):
    plain, ours = pair()
    x, dy, seen = torch.randn(5, 6), torch.randn(5, 4), {"plain": [], "ours": []}
    nodes = [layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0] for layer in (plain, ours)]
    store = WeightGradStore()
    backward(ours, x, dy, store)
    assert store.pending() == {"I": 1}, "no hooks yet"
    store.run("I")
    backward(plain, x, dy)
    for name, layer, node in zip(("plain", "ours"), (plain, ours), nodes):
        handle = getattr(node, register)(
            lambda *_, layer=layer, seen=seen[name]: seen.append(layer.weight.grad.clone()))
    backward(plain, x, dy)
    backward(ours, x, dy, store)
    assert len(seen["ours"]) == 1 and torch.equal(seen["ours"][0], seen["plain"][0])
    handle.remove()
    backward(plain, x, dy)
    backward(ours, x, dy, store)
    assert store.pending() == {"I": 1}, "no hooks any more"
    store.run("I")
    assert_same_grads(ours, plain)


ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


class Grouped(nn.Module):
    """Layer of three experts, one of them without rows; `kind` names the implementation."""

    def __init__(self, kind, plain=False):
        super().__init__()
        if kind == "transposed":
            self.weight, self.bias = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(3, 4))
        else:
            layer = (GroupedLinear if kind == "linear" else GroupedSwiGLU)(3, 6, 4, bias=True)
            self.weight, self.bias = layer.weight, layer.bias
            self.layer = [layer]  # not a submodule: its parameters are these
        self.kind, self.plain = kind, plain

    def forward(self, x):
        if self.plain:
            weight = self.weight if self.kind == "transposed" else self.weight.transpose(1, 2)
            y = torch.cat([rows @ weight[e] + self.bias[e] for e, rows in enumerate(x.split((2, 0, 3)))])
            return swiglu(y) if self.kind == "swiglu" else y
        if self.kind == "transposed":
            return grouped_linear(x, self.weight, self.bias, ENDS, is_transposed=True)
        layer = self.layer[0]
        layer.weight, layer.bias = self.weight, self.bias
        return layer(x, ENDS)


def grouped(kind):
    ours = Grouped(kind)
    plain = Grouped(kind, plain=True)
    plain.load_state_dict(ours.state_dict())
    return plain, ours


class PutLinear(nn.Linear):
    """Linear layer written for DeepSeek's store, by `WeightGradStore.put`."""

    def forward(self, x):
        return _Put.apply(x, self.weight) + self.bias


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        WeightGradStore.current().put(lambda: add_grad(ctx.weight, (dy.T @ x).detach()))
        return dy @ ctx.weight, None


def with_state(plain, ours):
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def converted(plain):
    return plain, defer_weight_grads(copy.deepcopy(plain))


PAIRS = {
    "Linear": lambda: with_state(nn.Linear(6, 4), Linear(6, 4)),
    "Conv1D": lambda: converted(Conv1D(4, 6)),
    "Embedding": lambda: with_state(nn.Embedding(9, 4), Embedding(9, 4)),
    "RMSNorm": lambda: with_state(nn.RMSNorm(6, eps=1e-6), RMSNorm(6)),
    "GroupedLinear": lambda: grouped("linear"),
    "GroupedSwiGLU": lambda: grouped("swiglu"),
    "grouped_linear": lambda: grouped("transposed"),
    "put": lambda: with_state(nn.Linear(6, 4), PutLinear(6, 4)),
}


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "put"])
def test_hooks_of_parameters_see_gradients_that_would_be_deferred(name):
    torch.manual_seed(0)
    plain, ours = (layer.double() for layer in PAIRS[name]())
    x = torch.tensor([1, 2, 2, 8, 0]) if name == "Embedding" else torch.randn(5, 6).double()
    store, seen = WeightGradStore(), {plain: {}, ours: {}}
    for layer, grads in seen.items():
        for name, param in layer.named_parameters():
            param.register_hook(lambda grad: 2 * grad)
            param.register_post_accumulate_grad_hook(
                lambda param, name=name, grads=grads: grads.setdefault(name, []).append(param.grad.clone()))
    plain(x).pow(2).sum().backward()
    with store.activate(), store.defer("I"):
        ours(x).pow(2).sum().backward()
    assert store.pending() == {"I": 0}
    torch.testing.assert_close(seen[ours], seen[plain], rtol=1e-10, atol=1e-10)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


def inner_backward(kind, e, z, params):
    """Run a backward of `e`, which depends on `z` and `params`, and return the gradients that it returns."""
    if kind == "an input":
        return torch.autograd.grad(e, z, retain_graph=True)
    if kind == "an input, create_graph":
        return torch.autograd.grad(e, z, create_graph=True)
    if kind == "an input and the weights":
        return torch.autograd.grad(e, (z, *params))
    if kind == "backward of an input":
        e.backward(inputs=[z], retain_graph=True)
    elif kind == "backward":
        e.backward()
    return ()


INNER = ["an input", "an input, create_graph", "an input and the weights", "backward of an input", "backward"]


def run_with_inner_backward(layer, kind, where, mode):
    """Run a backward that runs another one of the same layer inside; return the gradients that that one returns."""
    torch.manual_seed(1)
    dtype = torch.float64 if next(layer.parameters()).dtype is torch.float64 else torch.float32
    x = torch.randn(5, 6, dtype=torch.float64)
    x = torch.tensor([1, 2, 2, 8, 0]) if any(isinstance(m, nn.Embedding) for m in layer.modules()) else x
    params = list(layer.parameters())
    if x.is_floating_point():
        x = x.to(params[0].dtype).requires_grad_()
    returned = []

    def energy(z):
        if x.is_floating_point():  # the layer's backward runs on the way to z
            return layer(x + z.to(x.dtype)).to(dtype).pow(3).sum()
        return (layer(x).to(dtype) * z).pow(3).sum()

    def hook(gradient):
        z = torch.full((), 0.5, dtype=dtype, requires_grad=True)
        with torch.enable_grad():
            returned.extend(inner_backward(kind, energy(z), z, params))
            if kind.startswith("backward"):
                returned.append(z.grad)

    def forward(x):
        y = layer(x).to(dtype)
        if where == "hook":
            y.register_hook(hook)
        elif torch.is_grad_enabled():  # in the forward; a checkpoint runs it again in the backward
            z = torch.full((), 0.5, dtype=dtype, requires_grad=True)
            y = y * torch.autograd.grad(energy(z), z)[0].detach()
        return y

    store = WeightGradStore()
    if where == "hook":
        y = forward(x)
    else:
        y = checkpoint(forward, x, use_reentrant=where == "reentrant checkpoint")
    loss = y.pow(3).sum()
    with store.activate():
        if mode == "I":
            with store.defer("I"):
                loss.backward()
        elif mode == "B":
            with store.accumulate():
                loss.backward()
        else:
            loss.backward()
    store.run("I")
    return [g.detach() for g in returned] + ([x.grad] if x.is_floating_point() else [])


@pytest.mark.parametrize("mode", ["I", "B", "no store"])
@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("name", PAIRS)
def test_a_backward_inside_of_a_backward_accumulates_what_it_asks_for_alone(name, kind, mode):
    torch.manual_seed(0)
    plain, ours = (layer.double() for layer in PAIRS[name]())
    if name == "put" and kind == "an input and the weights":
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            run_with_inner_backward(ours, kind, "hook", mode)
        return
    expected = run_with_inner_backward(plain, kind, "hook", mode)
    actual = run_with_inner_backward(ours, kind, "hook", mode)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["I", "B"])
@pytest.mark.parametrize("where", ["checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "Embedding"])
def test_a_recomputed_forward_that_differentiates_leaves_accumulators_alone(name, where, mode):
    torch.manual_seed(0)
    plain, ours = (layer.double() for layer in PAIRS[name]())
    expected = run_with_inner_backward(plain, "", where, mode)
    actual = run_with_inner_backward(ours, "", where, mode)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["I", "B"])
@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "put"])
def test_a_backward_inside_of_a_backward_with_wider_accumulators(name, kind, mode):
    torch.manual_seed(0)
    plain, ours = PAIRS[name]()
    for param in ours.bfloat16().parameters():
        param.grad_dtype = torch.float32
    plain.load_state_dict(ours.state_dict())
    expected = run_with_inner_backward(plain, kind, "hook", mode)
    actual = run_with_inner_backward(ours, kind, "hook", mode)
    assert all(param.grad.dtype is torch.float32 for param in ours.parameters())
    actual += [param.grad for param in ours.parameters()]
    expected += [param.grad for param in plain.parameters()]
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


def test_frozen_parameters_in_a_backward_inside_of_a_backward():
    for frozen in ("weight", "bias"):
        plain, ours = pair(torch.float64)
        for layer in (plain, ours):
            getattr(layer, frozen).requires_grad_(False)
        for kind in ("an input", "backward"):
            run_with_inner_backward(plain, kind, "hook", "I")
            run_with_inner_backward(ours, kind, "hook", "I")
        assert_same_grads(ours, plain)
