"""Diagnosis of a hang: the rank that a job waits for, from the states of its ranks (`Recorder.state`).

All ranks are compared at one moment: when the first of them gave up waiting, or now if none did. The innermost open
entry of a rank then tells which ranks it waits for: the sender of a message, or the ranks of a collective that have not
entered it. The rank at fault is one that others wait for and that waits for none, or that is dead or stopped. If every
rank waits for another one, their programs do not match. Does not import torch.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.runtime.recorder import rank_name, rank_ranges

FOLDER = "why"  # in output.dir, with the states
_ENDED = "has ended without writing a state"
_DISK_SLEEP = "is in disk sleep"
HALTED = {  # texts for the state letters in /proc/PID/stat of a process that does not run
    "T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": _DISK_SLEEP,
    "Z": _ENDED, "X": _ENDED, "": _ENDED,
}
_MARGIN = 0.1  # seconds before the first rank gave up: the clocks of hosts differ
_LEFT = ", which the others have left: the programs of the ranks differ"
_MAX_LINES = 12
_MAX_FRAMES = 10
_State = Mapping[str, Any]


class Diagnosis(NamedTuple):
    """The result of a diagnosis. rank: at fault, None if unknown; lines: a report whose first line names that rank."""

    rank: int | None
    lines: list[str]


class _Moment(NamedTuple):
    """The activity of a rank at a moment.

    entry: innermost open entry, None between two entries. seconds: since it began, or since `last` ended. last: latest
    entry that had ended, if `entry` is None.
    """

    entry: _State | None
    seconds: float
    last: _State | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for all ranks in the same collective."""
        entry = self.entry or {}
        return entry.get("kind"), *entry.get("ranks", ()), entry.get("number") or entry.get("what")

    def __str__(self) -> str:
        if self.entry is not None:
            return f"has been in {_title(self.entry)} for {self.seconds:.3g} s"
        if self.last:
            return f"is in code that records nothing, {self.seconds:.3g} s after {_title(self.last)}"
        return "is in code that records nothing"


def diagnose(states: Mapping[int, _State | None], processes: Mapping[int, str] | None = None) -> Diagnosis:
    """Find the rank that the others wait for.

    Args:
        states: state of each rank, None for a rank that wrote none.
        processes: facts about the processes of some ranks, such as "is stopped (SIGSTOP)".
    """
    return _WaitGraph(states, processes or {}).diagnose()


