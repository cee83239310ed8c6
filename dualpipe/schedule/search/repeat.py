"""Extension of a schedule to more micro-batches: a window of its steady state, repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from dualpipe.schedule.building_blocks import RankOrder
from dualpipe.schedule.search.anneal import OrderTimes, Timing, orders_of, plays, with_steps
from dualpipe.schedule.simulate import Costs, simulate
from dualpipe.schedule.types import Schedule

WINDOW_SIZES = (1, 2, 4)  # micro-batches of a window
TRIAL_MICROBATCHES = 8  # added to compare windows

Window = tuple[int, int]  # index of a rank's first step in the window, and of the first step after it


def repeat_steady_state(
    schedule: Schedule, costs: Costs, memory: Sequence[float], num_microbatches: int
) -> Schedule | None:
    """Return a schedule for more micro-batches that repeats a window of the steady state on each rank.

    The windows of all ranks have the same number of micro-batches, and begin near the same moment. Several moments are
    tried with `TRIAL_MICROBATCHES` more micro-batches, and the one with the least makespan is used.

    Args:
        schedule: schedule for fewer micro-batches.
        costs: costs of the actions.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`.
        num_microbatches: number of micro-batches: that of `schedule` plus a multiple of the largest of `WINDOW_SIZES`.

    Returns:
        The schedule; None if no window gives a valid one.
    """
    timeline = simulate(schedule, costs)
    orders = orders_of(schedule)
    trials = []  # makespan, windows by rank, size of the windows
    for size in WINDOW_SIZES:
        rank_windows = [[*_windows(order, size)] for order in orders]
        if not all(rank_windows):
            continue
        for twenty_fourth in range(6, 19):  # from a quarter of the makespan to three quarters
            moment = timeline.makespan * twenty_fourth / 24
            windows = [min(candidates, key=lambda window: abs(spans[window[0]].start - moment))
                       for candidates, spans in zip(rank_windows, timeline.spans)]
            times = _extended_times(schedule, costs, memory, windows, size, TRIAL_MICROBATCHES)
            if times is not None:
                trials.append((max(times.ends()), windows, size))
    num_added = num_microbatches - schedule.num_microbatches
    for _, windows, size in sorted(trials, key=itemgetter(0)):
        times = _extended_times(schedule, costs, memory, windows, size, num_added)
        if times is not None:
            return with_steps(replace(schedule, num_microbatches=num_microbatches), times.ranks)
    return None


def _extended_times(
    schedule: Schedule, costs: Costs, memory: Sequence[float], windows: Sequence[Window], size: int, num_added: int
) -> OrderTimes | None:
    """Return the times of the schedule with `num_added` more micro-batches; None if it is not valid.

    windows: window of each rank, of `size` micro-batches.
    """
    timing = Timing(replace(schedule, num_microbatches=schedule.num_microbatches + num_added), costs, memory)
    num_repeats = num_added // size
    # The window runs `num_repeats + 1` times: once in `order[:end]`, once in `order[start:]`, the rest between them.
    orders = [order[:end] + order[start:end] * (num_repeats - 1) + order[start:]
              for order, (start, end) in zip(orders_of(schedule), windows)]
    ranks = timing.ranks(orders)
    return timing.times(ranks) if ranks and plays(ranks, schedule.messages_in_flight) else None


def _windows(order: RankOrder, size: int) -> Iterator[Window]:
    """Yield the ranges of steps with `size` forwards and backwards of each stage, and a "W" for each "I"."""
    stages = {stage for works in order for _, stage in works}
    for start in range(len(order)):
        counts: Counter[tuple[str, int]] = Counter()
        for end in range(start, len(order)):
            if all(_is_balanced(counts, stage, size) for stage in stages):
                yield start, end
                break
            counts.update(order[end])
            if max(counts.values()) > size:
                break


def _is_balanced(counts: Counter[tuple[str, int]], stage: int, size: int) -> bool:
    num_split = counts["I", stage]
    num_weights = counts["W", stage]
    return counts["F", stage] == size and counts["B", stage] + num_split == size and num_split == num_weights
