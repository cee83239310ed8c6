"""Random changes of a rank's order, the moves of the annealing: move, pair, unpair, split and join steps."""

from __future__ import annotations

from random import Random

from dualpipe.schedule.types import Kind

Work = tuple[Kind, int]  # kind and stage of an action
Key = tuple[Kind, int, int]  # kind, stage and micro-batch of an action
RankOrder = list[tuple[Work, ...]]


def random_change(order: RankOrder, random: Random) -> RankOrder | None:
    """Return a copy of a rank's order with one random change; None if the change that was drawn is impossible.

    The changes, with their probabilities: move a step (40%), pair it with another or exchange partners (25%), unpair
    two actions (15%), and split a full backward or join a split one (20%). In `order`, every "I" must have its "W"
    later.
    """
    if not order:
        return None
    index = random.randrange(len(order))
    draw = random.random()
    step = list(order[index])
    random.shuffle(step)
    if draw < 0.4:
        return _move(order, index, _near(index, 4, random))
    if draw < 0.65:
        return _pair(order, index, step, _near(index, 2.5, random))
    if draw < 0.8:
        return _unpair(order, index, step)
    if step[0][0] == "B":
        return _split(order, index, step, later=1 + int(random.expovariate(0.3)))
    if step[0][0] == "I":
        return _join(order, index, step)
    return None


def _near(index: int, mean_distance: float, random: Random) -> int:
    """Return a random index before or after `index`; it may be out of range."""
    return index + random.choice((-1, 1)) * (1 + int(random.expovariate(1 / mean_distance)))


def _move(order: RankOrder, index: int, target: int) -> RankOrder | None:
    """Move a step to another place, unless an equal step is there."""
    if not 0 <= target < len(order) or order[index] == order[target]:
        return None
    new = order[:]
    new.insert(target, new.pop(index))
    return new


def _pair(order: RankOrder, index: int, step: list[Work], target: int) -> RankOrder | None:
    """Add the first action of a step to the single action at `target`; the second action, if any, stays alone."""
    if not 0 <= target < len(order) or len(order[target]) != 1:
        return None
    other = order[target][0]
    new = order[:]
    # A "W" comes second in a pair: it runs while the first action communicates.
    new[target] = (other, step[0]) if step[0][0] == "W" else (step[0], other)
    new[index : index + 1] = [(action,) for action in step[1:]]
    return new


def _unpair(order: RankOrder, index: int, step: list[Work]) -> RankOrder | None:
    """Replace a pair by two steps of one action; None for a step that is no pair."""
    if len(step) == 1:
        return None
    new = order[:]
    new[index : index + 1] = [(action,) for action in step]
    return new


def _split(order: RankOrder, index: int, step: list[Work], later: int) -> RankOrder:
    """Split a full backward: defer its weight gradients to a step of their own, `later` steps later."""
    _, stage = step[0]
    new = order[:]
    new[index] = (("I", stage), *step[1:])
    new.insert(min(len(order), index + later), (("W", stage),))
    return new


def _join(order: RankOrder, index: int, step: list[Work]) -> RankOrder:
    """Join an "I" and the next "W" of its stage into a full backward."""
    _, stage = step[0]
    weights: Work = ("W", stage)
    weights_index = next(later for later in range(index + 1, len(order)) if weights in order[later])
    remaining = list(order[weights_index])
    remaining.remove(weights)
    new = order[:]
    new[index] = (("B", stage), *step[1:])
    new[weights_index : weights_index + 1] = [tuple(remaining)] if remaining else []
    return new
