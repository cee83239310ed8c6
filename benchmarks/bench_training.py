"""Benchmark whole training steps over meshes, schedules, overlap and recompute, next to torch's pipelines.

A model with random weights and tokens trains for some steps in each setting: forward and backward of all micro-batches,
clipping, AdamW, its loss read at the end, as `dualpipe train` does. Routing is balanced. For comparison, the plain
forward of the same stages runs under torch's own ScheduleDualPipeV and Schedule1F1B, and without a pipeline (pp = 1):
FSDP2 and expert parallelism alone, micro-batch by micro-batch. All compute the same step, which is checked by the first
step's loss and gradient norm. Each setting has its own processes, on all ranks: a setting that fails, does not fit or
does not end becomes a row with its reason, and does not affect the others.

    step ms      median, of the slowest rank
    tokens/s     per GPU, or per rank on CPU
    TFLOP/s      per GPU, in the model's GEMMs (models/flops.py); MFU: the fraction of its bf16 peak
    bubble       share of forward and backward in which a rank runs no action: it waits for other ranks, for parameters
                 to be gathered or for gradients to be reduced; mean of the ranks. Not measured without a pipeline
    exposed      share of forward and backward in which compute waits for dispatch or combine; mean of the ranks
    GB           peak memory of the worst rank; on CPU, the memory that its process holds
    x others     tokens/s over those of the fastest comparison with the same mesh and recompute

    python benchmarks/bench_training.py [--model NAME|CONFIG.JSON] [--tokens N] [--save]     all GPUs of this machine
    srun --ntasks-per-node 8 --gpus-per-node 8 python benchmarks/bench_training.py --mesh 2x2x8 4x1x8    or torchrun
    python benchmarks/bench_training.py --device cpu     tiny sizes on two ranks

Exit status, the same on all ranks: 1 if a goal is missed or a setting of this library fails, 0 otherwise. A setting
that does not fit into memory is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from expert_shapes import random_like_stride
from gpu_bench import Goal, Outcome, Row, Spans, add_save, print_table, report, require_gpu, save
from rank_processes import RankProcesses
from training_step import TORCHS, training_step

from dualpipe.models import read_config
from dualpipe.models.flops import flops_per_token
from dualpipe.parallel.all_to_all import PendingRows
from dualpipe.runtime import device as cuda
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, MemoryConfig, ModelConfig, ParallelConfig, TrainConfig
from dualpipe.train.launch.join import join
from dualpipe.train.metrics import memory_bytes

EXAMPLES = Path(__file__).parents[1] / "examples"
OURS = "dualpipe"
WARMUP = 2  # steps
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}  # relative, for the loss and the gradient norm
SHOWN = 90  # characters of a reason that the table shows
GOALS = (
    Goal("dualpipev with overlap is at least as fast as torch's pipelines, or as FSDP2 alone, on the same mesh",
         "x others", 1.0, lambda row: row["run by"] == OURS and row["schedule"] == "dualpipev" and row["overlap"]),
)

# ----------------------------------------------------------------------------------------------------------- a setting


@dataclass(frozen=True)
class Options:
    """Options that all settings share."""

    model: str
    meshes: tuple[tuple[int, ...], ...]  # pp, dp, ep
    ranks: int
    tokens: int  # per step, on all ranks
    sequence_length: int
    micro_batch_size: int
    steps: int
    seconds: float
    device: str
    dtype: str
    stride: int  # of `BalancedRoutes`, the same in all settings


def settings(args: argparse.Namespace, options: Options) -> Iterator[Row]:
    """Yield every distinct combination. Overlap matters only for schedules with pairs; comparisons run without it."""
    for (pp, dp, ep), recompute in product(options.meshes, args.recompute):
        same = {"mesh": f"{pp}x{dp}x{ep}", "recompute": recompute}
        for schedule, overlap in product(args.schedule, args.overlap):
            pairs = any(len(step) > 1 for rank in build(schedule, pp, 2 * pp).ranks for step in rank)
            if pairs or overlap == args.overlap[0]:
                yield {"run by": OURS, "schedule": schedule, "overlap": overlap == "on" and pairs, **same}
        if recompute in ("none", "layer"):  # the modes that torch's checkpoint can do for a plain forward
            others = [("FSDP2", "1f1b")] if pp == 1 else [("torch", schedule) for schedule in TORCHS]
            for name, schedule in others:
                yield {"run by": name, "schedule": schedule, "overlap": False, **same}


def config_of(options: Options, setting: Row) -> Config:
    pp, dp, ep = map(int, setting["mesh"].split("x"))
    own, unfit = divmod(options.tokens, options.sequence_length * options.micro_batch_size * dp * ep)
    if unfit or not own:
        raise ValueError(f"{options.tokens} tokens are not so many micro-batches of {options.micro_batch_size} x "
                         f"{options.sequence_length} for each of {dp * ep} pipelines; give a multiple")
    return Config(
        model=ModelConfig(options.model),
        parallel=ParallelConfig(
            pp=pp, dp=dp, ep=ep, overlap=setting["overlap"], schedule=setting["schedule"],
            device=options.device, timeout=options.seconds,
        ),
        train=TrainConfig(
            num_chunks=own, micro_batch_size=options.micro_batch_size, sequence_length=options.sequence_length,
            dtype=options.dtype,
        ),
        memory=MemoryConfig((setting["recompute"],) if setting["run by"] == OURS else ()),
    )


def measure(given: tuple[Options, Row], info: RankInfo, prefix: str) -> Row:
    """Measure one setting on this rank and return its figures.

    "loss" is the loss of this rank's pipeline in the first step, None on ranks that do not have it; "norm" is the norm
    of the whole gradient.
    """
    options, setting = given
    config = config_of(options, setting)
    if options.device == "cpu":
        torch.set_num_threads(1)
    with join(config, info, prefix=prefix) as (job, _):
        spans, times = Spans(job.device), []
        spans.of_actions(lambda _: spans.span("action"))
        for kind in (PendingRows, *PendingRows.__subclasses__()):  # times the wait, not the start
            kind.wait = spans.around("exposed", kind.wait)
        by, again = setting["run by"], setting["recompute"] == "layer"
        step = training_step(config, by, job, spans, options.stride, checkpointed=again and by != OURS)
        loss, norm = step()
        for _ in range(WARMUP - 1):
            step()
        spans.take()
        for _ in range(options.steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        ms: dict[str, float] = dict.fromkeys(("all", "action", "exposed"), 0.0)
        for name, took in spans.take():
            ms[name] += took
        return {
            "seconds": statistics.median(times), "exposed": ms["exposed"] / ms["all"], "loss": loss, "norm": norm,
            "bubble": 1 - ms["action"] / ms["all"] if ms["action"] else None, "bytes": memory_bytes(job.device),
            "gpu": cuda.model_name(job.device),
        }


# ------------------------------------------------------------------------------------------------------------ the table


def row_of(found: Sequence[Row], options: Options) -> Row:
    """Return a row of the table from the ranks' figures, or with the error if a rank has none."""
    row = dict.fromkeys(("step ms", "tokens/s", "TFLOP/s", "MFU", "bubble", "exposed", "GB", "x others", "error"))
    if errors := [each["error"] for each in found if "error" in each]:
        return row | {"error": next((text for text in errors if not_fitting(text)), errors[0])}
    seconds = max(each["seconds"] for each in found)
    speed, peak = options.tokens / seconds / options.ranks, cuda.peak_tflops(found[0]["gpu"])
    tflops = speed * flops_per_token(read_config(options.model), options.sequence_length).total / 1e12
    bubbles, losses = ([each[what] for each in found if each[what] is not None] for what in ("bubble", "loss"))
    return row | {
        "step ms": 1000 * seconds, "tokens/s": speed, "TFLOP/s": tflops,
        "MFU": tflops / peak if peak and options.dtype == "bf16" else None,
        "bubble": statistics.mean(bubbles) if bubbles else None,
        "exposed": statistics.mean(each["exposed"] for each in found),
        "GB": max(each["bytes"] for each in found) / 1e9, "loss": statistics.mean(losses), "norm": found[0]["norm"],
    }


