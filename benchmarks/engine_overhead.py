"""Benchmark the overhead of the pipeline engine: host time per (micro-batch, stage), against torch's.

Ranks are CPU processes joined by gloo. Each round times a step of ours and a step of
`torch.distributed.pipelining.ScheduleDualPipeV` on the same modules, one after the other and so under the same load.
gloo's threads have in each step the scheduling policy that its engine gives them: with ours they let computing threads
finish (SCHED_BATCH), with torch's they have the system's default.
Host time is the CPU time of the thread that runs the step; waiting does not count. "engine" is host time less the time
of the modules, the loss function and autograd inside the same step, measured around each call: a thread that has slept
runs them slower than a bare loop does, and the engine does not cause that. "beyond bare" is the whole step less the
same calls in a bare loop, in host time, in CPU time of all threads of the process, and in wall time. The stages are
small, so that the engine's share shows, and plain: an "I" of ours computes their weight gradients at once, where torch
splits the graph (benchmarks/wgrad_split.py measures the splitting).

    python benchmarks/engine_overhead.py [--ranks 1 2 4] [--microbatches-per-rank 8] [--rounds 40] [--save]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_bench import add_save, save
from rank_processes import RankProcesses, join_gloo, results_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from dualpipe import DualPipeV
from dualpipe.pipeline.lower import lower
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.ranks.process_groups import gloo_threads
from dualpipe.schedule import build
from dualpipe.schedule.messages import Message

ROWS, WIDTH = 4, 16  # shape of one micro-batch
SECONDS = 600.0  # timeout of the ranks
# Maximum of our host time over torch's, on one rank and on several.
GOAL_ALONE = 0.5
GOAL = 0.65
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Sample(NamedTuple):
    """Seconds of a step, or us per (micro-batch, stage)."""

    engine: float  # host time outside of the modules, the loss function and autograd
    host: float
    process: float  # CPU time of all threads, gloo's among them
    wall: float


class Meter:
    """Meter of this thread's CPU time inside the wrapped calls; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - start

        return metered


class MeteredAutograd:
    """Stand-in for autograd's engine that meters its backward calls; both pipelines call it by this name."""

    def __init__(self, meter: Meter, engine: Any) -> None:
        self.run_backward = meter.wrap(engine.run_backward)
        self.queue_callback = engine.queue_callback


def build_stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def bare(modules: list[nn.Module], loss_fn: Callable[..., Any], num_chunks: int) -> Callable[[], None]:
    """Build the same work without an engine: per micro-batch, each stage's forward, then each backward from a leaf."""
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    gradient = torch.randn(ROWS, WIDTH)
    last = dist.get_rank() == 0

    def run() -> None:
        for _ in range(num_chunks):
            first, second = (module(x.detach().requires_grad_()) for module in modules)
            if last:
                loss_fn(second, y).backward()
            else:
                second.backward(gradient)
            first.backward(gradient)

    return run


