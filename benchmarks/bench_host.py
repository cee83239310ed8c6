"""Benchmark the host time to launch one kernel, and one layer: us of Python, without a GPU.

    python benchmarks/bench_host.py [--rounds 20] [--calls 100] [--save [FOLDER]]

Kernels are launched by `stub_driver.py`: everything up to Triton's call in C is real, and nothing runs. Left out are
that call and the encoding of a descriptor, some us a launch, and the time that CUDA takes beyond the CPU for PyTorch's
own operators. "layer" is a layer of Qwen3-MoE, forward and backward over two ranks of "ep" in a step of a pipeline, as
the difference between three layers and one; the other rank is simulated. Attention and dense GEMMs only allocate their
results. Tensors are small. Still, a layer's time includes what PyTorch's other operators compute on the CPU, which a
GPU would not take from the host.

Calls are timed one by one in processor time, and the rows take turns. A shared machine slows calls down and never
speeds one up: the least time is the cost, and the median shows the noise. Compare machines by the ratio to `torch.add`
of the same tensors.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpu_bench import Row, add_save, save
from stub_driver import stub_driver, uncomputed_operators
from torch import Tensor

from dualpipe import Pipeline
from dualpipe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_swiglu, grouped_gemm_wgrad
from dualpipe.kernels.norm import rms_norm, rms_norm_backward
from dualpipe.kernels.routing import combine_tokens, sort_tokens
from dualpipe.kernels.swiglu import swiglu_backward
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn import GroupedLinear
from dualpipe.parallel.experts.dispatcher import ExpertParallel

EXPERTS, HIDDEN, OUT, ROWS = 8, 64, 128, 64
LAYER = "layer"
# maximum us, by the first word of a row's name
GOALS = {"grouped": 25.0, "norm": 10.0, LAYER: 800.0}
MICRO_BATCHES = 2


class Sent:
    """A communication that has already completed."""

    def wait(self) -> None:
        pass


class OtherRankAlike:
    """A simulated all-to-all of two ranks that send the same rows; the received values are not meaningful."""

    rank, size, device, group = 0, 2, torch.device("cpu"), None

    def start(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]) -> Sent:
        if len({*received_rows, sent_rows[0]}) == 1:
            received.view(self.size, sent_rows[0], -1).copy_(sent[: sent_rows[0]].expand(self.size, -1, -1))
        else:
            received.zero_()
        return Sent()


def kernel_calls() -> dict[str, Callable[[], object]]:
    """Return the kernel calls by name; the first word selects the goal, and "add" is `torch.add`."""
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    w = torch.zeros(EXPERTS, OUT, HIDDEN, dtype=torch.bfloat16)
    dy = torch.zeros(ROWS, OUT, dtype=torch.bfloat16)
    offs = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (ROWS // EXPERTS)
    gather = torch.arange(ROWS, dtype=torch.int32)
    accumulator = torch.zeros(EXPERTS, OUT, HIDDEN)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    scale = torch.ones(ROWS)
    chosen = torch.zeros(ROWS // 2, 2, dtype=torch.int64)
    tokens = sort_tokens(chosen, EXPERTS)
    return {
        "add": lambda: torch.add(x, x),
        "grouped": lambda: grouped_gemm(x, w, offs),
        "grouped gather": lambda: grouped_gemm(x, w, offs, gather=gather),
        "grouped swiglu": lambda: grouped_gemm_swiglu(x, w, offs),
        "grouped dgrad": lambda: grouped_gemm_dgrad(dy, w, offs),
        "grouped wgrad": lambda: grouped_gemm_wgrad(dy, x, offs, out=accumulator, accumulate=True),
        "norm": lambda: rms_norm(x, weight, 1e-6),
        "norm residual": lambda: rms_norm(x, weight, 1e-6, x),
        "norm backward": lambda: rms_norm_backward(x, x, x, scale, weight),
        "swiglu backward": lambda: swiglu_backward(dy[:, :HIDDEN], dy, None, False, 1.0, 0.0),
        "combine": lambda: combine_tokens(x, None, tokens, top_k=2),
        "sort": lambda: sort_tokens(chosen, EXPERTS),
    }


def step_of(num_layers: int) -> Callable[[], object]:
    """Return a step of a pipeline of one rank whose experts are sharded over two ranks."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
    )
    (stage,) = build_stages(config, 1)
    stage.init_weights(0)
    stage = stage.to(torch.bfloat16)
    stage.use_expert_parallelism(ExpertParallel(config.num_experts, OtherRankAlike()))
    for module in stage.modules():
        if isinstance(module, GroupedLinear):
            module.weight = torch.nn.Parameter(module.weight.detach().chunk(OtherRankAlike.size)[0].clone())
    for parameter in stage.parameters():
        parameter.grad_dtype = torch.float32
    pipe = Pipeline([stage], schedule="1f1b")
    tokens = torch.zeros(2 * MICRO_BATCHES, 8, dtype=torch.int64)

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return lambda: pipe.step(tokens, num_chunks=MICRO_BATCHES, labels=(tokens,), criterion=criterion)


def times_us(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the times of each call, repeated `repeats` times in each of `rounds`; the calls take turns."""
    for call in calls.values():
        for _ in range(5):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                times[name] += [_time_us(call) for _ in range(repeats)]
    finally:
        gc.enable()
    return times


def _time_us(call: Callable[[], object]) -> float:
    """Return the processor time of all threads, because a shared machine interrupts a long step."""
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start) / 1e3


def measure(rounds: int, repeats: int) -> Iterator[Row]:
    """Yield the costs of kernels and of a layer."""
    with stub_driver():
        with torch.no_grad():
            times = times_us(kernel_calls(), rounds, repeats)
        add = min(times["add"])
        for name, found in times.items():
            yield {"call": name, "us": min(found), "median us": statistics.median(found), "of add": min(found) / add}
        with uncomputed_operators():
            steps = times_us({"one": step_of(1), "three": step_of(3)}, rounds, max(1, repeats // 10))
        least, median = (
            (choose(steps["three"]) - choose(steps["one"])) / 2 / MICRO_BATCHES for choose in (min, statistics.median)
        )
        yield {"call": LAYER, "us": least, "median us": median, "of add": least / add}


def main() -> int:
    """Print the table; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="of each kernel in a round; a tenth as many of a step")
    add_save(parser, "host")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("bench_host.py: TRITON_INTERPRET=1 is set, so no kernel is launched; nothing was measured")
        return 0
    torch.set_num_threads(1)
    print(f"{'call':<16} {'us':>8} {'median':>8} {'of add':>7}")
    rows, missed = [], False
    for row in measure(args.rounds, args.calls):
        rows.append(row)
        goal = GOALS.get(row["call"].split()[0])
        verdict = ""
        if goal is not None:
            is_met = row["us"] <= goal
            missed |= not is_met
            verdict = f"  goal: at most {goal:.0f} us: {'met' if is_met else 'MISSED'}"
        times = f"{row['us']:>8.1f} {row['median us']:>8.1f} {row['of add']:>7.1f}"
        print(f"{row['call']:<16} {times}{verdict}", flush=True)
    if args.save:
        save("host", rows, args.save)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
