"""Layers with quantized weights against the same layers with what those stand for."""

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualpipe.nn.grouped_linear as grouped_linear
import dualpipe.quantized.tensor as quantized_tensor
from dualpipe.kernels import grouped_gemm, grouped_gemm_wgrad, sort_tokens, swiglu
from dualpipe.kernels.quantize import dequantize_rows, quantize_rows
from dualpipe.kernels.swiglu import swiglu_backward
from dualpipe.models.decoder import Experts
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.quantized import FORMATS, quantize_weights, strict

E, H, N = 3, 160, 192  # neither a multiple of 128
COMPUTING = [format.name for format in FORMATS.values() if format.computes]
ONE_ULP = {"rtol": 2**-7, "atol": 2**-7}  # of bfloat16: sums in float32 in another order, then rounded once
MADE = {
    "Linear": lambda **k: Linear(H, N, bias=True, **k),
    "GroupedLinear": lambda **k: GroupedLinear(E, H, N, bias=True, **k),
    "GroupedSwiGLU": lambda **k: GroupedSwiGLU(E, H, N // 2, bias=True, **k),
}


def make(kind, format, dtype=torch.bfloat16, **settings):
    """(one with a quantized weight, the same with a plain one of its values), accumulating in float32."""
    torch.manual_seed(0)
    ours = MADE[kind](dtype=dtype)
    assert quantize_weights(ours, format) == ["weight"]
    plain = copy.deepcopy(ours)
    plain.weight = nn.Parameter(ours.weight.dequantize().to(dtype))
    for module in (ours, plain):
        for param in module.parameters():
            param.grad_dtype = torch.float32
        vars(module).update(settings)
    return ours, plain


TOKENS = sort_tokens(torch.tensor([[0, 2], [2, 0], [2, -1], [0, -1], [2, 0]]), E).cut(8)  # none for expert 1


def step(module, deferred=True, micro_batches=2, dtype=torch.bfloat16, call=None):
    """Results and input gradients of some micro-batches, then the parameters' gradients."""
    generator, store, found = torch.Generator().manual_seed(1), WeightGradStore(), []
    with store.activate(), store.accumulate():
        for number in range(micro_batches):
            x = torch.randn(5, H, generator=generator).to(dtype).requires_grad_()
            y = (call or module)(*((x,) if isinstance(module, nn.Linear) else (x, TOKENS)))
            dy = torch.randn(y.shape, generator=generator).to(dtype)
            if deferred:
                with store.defer(number):
                    y.backward(dy)
            else:
                y.backward(dy)
            found += [y.detach(), x.grad]
        for number in range(micro_batches):
            store.run(number)
    return found + [param.grad for param in module.parameters()]


def assert_equal(actual, expected, **tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert type(a) is torch.Tensor
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_only_is_what_the_dequantized_weight_gives(kind, format, dtype):
    ours, plain = make(kind, format, dtype, gemm_precision="weight-only")
    with strict():
        found = step(ours, dtype=dtype)
    assert found[-2].dtype is found[-1].dtype is torch.float32
    # Those of experts bit for bit; a dense one is a product of the same numbers in another order.
    tolerance = {} if kind != "Linear" else ONE_ULP if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    assert_equal(found, step(plain, dtype=dtype), **tolerance)


def fp8_step(ours, fp8_weight_grad):
    """`step` of a layer whose products are in FP8, from the formula."""
    format, weight = ours.weight.format, ours.weight.dequantize().view(-1, N, H)
    dense = isinstance(ours, nn.Linear)
    ends = torch.tensor([5], dtype=torch.int32) if dense else TOKENS.offs
    rounded = lambda x: dequantize_rows(quantize_rows(x, format.block[1]))  # noqa: E731
    generator, found, grad = torch.Generator().manual_seed(1), [], torch.zeros(weight.shape)
    bias_grad, bias = torch.zeros(len(weight), N), ours.bias.float().view(-1, N)
    experts = torch.arange(len(ends)).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    for _ in range(2):
        x = torch.randn(5, H, generator=generator).bfloat16()
        rows = x if dense else x[TOKENS.gather.long()]
        y = (grouped_gemm(rounded(rows), weight, ends) + bias[experts]).bfloat16()
        gate_up = y
        if isinstance(ours, GroupedSwiGLU):
            y = swiglu(gate_up)
        dy = torch.randn(y.shape, generator=generator).bfloat16()
        if isinstance(ours, GroupedSwiGLU):
            dy, _ = swiglu_backward(dy, gate_up, None, *ours.form)
        square = format.block[0] == format.block[1]
        used, exact = (rounded(dy), weight) if square else (dy.float(), weight.bfloat16().float())
        dx = grouped_gemm(used, exact.mT.contiguous(), ends).bfloat16()
        if not dense:
            dx = torch.zeros(5, H).index_add_(0, TOKENS.gather.long(), dx.float()).bfloat16()
        half = lambda x: rounded(x).bfloat16() if fp8_weight_grad else x  # noqa: E731
        grouped_gemm_wgrad(half(dy), half(rows), ends, out=grad, accumulate=True)
        bias_grad.index_add_(0, experts, dy.float())
        found += [y, dx]
    return [*found, grad.view(ours.weight.shape), bias_grad.view(ours.bias.shape)]


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("format", COMPUTING)
@pytest.mark.parametrize("fp8_weight_grad", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_products_in_fp8(kind, format, fp8_weight_grad, deferred):
    ours, _ = make(kind, format, fp8_weight_grad=fp8_weight_grad)
    with strict():
        found = step(ours, deferred)
    expected = fp8_step(ours, fp8_weight_grad)
    assert_equal(found[:4], expected[:4], **ONE_ULP)
    assert_equal(found[4:], expected[4:], rtol=1e-5, atol=1e-4)  # sums of the same products in float32


@pytest.mark.parametrize("kind", MADE)
def test_a_frozen_weight_has_no_gradient_and_keeps_no_rows(kind):
    ours, _ = make(kind, "fp8_block")
    expected = step(ours)
    ours.weight.requires_grad_(False).grad, ours.bias.grad = None, None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = step(ours)
    assert ours.weight.grad is None
    assert_equal([*found[:4], found[-1]], [*expected[:4], expected[-1]])
    assert all(t.shape == (8, N) for t in kept)  # gate and up


@pytest.mark.parametrize("kind", MADE)
def test_what_is_kept_for_an_fp8_weight_gradient_is_one_byte_a_number(kind):
    ours, _ = make(kind, "mxfp8", fp8_weight_grad=True)
    ours.bias.requires_grad_(False)
    x, kept = torch.randn(8, H).bfloat16().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(x) if kind == "Linear" else ours(x, TOKENS.offs)
    sizes = {t.dtype: t.shape for t in kept if t.shape[-1] != N}
    assert sizes == {torch.float8_e4m3fn: (8, H), torch.float8_e8m0fnu: (8, H // 32)}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("format", COMPUTING)
def test_the_transposed_weight_is_made_once_and_follows_a_change_of_the_weight(kind, format):
    ours, _ = make(kind, format)
    values = ours.weight.dequantize()
    for sign in (1, -1):
        with mock.patch.object(quantized_tensor, "transpose_blocks", wraps=quantized_tensor.transpose_blocks) as turned:
            ours.weight.detach().copy_(sign * values)  # through another object that shares its bytes
            ours.weight.grad = ours.bias.grad = None
            found = step(ours, micro_batches=3)
        assert turned.call_count == (FORMATS[format].block[0] > 1)
    fresh, _ = make(kind, format)
    fresh.weight.detach().quantize_(-values)
    assert_equal(found, step(fresh, micro_batches=3))


def experts(format=None, parts=()):
    torch.manual_seed(0)
    module = Experts(E, H, N // 2).bfloat16()
    if format is not None:
        quantize_weights(module, format, [f"{name}.weight" for name in parts])
    return module


@pytest.mark.parametrize("format, quantized", [
    *((format, ("gate_up_proj", "down_proj")) for format in COMPUTING), ("fp8_block", ("gate_up_proj",)),
    ("fp8_block", ("down_proj",)),
])
def test_experts_have_the_bits_of_their_two_layers(format, quantized):
    """Where the second layer computes in FP8, the first quantizes the activation with what makes it."""
    module, weight = experts(format, quantized), torch.rand(8)
    x = torch.randn(5, H).bfloat16().requires_grad_()
    y = module(x, TOKENS, weight)
    apart = module.down_proj(module.gate_up_proj(x, TOKENS, weight), TOKENS.offs)
    assert torch.equal(y, apart) and not torch.equal(y, experts()(x, TOKENS, weight))
    dy = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(of, [x, *module.parameters()], dy) for of in (y, apart))):
        assert torch.equal(a, b)


def test_autocast_shapes_and_wide_products():
    ours, plain = make("Linear", "mxfp8")
    x = torch.randn(2, 3, H, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(x)
    assert y.dtype is torch.bfloat16 and torch.equal(y, ours(x.bfloat16()))
    y.sum().backward()
    assert x.grad.dtype is torch.float32
    assert torch.equal(ours(x[0, 0].bfloat16()), y[0, 0])
    wide = ours(x.bfloat16(), torch.float32)  # not in FP8
    torch.testing.assert_close(wide, F.linear(x.bfloat16().float(), plain.weight.float(), plain.bias.float()))
    wide.sum().backward()
    assert x.grad.dtype is torch.float32
    grouped, _ = make("GroupedSwiGLU", "mxfp8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped(x[0, :, :].repeat(2, 1)[:5], TOKENS)
    assert y.dtype is torch.bfloat16


def test_which_products_are_in_fp8():
    cases = itertools.product(FORMATS, [torch.float32, torch.bfloat16], ["auto", "fp8", "weight-only"])
    for format, dtype, chosen in cases:
        ours, _ = make("GroupedLinear", format, gemm_precision=chosen)
        computes = FORMATS[format].computes
        if chosen == "fp8" and not computes:
            with pytest.raises(ValueError, match=f"the format {format} of the weight has no FP8 GEMM; leave"):
                ours(torch.randn(5, H, dtype=dtype), TOKENS)
            continue
        with mock.patch.object(grouped_linear, "quantize_rows", wraps=quantize_rows) as quantizing:
            ours.bias = None
            ours(torch.randn(5, H, dtype=dtype), TOKENS)
        in_fp8 = chosen == "fp8" or (chosen == "auto" and computes and dtype is torch.bfloat16)
        assert quantizing.called == in_fp8
    with pytest.raises(ValueError, match="int8"):
        make("Linear", "mxfp8", gemm_precision="int8")[0](torch.randn(5, H))


@pytest.mark.parametrize("kind", MADE)
def test_compiled_it_is_the_same(kind):
    ours, _ = make(kind, "fp8_block")
    expected = step(ours)
    ours.weight.grad = ours.bias.grad = None
    compiled = torch.compile(lambda *inputs: ours(*inputs), backend="eager")
    assert_equal(step(ours, call=compiled), expected)


def test_a_layer_of_torch_works_on_what_the_weight_stands_for():
    layer = nn.Linear(H, N, dtype=torch.bfloat16)
    quantize_weights(layer, "nvfp4")
    x = torch.randn(4, H).bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, F.linear(x, layer.weight.dequantize().bfloat16(), layer.bias))
    assert type(layer.weight.grad) is torch.Tensor and x.grad is not None
    with strict(), pytest.raises(ValueError, match="would dequantize"):
        layer(x)


def test_second_derivatives_and_empty_batches():
    for kind in MADE:
        ours, _ = make(kind, "mxfp8")
        x, none = torch.randn(5, H).bfloat16().requires_grad_(), torch.zeros(0, H).bfloat16().requires_grad_()
        call = ours if kind == "Linear" else lambda x, ours=ours: ours(x, torch.full((E,), len(x), dtype=torch.int32))
        (dx,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()
        call(none).sum().backward()
        assert none.grad.shape == (0, H) and (ours.weight.grad == 0).all()
