"""Known schedules, each built as the steps of every rank.

- On a V: DualPipeV and ZB-V, written as patterns, and V-Half, V-Min and DualPipeV at half of its memory, squeezed from
  a building block.
- With stages in a loop: GPipe, 1F1B, ZB-H1 and ZB-H2, and with several stages per rank interleaved 1F1B and its
  zero-bubble form. They differ in the forwards before the first backward, and in when weight gradients run.

A pattern is a list of names. "F0" is a forward on the rank's first stage (half 0, on the way down the V), "F1" one on
its second stage (half 1, on the way back), and "F0&B1" a pair that overlaps. `steps_from_pattern` adds the
micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import combinations_with_replacement, islice, product
from typing import cast

from dualpipe.schedule.building_blocks import BuildingBlock, Policy, RankOrder, building_block, repeat, squeeze
from dualpipe.schedule.simulate import Costs, simulate
from dualpipe.schedule.types import Action, Kind, Schedule, ScheduleError, Step, v_placement
from dualpipe.schedule.validate import validate

EQUAL_COSTS = Costs(F=1, B=2, W=1)
MOST_ACTIONS = 100_000  # of all building blocks that are tried for a schedule; this takes a few seconds


def overlap_costs(communication: float) -> Costs:
    """Return the costs of a stage of F = 1 that communicates for a fraction of it, if pairs overlap perfectly.

    The rest of F is computing, and so is all of W; I is like F. A "B" computes for both, and overlaps its own
    communication. A pair takes as long as the sum of its computing, the sum of its communication, or either action
    alone, whichever is longest.

    Args:
        communication: fraction of a forward, 0 to 1.
    """
    compute = 1 - communication
    computing = {"F": compute, "B": 2 * compute, "I": compute, "W": compute}
    sending = {"F": communication, "B": communication, "I": communication, "W": 0.0}
    alone = {"F": 1.0, "B": max(computing["B"], communication), "I": 1.0, "W": compute}
    pairs = {
        (a, b): max(computing[a] + computing[b], sending[a] + sending[b], alone[a], alone[b])
        for a, b in combinations_with_replacement("FBIW", 2)
    }
    return Costs(F=alone["F"], B=alone["B"], W=alone["W"], I=alone["I"], FB=pairs["F", "B"], pairs=pairs)


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

    On P ranks, a rank holds at most P + 2 stage activations (see `simulate`), where 1F1B holds 2P. The steady state has
    no bubble if F = I = W.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362, table 2.
    """
    return _from_building_block("v_half", num_ranks, num_microbatches, num_ranks + 2)


