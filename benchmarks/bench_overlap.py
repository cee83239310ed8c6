"""Benchmark pairs of overlapped actions: their cost, and the share of communication that they hide.

A layer of Qwen3-MoE (attention, router, experts) with the sizes of each model, in bfloat16 (float32 on CPU), on one
of `--ranks` expert-parallel ranks. The pipeline itself runs every kind of action alone and every pair of kinds. Each
step runs all of them, so that compared times were measured side by side. Routing is balanced.

The other ranks are modelled: each sends this rank as many rows as it receives from it. A byte takes such a time that
communication is `--share` of a forward and a backward that hide none of it. For that time, `--stand-in copy` keeps a
copy engine busy with copies to the host, and `kernel` runs a kernel on one multiprocessor. Under torchrun, `--group`
exchanges rows between real ranks. NCCL occupies multiprocessors too, so the compute is also timed beside N blocks of
the size of NCCL's, which hold their multiprocessors throughout (`--blocks`).

    ms             median of a step's action or pair, on the compute stream from its start to its end
    alone ms       the same actions one after the other, communication not hidden: F, and for B the sum of I and W
    communication  the communication in alone ms: alone ms less the same with communication that takes no time
    hidden         the fraction of communication that is hidden: (alone - ms) / communication
    of alone       ms / alone; x alone is the inverse
    beside N       speed beside N blocks over the speed without them, both with communication that takes no time

    python benchmarks/bench_overlap.py [--model NAME ...] [--tokens N ...] [--share 0.35] [--costs [FOLDER]] [--save]
    torchrun --nproc-per-node 8 benchmarks/bench_overlap.py --group --model qwen3-30b-a3b
    python benchmarks/bench_overlap.py --device cpu          tiny sizes, to see it run
    dualpipe schedule --ranks 8 --microbatches 32 --costs benchmarks/results/overlap_qwen3-30b-a3b_16384.json

`--costs` writes one such file for each model and number of tokens, in milliseconds of a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path

import torch
import torch.distributed as dist
from expert_shapes import MODELS, SIZES, BalancedRoutes, Model, every
from gpu_bench import RESULTS, Bench, Goal, Machine, Row, Spans, add_save, report, require_gpu, run_settings, save
from stand_ins import STAND_INS, Blocks
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.models import Qwen3MoeConfig
from dualpipe.models.decoder import Experts
from dualpipe.models.stages import Stage
from dualpipe.parallel.all_to_all import AllToAll
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.mesh import build_mesh
from dualpipe.schedule import Action, Schedule
from dualpipe.schedule.simulate import lengthen_pairs

TOKENS = (4096, 16384)
TINY_TOKENS = (512,)
SEQUENCE = 4096
HEADS = {  # query heads, key/value heads, head dimension
    "deepseek-v2-lite": (16, 16, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "gpt-oss-20b": (64, 8, 64),
    "tiny": (4, 2, 16),
}
TINY = ("tiny",)
KINDS = ("F", "B", "I", "W")
WORK = [*KINDS, *("".join(pair) for pair in combinations_with_replacement(KINDS, 2) if pair != ("W", "W"))]
FLUSHED = 2**28  # bytes written before each action, to evict the previous action's data from the L2 cache

# ------------------------------------------------------------------------------------------------- modelled all-to-all


class Done:
    """A `Work` that completes at `due` (on the clock of `time.perf_counter`); 0: its results follow on the stream."""

    def __init__(self, due: float = 0.0) -> None:
        self._due = due

    def wait(self) -> bool:
        if self._due:
            time.sleep(max(0.0, self._due - time.perf_counter()))
        return True


class Mirror:
    """Stand-in for an `AllToAll` whose other ranks each send back the rows they receive, at `seconds_per_byte`."""

    rank, group = 0, None

    def __init__(self, ranks: int, device: torch.device, occupy: Callable[[float], None] | None) -> None:
        self.size, self.device, self._occupy = ranks, device, occupy
        self.seconds_per_byte, self._free_at = 0.0, 0.0

    def start(self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]) -> Done:
        """Start an all-to-all; see `AllToAll`."""
        received.copy_(sent)
        seconds = self.seconds_per_byte * sent.nbytes * (1 - sent_rows[0] / max(1, sum(sent_rows)))
        if not seconds:
            return Done()
        if self._occupy is not None:
            self._occupy(seconds)
            return Done()
        self._free_at = max(self._free_at, time.perf_counter()) + seconds  # one after the other, as on a stream
        return Done(self._free_at)


# --------------------------------------------------------------------------------------------------- the timed pipeline


class Scale(nn.Module):
    """The stage before and after the layer: one scalar multiplication, with a gradient."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def time_actions(device: torch.device) -> Spans:
    """Return spans that record the time of each instruction of a pipeline."""
    spans = Spans(device)
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    @contextmanager
    def span(name: str) -> Iterator[None]:
        if flushed is not None:
            flushed.zero_()  # also gives the host a lead
        with spans.span(name):
            yield

    spans.of_actions(span)
    return spans


