"""Parts that run the kernels' benchmarks at the most important settings, or at tiny ones in a dry session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import bench_attention
import bench_expert_layer
import bench_grouped_gemm
import bench_memory_bound
import bench_overlap
import bench_quantized
import torch
from gpu_bench import Bench, Goal, Machine, Row, copy_gb_per_s, dense_tflops

from dualpipe.kernels.common import architecture
from gpu.session import Output

CPU = torch.device("cpu")
BLOCKS = (1, 4, 16, 32)  # numbers of blocks of NCCL's size beside the compute


def rates(output: Output) -> None:
    """Measure copies and dense GEMMs of several sizes, which bound the kernels."""
    device = device_of(output)
    for gib in (2**-10,) if output.dry else (0.125, 0.5, 2.0, 8.0):
        output.row(what="copy", gib=gib, rate=copy_gb_per_s(device, gib), unit="GB/s")
    for size in (64,) if output.dry else (2048, 4096, 8192, 16384):
        output.row(what="dense product", size=size, rate=dense_tflops(device, size), unit="TFLOP/s")


def grouped_gemm(output: Output) -> None:
    """Measure grouped GEMMs of Qwen3-30B with all experts, and of DeepSeek-V3 with one rank's 8 of 256 experts."""
    real = [
        {"model": "qwen3-30b-a3b", "tokens": 16384, "share": 1, "routing": "skewed"},
        {"model": "deepseek-v3", "tokens": 65536, "share": 32, "routing": "balanced"},
        {"model": "qwen3-30b-a3b", "tokens": 16384, "share": 1, "routing": "balanced"},
        {"model": "qwen3-30b-a3b", "tokens": 4096, "share": 1, "routing": "balanced"},
    ]
    tiny = [{"model": "tiny", "tokens": 64, "share": 2, "routing": "skewed"}]
    run_benches(output, [(bench_grouped_gemm.BENCH, tiny if output.dry else real)])


def memory_bound(output: Output) -> None:
    """Measure the expert layer and the memory-bound kernels."""
    model, tokens = ("tiny", 64) if output.dry else ("qwen3-30b-a3b", 16384)
    size = {"model": model, "tokens": tokens}
    kernels = ("norm", "rotary", "top_k", "skewed_routing", "weighted_swiglu", "cross_entropy")
    run_benches(output, [
        (bench_expert_layer.BENCH, [size | {"routing": "skewed"}]),
        (bench_memory_bound.BENCH, [size | {"kernel": kernel} for kernel in kernels]),
    ])


def attention(output: Output) -> None:
    """Measure every backend of torch's attention, and packed documents."""
    real = [{"model": "qwen3-30b-a3b", "tokens": tokens, "kind": kind}
            for tokens in (4096, 8192) for kind in ("causal", "documents")]
    real += [{"model": "deepseek-v3", "tokens": 4096, "kind": "causal"}]
    tiny = [{"model": "tiny", "tokens": 64, "kind": kind} for kind in ("causal", "documents")]
    run_benches(output, [(bench_attention.BENCH, tiny if output.dry else real)])


def overlap(output: Output) -> None:
    """Measure kinds and pairs of actions, and their loss of speed beside blocks that stand in for NCCL's."""
    device = device_of(output)
    blocks = () if output.dry else BLOCKS
    multiprocessors = 0 if output.dry else torch.cuda.get_device_properties(device).multi_processor_count
    options = bench_overlap.Options(8, 0.35, "copy", 1, 1 if output.dry else 9, None, None, None, blocks)
    sizes = [{"model": "tiny", "tokens": 32}] if output.dry else [{"model": "qwen3-30b-a3b", "tokens": 16384},
                                                                 {"model": "qwen3-30b-a3b", "tokens": 4096}]
    bench = Bench(bench_overlap.__doc__ or "", "overlap", sizes, {}, partial(bench_overlap.measure, options),
                  bench_overlap.goals(blocks, multiprocessors))
    run_benches(output, [(bench, sizes)])


def quantized(output: Output) -> None:
    """Measure block FP8 against bfloat16, with weights of 2048 and of 7168 columns."""
    common = {"share": 8, "routing": "balanced", "format": "fp8_block"}
    real = [
        {"model": "qwen3-30b-a3b", "tokens": 65536} | common,
        {"model": "deepseek-v3", "tokens": 65536} | common | {"share": 32},
        {"model": "qwen3-30b-a3b", "tokens": 16384} | common,
    ]
    tiny = [{"model": "tiny", "tokens": 64} | common]
    goal = Goal("FP8 is as much faster as the planner counts, within a tenth", "of expected", 0.9)
    bench = bench_quantized.BENCH
    held = Bench(bench.doc, bench.name, bench.settings, bench.quick, beside_expected, (*bench.goals, goal))
    run_benches(output, [(held, tiny if output.dry else real)])


def beside_expected(machine: Machine, **setting: object) -> Iterable[Row]:
    """Yield the rows of bench_quantized with the gain over the planner's prediction."""
    for row in bench_quantized.measure(machine, **setting):  # type: ignore[arg-type]
        expected = row.get("expected")
        yield row | {"of expected": None if expected is None else row["x bf16"] / expected}


# ----------------------------------------------------------------------------------------------------------- running


def device_of(output: Output) -> torch.device:
    """Return the GPU, or the CPU in a dry session. Raises RuntimeError without a GPU."""
    if output.dry:
        return CPU
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; a dry session (--dry) needs none")
    return torch.device("cuda")


def machine_of(output: Output) -> Machine:
    """Return the machine with its rates, measured anew for each part because clocks change between parts."""
    device = device_of(output)
    if output.dry:
        return Machine(device, copy_gb_per_s=10.0, dense_tflops=0.1)
    return Machine(device, copy_gb_per_s(device), dense_tflops(device))


def run_benches(output: Output, benches: Sequence[tuple[Bench, Sequence[Row]]]) -> None:
    """Measure each benchmark's settings, and compare all its rows with its goals after every setting."""
    torch.manual_seed(0)
    machine = machine_of(output)
    if not output.dry:
        output.row(bench="machine", architecture=architecture(machine.device), copy_gb_per_s=machine.copy_gb_per_s,
                   dense_tflops=machine.dense_tflops)
    for bench, settings in benches:
        rows: list[Row] = []
        for setting in settings:
            run_setting(output, bench.name, setting, partial(bench.measure, machine, **setting), rows)
            for goal in bench.goals:
                output.goal(f"{bench.name}: {goal.text}", len(goal.rows(rows)), len(goal.missed(rows)))


def run_setting(
    output: Output, name: str, setting: Row, measure: Callable[[], Iterable[Row]], rows: list[Row]
) -> None:
    """Send the rows of one setting as they come, or the error. rows: the list that they are appended to."""
    if output.left < 0:
        output.skip(bench=name, **setting)
        return
    try:
        for row in measure():
            rows.append(setting | row)
            output.row(bench=name, **setting, **row)
    except RuntimeError as error:
        output.failure(bench=name, **setting, error=str(error))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
