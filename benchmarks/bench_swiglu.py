"""How near are the gated activations to the copy bandwidth, and to PyTorch's operations?

Forward and backward in bfloat16, with and without the routing weight, for the expert shapes of three models with all
tokens of a micro-batch on one rank or an eighth of them. Each result is checked before it is timed. `copy` is the
fraction of a copy's bytes a second in the same run, counting what must be read and written once; `eager` is how many
times longer the same takes as PyTorch operations, `compiled` under torch.compile.

    python benchmarks/bench_swiglu.py [--tokens N ...] [--save]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import check_close, run_bandwidth_bench, time_ms
from torch import Tensor

from dualpipe.kernels import clamped_swiglu, swiglu

OPS = import_module("dualpipe.kernels.swiglu")
# I, K, whether clamped
MODELS = {"deepseek-v2-lite": (1408, 6, False), "qwen3-30b-a3b": (768, 8, False), "gpt-oss-20b": (2880, 4, True)}
TOLERANCE = 5e-3  # the result is rounded once, in PyTorch after every operation


def eager(gate_up: Tensor, weight: Tensor | None, clamped: bool) -> Tensor:
    if clamped:
        gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
        h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        gate, up = gate_up.chunk(2, dim=1)
        h = F.silu(gate) * up
    return h if weight is None else h * weight[:, None]


def backward_of(function: Callable[..., Tensor], operands: list[Tensor], dh: Tensor) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_() for t in operands]
    h = function(*leaves)
    return lambda: torch.autograd.grad(h, leaves, dh, retain_graph=True)


def measure(
    model: str, tokens: int, weighted: bool, copy_rate: float, device: torch.device
) -> Iterator[dict[str, Any]]:
    width, top_k, clamped = MODELS[model]
    rows = tokens * top_k
    gate_up = 3 * torch.randn(rows, 2 * width, dtype=torch.bfloat16, device=device)
    dh = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    weight = torch.rand(rows, dtype=torch.bfloat16, device=device) if weighted else None
    operands = [t for t in (gate_up, weight) if t is not None]
    ours = clamped_swiglu if clamped else swiglu

    def plain(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
        return eager(gate_up, weight, clamped)

    compiled = torch.compile(plain, dynamic=False)
    ways = {
        "forward": tuple((lambda f=f: f(*operands)) for f in (ours, plain, compiled)),
        "backward": tuple(backward_of(f, operands, dh) for f in (ours, plain, compiled)),
    }
    form = (clamped, 1.702 if clamped else 1.0, 7.0)
    exact = OPS.swiglu_reference(gate_up.float(), weight, *form)
    check_close("forward", ways["forward"][0](), exact, TOLERANCE)
    exact = OPS.swiglu_backward_reference(dh.float(), gate_up.float(), weight, *form)
    for result, expected in zip(ways["backward"][0](), exact):
        check_close("backward", result, expected, TOLERANCE)
    for direction, columns in (("forward", 3), ("backward", 5)):  # gate, up, h; gate, up, dh, d gate, d up
        ours_ms, eager_ms, compiled_ms = (time_ms(fn) for fn in ways[direction])
        rate = columns * gate_up.numel() // 2 * 2 / ours_ms / 1e6
        yield {
            "model": model, "tokens": tokens, "rows": rows, "weight": weighted, "direction": direction,
            "us": 1000 * ours_ms, "GB/s": rate, "copy": rate / copy_rate, "eager": eager_ms / ours_ms,
            "compiled": compiled_ms / ours_ms,
        }  # fmt: skip


def measure_all(tokens: int, copy_rate: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every case at a number of tokens."""
    for model in MODELS:
        for weighted in (False, True):
            yield from measure(model, tokens, weighted, copy_rate, device)


if __name__ == "__main__":
    run_bandwidth_bench(__doc__, "swiglu", [512, 4096, 16384, 65536], measure_all)
