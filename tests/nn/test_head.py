"""A head and its loss in parts against the plain form, and the memory that it takes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dualpipe.nn import Linear, cross_entropy_loss
from dualpipe.nn.head import HeadRows, LinearHead, part_peak_bytes, rows_per_part
from dualpipe.nn.lora import AdapterForm, LinearAdapter

VOCABULARY, HIDDEN = 33, 8


def head_of(dtype=torch.float64, *, bias=False, scale=1.0, cap=None, seed=0):
    torch.manual_seed(seed)
    layer = Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    layer.weight.data.mul_(4)
    return LinearHead(layer, scale, cap)


def run(head, labels, *, rows=None, dtype=torch.float64, **options):
    """Return the loss, the gradient of the rows, and those of the layer: in parts of `rows` rows, or plain."""
    x = torch.randn(*labels.shape, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if rows is None:
        logits = head.logits(x)
    else:
        logits = HeadRows(x, head, rows * VOCABULARY * torch.promote_types(dtype, torch.float32).itemsize)
    loss = cross_entropy_loss(logits, labels, **options)
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in head.layer.parameters())]


def labels_of(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("rows", [1, 5, 7, 100])
@pytest.mark.parametrize("form", [{}, {"bias": True}, {"cap": 2.0}, {"scale": 0.5, "cap": 3.0, "bias": True}])
@pytest.mark.parametrize("options", [{}, {"denominator": 5.0}, {"z_loss": 0.3, "denominator": torch.tensor(3.0)},
                                     {"ignore_index": 7}])
def test_parts_equal_the_plain_form(rows, form, options):
    labels = labels_of(3, 7)
    labels[0, :4] = options.get("ignore_index", -100)
    expected, found = (run(head_of(**form), labels, rows=size, **options) for size in (None, rows))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3)])
def test_rows_that_do_not_count_have_no_loss_and_no_gradient(shape):
    results = run(head_of(bias=True), torch.full(shape, -100), rows=2)
    assert all(result is None or not result.any() for result in results)
    assert results[2] is not None or shape == (0,)


def test_an_ignored_row_may_hold_infinities():
    head = head_of()
    x = torch.randn(4, HIDDEN, dtype=torch.float64)
    x[1] = torch.inf
    x.requires_grad_()
    cross_entropy_loss(HeadRows(x, head), torch.tensor([1, -100, 2, 3])).backward()
    assert x.grad.isfinite().all() and not x.grad[1].any()


def test_a_half_precision_head_adds_to_a_float32_accumulator():
    labels = labels_of(3, 7)
    results = []
    for rows in (None, 4):
        head = head_of(torch.bfloat16)
        head.layer.weight.grad_dtype = torch.float32
        head.layer.weight.grad = torch.ones(VOCABULARY, HIDDEN)
        results.append(run(head, labels, rows=rows, dtype=torch.bfloat16))
    expected, found = results
    assert found[2].dtype is torch.float32
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2], rtol=1e-2, atol=1e-2)


def test_autocast_computes_like_the_plain_form():
    labels = labels_of(3, 7)
    results = []
    for rows in (None, 4):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(run(head_of(torch.float32), labels, rows=rows, dtype=torch.float32))
    for one, other in zip(*results, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_frozen_parameters_and_evaluation_add_nothing():
    head = head_of(bias=True)
    labels = labels_of(5)
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        loss = cross_entropy_loss(HeadRows(x, head), labels)
        assert torch.equal(HeadRows(x, head).argmax(-1), head.logits(x).argmax(-1))
    assert not loss.requires_grad and head.layer.weight.grad is None and head.layer.bias.grad is None
    head.layer.weight.requires_grad_(False)
    cross_entropy_loss(HeadRows(x, head), labels).backward()
    assert head.layer.weight.grad is None and head.layer.bias.grad is not None and x.grad is not None


def test_another_gradient_of_the_loss_is_refused():
    """The weight's gradient was computed in the forward, for the gradient that the loss was said to get."""
    head = head_of()
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"another gradient than 1\.0"):
        (cross_entropy_loss(HeadRows(x, head), labels_of(5)) / 2).backward()
    head.layer.weight.grad = None
    (cross_entropy_loss(HeadRows(x, head), labels_of(5), upstream=0.5) / 2).backward()
    expected = run_half(head_of(), x.detach())
    torch.testing.assert_close(head.layer.weight.grad, expected, rtol=1e-10, atol=0)


def run_half(head, x):
    (cross_entropy_loss(head.logits(x), labels_of(5)) / 2).backward()
    return head.layer.weight.grad


def test_wrong_labels_are_refused():
    rows = HeadRows(torch.randn(3, HIDDEN, dtype=torch.float64), head_of())
    with pytest.raises(ValueError, match=r"labels have the shape \(4,\), expected \(3,\)"):
        cross_entropy_loss(rows, labels_of(4))
    with pytest.raises(ValueError, match="labels contain 33, expected numbers between 0 and 32"):
        cross_entropy_loss(rows, torch.tensor([0, 33, 1]))


def test_heads_whose_gradients_need_autograd_do_not_run_in_parts():
    assert head_of().can_run_in_parts
    hooked = head_of()
    hooked.layer.weight.register_hook(lambda grad: grad)
    held = head_of()
    held.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    pruned = head_of()
    torch.nn.utils.parametrizations.weight_norm(pruned.layer)

    class Scaled(Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    other = LinearHead(Scaled(HIDDEN, VOCABULARY))
    adapted = head_of()
    adapted.layer.adapter = LinearAdapter(HIDDEN, VOCABULARY, AdapterForm(2, 1.0))
    assert not any(head.can_run_in_parts for head in (hooked, held, pruned, other, adapted))


def test_a_part_has_at_least_one_row():
    assert rows_per_part(152_000, torch.bfloat16, 500_000_000) == 822
    assert rows_per_part(152_000, torch.float64, 1000) == 1


def peak_bytes(function):
    """Return the most that torch has allocated at once beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("dtype, plain_copies", [(torch.float32, 3), (torch.bfloat16, 3)])
def test_the_peak_is_that_of_a_part(dtype, plain_copies):
    tokens, vocabulary, hidden = 256, 4096, 16
    part_bytes = 32 * vocabulary * 4
    peaks = []
    for in_parts in (False, True):
        head = LinearHead(Linear(hidden, vocabulary, bias=False, dtype=dtype))
        head.layer.weight.grad_dtype = torch.float32
        head.layer.weight.grad = torch.zeros(vocabulary, hidden)
        x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
        labels = torch.randint(vocabulary, (tokens,))

        def step(head=head, x=x, labels=labels, in_parts=in_parts):
            logits = HeadRows(x, head, part_bytes) if in_parts else head.logits(x)
            cross_entropy_loss(logits, labels).backward()

        peaks.append(peak_bytes(step))
    plain, parts = peaks
    expected = part_peak_bytes(head, tokens, dtype, part_bytes, cpu=True)
    rest = 2 * tokens * hidden * dtype.itemsize + vocabulary * hidden * 4  # rows' gradients, and a float32 weight
    assert plain > plain_copies * tokens * vocabulary * dtype.itemsize
    assert expected * 0.9 < parts < expected * 1.05 + rest + 2**16
