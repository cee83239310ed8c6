"""Benchmark a whole expert layer (sort, two GEMMs, activation, combine) against dense GEMMs.

For three models, in bfloat16, all experts on one rank. `fused` computes the activation in the first GEMM
(`grouped_gemm_swiglu`), `unfused` in a separate kernel; both gather the rows in the first GEMM. The backward is the
same for both and adds the weight gradients into float32. The rival is PyTorch's operations around `F.grouped_mm`, with
autograd and bfloat16 weight gradients. Each way is checked before it is timed, against one GEMM per expert in float32.
`of dense` is the time of dense GEMMs with as many operations as the layer, over the layer's time.

    python benchmarks/bench_expert_layer.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]

Dimension letters: T tokens, K experts per token, M = T * K rows, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_memory_bound import ALPHA, LIMIT, eager_swiglu, torch_sort
from expert_shapes import MODELS, ROUTINGS, SIZES, TOKENS, Model, choices, every
from gpu_bench import Bench, Goal, Machine, Row, check_close, dense_ms, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import (
    SortedTokens,
    clamped_swiglu,
    combine_tokens,
    dispatch_tokens,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad,
    sort_tokens,
    swiglu,
)
from dualpipe.nn.grouped_linear import grouped_bias_grad as bias_grad  # as a training step does

TOLERANCE = {"result": 1e-2, "gradient": 2e-2}  # four successive roundings; six


@dataclass(frozen=True)
class Layer:
    """Inputs and weights of one expert layer, all bfloat16; biases and clamps as in gpt-oss, or neither."""

    experts_TK: Tensor
    x_TH: Tensor
    weights_TK: Tensor
    up_E2IH: Tensor
    down_EHI: Tensor
    up_bias_E2I: Tensor | None
    down_bias_EH: Tensor | None
    d_out_TH: Tensor

    @property
    def clamped(self) -> bool:
        return self.up_bias_E2I is not None

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        tensors = (self.x_TH, self.weights_TK, self.up_E2IH, self.down_EHI, self.up_bias_E2I, self.down_bias_EH)
        return [t for t in tensors if t is not None]


def make_layer(model: Model, tokens: int, skewed: bool, device: torch.device) -> Layer:
    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * scale

    e, h, i = model.experts, model.hidden, model.intermediate
    return Layer(
        experts_TK=choices(tokens, e, model.top_k, skewed, device),
        x_TH=randn(tokens, h),
        weights_TK=torch.rand(tokens, model.top_k, device=device).softmax(-1).bfloat16(),
        up_E2IH=randn(e, 2 * i, h, scale=h**-0.5),
        down_EHI=randn(e, h, i, scale=i**-0.5),
        up_bias_E2I=randn(e, 2 * i) if model.clamped else None,
        down_bias_EH=randn(e, h) if model.clamped else None,
        d_out_TH=randn(tokens, h),
    )


# ---------------------------------------------------------------------------------------------------------------- ours


class Saved(NamedTuple):
    """Tensors that the backward needs."""

    tokens: SortedTokens
    weight_M: Tensor | None  # routing weights, if the activation applied them
    gate_up_M2I: Tensor
    h_MI: Tensor
    y_MH: Tensor


def forward(layer: Layer, fused: bool) -> tuple[Tensor, Saved]:
    """Return (out (T, H), saved). The activation applies the routing weights, or the combine if a bias follows."""
    tokens = sort_tokens(layer.experts_TK, layer.up_E2IH.shape[0])
    weight_M = None if layer.clamped else layer.weights_TK.flatten().index_select(0, tokens.order)
    h_MI, gate_up_M2I = (first_fused if fused else first_unfused)(layer, tokens, weight_M)
    y_MH = grouped_gemm(h_MI, layer.down_EHI, tokens.offs, bias=layer.down_bias_EH)
    weights_TK = layer.weights_TK if layer.clamped else None
    out_TH = combine_tokens(y_MH, weights_TK, tokens, top_k=layer.weights_TK.shape[1])
    return out_TH, Saved(tokens, weight_M, gate_up_M2I, h_MI, y_MH)


def first_fused(layer: Layer, tokens: SortedTokens, weight_M: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (h (M, I), gate_up (M, 2I)) from one fused kernel."""
    operands = {"bias": layer.up_bias_E2I, "gather": tokens.gather, "weight": weight_M}
    return grouped_gemm_swiglu(layer.x_TH, layer.up_E2IH, tokens.offs, clamped=layer.clamped, **operands)


