"""Benchmark GEMMs with quantized weights against our grouped GEMMs in bfloat16.

For the expert layers of three models, with all experts or an eighth of them on one rank. Forward and input gradient run
in FP8, where the rows are quantized first, and for every format with weights that the kernel dequantizes as it loads
them. Each result is checked before it is timed. `ms` includes quantizing, and `quantize ms` is that alone. `x bf16` is
the time of the bfloat16 GEMM over ours. `expected` is the prediction of `dualpipe.kernels.grouped_gemm_tiles.fp8_gain`,
by which a run decides to warn.

    python benchmarks/bench_quantized.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from expert_shapes import MODELS, ROUTINGS, SIZES, TOKENS, Layer, every, route
from gpu_bench import Bench, Goal, Machine, Row, check_close, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import grouped_gemm, grouped_gemm_dequantize, grouped_gemm_dgrad, grouped_gemm_fp8
from dualpipe.kernels.common import architecture
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.kernels.grouped_gemm_tiles import fp8_gain
from dualpipe.kernels.quantize import dequantize, dequantize_rows, quantize, quantize_rows, transpose_blocks

# One rounding of the result. FP8 on Hopper also keeps only 14 bits of each sum of 128 products.
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Case:
    """One GEMM with quantized weights, and the same GEMM in bfloat16."""

    name: str
    ours: Callable[[], Tensor]
    bf16: Callable[[], Tensor]
    expected: Callable[[], Tensor]  # float64, from the quantized rows and weights
    cols: int
    quantize: Callable[[], object] | None = None  # quantizes the rows; None if rows stay in bfloat16


def cases(format: Format, layer: Layer, n: int, h: int, device: torch.device) -> Iterator[Case]:
    """Yield the forward and input gradient cases of one GEMM of the experts."""
    rows, shape = sum(layer.counts), (layer.experts, n, h)
    x = torch.randn(rows, h, device=device, dtype=torch.bfloat16)
    dy = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
    data = quantize(torch.randn(shape, device=device, dtype=torch.bfloat16) / h**0.5, format)
    w = dequantize(data, format, n, h, dtype=torch.bfloat16)  # fp8_block: rounded once more

    def product(rows: Tensor, w: Tensor) -> Tensor:
        return torch.cat([rows[at].double() @ w[e].double() for e, at in layer.slices])

    def wide() -> Tensor:
        return dequantize(data, format, n, h)

    if format.computes:
        block = format.block[1]
        yield Case(
            "forward, FP8",
            ours=lambda: grouped_gemm_fp8(
                quantize_rows(x, block), data, format, shape, layer.offs, out_dtype=torch.bfloat16
            ),
            bf16=lambda: grouped_gemm(x, w, layer.offs),
            expected=lambda: product(dequantize_rows(quantize_rows(x, block)), wide().mT),
            cols=n,
            quantize=lambda: quantize_rows(x, block),
        )
    if format.computes and format.block[0] > 1:
        turned = transpose_blocks(data, format, n, h)  # once for all micro-batches
        yield Case(
            "input gradient, FP8",
            ours=lambda: grouped_gemm_fp8(
                quantize_rows(dy, block), turned, format, (layer.experts, h, n), layer.offs, out_dtype=torch.bfloat16
            ),
            bf16=lambda: grouped_gemm_dgrad(dy, w, layer.offs),
            expected=lambda: product(dequantize_rows(quantize_rows(dy, block)), wide()),
            cols=h,
            quantize=lambda: quantize_rows(dy, block),
        )
    yield Case(
        "forward, dequantized",
        ours=lambda: grouped_gemm_dequantize(x, data, format, shape, layer.offs),
        bf16=lambda: grouped_gemm(x, w, layer.offs),
        expected=lambda: product(x, w.mT),
        cols=n,
    )
    yield Case(
        "input gradient, dequantized",
        ours=lambda: grouped_gemm_dequantize(dy, data, format, shape, layer.offs, transposed=True),
        bf16=lambda: grouped_gemm_dgrad(dy, w, layer.offs),
        expected=lambda: product(dy, w),
        cols=h,
    )


def measure(machine: Machine, model: str, tokens: int, share: int, routing: str, format: str) -> Iterator[Row]:
    """Yield a row for every GEMM of one expert layer; this rank has one expert in `share`."""
    sizes, arch = SIZES[model], architecture(machine.device)
    layer = route(sizes, tokens, sizes.experts // share, routing == "skewed", machine.device)
    rows = sum(layer.counts) / layer.experts
    for gemm, n, h in (("up", 2 * sizes.intermediate, sizes.hidden), ("down", sizes.hidden, sizes.intermediate)):
        for case in cases(FORMATS[format], layer, n, h, machine.device):
            with poisoned():
                actual = case.ours()
            check_close(f"{format}, {gemm} {case.name}", actual, case.expected(), TOLERANCE)
            ms, bf16_ms = time_ms(case.ours), time_ms(case.bf16)
            row = {"product": f"{gemm} {case.name}", "rows/expert": int(rows), "N": n, "K": h, "ms": ms}
            row |= {"bf16 ms": bf16_ms, "x bf16": bf16_ms / ms}
            if case.quantize is not None:
                blocks = "block" if FORMATS[format].block[0] > 1 else "mx"
                row |= {"quantize ms": time_ms(case.quantize), "expected": fp8_gain(arch, blocks, rows, case.cols)}
            yield row


def is_fp8(row: Row) -> bool:
    return "FP8" in row["product"]


def is_large_block(row: Row) -> bool:
    """Return True for a row of the first goal: 128 x 128 scales, balanced, at least 4096 rows per expert."""
    return is_fp8(row) and row["rows/expert"] >= 4096 and row["format"] == "fp8_block" and row["routing"] == "balanced"


BENCH = Bench(
    doc=__doc__,
    name="quantized",
    settings=every(
        model=MODELS, tokens=TOKENS, share=(1, 8), routing=ROUTINGS, format=("fp8_block", "mxfp8", "nvfp4", "mxfp4")
    ),
    quick={"tokens": 65536, "share": 8, "routing": "balanced", "format": "fp8_block"},
    measure=measure,
    goals=(
        Goal("fp8_block, 4096 rows an expert or more: 1.35 times as fast as bfloat16, quantizing rows included",
             "x bf16", 1.35, is_large_block),
        Goal("FP8 is nowhere slower than bfloat16", "x bf16", 1.0, is_fp8),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
