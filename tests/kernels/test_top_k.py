"""Router against the formula and its autograd in float64, with poisoned results."""

import pytest
import torch

from dualpipe.kernels.top_k import softmax_top_k, softmax_top_k_backward
from row_kernels import assert_close, far_apart, no_synchronisation, poisoned_memory  # noqa: F401

# Half precision rounds the weights and the gradient once; float32 sums at most 500 probabilities.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
# T, E, K: several tokens in a program, one and all of the experts, odd, empty
SHAPES = [(5, 7, 2), (40, 128, 8), (3, 1, 1), (17, 12, 12), (2, 500, 3), (0, 8, 2)]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make(tokens, experts, top_k, dtype, device):
    """Return logits that are distinct in every row, and gradients of weights and probabilities."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.rand(tokens, experts, generator=generator).argsort(-1) - experts // 2
    shapes = (tokens, top_k), (tokens, experts)
    grads = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    d_weights, d_probs = (grad.to(device, dtype) for grad in grads)
    wide = torch.promote_types(dtype, torch.float32)
    return (0.0625 * steps.double()).to(device, dtype), d_weights, d_probs.to(wide)


def check(logits, d_weights, d_probs, *, norm, factor):
    top_k = d_weights.shape[1]
    weights, experts, probs = softmax_top_k(logits, top_k, norm, factor)
    wide = logits.detach().double().requires_grad_()
    p = wide.softmax(-1)
    assert torch.equal(experts, p.detach().topk(top_k, -1).indices)
    w = p.gather(1, experts)
    expected = factor * (w / w.sum(-1, keepdim=True) if norm else w)
    tolerance = TOLERANCE[logits.dtype]
    assert_close(weights, expected, logits.dtype, tolerance)
    assert_close(probs, p, torch.promote_types(logits.dtype, torch.float32), max(TOLERANCE[torch.float32] * (
        logits.dtype is not torch.float64), 1e-14))
    got = softmax_top_k_backward(d_weights, d_probs, experts, probs, norm, factor)
    wanted = [torch.autograd.grad(y, wide, dy.double(), retain_graph=True)[0]
              for y, dy in ((expected, d_weights), (p, d_probs)) if dy is not None]
    size = sum((t.norm() for t in wanted), (d_weights.double() * expected).norm())  # which may cancel
    assert_close(got, sum(wanted), logits.dtype, tolerance, size)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("norm, factor", [(False, 1.0), (True, 1.0), (True, 2.5)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, norm, factor, balanced, device):
    logits, d_weights, d_probs = make(*shape, dtype, device)
    check(logits, d_weights, d_probs if balanced else None, norm=norm, factor=factor)


def test_strides(device):
    logits, d_weights, d_probs = make(6, 10, 3, torch.float32, device)
    spaced = torch.full((6, 50), float("nan"), device=device)
    spaced[:, 3:13] = logits
    check(spaced[:, 3:13], d_weights.t().contiguous().t(), d_probs[:1].expand(6, -1), norm=True, factor=1.0)
    check(logits.t().contiguous().t(), d_weights[:, :1].expand(-1, 3), d_probs.t().contiguous().t(), norm=True,
          factor=1.0)


def test_rows_beyond_two_to_the_31_elements():
    logits, *_ = make(3, 8, 2, torch.float16, "cpu")
    for near, far in zip(softmax_top_k(logits, 2), softmax_top_k(far_apart(logits), 2)):
        assert torch.equal(near, far)


def test_worked_example(device):
    logits = torch.tensor([[1 / 2, 1 / 8, 3 / 8]], device=device).log()
    for norm, expected in ((False, [1 / 2, 3 / 8]), (True, [4 / 7, 3 / 7])):
        weights, experts, probs = softmax_top_k(logits, 2, norm)
        assert experts.tolist() == [[0, 2]] and weights.tolist() == [pytest.approx(expected)]
        assert probs.tolist() == [pytest.approx([1 / 2, 1 / 8, 3 / 8])]


def test_equal_and_extreme_logits_choose_experts_that_there_are(device):
    logits = torch.zeros(4, 5, device=device)
    logits[1, 2], logits[2, 1], logits[3] = 1e4, -torch.inf, torch.nan
    weights, experts, _ = softmax_top_k(logits, 3, True)
    assert ((experts >= 0) & (experts < 5)).all() and all(len(set(row)) == 3 for row in experts[:3].tolist())
    assert weights[:3].isfinite().all() and weights[3].isnan().all()
    assert experts[1, 0] == 2 and weights[1].tolist() == [1, 0, 0] and 1 not in experts[2].tolist()


@pytest.mark.parametrize("logits, top_k, message", [
    (torch.zeros(3), 1, r"float32 of shape \(3,\) and top_k is 1"), (torch.zeros(3, 4, dtype=torch.long), 1, "int64"),
    (torch.zeros(3, 4), 5, "top_k is 5"), (torch.zeros(3, 4), 0, "top_k is 0"),
])
def test_misfit_is_a_value_error(logits, top_k, message):
    with pytest.raises(ValueError, match=message):
        softmax_top_k(logits, top_k)
