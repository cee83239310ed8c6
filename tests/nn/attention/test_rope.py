"""The rotary embedding, with and without norms of the heads, against plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from dualpipe.kernels.rotary import apply_rotary
from dualpipe.nn import RMSNorm
from dualpipe.nn.attention import Context, Rotary, apply_rope
from weight_grads import weight_gradients


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rotated_heads_and_their_gradients(norms, interleaved, packed):
    q, k = (torch.randn(2, 6, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2))
    both = [RMSNorm(8, dtype=torch.float64) for _ in range(2 if norms else 0)]
    for norm in both:
        torch.nn.init.normal_(norm.weight)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]) if packed else None
    context = Context(Rotary(8, 1e4), torch.zeros(2, 6, 1, dtype=torch.float64), positions)

    def turned(x, norm):
        x = x if norm is None else F.rms_norm(x, (8,), norm.weight, norm.eps)
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1) if interleaved else x
        return apply_rotary(x.transpose(1, 2), *context.tables(x.dtype))

    expected = [turned(x, norm) for x, norm in zip((q, k), both or (None, None))]
    found = apply_rope(q, k, *context.tables(q.dtype), both, interleaved=interleaved)
    grads, leaves = [torch.randn_like(y) for y in expected], [q, k, *(norm.weight for norm in both)]
    pairs = zip((*found, *torch.autograd.grad(found, leaves, grads)),
                (*expected, *torch.autograd.grad(expected, leaves, grads)))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gradients_of_head_norms_are_deferred():
    norms, context = [RMSNorm(8), RMSNorm(8)], Context(Rotary(8, 1e4), torch.zeros(2, 6, 1))
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
    at_once, later = weight_gradients(
        lambda: sum(x.pow(3).sum() for x in apply_rope(q, k, *context.tables(q.dtype), norms)),
        [norm.weight for norm in norms])
    assert all(torch.equal(a, b) for a, b in zip(at_once, later)) and not torch.equal(*later)


def test_rotary_is_a_rotation_by_relative_position():
    x = torch.randn(1, 2, 40, 8, dtype=torch.float64)
    cos, sin = Rotary(8, 1e4).tables(torch.arange(40), torch.float64)
    assert cos.dtype is torch.float64
    pairs = torch.complex(*x.chunk(2, dim=-1))
    angles = torch.arange(40.0, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(apply_rotary(x, cos, sin), torch.cat((expected.real, expected.imag), -1))
