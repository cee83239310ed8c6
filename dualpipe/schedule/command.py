"""`dualpipe schedule`: builds, validates, times and draws a schedule, and compares it with others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from dualpipe.runtime.files import write_texts
from dualpipe.schedule.by_name import BUILDERS, build
from dualpipe.schedule.draw import number, table, to_svg, to_text
from dualpipe.schedule.page import to_html
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.schedule.search.bound import least_work
from dualpipe.schedule.search.driver import EFFORT, SearchResult, search
from dualpipe.schedule.search.progress import SearchProgress
from dualpipe.schedule.simulate import Costs, Timeline, simulate
from dualpipe.schedule.types import Schedule
from dualpipe.schedule.validate import validate

COSTS_HELP = (
    "costs of a stage, as F=1,B=2,W=1,FB=2.6 (also I, p2p, R to reduce a stage's gradients, pairs such as FI), or a "
    'JSON file with the same names, "pairs" and "per_stage": {"0": {"F": 1.5}}; default: F=1,B=2,W=1'
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command `schedule` to a parser; `args.run(args)` then runs it."""
    parser = subparsers.add_parser("schedule", help="show, time and draw a pipeline schedule", description=__doc__)
    parser.add_argument("--name", default="dualpipev", help=f"one of {', '.join(BUILDERS)} (default: %(default)s)")
    parser.add_argument("--ranks", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches in a step")
    parser.add_argument("--stages-per-rank", type=int, help="for interleaved_1f1b (default: 2)")
    parser.add_argument("--costs", default="", metavar="COSTS", help=COSTS_HELP)
    parser.add_argument("--memory", type=stage_activations, metavar="CAP",
                        help="for auto: stage activations that a rank may hold, or one number for each rank, such as "
                             "7,9,9,9 (default: those of dualpipev, 2P + 1)")
    parser.add_argument("--seed", type=int, help="for auto (default: 0)")
    parser.add_argument("--effort", type=int,
                        help=f"for auto: amount of search; the time grows with it (default: {EFFORT}, about 10 s)")
    parser.add_argument("--compare", default="", metavar="NAMES", help="other schedules, separated by commas")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the timeline into FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser with all timelines")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the order as CSV of torch's pipelining")
    parser.add_argument("--width", type=int, help="width of the text timeline (default: that of the terminal)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 0, or 2 after one line on stderr if the arguments cannot be used."""
    try:
        print(_report(args), end="")
    except ValueError as error:
        print(f"dualpipe schedule: {error}", file=sys.stderr)
        return 2
    return 0


@dataclass
class _Comparison:
    """Timelines of the compared schedules. The first is the one that the others are compared with."""

    timelines: list[Timeline] = field(default_factory=list)
    stage_sizes: list[float] = field(default_factory=list)  # size of a stage, in stages of the first schedule
    notes: str = ""

    def add(self, schedule: Schedule, costs: Costs) -> None:
        """Validate and time a schedule. Its stages are scaled so that all schedules run the same model."""
        validate(schedule)
        first = self.timelines[0].schedule if self.timelines else schedule
        stage_size = first.num_stages / schedule.num_stages
        if stage_size != 1 and costs.per_stage:
            raise ValueError(f"costs per stage are for {first.num_stages} stages, but {schedule.name} has "
                             f"{schedule.num_stages}; compare with a schedule of as many stages")
        self.timelines.append(simulate(schedule, costs if stage_size == 1 else costs.scaled(stage_size)))
        self.stage_sizes.append(stage_size)
        if stage_size != 1:
            self.notes += (f"{schedule.name} cuts the same model into {schedule.num_stages} stages: each costs, and "
                           f"keeps, {number(stage_size)} times as much as one of {first.name}'s\n")


def _report(args: argparse.Namespace) -> str:
    """Return the table of all schedules with notes and the text timeline of the first; write the requested files."""
    costs = parse_costs(args.costs)
    comparison = _Comparison()
    compared_names = [name.strip() for name in args.compare.split(",") if name.strip()]
    for name in (args.name, *compared_names):
        is_first = not comparison.timelines
        options = _options(args) if is_first else {}
        if name == "auto" and "stages_per_rank" not in options:  # else `build` raises: "auto" does not have this option
            schedule, search_notes = _search(args, costs, try_half_memory=is_first)
            comparison.notes += search_notes
        else:
            schedule = build(name, args.ranks, args.microbatches, **options)
        comparison.add(schedule, costs)
    timelines = comparison.timelines
    summary = table(timelines, comparison.stage_sizes) + comparison.notes
    drawing = to_text(timelines[0], args.width or get_terminal_size((120, 24)).columns)
    title = f"Schedules of {args.ranks} ranks and {args.microbatches} micro-batches"
    written_lines = write_texts(
        (args.svg, lambda: to_svg(timelines[0])),
        (args.csv, lambda: timelines[0].schedule.to_torch_csv()),
        (args.html, lambda: to_html(timelines, title=title, notes=summary)),
    )
    return f"{summary}\n{drawing}" + "".join(f"{line}\n" for line in written_lines)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the schedule `--name` that were passed."""
    options = {name: getattr(args, name) for name in ("stages_per_rank", "memory", "seed", "effort")}
    return {name: value for name, value in options.items() if value is not None}


def _search(args: argparse.Namespace, costs: Costs, *, try_half_memory: bool) -> tuple[Schedule, str]:
    """Search for the best schedule, and return it with notes that compare it with DualPipeV and its lower bound.

    try_half_memory: also search with half the memory, and note the makespan.
    """
    memory: list[float] = [2 * args.ranks + 1] if args.memory is None else args.memory
    dualpipev = simulate(build("dualpipev", args.ranks, args.microbatches), costs).makespan
    result = _search_with_memory(args, costs, memory)
    makespan = result.timeline.makespan
    notes = _notes(result, costs, memory, dualpipev)
    half_memory: list[float] = [ceil(of_rank / 2) for of_rank in memory]
    if try_half_memory and makespan and min(half_memory) >= 2:
        other = _search_with_memory(args, costs, half_memory).timeline.makespan
        notes += f"with memory {_text(half_memory)}: {number(other)}, {100 * (other / makespan - 1):.1f}% more time\n"
    return result.timeline.schedule, notes


def stage_activations(text: str) -> list[float]:
    """Return the numbers of `--memory`."""
    return [float(part) for part in text.split(",")]


def _text(memory: Sequence[float]) -> str:
    return ", ".join(map(number, memory))


def _search_with_memory(args: argparse.Namespace, costs: Costs, memory: Sequence[float]) -> SearchResult:
    title = f"a schedule of {args.ranks} ranks, {args.microbatches} micro-batches and memory {_text(memory)}"
    with SearchProgress(title) as progress:
        options: dict[str, Any] = {} if args.effort is None else {"effort": args.effort}
        return search(args.ranks, args.microbatches, costs=costs, memory=memory[0] if len(memory) == 1 else memory,
                      seed=args.seed or 0, progress=progress, **options)


def _notes(result: SearchResult, costs: Costs, memory: Sequence[float], dualpipev: float) -> str:
    """Return lines that compare a found schedule with the makespan of DualPipeV and with lower bounds."""
    timeline = result.timeline
    makespan = timeline.makespan
    bound = max(result.bounds)
    work = least_work(timeline.schedule.placement, timeline.schedule.num_microbatches, costs)
    notes = ""
    if dualpipev and bound:
        bounds = ", ".join(map(number, result.bounds))
        notes += (f"auto: {100 * (1 - makespan / dualpipev):.1f}% less time than dualpipev ({number(dualpipev)}), with "
                  f"at most {number(timeline.peak_memory)} of {_text(memory)} stage activations on a rank\n"
                  f"lower bound {number(bound)} (by rank {bounds}): auto is {100 * (makespan / bound - 1):.1f}% above "
                  "it\n")
    if dualpipev > work:
        share = (makespan - work) / (dualpipev - work)
        notes += (f"least work of a rank: {number(work)}; time beyond the least work: auto {number(makespan - work)}, "
                  f"dualpipev {number(dualpipev - work)} (ratio {share:.2f})\n")
    return notes
