"""Search for the best schedule for given costs and memory, which `build("auto", ...)` returns.

The search starts from the known schedules and the building blocks that fit the memory (see `starts`). It anneals the
best of them in several chains and in rounds; after each round, the best chain replaces the worst. For many
micro-batches, it orders only some of them and repeats a window of the steady state for the rest.

The result depends on the inputs and the seed alone: the effort limits the number of changes, not the time, and a chain
does not depend on the process it runs in. The processes that anneal, one for each chain, end with the process that
started them, or when it is interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice, starmap, zip_longest
from math import isfinite
from operator import itemgetter, le
from pathlib import Path
from typing import Any, cast

from dualpipe.runtime.errors import die_with
from dualpipe.runtime.files import replace_file
from dualpipe.schedule.builders import KNOWN, check_size
from dualpipe.schedule.search.anneal import COOLING, anneal
from dualpipe.schedule.search.bound import lower_bounds
from dualpipe.schedule.search.repeat import WINDOW_SIZES, repeat_steady_state
from dualpipe.schedule.search.starts import find_starts
from dualpipe.schedule.simulate import Costs, Timeline, simulate
from dualpipe.schedule.types import Action, Schedule, v_placement
from dualpipe.schedule.validate import validate

# Known schedules with two stages per rank, which the search starts from.
FAMILIES = (
    "dualpipev", "dualpipev_full", "dualpipev_half", "zbv", "v_half", "v_min", "interleaved_1f1b", "interleaved_zb",
)
# The effort of a search is the number of changes that it tries times the number of forwards and backwards in the order.
EFFORT = 30_000_000  # of all squeezes, chains and rounds together
CHAINS = 4
ROUNDS = 6
MAX_CHANGES = 200  # of a chain in a round, per forward and backward in its order; more do not improve small orders
SQUEEZE_CHANGES = 50  # changes that take as long as to squeeze an order once
HEAT = 0.03  # first temperature, as a fraction of the mean cost of a forward or backward
MAX_SIZE = 256  # ranks times micro-batches; the search orders fewer micro-batches if there are more
MIN_WORKER_SIZE = 200_000  # effort of a chain in a round; below it, starting a process takes longer than annealing
VERSION = 3  # of the search; cached results of other versions are not used

WORKER_PROGRAM = "from dualpipe.schedule.search.driver import work; work()"

Progress = Callable[[float, float], None]
AnnealJob = tuple[Schedule, Costs, tuple[float, ...], int, float, float, int]  # arguments of `anneal`
AnnealResult = tuple[float, Schedule]  # result of `anneal`


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Args:
        timeline: the best schedule found, and its times.
        bounds: lower bounds on the makespan with this placement and memory, by rank.
        best_known: the best known schedule that fits the memory; None if none does.
    """

    timeline: Timeline
    bounds: tuple[float, ...]
    best_known: Timeline | None


@dataclass(frozen=True)
class _Problem:
    """Inputs of a search that all its parts need."""

    costs: Costs
    memory: tuple[float, ...]  # of each rank
    seed: int
    effort: int
    progress: Progress | None