def first_unfused(layer: Layer, tokens: SortedTokens, weight_M: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (h (M, I), gate_up (M, 2I)) like `first_fused`, from two kernels."""
    gate_up_M2I = grouped_gemm(layer.x_TH, layer.up_E2IH, tokens.offs, bias=layer.up_bias_E2I, gather=tokens.gather)
    return (clamped_swiglu if layer.clamped else swiglu)(gate_up_M2I, weight_M), gate_up_M2I


class Accumulators(NamedTuple):
    """float32 buffers that accumulate the weight gradients of a step's micro-batches."""

    up_E2IH: Tensor
    down_EHI: Tensor


def make_accumulators(layer: Layer) -> Accumulators:
    return Accumulators(*(torch.zeros_like(w, dtype=torch.float32) for w in (layer.up_E2IH, layer.down_EHI)))


def backward(layer: Layer, saved: Saved, grads: Accumulators) -> list[Tensor]:
    """Return the gradients in the order of `layer.leaves`."""
    tokens, offs, top_k = saved.tokens, saved.tokens.offs, layer.weights_TK.shape[1]
    if layer.clamped:
        dy_MH, d_weights_TK = torch.ops.dualpipe.combine_tokens_backward(
            layer.d_out_TH, saved.y_MH, layer.weights_TK, tokens.inverse, offs
        )
    else:
        dy_MH = dispatch_tokens(layer.d_out_TH, tokens, top_k)
    dh_MI = grouped_gemm_dgrad(dy_MH, layer.down_EHI, offs)
    form = (layer.clamped, ALPHA if layer.clamped else 1.0, LIMIT)
    d_gate_up, d_weight_M = torch.ops.dualpipe.swiglu_backward(dh_MI, saved.gate_up_M2I, saved.weight_M, *form)
    if not layer.clamped:
        d_weights_TK = d_weight_M.index_select(0, tokens.inverse).view_as(layer.weights_TK)
    dx_TH = combine_tokens(grouped_gemm_dgrad(d_gate_up, layer.up_E2IH, offs), None, tokens, top_k=top_k)
    grouped_gemm_wgrad(dy_MH, saved.h_MI, offs, out=grads.down_EHI, accumulate=True)
    grouped_gemm_wgrad(d_gate_up, layer.x_TH, offs, out=grads.up_E2IH, accumulate=True, gather=tokens.gather)
    biases = []
    if layer.clamped:
        biases = [bias_grad(layer.up_bias_E2I, d_gate_up, offs), bias_grad(layer.down_bias_EH, dy_MH, offs)]
    return [dx_TH, d_weights_TK, *grads, *biases]


def both(layer: Layer, fused: bool, grads: Accumulators) -> list[Tensor]:
    _, saved = forward(layer, fused)
    return backward(layer, saved, grads)


# ----------------------------------------------------------------------------------------------- rival and reference


def rival(layer: Layer, leaves: list[Tensor]) -> Tensor:
    """Run the layer by PyTorch's operations around `F.grouped_mm`."""
    x_TH, weights_TK, up_E2IH, down_EHI, *biases = leaves
    order, inverse, offs = torch_sort(layer.experts_TK, up_E2IH.shape[0])
    expert_M = layer.experts_TK.flatten()[order]
    x_MH = x_TH.index_select(0, order // weights_TK.shape[1])
    gate_up_M2I = F.grouped_mm(x_MH, up_E2IH.transpose(1, 2), offs=offs)
    if biases:
        gate_up_M2I = gate_up_M2I + biases[0].index_select(0, expert_M)
    y_MH = F.grouped_mm(eager_swiglu(gate_up_M2I, None, layer.clamped), down_EHI.transpose(1, 2), offs=offs)
    if biases:
        y_MH = y_MH + biases[1].index_select(0, expert_M)
    return (y_MH.index_select(0, inverse).unflatten(0, weights_TK.shape) * weights_TK.unsqueeze(-1)).sum(1)


def rival_both(layer: Layer) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in layer.leaves]
    return torch.autograd.grad(rival(layer, leaves), leaves, layer.d_out_TH)


def reference(layer: Layer) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (result, gradients in the order of `layer.leaves`) in float32, one expert after the other."""
    leaves = [t.detach().float().requires_grad_() for t in layer.leaves]
    x_TH, weights_TK, up_E2IH, down_EHI, *biases = leaves
    out_TH = torch.zeros_like(x_TH)
    for e in range(up_E2IH.shape[0]):
        token, slot = (layer.experts_TK == e).nonzero(as_tuple=True)
        gate_up = F.linear(x_TH[token], up_E2IH[e], biases[0][e] if biases else None)
        y = F.linear(eager_swiglu(gate_up, None, layer.clamped), down_EHI[e], biases[1][e] if biases else None)
        out_TH = out_TH.index_add(0, token, y * weights_TK[token, slot, None])
    return out_TH.detach(), torch.autograd.grad(out_TH, leaves, layer.d_out_TH.float())


def check(layer: Layer) -> None:
    """Check the result and every gradient of fused, unfused and the rival."""
    expected, expected_grads = reference(layer)
    for way, fused in (("fused", True), ("unfused", False)):
        grads = make_accumulators(layer)
        with poisoned():
            out, saved = forward(layer, fused)
            actual_grads = backward(layer, saved, grads)
        compare(way, out, actual_grads, expected, expected_grads)
    grads = rival_both(layer)[:4]  # without the bias gradients, which are summed in bfloat16
    compare("F.grouped_mm", rival(layer, layer.leaves), grads, expected, expected_grads[:4])


def compare(way: str, out: Tensor, grads: Any, expected: Tensor, expected_grads: Any) -> None:
    check_close(f"{way}: result", out, expected, TOLERANCE["result"])
    for number, (actual, wanted) in enumerate(zip(grads, expected_grads, strict=True)):
        check_close(f"{way}: gradient {number}", actual, wanted, TOLERANCE["gradient"])


# ----------------------------------------------------------------------------------------------------------- measuring


def dense_shapes(model: Model, tokens: int) -> dict[str, list[tuple[int, int, int]]]:
    """Return the (m, n, k) of each direction's GEMMs; each GEMM of the forward has two in the backward."""
    m, h, i = tokens * model.top_k, model.hidden, model.intermediate
    forward = [(m, 2 * i, h), (m, h, i)]
    gradients = [(m, h, 2 * i), (2 * i, h, m), (m, i, h), (h, i, m)]
    return {"forward": forward, "forward and backward": forward + gradients}


def ways(layer: Layer) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, by direction, the runs of fused, unfused and the rival."""
    grads = make_accumulators(layer)
    return {
        "forward": {
            "fused": lambda: forward(layer, True),
            "unfused": lambda: forward(layer, False),
            "grouped_mm": lambda: rival(layer, layer.leaves),
        },
        "forward and backward": {
            "fused": lambda: both(layer, True, grads),
            "unfused": lambda: both(layer, False, grads),
            "grouped_mm": lambda: rival_both(layer),
        },
    }


def measure(machine: Machine, model: str, tokens: int, routing: str) -> Iterator[Row]:
    """Yield the rows of a layer: forward, and forward with backward."""
    layer = make_layer(SIZES[model], tokens, routing == "skewed", machine.device)
    check(layer)
    shapes = dense_shapes(SIZES[model], tokens)
    for direction, runs in ways(layer).items():
        ms = {way: time_ms(run) for way, run in runs.items()}
        dense = dense_ms(shapes[direction], machine.device)
        flops = sum(2 * math.prod(shape) for shape in shapes[direction])
        for way in ("fused", "unfused"):
            yield {"direction": direction, "way": way} | figures(ms, way, flops, dense)


def figures(ms: dict[str, float], way: str, flops: int, dense: float) -> Row:
    rates = {"ms": ms[way], "TFLOP/s": flops / ms[way] / 1e9, "of dense": dense / ms[way]}
    return rates | {"x grouped_mm": ms["grouped_mm"] / ms[way], "x unfused": ms["unfused"] / ms[way]}


BENCH = Bench(
    doc=__doc__,
    name="expert_layer",
    settings=every(model=MODELS, tokens=TOKENS, routing=ROUTINGS),
    quick={"tokens": 16384, "routing": "skewed"},
    measure=measure,
    goals=(
        Goal("forward, fused: 70% of dense", "of dense", 0.7,
             lambda row: (row["direction"], row["way"]) == ("forward", "fused")),
        Goal("fused not slower than unfused", "x unfused", 1.0),
        Goal("never slower than PyTorch's operations around F.grouped_mm", "x grouped_mm", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
