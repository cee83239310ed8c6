"""Attention against torch's own with explicit masks, and FlexAttention's way of it against ours."""

import itertools

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_mask

from dualpipe.nn.attention import (
    Context,
    Rotary,
    SequenceSplit,
    apply_sinks,
    attend,
    attention_reference,
    causal_attention,
    document_numbers,
    packed_positions,
)
from dualpipe.nn.attention import flex as flex_module
from dualpipe.nn.attention.flex import attention_flex

SCALE = 0.3
WINDOWS = [None, 1, 3, 64]
LENGTHS = [1, 11]
HEADS = [(4, 4, 16, 16), (4, 2, 16, 16), (3, 1, 24, 16)]  # A, G, D, V


def documents(batch, length):
    """Position ids of rows with one document, two, or several, some of a single token."""
    starts = [[0], [0, length // 3], [0, 1, 2, length // 2]]
    rows = torch.zeros(batch, length, dtype=torch.long)
    for row, cuts in zip(rows, itertools.cycle(starts)):
        for start in filter(length.__gt__, cuts):
            row[start:] = torch.arange(length - start)
    return rows


def make(length, heads, *, packed=False, dtype=torch.float64, device="cpu", batch=3):
    """q, k, v and sinks, which need gradients, and their context."""
    num_heads, groups, qk, v = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, num_heads, length, qk), (batch, groups, length, qk), (batch, groups, length, v), (num_heads,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    positions = documents(batch, length).to(device) if packed else None
    context = Context(Rotary(qk, 1e4), torch.empty(batch, length, 8, dtype=dtype, device=device), positions)
    return [tensor.requires_grad_() for tensor in drawn], context


def run(fn, operands):
    """The result and the gradients of all operands, for the same gradient of the result."""
    y = fn(*operands)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad(y, operands, dy)]


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


def by_us(fn, context, window, with_sinks):
    def run_ours(q, k, v, sinks_A):
        y = fn(q, k, v, context, scale=SCALE, window=window, sinks_A=sinks_A if with_sinks else None)
        return y + 0 * sinks_A.sum()

    return run_ours


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


@pytest.mark.parametrize("shape", [(3, 10), (2, 11), (11,), (3, 11, 1)], ids=str)
def test_positions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"positions must be \(3, 11\), as the tokens are; got \("):
        Context(Rotary(16, 1e4), torch.empty(3, 11, 8), torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize(
    ("positions", "numbers"),
    [
        ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
        ([0, 0, 0], [0, 1, 2]),
        ([5, 6, 7, 3, 9], [0, 0, 0, 1, 2]),  # the rest of a document that began in another row
        ([4], [0]),
    ],
)
def test_documents_start_where_positions_do_not_go_on(positions, numbers):
    assert document_numbers(torch.tensor([positions])).tolist() == [numbers]


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_keeps_its_dtype_whatever_that_of_the_sinks(sink_dtype):
    (q, k, v, sinks_A), context = make(11, (4, 2, 16, 16), dtype=torch.bfloat16)
    sinks_A = sinks_A.detach().to(sink_dtype).requires_grad_()
    y = attend(q, k, v, context, scale=SCALE, sinks_A=sinks_A)
    y.sum().backward()
    assert (y.dtype, sinks_A.grad.dtype) == (torch.bfloat16, sink_dtype)
    wide = attend(q.double(), k.double(), v.double(), context, scale=SCALE, sinks_A=sinks_A.double())
    torch.testing.assert_close(y.double(), wide, rtol=0.02, atol=0.02)  # scores and probabilities of 8 bits


# -- FlexAttention, as it runs on CPU: uncompiled, and without a backward


def flex_attend(q, k, v, context, *, scale, window=None, sinks_A=None):
    return attention_flex(q, k, v, context.blocks(window), scale, sinks_A)[0]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    ("length", "window"), [(1, None), (11, None), (11, 1), (11, 7), (300, None), (300, 130), (300, 400)]
)
def test_flex_equals_the_reference(length, window, packed, with_sinks):
    for heads in HEADS[1:]:
        operands, context = make(length, heads, packed=packed)
        plain = [tensor.detach() for tensor in operands]
        actual, expected = (by_us(fn, context, window, with_sinks)(*plain) for fn in (flex_attend, attention_reference))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    seen = create_mask(context.blocks(window).mask_mod, 3, 1, length, length, device="cpu")
    assert torch.equal(seen.squeeze(1), context.visible(window).expand(3, -1, -1))


