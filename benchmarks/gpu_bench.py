"""What the kernels' benchmarks share: a GPU or a clear message, median times, the machine's own rates, saved tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"


def require_gpu() -> torch.device:
    """The CUDA device; without one, says so and ends the process with status 0."""
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: needs a CUDA device, and there is none here; nothing was measured")
        sys.exit(0)
    return torch.device("cuda")


def time_ms(fn: Callable[[], Any], *, warmup_ms: int = 25, measure_ms: int = 100) -> float:
    """Median time of a call in milliseconds, the L2 cache flushed before each."""
    from triton.testing import do_bench

    return do_bench(fn, warmup=warmup_ms, rep=measure_ms, return_mode="median")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def check_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Ends a benchmark whose kernel is wrong: a fast wrong result is no result."""
    error = relative_error(actual, expected)
    if not error <= tolerance:  # NaN too
        raise RuntimeError(f"{name}: relative error {error:.3g} exceeds {tolerance:.3g}; not timed")


def copy_gb_per_s(device: torch.device, gib: float = 2.0) -> float:
    """Bytes read and written by a copy, in 1e9 a second: what memory-bound kernels are held to."""
    source = torch.empty(int(gib * 2**30) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / time_ms(lambda: target.copy_(source)) / 1e6


def run_bandwidth_bench(
    doc: str, name: str, tokens: Sequence[int], measure: Callable[[int, float, torch.device], Iterable[dict[str, Any]]]
) -> None:
    """The main program of a memory-bound kernel's benchmark.

    measure: (tokens, GB/s of a copy, device) -> rows; `tokens` are those measured unless --tokens says otherwise.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(tokens))
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{name}.json")
    args = parser.parse_args()
    device = require_gpu()
    torch.manual_seed(0)
    copy_rate = copy_gb_per_s(device)
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy_rate:.0f} GB/s")
    rows = [row for count in args.tokens for row in measure(count, copy_rate, device)]
    print_table(rows)
    if args.save:
        save(name, rows, copy_gb_per_s=copy_rate)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Every row's fields in columns; floats with three significant digits or more."""
    if not rows:
        return
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(names)]
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def save(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> Path:
    """Write `rows` to benchmarks/results/<name>.json, with date, device and versions."""
    properties = torch.cuda.get_device_properties(0)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        **facts,
        "rows": list(rows),
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"saved {path}")
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
