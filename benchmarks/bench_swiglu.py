"""Benchmark the gated activations against the copy bandwidth and PyTorch's operations.

Forward and backward in bfloat16, with and without the routing weight, for the expert shapes of three models with all
tokens of a micro-batch on one rank or an eighth of them. Each result is checked before it is timed. `copy` is the
fraction of the copy bandwidth of the same run, counting every byte that must be read or written once. `eager` is the
time of PyTorch's operations over ours, `compiled` the same under torch.compile.

    python benchmarks/bench_swiglu.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from expert_shapes import MODELS, SIZES, TOKENS, every
from gpu_bench import Bench, Goal, Machine, Row, check_close, compiled, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import clamped_swiglu, swiglu

OPS = import_module("dualpipe.kernels.swiglu")  # the function of that name hides the module
ALPHA, LIMIT = 1.702, 7.0
TOLERANCE = 5e-3  # ours rounds the result once, PyTorch after every operation
COLUMNS = {"forward": 3, "backward": 5}  # gate, up, h; gate, up, dh, d gate, d up


def eager(gate_up: Tensor, weight: Tensor | None, clamped: bool) -> Tensor:
    if clamped:
        gate, up = gate_up[:, ::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
        h = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    else:
        gate, up = gate_up.chunk(2, dim=1)
        h = F.silu(gate) * up
    return h if weight is None else h * weight[:, None]


def backward_of(function: Callable[..., Tensor], operands: list[Tensor], dh: Tensor) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_() for t in operands]
    h = function(*leaves)
    return lambda: torch.autograd.grad(h, leaves, dh, retain_graph=True)


def check(ways: dict[str, list[Callable[[], Any]]], operands: list[Tensor], dh: Tensor, clamped: bool) -> None:
    gate_up, weight = operands[0].float(), operands[1] if len(operands) > 1 else None
    form = (clamped, ALPHA if clamped else 1.0, LIMIT)
    with poisoned():
        h, grads = ways["forward"][0](), ways["backward"][0]()
    check_close("forward", h, OPS.swiglu_reference(gate_up, weight, *form), TOLERANCE)
    for result, expected in zip(grads, OPS.swiglu_backward_reference(dh.float(), gate_up, weight, *form)):
        check_close("backward", result, expected, TOLERANCE)


def measure(machine: Machine, model: str, tokens: int, weighted: bool) -> Iterator[Row]:
    """Yield the rows of one activation: forward and backward."""
    clamped, width, rows = SIZES[model].clamped, SIZES[model].intermediate, tokens * SIZES[model].top_k
    gate_up = 3 * torch.randn(rows, 2 * width, dtype=torch.bfloat16, device=machine.device)
    dh = torch.randn(rows, width, dtype=torch.bfloat16, device=machine.device)
    weight = [torch.rand(rows, dtype=torch.bfloat16, device=machine.device)] if weighted else []

    def plain(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
        return eager(gate_up, weight, clamped)

    functions, operands = (clamped_swiglu if clamped else swiglu, plain, compiled(plain)), [gate_up, *weight]
    ways = {
        "forward": [lambda f=f: f(*operands) for f in functions],
        "backward": [backward_of(f, operands, dh) for f in functions],
    }
    check(ways, operands, dh, clamped)
    for direction, columns in COLUMNS.items():
        ours_ms, eager_ms, compiled_ms = (time_ms(fn) for fn in ways[direction])
        rate = columns * 2 * dh.numel() / ours_ms / 1e6
        figures = {"us": 1000 * ours_ms, "GB/s": rate, "copy": rate / machine.copy_gb_per_s}
        yield {"direction": direction, **figures, "eager": eager_ms / ours_ms, "compiled": compiled_ms / ours_ms}


BENCH = Bench(
    doc=__doc__,
    name="swiglu",
    settings=every(model=MODELS, tokens=(512, *TOKENS), weighted=(False, True)),
    quick={"tokens": 4096, "weighted": True},
    measure=measure,
    goals=(
        Goal("from 4096 tokens on, 85% of copy bandwidth", "copy", 0.85, lambda row: row["tokens"] >= 4096),
        Goal("never slower than PyTorch's operations", "eager", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
