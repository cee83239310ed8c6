"""Benchmark the cost of splitting a backward into input gradients (I) and weight gradients (W).

Three ways run the backward of one stage, side by side in one process, on the same values:

    plain   nn.Linear, one ordinary backward
    ours    dualpipe.nn.Linear: the backward under `WeightGradStore.defer`, then `WeightGradStore.run`
    torch   torch.distributed.pipelining's walk over the autograd graph: stage_backward_input, stage_backward_weight

The stage has 16 layers of LayerNorm, up Linear, GELU, down Linear and a residual: 96 parameters. Small tensors show the
host time, which a GPU waits for when its kernels are short; the realistic size shows the total.

    python benchmarks/wgrad_split.py [--sizes small realistic] [--save]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from gpu_bench import add_save, save
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from dualpipe.nn import defer_weight_grads
from dualpipe.nn.deferral import WeightGradStore

LAYERS = 16
SIZES = {"small": (8, 16, 32), "realistic": (512, 512, 1024)}  # rows, hidden, intermediate


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def plain(stage: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    y = stage(x)
    return lambda: y.backward(dy)


def ours(stage: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    y, store = stage(x), WeightGradStore()

    def run() -> None:
        with store.activate(), store.defer(0):
            y.backward(dy)
        store.run(0)

    return run


def torch_split(stage: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    y = stage(x)

    def run() -> None:
        _, groups = stage_backward_input([y], [dy], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)

    return run


def measure(rows: int, hidden: int, intermediate: int, repeats: int) -> dict[str, float]:
    """Return the median time (us) of each way. Repetitions of the ways are interleaved; gradients accumulate."""
    stage = nn.Sequential(*[Block(hidden, intermediate) for _ in range(LAYERS)])
    ways = {
        "plain": (plain, stage),
        "ours": (ours, defer_weight_grads(copy.deepcopy(stage))),
        "torch": (torch_split, copy.deepcopy(stage)),
    }
    x, dy = torch.randn(rows, hidden, requires_grad=True), torch.randn(rows, hidden)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (way, module) in ways.items():
            x.grad = None
            run = way(module, x, dy)
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    _check_equal(*(module for _, module in ways.values()))
    return {name: statistics.median(values[repeats // 10 :]) for name, values in times.items()}


def _check_equal(reference: nn.Module, *others: nn.Module) -> None:
    for other in others:
        for expected, actual in zip(reference.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=200, help="repetitions of each way on small tensors")
    add_save(parser, "wgrad_split")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    print(f"{'size':<12}{'plain us':>12}{'ours us':>12}{'torch us':>12}{'ours/plain':>12}{'torch/plain':>12}")
    for name in args.sizes:
        size = SIZES[name]
        repeats = args.repeats if name == "small" else max(10, args.repeats // 20)
        us = measure(*size, repeats=repeats)
        ratios = {key: us[key] / us["plain"] for key in ("ours", "torch")}
        rows.append({"size": name, "rows_hidden_intermediate": size, "us": us, "ratio_to_plain": ratios})
        columns = "".join(f"{us[key]:>12.0f}" for key in ("plain", "ours", "torch"))
        print(f"{name:<12}{columns}{ratios['ours']:>12.2f}{ratios['torch']:>12.2f}")
    if args.save:
        save("wgrad_split", rows, args.save, layers=LAYERS)


if __name__ == "__main__":
    main()
