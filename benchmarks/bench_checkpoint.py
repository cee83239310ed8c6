"""Benchmark checkpoints: bandwidth next to `torch.save` and `dd`, time that training is blocked, and host memory.

Ranks are CPU processes joined by gloo. Each has its own share of float32 tensors, and all write to one directory. Times
are medians over rounds, from a barrier to the slowest rank. Compared calls take turns, so they run under the same load.

    dd            one stream of zeros with all the bytes, flushed (conv=fsync): the bandwidth of the disk
    torch.save    each rank writes its tensors to one file, flushed; torch.load (weights_only) reads it back
    save, load    ours; load reads everything twice, as it verifies the checksums first. Files are in the page cache
    sha256        a save and a load with SHA-256 in place of XXH3
    blocked       time until save_async returns, next to a copy of the share in memory; the first touches new memory
    beside        speed of a Python loop on the rank while its checkpoint is written, over the same loop alone; with as
                  many free cores as ranks and writers, the loss is the interpreter that a thread takes from training
    memory        peak memory that a save adds to the rank and its writer, over the rank's share

    python benchmarks/bench_checkpoint.py [--ranks 2] [--mb 200] [--rounds 5] [--dir DIR] [--save]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import add_save, save
from rank_processes import RankProcesses, join_gloo, results_of

from dualpipe.checkpoint import Checkpoints, load
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.rank_process import RankInfo

SECONDS = 3600.0  # timeout of the ranks
SMALL = 100  # tensors of 4 KB, beside large ones
GOALS = {  # at least (>=) or at most (<=)
    "save / dd": (">=", 0.8), "load / torch.load": (">=", 0.8),  # both with checksums
    "thread: blocked / copy": ("<=", 3.0), "thread: memory / share": ("<=", 1.1),
    "process: blocked / copy": ("<=", 3.0), "process: memory / share": ("<=", 1.1),
}


def make_state(rank: int, megabytes: int) -> dict[str, torch.Tensor]:
    sizes = [1024] * SMALL + [2**20] * (megabytes * 10**6 // 2**22)
    return {f"{rank}.{number}": torch.randn(size) for number, size in enumerate(sizes)}


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    slowest = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call over `rounds`; a first, uncounted round warms up."""
    times = [{name: timed(call) for name, call in calls.items()} for _ in range(rounds + 1)]
    return {name: statistics.median(row[name] for row in times[1:]) for name in calls}


def torch_save(state: dict[str, torch.Tensor], path: Path) -> None:
    with open(path, "wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())


def dd(path: Path, size: int) -> None:
    count = -(-size // 2**22)
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={count}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)


class Memory:
    """Watcher of the peak memory of this process and its writer: the rank's pages and the writer's private ones."""

    def __init__(self) -> None:
        self._done, self.most = threading.Event(), 0
        self.before = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def added(self) -> int:
        self._done.set()
        self._thread.join()
        return self.most - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, self._now())

    def _now(self) -> int:
        writers = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                writers += (task / "children").read_text().split()
        return field("self", "VmRSS") + sum(field(pid, "RssAnon") for pid in writers)