def not_fitting(error: str) -> bool:
    return "out of memory" in error.lower()


def checked(row: Row, rows: Sequence[Row], tolerance: float) -> Row:
    """Return the row, with an error if its loss or gradient norm differs from the first row's."""
    first = next((each for each in rows if each["error"] is None), row)
    if row["error"] is None and not all(abs(row[n] - first[n]) <= tolerance * first[n] for n in ("loss", "norm")):
        differs = ", ".join(f"{name} {row[name]:.5g} instead of {first[name]:.5g}" for name in ("loss", "norm"))
        return row | {"error": f"computes another step: {differs}"}
    return row


def compared(rows: Sequence[Row]) -> None:
    """Fill in the "x others" column."""
    for row in (row for row in rows if row["error"] is None and row["run by"] == OURS):
        speeds = [each["tokens/s"] for each in rows if each["run by"] != OURS and each["error"] is None
                  and all(each[name] == row[name] for name in ("mesh", "recompute"))]
        row["x others"] = row["tokens/s"] / max(speeds) if speeds else None


# -------------------------------------------------------------------------------------------------------- main program


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a config.json, or a folder of examples/models: qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="only the first ones, for a model that does not fit")
    parser.add_argument("--tokens", type=int, help="of a step, on all ranks: 16 sequences for each")
    parser.add_argument("--sequence-length", type=int, help="4096")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences")
    parser.add_argument("--mesh", nargs="+", metavar="PPxDPxEP", help="every power of two as pp, ep what is left")
    parser.add_argument("--schedule", nargs="+", default=["dualpipev", "zbv", "1f1b"])
    parser.add_argument("--overlap", nargs="+", default=["on", "off"], choices=("on", "off"))
    parser.add_argument("--recompute", nargs="+", default=["none"], help="as memory.recompute of `dualpipe train`")
    parser.add_argument("--steps", type=int, default=10, help=f"that are timed, after {WARMUP}")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which a setting is given up")
    parser.add_argument("--ranks", type=int, help="to start, without torchrun and SLURM: all GPUs; on CPU 2")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes")
    add_save(parser, "training")
    return parser.parse_args(arguments)