def bare_gloo(modules: list[nn.Module], loss_fn: Callable[..., Any], num_chunks: int) -> Callable[[], None]:
    """Build the same work with its messages: our order of actions, gloo's own calls, no checks and no records.

    No engine that sends each activation and each gradient separately can take less, so this is the floor of both.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    program = lower(build("dualpipev", world, num_chunks), rank, train=True)
    stages = dict(zip((rank, 2 * world - 1 - rank), modules))
    inputs = {(0, number): torch.randn(ROWS, WIDTH) for number in range(num_chunks)}
    y, tags = torch.randn(ROWS, WIDTH), {"F": 1, "B": 2}

    def receive(messages: Iterator[Message]) -> tuple[Any, Tensor] | None:
        message = next(messages, None)
        if message is None:
            return None
        tensor = torch.empty(ROWS, WIDTH)
        return group.recv([tensor], message.src, tags[message.kind]), tensor

    def run() -> None:
        streams = {stream: iter(messages) for stream, messages in program.incoming.items()}
        posted = {stream: receive(messages) for stream, messages in streams.items()}
        sent: dict[Any, tuple[Any, Tensor]] = {}
        arrived = dict(inputs)
        leaves: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        gradients: dict[tuple[int, int], Tensor] = {}
        for instruction in program.instructions:
            for message in instruction.incoming:
                work, tensor = posted[message.stream]
                work.wait()
                posted[message.stream] = receive(streams[message.stream])
                (arrived if message.kind == "F" else gradients)[message.stage, message.microbatch] = tensor
            for action, outgoing in zip(instruction.actions, instruction.outgoing):
                slot = action.stage, action.microbatch
                if action.kind == "W":
                    continue
                if action.kind == "F":
                    leaves[slot] = arrived.pop(slot).detach().requires_grad_()
                    result = stages[action.stage](leaves[slot])
                    is_last = action.stage == 2 * world - 1
                    outputs[slot] = loss_fn(result, y) if is_last else result
                    result, following = result.detach(), (action.stage + 1, action.microbatch)
                else:
                    outputs.pop(slot).backward(gradients.pop(slot, None))
                    result, following = leaves.pop(slot).grad, (action.stage - 1, action.microbatch)
                if outgoing is None:
                    (arrived if action.kind == "F" else gradients)[following] = result
                    continue
                if outgoing.stream in sent:
                    sent[outgoing.stream][0].wait()
                sent[outgoing.stream] = group.send([result], outgoing.dst, tags[outgoing.kind]), result
        for work, _ in sent.values():
            work.wait()

    return run


def ours(modules: list[nn.Module], loss_fn: Callable[..., Any], num_chunks: int) -> Callable[[], None]:
    pipe = DualPipeV(modules)
    x, y = torch.randn(ROWS * num_chunks, WIDTH), torch.randn(ROWS * num_chunks, WIDTH)
    first = dist.get_rank() == 0
    args, labels = ((x,), (y,)) if first else ((), ())
    return lambda: pipe.step(*args, num_chunks=num_chunks, criterion=loss_fn if first else None, labels=labels)


def torchs(modules: list[nn.Module], loss_fn: Callable[..., Any], num_chunks: int) -> Callable[[], None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    example = torch.randn(ROWS, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(m, s, 2 * world, torch.device("cpu"), input_args=(example,), output_args=(example,))
        for m, s in zip(modules, (rank, 2 * world - 1 - rank))
    ]
    schedule = ScheduleDualPipeV(stages, num_chunks, loss_fn=loss_fn, scale_grads=False)
    x, y = torch.randn(ROWS * num_chunks, WIDTH), torch.randn(ROWS * num_chunks, WIDTH)
    if rank == 0:
        return lambda: schedule.step(x, target=y, losses=[], return_outputs=False)
    return lambda: schedule.step(return_outputs=False)


def measure(setting: tuple[int, int], info: RankInfo, prefix: str) -> dict[str, Any]:
    """Return the micro-batches per step, and the medians of this rank in us per (micro-batch, stage)."""
    per_rank, rounds = setting
    torch.set_num_threads(1)
    join_gloo(info, prefix)
    num_chunks = max(2 * info.world_size, per_rank * info.world_size)
    modules, loss_fn, meter = [build_stage(), build_stage()], F.mse_loss, Meter()
    runs = {"bare": bare(modules, loss_fn, num_chunks)}
    for module in modules:
        module.forward = meter.wrap(module.forward)
    torch.autograd.Variable._execution_engine = MeteredAutograd(meter, torch.autograd.Variable._execution_engine)
    metered_loss = meter.wrap(loss_fn)
    runs |= {
        "gloo": bare_gloo(modules, metered_loss, num_chunks),
        "ours": ours(modules, metered_loss, num_chunks),
        "torch": torchs(modules, metered_loss, num_chunks),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for name in [*runs] * 5:  # warm up
        runs[name]()
    gc.disable()
    threads = gloo_threads()
    for _ in range(rounds):
        for name, run in runs.items():
            for thread in threads:
                policy = os.SCHED_OTHER if name == "torch" else os.SCHED_BATCH
                os.sched_setscheduler(thread, policy, os.sched_param(0))
            dist.barrier()
            meter.seconds = 0.0
            before = (time.thread_time(), time.process_time(), time.perf_counter())
            run()
            after = (time.thread_time(), time.process_time(), time.perf_counter())
            host, process, wall = (end - start for start, end in zip(before, after))
            samples[name].append(Sample(host - meter.seconds, host, process, wall))
    units = 2 * num_chunks
    dist.barrier()
    dist.destroy_process_group()
    return {"microbatches": num_chunks} | {
        name: [statistics.median(times) / units * 1e6 for times in zip(*rows)] for name, rows in samples.items()
    }


def run_ranks(world: int, per_rank: int, rounds: int) -> dict[str, Any]:
    """Run the ranks and return the mean over ranks of their medians, in us per (micro-batch, stage)."""
    processes = RankProcesses(measure, alone=world, seconds=SECONDS)
    by_rank = results_of(processes.run((per_rank, rounds)))
    mean = {name: Sample(*map(statistics.mean, zip(*(medians[name] for medians in by_rank))))
            for name in ("bare", "gloo", "ours", "torch")}
    row: dict[str, Any] = {"ranks": world, "microbatches": by_rank[0]["microbatches"], "bare_us": mean["bare"].host}
    for what in Sample._fields:
        base = getattr(mean["bare"], what) if what != "engine" else 0.0
        gloo_us, ours_us, torch_us = (getattr(mean[name], what) - base for name in ("gloo", "ours", "torch"))
        row[what] = {
            "gloo_us": gloo_us, "ours_us": ours_us, "torch_us": torch_us, "floor": gloo_us / torch_us,
            "ratio": ours_us / torch_us,
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--microbatches-per-rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    add_save(parser, "engine_overhead")
    args = parser.parse_args()
    if TORCH < (2, 12):
        print("engine_overhead.py: needs torch 2.12 or newer, as V-shaped schedules of torch 2.11 send from a rank to "
              "itself, which gloo refuses; nothing was measured")
        return 0
    print("us per (micro-batch, stage): gloo's bare loop, ours, torch's; the first two over torch's")
    print(f"{'ranks':>5} {'bare':>6} | {'engine':^35} | {'host beyond bare':^35} | "
          f"{'process beyond bare':^35} | {'wall beyond bare':^35}")
    rows = []
    for world in args.ranks:
        rows.append(row := run_ranks(world, args.microbatches_per_rank, args.rounds))
        columns = [row[what] for what in Sample._fields]
        cells = [
            f"{c['gloo_us']:>7.1f} {c['ours_us']:>7.1f} {c['torch_us']:>7.1f} {c['floor']:>5.2f} {c['ratio']:>5.2f}"
            for c in columns
        ]
        print(f"{world:>5} {row['bare_us']:>6.1f} | " + " | ".join(cells), flush=True)
    met = True
    for row in rows:
        goal = GOAL_ALONE if row["ranks"] == 1 else GOAL
        ratio = row["host"]["ratio"]
        met &= ratio <= goal
        print(f"goal: host time on {row['ranks']} rank(s) at most {goal} of torch's: {ratio:.2f}, "
              f"{'met' if ratio <= goal else 'MISSED'}")
    if args.save:
        save("engine_overhead", rows, args.save)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