def search(
    num_ranks: int, num_microbatches: int, *, costs: Costs | None = None,
    memory: float | Sequence[float] | None = None, seed: int = 0, effort: int = EFFORT,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for the best schedule with two stages per rank in which no rank exceeds the memory.

    The result is cached on disk; a cached result is returned without calling `progress`.

    Args:
        num_ranks: number of pipeline ranks.
        num_microbatches: number of micro-batches in a step of training.
        costs: costs of the actions. Default: `Costs()`.
        memory: stage activations that a rank may hold, see `Timeline.memory_by_rank`: one number, or one for each rank.
            Default: 2P + 1, as DualPipeV holds.
        seed: seed of the random changes.
        effort: amount of search; the default takes about ten seconds of one core for 8 ranks and 16 micro-batches.
        progress: called at the start and after each round with the fraction of the search that is done and the best
            makespan so far. If the search orders fewer micro-batches and repeats a window, the makespan is that of the
            fewer micro-batches.

    Raises:
        ValueError: the memory cannot hold one micro-batch, or an argument is not a number in its range.
    """
    check_size("num_ranks", num_ranks)
    check_size("num_microbatches", num_microbatches)
    costs = costs or Costs()
    rank_memory = _memory_by_rank(2 * num_ranks + 1 if memory is None else memory, num_ranks)
    for name, value in (("seed", seed), ("effort", effort)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is {value!r}; give an integer of 0 or more")
    problem = _Problem(costs, rank_memory, seed, effort, progress)
    known = _known(num_ranks, num_microbatches, problem)
    key = cache_key(VERSION, num_ranks, num_microbatches, costs, rank_memory, seed, effort)
    schedule = read_cached(key)
    if schedule is None:
        empty = Schedule("auto", num_ranks, 2 * num_ranks, num_microbatches, ((),) * num_ranks, v_placement(num_ranks))
        candidates = [timeline.schedule for timeline in known[:1]]
        candidates += _search_schedules(known, empty, problem)
        best = min(candidates, key=lambda candidate: simulate(candidate, costs).makespan)
        schedule = replace(best, name="auto")
        validate(schedule)
        write_cached(key, schedule)
    bounds = lower_bounds(schedule.placement, num_microbatches, costs, rank_memory)
    return SearchResult(simulate(schedule, costs), bounds, known[0] if known else None)


def _memory_by_rank(memory: object, num_ranks: int) -> tuple[float, ...]:
    """Return the memory of each rank; ValueError unless `memory` is a number of 2 or more, or one for each rank."""
    is_by_rank = isinstance(memory, Sequence) and not isinstance(memory, str)
    numbers: tuple[Any, ...] = tuple(cast("Sequence[Any]", memory)) if is_by_rank else (memory,) * num_ranks
    if len(numbers) != num_ranks:
        raise ValueError(f"memory has {len(numbers)} numbers for {num_ranks} ranks; give one, or one for each rank")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number) or number < 2:
            raise ValueError(f"memory is {memory!r}; give stage activations, 2 or more: one for each stage of a rank")
    return tuple(map(float, numbers))


def _known(num_ranks: int, num_microbatches: int, problem: _Problem) -> list[Timeline]:
    """Return the known schedules that fit the memory, best first."""
    timelines = (simulate(KNOWN[name](num_ranks, num_microbatches), problem.costs) for name in FAMILIES)
    fitting = (timeline for timeline in timelines if all(map(le, timeline.memory_by_rank, problem.memory)))
    return sorted(fitting, key=lambda timeline: timeline.makespan)


def _search_schedules(known: Iterable[Timeline], empty: Schedule, problem: _Problem) -> Iterator[Schedule]:
    """Yield the result of each annealed chain, extended to the number of micro-batches of `empty`.

    known: the known schedules that fit the memory, best first. empty: a schedule without steps, with the placement.
    """
    num_microbatches = empty.num_microbatches
    num_searched = min(num_microbatches, max(MAX_SIZE // empty.num_ranks, 2 * empty.num_ranks + 2))
    num_searched += (num_microbatches - num_searched) % max(WINDOW_SIZES)  # the rest is a multiple of every window size
    if num_searched < num_microbatches:
        known = _known(empty.num_ranks, num_searched, problem)
        empty = replace(empty, num_microbatches=num_searched)
    # Chains start from the best found and the best known schedules in turn: where one kind leads, the other may be
    # better in the end.
    known_schedules = [timeline.schedule for timeline in known]
    on_a_v = [schedule for schedule in known_schedules if schedule.placement == empty.placement]
    run_effort = SQUEEZE_CHANGES * _order_size(empty)
    found, num_runs = find_starts(empty, on_a_v, problem.costs, problem.memory, problem.effort // 2 // run_effort)
    rest = replace(problem, effort=max(0, problem.effort - num_runs * run_effort))
    starts = [schedule for pair in zip_longest(found, known_schedules) for schedule in pair if schedule is not None]
    for schedule in _anneal_in_rounds([*islice(cycle(starts), CHAINS)], rest):
        if num_searched == num_microbatches:
            yield schedule
            continue
        repeated = repeat_steady_state(schedule, problem.costs, problem.memory, num_microbatches)
        if repeated is not None:
            yield repeated


def _anneal_in_rounds(chains: list[Schedule], problem: _Problem) -> list[Schedule]:
    """Return the schedules of all chains after all rounds, best first."""
    num_stages = chains[0].num_stages
    num_microbatches = chains[0].num_microbatches
    size = _order_size(chains[0])
    iterations = min(MAX_CHANGES * size, problem.effort // (CHAINS * ROUNDS * size))
    stage_costs = map(problem.costs.on, range(num_stages))
    heat = HEAT * sum(costs.F + costs.B for costs in stage_costs) / 2 / num_stages
    if not iterations or not heat:
        return chains
    if problem.progress is not None:
        problem.progress(0.0, simulate(chains[0], problem.costs).makespan)
    bound = max(lower_bounds(chains[0].placement, num_microbatches, problem.costs, problem.memory))
    for number in range(ROUNDS):
        temperature = heat * COOLING ** (-number / ROUNDS)
        jobs = [
            (chain, problem.costs, problem.memory, iterations, temperature, COOLING ** (1 / ROUNDS),
             (problem.seed * ROUNDS + number) * CHAINS + index)
            for index, chain in enumerate(chains)
        ]
        use_workers = iterations * size > MIN_WORKER_SIZE
        results = anneal_in_processes(jobs) if use_workers else [*starmap(anneal, jobs)]
        chains = [schedule for _, schedule in sorted(results, key=itemgetter(0))]
        if number + 1 < ROUNDS:
            chains[-1] = chains[0]
        makespan = simulate(chains[0], problem.costs).makespan
        if problem.progress is not None:
            problem.progress((number + 1) / ROUNDS, makespan)
        if makespan <= bound * (1 + 1e-9):
            break
    return chains


def _order_size(schedule: Schedule) -> int:
    """Return the number of forwards and backwards of a schedule."""
    return 2 * schedule.num_stages * schedule.num_microbatches


def anneal_in_processes(jobs: Iterable[AnnealJob]) -> list[AnnealResult]:
    """Run `anneal` for each job in a process of its own, and return the results in the order of the jobs."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(map(start_worker, jobs))  # one by one, so that an interrupt ends all that have started
        return [_result_of(process) for process in processes]
    finally:
        for process in processes:
            with process:  # waits for it
                process.kill()


def start_worker(job: AnnealJob) -> subprocess.Popen[bytes]:
    """Start a process that anneals.

    It imports neither the caller's main module nor torch. It is in a process group of its own, which Ctrl-C does not
    reach.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER_PROGRAM, str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0,
    )
    assert process.stdin is not None, "stdin is a pipe"
    with process.stdin as pipe:
        pickle.dump(job, pipe)
    return process


def _result_of(process: subprocess.Popen[bytes]) -> AnnealResult:
    """Wait for a process, and return its result."""
    assert process.stdout is not None, "stdout is a pipe"
    output = process.stdout.read()
    status = process.wait()
    if status != 0:
        raise RuntimeError(f"a process of the schedule search ended with status {status}; see its error above")
    return pickle.loads(output)


def work() -> None:
    """Anneal the job on stdin, and write the result to stdout. Main function of a worker process."""
    parent = int(sys.argv[1])
    die_with(parent)
    result = anneal(*pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(pickle.dumps(result))


def cache_key(*inputs: object) -> str:
    """Return the name of a cached schedule: a digest of the `repr` of all inputs of its search."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]


def _cache_path(key: str) -> Path:
    """Return the path of a cached schedule, under $XDG_CACHE_HOME or ~/.cache.

    Raises RuntimeError if there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "dualpipe", "schedules", f"{key}.json")


def read_cached(key: str) -> Schedule | None:
    """Return the schedule cached under `key`, validated again; None if there is none or its file is damaged."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        content = json.loads(_cache_path(key).read_text(encoding="utf-8"))
        ranks = tuple(tuple(tuple(map(Action.read, step)) for step in steps) for steps in content["ranks"])
        placement = tuple(content["placement"])
        schedule = Schedule("auto", len(ranks), len(placement), content["num_microbatches"], ranks, placement,
                            content["messages_in_flight"])
        validate(schedule)
        return schedule
    return None


def write_cached(key: str, schedule: Schedule) -> None:
    """Cache a schedule under `key`, unless nothing can be written. The file is written whole or not at all.

    It is JSON because torch's CSV cannot hold every pair.
    """
    content = {
        "placement": schedule.placement,
        "num_microbatches": schedule.num_microbatches,
        "messages_in_flight": schedule.messages_in_flight,
        "ranks": [[[*map(str, step)] for step in steps] for steps in schedule.ranks],
    }
    with suppress(OSError, RuntimeError):
        path = _cache_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content), is_shared=True)  # other processes may search for the same