def options_of(args: argparse.Namespace, ranks: int, folder: str) -> Options:
    """Return the options of the command line. folder: for a config.json with fewer layers, if one is needed."""
    tiny = args.device == "cpu"
    given = Path(args.model or ("../tiny-cpu" if tiny else "qwen3-30b-a3b"))
    path = given if given.exists() and args.model else EXAMPLES / "models" / given
    path = path / "config.json" if path.is_dir() else path
    if args.layers:
        path = with_layers(path, args.layers, Path(folder))
    model, length = read_config(path), args.sequence_length or (32 if tiny else 4096)
    if args.mesh:
        meshes = [tuple(map(int, mesh.split("x"))) for mesh in args.mesh]
    else:
        rests = [(pp, ranks // pp) for pp in (2**n for n in range(ranks.bit_length())) if ranks % pp == 0]
        meshes = [(pp, rest // gcd(rest, model.num_experts), gcd(rest, model.num_experts)) for pp, rest in rests]
    return Options(
        str(path), tuple(meshes), ranks, args.tokens or (4 if tiny else 16) * ranks * length, length,
        args.micro_batch_size, args.steps, args.seconds, args.device, "fp32" if tiny else "bf16",
        random_like_stride(model.num_experts, model.num_experts_per_tok, max(ep for _, _, ep in meshes)),
    )


def with_layers(path: Path, layers: int, folder: Path) -> Path:
    """Write the model's config.json with only its first `layers` layers, and return its path."""
    described = json.loads(path.read_text()) | {"num_hidden_layers": layers}
    if "layer_types" in described:
        described["layer_types"] = described["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(described))
    return folder / "config.json"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar with the tokens/s per GPU of each setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.25 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [f"{at}  " + describe(row) for at, row in enumerate(rows, 1)]
    colors = {OURS: "#1f77b4", "torch": "#ff7f0e", "FSDP2": "#7f7f7f"}
    bars = axes.barh(names, [row["tokens/s"] or 0 for row in rows], color=[colors[row["run by"]] for row in rows])
    axes.bar_label(bars, [f"{row['tokens/s']:,.0f}" if row["tokens/s"] else "none" for row in rows], padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s of each GPU", xmargin=0.1)
    figure.savefig(path)
    print(f"saved {path}")


def describe(row: Row) -> str:
    overlap = " with overlap" if row["overlap"] else ""
    return f"{row['run by']} {row['mesh']} {row['schedule'] or ''}{overlap}, recompute {row['recompute']}"


def measured_rows(processes: RankProcesses, options: Options, args: argparse.Namespace) -> Iterator[Row]:
    """Run every setting, and yield its row or its error as soon as it has ended."""
    rows: list[Row] = []
    for setting in settings(args, options):
        print(f"{describe(setting)} ...", flush=True)
        row = setting | row_of(processes.run((options, setting)), options)
        rows.append(checked(row, rows, TOLERANCE[options.dtype]))
        print(f"    {rows[-1]['error'] or '{:.0f} ms a step'.format(row['step ms'])}", flush=True)
        yield rows[-1]


def main() -> int:
    args = parse()
    alone = args.ranks or (2 if args.device == "cpu" else require_gpu() and cuda.count())
    processes = RankProcesses(measure, alone=alone, seconds=args.seconds)
    if not processes.first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process
    with TemporaryDirectory() as folder:
        options = options_of(args, processes.size, folder)
        rows = list(measured_rows(processes, options, args))
    compared(rows)
    print_table([row | {"error": row["error"] and row["error"].partition("\n")[0][:SHOWN]} for row in rows])
    print()
    if processes.first and args.save:
        save("training", rows, args.save, options=asdict(options) | {"model": read_config(options.model).to_dict()})
        if find_spec("matplotlib"):
            draw(rows, args.save / "training.png")
    measured = [{name: value for name, value in row.items() if value is not None} for row in rows if not row["error"]]
    failures = [row for row in rows if row["error"] and row["run by"] == OURS and not not_fitting(row["error"])]
    return processes.from_first(report(GOALS, Outcome(measured, failures)))


if __name__ == "__main__":
    sys.exit(main())
