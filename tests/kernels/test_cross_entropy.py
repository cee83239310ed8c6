"""Cross-entropy against torch's in float64, with poisoned results and poisoned ignored rows."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.cross_entropy import cross_entropy
from row_kernels import assert_close, far_apart, no_synchronisation, poisoned_memory, run_with_debug_switch  # noqa: F401

MODULE = importlib.import_module("dualpipe.kernels.cross_entropy")  # the package's attribute is the function
# The gradient rounds once in half precision; float32 sums up to 200000 exponentials of differences of about 10.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# T, V: both shape classes, with and without a rest in the last block
SHAPES = [(5, 7), (3, 1), (6, 1024), (4, 9001), (0, 4)]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make(tokens, vocabulary, dtype, device, ignored=slice(1, None, 3)):
    """Return logits and labels; ignored rows are NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[ignored] = -100
    logits[ignored] = float("nan")
    return logits.to(device, dtype), labels.to(device)


def expected(logits, labels, denominator):
    """Compute the loss and the gradient in float64."""
    counts = labels != -100
    wide = logits.detach().double().where(counts[:, None], 0).requires_grad_()
    total = F.cross_entropy(wide, labels.long(), reduction="sum") / denominator
    return total.detach(), torch.autograd.grad(total, wide)[0]


def check(logits, labels, denominator=None, scale=3.0, **options):
    """Run forward and backward with the loss gradient `scale`; return the gradient of the logits."""
    dtype = logits.dtype
    loss_dtype = torch.promote_types(dtype, torch.float32)
    wanted, wanted_grad = expected(logits, labels, denominator or max(1, int((labels != -100).sum())))
    leaf = logits.detach().clone().requires_grad_()
    loss = cross_entropy(leaf * 1, labels, **options)
    assert loss.shape == ()
    assert_close(loss, wanted, loss_dtype, TOLERANCE[loss_dtype])
    (grad,) = torch.autograd.grad(loss * scale, leaf)
    assert_close(grad, wanted_grad * scale, dtype, TOLERANCE[dtype])
    assert (grad[labels == -100] == 0).all()
    return grad


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient(shape, dtype, in_place, device):
    check(*make(*shape, dtype, device), in_place=in_place)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vocabulary", [2, 31, 512, 513, 1023, 1025, 4095, 4096, 4097, 32000, 50257, 151936, 200003])
def test_loss_and_gradient_matrix(vocabulary, dtype, device):
    check(*make(9, vocabulary, dtype, device))
    check(*make(1, vocabulary, dtype, device, ignored=[]), in_place=True)


def test_worked_example(device):
    logits = torch.zeros(1, 2, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1], device=device))
    loss.backward()
    assert loss.item() == pytest.approx(0.693147, rel=1e-6)
    assert logits.grad.tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_label_at_all_is_zero_not_nan(reduction, in_place, device):
    logits, labels = make(4, 9, torch.float32, device, ignored=slice(None))
    grad = check(logits, labels, reduction=reduction, in_place=in_place)
    assert (grad == 0).all()
    check(logits, labels, denominator=torch.zeros((), device=device) if reduction == "mean" else None)


def test_reductions(device):
    logits, labels = make(7, 40, torch.float32, device)
    check(logits, labels, denominator=1, reduction="sum")
    leaf = logits.requires_grad_()
    for given in (17, 2.5, torch.tensor(17, device=device), torch.tensor([0.25], dtype=torch.float64, device=device)):
        wanted, wanted_grad = expected(logits, labels, float(given))
        loss = cross_entropy(leaf, labels, denominator=given)
        assert_close(loss, wanted, torch.float32, 1e-6)
        assert_close(torch.autograd.grad(loss, leaf)[0], wanted_grad, torch.float32, 1e-6)
    assert cross_entropy(leaf, torch.full_like(labels, -100), denominator=0).item() == 0


def test_other_labels(device):
    logits, labels = make(5, 40, torch.float32, device)
    assert torch.equal(check(logits, labels.int()), check(logits, labels))
    assert torch.equal(check(logits, labels.repeat_interleave(2)[::2]), check(logits, labels))
    zero_is_ignored = labels.where(labels != -100, 0)
    other = cross_entropy(logits, zero_is_ignored, ignore_index=0)
    assert torch.equal(other, cross_entropy(logits, labels))


def test_labels_below_the_ignored_one_count(device):
    logits, _ = make(4, 40, torch.float32, device)
    labels = torch.tensor([2, 7, 1, 39], device=device)
    expected = F.cross_entropy(logits, labels, ignore_index=7)
    assert_close(cross_entropy(logits, labels, ignore_index=7), expected, torch.float32, 1e-6)


