"""Benchmark the grouped GEMMs next to one dense GEMM, `F.grouped_mm` and a loop of cuBLAS calls.

The shapes are the experts of three models, with several numbers of tokens, balanced and skewed routing, and all experts
or an eighth of them on one rank. Measured are:

    forward            both GEMMs of an expert; the first also gathering its rows, and with the activation fused
    input gradient     both GEMMs
    weight gradient    written, and added into float32; for the first GEMM also with gathered rows, and of four
                       micro-batches in one launch, which `x separate` compares with four launches

Each result is checked before it is timed. `of dense` compares with a
`torch.mm` of as many operations, `of bound` with the time that the dense rate and the copy bandwidth of the same run
allow together. `x` is a rival's time over ours.

    python benchmarks/bench_grouped_gemm.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from bench_memory_bound import eager_swiglu
from expert_shapes import MODELS, ROUTINGS, SIZES, TOKENS, Layer, Model, every, route
from gpu_bench import Bench, Goal, Machine, Row, check_close, dense_ms, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import (
    WgradOperands,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_merged,
)

# bfloat16: one or two roundings of the result. float32: sums over up to 10^5 rows; rounding to bfloat16 in between
# would give 1.7e-3.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 3e-4}
MICRO_BATCHES = 4  # whose weight gradients one launch computes


@dataclass(frozen=True)
class Case:
    """One GEMM: our call, the expected result, the rivals, and the bytes and operations."""

    name: str
    ours: Callable[[], Tensor]
    expected: Callable[[], Tensor]  # float64
    rivals: dict[str, Callable[[], Any]]
    bytes: int
    dense: tuple[int, int, int]  # m, n, k of a dense GEMM with as many operations
    reset: Callable[[], Any] = lambda: None  # before a check of a result that is written in place

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.dense)

    def check(self, expected: Tensor) -> None:
        self.reset()
        with poisoned():
            actual = self.ours()
        check_close(self.name, actual, expected, TOLERANCE[actual.dtype])


# --------------------------------------------------------------------------------------------------------------- cases


def cases(model: Model, layer: Layer, device: torch.device) -> Iterator[Case]:
    """Yield the GEMMs of one expert layer; the first GEMM computes gate and up together from gathered rows."""
    rows = sum(layer.counts)
    for gemm, n, h in (("up", 2 * model.intermediate, model.hidden), ("down", model.hidden, model.intermediate)):
        w = torch.randn(layer.experts, n, h, device=device, dtype=torch.bfloat16) / h**0.5
        x = torch.randn(rows, h, device=device, dtype=torch.bfloat16)
        dy = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        yield forward(f"{gemm} forward", layer, x, w, None)
        if gemm == "up":
            gather = torch.randint(0, rows, (rows,), device=device, dtype=torch.int32)
            yield forward("up forward, gathered", layer, x, w, gather)
            yield activated("up forward, gathered, activated", layer, x, w, gather, model.clamped)
        yield input_gradient(f"{gemm} input gradient", layer, dy, w)
        yield weight_gradient(f"{gemm} weight gradient, written", layer, dy, x, None, accumulate=False)
        yield weight_gradient(f"{gemm} weight gradient, added", layer, dy, x, None, accumulate=True)
        if gemm == "up":
            yield weight_gradient(f"{gemm} weight gradient, gathered, written", layer, dy, x, gather, accumulate=False)
            yield weight_gradient(f"{gemm} weight gradient, gathered, added", layer, dy, x, gather, accumulate=True)


def forward(name: str, layer: Layer, x: Tensor, w: Tensor, gather: Tensor | None) -> Case:
    """Build a forward case. Rivals copy the gathered rows; our kernel does not."""
    y = x.new_empty(x.shape[0], w.shape[1])

    def cublas() -> Tensor:
        rows = taken_rows(x, gather)
        for e, at in layer.slices:
            torch.mm(rows[at], w[e].t(), out=y[at])
        return y

    def expected() -> Tensor:
        rows = taken_rows(x, gather)
        return torch.cat([rows[at].double() @ w[e].double().t() for e, at in layer.slices])

    def grouped_mm() -> Tensor:
        return F.grouped_mm(taken_rows(x, gather), w.transpose(1, 2), offs=layer.offs)

    return Case(
        name,
        ours=lambda: grouped_gemm(x, w, layer.offs, gather=gather),
        expected=expected,
        rivals={"grouped_mm": grouped_mm, "cublas": cublas},
        bytes=2 * (x.numel() + w.numel() + y.numel()),
        dense=(*y.shape, x.shape[1]),
    )


def activated(name: str, layer: Layer, x: Tensor, w: Tensor, gather: Tensor, clamped: bool) -> Case:
    """Build the case of the first GEMM with the activation fused; rivals apply it by PyTorch's operations."""
    plain = forward(name, layer, x, w, gather)

    def then_activated(product: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: eager_swiglu(product(), None, clamped)

    return replace(
        plain,
        ours=lambda: grouped_gemm_swiglu(x, w, layer.offs, gather=gather, clamped=clamped)[0],
        expected=then_activated(plain.expected),
        rivals={rival: then_activated(product) for rival, product in plain.rivals.items()},
        bytes=plain.bytes + gather.shape[0] * w.shape[1],
    )


def taken_rows(x: Tensor, gather: Tensor | None) -> Tensor:
    """Return a copy of the rows of x that `gather` selects, or x itself without `gather`."""
    return x if gather is None else x.index_select(0, gather)


def input_gradient(name: str, layer: Layer, dy: Tensor, w: Tensor) -> Case:
    dx = dy.new_empty(dy.shape[0], w.shape[2])

    def cublas() -> None:
        for e, at in layer.slices:
            torch.mm(dy[at], w[e], out=dx[at])

    return Case(
        name,
        ours=lambda: grouped_gemm_dgrad(dy, w, layer.offs),
        expected=lambda: torch.cat([dy[at].double() @ w[e].double() for e, at in layer.slices]),
        rivals={"grouped_mm": lambda: F.grouped_mm(dy, w, offs=layer.offs), "cublas": cublas},
        bytes=2 * (dy.numel() + w.numel() + dx.numel()),
        dense=(*dx.shape, dy.shape[1]),
    )


def weight_gradient(
    name: str, layer: Layer, dy: Tensor, x: Tensor, gather: Tensor | None, *, accumulate: bool
) -> Case:
    """Build a weight gradient case, written or accumulated in float32.

    `F.grouped_mm` computes a bfloat16 weight gradient, which is then converted or added; cuBLAS writes float32. Rivals
    copy the gathered rows; our kernel does not.
    """
    out = torch.zeros(layer.experts, dy.shape[1], x.shape[1], device=x.device)

    def ours() -> Tensor:
        grouped_gemm_wgrad(dy, x, layer.offs, out=out, accumulate=accumulate, gather=gather)
        return out

    def grouped_mm() -> None:
        put(out, F.grouped_mm(dy.t(), taken_rows(x, gather), offs=layer.offs), accumulate)

    def cublas() -> None:
        rows = taken_rows(x, gather)
        for e, at in layer.slices:
            float32_product(out[e], dy[at].t(), rows[at], accumulate)

    def expected() -> Tensor:
        rows = taken_rows(x, gather)
        return torch.stack([dy[at].double().t() @ rows[at].double() for _, at in layer.slices])

    return Case(
        name,
        ours=ours,
        expected=expected,
        rivals={"grouped_mm": grouped_mm, "cublas": cublas},
        bytes=2 * (dy.numel() + x.numel()) + 4 * out.numel() * (2 if accumulate else 1),
        dense=(dy.shape[1], x.shape[1], dy.shape[0]),
        reset=lambda: out.fill_(0.0 if accumulate else math.nan),
    )


def merged_weight_gradient(model: Model, layer: Layer, device: torch.device) -> Case:
    """Build the case of the first GEMM's weight gradients of four micro-batches in one launch, as a "W" may merge them.

    Rivals take one micro-batch after the other; "separate" is our own kernel, launched once per micro-batch.
    """
    rows = sum(layer.counts)
    x = torch.randn(rows, model.hidden, device=device, dtype=torch.bfloat16)
    dy = torch.randn(rows, 2 * model.intermediate, device=device, dtype=torch.bfloat16)
    gather = torch.randint(0, rows, (rows,), device=device, dtype=torch.int32)
    alone = weight_gradient("up weight gradient, gathered, four merged", layer, dy, x, gather, accumulate=True)
    out = torch.zeros(layer.experts, dy.shape[1], x.shape[1], device=device)
    operands = [WgradOperands(dy, x, layer.offs, gather)] * MICRO_BATCHES

    def ours() -> Tensor:
        grouped_gemm_wgrad_merged(operands, out=out, accumulate=True)
        return out

    def of_each(rival: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(MICRO_BATCHES):
                rival()

        return run

    m, n, k = alone.dense
    return replace(
        alone,
        ours=ours,
        expected=lambda: MICRO_BATCHES * alone.expected(),
        rivals={name: of_each(rival) for name, rival in (alone.rivals | {"separate": alone.ours}).items()},
        bytes=MICRO_BATCHES * 2 * (dy.numel() + x.numel()) + 4 * out.numel() * 2,
        dense=(m, n, MICRO_BATCHES * k),
        reset=lambda: out.fill_(0.0),
    )


def put(out: Tensor, dw: Tensor, accumulate: bool) -> None:
    out.add_(dw) if accumulate else out.copy_(dw)


def float32_product(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Compute a @ b of bfloat16 into float32, by cuBLAS alone if this torch supports it."""
    if not float32_from_cublas(out.device.type, accumulate):
        put(out, a @ b, accumulate)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


@cache
def float32_from_cublas(device: str, accumulate: bool) -> bool:
    """Return True if cuBLAS writes, or adds to, float32 from bfloat16 operands.

    Tried out, because it depends on the release of torch: adding came later than writing.
    """
    a, out = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.ones(16, 16, device=device)
    try:
        if accumulate:
            torch.addmm(out, a, a, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, a, out_dtype=out.dtype, out=out)
    except RuntimeError:
        return False
    return bool((out == (17 if accumulate else 16)).all())


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(machine: Machine, model: str, tokens: int, share: int, routing: str) -> Iterator[Row]:
    """Yield a row for every GEMM of one expert layer; this rank has one expert in `share`."""
    experts = SIZES[model].experts // share
    layer = route(SIZES[model], tokens, experts, routing == "skewed", machine.device)
    rows_per_expert = {"rows/expert": sum(layer.counts) // experts}
    for case in cases(SIZES[model], layer, machine.device):
        yield rows_per_expert | measure_case(case, machine)
    yield rows_per_expert | measure_case(merged_weight_gradient(SIZES[model], layer, machine.device), machine)


def measure_case(case: Case, machine: Machine) -> Row:
    """Check our GEMM, then time it, its rivals and the dense GEMM."""
    case.check(case.expected())
    ms = time_ms(case.ours)
    bound_ms = max(case.flops / machine.dense_tflops / 1e9, case.bytes / machine.copy_gb_per_s / 1e6)
    row = {
        "product": case.name,
        "ms": ms,
        "TFLOP/s": case.flops / ms / 1e9,
        "GB/s": case.bytes / ms / 1e6,
        "of dense": dense_ms([case.dense], machine.device) / ms,
        "of bound": bound_ms / ms,
    }
    row |= {f"x {name}": time_ms(run) / ms for name, run in case.rivals.items()}
    return row


def is_weight(row: Row) -> bool:
    return "weight" in row["product"]


def is_large(row: Row) -> bool:
    """Return True for a forward without activation or an input gradient, with at least 1024 rows per expert."""
    return not is_weight(row) and "activated" not in row["product"] and row["rows/expert"] >= 1024


BENCH = Bench(
    doc=__doc__,
    name="grouped_gemm",
    settings=every(model=MODELS, tokens=TOKENS, share=(1, 8), routing=ROUTINGS),
    quick={"tokens": 16384, "share": 1, "routing": "skewed"},
    measure=measure,
    goals=(
        Goal("forward and input gradient, 1024 rows an expert or more: 85% of dense", "of dense", 0.85,
             is_large),
        Goal("weight gradient: 80% of the bound", "of bound", 0.8, is_weight),
        Goal("never slower than F.grouped_mm", "x grouped_mm", 1.0),
        Goal("never slower than a loop of cuBLAS calls", "x cublas", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
