"""What does the engine itself cost? Host time per (micro-batch, stage) beyond the bare modules, against torch's.

Ranks are CPU processes joined by gloo. Each round times, one after the other and so under the same load, a step of
ours, a step of `torch.distributed.pipelining.ScheduleDualPipeV` on the same modules, and the same forwards and
backwards called bare. Host time is the CPU time of the thread that runs the step, which leaves out what it waits for;
wall time is given beside it. The stages are small, so that the engine is seen.

    python benchmarks/engine_overhead.py [--ranks 1 2 4] [--microbatches-per-rank 8] [--rounds 40] [--save]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from dualpipe import DualPipeV

ROWS, WIDTH = 4, 16  # of one micro-batch
GOAL = 0.35  # ours over torch's


def stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def bare(modules: list[nn.Module], num_chunks: int) -> Callable[[], None]:
    """The same work without an engine: for each micro-batch each stage forward, then each backward from a leaf."""
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    gradient = torch.randn(ROWS, WIDTH)
    last = dist.get_rank() == 0

    def run() -> None:
        for _ in range(num_chunks):
            first, second = (module(x.detach().requires_grad_()) for module in modules)
            if last:
                F.mse_loss(second, y).backward()
            else:
                second.backward(gradient)
            first.backward(gradient)

    return run


def ours(modules: list[nn.Module], num_chunks: int) -> Callable[[], None]:
    pipe = DualPipeV(modules)
    x, y = torch.randn(ROWS * num_chunks, WIDTH), torch.randn(ROWS * num_chunks, WIDTH)
    first = dist.get_rank() == 0
    args, labels = ((x,), (y,)) if first else ((), ())
    return lambda: pipe.step(*args, num_chunks=num_chunks, criterion=F.mse_loss if first else None, labels=labels)


def torchs(modules: list[nn.Module], num_chunks: int) -> Callable[[], None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    example = torch.randn(ROWS, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(m, s, 2 * world, torch.device("cpu"), input_args=(example,), output_args=(example,))
        for m, s in zip(modules, (rank, 2 * world - 1 - rank))
    ]
    schedule = ScheduleDualPipeV(stages, num_chunks, loss_fn=F.mse_loss, scale_grads=False)
    x, y = torch.randn(ROWS * num_chunks, WIDTH), torch.randn(ROWS * num_chunks, WIDTH)
    if rank == 0:
        return lambda: schedule.step(x, target=y, losses=[], return_outputs=False)
    return lambda: schedule.step(return_outputs=False)


def measure(rank: int, world: int, per_rank: int, rounds: int, store: str, results: mp.Queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    num_chunks = max(2 * world, per_rank * world)
    plain = [stage(), stage()]
    runs = {
        "bare": bare(plain, num_chunks),
        "ours": ours(plain, num_chunks),
        "torch": torchs(plain, num_chunks),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for name in [*runs] * 5:  # warm up
        runs[name]()
    gc.disable()
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            wall, host = time.perf_counter(), time.thread_time()
            run()
            times[name].append((time.thread_time() - host, time.perf_counter() - wall))
    units = 2 * num_chunks
    medians = {n: [statistics.median(t) / units * 1e6 for t in zip(*values)] for n, values in times.items()}
    results.put((rank, num_chunks, medians))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world: int, per_rank: int, rounds: int) -> dict:
    """The mean over ranks of the medians, in us per (micro-batch, stage)."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (world, per_rank, rounds, os.path.join(folder, "store"), results)
        processes = [context.Process(target=measure, args=(rank, *args)) for rank in range(world)]
        for process in processes:
            process.start()
        by_rank = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    names = ("bare", "ours", "torch")
    mean = {name: [statistics.mean(m[name][i] for _, _, m in by_rank) for i in range(2)] for name in names}
    host = {name: mean[name][0] - mean["bare"][0] for name in ("ours", "torch")}
    wall = {name: mean[name][1] - mean["bare"][1] for name in ("ours", "torch")}
    return {
        "ranks": world, "microbatches": by_rank[0][1], "bare_us": mean["bare"][0],
        "host_us": host, "host_ratio": host["ours"] / host["torch"],
        "wall_us": wall, "wall_ratio": wall["ours"] / wall["torch"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--microbatches-per-rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/engine_overhead.json")
    args = parser.parse_args()
    print("us per (micro-batch, stage) beyond the bare modules; host = CPU time of the stepping thread")
    print(f"{'ranks':>5} {'bare':>7} {'ours':>7} {'torch':>7} {'ratio':>6}   {'ours':>9} {'torch wall':>10} {'ratio':>5}")
    rows = []
    for world in args.ranks:
        rows.append(r := run_ranks(world, args.microbatches_per_rank, args.rounds))
        print(f"{world:>5} {r['bare_us']:>7.1f} {r['host_us']['ours']:>7.1f} {r['host_us']['torch']:>7.1f} "
              f"{r['host_ratio']:>6.2f}   {r['wall_us']['ours']:>9.1f} {r['wall_us']['torch']:>10.1f} "
              f"{r['wall_ratio']:>6.2f}", flush=True)  # fmt: skip
    met = all(r["host_ratio"] <= GOAL for r in rows)
    print(f"goal: host ratio at most {GOAL} for every number of ranks: {'met' if met else 'MISSED'}")
    if args.save:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        report = {"date": str(date.today()), "torch": torch.__version__, **machine, "rows": rows}
        path = Path(__file__).parent / "results" / "engine_overhead.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {path}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
