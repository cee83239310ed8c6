"""Norms and rotation of heads against the formula and its autograd in float64, with poisoned results."""

import pytest
import torch

from dualpipe.kernels import rotary as module
from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.rotary import apply_rotary, rotate_heads, rotate_heads_backward
from row_kernels import assert_close, no_synchronisation, poisoned_memory  # noqa: F401

# Half precision rounds n, the weighted n, the tables and the result; the gradients once, of rounded tables.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# B, S, A, G, D: one part of a weight's gradient and several, odd, empty
SHAPES = [(2, 5, 4, 2, 16), (1, 7, 3, 1, 6), (1, 70, 4, 1, 16), (1, 2, 4, 2, 128), (1, 0, 2, 1, 8), (1, 3, 1, 1, 2)]
EPS = 1e-3
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make(shape, dtype, device, *, documents=False, seed=0):
    """Return [q, k, q_weight, k_weight, dq, dk], (cos, sin)."""
    generator = torch.Generator().manual_seed(seed)
    batch, length, heads, kv_heads, dim = shape
    shapes = [(batch, length, heads, dim), (batch, length, kv_heads, dim)]
    found = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (dim,), (dim,), *shapes)]
    angles = torch.rand((batch, 1, length, dim // 2) if documents else (length, dim // 2), generator=generator)
    angles = 7 * angles.repeat(*[1] * (angles.dim() - 1), 2).to(device, torch.promote_types(dtype, torch.float32))
    return [t.to(device, dtype) for t in found], (angles.cos(), angles.sin())


def formula(x, weight, cos, sin, interleaved):
    """Rotate heads as complex numbers (B, S, A, D / 2)."""
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) if interleaved else torch.complex(*x.chunk(2, -1))
    turn = torch.complex(cos, sin)[..., : x.shape[-1] // 2]
    turn = turn.unsqueeze(1) if turn.dim() == 2 else turn.transpose(1, 2)
    return torch.cat(((pairs * turn).real, (pairs * turn).imag), -1)


def check(operands, tables, *, norm, interleaved, tolerance):
    q, k, q_weight, k_weight, dq, dk = operands
    weights = (q_weight, k_weight) if norm else (None, None)
    turned = rotate_heads(q, k, *tables, *weights, EPS, interleaved)
    before = (q, k) if norm else (None, None)
    found = rotate_heads_backward(dq, dk, *before, *tables, *weights, turned.q_scale, turned.k_scale, interleaved)
    for x, weight, dy, y, dx, parts in zip((q, k), weights, (dq, dk), turned, found, found[2:]):
        wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight)]
        cos, sin = (table.to(y.dtype).double() for table in tables)
        expected = formula(*wide, cos, sin, interleaved)
        gradients = torch.autograd.grad(expected, [t for t in wide if t is not None], dy.double())
        terms = (dy.double() * (1 if weight is None else wide[1] / x.double().square().mean(-1, True).sqrt())).norm()
        assert_close(y, expected, y.dtype, tolerance)
        assert_close(dx, gradients[0], x.dtype, tolerance, gradients[0].norm() + terms)  # which may cancel
        if norm:
            size = gradients[1].norm() + dy.double().abs().sum((0, 1, 2)).norm()
            assert_close(parts.sum(0), gradients[1], parts.dtype, tolerance, size)
    return turned, found


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, interleaved, norm, device):
    operands, tables = make(shape, dtype, device, documents=norm)
    turned, found = check(operands, tables, norm=norm, interleaved=interleaved, tolerance=TOLERANCE[dtype])
    assert all(t.dtype is dtype and t.is_contiguous() for t in (*turned[:2], *found[:2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_weights_of_half_precision_heads(dtype, device):
    """With norms in float32 by a dtype plan, rotated queries and keys are float32."""
    (q, k, *weights, dq, dk), tables = make((2, 5, 4, 2, 16), dtype, device)
    operands = [q, k, *(weight.float() for weight in weights), dq.float(), dk.float()]
    turned, found = check(operands, tables, norm=True, interleaved=False, tolerance=TOLERANCE[dtype])
    assert turned.q.dtype is turned.k.dtype is torch.float32 and found.dq.dtype is found.dk.dtype is dtype


@pytest.mark.skipif(INTERPRET, reason="of the reference")
def test_results_are_those_of_the_operations_one_by_one():
    (q, k, weight, _, *_), tables = make((2, 5, 4, 2, 16), torch.bfloat16, "cpu")
    n = q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + EPS)
    expected = apply_rotary((weight * n.bfloat16()).transpose(1, 2), *(table.bfloat16() for table in tables))
    assert torch.equal(rotate_heads(q, k, *tables, weight, weight, EPS).q, expected.transpose(1, 2))


@pytest.mark.parametrize("norm", [False, True])
def test_strides(norm, device):
    """Slices of wider heads, like in latent attention, and gradients transposed by attention."""
    operands, tables = make((2, 5, 4, 2, 16), torch.float32, device)
    options = {"norm": norm, "interleaved": False, "tolerance": TOLERANCE[torch.float32]}
    wide = []
    for x in operands[:2]:
        wide.append(torch.full((2, 5, x.shape[2], 40), float("nan"), device=device))
        wide[-1][..., 20:36] = x
    by_heads = [d.transpose(1, 2).contiguous().transpose(1, 2) for d in operands[4:]]
    check([*(x[..., 20:36] for x in wide), *operands[2:]], tables, **options)
    check([*operands[:4], *by_heads], tables, **options)
    check([*operands[:4], *(d[..., :1].expand(d.shape) for d in operands[4:])], tables, **options)


@pytest.mark.parametrize("interleaved, expected", [(False, [-3, -4, 1, 2]), (True, [-2, -4, 1, 3])])
def test_worked_example(interleaved, expected, device):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    turned = rotate_heads(x, x, cos, sin, interleaved=interleaved)
    assert turned.q.flatten().tolist() == turned.k.flatten().tolist() == expected
    back = rotate_heads_backward(turned.q, turned.k, None, None, cos, sin, None, None, *turned[2:], interleaved)
    assert torch.equal(back.dq, x) and torch.equal(back.dk, x), "turning is undone by turning back"


def test_parts_are_of_so_many_rows(device):
    operands, tables = make((2, 70, 2, 1, 16), torch.float16, device)
    _, found = check(operands, tables, norm=True, interleaved=False, tolerance=TOLERANCE[torch.float16])
    assert [len(parts) for parts in found[2:]] == ([2, 1] if module.use_triton(operands[0]) else [1, 1]), "256 each"


BAD = {
    r"queries have shape \(2, 5, 4, 7\).* even D": {"q": torch.zeros(2, 5, 4, 7), "k": torch.zeros(2, 5, 2, 7)},
    r"keys \(2, 6, 2, 8\)": {"k": torch.zeros(2, 6, 2, 8)},
    r"cos has shape \(6, 8\).*expected \(5, 8\)": {"cos": torch.zeros(6, 8), "sin": torch.zeros(6, 8)},
    r"the shapes \[\(8,\), None\], expected \(8,\) for both": {"q_weight": torch.zeros(8)},
    r"the shapes \[\(8,\), \(4,\)\]": {"q_weight": torch.zeros(8), "k_weight": torch.zeros(4)},
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    good = {"q": torch.zeros(2, 5, 4, 8), "k": torch.zeros(2, 5, 2, 8), "cos": torch.zeros(5, 8),
            "sin": torch.zeros(5, 8)}
    with pytest.raises(ValueError, match=message):
        rotate_heads(**(good | BAD[message]))
