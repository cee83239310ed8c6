"""FlexAttention's way of attention against ours."""

import functools
import itertools

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_mask

from attention_cases import HEADS, SCALE, WINDOWS, by_us, make
from dualpipe.nn.attention import attend, attention_reference, causal_attention
from dualpipe.nn.attention import flex as flex_module
from dualpipe.nn.attention.flex import attention_flex


def flex_attend(q, k, v, context, *, scale, window=None, sinks_A=None):
    return attention_flex(q, k, v, context.blocks(window), scale, sinks_A)[0]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    ("length", "window"), [
        (300, 130),
        *(pytest.param(*each, marks=pytest.mark.slow)
          for each in ((1, None), (11, 7), (11, None), (11, 1), (300, None), (300, 400))),
    ]
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


@pytest.fixture
def counted_compiler(monkeypatch):
    """Counts what `flex.compiled` compiles, without generating code; what it has compiled before is forgotten."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    flex_module.compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=3):
        yield counter
    torch._dynamo.reset()
    flex_module.compiled.cache_clear()


def run_variant(part):
    """Run what no other part compiles: other heads, dimensions and documents."""
    heads = (4, 2, 16 + 8 * (part % 6), 16)
    operands, context = make(11, heads, packed=part % 2 == 1)
    q, k, v, sinks_A = (tensor.detach() for tensor in operands)
    with_sinks = part % 4 < 2
    dtype = torch.float32 if part >= 12 else v.dtype
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    return flex_module.compiled(attention_flex)(
        q, k, v, context.blocks(None), SCALE, sinks_A.to(dtype) if with_sinks else None)


def test_a_variant_too_many_is_an_error_and_does_not_write_all_scores(counted_compiler, monkeypatch):
    monkeypatch.setattr(flex_module, "VARIANTS", 3)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for part in range(24):
            run_variant(part)
    assert counted_compiler.frame_count == 3


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
        attend(q, k, v, context, **options, max_logits_A=torch.zeros(4))
    half = v.bfloat16()  # beside queries and keys that a norm kept in float32
    assert attend(q, k, half, context, **options).dtype is torch.bfloat16
