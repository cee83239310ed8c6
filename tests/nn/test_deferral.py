"""Deferred weight gradients: when they are made, what they are added to, and what stays alive."""

import torch

from dualpipe.nn import Linear
from dualpipe.nn.deferral import WeightGradStore
from linears import assert_same_grads, backward, pair


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


def test_autograd_grad_for_the_input_alone_still_defers_the_weight():
    plain, ours = pair()
    store, x = WeightGradStore(), torch.randn(5, 6, requires_grad=True)
    with store.activate(), store.defer("I"):
        (dx,) = torch.autograd.grad(ours(x).sum(), [x])
    store.run("I")
    plain(x).sum().backward()
    assert torch.equal(dx, x.grad)
    assert_same_grads(ours, plain)


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


def test_hooks_of_parameters_see_gradients_that_would_be_deferred():
    plain, ours = pair()
    x, dy, seen = torch.randn(5, 6), torch.randn(5, 4), {"plain": [], "ours": []}
    for name, layer in (("plain", plain), ("ours", ours)):
        layer.weight.register_hook(lambda grad: 2 * grad)
        layer.bias.register_post_accumulate_grad_hook(lambda p, seen=seen[name]: seen.append(p.grad.clone()))
    store = WeightGradStore()
    backward(plain, x, dy)
    backward(ours, x, dy, store)
    assert store.pending() == {"I": 0}
    assert len(seen["ours"]) == 1 and torch.equal(seen["ours"][0], seen["plain"][0])
    assert_same_grads(ours, plain)
