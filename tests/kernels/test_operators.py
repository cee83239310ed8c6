"""What holds for every operator: its registration, one graph under a compiler, the same bits on every run, no waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dualpipe.kernels import (
    WgradOperands,
    clamped_swiglu,
    combine_tokens,
    dispatch_tokens,
    grouped_gemm,
    grouped_gemm_dequantize,
    grouped_gemm_dgrad,
    grouped_gemm_fp8,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_merged,
    sort_tokens,
    swiglu,
)
from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.cross_entropy import cross_entropy
from dualpipe.kernels.formats import FORMATS
from dualpipe.kernels.norm import rms_norm, rms_norm_backward
from dualpipe.kernels.quantize import (
    dequantize,
    dequantize_rows,
    matrix_amax,
    quantize,
    quantize_rows,
    swiglu_quantize,
    transpose_blocks,
)
from dualpipe.kernels.rotary import rotate_heads, rotate_heads_backward
from dualpipe.kernels.routing import find_destinations
from dualpipe.kernels.top_k import softmax_top_k, softmax_top_k_backward
from row_kernels import no_synchronisation, poisoned_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned_memory")
OF_OPERATORS = pytest.mark.skipif(INTERPRET, reason="of the operator, and not of its kernel")


class Case(NamedTuple):
    """A function of tensors, their shapes or, of integers, their values, and those that get a gradient."""

    run: Callable[..., Any]
    operands: dict[str, Any]
    trained: tuple[str, ...] = ()
    is_differentiable_once: bool = False


def norm(x, residual, weight, dy, d_sum):
    y, total, scale = rms_norm(x, weight, 1e-3, residual)
    plain, _, _ = rms_norm(x, weight, 1e-3)
    gradients = (rms_norm_backward(dy, added, total, scale, weight) for added in (d_sum, None))
    return y, total, plain, *gradients


def rotary(q, k, q_weight, k_weight, dq, dk, cos, sin):
    normed = rotate_heads(q, k, cos, sin, q_weight, k_weight, 1e-3, True)
    gradients = rotate_heads_backward(dq, dk, q, k, cos, sin, q_weight, k_weight, *normed[2:], True)
    turned = rotate_heads(q, k, cos, sin)
    return normed, gradients, turned, rotate_heads_backward(dq, dk, None, None, cos, sin, None, None, *turned[2:])


def router(logits, d_weights, d_probs):
    weights, experts, probs = softmax_top_k(logits, 2, True, 2.5)
    gradients = [softmax_top_k_backward(d_weights, d, experts, probs, True, 1.0) for d in (None, d_probs)]
    return weights, experts, probs, *gradients


def weighted_rows(x, weights, choices):
    tokens = sort_tokens(choices, 4)
    return *tokens, combine_tokens(dispatch_tokens(x, tokens, 2) * 3, weights, tokens)


def rows(x, choices):
    tokens = sort_tokens(choices, 4)
    return combine_tokens(dispatch_tokens(x, tokens, 2), None, tokens, top_k=2)


def grouped(x, dy, w, bias, offs, gather):
    out = torch.ones_like(w, dtype=torch.float32)
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=True)
    gathered = torch.zeros_like(out)
    grouped_gemm_wgrad(dy, x, offs, out=gathered, accumulate=False, gather=gather)
    y = grouped_gemm(x * 2, w, offs, bias=bias, gather=gather)
    return y + 1, grouped_gemm(x, w, offs), grouped_gemm_dgrad(dy, w, offs), out, gathered


def merged(x, dy, w, offs, gather):
    out = torch.ones_like(w, dtype=torch.float32)
    grouped_gemm_wgrad_merged([WgradOperands(dy, x, offs, gather)] * 3, out=out, accumulate=True)
    return out


def fused(x, w, bias, weight, offs, gather):
    plain = grouped_gemm_swiglu(x * 2, w, offs)
    return plain, grouped_gemm_swiglu(x, w, offs, bias=bias, gather=gather, weight=weight, clamped=True)


def quantized(x, w, bias, offs, gather):
    format = FORMATS["mxfp8"]
    data = quantize(w, format)
    y = grouped_gemm_dequantize(x * 2, data, format, w.shape, offs, bias=bias, gather=gather)
    return y + grouped_gemm_fp8(quantize_rows(x, 32), data, format, w.shape, offs, out_dtype=x.dtype)


def formats(x):
    found = []
    for format in FORMATS.values():
        data = quantize(x, format)
        found += [data, dequantize(data, format, *x.shape[-2:], torch.float16), matrix_amax(x, format)]
        if format.block[0] == format.block[1]:
            found.append(transpose_blocks(data, format, *x.shape[-2:]))
    return found


def quantized_rows(x, weight):
    h, of_activation = swiglu_quantize(x, weight, block=32)
    return h, dequantize_rows(quantize_rows(x, 128)), dequantize_rows(of_activation, torch.float16)


LABELS = torch.tensor([3, -100, 0, 5, 39])
OFFS = torch.tensor([70, 70, 109], dtype=torch.int32)  # more than a tile, none, and a rest
GATHER = torch.arange(109) * 7 % 109
CHOICES = torch.tensor([[0, 3], [2, 0], [1, 2], [3, 1], [2, 1]])
GEMM = dict(x=(109, 72), dy=(109, 136), w=(3, 136, 72), offs=OFFS, gather=GATHER)
LOGITS = dict(logits=(5, 40), labels=LABELS)
GATED = dict(gate_up=(70, 40), weight=(70,))
CASES = {
    "cross_entropy": Case(cross_entropy, LOGITS, ("logits",), True),
    "cross_entropy in place": Case(
        lambda logits, labels: cross_entropy(logits * 1, labels, in_place=True, denominator=3), LOGITS, ("logits",),
        True),
    "cross_entropy sum": Case(lambda logits, labels: cross_entropy(logits, labels, reduction="sum"), LOGITS),
    "rms_norm": Case(norm, dict(x=(35, 130), residual=(35, 130), weight=(130,), dy=(35, 130), d_sum=(35, 130))),
    "rotate_heads": Case(rotary, dict(
        q=(2, 70, 4, 16), k=(2, 70, 2, 16), q_weight=(16,), k_weight=(16,), dq=(2, 70, 4, 16), dk=(2, 70, 2, 16),
        cos=(70, 16), sin=(70, 16))),
    "swiglu": Case(swiglu, GATED, ("gate_up", "weight"), True),
    "swiglu alone": Case(swiglu, dict(gate_up=(70, 40))),
    "clamped_swiglu": Case(clamped_swiglu, GATED, ("gate_up", "weight"), True),
    "softmax_top_k": Case(router, dict(logits=(70, 12), d_weights=(70, 2), d_probs=(70, 12))),
    "rows": Case(rows, dict(x=(5, 20), choices=CHOICES), ("x",)),
    "weighted rows": Case(weighted_rows, dict(x=(5, 20), weights=(5, 2), choices=CHOICES), ("x", "weights"), True),
    "find_destinations": Case(
        lambda weights, choices: find_destinations(choices, weights * 2, 2, 2), dict(weights=(5, 2), choices=CHOICES),
        ("weights",), True),
    "grouped_gemm": Case(grouped, GEMM | dict(bias=(3, 136))),
    "grouped_gemm_wgrad_merged": Case(merged, GEMM),
    "grouped_gemm_swiglu": Case(fused, dict(
        x=(109, 72), w=(3, 136, 72), bias=(3, 136), weight=(109,), offs=OFFS, gather=GATHER)),
    "grouped_gemm_quantized": Case(quantized, dict(
        x=(109, 48), w=(3, 24, 48), bias=(3, 24), offs=OFFS, gather=GATHER)),
    "quantize": Case(formats, dict(x=(2, 130, 64))),
    "quantize_rows": Case(quantized_rows, dict(x=(13, 64), weight=(13,))),
}
NOT_WATCHED = ("find_destinations", "grouped_gemm_wgrad_merged", "grouped_gemm_quantized", "quantize", "quantize_rows")
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in case.operands.items():
        tensor = shape if isinstance(shape, Tensor) else torch.randn(shape, generator=generator).to(dtype)
        made[name] = tensor.pin_memory() if device.type == "cuda" else tensor.clone()
    return {name: tensor.to(device, non_blocking=True) for name, tensor in made.items()}


def results(case: Case, operands: dict[str, Tensor], run: Callable[..., Any] | None = None,
            create_graph: bool = False) -> list[Tensor]:
    """Return what a case returns, and the gradients of the sum of its squares."""
    leaves = {name: operands[name].detach().requires_grad_() for name in case.trained}
    found = [t for t in tree_leaves((run or case.run)(**operands | leaves)) if t is not None]
    if not leaves:
        return found
    loss = sum(t.square().sum() for t in found if t.requires_grad)
    return found + list(torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


class Calls(TorchDispatchMode):
    """Operators of the library that run, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "dualpipe":
            assert not kwargs
            self.made.append((function, tree_map_only(Tensor, lambda t: t.detach().clone(), args)))
        return function(*args, **kwargs or {})