def test_strides(device):
    logits, labels = make(6, 40, torch.float32, device)
    spaced = torch.full((6, 100), float("nan"), device=device)
    spaced[:, 3:43] = logits
    for view in (spaced[:, 3:43], logits.t().contiguous().t(), logits[:1].expand(6, -1)):
        leaf = view.detach().requires_grad_()
        loss = cross_entropy(leaf, labels)
        wanted, wanted_grad = expected(view, labels, int((labels != -100).sum()))
        assert_close(loss, wanted, torch.float32, 1e-6)
        assert_close(torch.autograd.grad(loss, leaf)[0], wanted_grad, torch.float32, 1e-6)
    in_place = spaced[:, 3:43].requires_grad_()
    cross_entropy(in_place, labels, in_place=True).backward()
    assert_close(in_place.detach(), expected(logits, labels, 4)[1], torch.float32, 1e-6)
    assert spaced[:, :3].isnan().all() and spaced[:, 43:].isnan().all()


def test_infinite_logits(device):
    """Words with logits of -inf get no probability, even a whole block of them."""
    logits, labels = make(3, 9001, torch.float32, device, ignored=[])
    logits[:, :5000], labels[:] = -float("inf"), 8000
    check(logits, labels)
    logits[0, 8000] = -float("inf")
    assert cross_entropy(logits, labels).item() == float("inf")
    logits[1] = -float("inf")
    assert cross_entropy(logits, labels).isnan()


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_large_logits(large, device):
    logits, labels = make(3, 2000, torch.float64, device)
    check(logits + large, labels)


def test_in_place_overwrites_the_logits_and_refuses_a_second_backward(device):
    logits, labels = make(5, 40, torch.float32, device)
    leaf = logits.requires_grad_()
    product = leaf * 1
    loss = cross_entropy(product, labels, in_place=True)
    before = product.detach().clone()
    loss.backward(retain_graph=True)
    assert torch.equal(product, leaf.grad) and not torch.equal(product, before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_refuses_to_destroy_what_others_saved(device):
    logits, labels = make(5, 40, torch.float32, device)
    product = logits.requires_grad_() * 1
    loss = product.square().mean() + cross_entropy(product, labels, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_beyond_two_to_the_31_elements():
    logits, labels = make(3, 40, torch.float16, "cpu")
    far = far_apart(logits)
    loss, stats, divisor = MODULE._cross_entropy(logits, labels, None, -100, True, False)
    assert torch.equal(MODULE._cross_entropy(far, labels, None, -100, True, False)[0], loss)
    grad = MODULE._cross_entropy_backward(logits, labels, stats, divisor, -100)
    assert torch.equal(MODULE._cross_entropy_backward(far, labels, stats, divisor, -100), grad)
    MODULE._cross_entropy_backward_(far, labels, stats, divisor, -100)
    assert torch.equal(far, grad)


@pytest.mark.parametrize("label", [40, -1])
def test_label_out_of_range(label, device):
    """Raises ValueError on CPU; the kernel returns a NaN loss."""
    logits, labels = make(3, 40, torch.float32, device)
    labels[0] = label
    if device.type == "cuda" or INTERPRET:
        assert cross_entropy(logits, labels).isnan()
    else:
        with pytest.raises(ValueError, match=f"contain {label}, expected numbers between 0 and 39, or ignore_index=-"):
            cross_entropy(logits, labels)


@pytest.mark.gpu
def test_label_out_of_range_fails_with_the_debug_switch():
    program = """
        import torch
        from dualpipe.kernels.cross_entropy import cross_entropy
        cross_entropy(torch.zeros(1, 4, device="cuda"), torch.tensor([4], device="cuda")).item()
    """
    assert "neither ignore_index nor between" in run_with_debug_switch(program)


BAD = {
    r"logits are .* of shape \(2, 3, 4\), expected floating-point \(T, V\)": {"logits": torch.zeros(2, 3, 4)},
    "V of at least 1": {"logits": torch.zeros(3, 0)},
    "logits are torch.int64": {"logits": torch.zeros(3, 4, dtype=torch.long)},
    r"labels are .* expected int32 or int64 of shape \(3,\)": {"labels": torch.zeros(4, dtype=torch.long)},
    "labels are torch.float32": {"labels": torch.zeros(3)},
    "labels on meta, expected one device": {"labels": torch.zeros(3, dtype=torch.long, device="meta")},
    "reduction is 'none'": {"reduction": "none"},
    "reduction='sum', which does not divide": {"reduction": "sum", "denominator": 3},
    "with one element": {"denominator": torch.ones(2)},
    "denominator.detach": {"denominator": torch.ones((), requires_grad=True)},
    r"strides \(0, 1\), but in_place requires": {"in_place": True, "logits": torch.zeros(1, 4).expand(3, 4)},
    r"strides \(1, 3\), but in_place requires": {"in_place": True, "logits": torch.zeros(4, 3).t()},
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    good = {"logits": torch.zeros(3, 4), "labels": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        cross_entropy(**(good | BAD[message]))