def before(kind: str, mb: int) -> list[tuple[Action, ...]]:
    """Return the steps that micro-batch `mb` needs before an action of this kind on stage 1, the layer."""
    actions = [Action("F", 0, mb)]
    if kind != "F":
        actions += [Action("F", 1, mb), Action("F", 2, mb), Action("B", 2, mb)]
    if kind == "W":
        actions += [Action("I", 1, mb)]
    return [(action,) for action in actions]


def after(kind: str, mb: int) -> list[tuple[Action, ...]]:
    """Return the remaining steps of micro-batch `mb` after an action of this kind on stage 1."""
    actions = [Action("F", 2, mb), Action("B", 2, mb), Action("B", 1, mb)] if kind == "F" else []
    actions += [Action("W", 1, mb)] if kind == "I" else []
    return [(action,) for action in (*actions, Action("B", 0, mb))]


def schedule_of_all() -> tuple[Schedule, dict[str, str]]:
    """Return a schedule of each kind and pair once, on separate micro-batches, and the work by instruction name."""
    steps: list[tuple[Action, ...]] = []
    names, mb = {}, 0
    for work in WORK:
        numbers = range(mb, mb := mb + len(work))
        timed = tuple(Action(kind, 1, number) for kind, number in zip(work, numbers))
        for part, middle in ((before, [timed]), (after, [])):
            for kind, number in zip(work, numbers):
                steps += part(kind, number)
            steps += middle
        names[";".join(map(str, timed))] = work
    return Schedule("all kinds and pairs", 1, 3, mb, (tuple(steps),)), names


def make_stage(
    model: Model, heads: tuple[int, int, int], local_experts: int, layers: int, device: torch.device
) -> Stage:
    """Build `layers` layers with this rank's experts.

    They are in bfloat16 with float32 gradients, as in training; on CPU in float32.
    """
    config = Qwen3MoeConfig(
        vocab_size=1, hidden_size=model.hidden, num_hidden_layers=layers, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=heads[2], num_experts=model.experts, num_experts_per_tok=model.top_k,
        moe_intermediate_size=model.intermediate, norm_topk_prob=True,
    )
    with torch.device("meta"):
        stage = Stage(config, range(layers), first=False, last=False)
        for layer in stage.layers.values():
            layer.mlp.experts = Experts(local_experts, config.hidden_size, config.moe_intermediate_size)
            layer.mlp.gate.choice = BalancedRoutes(stride=spread(model))
    stage = stage.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    stage.init_weights(seed=0)
    for parameter in stage.parameters():
        parameter.grad_dtype = torch.float32
    return stage


def spread(model: Model) -> int:
    """Return the stride that spreads a token's experts over all ranks."""
    stride = model.experts // model.top_k + 1
    return stride if stride % 2 else stride + 1  # odd, because the numbers of experts are powers of two


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Options:
    ranks: int
    share: float
    stand_in: str
    layers: int
    repeats: int
    costs: Path | None
    group: AllToAll | None
    process_group: dist.ProcessGroup | None
    blocks: Sequence[int] = ()


