"""How fast are the grouped products, next to one dense product, `F.grouped_mm` and a loop of cuBLAS calls?

For the expert shapes of three models, their number of tokens, balanced and skewed routing, all experts on one rank or
an eighth of them; forward of both GEMMs of an expert (the first one gathers its rows), input gradient, and weight
gradient written and added into float32. Each result is checked before it is timed. `dense` is a `torch.mm` with as
many operations, `bound` what the dense rate and the copy bandwidth of the same run allow together.

    python benchmarks/bench_grouped_gemm.py [--model NAME] [--tokens N ...] [--quick] [--save]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import check_close, copy_gb_per_s, print_table, require_gpu, save, time_ms
from torch import Tensor

from dualpipe.kernels import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    experts: int
    top_k: int


MODELS = {
    "deepseek-v2-lite": Model(2048, 1408, 64, 6),
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "gpt-oss-20b": Model(2880, 2880, 32, 4),
}
TOKENS = (4096, 16384, 65536)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-5}  # one rounding of the result; sums of many rows


@dataclass(frozen=True)
class Layer:
    """The rows that some experts of a model get, and where each expert's rows are."""

    experts: int
    counts: list[int]
    offs: Tensor

    def slices(self) -> Iterator[tuple[int, slice]]:
        start = 0
        for e, count in enumerate(self.counts):
            yield e, slice(start, start + count)
            start += count

    def loop(self, function: Callable[[int, slice], Any]) -> Callable[[], None]:
        """One call for each expert, with the sizes already on the host."""
        slices = list(self.slices())

        def run() -> None:
            for e, rows in slices:
                function(e, rows)

        return run


@dataclass(frozen=True)
class Case:
    """One product: ours, its rivals, what it needs, and each expert's part of the result."""

    name: str
    ours: Callable[[], Any]
    rivals: dict[str, Callable[[], Any]]
    check: Callable[[], None]
    bytes: int
    dense: tuple[int, int, int]  # m, n, k of a dense product with as many operations


def route(model: Model, tokens: int, experts: int, skewed: bool, device: torch.device) -> Layer:
    """Every expert the same number of rows up to one, or in proportion to 1 / (1 + r / 4) of a random rank r."""
    share = torch.ones(experts, dtype=torch.float64)
    if skewed:
        share /= 1 + torch.randperm(experts, generator=torch.Generator().manual_seed(0)) / 4
    rows = tokens * model.top_k * experts // model.experts
    ends = (share.cumsum(0) / share.sum() * rows).round()
    return Layer(experts, ends.diff(prepend=ends.new_zeros(1)).long().tolist(), ends.to(device, torch.int32))


def cases(model: Model, layer: Layer, device: torch.device) -> Iterator[Case]:
    """The products of one expert layer: the first GEMM makes gate and up together from gathered rows."""
    rows = sum(layer.counts)
    for gemm, n, h in (("up", 2 * model.intermediate, model.hidden), ("down", model.hidden, model.intermediate)):
        w = torch.randn(layer.experts, n, h, device=device, dtype=torch.bfloat16) / h**0.5
        x = torch.randn(rows, h, device=device, dtype=torch.bfloat16)
        dy = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        yield forward(f"{gemm} forward", layer, x, w, None)
        if gemm == "up":
            gather = torch.randint(0, rows, (rows,), device=device, dtype=torch.int32)
            yield forward("up forward, gathered", layer, x, w, gather)
        yield input_gradient(f"{gemm} input gradient", layer, dy, w)
        yield weight_gradient(f"{gemm} weight gradient, written", layer, dy, x, accumulate=False)
        yield weight_gradient(f"{gemm} weight gradient, added", layer, dy, x, accumulate=True)


def forward(name: str, layer: Layer, x: Tensor, w: Tensor, gather: Tensor | None) -> Case:
    """Rivals make the copy of gathered rows that the kernel saves."""
    y = x.new_empty(x.shape[0], w.shape[1])

    def taken() -> Tensor:
        return x if gather is None else x.index_select(0, gather)

    def cublas() -> None:
        rows = taken()
        layer.loop(lambda e, at: torch.mm(rows[at], w[e].t(), out=y[at]))()

    def ours() -> Tensor:
        return grouped_gemm(x, w, layer.offs, gather=gather)

    def check() -> None:
        rows, result = taken(), ours()
        for e, at in layer.slices():
            check_close(name, result[at], rows[at].double() @ w[e].double().t(), TOLERANCE[result.dtype])

    rivals = {"grouped_mm": lambda: F.grouped_mm(taken(), w.transpose(1, 2), offs=layer.offs), "cublas": cublas}
    return Case(name, ours, rivals, check, 2 * (x.numel() + w.numel() + y.numel()), (*y.shape, x.shape[1]))