def field(pid: int | str, name: str) -> int:
    """Return the bytes on a line of /proc/PID/status; 0 for a process that has ended."""
    try:
        with open(f"/proc/{pid}/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
    except OSError:
        return 0


def loops_until(done: Callable[[], bool]) -> float:
    """Run a Python loop until `done`, which is polled rarely; return its iterations per second."""
    count, start, numbers = 0, time.perf_counter(), list(range(100))
    while True:
        for _ in range(200):
            sum(numbers)
        count += 200
        if done():
            return count / (time.perf_counter() - start)


def measure_async(folder: Path, mesh: Any, kind: str, state: dict[str, torch.Tensor], rounds: int) -> dict[str, float]:
    with Checkpoints(folder / kind, mesh, kind=kind, keep_last=1) as checkpoints:
        memory = Memory()
        first = timed(lambda: checkpoints.save_async(state, step=1))
        checkpoints.wait()
        found = {"first_s": first, "memory_bytes": float(memory.added())}
        blocked, total, beside = [], [], []
        for step in range(2, 2 + rounds):
            deadline = time.perf_counter() + 0.3
            alone = loops_until(lambda limit=deadline: time.perf_counter() > limit)
            start = time.perf_counter()
            blocked.append(timed(lambda at=step: checkpoints.save_async(state, step=at)))
            beside.append(loops_until(checkpoints._pending.ended.done) / alone)
            total.append(time.perf_counter() - start)
        return found | {"blocked_s": statistics.median(blocked), "total_s": statistics.median(total),
                        "beside": statistics.median(beside)}


def measure(setting: tuple[int, int, str], info: RankInfo, prefix: str) -> dict[str, Any]:
    """Return the times of the slowest rank, and the memory and the Python loop's speed of this rank."""
    megabytes, rounds, directory = setting
    rank, world, folder = info.rank, info.world_size, Path(directory)
    torch.set_num_threads(1)
    join_gloo(info, prefix)
    mesh = build_mesh(world, 1, 1, torch.device("cpu"))
    state, again = make_state(rank, megabytes), make_state(rank, megabytes)
    share = sum(tensor.nbytes for tensor in state.values())
    row: dict[str, Any] = {"ranks": world, "share_bytes": share, "bytes": share * world}
    with Checkpoints(folder / "sync", mesh, keep_last=1) as checkpoints:
        row |= medians({
            "dd_s": lambda: dd(folder / "dd", share * world) if rank == 0 else None,
            "torch_save_s": lambda: torch_save(state, folder / f"{rank}.pt"),
            "save_s": lambda: checkpoints.save(state, step=1),
        }, rounds)
    row |= medians({
        "torch_load_s": lambda: torch.load(folder / f"{rank}.pt", weights_only=True),
        "load_s": lambda: load(folder / "sync", again, mesh=mesh),
        "copy_s": lambda: [again[name].copy_(tensor) for name, tensor in state.items()],
    }, rounds)
    assert all(torch.equal(state[name], again[name]) for name in state)
    with Checkpoints(folder / "sha256", mesh, keep_last=1, checksum="sha256") as checkpoints:
        row |= medians({"sha256_save_s": lambda: checkpoints.save(state, step=1)}, rounds)
    row |= medians({"sha256_load_s": lambda: load(folder / "sha256", again, mesh=mesh)}, rounds)
    again.clear()
    for kind in ("thread", "process"):
        row[kind] = measure_async(folder, mesh, kind, state, rounds)
    dist.destroy_process_group()
    return row


def run(world: int, megabytes: int, rounds: int, directory: str | None) -> dict[str, Any]:
    """Run the ranks and return rank 0's row; if a rank fails, end the program with its error."""
    processes = RankProcesses(measure, alone=world, seconds=SECONDS)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=directory) as folder:
        return results_of(processes.run((megabytes, rounds, folder)))[0]


def ratios(row: dict[str, Any]) -> dict[str, float]:
    found = {
        "save / torch.save": row["torch_save_s"] / row["save_s"], "save / dd": row["dd_s"] / row["save_s"],
        "load / torch.load": row["torch_load_s"] / row["load_s"],
    }
    for kind in ("thread", "process"):
        found[f"{kind}: blocked / copy"] = row[kind]["blocked_s"] / row["copy_s"]
        found[f"{kind}: memory / share"] = row[kind]["memory_bytes"] / row["share_bytes"]
    return found


def table(row: dict[str, Any]) -> str:
    lines = [f"{row['ranks']} ranks with {row['share_bytes'] / 1e6:.0f} MB each"]
    for name in ("dd", "torch_save", "save", "sha256_save", "torch_load", "load", "sha256_load"):
        seconds = row[f"{name}_s"]
        lines.append(f"{name.replace('_', '.'):>12} {seconds:7.3f} s {row['bytes'] / seconds / 1e6:8.0f} MB/s")
    lines.append(f"{'copy':>12} {row['copy_s']:7.3f} s")
    for kind in ("thread", "process"):
        r = row[kind]
        lines += [
            f"{kind:>12} {r['blocked_s']:7.3f} s blocked (first {r['first_s']:.3f} s) of {r['total_s']:.3f} s",
            f"{'':>12} Python beside it at {r['beside']:.2f} of its speed; {r['memory_bytes'] / 1e6:+.0f} MB",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=int, default=200, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="a directory on the disk to measure; default the system's for temporary files")
    add_save(parser, "bench_checkpoint")
    args = parser.parse_args()
    row = run(args.ranks, args.mb, args.rounds, args.dir)
    row["ratios"] = ratios(row)
    print(table(row))
    met = {name: row["ratios"][name] >= goal if sign == ">=" else row["ratios"][name] <= goal
           for name, (sign, goal) in GOALS.items()}
    for name, ratio in row["ratios"].items():
        goal = f"  goal {' '.join(map(str, GOALS[name]))}: {'met' if met[name] else 'MISSED'}" if name in GOALS else ""
        print(f"{name:>24} {ratio:6.2f}{goal}")
    if args.save:
        save("bench_checkpoint", [row], args.save)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
