"""Part 10: a step of a small Qwen3-MoE on one rank, its loss against float64, its memory against `dualpipe memory`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import bench_training
from rank_processes import RankProcesses

from dualpipe.plan.memory import estimate
from dualpipe.train.config.model_config import read_model
from gpu.session import Output

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-cpu.toml"
LAYERS = 2  # of Qwen3-30B: its parameters, moments and gradients take some 35 GB
COUNTED = 0.8  # minimum of counted over measured memory: the allocator leaves the rest unused


def measure(output: Output) -> None:
    """Check parity in bfloat16 against float64, then measure a step of two layers of Qwen3-30B."""
    compare_parity(output, ["--pp", "1", "--ep", "1", "--dtype", "bf16"])
    with TemporaryDirectory() as folder:
        measure_step(output, folder)


def compare_parity(output: Output, layout: list[str]) -> None:
    """Run `dualpipe parity`, which compares losses and gradients of a pipeline with the model's own."""
    command = [sys.executable, "-P", "-m", "dualpipe", "parity", str(TINY), *layout,
               "--parallel.device", "cpu" if output.dry else "cuda"]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if output.dry else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    text = " ".join(layout)
    if done.returncode not in (0, 1):
        output.failure(parity=text, error=done.stderr)
    else:
        output.row(parity=text, passed=done.returncode == 0, said=done.stdout.splitlines()[-12:])
    output.goal("`dualpipe parity` passes", 1, int(done.returncode != 0))


def measure_step(output: Output, folder: str) -> None:
    """Time a step, and compare its peak memory with the count of `dualpipe memory`."""
    device = ["--device", "cpu"] if output.dry else ["--model", "qwen3-30b-a3b", "--layers", str(LAYERS)]
    args = bench_training.parse([*device, "--mesh", "1x1x1", "--schedule", "dualpipev", "--overlap", "on",
                                 "--steps", "1" if output.dry else "10", "--ranks", "1"])
    processes = RankProcesses(bench_training.measure, alone=1, seconds=max(30.0, output.left))
    options = bench_training.options_of(args, processes.size, folder)
    counted = counted_bytes(options, next(iter(bench_training.settings(args, options))))
    for row in bench_training.measured_rows(processes, options, args):
        if row["error"] is not None:
            output.failure(**row)
            continue
        measured = 1e9 * row["GB"]
        output.row(**row, **{"counted GB": counted / 1e9, "counted of measured": counted / measured})
        if not output.dry and row["run by"] == bench_training.OURS:  # on a CPU it is the memory of the whole process
            is_near = COUNTED <= counted / measured <= 1 / COUNTED
            output.goal("peak memory is within a fifth of what `dualpipe memory` counts", 1, int(not is_near))


def counted_bytes(options: bench_training.Options, setting: bench_training.Row) -> int:
    """Return the bytes that `dualpipe memory` counts for the rank."""
    config = bench_training.config_of(options, setting)
    (memory,) = estimate(config, read_model(config).config)
    return memory.total
