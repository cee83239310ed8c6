"""DualPipeV: a V-shaped pipeline whose forwards overlap the backwards of other micro-batches.

Source: DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe; DualPipe is section 3.2.1 of arXiv:2412.19437), which is
the "cut-in-half" of DualPipe by Sea AI Lab. Its step is eight numbered phases of calls; here they are data.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from dualpipe.schedule.placement import v_placement
from dualpipe.schedule.truncate import first_microbatches
from dualpipe.schedule.types import Action, Kind, Schedule, Step


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DeepSeek's order where there are at least two micro-batches a rank, else what is left of it with fewer of them.

    DeepSeek's engine, like torch's, refuses fewer than 2P micro-batches.
    """
    num_stages = 2 * num_ranks
    if num_microbatches >= num_stages:
        ranks = [tuple(_rank_order(num_ranks, num_microbatches, rank)) for rank in range(num_ranks)]
    else:
        ranks = [_short_order(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    return Schedule("dualpipev", num_ranks, num_stages, num_microbatches, tuple(ranks), v_placement(num_ranks))


def _short_order(num_ranks: int, num_microbatches: int, rank: int) -> tuple[Step, ...]:
    """DeepSeek's order for 2P micro-batches without those that do not exist, handing gradients on early.

    With so few, the time is that of one micro-batch's way through all stages. So where another rank waits for the
    gradient of a "B" that overlaps nothing, that gradient comes first and the weights after. With 9 micro-batches on 8
    ranks that takes 68 instead of 82 (F = W = 1, B = 2), where 1F1B takes 96.
    """
    steps = first_microbatches(_rank_order(num_ranks, 2 * num_ranks, rank), num_microbatches)
    return tuple(part for step in steps for part in _input_first(step, num_ranks))


def _input_first(step: Step, num_ranks: int) -> tuple[Step, ...]:
    action = step[0]
    stays_here = action.stage in (0, num_ranks)  # the end of the V, and its turn
    if len(step) == 2 or action.kind != "B" or stays_here:
        return (step,)
    return tuple((Action(kind, action.stage, action.microbatch),) for kind in ("I", "W"))


class _RankOrder:
    """The steps of one rank; hands out micro-batches in turn. Half 0 is the way down the V, half 1 the way back."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.steps: list[Step] = []
        self._stages = stages
        self._forwards = (count(), count())
        self._backwards = (count(), count())
        self._deferred: deque[Action] = deque()

    def forward(self, half: int) -> None:
        self.steps.append((self._next_forward(half),))

    def backward(self, half: int, *, split: bool) -> None:
        self.steps.append((self._next_backward("I" if split else "B", half),))

    def forward_and_backward(self, half: int) -> None:
        """Forward of `half`, overlapped with a backward of the other half."""
        self.steps.append((self._next_forward(half), self._next_backward("B", 1 - half)))

    def weight(self) -> None:
        """The oldest deferred weight gradients, if there are any."""
        if self._deferred:
            self.steps.append((self._deferred.popleft(),))

    def _next_forward(self, half: int) -> Action:
        return Action("F", self._stages[half], next(self._forwards[half]))

    def _next_backward(self, kind: Kind, half: int) -> Action:
        action = Action(kind, self._stages[half], next(self._backwards[half]))
        if kind == "I":
            self._deferred.append(Action("W", action.stage, action.microbatch))
        return action


def _rank_order(num_ranks: int, num_microbatches: int, rank: int) -> list[Step]:
    """DeepSeek's eight phases. In their names 0 and 1 are the halves of the V."""
    order = _RankOrder((rank, 2 * num_ranks - 1 - rank))
    after = num_ranks - rank - 1  # ranks further down the V
    _fill(order, rank, after)
    _steady(order, num_microbatches - 2 * num_ranks + rank + 1, after)
    _drain(order, rank, after)
    return order.steps


def _fill(order: _RankOrder, rank: int, after: int) -> None:
    for _ in range(2 * after):  # 1: nF0
        order.forward(0)
    for _ in range(rank + 1):  # 2: nF0F1
        order.forward(0)
        order.forward(1)
    for _ in range(after):  # 3: nI1W1F1
        order.backward(1, split=True)
        order.weight()
        order.forward(1)


def _steady(order: _RankOrder, rounds: int, after: int) -> None:
    for i in range(rounds):  # 4: nF0B1F1B0
        if i == 0 and after == 0:
            # On the last rank F0 feeds the very next F1: apart, the way down is free one backward earlier.
            order.forward(0)
            order.backward(1, split=False)
        else:
            order.forward_and_backward(0)
        order.forward_and_backward(1)
    for _ in range(after):  # 5: nB1F1B0
        order.backward(1, split=False)
        order.forward_and_backward(1)


def _drain(order: _RankOrder, rank: int, after: int) -> None:
    """The second half of phase 6 defers its weight gradients, which then fill the bubble of phases 7 and 8."""
    for i in range(2 * (rank + 1)):  # 6: nB1B0
        order.backward(1 - i % 2, split=i > rank)
    for _ in range(after):  # 7: nW0B0
        order.weight()
        order.backward(0, split=True)
    for _ in range(rank + 1):  # 8: nW0
        order.weight()
