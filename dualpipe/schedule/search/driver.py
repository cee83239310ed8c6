"""The best order found for given costs and memory: what `build("auto", ...)` returns.

It starts from the known families and from what `greedy` makes, as far as they fit the memory, and anneals the best of
them in rounds, after each of which the worst is given up for the best. With many micro-batches it searches for fewer,
and repeats a window of the steady state. What is found depends on the inputs and the seed alone: the effort is a number
of changes, not a time, and a chain does not know in which process it runs.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice, starmap
from math import isfinite
from operator import itemgetter

from dualpipe.runtime.errors import die_with
from dualpipe.schedule.builders import KNOWN, check_size
from dualpipe.schedule.search import cache
from dualpipe.schedule.search.anneal import COOLING, RankOrder, Times, Timing, anneal, orders_of, plays, with_steps
from dualpipe.schedule.search.bound import lower_bounds
from dualpipe.schedule.search.greedy import fill
from dualpipe.schedule.simulate import Costs, Timeline, simulate
from dualpipe.schedule.types import Schedule, v_placement
from dualpipe.schedule.validate import validate

FAMILIES = ("dualpipev", "dualpipev_full", "zbv", "v_half", "interleaved_1f1b")  # of two stages a rank
EFFORT = 300_000_000  # changes, times the forwards and backwards of an order
CHAINS, ROUNDS = 4, 6
THOROUGH = 200  # changes of a chain in a round for each forward and backward, at most: small orders need no more
HEAT = 0.03  # the first temperature, in the mean cost of a forward and a backward
SMALL = 256  # ranks times micro-batches that are searched as they are
SIZES = 1, 2, 4  # micro-batches of a window that is repeated
HERE = 200_000  # changes times forwards and backwards that take less than it takes to start a process
WORKER = "from dualpipe.schedule.search.driver import work; work()"
VERSION = 2  # of the search: what another one found is not taken from the cache

Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class SearchResult:
    """What a search returns. `bounds`: for each rank the time that no order of this placement and memory can beat;
    `best_known`: the best of the families that fit the memory, None where none does."""

    timeline: Timeline
    bounds: tuple[float, ...]
    best_known: Timeline | None


def search(
    num_ranks: int, num_microbatches: int, *, costs: Costs | None = None, memory: float | None = None, seed: int = 0,
    effort: int = EFFORT, progress: Progress | None = None,
) -> SearchResult:
    """The best schedule found, with two stages a rank, whose every rank holds at most `memory` stage activations.

    costs: Costs() unless given; memory: that of DualPipeV, 2P + 1, unless given; see `Timeline.peak_memory`. effort:
    how much is tried; the default takes less than a minute on two cores for 8 ranks and 32 micro-batches. progress:
    called at the start and after each round with the share that is done and the best makespan so far (of the
    micro-batches that are searched for). The result is kept on disk, and read from there without calling it.

    Raises ValueError where the memory cannot hold one micro-batch, or an argument is not a number.
    """
    check_size("num_ranks", num_ranks)
    check_size("num_microbatches", num_microbatches)
    costs = costs or Costs()
    memory = 2 * num_ranks + 1 if memory is None else memory
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not isfinite(memory) or memory < 2:
        raise ValueError(f"memory is {memory!r}; give stage activations, 2 or more: one for each stage of a rank")
    for what, value in (("seed", seed), ("effort", effort)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{what} is {value!r}; give an integer of 0 or more")
    known = sorted(_known(num_ranks, num_microbatches, costs, memory), key=lambda timeline: timeline.makespan)
    key = cache.key_of(VERSION, num_ranks, num_microbatches, costs, float(memory), seed, effort)
    found = cache.read(key)
    if found is None:
        empty = Schedule("auto", num_ranks, 2 * num_ranks, num_microbatches, ((),) * num_ranks, v_placement(num_ranks))
        candidates = [timeline.schedule for timeline in known[:1]]
        candidates += _searched(known, empty, costs, memory, seed, effort, progress)
        found = replace(min(candidates, key=lambda schedule: simulate(schedule, costs).makespan), name="auto")
        validate(found)
        cache.write(key, found)
    bounds = lower_bounds(found.placement, num_microbatches, costs, memory)
    return SearchResult(simulate(found, costs), bounds, known[0] if known else None)


def _known(num_ranks: int, num_microbatches: int, costs: Costs, memory: float) -> Iterator[Timeline]:
    """The families that fit the memory."""
    for name in FAMILIES:
        timeline = simulate(KNOWN[name](num_ranks, num_microbatches), costs)
        if timeline.peak_memory <= memory:
            yield timeline


def _searched(
    known: Iterable[Timeline], empty: Schedule, costs: Costs, memory: float, seed: int, effort: int,
    progress: Progress | None,
) -> Iterator[Schedule]:
    """The schedules that annealing leads to."""
    num_ranks, num_microbatches = empty.num_ranks, empty.num_microbatches
    fewer = min(num_microbatches, max(SMALL // num_ranks, 2 * num_ranks + 2))
    fewer += (num_microbatches - fewer) % max(SIZES)
    if fewer < num_microbatches:
        known, empty = _known(num_ranks, fewer, costs, memory), replace(empty, num_microbatches=fewer)
    starts = [*(timeline.schedule for timeline in known), *filter(None, [fill(empty, costs, memory)])]
    starts.sort(key=lambda schedule: simulate(schedule, costs).makespan)
    for schedule in _rounds([*islice(cycle(starts), CHAINS)], costs, memory, seed, effort, progress):
        if fewer == num_microbatches:
            yield schedule
        elif (repeated := _repeated(schedule, costs, memory, num_microbatches)) is not None:
            yield repeated


def _rounds(
    chains: list[Schedule], costs: Costs, memory: float, seed: int, effort: int, progress: Progress | None
) -> list[Schedule]:
    """The chains after all rounds, best first."""
    num_stages, num_microbatches = chains[0].num_stages, chains[0].num_microbatches
    size = 2 * num_stages * num_microbatches
    iterations = min(THOROUGH * size, effort // (CHAINS * ROUNDS * size))
    heat = HEAT * sum(each.F + each.B for each in map(costs.on, range(num_stages))) / 2 / num_stages
    if not iterations or not heat:
        return chains
    if progress is not None:
        progress(0.0, simulate(chains[0], costs).makespan)
    for number in range(ROUNDS):
        jobs = [
            (chain, costs, memory, iterations, heat * COOLING ** (-number / ROUNDS), COOLING ** (1 / ROUNDS),
             (seed * ROUNDS + number) * CHAINS + index)
            for index, chain in enumerate(chains)
        ]
        ran = _elsewhere(jobs) if iterations * size > HERE else [*starmap(anneal, jobs)]
        chains = [schedule for _, schedule in sorted(ran, key=itemgetter(0))]
        if number + 1 < ROUNDS:
            chains[-1] = chains[0]
        makespan = simulate(chains[0], costs).makespan
        if progress is not None:
            progress((number + 1) / ROUNDS, makespan)
        if makespan <= max(lower_bounds(chains[0].placement, num_microbatches, costs, memory)) * (1 + 1e-9):
            break
    return chains


SearchJob = tuple[Schedule, Costs, float, int, float, float, int]  # what `anneal` takes
Ran = tuple[float, Schedule]  # what it returns


def _elsewhere(jobs: Iterable[SearchJob]) -> list[Ran]:
    """The same in processes, one for each, which end where this one does or is interrupted."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        workers.extend(map(_started, jobs))  # one by one: an interrupt ends those that have started
        return [*map(_taken, workers)]
    finally:
        for worker in workers:
            with worker:  # waits for it
                worker.kill()


