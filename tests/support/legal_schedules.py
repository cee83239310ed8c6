"""A second, plain reading of what makes a schedule legal, to hold `validate` to. Shares no code with it.

Everything that happens (taking a message, running a step, sending a message) is a node of one graph, everything that
must wait is an edge, and a schedule is legal if its actions are the right ones and the graph has no cycle. Actions are
plain tuples (kind, stage, micro-batch); a message is named ("F" or "B", stage, micro-batch) after who takes it.
"""

from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise


def is_legal(ranks, owners, num_microbatches, messages_in_flight=1) -> bool:
    """ranks: per rank, its steps of one or two actions; owners[s]: the rank of stage s."""
    places = [(action, rank, i) for rank, steps in enumerate(ranks) for i, step in enumerate(steps) for action in step]
    if any(len(step) not in (1, 2) for steps in ranks for step in steps):
        return False
    if not right_actions(places, len(owners), num_microbatches):
        return False
    if any(owners[stage] != rank for (_, stage, _), rank, _ in places):
        return False
    graph, sent, taken = waits(ranks, owners, {action: (rank, i) for action, rank, i in places}, messages_in_flight)
    if sent != taken:
        return False
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def right_actions(places, num_stages, num_microbatches) -> bool:
    counts = Counter(action for action, _, _ in places)
    for stage in range(num_stages):
        for mb in range(num_microbatches):
            f, b, i, w = (counts.pop((kind, stage, mb), 0) for kind in "FBIW")
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                return False
    return not counts


def source(action, where, last):
    """The (rank, step) that yields the input of an action, or None for the input of the model."""
    kind, s, mb = action
    if kind == "F":
        return where.get(("F", s - 1, mb))
    if kind == "W":
        return where["I", s, mb]
    if s == last:
        return where["F", s, mb]
    return where.get(("B", s + 1, mb)) or where["I", s + 1, mb]


def target(action, owners):
    """The message that an action yields and the rank that takes it; None where it stays on its rank."""
    kind, s, mb = action
    to = {"F": s + 1, "B": s - 1, "I": s - 1, "W": -1}[kind]
    if not 0 <= to < len(owners) or owners[to] == owners[s]:
        return None
    return ("F" if kind == "F" else "B", to, mb), owners[to]


def waits(ranks, owners, where, messages_in_flight):
    """node -> the nodes that it waits for; the messages of each stream as they are sent, and as they are taken."""
    graph, sent, taken = defaultdict(set), defaultdict(list), defaultdict(list)
    for rank, steps in enumerate(ranks):
        for step in steps:
            for message, to in filter(None, (target(action, owners) for action in step)):
                sent[rank, to, message[0]].append(message)
    for rank, steps in enumerate(ranks):
        program = []
        for i, step in enumerate(steps):
            takes = []
            for action in step:
                there = source(action, where, len(owners) - 1)
                if there is not None and there[0] == rank:
                    graph["run", rank, i].add(("run", *there))  # of the same step: it waits for itself, a cycle
                elif there is not None:
                    takes.append((there[0], ("F" if action[0] == "F" else "B", *action[1:])))
            if len(takes) == 2 and (takes[0][0], takes[0][1][0]) == (takes[1][0], takes[1][1][0]):
                takes.sort(key=lambda take: sent[take[0], rank, take[1][0]].index(take[1]))
            for src, message in takes:
                graph["take", message].add(("send", message))
                taken[src, rank, message[0]].append(message)
            program += [("take", message) for _, message in takes] + [("run", rank, i)]
            program += [("send", to[0]) for action in step if (to := target(action, owners))]
        for earlier, later in pairwise(program):
            graph[later].add(earlier)
    for stream, messages in sent.items():
        for n, message in enumerate(messages[messages_in_flight:]):
            graph["send", message].add(("take", taken[stream][n]))
    return graph, sent, taken
