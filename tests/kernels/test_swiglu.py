"""Gated activations against the formula and its autograd in float64, with poisoned results."""

import importlib

import pytest
import torch

from dualpipe.kernels.swiglu import clamped_swiglu, swiglu
from row_kernels import assert_close, far_apart, no_synchronisation, poisoned_memory  # noqa: F401

MODULE = importlib.import_module("dualpipe.kernels.swiglu")  # the package's attribute is the function

# Half precision rounds the result once; float32 sums at most 3000 products of the weight's gradient.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [(5, 7), (3, 1), (9, 300), (67, 32), (0, 4), (2, 0)]  # M, I: both shape classes, odd and empty
pytestmark = pytest.mark.usefixtures("poisoned_memory")
FORMS = {"plain": swiglu, "clamped": clamped_swiglu}


def clamp(x, low, high):
    """Clamp with a gradient at the limits, like torch.clamp before 2.15; bf16 values often equal a limit."""
    x = torch.where(x > high, high, x)
    return x if low is None else torch.where(x < low, low, x)


def formula(form, gate_up, weight, alpha=1.702, limit=7.0):
    if form is swiglu:
        gate, up = gate_up.chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up
    else:
        gate, up = clamp(gate_up[:, ::2], None, limit), clamp(gate_up[:, 1::2], -limit, limit)
        h = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return h if weight is None else h * weight[:, None]


def make(rows, width, dtype, device, seed=0):
    """Return gate_up (with values past the limit of 7), weight, dh."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 2 * width), (rows,), (rows, width))
    gate_up, weight, dh = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return (4 * gate_up).to(device, dtype), weight.to(device, dtype), dh.to(device, dtype)


def check(form, gate_up, weight, dh, **options):
    operands = [t.detach().requires_grad_() for t in (gate_up, weight) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in operands]
    h, expected = form(*operands, **options), formula(form, *wide, *([None] if weight is None else []), **options)
    assert_close(h, expected, gate_up.dtype, TOLERANCE[gate_up.dtype])
    got, wanted = torch.autograd.grad(h, operands, dh), torch.autograd.grad(expected, wide, dh.double())
    terms = dh.double() * formula(form, wide[0], None, **options)  # of the weight's gradient, of both signs
    for a, b, operand, size in zip(got, wanted, operands, (None, terms.abs().sum(1).norm())):
        assert_close(a, b, operand.dtype, TOLERANCE[operand.dtype], size)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients(form, shape, dtype, weighted, device):
    gate_up, weight, dh = make(*shape, dtype, device)
    check(form, gate_up, weight if weighted else None, dh)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 63, 64, 65, 255, 256, 257, 768, 1408, 2880])
@pytest.mark.parametrize("rows", [1, 4, 127, 128])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_matrix(form, rows, width, dtype, device):
    check(form, *make(rows, width, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_float32_weight_of_half_precision_rows(form, dtype, device):
    gate_up, weight, dh = make(5, 40, dtype, device)
    check(form, gate_up, weight.float(), dh)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_strides(form, device):
    gate_up, weight, dh = make(6, 10, torch.float32, device)
    spaced = torch.full((6, 50), float("nan"), device=device)
    spaced[:, 3:23] = gate_up
    turned = gate_up.t().contiguous().t()
    every_second = weight.repeat_interleave(2)[::2]
    for x, w, d in ((spaced[:, 3:23], weight, dh), (turned, every_second, dh.t().contiguous().t()),
                    (gate_up.flip(0).flip(0), weight, dh[:1].expand(6, -1)),
                    (gate_up, weight, dh[:, :1].expand(-1, 10))):
        check(form, x, w, d)


@pytest.mark.parametrize("form", [(False, 1.0, 0.0), (True, 1.702, 7.0)], ids=FORMS)
def test_rows_beyond_two_to_the_31_elements(form):
    gate_up, weight, dh = make(3, 8, torch.float16, "cpu")
    assert torch.equal(MODULE._swiglu(far_apart(gate_up), weight, *form), MODULE._swiglu(gate_up, weight, *form))
    far = MODULE._swiglu_backward(far_apart(dh), far_apart(gate_up), weight, *form)
    near = MODULE._swiglu_backward(dh, gate_up, weight, *form)
    assert all(torch.equal(a, b) for a, b in zip(far, near))


def test_worked_example(device):
    gate_up = torch.tensor([[10.0, 3.0]], device=device, requires_grad=True)
    h = clamped_swiglu(gate_up, alpha=0.0)
    h.backward()
    assert h.tolist() == [[14.0]]
    assert gate_up.grad.tolist() == [[0.0, 3.5]]


def test_there_is_a_gradient_at_the_limits(device):
    limit = 2.0
    edges = torch.tensor([-3.0, -limit, 0.0, limit, 3.0], device=device)
    pairs = torch.cartesian_prod(edges, edges).requires_grad_()
    h = clamped_swiglu(pairs, limit=limit)
    wide = pairs.detach().double().requires_grad_()
    formula(clamped_swiglu, wide, None, limit=limit).sum().backward()
    h.sum().backward()
    torch.testing.assert_close(pairs.grad.double(), wide.grad)
    assert ((pairs.grad == 0) == (wide.grad == 0)).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_extreme_values_stay_what_they_are(form, device):
    """No overflow for large values, and clamping preserves NaN."""
    gate_up = torch.tensor([[-1e4, 2.0], [1e4, 2.0], [float("nan"), 2.0], [2.0, float("nan")]], device=device)
    gate_up.requires_grad_()
    h = form(gate_up)
    h.sum().backward()
    expected = formula(form, gate_up.detach().double(), None)
    torch.testing.assert_close(h.double(), expected, equal_nan=True)
    assert gate_up.grad[:2].isfinite().all()
    assert h[2:].isnan().all() and gate_up.grad[2:].isnan().any(1).all()


BAD = {
    r"float32 of shape \(4,\), expected floating-point \(M, 2I\)": {"gate_up": torch.zeros(4)},
    r"gate_up is .* of shape \(3, 5\)": {"gate_up": torch.zeros(3, 5)},
    "gate_up is torch.int64": {"gate_up": torch.zeros(3, 4, dtype=torch.long)},
    r"of shape \(3, 1\), expected floating-point of shape \(3,\)": {"weight": torch.zeros(3, 1)},
    "weight is torch.int64": {"weight": torch.zeros(3, dtype=torch.long)},
    "weight is on meta": {"weight": torch.zeros(3, device="meta")},
    "limit is -1.0, expected a positive number": {"limit": -1.0},
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    with pytest.raises(ValueError, match=message):
        clamped_swiglu(**({"gate_up": torch.zeros(3, 4)} | BAD[message]))
