"""What does a step take at which memory: known schedules and found ones, with and without communication to hide?

    python benchmarks/schedule_front.py --svg docs/pictures/schedule_front.svg

Simulates 2P micro-batches on P ranks. Times are in those of DualPipeV with the same costs (see `overlap_costs`), memory
is in activations of a stage of the V. Prints two Markdown tables of what the search finds, with lower bounds and its
processor time: beside the best known schedule that fits, and, without overlap, beside published ones. The goal: the
search is nowhere slower than those.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from dualpipe.schedule import Costs, Timeline, build, simulate
from dualpipe.schedule.builders import overlap_costs
from dualpipe.schedule.draw import number
from dualpipe.schedule.search.driver import EFFORT, FAMILIES, SearchResult, search

PUBLISHED = Path(__file__).parents[1] / "tests" / "schedule" / "search" / "published.json"


def timed_search(num_ranks: int, num_microbatches: int, costs: Costs, memory: float, effort: int
                 ) -> tuple[SearchResult, float]:
    """Return the result of a search that is not cached, and its processor time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        start = processor_time()
        result = search(num_ranks, num_microbatches, costs=costs, memory=memory, effort=effort)
        return result, processor_time() - start


def processor_time() -> float:
    """Return seconds of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def limits(num_ranks: int) -> list[int]:
    """Return the memory limits to search with: those of V-Min, V-Half, in between, ZB-V and DualPipeV."""
    return sorted({max(num_ranks, 3), num_ranks + 2, num_ranks * 3 // 2, 2 * num_ranks, 2 * num_ranks + 1})


class Front:
    """Known and found schedules of one number of ranks and one fraction of communication."""

    def __init__(self, num_ranks: int, communication: float, effort: int) -> None:
        self.num_ranks = num_ranks
        self.communication = communication
        costs = overlap_costs(communication)
        num_microbatches = 2 * num_ranks
        self.known: dict[str, Timeline] = {
            name: simulate(build(name, num_ranks, num_microbatches), costs) for name in FAMILIES
        }
        self.found = {
            memory: timed_search(num_ranks, num_microbatches, costs, memory, effort) for memory in limits(num_ranks)
        }
        self.unit = self.known["dualpipev"].makespan

    def missed(self) -> list[str]:
        """Return a line for each known schedule that is faster than the search at its memory."""
        lines = []
        for memory, (result, _) in self.found.items():
            for name, timeline in self.known.items():
                if timeline.peak_memory <= memory and timeline.makespan < result.timeline.makespan * (1 - 1e-9):
                    lines.append(f"P = {self.num_ranks}, communication {self.communication:.0%}, memory {memory}: "
                                 f"{name} takes {number(timeline.makespan)}, the search "
                                 f"{number(result.timeline.makespan)}")
        return lines

    def rows(self) -> list[str]:
        """Return the rows of the table of found schedules."""
        rows = []
        for memory, (result, seconds) in self.found.items():
            best = result.best_known
            best_cell = f"{best.makespan / self.unit:.3f} ({best.schedule.name})" if best else "none fits"
            rows.append(
                f"| {self.num_ranks}, {2 * self.num_ranks} | {self.communication:.0%} | {memory} | "
                f"{result.timeline.makespan / self.unit:.3f} | {best_cell} | {max(result.bounds) / self.unit:.3f} | "
                f"{seconds:.1f} |"
            )
        return rows


def draw(fronts: list[Front], path: Path) -> None:
    """Draw time over memory, one panel for each front."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "dualpipe", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    columns = sorted({front.communication for front in fronts})
    lines = sorted({front.num_ranks for front in fronts})
    figure, panels = pyplot.subplots(
        len(lines), len(columns), squeeze=False, figsize=(3.4 * len(columns), 2.8 * len(lines)), layout="constrained",
    )
    for front in fronts:
        panel = panels[lines.index(front.num_ranks)][columns.index(front.communication)]
        memory = list(front.found)
        panel.plot(memory, [result.timeline.makespan / front.unit for result, _ in front.found.values()], "o-",
                   color="tab:red", label="auto")
        panel.plot(memory, [max(result.bounds) / front.unit for result, _ in front.found.values()], ":", color="gray",
                   label="lower bound")
        for name, timeline in front.known.items():
            x, y = timeline.peak_memory, timeline.makespan / front.unit
            panel.plot(x, y, "s", color="tab:blue", markersize=3)
            panel.annotate(name, (x, y), textcoords="offset points", xytext=(3, 3), fontsize=6)
        panel.set_title(f"{front.num_ranks} ranks, communication {front.communication:.0%}")
        panel.set_xlabel("memory, stage activations")
        panel.set_ylabel("time, of DualPipeV's")
        panel.margins(0.2, 0.1)  # for the names
    panels[0][0].legend()
    figure.savefig(path, metadata={"Date": None})


def published_rows(path: Path, ranks: list[int], effort: int) -> tuple[list[str], list[str]]:
    """Return table rows that compare the search with published makespans, and a line for each that is missed."""
    rows = []
    missed = []
    for num_ranks, num_microbatches, forward, input_grad, weights, memory, makespan in json.loads(path.read_text()):
        if num_ranks not in ranks or num_microbatches != 2 * num_ranks:
            continue
        costs = Costs(F=forward, B=input_grad + weights, I=input_grad, W=weights)
        result, seconds = timed_search(num_ranks, num_microbatches, costs, memory, effort)
        found = result.timeline.makespan
        setting = f"{num_ranks}, {num_microbatches} | {forward}, {input_grad}, {weights} | {memory}"
        rows.append(f"| {setting} | {makespan} | {number(found)} | {number(max(result.bounds))} | {seconds:.1f} |")
        if found > makespan:
            missed.append(f"{setting}: published {makespan}, found {number(found)}")
    return rows, missed


def main() -> int:
    """Run the benchmark; return 0 if its goals are met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--communication", type=float, nargs="+", default=[0.0, 0.2, 0.35], help="share of F")
    parser.add_argument("--effort", type=int, default=EFFORT, help="of each search (default: %(default)s)")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="JSON rows P, M, F, I, W, memory, makespan")
    parser.add_argument("--svg", type=Path, help="draw the fronts into this file")
    options = parser.parse_args()
    start = time.monotonic()
    fronts = [Front(ranks, share, options.effort) for ranks in options.ranks for share in options.communication]
    print("| P, M | communication | memory | auto | best known | bound | processor, s |\n" + "| --- " * 7 + "|")
    print("\n".join(row for front in fronts for row in front.rows()))
    print("\n| P, M | F, I, W | memory | published | auto | bound | processor, s |\n" + "| --- " * 7 + "|")
    rows, missed = published_rows(options.published, options.ranks, options.effort)
    print("\n".join(rows))
    if options.svg:
        draw(fronts, options.svg)
        print(f"\nwrote {options.svg}")
    missed += [line for front in fronts for line in front.missed()]
    print(f"\n{date.today()}, {platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, "
          f"{time.monotonic() - start:.0f} s in all")
    print("goals: " + ("met" if not missed else "MISSED\n" + "\n".join(missed)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
