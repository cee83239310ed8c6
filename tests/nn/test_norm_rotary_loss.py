"""The small pieces that models share, against plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from dualpipe.kernels import combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.rotary import apply_rotary
from dualpipe.nn import RMSNorm, cross_entropy_loss
from dualpipe.nn.attention import Context, Rotary, apply_rope
from dualpipe.nn.deferral import WeightGradStore


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


def weight_gradients(run, weights, key="I"):
    """Of an "I" that defers, and of its "W"; and those that autograd adds at once."""
    run().backward()
    at_once, store = [weight.grad for weight in weights], WeightGradStore()
    for weight in weights:
        weight.grad = None
    with store.activate(), store.defer(key):
        run().backward()
    assert all(weight.grad is None for weight in weights) and store.pending()[key] > 0
    store.run(key)
    return at_once, [weight.grad for weight in weights]


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
    out, total = norm(*operands, keep=True)
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


def test_hooks_on_the_weight_of_a_norm_run():
    norm, seen = RMSNorm(16), []
    norm.weight.register_hook(seen.append)
    store = WeightGradStore()
    with store.activate(), store.defer("I"):
        norm(torch.randn(5, 16)).sum().backward()
    assert len(seen) == 1 and norm.weight.grad is not None and not store.pending().get("I")


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
