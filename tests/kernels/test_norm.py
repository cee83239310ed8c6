"""RMSNorm with residual against the formula and its autograd in float64, with poisoned results."""

import pytest
import torch

from dualpipe.kernels import norm as module
from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.norm import rms_norm, rms_norm_backward
from row_kernels import assert_close, far_apart, no_synchronisation, poisoned_memory  # noqa: F401

# Half precision rounds h, n and y; the gradients are rounded once. float32 sums at most 3000 products.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
# T, H: several rows in a program and one, one part of the weight's gradient and several, odd, empty, the widest
SHAPES = [(5, 7), (3, 1), (37, 300), (2, 2048), (300, 16), (0, 4), (2, 9000)]
EPS = 1e-3
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make(rows, width, dtype, device, seed=0):
    """Return x, residual, weight, dy, d_sum."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (rows, width), (width,), (rows, width), (rows, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def formula(x, residual, weight):
    h = x if residual is None else x + residual
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight, h


def check(x, residual, weight, dy, d_sum, tolerance):
    y, total, scale = rms_norm(x, weight, EPS, residual)
    dx, parts = rms_norm_backward(dy, d_sum, total, scale, weight)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, residual, weight)]
    expected, h = formula(*wide)
    loss = (expected * dy.double()).sum() + (0 if d_sum is None else (h * d_sum.double()).sum())
    d_h, d_weight = torch.autograd.grad(loss, [wide[0], wide[2]])
    terms = (dy.double() * wide[2] * scale.double().view(*dy.shape[:-1], 1)).norm()  # which may cancel
    for got, wanted, size in ((y, expected, None), (total, h, None), (dx, d_h, d_h.norm() + terms)):
        assert_close(got, wanted, got.dtype, tolerance, size)
    terms = (dy.double() * formula(wide[0], wide[1], 1.0)[0]).abs().sum(0).norm()
    assert_close(parts.sum(0), d_weight, scale.dtype, tolerance, terms)
    return y, total, dx, parts


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, added, device):
    x, residual, weight, dy, d_sum = make(*shape, dtype, device)
    found = check(x, residual if added else None, weight, dy, d_sum if added else None, TOLERANCE[dtype])
    assert all(t.dtype is dtype for t in found[:3])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 64, 127, 128, 129, 768, 1536, 2880, 4096, 7168, 8192])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 128])
def test_values_and_gradients_matrix(rows, width, dtype, device):
    check(*make(rows, width, dtype, device), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_weight_of_half_precision_rows(dtype, device):
    """With norms in float32 by a dtype plan, the result is float32, and x is rounded like without."""
    x, residual, weight, dy, d_sum = make(5, 40, dtype, device)
    y, total, dx, _ = check(x, residual, weight.float(), dy.float(), d_sum, TOLERANCE[dtype])
    assert y.dtype is torch.float32 and total.dtype is dx.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_residual_of_float32_rows(dtype, device):
    """Dtypes like under autocast."""
    x, residual, weight, dy, d_sum = make(5, 40, torch.float32, device)
    y, total, dx, _ = check(x, residual.to(dtype), weight, dy, d_sum, TOLERANCE[torch.float32])
    assert y.dtype is total.dtype is dx.dtype is torch.float32


@pytest.mark.skipif(INTERPRET, reason="of the reference")
def test_results_are_those_of_the_operations_one_by_one():
    x, residual, weight, *_ = make(37, 96, torch.bfloat16, "cpu")
    h = x + residual
    n = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + EPS)
    y, total, _ = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, h) and torch.equal(y, weight * n.bfloat16())


def test_strides_and_leading_dimensions(device):
    x, residual, weight, dy, d_sum = make(6, 10, torch.float32, device)
    spaced = torch.full((6, 50), float("nan"), device=device)
    spaced[:, 3:13] = x
    turned = residual.t().contiguous().t()
    tolerance = TOLERANCE[torch.float32]
    check(spaced[:, 3:13], turned, weight.repeat_interleave(2)[::2], dy, d_sum, tolerance)
    check(x, residual, weight, dy.t().contiguous().t(), d_sum.flip(0).flip(0), tolerance)
    check(x, residual, weight, dy[:1].expand(6, -1), d_sum[:, :1].expand(-1, 10), tolerance)
    threes = [t if t.dim() == 1 else t.view(2, 3, 10).transpose(0, 1) for t in (x, residual, weight, dy, d_sum)]
    y, *_ = check(*threes, tolerance)
    assert y.shape == (3, 2, 10)


def test_rows_beyond_two_to_the_31_elements():
    x, residual, weight, dy, d_sum = make(3, 8, torch.float16, "cpu")
    near, far = rms_norm(x, weight, EPS, residual), rms_norm(far_apart(x), weight, EPS, far_apart(residual))
    assert all(torch.equal(a, b) for a, b in zip(near, far))
    _, total, scale = near
    near = rms_norm_backward(dy, d_sum, total, scale, weight)
    far = rms_norm_backward(far_apart(dy), far_apart(d_sum), far_apart(total), scale, weight)
    assert all(torch.equal(a, b) for a, b in zip(near, far))


def test_worked_example(device):
    x, residual, weight, dy = (torch.tensor(t, device=device, dtype=torch.float32)
                               for t in ([[1, 3]], [[2, 1]], [2, 1], [[1, 0]]))
    y, total, scale = rms_norm(x, weight, 0.0, residual)
    dx, parts = rms_norm_backward(dy, None, total, scale, weight)
    for got, wanted in ((total, [[3, 4]]), (y, [[1.697, 1.131]]), (dx, [[0.362, -0.272]]), (parts, [[0.849, 0]])):
        torch.testing.assert_close(got.cpu(), torch.tensor(wanted, dtype=torch.float32), atol=5e-4, rtol=0)
    assert (dx * total).sum().abs() < 1e-6


@pytest.mark.parametrize("added", [False, True])
def test_rows_of_zeros_and_of_nan(added, device):
    x, residual, weight, dy, d_sum = make(4, 40, torch.float32, device)
    x[0], residual[0], x[1, 3] = 0, 0, float("nan")
    y, total, scale = rms_norm(x, weight, EPS, residual if added else None)
    dx, _ = rms_norm_backward(dy, d_sum, total, scale, weight)
    assert (y[0] == 0).all() and dx[0].isfinite().all() and y[1].isnan().all() and dx[1].isnan().all()
    assert y[2:].isfinite().all() and dx[2:].isfinite().all()


def test_parts_are_of_so_many_rows(device):
    operands = make(35, 130, torch.float16, device)
    *_, parts = check(*operands, TOLERANCE[torch.float16])
    assert len(parts) == (3 if module.use_triton(operands[0]) else 1), "16 rows each"


BAD = {
    r"x is torch.float32 of shape \(3, 4\) and weight has shape \(5,\)": {"weight": torch.zeros(5)},
    "x is torch.int64": {"x": torch.zeros(3, 4, dtype=torch.long)},
    r"residual has shape \(4,\), expected that of x, \(3, 4\)": {"residual": torch.zeros(4)},
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**({"x": torch.zeros(3, 4), "weight": torch.zeros(4), "eps": EPS} | BAD[message]))
