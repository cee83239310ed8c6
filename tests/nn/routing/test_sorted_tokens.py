"""Tokens sorted by expert, dispatched and combined, against a loop."""

import pytest
import torch

from dualpipe.kernels import combine_tokens, dispatch_tokens, sort_tokens


def test_sorting_worked_example():
    tokens = sort_tokens(torch.tensor([[2, 0], [0, 1]]), 3)
    assert tokens.order.tolist() == [1, 2, 3, 0]
    assert tokens.inverse.tolist() == [3, 0, 1, 2]
    assert tokens.offs.tolist() == [2, 3, 4]
    assert tokens.offs.dtype is torch.int32


@pytest.mark.parametrize(("count", "top_k", "experts"), [(7, 2, 5), (7, 1, 5), (4, 3, 3), (1, 2, 9), (0, 2, 3)])
def test_dispatch_and_combine_equal_a_loop(count, top_k, experts):
    x = torch.randn(count, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(count, top_k, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(count, experts).topk(top_k).indices
    scale = torch.arange(1.0, experts + 1, dtype=torch.float64)  # expert e multiplies by e + 1
    tokens = sort_tokens(chosen, experts)
    rows = dispatch_tokens(x, tokens, top_k)
    assert torch.equal(rows, x[tokens.order // top_k])
    of = torch.repeat_interleave(torch.arange(experts), tokens.offs.diff(prepend=tokens.offs.new_zeros(1)))
    actual = combine_tokens(rows * scale[of, None], weights, tokens)
    expected = x * (weights * scale[chosen]).sum(1, keepdim=True)
    torch.testing.assert_close(actual, expected)
    dy = torch.randn_like(x)
    for a, b in zip(torch.autograd.grad(actual, (x, weights), dy), torch.autograd.grad(expected, (x, weights), dy)):
        torch.testing.assert_close(a, b)
