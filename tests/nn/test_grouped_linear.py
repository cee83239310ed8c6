"""GroupedLinear against one nn.Linear for each expert."""

import pytest
import torch
from torch import nn

from dualpipe.nn import GroupedLinear
from dualpipe.pipeline.weight_grad_store import WeightGradStore

COUNTS = {"balanced": [3, 3, 3], "first empty": [0, 5, 2], "last empty": [4, 1, 0], "all empty": [0, 0, 0]}


def pair(dtype, bias):
    torch.manual_seed(0)
    ours = GroupedLinear(3, 8, 16, bias=bias, dtype=dtype)
    experts = nn.ModuleList(nn.Linear(8, 16, bias=bias, dtype=dtype) for _ in range(3))
    with torch.no_grad():
        for e, expert in enumerate(experts):
            expert.weight.copy_(ours.weight[e])
            if bias:
                expert.bias.copy_(ours.bias[e])
    return ours, experts


def apply(experts, x, counts):
    return torch.cat([expert(rows) for expert, rows in zip(experts, x.split(counts))])


def ends(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def run(module, x, offs, dy, deferred):
    if not deferred:
        y = module(x, offs)
        y.backward(dy)
        return y
    store = WeightGradStore()
    with store.activate(), store.defer("I"):
        y = module(x, offs)
        y.backward(dy)
    assert store.pending() == {"I": 1}
    store.run("I")
    return y


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_equals_one_linear_per_expert(counts, dtype, bias, deferred):
    ours, experts = pair(dtype, bias)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for _ in range(2):
        x = torch.randn(sum(counts), 8, dtype=dtype, requires_grad=True)
        x_ours = x.detach().clone().requires_grad_()
        dy = torch.randn(sum(counts), 16, dtype=dtype)
        expected = apply(experts, x, counts)
        expected.backward(dy)
        actual = run(ours, x_ours, ends(counts), dy, deferred)
        torch.testing.assert_close(actual, expected, **tolerance)
        torch.testing.assert_close(x_ours.grad, x.grad, **tolerance)
    torch.testing.assert_close(ours.weight.grad, torch.stack([e.weight.grad for e in experts]), **tolerance)
    if bias:
        torch.testing.assert_close(ours.bias.grad, torch.stack([e.bias.grad for e in experts]), **tolerance)
    empty = [e for e, count in enumerate(counts) if count == 0]
    assert (ours.weight.grad[empty] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_deferred_gradients_have_the_bits_of_plain_ones(dtype, grad_dtype):
    modules = [pair(dtype, bias=True)[0] for _ in range(2)]
    for module in modules:
        if grad_dtype:
            module.weight.grad_dtype = module.bias.grad_dtype = grad_dtype
    for counts in ([2, 0, 5], [1, 1, 1]):
        x, dy = torch.randn(sum(counts), 8, dtype=dtype), torch.randn(sum(counts), 16, dtype=dtype)
        for deferred, module in enumerate(modules):
            run(module, x, ends(counts), dy, bool(deferred))
    plain, deferred = modules
    for a, b in zip(plain.parameters(), deferred.parameters()):
        assert a.grad.dtype is b.grad.dtype is (grad_dtype or dtype)
        assert torch.equal(a.grad, b.grad)


def test_frozen_weight_and_autograd_grad():
    ours, _ = pair(torch.float64, bias=True)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    offs, store = ends([1, 3, 0]), WeightGradStore()
    expected = torch.autograd.grad(ours(x, offs).square().sum(), [x, ours.weight, ours.bias])

    def call(x, weight, bias):
        return torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x, offs))

    assert torch.autograd.gradcheck(call, (x, ours.weight, ours.bias))
    ours.weight.requires_grad_(False)
    with store.activate(), store.defer("I"):
        ours(x, offs).square().sum().backward()
    store.run("I")
    assert torch.equal(x.grad, expected[0])
    assert ours.weight.grad is None
    assert torch.equal(ours.bias.grad, expected[2])


def test_bias_gradient_of_many_rows_is_summed_in_float32():
    ours, _ = pair(torch.bfloat16, bias=True)
    run(ours, torch.randn(2000, 8).bfloat16(), ends([2000, 0, 0]), torch.ones(2000, 16).bfloat16(), deferred=True)
    assert (ours.bias.grad[0] == 2000).all()  # in bfloat16 1 is lost next to 256


def test_autocast():
    ours, _ = pair(torch.float32, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(x, ends([1, 3, 0]))
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype is ours.weight.grad.dtype is torch.float32


def test_second_derivative_is_refused():
    ours, _ = pair(torch.float32, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(ours(x, ends([1, 3, 0])).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_wrong_offsets_are_refused():
    ours, _ = pair(torch.float32, bias=False)
    with pytest.raises(ValueError, match="one end for each of 3 experts"):
        ours(torch.randn(4, 8), torch.tensor([2, 4], dtype=torch.int32))
