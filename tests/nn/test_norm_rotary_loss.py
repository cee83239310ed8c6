"""The small pieces that models share, against plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from dualpipe.kernels import combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.rotary import apply_rotary
from dualpipe.nn import RMSNorm, cross_entropy_loss
from dualpipe.nn.attention import Rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm(dtype):
    norm = RMSNorm(16, eps=1e-3, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 16, dtype=dtype)
    expected = F.rms_norm(x.double(), (16,), norm.weight.double(), 1e-3)
    actual = norm(x)
    assert actual.dtype is dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_of_nothing_and_of_zeros():
    norm = RMSNorm(16)
    assert norm(torch.empty(0, 16)).shape == (0, 16)
    x = torch.zeros(2, 16, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()


def test_rotary_is_a_rotation_by_relative_position():
    x = torch.randn(1, 2, 40, 8, dtype=torch.float64)
    cos, sin = Rotary(8, 1e4).tables(torch.arange(40), torch.float64)
    assert cos.dtype is torch.float64
    pairs = torch.complex(*x.chunk(2, dim=-1))
    angles = torch.arange(40.0, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(apply_rotary(x, cos, sin), torch.cat((expected.real, expected.imag), -1))


def test_cross_entropy_ignores_and_promotes():
    logits, labels = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    labels[0, :3] = -100
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    actual = cross_entropy_loss(logits, labels)
    assert actual.dtype is torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert cross_entropy_loss(logits.double(), labels).dtype is torch.float64


def test_cross_entropy_without_any_label_is_zero():
    logits = torch.randn(3, 7, requires_grad=True)
    loss = cross_entropy_loss(logits, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


def test_cross_entropy_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"labels must have the shape \(3,\)"):
        cross_entropy_loss(torch.randn(3, 7), torch.zeros(4, dtype=torch.long))


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
