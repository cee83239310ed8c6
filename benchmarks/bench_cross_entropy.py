"""How near is the cross-entropy to the copy bandwidth, and how does it compare with PyTorch in time and memory?

Loss and gradient of bfloat16 logits for the vocabularies of four models, in place and not. Each result is checked
before it is timed. `copy` is the fraction of a copy's bytes a second in the same run, counting one reading in the
forward, one reading and one writing in the backward; `eager` is how many times longer `F.cross_entropy(logits.float(),
labels)` takes, `compiled` the same under torch.compile; memory is the peak above the logits over forward and backward.

    python benchmarks/bench_cross_entropy.py [--tokens N ...] [--save]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import check_close, run_bandwidth_bench, time_ms
from torch import Tensor

from dualpipe.kernels import cross_entropy

VOCABULARIES = {"deepseek-v2-lite": 102_400, "qwen3-30b-a3b": 151_936, "gpt-oss-20b": 201_088, "gpt-2": 50_257}
TOLERANCE = 4e-3  # one rounding of the gradient


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def backward_of(loss_of: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> Callable[[], Any]:
    leaf = logits.detach().requires_grad_()
    loss = loss_of(leaf, labels)
    return lambda: torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def step_time(logits: Tensor, labels: Tensor) -> float:
    """Forward and backward in place: the logits are overwritten each time, which changes no time."""
    leaf = logits.detach().requires_grad_()
    return time_ms(lambda: torch.autograd.grad(cross_entropy(leaf, labels, in_place=True), leaf))


def peak_gb(loss_of: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> float:
    leaf = logits.detach().requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(loss_of(leaf, labels), leaf)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measure(model: str, tokens: int, copy_rate: float, device: torch.device) -> Iterator[dict[str, Any]]:
    logits = 3 * torch.randn(tokens, VOCABULARIES[model], dtype=torch.bfloat16, device=device)
    labels = torch.randint(VOCABULARIES[model], (tokens,), device=device)
    ways = (cross_entropy, eager, torch.compile(eager, dynamic=False))
    check_close("loss", cross_entropy(logits, labels), eager(logits, labels), 1e-5)
    backwards = [backward_of(way, logits, labels) for way in ways]
    check_close("gradient", backwards[0](), backwards[1](), TOLERANCE)
    times = {
        "forward": [time_ms(lambda way=way: way(logits, labels)) for way in ways],
        "backward": [time_ms(backward) for backward in backwards],
    }
    del backwards
    memory = [peak_gb(way, logits, labels) for way in ways[:2]]
    times["both, in place"] = [step_time(logits, labels)]
    for direction, passes in (("forward", 1), ("backward", 2), ("both, in place", 3)):
        ours_ms, *others = times[direction]
        rate = passes * logits.numel() * 2 / ours_ms / 1e6
        ratios = [other / ours_ms for other in others] or [None, None]
        yield {
            "model": model, "tokens": tokens, "direction": direction, "us": 1000 * ours_ms, "GB/s": rate,
            "copy": rate / copy_rate, "eager": ratios[0], "compiled": ratios[1], "peak GB": memory[0],
            "eager's": memory[1],
        }  # fmt: skip


def measure_all(tokens: int, copy_rate: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every case at a number of tokens."""
    for model in VOCABULARIES:
        yield from measure(model, tokens, copy_rate, device)


if __name__ == "__main__":
    run_bandwidth_bench(__doc__, "cross_entropy", [1024, 4096, 16384], measure_all)