def input_gradient(name: str, layer: Layer, dy: Tensor, w: Tensor) -> Case:
    dx = dy.new_empty(dy.shape[0], w.shape[2])

    def ours() -> Tensor:
        return grouped_gemm_dgrad(dy, w, layer.offs)

    def check() -> None:
        result = ours()
        for e, at in layer.slices():
            check_close(name, result[at], dy[at].double() @ w[e].double(), TOLERANCE[result.dtype])

    rivals = {
        "grouped_mm": lambda: F.grouped_mm(dy, w, offs=layer.offs),
        "cublas": layer.loop(lambda e, at: torch.mm(dy[at], w[e], out=dx[at])),
    }
    return Case(name, ours, rivals, check, 2 * (dy.numel() + w.numel() + dx.numel()), (*dx.shape, dy.shape[1]))


def weight_gradient(name: str, layer: Layer, dy: Tensor, x: Tensor, *, accumulate: bool) -> Case:
    """Rivals make a bfloat16 weight gradient and convert or add it, which is what there is without the kernel."""
    out = torch.zeros(layer.experts, dy.shape[1], x.shape[1], device=x.device)

    def ours() -> None:
        grouped_gemm_wgrad(dy, x, layer.offs, out=out, accumulate=accumulate)

    def check() -> None:
        out.zero_()
        ours()
        for e, at in layer.slices():
            check_close(name, out[e], dy[at].double().t() @ x[at].double(), TOLERANCE[out.dtype])

    def put(target: Tensor, dw: Tensor) -> None:
        target.add_(dw) if accumulate else target.copy_(dw)

    rivals = {
        "grouped_mm": lambda: put(out, F.grouped_mm(dy.t(), x, offs=layer.offs)),
        "cublas": layer.loop(lambda e, at: put(out[e], dy[at].t() @ x[at])),
    }
    moved = 2 * (dy.numel() + x.numel()) + 4 * out.numel() * (2 if accumulate else 1)
    return Case(name, ours, rivals, check, moved, (dy.shape[1], x.shape[1], dy.shape[0]))


def dense_ms(shape: tuple[int, int, int], device: torch.device) -> float:
    """Time of one dense bfloat16 product of (m, k) and (k, n)."""
    m, n, k = shape
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    return time_ms(lambda: a @ b.t())


def measure(case: Case, gb_per_s: float, tflops: float, device: torch.device) -> dict[str, Any]:
    """Check, then time ours, its rivals and the dense product."""
    case.check()
    ms = time_ms(case.ours)
    flops = 2 * math.prod(case.dense)
    row = {
        "product": case.name,
        "ms": ms,
        "TFLOP/s": flops / ms / 1e9,
        "GB/s": case.bytes / ms / 1e6,
        "of dense": dense_ms(case.dense, device) / ms,
        "of bound": max(flops / tflops / 1e9, case.bytes / gb_per_s / 1e6) / ms,
    }
    return row | {f"x {name}": time_ms(run) / ms for name, run in case.rivals.items()}


def settings(args: argparse.Namespace) -> Iterator[tuple[str, int, int, bool]]:
    """(model, tokens, experts on this rank, skewed)."""
    for name in args.model:
        for tokens in args.tokens:
            for share in (1,) if args.quick else (1, 8):
                for skewed in (False, True):
                    yield name, tokens, MODELS[name].experts // share, skewed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--quick", action="store_true", help="all experts on one rank only")
    parser.add_argument("--save", action="store_true", help="write grouped_gemm.json under benchmarks/results/")
    args = parser.parse_args()
    device = require_gpu()
    gb_per_s, tflops = copy_gb_per_s(device), 2 * 8192**3 / dense_ms((8192, 8192, 8192), device) / 1e9
    print(f"copy {gb_per_s:.0f} GB/s, dense 8192^3 {tflops:.0f} TFLOP/s")
    rows = []
    for name, tokens, experts, skewed in settings(args):
        setting = {"model": name, "tokens": tokens, "experts": experts, "routing": "skewed" if skewed else "balanced"}
        layer = route(MODELS[name], tokens, experts, skewed, device)
        rows.extend(setting | measure(case, gb_per_s, tflops, device) for case in cases(MODELS[name], layer, device))
        print_table(rows[-9:])
        print(flush=True)
    if args.save:
        save("grouped_gemm", rows, copy_gb_per_s=gb_per_s, dense_tflops=tflops)


if __name__ == "__main__":
    main()
