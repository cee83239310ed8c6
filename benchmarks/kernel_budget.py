"""Compare the compiled kernels with their budgets, or rewrite the budgets.

    PYTHONPATH=benchmarks python benchmarks/kernel_budget.py [--write] [--match SUBSTRING]

Compile the bfloat16 kernels of an expert layer for sm_90, print every figure that is worse than in kernel_budget.json,
and exit with status 1 if there is one. `--write` makes the present figures the budget and writes
docs/results/kernels.md.

The share of the peak is estimated, not measured. A step of the loop takes the longest of three times: its matrix
instructions, its bytes from the L2 cache, and the arrival of a tile, divided by the number of tiles in flight.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from compile_kernels import Resources, compile_spec
from kernel_specs import CompileSpec, all_specs

ARCH = 90
FOLDER = Path(__file__).parent
BUDGET = FOLDER / "kernel_budget.json"
PAGE = FOLDER.parent / "docs" / "results" / "kernels.md"
SPARE_REGISTERS = 8  # registers are allotted in eights

# One multiprocessor of an H100 (SXM), for `estimated_share`.
MULTIPLICATIONS_PER_CYCLE = 2048  # in bfloat16: 989 TFLOP/s of 132 multiprocessors at 1.83 GHz
BYTES_PER_CYCLE = 64  # from the L2 cache
SHARED_MEMORY = 233_472
RESERVED_SHARED = 1_024  # per program
REGISTERS = 65_536
LATENCY_CYCLES = 800  # latency of a copy from memory that misses the L2 cache
STEPS = 32  # per loop: a sum over 2048 elements, the hidden size of Qwen3-30B-A3B, in tiles of 64


@dataclass(frozen=True)
class KernelBudget:
    """Figures of a compiled kernel that a change must not make worse.

    load_wait: the groups of copies that the strictest wait of the main loop leaves in flight; None if no wait counts
        groups, for example where TMA signals a barrier.
    """

    registers: int
    shared: int
    buffers: int
    load_wait: int | None
    matrix_instructions: int

    @classmethod
    def of(cls, resources: Resources) -> KernelBudget:
        """Return the figures of a compiled kernel."""
        return cls(
            registers=resources.registers, shared=resources.shared, buffers=resources.buffers,
            load_wait=min(resources.load_waits, default=None), matrix_instructions=resources.matrix_instructions)

    def excesses(self, actual: KernelBudget) -> list[str]:
        """Return a phrase for each figure of `actual` that exceeds this budget."""
        worse = []
        if actual.registers > self.registers + SPARE_REGISTERS:
            worse.append(f"{actual.registers} registers instead of {self.registers}")
        if actual.shared > self.shared:
            worse.append(f"{actual.shared} bytes of shared memory instead of {self.shared}")
        if actual.buffers < self.buffers:
            worse.append(f"{actual.buffers} tiles in shared memory instead of {self.buffers}")
        if self.load_wait is not None and actual.load_wait is not None and actual.load_wait < self.load_wait:
            worse.append(f"the loop waits until {actual.load_wait} copies are on their way instead of {self.load_wait}")
        if self.load_wait is None and actual.load_wait is not None:
            worse.append("the loop waits for copies by threads, which TMA made before")
        if actual.matrix_instructions != self.matrix_instructions:
            worse.append(f"{actual.matrix_instructions} matrix instructions instead of {self.matrix_instructions}")
        return worse


def budgeted_specs(match: str = "") -> Iterator[CompileSpec]:
    """Yield the kernels that have a budget: bfloat16 GEMMs of an expert layer with sizes that are multiples of 16."""
    for spec in all_specs(ARCH):
        is_plain = ".bf16.16." in spec.name and ".odd." not in spec.name
        is_quantized = spec.name.startswith(("grouped_gemm_fp8.", "grouped_gemm_dequantize."))
        is_half = is_quantized and ".fp16" not in spec.name and spec.needs_mma and ".border" not in spec.name
        if (is_plain or is_half) and spec.needs_mma and match in spec.name:
            yield spec


def read_budget() -> dict[str, KernelBudget]:
    """Return the budget of each kernel by name; empty if another version of Triton compiled it."""
    content = json.loads(BUDGET.read_text())
    if content["triton"] != triton.__version__:
        return {}
    return {name: KernelBudget(**figures) for name, figures in content["kernels"].items()}


def excesses(budget: dict[str, KernelBudget], compiled: Iterable[Resources]) -> list[str]:
    """Return one line per kernel that exceeds its budget, spills or has no budget."""
    lines = []
    for resources in compiled:
        worse = list(resources.problems)
        if resources.name not in budget:
            worse.append("no budget; write it by benchmarks/kernel_budget.py --write")
        else:
            worse += budget[resources.name].excesses(KernelBudget.of(resources))
        lines += [f"{resources.name}: {', '.join(worse)}"] * bool(worse)
    return lines


def estimated_share(rows: int, cols: int, depth: int, buffers: int, programs: int = 1) -> float:
    """Return the estimated share of the tensor cores' peak that tiles of rows x cols reach in STEPS steps of bfloat16.

    depth: elements that a step sums; buffers: tiles in shared memory; programs: the number that share a multiprocessor,
    where one loads and writes while another multiplies.

    Example: 128 x 256 x 64 takes 1,024 cycles of matrix instructions, and 768 to load 48 KB. With 3 buffers a tile has
    two steps to arrive in (1,568 cycles, 784 a step): 1,024 cycles a step. With 2 buffers it has one: 1,568.
    """
    products = rows * cols * depth / MULTIPLICATIONS_PER_CYCLE
    load = (rows + cols) * depth * 2 / BYTES_PER_CYCLE
    arrival = LATENCY_CYCLES + load
    step = max(products, load, arrival / max(1, buffers * programs - 1))
    write = rows * cols * 2 / BYTES_PER_CYCLE
    return STEPS * products / (STEPS * step + (arrival + write) / programs)


def resident_programs(figures: KernelBudget, warps: int) -> int:
    """Return the number of programs that fit on a multiprocessor of sm_90 at once."""
    registers = -(-figures.registers // 8) * 8 * 32 * warps
    return max(1, min(SHARED_MEMORY // (figures.shared + RESERVED_SHARED), REGISTERS // registers))


def page(budget: dict[str, KernelBudget], specs: Sequence[CompileSpec]) -> str:
    """Return a page with the table of all kernels that have a budget."""
    lines = [
        "# What the compiler makes of the kernels",
        "",
        f"Compiled for sm_{ARCH} by Triton {triton.__version__} without a GPU; written by",
        "`PYTHONPATH=benchmarks python benchmarks/kernel_budget.py --write`, and held by a test: a change that needs",
        "more registers or shared memory, or keeps fewer tiles on their way, fails. None of the kernels spills.",
        "",
        "*Tiles*: of an operand in shared memory at a time. *Copies on their way*: at the strictest wait of the main",
        "loop; a dash where TMA signals a barrier instead. *Share of peak*: **estimated, not measured**,",
        "for products in bfloat16 with operands as they are; `estimated_share` says how.",
        "",
        "| kernel | tile | registers | shared memory | tiles | copies on their way | share of peak |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for spec in specs:
        figures = budget[spec.name]
        tile = [spec.constexprs[name] for name in ("ROWS", "COLS", "DEPTH")]
        share = "-"
        if ".bf16.16." in spec.name:
            programs = resident_programs(figures, spec.num_warps)
            share = f"{100 * estimated_share(*tile, figures.buffers, programs):.0f}%"
        waits = "-" if figures.load_wait is None else figures.load_wait
        lines.append(f"| `{spec.name}` | {' x '.join(map(str, tile))} | {figures.registers} | {figures.shared:,} | "
                     f"{figures.buffers} | {waits} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare the budgets or write them; see the module's docstring."""
    parser = argparse.ArgumentParser(description="compare compiled kernels with their budgets")
    parser.add_argument("--write", action="store_true", help="make the present figures the budget")
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    args = parser.parse_args()
    if args.write and args.match:
        parser.error("--write takes all kernels; leave --match out")
    specs = list(budgeted_specs(args.match))
    compiled = [compile_spec(spec, ARCH) for spec in specs]
    if args.write:
        budget = {resources.name: KernelBudget.of(resources) for resources in compiled}
        content: dict[str, Any] = {
            "triton": triton.__version__, "kernels": {name: asdict(figures) for name, figures in budget.items()}}
        BUDGET.write_text(json.dumps(content, indent=1) + "\n")
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(budget, specs), encoding="utf-8")
        print(f"wrote {BUDGET} and {PAGE}")
        return 0
    budget = read_budget()
    if not budget:
        print(f"the budget is not of Triton {triton.__version__}; nothing is compared", file=sys.stderr)
        return 0
    over = excesses(budget, compiled)
    print("\n".join(over) or f"{len(compiled)} kernels are within their budgets")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
