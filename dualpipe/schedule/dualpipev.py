"""DualPipeV: a V-shaped pipeline whose forwards overlap the backwards of other micro-batches.

Source: DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe; DualPipe is section 3.2.1 of arXiv:2412.19437), which is
the "cut-in-half" of DualPipe by Sea AI Lab. Its step is eight numbered phases of calls; here they are data.
"""

from __future__ import annotations

from dualpipe.schedule.types import Action, Schedule, Step, first_microbatches, in_turn, v_placement


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DeepSeek's order where there are at least two micro-batches a rank, else what is left of it with fewer of them.

    DeepSeek's engine, like torch's, refuses fewer than 2P micro-batches.
    """
    order = _rank_order if num_microbatches >= 2 * num_ranks else _short_order
    ranks = tuple(tuple(order(num_ranks, num_microbatches, rank)) for rank in range(num_ranks))
    return Schedule("dualpipev", num_ranks, 2 * num_ranks, num_microbatches, ranks, v_placement(num_ranks))


def _short_order(num_ranks: int, num_microbatches: int, rank: int) -> list[Step]:
    """DeepSeek's order for 2P micro-batches without those that do not exist, handing gradients on early.

    With so few, the time is that of one micro-batch's way through all stages. So where another rank waits for the
    gradient of a "B" that overlaps nothing, that gradient comes first and the weights after. With 9 micro-batches on 8
    ranks that takes 68 instead of 82 (F = W = 1, B = 2), where 1F1B takes 96.
    """
    steps: list[Step] = []
    for step in first_microbatches(_rank_order(num_ranks, 2 * num_ranks, rank), num_microbatches):
        kind, stage, microbatch = step[0].kind, step[0].stage, step[0].microbatch
        stays_here = stage in (0, num_ranks)  # the end of the V, and its turn
        if len(step) == 1 and kind == "B" and not stays_here:
            steps += [(Action("I", stage, microbatch),), (Action("W", stage, microbatch),)]
        else:
            steps.append(step)
    return steps


def _rank_order(num_ranks: int, num_microbatches: int, rank: int) -> list[Step]:
    """DeepSeek's eight phases. Half 0 is the way down the V, half 1 the way back; a pair overlaps.

    The second half of phase 6 defers its weight gradients, which then fill the bubble of phases 7 and 8.
    """
    after = num_ranks - rank - 1  # ranks further down the V
    pattern = ["F0"] * (2 * after)  # 1: nF0
    pattern += ["F0", "F1"] * (rank + 1)  # 2: nF0F1
    pattern += ["I1", "W1", "F1"] * after  # 3: nI1W1F1
    steady = ["F0&B1", "F1&B0"] * (num_microbatches - 2 * num_ranks + rank + 1)  # 4: nF0B1F1B0
    if after == 0:  # On the last rank F0 feeds the very next F1: apart, the way down is free one backward earlier.
        steady[:1] = ["F0", "B1"]
    pattern += steady + ["B1", "F1&B0"] * after  # 5: nB1F1B0
    halves = [str(1 - i % 2) for i in range(2 * (rank + 1))]  # 6: nB1B0
    pattern += ["B" + half for half in halves[: rank + 1]] + ["I" + half for half in halves[rank + 1 :]]
    deferred = halves[rank + 1 :] + ["0"] * after
    for half in deferred[:after]:  # 7: nW0B0
        pattern += ["W" + half, "I0"]
    pattern += ["W" + half for half in deferred[after:]]  # 8: nW0
    return in_turn(pattern, (rank, 2 * num_ranks - 1 - rank))