def calls_of(case: Case, device: torch.device) -> list[tuple[Any, tuple]]:
    operands = make(case, torch.float32, device)
    with Calls() as calls:
        results(case, operands)
    return calls.made


@OF_OPERATORS
@EVERY
def test_operators_are_registered_soundly(case, device):
    for function, args in calls_of(case, device):
        tensors = [t for t in tree_leaves((args, function(*args))) if isinstance(t, Tensor)]
        has_float8 = any("float8" in str(t.dtype) for t in tensors)  # which torch does not compare, as other checks do
        checks = dict(test_utils=("test_faketensor",)) if has_float8 else {}
        torch.library.opcheck(function, args, **checks)


@OF_OPERATORS
def test_every_registered_operator_has_a_case():
    called = {function.name() for case in CASES.values() for function, _ in calls_of(case, torch.device("cpu"))}
    assert called == {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dualpipe::")}


@OF_OPERATORS
@EVERY
def test_compiles_in_one_graph(case, device):
    operands = make(case, torch.float16, device)
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    for a, b in zip(results(case, operands, compiled), results(case, operands), strict=True):
        assert torch.equal(bits(a), bits(b))


@EVERY
def test_same_bits_on_every_run(case, device):
    first, second = (results(case, make(case, torch.float16, device)) for _ in range(2))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


@OF_OPERATORS
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()
                                  if case.is_differentiable_once])
def test_second_derivative_is_refused(case, device):
    operands = make(case, torch.float32, device)
    with pytest.raises(NotImplementedError, match="once only"):
        gradients = results(case, operands, create_graph=True)[-len(case.trained):]
        sum(gradient.sum() for gradient in gradients).backward()


@pytest.mark.gpu
@pytest.mark.usefixtures("no_synchronisation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_WATCHED])
def test_nothing_is_read_back(name, dtype):
    results(CASES[name], make(CASES[name], dtype, torch.device("cuda")))
