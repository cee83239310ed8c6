"""Benchmark the kernels between a layer's GEMMs (norm, RoPE, top-k) against the copy bandwidth.

Forward and backward in bfloat16: the norm of the hidden state with the residual added before it, the norms and RoPE of
32 query heads and 4 key heads of 128 dimensions, and the router's top-k choice among a model's experts. Each result is
checked before it is timed. `copy` is the fraction of the copy bandwidth of the same run, counting every byte that must
be read or written once. `eager` is the time of PyTorch's operations over ours.

    python benchmarks/bench_norm.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from expert_shapes import MODELS, SIZES, TOKENS, every
from gpu_bench import Bench, Goal, Machine, Row, check_close, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import rms_norm, rms_norm_backward, rotate_heads, rotate_heads_backward
from dualpipe.kernels.norm import rms_norm_reference
from dualpipe.kernels.rotary import rotate_reference
from dualpipe.kernels.top_k import softmax_top_k, softmax_top_k_backward, softmax_top_k_reference

EPS = 1e-6
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
TOLERANCE = 1e-2  # PyTorch rounds after each operation
Ways = tuple[Callable[[], Any], Callable[[], Any], Callable[..., Any], list[Tensor], list[Tensor]]
"""our forward, our backward, the same as PyTorch operations on leaves, the leaves, gradients of its first results"""


def norm(model: str, tokens: int, random: Callable[..., Tensor]) -> Ways:
    width = SIZES[model].hidden
    x, residual, dy, d_sum = (random(tokens, width) for _ in range(4))
    weight = random(width)
    _, total, scale = rms_norm(x, weight, EPS, residual)
    return (
        lambda: rms_norm(x, weight, EPS, residual)[:2],
        lambda: rms_norm_backward(dy, d_sum, total, scale, weight)[:1],
        lambda x, weight, residual: rms_norm_reference(x, weight, EPS, residual)[:2],
        [x, weight, residual], [dy, d_sum],
    )


def rotary(model: str, tokens: int, random: Callable[..., Tensor]) -> Ways:
    q, dq = (random(1, tokens, HEADS, HEAD_DIM) for _ in range(2))
    k, dk = (random(1, tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
    weight, angles = random(HEAD_DIM), random(tokens, HEAD_DIM // 2).float().repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    turned = rotate_heads(q, k, cos, sin, weight, weight, EPS)
    return (
        lambda: rotate_heads(q, k, cos, sin, weight, weight, EPS)[:2],
        lambda: rotate_heads_backward(dq, dk, q, k, cos, sin, weight, weight, *turned[2:])[:2],
        lambda q, k, weight: [rotate_reference(x, cos, sin, weight, EPS, False)[0] for x in (q, k)],
        [q, k, weight], [dq, dk],
    )


def top_k(model: str, tokens: int, random: Callable[..., Tensor]) -> Ways:
    experts, chosen = SIZES[model].experts, SIZES[model].top_k
    logits, d_weights = random(tokens, experts).argsort(-1).bfloat16() / 16, random(tokens, chosen)  # no ties
    _, indices, probs = softmax_top_k(logits, chosen, True)
    return (
        lambda: softmax_top_k(logits, chosen, True)[:1],
        lambda: [softmax_top_k_backward(d_weights, None, indices, probs, True)],
        lambda logits: softmax_top_k_reference(logits, chosen, True, 1.0)[:1],
        [logits], [d_weights],
    )


def measure(machine: Machine, model: str, tokens: int, kernel: str) -> Iterator[Row]:
    """Yield the rows of one kernel: forward and backward."""
    forward, backward, plain, operands, grads = {"norm": norm, "rotary": rotary, "top_k": top_k}[kernel](
        model, tokens, lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=machine.device))
    leaves = [t.detach().requires_grad_() for t in operands]
    results = list(plain(*leaves))
    with poisoned():
        found, back = list(forward()), list(backward())
    for actual, expected in zip(found, results):
        check_close("forward", actual, expected.detach(), TOLERANCE)
    wanted = torch.autograd.grad(results, leaves, grads, retain_graph=True)
    for actual, expected in zip(back, wanted):
        check_close("backward", actual, expected, TOLERANCE)
    eager = {
        "forward": (forward, lambda: plain(*leaves), [*operands, *found]),
        "backward": (backward, lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True),
                     [*operands[: len(back)], *grads, *back]),
    }
    for direction, (ours, theirs, moved) in eager.items():
        ours_ms, eager_ms = time_ms(ours), time_ms(theirs)
        rate = sum(t.nbytes for t in moved) / ours_ms / 1e6
        yield {"direction": direction, "us": 1000 * ours_ms, "GB/s": rate, "copy": rate / machine.copy_gb_per_s,
               "eager": eager_ms / ours_ms}


BENCH = Bench(
    doc=__doc__,
    name="norm",
    settings=every(model=MODELS, tokens=TOKENS, kernel=("norm", "rotary", "top_k")),
    quick={"tokens": 4096, "model": "qwen3-30b-a3b"},
    measure=measure,
    goals=(
        Goal("norm and rotary from 16384 tokens on, 70% of copy bandwidth", "copy", 0.7,
             lambda row: row["tokens"] >= 16384 and row["kernel"] != "top_k"),
        Goal("never slower than PyTorch's operations", "eager", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