def dualpipev_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build a schedule on a V whose actions overlap, with about half the activation memory of DualPipeV.

    On P ranks, a rank holds at most P + 2 stage activations (see `simulate`), where DualPipeV holds 2P + 1. It pairs
    any actions that save time if a third of a forward is communication. With 2P micro-batches on 4 and on 8 ranks it
    takes 10% and 16% longer than DualPipeV where that is so.

    Source: the building blocks of V-Half, squeezed with the costs of pairs; this is our own schedule.
    """
    return _from_building_block("dualpipev_half", num_ranks, num_microbatches, num_ranks + 2, overlaps=True)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build V-Min: a schedule on a V with about a third of the activation memory of 1F1B, for many ranks.

    On P ranks, a rank holds at most (2P + 8) / 3 stage activations (see `simulate`), and at most P if P is 4 to 8;
    1F1B holds 2P. The steady state has no bubble if F = I = W.

    Source: as for `v_half`.
    """
    least_memory = (4, 2, 3)[num_ranks % 3]  # of the block for 3, 1 and 2 ranks; it is 2 more for each 3 more ranks
    block_memory = least_memory + 2 * ((num_ranks - 1) // 3)
    memory = max(block_memory, min(num_ranks, (2 * num_ranks + 8) // 3))
    return _from_building_block("v_min", num_ranks, num_microbatches, memory)


def _from_building_block(
    name: str, num_ranks: int, num_microbatches: int, memory: int, *, overlaps: bool = False
) -> Schedule:
    """Return the schedule of the building block that is best with up to 2P micro-batches.

    Args:
        name: name of the schedule.
        num_ranks: number of ranks.
        num_microbatches: number of micro-batches.
        memory: stage activations that a rank may hold.
        overlaps: make it for `overlap_costs(0.3)` instead of `EQUAL_COSTS`, also from blocks whose F1 and I0 reach the
            next rank two ticks later.
    """
    few = min(num_microbatches, 2 * num_ranks)
    for block, policy in _best_blocks(num_ranks, few, memory, overlaps):
        schedule = _squeezed(name, num_ranks, num_microbatches, memory, overlaps, block, policy)
        with suppress(ScheduleError):  # ranks would wait for each other if sends block
            validate(schedule)
            return schedule
    raise AssertionError("a building block that is only repeated is valid")


@lru_cache
def _best_blocks(
    num_ranks: int, num_microbatches: int, memory: int, overlaps: bool
) -> list[tuple[BuildingBlock, Policy | None]]:
    """Return building blocks, best first, each with the policy to squeeze it; None to repeat it only.

    For many ranks, which take long, only the first blocks that fit are tried.
    """
    hops = [(1, 1, 1, 1), (1, 2, 1, 2)] if overlaps else [(1, 1, 1, 1)]
    blocks = [building_block(num_ranks, gaps, of_block)
              for of_block, gaps in product(hops, product((1,), (1, 3, 5), (1, 3, 5)))]
    rank_memory = [memory] * num_ranks
    fitting = (block for block in blocks if repeat(block, num_ranks, num_microbatches, rank_memory) is not None)
    most_tried = max(1, MOST_ACTIONS // (6 * num_ranks * num_microbatches))
    policies = (None, Policy(), Policy("F"), Policy(patience=0.3))

    def quality(candidate: tuple[BuildingBlock, Policy | None]) -> tuple[float, int]:
        schedule = _squeezed("", num_ranks, num_microbatches, memory, overlaps, *candidate)
        timeline = simulate(schedule, overlap_costs(0.3) if overlaps else EQUAL_COSTS)
        return timeline.makespan, max(timeline.peak_activations)

    return sorted(product(islice(fitting, most_tried), policies), key=quality)


def _squeezed(
    name: str, num_ranks: int, num_microbatches: int, memory: int, overlaps: bool, block: BuildingBlock,
    policy: Policy | None,
) -> Schedule:
    """Return the schedule of a building block, squeezed by `policy` if it is not None."""
    empty = Schedule(name, num_ranks, 2 * num_ranks, num_microbatches, ((),) * num_ranks, v_placement(num_ranks))
    rank_memory = [memory] * num_ranks
    orders = repeat(block, num_ranks, num_microbatches, rank_memory)
    assert orders is not None, "a block that fits for 2P micro-batches fits for more"
    if policy is not None:
        orders = squeeze(empty, orders, overlap_costs(0.3) if overlaps else EQUAL_COSTS, rank_memory, policy)
    return replace(empty, ranks=tuple(map(number_microbatches, orders)))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build GPipe: all forwards, then all backwards, with one stage per rank. Source: arXiv:1811.06965."""
    return _in_a_loop("gpipe", num_ranks, num_microbatches, [num_microbatches] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build 1F1B, with one stage per rank. Source: PipeDream-flush, arXiv:2006.09503."""
    return _in_a_loop("1f1b", num_ranks, num_microbatches, [*reversed(range(num_ranks))])


def zb1p(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build ZB-H1: 1F1B whose deferred weight gradients fill two thirds of the bubble, with the memory of 1F1B.

    Rank r runs each weight gradient r backwards later. Source: section 2.2 of Qi et al., arXiv:2401.10241.
    """
    warmups = [*reversed(range(num_ranks))]
    return _in_a_loop("zb1p", num_ranks, num_microbatches, warmups, weights_after=range(num_ranks))


def zb2p(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build ZB-H2: between a rank's first and last action there is no bubble if F = I = W. It holds 2P - 1 activations.

    Rank r of P runs 2 (P - r - 1) forwards first, and each weight gradient 2r backwards later. All ranks end a step
    staggered, as they start it. Source: section 2.3 of Qi et al., arXiv:2401.10241.
    """
    warmups = [2 * ranks_below for ranks_below in reversed(range(num_ranks))]
    return _in_a_loop("zb2p", num_ranks, num_microbatches, warmups, weights_after=range(0, 2 * num_ranks, 2))


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Build interleaved 1F1B, with stage s on rank s % P.

    A rank runs forwards until the gradient for its first backward can arrive, then forwards and backwards in turn, then
    the remaining backwards. Micro-batches pass through a rank's stages in groups of P, or somewhat more if their number
    is not a multiple of P, which Megatron-LM requires (see `_group_sizes`). Groups of more than P hold more
    activations and are faster than an incomplete last group: on 4 ranks with 10 micro-batches, the makespan is 69 with
    12 activations instead of 73 with 11 (F = 1, B = 2).

    Source: Megatron-LM, arXiv:2104.04473; for groups of more than P, torch's ScheduleInterleaved1F1B.
    """
    return _interleaved("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank)


def interleaved_zb(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Build interleaved 1F1B whose deferred weight gradients fill part of the bubble, with the same memory.

    Rank r runs each weight gradient r backwards later, as in `zb1p`. Source: torch's ScheduleInterleavedZeroBubble.
    """
    return _interleaved("interleaved_zb", num_ranks, num_microbatches, stages_per_rank, weights_after=range(num_ranks))


def _interleaved(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, *,
    weights_after: Sequence[int] | None = None,
) -> Schedule:
    """Return a schedule of `_in_a_loop` with the groups and warm-ups of interleaved 1F1B.

    The last rank sends the activations of a group to the first rank before that receives them, as it runs the whole
    group on its stage before. With more than P micro-batches in a group, several are in flight once the first rank
    also runs backwards: in each group but the first.
    """
    if stages_per_rank == 1:
        warmups = [*reversed(range(num_ranks))]
        return _in_a_loop(name, num_ranks, num_microbatches, warmups, weights_after=weights_after)
    group_sizes = _group_sizes(num_ranks, num_microbatches)
    first_stages = (stages_per_rank - 1) * group_sizes[0]
    # As many forwards as a rank has time for until a gradient arrives.
    warmups = [2 * ranks_below + first_stages for ranks_below in reversed(range(num_ranks))]
    schedule = _in_a_loop(
        name, num_ranks, num_microbatches, warmups, stages_per_rank=stages_per_rank, group_sizes=group_sizes,
        weights_after=weights_after,
    )
    in_flight = 1 if len(group_sizes) == 1 else group_sizes[0] - num_ranks + 1
    return replace(schedule, messages_in_flight=in_flight)


def _group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return the numbers of micro-batches that pass through all stages of a rank before the next ones.

    There are as many groups as have P micro-batches each, or one. The surplus is divided among them, in the first ones.

    Example: 4 ranks have 14 micro-batches in groups of 5, 5 and 4.
    """
    num_groups = max(1, num_microbatches // num_ranks)
    size, num_larger = divmod(num_microbatches, num_groups)
    return [size + 1] * num_larger + [size] * (num_groups - num_larger)


def _in_a_loop(
    name: str, num_ranks: int, num_microbatches: int, warmups: Sequence[int], *, stages_per_rank: int = 1,
    group_sizes: Sequence[int] | None = None, weights_after: Sequence[int] | None = None,
) -> Schedule:
    """Return a schedule with stage s on rank s % P, in which forwards and backwards take turns after a warm-up.

    Args:
        name: name of the schedule.
        num_ranks: number of ranks, P.
        num_microbatches: number of micro-batches.
        warmups: for each rank, the number of forwards before they take turns with backwards.
        stages_per_rank: number of stages of a rank.
        group_sizes: numbers of micro-batches that pass through all stages of a rank before the next ones. Default: one
            group of all.
        weights_after: for each rank, how many further backwards it runs between a backward and its weight gradients.
            Default: backwards are not split.
    """
    visits: list[tuple[int, int]] = []  # index among the rank's stages, micro-batch
    group_start = 0
    for group_size in group_sizes or [num_microbatches]:
        group = range(group_start, group_start + group_size)
        visits += product(range(stages_per_rank), group)
        group_start += group_size
    kind: Kind = "B" if weights_after is None else "I"
    ranks = []
    for rank, warmup in enumerate(warmups):
        forwards = [Action("F", local_stage * num_ranks + rank, mb) for local_stage, mb in visits]
        backwards = [
            Action(kind, (stages_per_rank - 1 - local_stage) * num_ranks + rank, mb) for local_stage, mb in visits
        ]
        actions = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards):
            actions += [forward, backward]
        actions += backwards[max(0, len(forwards) - warmup) :]
        if weights_after is not None:
            actions = _with_weights(actions, weights_after[rank])
        ranks.append(tuple((action,) for action in actions))
    placement = tuple(range(num_ranks)) * stages_per_rank
    return Schedule(name, num_ranks, len(placement), num_microbatches, tuple(ranks), placement)


def _with_weights(actions: Iterable[Action], num_later: int) -> list[Action]:
    """Add the "W" of each "I" after the "I" that is `num_later` further, and the remaining ones at the end."""
    with_weights: list[Action] = []
    deferred = deque[Action]()
    for action in actions:
        with_weights.append(action)
        if action.kind == "I":
            deferred.append(replace(action, kind="W"))
            if len(deferred) > num_later:
                with_weights.append(deferred.popleft())
    return [*with_weights, *deferred]


KNOWN: dict[str, Callable[..., Schedule]] = {
    "dualpipev": dualpipev,
    "dualpipev_full": dualpipev_full,
    "dualpipev_half": dualpipev_half,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb1p": zb1p,
    "zb2p": zb2p,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zb": interleaved_zb,
}


def check_size(name: str, size: object) -> None:
    """Raise ValueError unless `size`, a number of ranks, micro-batches or stages, is a positive integer."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} is {size!r}; give an integer of 1 or more")


def _v_stages(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two stages of a rank of a V: on the way down and on the way back."""
    return rank, 2 * num_ranks - 1 - rank


def steps_from_pattern(pattern: Iterable[str], stages: Sequence[int]) -> tuple[Step, ...]:
    """Return the steps of a pattern, with micro-batches in order (see `number_microbatches`).

    Args:
        pattern: names such as "F0", or "F1&B0" for a pair: a kind, and an index into `stages`.
        stages: the rank's stages.
    """
    names = list(pattern)
    works = {name: tuple((cast("Kind", part[0]), stages[int(part[1:])]) for part in name.split("&"))
             for name in set(names)}
    return number_microbatches([works[name] for name in names])


def number_microbatches(order: RankOrder) -> tuple[Step, ...]:
    """Return the steps of a rank's order, with micro-batches.

    On each stage, successive forwards are those of micro-batches 0, 1, 2 and so on, and so are successive backwards,
    whether "B" or "I". A "W" belongs to the oldest "I" of its stage that has no "W" yet.
    """
    next_microbatch: Counter[tuple[bool, int]] = Counter()  # by (is a forward, stage)
    deferred: defaultdict[int, deque[int]] = defaultdict(deque)  # micro-batches of weight gradients, by stage
    steps: list[Step] = []
    for works in order:
        step = []
        for kind, stage in works:
            if kind == "W":
                microbatch = deferred[stage].popleft()
            else:
                microbatch = next_microbatch[kind == "F", stage]
                next_microbatch[kind == "F", stage] += 1
                if kind == "I":
                    deferred[stage].append(microbatch)
            step.append(Action(kind, stage, microbatch))
        steps.append(tuple(step))
    return tuple(steps)


def first_microbatches(steps: Iterable[Step], num_microbatches: int) -> tuple[Step, ...]:
    """Remove the actions of micro-batches from `num_microbatches` on; the rest of a pair stays as a step.

    Applied to all ranks, this keeps a schedule valid. The remaining actions keep their order, so that each still comes
    after what it needs. No more messages are in flight on a stream, and no more activations are live, than before.
    """
    shortened = (tuple([action for action in step if action.microbatch < num_microbatches]) for step in steps)
    return tuple(filter(None, shortened))
