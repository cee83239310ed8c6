"""Attention against torch's own with explicit masks."""

import itertools

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from attention_cases import HEADS, SCALE, WINDOWS, by_us, documents, make, run
from dualpipe.nn.attention import attend, attention_reference

LENGTHS = [1, 11]


def seen_by_hand(length, window, positions):
    """Which keys a query sees (B, S, S), from the definition."""
    rows = [list(range(length))] * 3 if positions is None else positions.tolist()
    reach = length if window is None else window
    seen = torch.zeros(3, length, length, dtype=torch.bool)
    for b, q, k in itertools.product(range(3), range(length), range(length)):
        one_document = all(rows[b][i + 1] == rows[b][i] + 1 for i in range(k, q))
        seen[b, q, k] = k <= q < k + reach and one_document
    return seen


def by_torch(seen, with_sinks):
    """torch's attention with a mask; a sink is a key of zeros whose bias is the sink's logit, and its value zero."""

    def run_masked(q, k, v, sinks_A):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf).unsqueeze(1)
        bias = bias.expand(-1, q.shape[1], -1, -1)
        if with_sinks:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            bias = torch.cat((bias, sinks_A.view(1, -1, 1, 1).expand(*bias.shape[:-1], 1)), -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=SCALE) + 0 * sinks_A.sum()

    return run_masked


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_reference_equals_torch_with_an_explicit_mask(length, heads, window, packed, with_sinks):
    operands, context = make(length, heads, packed=packed)
    seen = seen_by_hand(length, window, documents(3, length) if packed else None)
    assert torch.equal(context.visible(window).expand_as(seen), seen)
    assert seen.diagonal(dim1=1, dim2=2).all()  # no row is all hidden
    expected = run(by_torch(seen, with_sinks), operands)
    for actual, wanted in zip(run(by_us(attend, context, window, with_sinks), operands), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


def test_attend_is_the_reference_on_cpu():
    for dtype in (torch.float32, torch.bfloat16):
        operands, context = make(11, (4, 2, 16, 16), dtype=dtype)
        for window, with_sinks in itertools.product(WINDOWS, (False, True)):
            ours, plain = (
                run(by_us(fn, context, window, with_sinks), operands) for fn in (attend, attention_reference)
            )
            assert all(torch.equal(a, b) for a, b in zip(ours, plain))


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_keeps_its_dtype_whatever_that_of_the_sinks(sink_dtype):
    (q, k, v, sinks_A), context = make(11, (4, 2, 16, 16), dtype=torch.bfloat16)
    sinks_A = sinks_A.detach().to(sink_dtype).requires_grad_()
    y = attend(q, k, v, context, scale=SCALE, sinks_A=sinks_A)
    y.sum().backward()
    assert (y.dtype, sinks_A.grad.dtype) == (torch.bfloat16, sink_dtype)
    wide = attend(q.double(), k.double(), v.double(), context, scale=SCALE, sinks_A=sinks_A.double())
    torch.testing.assert_close(y.double(), wide, rtol=0.02, atol=0.02)  # scores and probabilities of 8 bits


# -- on a device

TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 3e-2}  # relative; float32 may be multiplied as TF32


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize("heads", [(16, 2, 64, 64), (6, 2, 128, 128), (4, 4, 192, 128), (4, 2, 8, 8)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_fused_kernels_equal_float64(dtype, heads, window, packed, with_sinks, cuda):
    for length in (1, 77, 512):
        operands, context = make(length, heads, packed=packed, dtype=dtype, device=cuda)
        wide = [tensor.detach().double().requires_grad_() for tensor in operands]
        expected = run(by_us(attention_reference, context, window, with_sinks), wide)
        for actual, wanted in zip(run(by_us(attend, context, window, with_sinks), operands), expected):
            error = (actual.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
            assert error < TOLERANCES[dtype] or wanted.norm() < 1e-6, length


@pytest.mark.gpu
def test_float64_is_exact_on_a_device(cuda):
    operands, context = make(77, (4, 2, 64, 64), device=cuda)
    ours, plain = (run(by_us(fn, context, 5, True), operands) for fn in (attend, attention_reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "packed", "with_sinks"), [(None, False, False), (128, False, True), (None, True, False)]
)
def test_scores_are_never_written(window, packed, with_sinks, cuda):
    operands, context = make(8192, (4, 2, 64, 64), packed=packed, dtype=torch.bfloat16, device=cuda)
    run(by_us(attend, context, window, with_sinks), operands)  # compiles, and makes the blocks
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(by_us(attend, context, window, with_sinks), operands)
    assert torch.cuda.max_memory_allocated() - before < 3 * 4 * 8192**2 * 2 / 4  # a quarter of the scores in bfloat16
