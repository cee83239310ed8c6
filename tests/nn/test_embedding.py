"""Embedding with a deferred gradient against nn.Embedding."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dualpipe.nn import Embedding
from dualpipe.nn.deferral import WeightGradStore

TOKENS = torch.tensor([[1, 2, 2], [2, 8, 1]])


def pair(dtype=torch.float32):
    torch.manual_seed(0)
    plain, ours = nn.Embedding(9, 6, dtype=dtype), Embedding(9, 6, dtype=dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[0, 0], TOKENS[:0], TOKENS.int()], ids=["2d", "one", "none", "int32"])
def test_has_the_bits_of_nn_embedding(tokens, dtype, deferred):
    plain, ours = pair(dtype)
    store = WeightGradStore()
    for _ in range(3):
        dy = torch.randn(*tokens.shape, 6, dtype=dtype)
        plain(tokens).backward(dy)
        assert torch.equal(plain(tokens), ours(tokens))
        if deferred:
            with store.activate(), store.defer("I"):
                ours(tokens).backward(dy)
            assert store.pending() == {"I": 1}
            store.run("I")
        else:
            ours(tokens).backward(dy)
    assert ours.weight.grad.dtype is dtype
    assert torch.equal(ours.weight.grad, plain.weight.grad)


def test_products_for_a_wider_accumulator_are_not_rounded():
    _, ours = pair(torch.bfloat16)
    ours.weight.grad_dtype = torch.float32
    expected, store = torch.zeros(9, 6, dtype=torch.float64), WeightGradStore()
    for _ in range(2):
        dy = torch.randn(*TOKENS.shape, 6).bfloat16()
        with store.activate(), store.defer("I"):
            ours(TOKENS).backward(dy)
        store.run("I")
        expected.index_put_((TOKENS,), dy.double(), accumulate=True)
    assert ours.weight.grad.dtype is torch.float32
    torch.testing.assert_close(ours.weight.grad.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_second_derivative_a_compiler_torch_func_and_a_computed_table():
    plain, ours = pair()
    twice = [torch.autograd.grad(module(TOKENS).pow(3).sum(), module.weight, create_graph=True)[0]
             for module in (plain, ours)]
    assert torch.equal(*(torch.autograd.grad(first.square().sum(), module.weight)[0]
                         for first, module in zip(twice, (plain, ours))))
    compiled = torch.compile(copy.deepcopy(ours), backend="aot_eager", fullgraph=True)
    compiled(TOKENS).sum().backward()
    plain(TOKENS).sum().backward()
    assert torch.equal(compiled.weight.grad, plain.weight.grad)
    assert torch.equal(torch.func.vmap(ours)(TOKENS), plain(TOKENS))
    normed = parametrizations.weight_norm(ours)
    normed(TOKENS).sum().backward()
    assert normed.parametrizations.weight.original1.grad is not None
