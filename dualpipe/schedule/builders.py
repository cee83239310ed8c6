"""Known schedules: DualPipeV, ZB-V, V-Half, 1F1B and interleaved 1F1B, each as the order of every rank."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import cast

from dualpipe.schedule.types import Action, Kind, Schedule, Step, v_placement


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: a V-shaped pipeline whose forwards overlap the backwards of other micro-batches.

    DeepSeek's order where there are at least two micro-batches a rank, else what is left of it with fewer of them;
    DeepSeek's engine, like torch's, refuses those. The time is then that of one micro-batch's way through all stages:
    where another rank waits for the gradient of a "B" that overlaps nothing, that gradient comes first and the weights
    after. With 9 micro-batches on 8 ranks that takes 68 instead of 82 (F = W = 1, B = 2), where 1F1B takes 96.

    Source: github.com/deepseek-ai/DualPipe (DualPipe is section 3.2.1 of arXiv:2412.19437), the "cut-in-half" of
    DualPipe by Sea AI Lab. Its step is eight numbered phases of calls; here they are data. Half 0 is the way down the
    V, half 1 the way back; a pair overlaps.
    """
    full, ranks = max(num_microbatches, 2 * num_ranks), []
    for rank in range(num_ranks):
        after = num_ranks - rank - 1  # ranks further down the V
        pattern = ["F0"] * (2 * after)  # 1: nF0
        pattern += ["F0", "F1"] * (rank + 1)  # 2: nF0F1
        pattern += ["I1", "W1", "F1"] * after  # 3: nI1W1F1
        steady = ["F0&B1", "F1&B0"] * (full - 2 * num_ranks + rank + 1)  # 4: nF0B1F1B0
        if after == 0:  # On the last rank F0 feeds the very next F1: apart, the way down is free one backward earlier.
            steady[:1] = ["F0", "B1"]
        pattern += steady + ["B1", "F1&B0"] * after  # 5: nB1F1B0
        halves = [str(1 - i % 2) for i in range(2 * (rank + 1))]  # 6: nB1B0, the second half without weight gradients
        pattern += ["B" + half for half in halves[: rank + 1]] + ["I" + half for half in halves[rank + 1 :]]
        deferred = halves[rank + 1 :] + ["0"] * after  # which then fill the bubble of phases 7 and 8
        for half in deferred[:after]:  # 7: nW0B0
            pattern += ["W" + half, "I0"]
        pattern += ["W" + half for half in deferred[after:]]  # 8: nW0
        order = first_microbatches(in_turn(pattern, (rank, 2 * num_ranks - 1 - rank)), num_microbatches)
        # At the end of the V and at its turn no other rank waits.
        ranks.append(order if num_microbatches == full else _gradients_first(order, (0, num_ranks)))
    return Schedule("dualpipev", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def dualpipev_full(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV whose backwards are all full: no weight gradient waits, with what it is made of, for a bubble to fill.

    On 2 ranks with 16 micro-batches that takes 2% longer (F = W = 1, B = 2).
    """
    split = dualpipev(num_ranks, num_microbatches)
    ranks = tuple(
        tuple(tuple(replace(action, kind="B") if action.kind == "I" else action for action in step)
              for step in steps if step[0].kind != "W")
        for steps in split.ranks
    )
    return replace(split, name="dualpipev_full", ranks=ranks)


def _gradients_first(order: Iterable[Step], except_for: Collection[int]) -> tuple[Step, ...]:
    """The same with each "B" that overlaps nothing as an "I" and a "W", but for those of the stages `except_for`."""
    steps: list[Step] = []
    for step in order:
        kind, stage, microbatch = step[0].kind, step[0].stage, step[0].microbatch
        if len(step) == 1 and kind == "B" and stage not in except_for:
            steps += [(Action("I", stage, microbatch),), (Action("W", stage, microbatch),)]
        else:
            steps.append(step)
    return tuple(steps)


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: the zero-bubble schedule on a V, with the memory of 1F1B; no bubble in its steady state where F = I = W.

    As many forwards as fill the V, then F0 I0 W0 F1 I1 W1 in turn, then what is left, inputs first. Half 0 of the V is
    the way down, half 1 the way back. Of the order for 2P-1 micro-batches, fewer leave out those that do not exist.

    Source: section 6 of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
    """
    full, ranks = max(num_microbatches, 2 * num_ranks - 1), []
    for rank in range(num_ranks):
        below = num_ranks - rank  # this rank and those further down the V
        warmup = 2 * num_ranks - 1 - rank  # forwards of half 0 before its first backward
        pattern = ["F0"] * (2 * below - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * below
        pattern += ["F0", "I0", "W0", "F1", "I1", "W1"] * (full - warmup)
        pattern += ["I0", "W0", "F1", "I1", "W1"] * (warmup - num_ranks)
        pattern += ["I0", "I1"] * rank + ["I0", "W0"] * below + ["W1"] * rank + ["W0"] * rank
        ranks.append(first_microbatches(in_turn(pattern, (rank, 2 * num_ranks - 1 - rank)), num_microbatches))
    return Schedule("zbv", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: on a V with about half the activation memory of 1F1B, P + 2 stages' at most instead of 2P.

    A rank does F0, F1, I1 and I0 of the first micro-batch in fixed slots, of each other one 6 slots later, and weight
    gradients in the slots between. Half 0 moves by two slots a rank and half 1 by one, so that activations of the two
    live, together, equally long on all ranks.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362, with the offsets of
    github.com/sail-sg/zero-bubble-pipeline-parallelism but not its reordering of the ends.
    """
    shift = 0 if num_ranks % 2 else 3  # or slots would be taken twice
    ranks = []
    for rank in range(num_ranks):
        offsets = {"F0": 2 * rank, "F1": 3 * num_ranks - rank - 2, "I1": 3 * num_ranks + shift + 2 * rank - 1,
                   "I0": 6 * num_ranks + shift - rank - 2}
        slots = {offset + 6 * mb: name for name, offset in offsets.items() for mb in range(num_microbatches)}
        pattern, deferred = [], deque[str]()
        for slot in range(1 + max(slots)):
            if name := slots.get(slot):
                pattern.append(name)
                deferred += ["W" + name[1]] if name[0] == "I" else []
            elif deferred:
                pattern.append(deferred.popleft())
        ranks.append(tuple(in_turn([*pattern, *deferred], (rank, 2 * num_ranks - 1 - rank))))
    return Schedule("v_half", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B, with one stage a rank. Source: PipeDream-flush, arXiv:2006.09503."""
    return replace(interleaved_1f1b(num_ranks, num_microbatches, stages_per_rank=1), name="1f1b")


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B: `stages_per_rank` stages a rank, stage s on rank s % P. Source: Megatron-LM, arXiv:2104.04473.

    Warm up until the first backward can arrive, then forward and backward in turn, then the backwards left over. Groups
    of P micro-batches go through one of the rank's stages after the other. Megatron wants a multiple of P; for other
    numbers this is the order for the next multiple, without the micro-batches that do not exist.
    """
    groups, chunks, ranks = range(0, num_microbatches, num_ranks), range(stages_per_rank), []
    turns = [(chunk, start + i) for start in groups for chunk in chunks for i in range(num_ranks)]
    for rank in range(num_ranks):
        forwards = [Action("F", chunk * num_ranks + rank, mb) for chunk, mb in turns]
        backwards = [Action("B", (stages_per_rank - 1 - chunk) * num_ranks + rank, mb) for chunk, mb in turns]
        after = num_ranks - rank - 1
        warmup = after if stages_per_rank == 1 else 2 * after + (stages_per_rank - 1) * num_ranks
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards):
            order += [forward, backward]
        order += backwards[max(0, len(forwards) - warmup) :]
        ranks.append(first_microbatches([(action,) for action in order], num_microbatches))
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
    """Raise ValueError for a number of ranks, micro-batches or stages that is no positive integer."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} is {size!r}; give an integer of 1 or more")


def in_turn(pattern: Iterable[str], stages: Sequence[int]) -> list[Step]:
    """Steps from names such as "F0", or "F1&B0" for a pair: a kind, and which of `stages`; micro-batches in turn.

    Each of the stages counts its forwards and, together, its backwards "B" and "I"; a "W" is the oldest that an "I" of
    its stage left.
    """
    turns: Counter[tuple[bool, str]] = Counter()
    deferred: defaultdict[str, deque[int]] = defaultdict(deque)
    pattern = list(pattern)
    parsed = {names: [cast("tuple[Kind, str]", tuple(name)) for name in names.split("&")] for names in set(pattern)}
    steps: list[Step] = []
    for names in pattern:
        step = []
        for kind, which in parsed[names]:
            if kind == "W":
                microbatch = deferred[which].popleft()
            else:
                microbatch = turns[kind == "F", which]
                turns[kind == "F", which] += 1
                if kind == "I":
                    deferred[which].append(microbatch)
            step.append(Action(kind, stages[int(which)], microbatch))
        steps.append(tuple(step))
    return steps


def first_microbatches(steps: Iterable[Step], num_microbatches: int) -> tuple[Step, ...]:
    """`steps` without what they do for micro-batches from `num_microbatches` on; half of a pair stays as a step.

    Done on all ranks alike this keeps an order valid: what remains keeps its sequence, hence its dependencies, no
    stream holds more messages, and no more activations are alive than before.
    """
    kept = (tuple([action for action in step if action.microbatch < num_microbatches]) for step in steps)
    return tuple(filter(None, kept))
