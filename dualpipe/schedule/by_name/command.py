"""`dualpipe schedule`: builds, proves, times and draws a schedule, and compares it with others."""

from __future__ import annotations

import argparse
import sys
from math import ceil
from pathlib import Path
from shutil import get_terminal_size

from dualpipe.runtime.files import write_wanted
from dualpipe.schedule.by_name.build import BUILDERS, build
from dualpipe.schedule.draw import table, to_svg, to_text
from dualpipe.schedule.page import to_html
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.schedule.search.bound import least_work
from dualpipe.schedule.search.driver import SearchResult, search
from dualpipe.schedule.search.progress import SearchProgress
from dualpipe.schedule.simulate import Costs, Timeline, simulate
from dualpipe.schedule.svg import number
from dualpipe.schedule.types import Schedule
from dualpipe.schedule.validate import validate

COSTS_HELP = (
    "costs of a stage, as F=1,B=2,W=1,FB=2.6 (also I, p2p, R to reduce a stage's gradients, pairs such as FI), or a "
    'JSON file with the same names, "pairs" and "per_stage": {"0": {"F": 1.5}}; default: F=1,B=2,W=1'
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the command `schedule`; `args.run(args)` then runs it."""
    parser = subparsers.add_parser("schedule", help="show, time and draw a pipeline schedule", description=__doc__)
    parser.add_argument("--name", default="dualpipev", help=f"one of {', '.join(BUILDERS)} (default: %(default)s)")
    parser.add_argument("--ranks", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches in a step")
    parser.add_argument("--stages-per-rank", type=int, help="for interleaved_1f1b (default: 2)")
    parser.add_argument("--costs", default="", metavar="COSTS", help=COSTS_HELP)
    parser.add_argument("--memory", type=float, metavar="CAP",
                        help="for auto: stage activations that a rank may hold (default: those of dualpipev, 2P + 1)")
    parser.add_argument("--seed", type=int, help="for auto (default: 0)")
    parser.add_argument("--compare", default="", metavar="NAMES", help="other schedules, separated by commas")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the timeline into FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page, for a browser, with all timelines in it")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the order as CSV of torch's pipelining")
    parser.add_argument("--width", type=int, help="characters of the text timeline (default: those of the terminal)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, or 2 with one line on stderr where the arguments cannot be used."""
    try:
        print(_report(args), end="")
    except (ValueError, OSError) as error:
        print(f"dualpipe schedule: {error}", file=sys.stderr)
        return 2
    return 0


def _report(args: argparse.Namespace) -> str:
    costs, notes = parse_costs(args.costs), ""
    timelines: list[Timeline] = []
    sizes: list[float] = []  # of stages, in those of the first: with fewer of the same model, each costs as much more
    for name in (args.name, *filter(None, map(str.strip, args.compare.split(",")))):
        options = {option: value for option in ("stages_per_rank", "memory", "seed")
                   if not timelines and (value := getattr(args, option)) is not None}
        if name == "auto" and "stages_per_rank" not in options:
            schedule, said = _found(args, costs, alternative=not timelines)
            notes += said
        else:
            schedule = build(name, args.ranks, args.microbatches, **options)
        validate(schedule)
        first = timelines[0].schedule if timelines else schedule
        sizes.append(size := first.num_stages / schedule.num_stages)
        if size != 1 and costs.per_stage:
            raise ValueError(f"costs per stage are for {first.num_stages} stages, but {name} has "
                             f"{schedule.num_stages}; compare with a schedule of as many stages")
        timelines.append(simulate(schedule, costs if size == 1 else costs.scaled(size)))
        if size != 1:
            notes += (f"{schedule.name} cuts the same model into {schedule.num_stages} stages: each costs, and keeps, "
                      f"{number(size)} times as much as one of {first.name}'s\n")
    compared = table(timelines, sizes) + notes
    text = compared + "\n" + to_text(timelines[0], args.width or get_terminal_size((120, 24)).columns)
    title = f"Schedules of {args.ranks} ranks and {args.microbatches} micro-batches"
    return text + "".join(f"{line}\n" for line in write_wanted(
        (args.svg, lambda: to_svg(timelines[0])),
        (args.csv, lambda: timelines[0].schedule.to_torch_csv()),
        (args.html, lambda: to_html(timelines, title=title, notes=compared)),
    ))


def _found(args: argparse.Namespace, costs: Costs, *, alternative: bool) -> tuple[Schedule, str]:
    """What the search finds, and what is to be said of it; `alternative`: also of half the memory."""
    memory = 2 * args.ranks + 1 if args.memory is None else args.memory

    def look(cap: float) -> SearchResult:
        what = f"a schedule of {args.ranks} ranks, {args.microbatches} micro-batches and memory {number(cap)}"
        with SearchProgress(what) as progress:
            return search(args.ranks, args.microbatches, costs=costs, memory=cap, seed=args.seed or 0,
                          progress=progress)

    base = simulate(build("dualpipev", args.ranks, args.microbatches), costs).makespan
    found = look(memory)
    time, bound = found.timeline.makespan, max(found.bounds)
    work = least_work(found.timeline.schedule.placement, args.microbatches, costs)
    said = (
        f"auto: {100 * (1 - time / base):.1f}% less time than dualpipev ({number(base)}), with at most "
        f"{number(found.timeline.peak_memory)} of {number(memory)} stage activations on a rank\n"
        f"lower bound {number(bound)} (by rank {', '.join(map(number, found.bounds))}): auto is "
        f"{100 * (time / bound - 1):.1f}% above it\n"
    ) if base and bound else ""
    if base > work:
        said += (f"time beyond the least work of a rank, {number(work)}: {number(time - work)}, of dualpipev "
                 f"{number(base - work)} ({(time - work) / (base - work):.2f} of it)\n")
    if alternative and time and (half := ceil(memory / 2)) >= 2:
        other = look(half).timeline.makespan
        said += f"with memory {half}: {number(other)}, {100 * (other / time - 1):.1f}% more time\n"
    return found.timeline.schedule, said
