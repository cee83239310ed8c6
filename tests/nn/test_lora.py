"""Adapters of single layers: what they compute, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.lora import (
    AdapterForm,
    GroupedAdapter,
    LinearAdapter,
    adapt_matrix,
    adapter_places,
    fill_adapters,
    freeze_all_but_adapters,
    merge_adapters,
)
from dualpipe.quantized.quantize_model import quantize_weights

E, H, N, R, M = 3, 16, 32, 2, 10
FORM = AdapterForm(R, 0.5)
ENDS = torch.tensor([4, 4, M], dtype=torch.int32)  # the second expert gets no row


def randomized(module):
    """Return a module whose adapters' factors are all random, with the rest frozen."""
    freeze_all_but_adapters(module)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def linear(dtype=torch.float64):
    layer = Linear(H, N, dtype=dtype)
    layer.adapter = LinearAdapter(H, N, FORM, dtype=dtype)
    return randomized(layer)


def experts(kind, **options):
    layer = kind(E, H, N if kind is GroupedLinear else N // 2, True, dtype=torch.float64, **options)
    layer.adapter = GroupedAdapter(E, H, N, FORM, dtype=torch.float64)
    return randomized(layer)


def rows(seed=0):
    return torch.randn(M, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(layer, x, *args):
    """Return the result, and the gradients of the input and of the trained parameters."""
    y = layer(x, *args)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return y.detach(), *torch.autograd.grad(
        (y * weights).sum(), [x, *(p for p in layer.parameters() if p.requires_grad)])


CASES = {"linear": (linear, ()), "experts": (lambda: experts(GroupedLinear), (ENDS,)),
         "SwiGLU": (lambda: experts(GroupedSwiGLU), (ENDS,)),
         "clamped": (lambda: experts(GroupedSwiGLU, clamped=True), (ENDS,))}


@pytest.mark.parametrize("case", CASES)
def test_an_adapted_layer_computes_what_its_merged_weight_does(case):
    make, args = CASES[case]
    torch.manual_seed(0)
    layer = make()
    x = rows()
    y, dx, *_ = train(layer, x, *args)
    merge_adapters([layer])
    assert not list(adapter_places(layer))
    merged = layer(x, *args)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    assert torch.allclose(merged, y, rtol=1e-12)
    assert torch.allclose(torch.autograd.grad((merged * weights).sum(), x)[0], dx, rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_factors_wait_in_the_store_and_are_those_of_autograd(case):
    make, args = CASES[case]
    torch.manual_seed(0)
    layer = make()
    _, _, *expected = train(layer, rows(), *args)
    store = WeightGradStore()
    y = layer(rows(), *args)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    with store.activate(), store.accumulate(), store.defer("I"):
        (y * weights).sum().backward()
    trained = [p for p in layer.parameters() if p.requires_grad]
    assert store.pending() == {"I": 2} and all(p.grad is None for p in trained)
    store.run("I")
    assert all(torch.allclose(p.grad, grad, rtol=1e-12) for p, grad in zip(trained, expected, strict=True))
    assert all(p.grad is None for p in layer.parameters() if not p.requires_grad)


class Scores(nn.Module):
    """A router as transformers writes them: a matrix that its forward reads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N, H, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.linear(x, self.weight).softmax(-1)


def test_a_matrix_of_another_module_is_adapted_in_its_own_forward():
    torch.manual_seed(0)
    module = Scores()
    adapt_matrix(module, "weight", FORM)
    randomized(module)
    x = rows()
    y, _, da, db = train(module, x)
    assert isinstance(module, Scores) and isinstance(module.weight, nn.Parameter)
    assert da.count_nonzero() and db.count_nonzero()
    merge_adapters([module])
    assert torch.allclose(module(x), y, rtol=1e-12) and "adapter" not in module._modules


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize("kind", ["linear", "SwiGLU"])
def test_the_base_may_be_quantized(format, kind):
    """The adapter is added to what the frozen blocks give, and the blocks stay as they are."""
    torch.manual_seed(0)
    layer = nn.Module()
    if kind == "linear":
        layer.inner = Linear(128, 128, bias=False)
        layer.inner.adapter = LinearAdapter(128, 128, FORM)
        args = ()
    else:
        layer.inner = GroupedSwiGLU(E, 128, 64)
        layer.inner.adapter = GroupedAdapter(E, 128, 128, FORM)
        args = (ENDS,)
    randomized(layer)
    quantize_weights(layer, format)
    x = torch.randn(M, 128, requires_grad=True)
    dequantized = nn.Module()
    dequantized.inner = type(layer.inner).__new__(type(layer.inner))
    nn.Module.__init__(dequantized.inner)
    dequantized.inner.__dict__.update({k: v for k, v in layer.inner.__dict__.items() if not k.startswith("_")})
    dequantized.inner.weight = nn.Parameter(layer.inner.weight.detach().dequantize(), requires_grad=False)
    dequantized.inner.bias = None
    dequantized.inner.adapter = layer.inner.adapter
    expected = train(dequantized.inner, x, *args)
    found = train(layer.inner, x, *args)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, expected, strict=True))
    assert all("lora_" in name for name, p in layer.named_parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="stored in blocks with scales"):
        merge_adapters([layer])


def test_initial_values_depend_on_names_and_the_seed_alone():
    first, second = linear(), linear()
    fill_adapters(nn.ModuleDict({"a": first}), seed=3)
    fill_adapters(nn.ModuleDict({"a": second, "b": linear()}), seed=3)
    assert torch.equal(first.adapter.lora_A.weight, second.adapter.lora_A.weight)
    assert not first.adapter.lora_B.weight.count_nonzero(), "an adapter begins without an effect"
    assert first.adapter.lora_A.weight.abs().max() <= H**-0.5 and first.adapter.lora_A.weight.std() > 0.1
    fill_adapters(nn.ModuleDict({"a": second}), seed=4)
    assert not torch.equal(first.adapter.lora_A.weight, second.adapter.lora_A.weight)


def test_experts_have_no_dropout():
    with pytest.raises(ValueError, match=r"dropout 0\.1 of an adapter of experts"):
        GroupedAdapter(E, H, N, AdapterForm(R, 1.0, dropout=0.1))
