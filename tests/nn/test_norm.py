"""RMS norm against plain formulas; its weight's gradient, deferred and with hooks."""

import pytest
import torch
import torch.nn.functional as F

from dualpipe.nn import RMSNorm
from weight_grads import weight_gradients


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


def test_the_gradient_of_a_norm_is_deferred():
    norm, x = RMSNorm(16), torch.randn(5, 16)
    at_once, later = weight_gradients(lambda: norm(x).square().sum(), [norm.weight])
    assert torch.equal(at_once[0], later[0])


@pytest.mark.parametrize("residual", [False, True])
def test_what_was_normalised_has_its_gradient_added(residual):
    norm = RMSNorm(16, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, y, dy, d_sum = torch.randn(4, 5, 16, dtype=torch.float64)
    operands = [x.requires_grad_(), y.requires_grad_()][: 2 if residual else 1]
    out, total = norm(*operands, return_sum=True)
    h = x + y if residual else x
    assert torch.equal(total, h)
    expected = F.rms_norm(h, (16,), norm.weight, norm.eps)
    wanted = torch.autograd.grad((expected * dy).sum() + (h * d_sum).sum(), [*operands, norm.weight])
    found = torch.autograd.grad((out, total), [*operands, norm.weight], (dy, d_sum), retain_graph=True)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    *found, of_weight = torch.autograd.grad(total, [*operands, norm.weight], d_sum, allow_unused=True)
    assert of_weight is None and all(torch.equal(dx, d_sum) for dx in found)


def test_a_norm_whose_weight_comes_from_another_and_one_under_torch_func():
    norm, x = RMSNorm(16), torch.randn(5, 16)
    expected = norm(x)
    vmapped = torch.func.vmap(norm)(x)
    torch.testing.assert_close(vmapped, expected)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
    norm(x).sum().backward()
    torch.testing.assert_close(norm(x), expected)
    assert norm.parametrizations.weight.original.grad is not None