def measure(options: Options, machine: Machine, model: str, tokens: int) -> Iterator[Row]:
    """Yield a row for each kind and pair."""
    sizes, device = SIZES[model], machine.device
    occupy = STAND_INS[options.stand_in](device) if device.type == "cuda" and options.group is None else None
    mirror = Mirror(options.ranks, device, occupy)
    free, real = (ExpertParallel(sizes.experts, a2a) for a2a in (mirror, options.group or mirror))
    stage = make_stage(sizes, HEADS[model], real.local_experts, options.layers, device)
    stage.use_expert_parallelism(real)  # the pipeline must know of it when it is built
    schedule, names = schedule_of_all()
    spans = time_actions(device)
    dtype = next(stage.parameters()).dtype
    ends = (Scale(device, dtype), Scale(device, dtype))
    pipe = Pipeline((ends[0], stage, ends[1]), process_group=options.process_group, schedule=schedule)
    length = min(tokens, SEQUENCE)
    x = torch.randn(tokens // length, length, sizes.hidden, device=device, dtype=dtype)
    x = x.repeat(schedule.num_microbatches, 1, 1)
    held = Blocks(device).held if options.blocks else nullcontext

    def run(experts: ExpertParallel, blocks: int = 0) -> dict[str, float]:
        stage.use_expert_parallelism(experts)
        spans.take()
        with held(blocks):
            loss, _ = pipe.step(x, num_chunks=schedule.num_microbatches, criterion=lambda y: y.float().square().mean())
            losses = loss.tolist()  # waits for the device
        if not all(abs(one - losses[0]) <= 1e-3 * losses[0] for one in losses):  # NaN too
            raise RuntimeError(f"micro-batches that are the same have different losses, by what they run in: {losses}")
        return {names[name]: ms for name, ms in spans.take() if name in names}

    computing, given, *beside = side_by_side(run, free, real, mirror, options)
    yield from rows_of(computing, given, dict(zip(options.blocks, beside)))
    if options.costs is not None and (options.group is None or options.group.rank == 0):
        write_costs(options.costs / f"overlap_{model}_{tokens}.json", given)


def side_by_side(
    run: Callable[..., dict[str, float]], free: ExpertParallel, real: ExpertParallel, mirror: Mirror, options: Options
) -> list[dict[str, float]]:
    """Return the median milliseconds of each kind and pair under each condition.

    Conditions: communication that takes no time, the requested communication, and, beside each number of blocks,
    communication that takes no time.
    """
    for _ in range(2):
        run(free)  # the first calls compile
    before = free.sent_bytes
    tried = [run(free) for _ in range(3)]
    computing = statistics.median(ms["F"] + ms["I"] + ms["W"] for ms in tried) / 1000
    sent = (free.sent_bytes - before) / len(tried) / len("".join(WORK))  # per micro-batch: a forward and a backward
    seconds_per_byte = computing * options.share / (1 - options.share) / sent
    conditions = [(free, 0.0, 0), (real, seconds_per_byte, 0), *((free, 0.0, blocks) for blocks in options.blocks)]
    found: list[defaultdict[str, list[float]]] = [defaultdict(list) for _ in conditions]
    for _ in range(options.repeats):
        for times, (experts, rate, blocks) in zip(found, conditions):
            mirror.seconds_per_byte = rate
            for work, ms in run(experts, blocks).items():
                times[work].append(ms)
    return [{work: statistics.median(ms) for work, ms in times.items()} for times in found]


def rows_of(
    computing: dict[str, float], given: dict[str, float], beside: dict[int, dict[str, float]]
) -> Iterator[Row]:
    """Yield the rows of all kinds and pairs from their milliseconds.

    computing: with communication that takes no time; given: with the requested communication; beside: by number of
    blocks.
    """
    parts = {"F": "F", "B": "IW", "I": "I", "W": "W"}
    for work in WORK:
        pieces = "".join(parts[kind] for kind in work)
        alone = sum(given[piece] for piece in pieces)
        communication = alone - sum(computing[piece] for piece in pieces)
        yield {
            "work": "&".join(work), "ms": given[work], "alone ms": alone, "communication ms": communication,
            "hidden": None if work == "W" else (alone - given[work]) / communication,
            "of alone": given[work] / alone, "x alone": alone / given[work],
        } | {f"beside {blocks}": computing[work] / ms[work] for blocks, ms in beside.items()}


def write_costs(path: Path, ms: dict[str, float]) -> None:
    """Write the costs file for `dualpipe schedule --costs`."""
    ms, notes = lengthen_pairs(ms)
    costs = {work: ms[work] for work in (*KINDS, "FB")}
    costs["pairs"] = {work: ms[work] for work in WORK if len(work) == 2 and work != "FB"}
    for note in notes:
        print(note)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(costs, indent=1) + "\n")
    print(f"wrote {path}")


