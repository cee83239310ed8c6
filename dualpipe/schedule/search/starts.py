"""First schedules of a search: building blocks and known schedules, squeezed into the memory with the real costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Literal, NamedTuple

from dualpipe.schedule.building_blocks import Policy, RankOrder, building_blocks, squeeze
from dualpipe.schedule.search.anneal import Timing, orders_of, plays, with_steps
from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import Schedule

FIRST_POLICIES = (Policy(patience=0.3), Policy(patience=0.3, split=False))
FIRST: tuple[Literal["order", "F", "I"], ...] = ("order", "F", "I")
POLICIES = tuple(Policy(first, patience) for first, patience in product(FIRST, (0.0, 0.3, 0.6, 1.0)))
REPEATS = 2  # times that the best orders are squeezed again
BEST = 12  # orders of a round that the next one squeezes with all policies
LEAST_RUNS = 16  # of `squeeze`, however little effort is allowed


class _Start(NamedTuple):
    """Orders of all ranks after `squeeze`, and their score (see `OrderTimes.score`)."""

    score: float
    orders: list[RankOrder]
    policy: Policy


class _Starts:
    """Runs `squeeze`, as often as allowed, and keeps the results that can be run."""

    def __init__(self, empty: Schedule, costs: Costs, memory: Sequence[float], num_runs: int) -> None:
        self.timing = Timing(empty, costs, memory)
        self.num_runs_left = num_runs
        self.results: dict[str, _Start] = {}  # by their orders

    def run(self, orders: list[RankOrder], policy: Policy) -> None:
        """Squeeze the orders."""
        self.num_runs_left -= 1
        timing = self.timing
        self.keep(squeeze(timing.schedule, orders, timing.costs, timing.memory, policy), policy)

    def keep(self, orders: list[RankOrder], policy: Policy) -> None:
        """Time the orders, and keep them if they can be run."""
        ranks = self.timing.ranks(orders)
        times = self.timing.times(ranks) if ranks is not None else None
        if ranks is not None and times is not None and plays(ranks, self.timing.schedule.messages_in_flight):
            self.results[repr(orders)] = _Start(times.score(), orders, policy)

    def best(self) -> list[_Start]:
        """Return the best results, best first."""
        return sorted(self.results.values(), key=lambda start: start.score)[:BEST]


def find_starts(
    empty: Schedule, known: Iterable[Schedule], costs: Costs, memory: Sequence[float], num_runs: int
) -> tuple[list[Schedule], int]:
    """Return the best schedules found without annealing, best first, and how many times orders were squeezed.

    Args:
        empty: schedule without steps on a V; gives the number of ranks and of micro-batches.
        known: known schedules with the same placement that fit the memory.
        costs: costs of the actions.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`.
        num_runs: number of times that orders may be squeezed, `LEAST_RUNS` at least. Half of them try building blocks.
    """
    num_runs = max(num_runs, LEAST_RUNS)
    starts = _Starts(empty, costs, memory, num_runs)
    can_pair = costs.FB is not None or costs.pairs or costs.per_stage
    saved_by_full_backwards = 0.0 if costs.I is None else costs.I + costs.W - costs.B
    first_policies = FIRST_POLICIES if can_pair or saved_by_full_backwards > 0 else FIRST_POLICIES[:1]
    first_orders = [orders_of(schedule) for schedule in known]
    num_blocks = max(1, num_runs // 2 // len(first_policies) - len(first_orders))
    blocks = building_blocks(empty.num_ranks, empty.num_microbatches, memory)
    first_orders += islice(blocks, num_blocks)
    for orders in first_orders:
        starts.keep(orders, FIRST_POLICIES[0])
        for policy in first_policies:
            starts.run(orders, policy)
    for _ in range(1 + REPEATS):
        for start in starts.best():
            for policy in POLICIES:
                if starts.num_runs_left > 0:
                    starts.run(start.orders, policy._replace(split=start.policy.split))
    best = [with_steps(empty, starts.timing.ranks(start.orders) or []) for start in starts.best()]
    return best, num_runs - starts.num_runs_left
