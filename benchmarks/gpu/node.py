"""Parts of `make gpu-node`, which need all GPUs of a machine, or two CPU ranks in a dry session."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from tempfile import TemporaryDirectory

import bench_training
import torch
import torch.distributed as dist
from gpu_bench import Outcome, report_goal
from rank_processes import RankProcesses, join_gloo
from torch.distributed.device_mesh import init_device_mesh

from dualpipe.parallel.all_to_all import AllToAll, CommStream
from dualpipe.runtime.device import record
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.launch.join import connect
from gpu.session import Output
from gpu.small_step import compare_parity

TIMEOUT = timedelta(minutes=3)
WIDTH = 2048  # elements per bfloat16 row: 4 KiB, as Qwen3-30B sends
REPEATS = 10


def parity(output: Output) -> None:
    """Check parity of 2 pipeline ranks x 4 expert-parallel ranks, in float64 and in bfloat16."""
    layout = ["--pp", "1", "--ep", "2"] if output.dry else ["--pp", "2", "--ep", "4"]
    for dtype in ("float64",) if output.dry else ("float64", "bf16"):
        compare_parity(output, [*layout, "--dtype", dtype])


# ---------------------------------------------------------------------------------------------------------- all-to-all


def all_to_all(output: Output) -> None:
    """Measure the rate at which each rank sends to the others, by message size.

    GEMMs run beside it on the same GPUs: `gemm_ms` alone, `both_ms` with the exchange. NCCL's blocks take
    multiprocessors from the GEMMs.
    """
    processes = RankProcesses(exchange_rows, alone=number_of_ranks(output), seconds=max(30.0, output.left))
    for rows in (16,) if output.dry else (256, 2048, 16384, 65536, 262144):
        setting = {"rows": rows, "device": "cpu" if output.dry else "cuda"}
        found = processes.run(setting)
        errors = [each["error"] for each in found if "error" in each]
        if errors:
            output.failure(**setting, error=errors[0])
            continue
        slowest = {name: max(each[name] for each in found) for name in ("seconds", "gemm_seconds", "both_seconds")}
        to_others = 2 * WIDTH * rows * (processes.size - 1) / processes.size
        output.row(**setting, ranks=processes.size, ms=1000 * slowest["seconds"],
                   gemm_ms=1000 * slowest["gemm_seconds"], both_ms=1000 * slowest["both_seconds"],
                   rate=to_others / slowest["seconds"] / 1e9, unit="GB/s")


def exchange_rows(setting: dict[str, object], info: RankInfo, prefix: str) -> dict[str, object]:
    """Check one exchange, then time several. Raises ValueError if the received rows differ from the sent rows."""
    device = join(str(setting["device"]), info, prefix)
    mesh = init_device_mesh(device.type, (info.world_size,), mesh_dim_names=("ep",))
    stream = CommStream(AllToAll(mesh))
    counts = [int(str(setting["rows"])) // info.world_size] * info.world_size
    sent = torch.full((sum(counts), WIDTH), float(info.rank), dtype=torch.bfloat16, device=device)
    received = torch.full_like(sent, torch.nan)
    side = 64 if device.type == "cpu" else 8192
    matrix = torch.zeros(side, side, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        for _ in range(2 + len(sent) // 100_000):  # longer than the exchange at 300 GB/s
            torch.mm(matrix, matrix)

    def exchange(beside: Callable[[], None] = lambda: None) -> None:
        ready = record(device)
        with stream.beside(ready, sent, received):
            started = stream.start(received, sent, counts, counts)
        beside()
        stream.wait(started)

    exchange()
    senders = torch.arange(info.world_size, device=device).repeat_interleave(counts[0])
    if not bool((received == senders.unsqueeze(1)).all()):
        raise ValueError(f"{len(sent)} rows: what came back from rank {info.rank}'s all-to-all is not what was sent")
    timed = {"seconds": exchange, "gemm_seconds": multiply, "both_seconds": lambda: exchange(multiply)}
    return {name: statistics.median(seconds_of(run, device) for _ in range(REPEATS)) for name, run in timed.items()}


def join(device: str, info: RankInfo, prefix: str) -> torch.device:
    """Create the default process group of all ranks, NCCL on GPUs, and return this rank's device."""
    if device == "cpu":
        torch.set_num_threads(1)
        join_gloo(info, prefix)
        return torch.device("cpu")
    own = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(own)
    store = connect(info, TIMEOUT, prefix=prefix)
    dist.init_process_group("nccl", store=store, rank=info.rank, world_size=info.world_size, timeout=TIMEOUT,
                            device_id=own)
    return own


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of `run` on this rank, after a barrier of all ranks."""
    dist.barrier()
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------------------------------------------------- steps


def training(output: Output) -> None:
    """Measure whole steps over meshes of all GPUs: eight layers of Qwen3-30B, or a tiny model on two CPU ranks."""
    sizes = ["--device", "cpu", "--steps", "1"] if output.dry else ["--model", "qwen3-30b-a3b", "--layers", "8"]
    meshes = ["2x1x1"] if output.dry else ["2x1x4", "4x1x2", "1x1x8"]
    args = bench_training.parse([*sizes, "--mesh", *meshes, "--schedule", "dualpipev"])
    ranks = number_of_ranks(output)
    processes = RankProcesses(bench_training.measure, alone=ranks, seconds=max(30.0, output.left))
    rows = []
    with TemporaryDirectory() as folder:
        options = bench_training.options_of(args, processes.size, folder)
        for row in bench_training.measured_rows(processes, options, args):
            rows.append(row)
            book_training(output, row)
            if output.left < 0:
                output.skip(settings="those after " + bench_training.describe(row))
                break
    bench_training.compared(rows)
    measured = [row for row in rows if not row["error"]]
    for goal in bench_training.GOALS:
        report_goal(goal, Outcome(measured).rows)
        output.goal(goal.text, len(goal.rows(measured)), len(goal.missed(measured)))


def book_training(output: Output, row: bench_training.Row) -> None:
    """Book a result: a row, also if it does not fit into memory; any other error of ours or of a rival is a failure."""
    if row["error"] is None or bench_training.not_fitting(row["error"]):
        output.row(**row)
    else:
        output.failure(**row)


def number_of_ranks(output: Output) -> int:
    """Return the number of GPUs of this machine, 2 in a dry session. Raises RuntimeError for fewer than two GPUs."""
    if output.dry:
        return 2
    if torch.cuda.device_count() < 2:
        raise RuntimeError(f"this machine has {torch.cuda.device_count()} GPUs; what is asked takes two or more")
    return torch.cuda.device_count()