# -------------------------------------------------------------------------------------------------------- main program


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch on one rank")
    parser.add_argument("--ranks", type=int, default=8, help="expert-parallel ranks that are modelled")
    parser.add_argument("--share", type=float, default=0.35, help="of communication in F + B that hide none of it")
    parser.add_argument("--stand-in", default="copy", choices=list(STAND_INS), help="what takes the time of it")
    parser.add_argument("--blocks", type=int, nargs="*", default=[4, 16, 32], help="numbers of NCCL's blocks beside it")
    parser.add_argument("--layers", type=int, default=1, help="of the stage")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=9.0, help="start no setting after so long")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes")
    parser.add_argument("--group", action="store_true", help="between the ranks of torchrun instead of modelled ones")
    parser.add_argument("--costs", nargs="?", type=Path, const=RESULTS, metavar="FOLDER",
                        help="write overlap_MODEL_TOKENS.json there, by default under benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="only 16384 tokens")
    add_save(parser, "overlap")
    args = parser.parse_args()
    if not 0 < args.share < 1:
        parser.error(f"--share must be between 0 and 1; got {args.share}")
    if args.tokens is None:
        args.tokens = TINY_TOKENS if args.device == "cpu" else TOKENS
    if args.device == "cpu":
        args.blocks = []  # a CPU has no multiprocessors to hold
    if args.quick:
        args.tokens = [16384]
    return args


def joined(args: argparse.Namespace, device: torch.device) -> tuple[AllToAll | None, dist.ProcessGroup | None]:
    """Return the all-to-all of torchrun's ranks, and the process group of this rank's pipeline of one rank."""
    if not args.group:
        return None, None
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process
    mesh = build_mesh(1, 1, dist.get_world_size(), device)
    return AllToAll(mesh["ep"]), mesh["pp"].get_group()


def settings(args: argparse.Namespace) -> list[Row]:
    return every(model=TINY if args.device == "cpu" else args.model, tokens=args.tokens)


def goals(blocks: Sequence[int], multiprocessors: int) -> list[Goal]:
    """Return the goals for pairs and for the speed beside blocks.

    N blocks occupy N of `multiprocessors`: beside them, work may take multiprocessors / (multiprocessors - N) + 0.05
    times as long.
    """
    slowest = {n: multiprocessors / (multiprocessors - n) + 0.05 for n in blocks}
    return [
        Goal("F&B at most 0.75 of F + B with communication unhidden", "x alone", 1 / 0.75,
             lambda row: row["work"] == "F&B"),
        *(Goal(f"at most {times:.3f} times as long beside {n} blocks of NCCL's size", f"beside {n}", 1 / times)
          for n, times in slowest.items()),
    ]


def main() -> int:
    args = parse()
    if args.device == "cpu":
        torch.set_num_threads(1)  # with other load, more threads make these sizes many times slower
    device = torch.device("cpu") if args.device == "cpu" else require_gpu()
    group, process_group = joined(args, device)
    options = Options(
        args.ranks if group is None else group.size, args.share, args.stand_in, args.layers, args.repeats, args.costs,
        group, process_group, args.blocks,
    )
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if args.blocks else 0
    if any(not 0 < blocks < multiprocessors for blocks in args.blocks):
        raise SystemExit(f"--blocks must be between 1 and {multiprocessors - 1}; got {args.blocks}")
    torch.manual_seed(0)
    bench = Bench(__doc__, "overlap", settings(args), {}, partial(measure, options),
                  goals(args.blocks, multiprocessors))
    machine = Machine(device, copy_gb_per_s=float("nan"), dense_tflops=float("nan"))
    outcome = run_settings(bench, bench.settings, machine, args.minutes)
    if group is not None and group.rank > 0:
        args.save = None
    if args.save:
        how = {"share": None if args.group else args.share, "stand_in": "group" if args.group else args.stand_in}
        save("overlap", outcome.rows, args.save, **how, ranks=options.ranks, layers=args.layers,
             failures=outcome.failures, skipped=outcome.skipped)
    status = [report(bench.goals, outcome)]
    if dist.is_initialized():  # only rank 0's times are shown; another rank's may miss a goal that these meet
        dist.broadcast_object_list(status, device=torch.device("cpu"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])  # skip the destructors of the groups, in which torch was seen to abort
    return status[0]


if __name__ == "__main__":
    sys.exit(main())