def test_flex_skips_the_blocks_that_nobody_sees():
    _, context = make(1024, (1, 1, 16, 16))
    kinds = {window: context.blocks(window) for window in (None, 128, 1)}
    in_part = {window: blocks.kv_num_blocks.sum().item() for window, blocks in kinds.items()}
    in_full = {window: blocks.full_kv_num_blocks.sum().item() for window, blocks in kinds.items()}
    assert in_part == {None: 8, 128: 8 + 7, 1: 8}  # of 128 positions: the diagonal, and with a window what it cuts
    assert in_full == {None: 28, 128: 0, 1: 0}
    assert context.blocks(128) is kinds[128]


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", WINDOWS)
def test_sinks_from_the_log_sum_exp_have_the_reference_s_gradients(window, packed):
    operands, context = make(11, (4, 2, 16, 16), packed=packed)

    def by_lse(q, k, v, sinks_A):
        seen = context.visible(window).expand(3, -1, -1).unsqueeze(1)
        scores = q @ k.repeat_interleave(2, dim=1).mT * SCALE
        scores = scores.masked_fill(~seen, -torch.inf)
        return apply_sinks(scores.softmax(-1) @ v.repeat_interleave(2, dim=1), scores.logsumexp(-1), sinks_A)

    expected = run(by_us(attention_reference, context, window, with_sinks=True), operands)
    for actual, wanted in zip(run(by_lse, operands), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


def test_flex_is_compiled_once_for_all_windows_and_micro_batches():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention_flex, backend=counter, fullgraph=True)
    for packed in (False, True):
        for _, window in itertools.product(range(2), WINDOWS):
            operands, context = make(11, (4, 2, 16, 16), packed=packed)
            q, k, v, sinks_A = (tensor.detach() for tensor in operands)
            y, _ = compiled(q, k, v, context.blocks(window), SCALE, sinks_A)
            expected = attention_reference(q, k, v, context, scale=SCALE, window=window, sinks_A=sinks_A)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)  # compiled, its sums are of float32
        assert counter.frame_count == 1 + packed


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", [None, 3, 11])
def test_what_cuda_would_run_is_the_reference(window, packed, with_sinks, monkeypatch):
    """On CPU, with the device's kernels as they are here; torch's own only where nothing but the future is hidden."""
    calls = []
    monkeypatch.setattr(causal_attention, "_has_kernel", lambda q, v, plain: True)
    monkeypatch.setattr(flex_module, "compiled", lambda fn: lambda *args: calls.append(fn) or fn(*args))
    operands, context = make(11, (4, 2, 16, 16), packed=packed, dtype=torch.float32)
    q, k, v, sinks_A = (tensor.detach() for tensor in operands)
    options = {"scale": SCALE, "window": window, "sinks_A": sinks_A if with_sinks else None}
    expected = attention_reference(q, k, v, context, **options)
    torch.testing.assert_close(attend(q, k, v, context, **options), expected)
    assert calls == ([attention_flex] if window == 3 or packed or with_sinks else [])
    with pytest.raises(NotImplementedError, match="max scores is not supported on CPU"):
        attend(q, k, v, context, **options, peaks_A=torch.zeros(4))
    half = v.bfloat16()  # beside queries and keys that a norm kept in float32
    assert attend(q, k, half, context, **options).dtype is torch.bfloat16


# -- on a device

TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 3e-2}  # relative; float32 may be multiplied as TF32


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    return "cuda"


def test_worked_example_of_a_split():
    assert [SequenceSplit(rank, 2).own(9).tolist() for rank in range(2)] == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    assert SequenceSplit(1, 2).counts(9) == (5, 4)
    assert SequenceSplit().own(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(8, 20))
def test_every_token_is_one_rank_s_and_ranks_attend_about_as_much(size, length):
    own = [SequenceSplit(rank, size).own(length) for rank in range(size)]
    assert torch.cat(own).sort().values.tolist() == list(range(length))
    assert all(mine.dtype is torch.int64 and (mine.diff() > 0).all() for mine in own)
    assert SequenceSplit(0, size).counts(length) == tuple(map(len, own))
    seen = [int((mine + 1).sum()) for mine in own]  # a token sees itself and all before it
    assert max(seen) - min(seen) <= 2 * length


def test_a_sequence_shorter_than_its_chunks_is_refused():
    with pytest.raises(ValueError, match=r"5 tokens cannot be shared by 3 ranks.*at least 6"):
        SequenceSplit(0, 3).own(5)


def test_packed_positions_of_documents_end_to_end():
    """Documents of 3, 0, 4 and 1 tokens in two rows; the third goes on in the second row."""
    positions = packed_positions(torch.tensor([0, 3, 3, 7, 8]), 2, 4)
    assert positions.tolist() == [[0, 1, 2, 0], [1, 2, 3, 0]]
    assert document_numbers(positions).tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert packed_positions(torch.tensor([0, 8], dtype=torch.int32), 2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for wrong in ([0, 3], [1, 8], [0, 5, 4, 8], [8]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 8"):
            packed_positions(torch.tensor(wrong), 2, 4)


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
