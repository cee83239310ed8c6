"""`validate` refuses schedules that cannot run, with the reason.

An independent reading agrees on thousands of mutations.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from calls import calls_of
from dualpipe.schedule import Action, Schedule, ScheduleError, build, validate
from dualpipe.schedule.validate import independent
from legal_schedules import is_legal
from schedule_mutations import ALL, ALWAYS_WRONG, OFTEN_RIGHT, merge_neighbours, move_within_rank, swap_neighbours
from schedules import SCHEDULES


def action(text: str) -> Action:
    kind = next(c for c in text if c.isalpha())
    stage, microbatch = text.split(kind)
    return Action(kind, int(stage), int(microbatch))


def schedule(*ranks: str, stages: int = 2, microbatches: int = 1, placement: tuple[int, ...] = ()) -> Schedule:
    """Parse one string per rank into a schedule: steps separated by spaces, pairs joined by "&"."""
    parsed = tuple(tuple(tuple(map(action, step.split("&"))) for step in rank.split()) for rank in ranks)
    return Schedule("mine", len(ranks), stages, microbatches, parsed, placement)


GOOD = ("0F0 0B0", "1F0 1I0 1W0")

REFUSED = {
    "dropped forward": (("0B0", "1F0 1B0"), "rank 0: 0F0 is missing"),
    "dropped backward": (("0F0 0B0", "1F0"), "rank 1: 1B0 (or 1I0) is missing"),
    "dropped weights": (("0F0 0B0", "1F0 1I0"), "rank 1, step 1 (1I0): its weight gradients, 1W0, are missing"),
    "weights of a whole backward": (("0F0 0B0", "1F0 1B0 1W0"), "rank 1, step 2 (1W0): there is no 1I0"),
    "two backwards": (("0F0 0B0", "1F0 1B0 1I0 1W0"), "rank 1, step 2 (1I0): 1B0 at step 1 is the whole backward"),
    "duplicate": (("0F0 0F0 0B0", "1F0 1B0"), "rank 0, step 1 (0F0): 0F0 is also at rank 0, step 0"),
    "weights first": (("0F0 0B0", "1F0 1W0 1I0"), "rank 1, step 1 (1W0): 1W0 needs 1I0, which comes later, at step 2"),
    "backward first": (("0F0 0B0", "1B0 1F0"), "rank 1, step 0 (1B0): 1B0 needs 1F0, which comes later, at step 1"),
    "dependent pair": (("0F0 0B0", "1F0&1B0"), "rank 1, step 0 (1F0 & 1B0): these two depend on each other"),
    "weights beside input": (("0F0 0B0", "1F0 1I0&1W0"), "rank 1, step 1 (1I0 & 1W0): these two depend"),
    "dependent through another rank": (("0F0&0B0", "1F0 1B0"), "rank 0, step 0 (0F0 & 0B0): these two depend"),
    "stage out of range": (("0F0 0B0", "2F0 1F0 1B0"), "rank 1, step 0 (2F0): stage 2 of 2F0 is not one of 0 to 1"),
    "micro-batch out of range": (("0F0 0F1 0B0", "1F0 1B0"), "micro-batch 1 of 0F1 is not one of 0 to 0"),
    "unknown kind": (("0F0 0B0", "1F0 1X0"), "is not an Action of kind F, B, I, W"),
    "waits for itself": (("0B0 0F0", "1F0 1B0"), "rank 0, step 0 (0B0): deadlock: rank 0 waits at step 0 to receive"),
}


@pytest.mark.parametrize("ranks, message", REFUSED.values(), ids=REFUSED)
def test_the_message_names_rank_step_and_cause(ranks, message):
    with pytest.raises(ScheduleError) as refused:
        validate(schedule(*ranks))
    assert "schedule 'mine'" in str(refused.value)
    assert message in str(refused.value)


def test_misplaced_action():
    with pytest.raises(ScheduleError, match=r"rank 0, step 1 \(1F0\): stage 1 of 1F0 is placed on rank 1"):
        validate(schedule("0F0 1F0 0B0", "1B0", placement=(0, 1)))


def test_step_of_three_and_none():
    with pytest.raises(ScheduleError, match=r"rank 0, step 0 .*: a step has one action or two, not 3"):
        validate(schedule("0F0&0F1&0F2 0B0 0B1 0B2", "1F0 1B0", microbatches=3))
    with pytest.raises(ScheduleError, match=r"rank 0, step 0 \(empty\): a step has one action or two, not 0"):
        validate(Schedule("mine", 1, 1, 1, (((), (action("0F0"),), (action("0B0"),)),)))


def test_sizes_and_placement():
    ranks = schedule(*GOOD).ranks
    for given, message in [
        ((3, 2, 1, ranks), "has steps for 2 ranks, but num_ranks is 3"),
        ((2, 3, 1, ranks), "stage 2 is on no rank: it has no actions; ranks are 0 to 1"),
        ((2, 2, 0, ranks), "num_microbatches is 0; it must be an integer of 1 or more"),
        ((2.0, 2, 1, ranks), "num_ranks is 2.0; it must be an integer"),
        ((2, 2, 1, ranks, (0,)), "places 1 stages, but num_stages is 2"),
        ((2, 2, 1, ranks, (0, 7)), "stage 1 is on rank 7"),
        ((2, 2, 1, ranks, (0, "1")), "stage 1 is on rank '1'"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            validate(Schedule("mine", *given))


def test_an_action_that_stands_alone_is_refused_with_the_remedy():
    with pytest.raises(ScheduleError, match=r"0F0 stands alone; a step is a tuple of actions: \(0F0,\)"):
        Schedule("mine", 1, 1, 1, ((Action("F", 0, 0), Action("B", 0, 0)),))


@pytest.mark.parametrize("step", [None, "0F0", (None,), (("F", 0, 0),)], ids=repr)
def test_what_is_no_step_is_refused(step):
    with pytest.raises(ScheduleError, match="is not a step; a step is a tuple of actions"):
        Schedule("mine", 1, 1, 1, ((step,),))


@pytest.mark.parametrize("ahead", [1, 2])
def test_blocking_sends_that_wait_for_each_other(ahead):
    """Rank 0 of a V on two ranks sends `ahead` gradients while rank 1 sends it `ahead` activations.

    One message of a stream may be in flight, so a second one on either side would wait for the other forever.
    """
    first, then = range(ahead), range(ahead, 2 * ahead)
    rank0 = [f"{stage}F{m}" for m in first for stage in (0, 3)] + [f"0F{m}" for m in then]
    rank0 += [f"3B{m}" for m in first] + [f"3F{m}" for m in then] + [f"0B{m}" for m in first]
    rank0 += [f"{stage}B{m}" for m in then for stage in (3, 0)]
    rank1 = [f"{stage}F{m}" for m in first for stage in (1, 2)]
    rank1 += [f"1F{m}" for m in then] + [f"2F{m}" for m in then]
    rank1 += [f"{stage}B{m}" for m in (*first, *then) for stage in (2, 1)]
    crossing = schedule(" ".join(rank0), " ".join(rank1), stages=4, microbatches=2 * ahead)
    if ahead == 1:
        validate(crossing)
        return
    with pytest.raises(ScheduleError) as refused:
        validate(crossing)
    assert str(refused.value) == (
        "schedule 'mine', rank 0, step 7 (3B1): deadlock: "
        "rank 0 waits at step 7 to send the gradient of micro-batch 1 for stage 2 (rank 0 to 1); "
        "rank 1 waits at step 7 to send the activation of micro-batch 3 for stage 3 (rank 1 to 0)"
    )
    validate(replace(crossing, messages_in_flight=2))


@pytest.mark.parametrize("number", [0, 1.0, None])
def test_a_number_of_messages_in_flight_that_is_none(number):
    with pytest.raises(ScheduleError, match=f"messages_in_flight is {number}; it must be an integer of 1 or more"):
        validate(replace(schedule(*GOOD), messages_in_flight=number))


def test_messages_that_arrive_in_another_order():
    with pytest.raises(ScheduleError) as refused:
        validate(schedule("0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0", microbatches=2))
    assert str(refused.value) == (
        "schedule 'mine', rank 1, step 0 (1F1): receives the activation of micro-batch 1 for stage 1 (rank 0 to 1), "
        "but the next to arrive is the activation of micro-batch 0 for stage 1 (rank 0 to 1)"
    )
    validate(schedule("0F0&0F1 0B1 0B0", "1F1&1F0 1B1 1B0", microbatches=2))  # one step may take both in any order


def test_pairs_that_are_independent():
    yes = ["0F0&1B1", "0F0&0F1", "0B0&0B1", "1I0&1W1", "0W0&1W0", "0I0&1W0", "0F3&0W2"]
    no = ["0F0&0B0", "0F0&1F0", "0F0&2F0", "0B0&1B0", "0I1&1B1", "0F0&0W0", "1F0&0W0", "0I0&0W0", "1I0&0W0", "2F1&2I1"]
    for text in yes + no:
        a, b = map(action, text.split("&"))
        assert independent(a, b) == independent(b, a) == (text in yes), text


def plain(schedule: Schedule) -> list[list[list[list]]]:
    return [[[[a.kind, a.stage, a.microbatch] for a in step] for step in steps] for steps in schedule.ranks]


def accepts(ranks, base: Schedule) -> bool:
    steps = tuple(tuple(tuple(Action(*a) for a in step) for step in steps) for steps in ranks)
    try:
        validate(replace(base, name="m", ranks=steps))
    except ScheduleError as error:
        assert "rank" in str(error)
        return False
    return True


def check_mutations(seed: int, count: int) -> Counter:
    """Mutate random small schedules; return the numbers of accepted and refused ones, by mutation."""
    rng = random.Random(seed)
    outcomes: Counter = Counter()
    for _ in range(count):
        name = rng.choice(["dualpipev"] * 4 + [*SCHEDULES])
        num_ranks = rng.randint(1, 4)
        base = build(name, num_ranks, rng.randint(1, 2 * num_ranks + 2))
        ranks = plain(base)
        chosen = rng.choices(ALL, k=rng.choice([1, 1, 2, 3]))
        for mutate in chosen:
            if any(ranks):
                mutate(rng, ranks)
        frozen = [[[tuple(a) for a in step] for step in steps] for steps in ranks]
        legal = is_legal(frozen, base.placement, base.num_microbatches, base.messages_in_flight)
        assert accepts(ranks, base) == legal, (base, chosen, frozen)
        for mutate in chosen if len(chosen) == 1 else ():
            outcomes[mutate, legal] += ranks != plain(base)
    return outcomes


def assert_tells_apart(outcomes: Counter, least: int) -> None:
    for mutate in ALWAYS_WRONG:
        assert outcomes[mutate, True] == 0
        assert outcomes[mutate, False] >= least
    for mutate in OFTEN_RIGHT:
        assert outcomes[mutate, True] >= least, mutate
    for mutate in (move_within_rank, swap_neighbours, merge_neighbours):
        assert outcomes[mutate, False] >= least, mutate


def test_mutations():
    total: Counter = Counter()
    for seed in range(2):
        total += check_mutations(seed, 1500)
    assert_tells_apart(total, 5)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_mutations(seed):
    outcomes = check_mutations(seed, 3000)
    assert {legal for _, legal in outcomes} == {True, False}


def test_large_schedules_are_proved_quickly():
    large = build("dualpipev", 16, 64)
    assert calls_of(validate, large) < 60 * sum(map(len, large.ranks))
