"""Random damage to a schedule, one kind of mistake a function. Steps are lists of [kind, stage, micro-batch]."""

import random


def _step(rng: random.Random, ranks):
    """A rank's steps, and which of them; not an empty one."""
    return rng.choice([(steps, i) for steps in ranks for i, step in enumerate(steps) if step])


def _action(rng: random.Random, ranks):
    steps, i = _step(rng, ranks)
    return rng.choice(steps[i])


def drop(rng, ranks):
    steps, i = _step(rng, ranks)
    steps[i].pop(rng.randrange(len(steps[i])))
    if not steps[i]:
        del steps[i]


def duplicate(rng, ranks):
    to, i = _step(rng, ranks)
    to.insert(i, [list(_action(rng, ranks))])


def move_to_any_rank(rng, ranks):
    steps, i = _step(rng, ranks)
    step = steps.pop(i)
    to = rng.choice(ranks)
    to.insert(rng.randint(0, len(to)), step)


def move_within_rank(rng, ranks):
    steps, i = _step(rng, ranks)
    step = steps.pop(i)
    steps.insert(rng.randint(max(0, i - 3), min(len(steps), i + 3)), step)


def swap_neighbours(rng, ranks):
    steps, i = _step(rng, ranks)
    if i:
        steps[i - 1], steps[i] = steps[i], steps[i - 1]


def swap_any_two(rng, ranks):
    (a, i), (b, j) = _step(rng, ranks), _step(rng, ranks)
    a[i], b[j] = b[j], a[i]


def swap_actions(rng, ranks):
    a, b = _action(rng, ranks), _action(rng, ranks)
    a[:], b[:] = b[:], a[:]


def change_kind(rng, ranks):
    _action(rng, ranks)[0] = rng.choice("FBIWX")


def change_stage(rng, ranks):
    _action(rng, ranks)[1] += rng.choice([-2, -1, 1, 2])


def change_microbatch(rng, ranks):
    _action(rng, ranks)[2] += rng.choice([-2, -1, 1, 2])


def split_pair(rng, ranks):
    steps, i = _step(rng, ranks)
    parts = [[action] for action in steps[i]]
    rng.shuffle(parts)
    steps[i : i + 1] = parts


def merge_neighbours(rng, ranks):
    steps, i = _step(rng, ranks)
    if i:
        steps[i - 1 : i + 1] = [steps[i - 1] + steps[i]]


def turn_pair(rng, ranks):
    steps, i = _step(rng, ranks)
    steps[i].reverse()


def split_backward(rng, ranks):
    steps, i = _step(rng, ranks)
    for action in steps[i]:
        if action[0] == "B":
            action[0] = "I"
            steps.insert(i + rng.randint(0, 2), [["W", *action[1:]]])
            return


def join_backward(rng, ranks):
    steps, i = _step(rng, ranks)
    for action in steps[i]:
        if action[0] == "I":
            action[0] = "B"
            steps[:] = [step for step in steps if step != [["W", *action[1:]]]]
            return


def empty_step(rng, ranks):
    steps, i = _step(rng, ranks)
    steps.insert(i, [])


ALL = [
    drop, duplicate, move_to_any_rank, move_within_rank, swap_neighbours, swap_any_two, swap_actions, change_kind,
    change_stage, change_microbatch, split_pair, merge_neighbours, turn_pair, split_backward, join_backward, empty_step,
]
ALWAYS_WRONG = {drop, duplicate, empty_step, change_stage, change_microbatch}
OFTEN_RIGHT = {
    move_within_rank, swap_neighbours, split_pair, merge_neighbours, turn_pair, split_backward, join_backward,
}