class _WaitGraph:
    """The waits of ranks for one another at one moment.

    Attributes:
        states: of the ranks that wrote one.
        silent: texts for ranks that cannot answer: dead, stopped, or without a state.
        first: the rank that gave up first; None if none did.
        at: time of the moment; None for now.
        moments: activity of each rank at that time.
        edges: ranks that each rank waits for.
    """

    def __init__(self, states: Mapping[int, _State | None], processes: Mapping[int, str]) -> None:
        self.states = {rank: state for rank, state in sorted(states.items()) if state}
        self.silent = {rank: "has written nothing: it is dead or stopped, or its host is"
                       for rank in states if rank not in self.states}
        seen_by_ranks = [(int(rank), text) for state in self.states.values()
                         for rank, text in state.get("halted", {}).items()]
        for rank, text in (*seen_by_ranks, *processes.items()):
            if not is_consequence(text, self.states.get(rank)):
                self.silent[rank] = text
        self.sizes = next(iter(self.states.values()), {}).get("sizes", {})
        give_ups = [(_end(state["lost_in"], state), rank) for rank, state in self.states.items()
                    if state.get("lost_in")]
        self.first: int | None = None
        self.at: float | None = None
        if give_ups:
            time_of_first, self.first = min(give_ups)
            self.at = time_of_first - _MARGIN
        self.moments = {rank: self._moment(state) for rank, state in self.states.items()}
        self.edges = {rank: [] if rank in self.silent else self._waited_for(rank) for rank in self.states}

    def diagnose(self) -> Diagnosis:
        """Return the diagnosis; see the module."""
        complete = self._in_complete_collectives()
        reached = self._count_waits()
        if reached:
            root = max(reached, key=lambda rank: (rank in self.silent, rank not in complete, reached[rank]))
            if self._is_known(root) or not self.silent:
                unknown = [rank for rank in sorted(reached)
                           if reached[rank] == reached[root] and not self._is_known(rank)]
                return self._blame(root, complete, unknown)
        circle = [rank for rank in self.states if rank in self._reachable(rank)]
        if circle:
            return self._diagnose_circle(circle)
        if self.silent and self.states:
            rank = min(self.silent)
            return self._report(rank, f"{self._name(rank)} {self.silent[rank]}")
        if complete:
            return self._diagnose_complete(complete)
        return self._report(None, "no rank waits for another")

    def _count_waits(self) -> Counter[int]:
        """Return, for each rank that waits for none and that others wait for, the number of those others.

        If a rank gave up, follow the waits of `first` alone.
        """
        starts = list(self.states) if self.first is None else [self.first]
        return Counter(rank for start in starts for rank in self._reachable(start) if not self.edges.get(rank))

    def _in_complete_collectives(self) -> list[int]:
        """Return the ranks in collectives that no rank is missing from."""
        return [rank for rank, moment in self.moments.items()
                if rank not in self.silent and not self.edges[rank] and (moment.entry or {}).get("ranks")]

    # -- activity and waits

    def _moment(self, state: _State) -> _Moment:
        """Return the activity of a rank at the time `at`."""
        now = float(state["time"])
        at = now if self.at is None else min(self.at, now)
        entries = [*state["open"], *state["last"]]
        active = [e for e in entries if now - e["ago"] <= at and (not e["done"] or _end(e, state) >= at)]
        innermost = min(active, key=lambda e: e["ago"], default=None)
        if innermost is not None and (innermost.get("ranks") or not state.get("lanes")):
            return _Moment(innermost, at - (now - innermost["ago"]))
        # Look at the other threads: the main thread may wait for one, or have no open entry.
        for lane in state.get("lanes", {}).values():
            moment = self._moment(lane)
            if (innermost is None or innermost["kind"] == "save") and (moment.entry or {}).get("ranks"):
                return moment
        if innermost is not None:
            return _Moment(innermost, at - (now - innermost["ago"]))
        ended = [e for e in entries if e["done"] and _end(e, state) < at]
        last = min(ended, key=lambda e: e["ago"] - e["seconds"], default=None)
        return _Moment(None, at - _end(last, state) if last else 0.0, last)

    def _waited_for(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for; in a collective, those that have not entered it."""
        moment = self.moments[rank]
        entry = moment.entry or {}
        others = [other for other in entry.get("ranks", ()) if other != rank]
        is_message = len(others) < 2 and not entry.get("number")
        if is_message:
            return others
        return [other for other in others if other in self.silent or not self._has_entered(other, moment)]

    def _has_entered(self, rank: int, moment: _Moment) -> bool:
        """Return True if a rank is in the collective of `moment`, or has left it."""
        if rank not in self.moments:
            return False
        return self.moments[rank].key == moment.key or self._has_left(rank, moment.entry or {})

    def _has_left(self, rank: int, collective: _State) -> bool:
        """Return True if a rank had entered this collective by the time `at`, or has completed it."""
        state = self.states[rank]
        entries = [e for e in (*state["open"], *state["last"]) if _is_same_collective(e, collective)]
        if entries and self.at is not None:
            return any(state["time"] - e["ago"] <= self.at for e in entries)
        return any(kind == collective["kind"] and ranks == collective["ranks"] and number >= collective["number"] > 0
                   for kind, ranks, number in state.get("counts", ()))

    def _reachable(self, start: int) -> set[int]:
        """Return the ranks that `start` waits for, directly or through others."""
        seen: set[int] = set()
        pending = list(self.edges.get(start, ()))
        while pending:
            rank = pending.pop()
            if rank not in seen:
                seen.add(rank)
                pending += self.edges.get(rank, ())
        return seen

    # -- the report

    def _name(self, rank: int) -> str:
        return rank_name(rank, self.sizes)

    def _names(self, ranks: Sequence[int]) -> str:
        return self._name(ranks[0]) if len(ranks) == 1 else rank_ranges(ranks)

    def _is_known(self, rank: int) -> bool:
        return rank in self.states or rank in self.silent

    def _blame(self, root: int, complete: Sequence[int], unknown: Sequence[int]) -> Diagnosis:
        """Report that the others wait for `root`.

        complete: see `_in_complete_collectives`. unknown: the ranks that nothing is known of, among those that have as
        many ranks waiting for them as `root`.
        """
        waiting = [rank for rank in self.edges if root in self._reachable(rank)]
        is_everything = len(waiting) >= len(self.states) - (root in self.states)
        if is_everything:
            subject = "everything waits"
        else:
            subject = f"{rank_ranges(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        if not self._is_known(root) and len(unknown) > 1:
            return self._report(None, f"{subject} for {rank_ranges(unknown)}: they have not reported")
        text = f"{subject} for {self._name(root)}: it {self._activity(root)}"
        if root in complete:
            text += _LEFT
        return self._report(root, text)

    def _diagnose_complete(self, ranks: Sequence[int]) -> Diagnosis:
        """Report collectives that no rank is missing from and that do not end, or that the others have left."""
        entry = self.moments[ranks[0]].entry or {}
        same = [rank for rank in ranks if self.moments[rank].key == self.moments[ranks[0]].key]
        if set(entry["ranks"]) == set(same):
            return self._report(None, f"{rank_ranges(same)} are in {_title(entry)}, and it does not end: suspect the "
                                "network, or that they gave it different tensors")
        return self._report(same[0] if len(same) == 1 else None, f"{self._names(same)}, in {_title(entry)}{_LEFT}")

    def _diagnose_circle(self, circle: Sequence[int]) -> Diagnosis:
        """Report ranks that wait for each other."""
        ranks_by_key: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for rank in circle:
            ranks_by_key[self.moments[rank].key].append(rank)
        alone = [ranks[0] for ranks in ranks_by_key.values() if len(ranks) == 1]
        has_collective = any((self.moments[rank].entry or {}).get("number") for rank in circle)
        # A single rank outside of the others' collective is at fault.
        odd_one: int | None = None
        if len(alone) == 1 and len(circle) > 2 and has_collective:
            odd_one = alone[0]
        groups = sorted(ranks_by_key.values(), key=lambda ranks: odd_one not in ranks)
        texts = [f"{self._names(ranks)} {'is' if len(ranks) == 1 else 'are'} in {_title(self.moments[ranks[0]].entry)}"
                 for ranks in groups]
        reason = "the programs of the ranks differ" if has_collective else "they wait for each other"
        return self._report(odd_one, f"{', '.join(texts)}: {reason}")

    def _report(self, rank: int | None, text: str) -> Diagnosis:
        """Return a diagnosis with a line per activity of the other ranks, and the Python stack of the one at fault."""
        ranks_by_activity: dict[str, list[int]] = defaultdict(list)
        for other in sorted({*self.states, *self.silent} - {rank}):
            ranks_by_activity[self._activity(other)].append(other)
        lines = [f"  {self._names(ranks)} {activity if len(ranks) == 1 else _plural(activity)}"
                 for activity, ranks in ranks_by_activity.items()]
        if len(lines) > _MAX_LINES:
            lines[_MAX_LINES:] = [f"  ... and {len(lines) - _MAX_LINES} lines more"]
        return Diagnosis(rank, [text, *lines, *self._stack(rank), *_mismatches(self.states)])

    def _stack(self, rank: int | None) -> list[str]:
        """Return lines with the Python stack of a rank, if it is known."""
        state = {} if rank is None else self.states.get(rank) or {}
        frames = state.get("stacks", {}).get("MainThread", [])[-_MAX_FRAMES:]
        if not frames:
            return []
        title = f"  the Python stack of {self._name(rank or 0)}, innermost last:"
        return [title, *(f"    {frame}" for frame in frames)]

    def _activity(self, rank: int) -> str:
        """Return the activity of a rank as a predicate in the singular."""
        if rank in self.silent or rank not in self.states:
            return self.silent.get(rank, "has not reported")
        waited_for = self.edges[rank]
        if waited_for:
            return f"waits for {rank_ranges(waited_for)} in {_title(self.moments[rank].entry)}"
        return str(self.moments[rank])


# -- texts


def _mismatches(states: Mapping[int, _State]) -> Iterator[str]:
    """Yield a line for the first collective in torch's flight recorder that differs between ranks."""
    ranks_by_call: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, state in states.items():
        for call in state.get("flight", ()):
            if not call["p2p"]:
                # Only all-reduces must have the same sizes on all ranks.
                sizes = f" of {call['sizes']}" if "all_reduce" in call["name"] else ""
                ranks_by_call[call["group"], call["number"]][call["name"] + sizes].append(rank)
    for (group, number), calls in sorted(ranks_by_call.items(), key=lambda item: item[0][1]):
        if len(calls) > 1:
            texts = ", ".join(f"{rank_ranges(ranks)} {call}" for call, ranks in calls.items())
            yield f"  torch's flight recorder, collective {number} of group {group}: {texts}: they do not match"
            return


def _plural(predicate: str) -> str:
    """Return a predicate with its verb in the plural."""
    verb, _, rest = predicate.partition(" ")
    plurals = {"waits": "wait", "has": "have", "is": "are"}
    return f"{plurals.get(verb, verb)} {rest}"


def _end(entry: _State, state: _State) -> float:
    """Return the time when an entry ended, by the clock of the rank's host."""
    return float(state["time"] - entry["ago"] + entry["seconds"])


def _is_same_collective(entry: _State, other: _State) -> bool:
    return all(entry.get(name) == other.get(name) for name in ("kind", "ranks", "number"))


def _title(entry: _State | None) -> str:
    """Return a title: "W(stage 2, micro-batch 5)", or "loss number 7 of ranks 0-3 (the loss of all pipelines)"."""
    if entry is None:
        return "nothing"
    kind = entry["kind"]
    what = entry["what"]
    if entry.get("number"):
        return f"{kind} number {entry['number']} of {rank_ranges(entry['ranks'])} ({what})"
    if "(" in what:  # an action, or a segment of one
        return str(what)
    return f"{kind} ({what})" if what else str(kind)


# -- `dualpipe why`, and the files of ranks


def report(folder: Path, *, as_json: bool = False) -> list[str]:
    """Return the diagnosis of a run and the last entries of each rank, from the states in its folder.

    folder: output.dir, or `why` in it. as_json: return all states too, in one line of JSON. Raises ValueError if there
    are no states.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    written = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    world_size = max((state["world_size"] for state in written), default=0)
    states: dict[int, Any] = dict.fromkeys(range(world_size))
    states |= {state["rank"]: state for state in written}
    processes = read_stuck(folder)
    states |= dict.fromkeys(processes)  # a state of such a rank is older: writing a state empties the stack file
    if not states:
        raise ValueError(f"{folder} has no states of ranks: they are written after watchdog.timeout without progress, "
                         "after the loss of a rank, and when a rank gets SIGUSR2")
    rank, lines = diagnose(states, processes)
    if as_json:
        return [json.dumps({"rank": rank, "lines": lines, "states": states, "processes": processes})]
    for state in states.values():
        if state is not None:
            lines += _describe_state(state)
    return lines


def _describe_state(state: _State) -> Iterator[str]:
    """Yield lines about a rank: its process, its last entries and its Python stack."""
    loss = "" if state["lost"] is None else f"; it {state['lost']}"
    yield ""
    yield f"{state['name']}, process {state['pid']} on {state['host']}, step {state['step']}{loss}"
    for entry in state["last"][-_MAX_LINES:]:
        yield f"  {entry['seconds']:8.3f} s  {_title(entry)}"
    for frame in state["stacks"].get("MainThread", ()):
        yield f"    {frame}"


def read_stuck(folder: Path) -> dict[int, str]:
    """Return texts for ranks, by number, that have left only a Python stack in this folder."""
    texts = {}
    for file in folder.glob("rank-*.stack"):
        stack = file.read_text().partition("Current thread")[2].splitlines()
        if len(stack) > 1:
            texts[int(file.stem.removeprefix("rank-"))] = f"holds Python's lock, so that no more is known:{stack[1]}"
    return texts


def state_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's state."""
    return folder / f"rank-{rank:05}.json"


def stack_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's Python stacks, which are written while it cannot write its state."""
    return folder / f"rank-{rank:05}.stack"


# -- the processes of ranks


def process_state(pid: int) -> str:
    """Return the state letter of a process in /proc, as in ps; "" if it does not exist."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


def is_consequence(text: str, state: _State | None) -> bool:
    """Return True if a rank's process halted after the rank reported the failure, so that it is not the cause.

    Args:
        text: one of `HALTED`.
        state: state of the rank; None if it wrote none.
    """
    if state is None:
        return False
    # A rank that has given up on another one writes files, for which it may wait in disk sleep.
    return text == _ENDED or (text == _DISK_SLEEP and bool(state.get("lost_in")))


def halted(pids: Mapping[int, int]) -> dict[int, str]:
    """Return texts, by rank, for processes that are stopped, in disk sleep, or have ended. pids: by rank."""
    letters = {rank: process_state(pid) for rank, pid in pids.items()}
    if "D" in letters.values():  # disk sleep is usually short: look again
        time.sleep(0.1)
        for rank, letter in letters.items():
            if letter == "D":
                letters[rank] = process_state(pids[rank])
    return {rank: HALTED[letter] for rank, letter in letters.items() if letter in HALTED}
