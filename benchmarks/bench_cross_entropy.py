"""Benchmark the cross-entropy against the copy bandwidth, and against PyTorch in time and memory.

Loss and gradient of bfloat16 logits for the vocabularies of four models, in place and not. Each result is checked
before it is timed. `copy` is the fraction of the copy bandwidth of the same run; it counts one read in the forward, and
one read and one write in the backward. `eager` is the time of `F.cross_entropy(logits.float(), labels)` over ours,
`compiled` the same under torch.compile. Memory is the peak above the logits over forward and backward.

    python benchmarks/bench_cross_entropy.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from expert_shapes import every
from gpu_bench import Bench, Goal, Machine, Row, check_close, compiled, peak_gb, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import cross_entropy

VOCABULARIES = {"deepseek-v2-lite": 102_400, "qwen3-30b-a3b": 151_936, "gpt-oss-20b": 201_088, "gpt-2": 50_257}
SIZES = VOCABULARIES | {"tiny": 100, "tiny clamped": 100}
TOLERANCE = 4e-3  # one rounding of the gradient
PASSES = {"forward": 1, "backward": 2, "both, in place": 3}  # over the logits

LossOf = Callable[[Tensor, Tensor], Tensor]


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, in_place=True)


def backward_of(loss_of: LossOf, logits: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = loss_of(leaf, labels)
    return lambda: torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def step_of(loss_of: LossOf, logits: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward and returns the gradient."""
    leaf = logits.detach().requires_grad_()
    return lambda: torch.autograd.grad(loss_of(leaf, labels), leaf)[0]


def check(logits: Tensor, labels: Tensor) -> None:
    """Check the loss, the gradient, and the gradient that overwrites the logits."""
    expected = step_of(eager, logits, labels)()
    with poisoned():
        loss, grad = cross_entropy(logits, labels), step_of(cross_entropy, logits, labels)()
    check_close("loss", loss, eager(logits, labels), 1e-5)
    check_close("gradient", grad, expected, TOLERANCE)
    check_close("gradient in place", step_of(in_place, logits.clone(), labels)(), expected, TOLERANCE)


def times(logits: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Time ours, eager and compiled. The last step overwrites the logits every time, which does not change its time."""
    ways: tuple[LossOf, ...] = (cross_entropy, eager, compiled(eager))
    forward = [time_ms(lambda way=way: way(logits, labels)) for way in ways]
    backward = [time_ms(backward_of(way, logits, labels)) for way in ways]
    return {"forward": forward, "backward": backward, "both, in place": [time_ms(step_of(in_place, logits, labels))]}


def measure(machine: Machine, model: str, tokens: int) -> Iterator[Row]:
    """Yield the rows of forward, backward, and both in place."""
    logits = 3 * torch.randn(tokens, SIZES[model], dtype=torch.bfloat16, device=machine.device)
    labels = torch.randint(SIZES[model], (tokens,), device=machine.device)
    check(logits, labels)
    memory = [peak_gb(step_of(way, logits, labels), machine.device) for way in (cross_entropy, eager)]
    for direction, (ours_ms, *others) in times(logits, labels).items():
        rate = PASSES[direction] * logits.numel() * 2 / ours_ms / 1e6
        figures = {"us": 1000 * ours_ms, "GB/s": rate, "copy": rate / machine.copy_gb_per_s}
        ratios: list[Any] = [other / ours_ms for other in others] or [None, None]
        rivals = {"eager": ratios[0], "compiled": ratios[1], "peak GB": memory[0], "eager's": memory[1]}
        yield {"direction": direction, **figures, **rivals}


BENCH = Bench(
    doc=__doc__,
    name="cross_entropy",
    settings=every(model=VOCABULARIES, tokens=(1024, 4096, 16384)),
    quick={"tokens": 4096},
    measure=measure,
    goals=(
        Goal("85% of copy bandwidth", "copy", 0.85),
        Goal("never slower than PyTorch's operations", "eager", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
