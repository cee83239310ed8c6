"""Known schedules: DualPipeV, ZB-V, V-Half, 1F1B and interleaved 1F1B, each built as the steps of every rank.

The schedules on a V are written as patterns of names. "F0" is a forward on the rank's first stage (half 0, on the way
down the V), "F1" one on its second stage (half 1, on the way back), and "F0&B1" a pair that overlaps.
`steps_from_pattern` adds the micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import cast

from dualpipe.schedule.types import Action, Kind, Schedule, Step, v_placement


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build DualPipeV: a V-shaped schedule whose forwards overlap the backwards of other micro-batches.

    With at least two micro-batches per rank this is DeepSeek's order. For fewer micro-batches, which the engines of
    DeepSeek and torch refuse, this function builds the order for two micro-batches per rank and removes the actions of
    the surplus micro-batches. Ranks then wait for gradients for much of the step. To send gradients earlier, a "B" that
    overlaps nothing and whose input gradient another rank waits for is split into "I" and "W". With 9 micro-batches on
    8 ranks the makespan is 68 instead of 82 (F = W = 1, B = 2); 1F1B takes 96.

    Source: github.com/deepseek-ai/DualPipe, which follows Sea AI Lab's "cut-in-half" form of DualPipe (section 3.2.1 of
    arXiv:2412.19437). The eight phases of `_dualpipev_pattern` are the numbered phases of DeepSeek's step.
    """
    num_built = max(num_microbatches, 2 * num_ranks)
    ranks = []
    for rank in range(num_ranks):
        steps = steps_from_pattern(_dualpipev_pattern(rank, num_ranks, num_built), _v_stages(rank, num_ranks))
        kept_steps = first_microbatches(steps, num_microbatches)
        if num_microbatches < num_built:
            # No other rank waits for the input gradients of these two stages: stage 0 has none to send, and stage
            # `num_ranks`, the first after the V's turn, passes its own to a stage of the same rank.
            kept_steps = _split_lone_backwards(kept_steps, except_stages=(0, num_ranks))
        ranks.append(kept_steps)
    return Schedule("dualpipev", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def _dualpipev_pattern(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Return DeepSeek's order of a rank, for at least two micro-batches per rank. Comments name its phases."""
    ranks_below = num_ranks - rank - 1  # further down the V
    pattern = ["F0"] * (2 * ranks_below)  # 1: nF0
    pattern += ["F0", "F1"] * (rank + 1)  # 2: nF0F1
    pattern += ["I1", "W1", "F1"] * ranks_below  # 3: nI1W1F1
    steady = ["F0&B1", "F1&B0"] * (num_microbatches - 2 * num_ranks + rank + 1)  # 4: nF0B1F1B0
    if ranks_below == 0:
        # On the last rank, the next F1 needs the output of the first F0. DeepSeek therefore runs that F0 before B1
        # instead of pairing them: F0 ends earlier alone than in a pair.
        steady = ["F0", "B1", *steady[1:]]
    pattern += steady
    pattern += ["B1", "F1&B0"] * ranks_below  # 5: nB1F1B0
    # 6: nB1B0. The last `rank + 1` backwards are "I", whose weight gradients fill the bubble of phases 7 and 8.
    drain_halves = ["1", "0"] * (rank + 1)
    pattern += ["B" + half for half in drain_halves[: rank + 1]]
    pattern += ["I" + half for half in drain_halves[rank + 1 :]]
    deferred_halves = drain_halves[rank + 1 :] + ["0"] * ranks_below
    for half in deferred_halves[:ranks_below]:  # 7: nW0B0
        pattern += ["W" + half, "I0"]
    pattern += ["W" + half for half in deferred_halves[ranks_below:]]  # 8: nW0
    return pattern


def dualpipev_full(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build DualPipeV with full backwards only.

    No weight gradient is deferred, so no tensors have to be held for deferred weight gradients. On 2 ranks with 16
    micro-batches the makespan is 2% longer (F = W = 1, B = 2).
    """
    split = dualpipev(num_ranks, num_microbatches)
    ranks = tuple(
        tuple(tuple(replace(action, kind="B") if action.kind == "I" else action for action in step)
              for step in steps if step[0].kind != "W")
        for steps in split.ranks
    )
    return replace(split, name="dualpipev_full", ranks=ranks)


def _split_lone_backwards(steps: Iterable[Step], except_stages: Collection[int]) -> tuple[Step, ...]:
    """Replace each "B" that overlaps nothing by an "I" and a "W", except on the stages `except_stages`."""
    split_steps: list[Step] = []
    for step in steps:
        action = step[0]
        if len(step) == 1 and action.kind == "B" and action.stage not in except_stages:
            split_steps.append((replace(action, kind="I"),))
            split_steps.append((replace(action, kind="W"),))
        else:
            split_steps.append(step)
    return tuple(split_steps)


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build ZB-V: the zero-bubble schedule on a V, with the memory of 1F1B.

    Its steady state has no bubble if F = I = W. A rank runs as many forwards as fill the V, then F0 I0 W0 F1 I1 W1 in
    turn, then the remaining backwards, input gradients first. With fewer than 2P-1 micro-batches on P ranks, the
    schedule is the order for 2P-1 micro-batches, without the actions of the surplus micro-batches.

    Source: section 6 of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
    """
    num_built = max(num_microbatches, 2 * num_ranks - 1)
    ranks = []
    for rank in range(num_ranks):
        ranks_from_here = num_ranks - rank  # this rank and the ranks further down the V
        warmup = 2 * num_ranks - 1 - rank  # forwards of half 0 before its first backward
        pattern = ["F0"] * (2 * ranks_from_here - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * ranks_from_here
        pattern += ["F0", "I0", "W0", "F1", "I1", "W1"] * (num_built - warmup)
        pattern += ["I0", "W0", "F1", "I1", "W1"] * (warmup - num_ranks)
        pattern += ["I0", "I1"] * rank + ["I0", "W0"] * ranks_from_here + ["W1"] * rank + ["W0"] * rank
        steps = steps_from_pattern(pattern, _v_stages(rank, num_ranks))
        ranks.append(first_microbatches(steps, num_microbatches))
    return Schedule("zbv", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build V-Half: a schedule on a V with about half the activation memory of 1F1B.

    On P ranks, a rank holds at most P + 2 stage activations (see `simulate`) instead of 2P. Time is divided into
    ticks of one action. A rank runs F0, F1, I1 and I0 of the first micro-batch at fixed ticks, those of each following
    micro-batch 6 ticks later, and weight gradients at the free ticks. Each rank runs F0 and I1 two ticks later than the
    rank before it, and F1 and I0 one tick earlier. So it holds the activations of half 0 (from F0 to I0) for three
    ticks less than the rank before it, and those of half 1 (from F1 to I1) for three ticks more: the sum is equal on
    all ranks.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362, with the offsets of
    github.com/sail-sg/zero-bubble-pipeline-parallelism, but without the reordering at the beginning and the end of a
    step that is done there.
    """
    shift = 0 if num_ranks % 2 else 3  # with an even number of ranks, two actions would otherwise share a tick
    ranks = []
    for rank in range(num_ranks):
        first_ticks = {
            "F0": 2 * rank,
            "F1": 3 * num_ranks - rank - 2,
            "I1": 3 * num_ranks + shift + 2 * rank - 1,
            "I0": 6 * num_ranks + shift - rank - 2,
        }
        names = {tick + 6 * mb: name for name, tick in first_ticks.items() for mb in range(num_microbatches)}
        pattern: list[str] = []
        deferred = deque[str]()
        for tick in range(1 + max(names)):
            name = names.get(tick)
            if name is not None:
                pattern.append(name)
                if name.startswith("I"):
                    deferred.append("W" + name[1])
            elif deferred:
                pattern.append(deferred.popleft())
        ranks.append(tuple(steps_from_pattern([*pattern, *deferred], _v_stages(rank, num_ranks))))
    return Schedule("v_half", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build 1F1B, with one stage per rank. Source: PipeDream-flush, arXiv:2006.09503."""
    return replace(interleaved_1f1b(num_ranks, num_microbatches, stages_per_rank=1), name="1f1b")


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Build interleaved 1F1B, with stage s on rank s % P.

    A rank runs forwards until the gradient for its first backward can arrive, then forwards and backwards in turn, then
    the remaining backwards. Micro-batches pass through a rank's stages in groups of P. Megatron-LM requires a multiple
    of P micro-batches; for other numbers, the order is that for the next higher multiple, without the actions of the
    surplus micro-batches. But from P + 1 to 2P - 1 micro-batches are one group, as in torch. It holds M - P activations
    more for each stage of a rank but one, and is faster: on 8 ranks with 9 micro-batches the makespan is 75 instead of
    89 (F = 1, B = 2), with 18 activations instead of 17.

    Source: Megatron-LM, arXiv:2104.04473.
    """
    group_size = num_microbatches if num_ranks < num_microbatches < 2 * num_ranks else num_ranks
    visits = [  # index among the rank's stages, micro-batch
        (local_stage, group_start + i)
        for group_start in range(0, num_microbatches, group_size)
        for local_stage in range(stages_per_rank)
        for i in range(group_size)
    ]
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action("F", local_stage * num_ranks + rank, mb) for local_stage, mb in visits]
        backwards = [
            Action("B", (stages_per_rank - 1 - local_stage) * num_ranks + rank, mb) for local_stage, mb in visits
        ]
        warmup = num_ranks - rank - 1
        if stages_per_rank > 1:
            warmup = 2 * warmup + (stages_per_rank - 1) * group_size
        actions = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards):
            actions += [forward, backward]
        actions += backwards[max(0, len(forwards) - warmup) :]
        ranks.append(first_microbatches([(action,) for action in actions], num_microbatches))
    placement = tuple(range(num_ranks)) * stages_per_rank
    return Schedule("interleaved_1f1b", num_ranks, len(placement), num_microbatches, tuple(ranks), placement)


KNOWN: dict[str, Callable[..., Schedule]] = {
    "dualpipev": dualpipev,
    "dualpipev_full": dualpipev_full,
    "zbv": zbv,
    "v_half": v_half,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
}


def check_size(name: str, size: object) -> None:
    """Raise ValueError unless `size`, a number of ranks, micro-batches or stages, is a positive integer."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} is {size!r}; give an integer of 1 or more")


def _v_stages(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two stages of a rank of a V: on the way down and on the way back."""
    return rank, 2 * num_ranks - 1 - rank


def steps_from_pattern(pattern: Iterable[str], stages: Sequence[int]) -> list[Step]:
    """Return the steps of a pattern, with micro-batches in order.

    On each stage, successive forwards are those of micro-batches 0, 1, 2 and so on, and so are successive backwards,
    whether "B" or "I". A "W" belongs to the oldest "I" of its stage that has no "W" yet.

    Args:
        pattern: names such as "F0", or "F1&B0" for a pair: a kind, and an index into `stages`.
        stages: the rank's stages.
    """
    next_microbatch: Counter[tuple[bool, str]] = Counter()  # by (is a forward, index of the stage)
    deferred: defaultdict[str, deque[int]] = defaultdict(deque)  # micro-batches of weight gradients
    names = list(pattern)
    parsed = {name: [cast("tuple[Kind, str]", tuple(part)) for part in name.split("&")] for name in set(names)}
    steps: list[Step] = []
    for name in names:
        step = []
        for kind, index in parsed[name]:
            if kind == "W":
                microbatch = deferred[index].popleft()
            else:
                microbatch = next_microbatch[kind == "F", index]
                next_microbatch[kind == "F", index] += 1
                if kind == "I":
                    deferred[index].append(microbatch)
            step.append(Action(kind, stages[int(index)], microbatch))
        steps.append(tuple(step))
    return steps


def first_microbatches(steps: Iterable[Step], num_microbatches: int) -> tuple[Step, ...]:
    """Remove the actions of micro-batches from `num_microbatches` on; the rest of a pair stays as a step.

    Applied to all ranks, this keeps a schedule valid. The remaining actions keep their order, so that each still comes
    after what it needs. No more messages are in flight on a stream, and no more activations are live, than before.
    """
    shortened = (tuple([action for action in step if action.microbatch < num_microbatches]) for step in steps)
    return tuple(filter(None, shortened))