def _started(job: SearchJob) -> subprocess.Popen[bytes]:
    """A process at work, which imports nothing of the caller's: no main module, no torch. Ctrl-C does not reach it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    worker = subprocess.Popen([sys.executable, "-P", "-c", WORKER, str(os.getpid())], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env=environment, process_group=0)
    assert worker.stdin is not None, "it has a pipe"
    with worker.stdin as pipe:
        pickle.dump(job, pipe)
    return worker


def _taken(worker: subprocess.Popen[bytes]) -> Ran:
    """What it has found, when it is done."""
    assert worker.stdout is not None, "it has a pipe"
    out = worker.stdout.read()
    if status := worker.wait():
        raise RuntimeError(f"a process that searches ended with status {status}")
    return pickle.loads(out)


def work() -> None:
    """Anneal as stdin says, and write to stdout what was found."""
    die_with(int(sys.argv[1]))
    sys.stdout.buffer.write(pickle.dumps(anneal(*pickle.load(sys.stdin.buffer))))


# -- more micro-batches than were searched for


def _repeated(schedule: Schedule, costs: Costs, memory: float, num_microbatches: int) -> Schedule | None:
    """The order for more micro-batches: on each rank a window of the steady state, again and again.

    The windows of all ranks do as many of each, and lie about one moment, of which a few are tried with 8 micro-batches
    more: what takes the least is taken; None where none works.
    """
    timeline, orders = simulate(schedule, costs), orders_of(schedule)

    def longer(windows: list[tuple[int, int]], size: int, more: int) -> Times | None:
        timing = Timing(replace(schedule, num_microbatches=schedule.num_microbatches + more), costs, memory)
        ranks = timing.ranks([order[:end] + order[start:end] * (more // size - 1) + order[start:]
                              for order, (start, end) in zip(orders, windows)])
        return timing.times(ranks) if ranks and plays(ranks) else None

    tried = []
    for size in SIZES:
        every = [[*_windows(order, size)] for order in orders]
        for moment in (timeline.makespan * part / 24 for part in range(6, 19) if all(every)):
            windows = [min(rank, key=lambda window: abs(spans[window[0]].start - moment))
                       for rank, spans in zip(every, timeline.spans)]
            if times := longer(windows, size, 8):
                tried.append((max(times.ends()), windows, size))
    for _, windows, size in sorted(tried, key=itemgetter(0)):
        if times := longer(windows, size, num_microbatches - schedule.num_microbatches):
            return with_steps(replace(schedule, num_microbatches=num_microbatches), times.ranks)
    return None


def _windows(order: RankOrder, size: int) -> Iterator[tuple[int, int]]:
    """The steps from one to before another that do `size` forwards and backwards of each stage, and a "W" for each "I".
    """
    stages = {stage for works in order for _, stage in works}
    for start in range(len(order)):
        done: Counter[tuple[str, int]] = Counter()
        for end in range(start, len(order)):
            if all(done["F", s] == size and done["B", s] == size - done["I", s] == size - done["W", s] for s in stages):
                yield start, end
                break
            done.update(order[end])
            if max(done.values()) > size:
                break
