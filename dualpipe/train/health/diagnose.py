"""Which rank a job waits for, from what its ranks wrote of themselves (`Recorder.state`). Does not import torch.

All ranks are looked at as they were at one moment: when the first of them gave up waiting, otherwise now. A rank's
innermost entry then says whom it waited for: the sender of a message, or those of a collective that were not in it.
Who is waited for and waits for nobody is at fault; so is who is dead or stopped. Where every rank waits for another,
their programs do not match.
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

FOLDER = "why"  # in output.dir
_ENDED = "has ended, without a word of what it did"
HALTED = {  # what the letters of /proc/PID/stat say of a process that does nothing
    "T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "is in disk sleep",
    "Z": _ENDED, "X": _ENDED, "": _ENDED,
}
_MARGIN = 0.1  # seconds before the first gave up: clocks of hosts differ
_LEFT = ", which the others have left: the programs of the ranks differ"
_LINES, _FRAMES = 12, 10
_State = Mapping[str, Any]


class Diagnosis(NamedTuple):
    """rank: the one at fault, None where none is to be told; lines: what is said, the first with its name."""

    rank: int | None
    lines: list[str]


class _Moment(NamedTuple):
    """The innermost entry of a rank at a moment, for so many seconds; no entry between two of them."""

    entry: _State | None
    seconds: float
    last: _State | None = None  # what had ended before, where there is no entry

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for all ranks that are in the same collective."""
        entry = self.entry or {}
        return entry.get("kind"), *entry.get("ranks", ()), entry.get("number") or entry.get("what")

    def __str__(self) -> str:
        if self.entry is None:
            after = f", {self.seconds:.3g} s after {_title(self.last)}" if self.last else ""
            return f"is in code that records nothing{after}"
        return f"has been in {_title(self.entry)} for {self.seconds:.3g} s"


def diagnose(states: Mapping[int, _State | None], processes: Mapping[int, str] | None = None) -> Diagnosis:
    """Find the rank that the others wait for. states: of each rank, None for one that wrote none; processes: what is
    known of some, such as "is stopped (SIGSTOP)"."""
    return _Graph(states, processes or {}).diagnose()


class _Graph:
    """The waits of ranks for one another at one moment."""

    def __init__(self, states: Mapping[int, _State | None], processes: Mapping[int, str]) -> None:
        self.states = {rank: state for rank, state in sorted(states.items()) if state}
        self.silent = {rank: "has written nothing: it is dead or stopped, or its host is"
                       for rank in states if rank not in self.states}
        seen = [(int(rank), text) for state in self.states.values() for rank, text in state.get("halted", {}).items()]
        for rank, text in (*seen, *processes.items()):
            if text != _ENDED or rank not in self.states:  # one that has written why it ended is not the cause
                self.silent[rank] = text
        self.sizes = next(iter(self.states.values()), {}).get("sizes", {})
        lost = [(_end(state["lost_in"], state), rank) for rank, state in self.states.items() if state.get("lost_in")]
        self.first = min(lost)[1] if lost else None  # who gave up first, and when
        self.at = min(lost)[0] - _MARGIN if lost else None
        self.moments = {rank: self._moment(state) for rank, state in self.states.items()}
        self.edges = {rank: [] if rank in self.silent else self._waited_for(rank) for rank in self.states}

    def diagnose(self) -> Diagnosis:
        """See the function."""
        starts = list(self.states) if self.first is None else [self.first]
        alone = [rank for rank, moment in self.moments.items()  # those of a collective in which nobody is missing
                 if rank not in self.silent and not self.edges[rank] and (moment.entry or {}).get("ranks")]
        if reached := Counter(rank for start in starts for rank in self._reached(start) if not self.edges.get(rank)):
            root = max(reached, key=lambda rank: (rank in self.silent, rank not in alone, reached[rank]))
            if self._known(root) or not self.silent:
                like = [rank for rank in sorted(reached) if reached[rank] == reached[root] and not self._known(rank)]
                return self._blame(root, alone, like)
        if circle := [rank for rank in self.states if rank in self._reached(rank)]:
            return self._circle(circle)
        if self.silent and self.states:
            return self._said(rank := min(self.silent), f"{self._name(rank)} {self.silent[rank]}")
        if alone:
            return self._alone(alone)
        return self._said(None, "no rank waits for another")

    # -- what ranks do and wait for

    def _moment(self, state: _State) -> _Moment:
        now = float(state["time"])
        at = now if self.at is None else min(self.at, now)
        entries = [*state["open"], *state["last"]]
        inside = [e for e in entries if now - e["ago"] <= at and (not e["done"] or _end(e, state) >= at)]
        found = min(inside, key=lambda e: e["ago"], default=None)
        if found is not None and (found.get("ranks") or not state.get("lanes")):
            return _Moment(found, at - (now - found["ago"]))
        for lane in state.get("lanes", {}).values():  # which the main thread waits for, or which is all there is
            moment = self._moment(lane)
            if (found is None or found["kind"] == "save") and (moment.entry or {}).get("ranks"):
                return moment
        if found is not None:
            return _Moment(found, at - (now - found["ago"]))
        before = [e for e in entries if e["done"] and _end(e, state) < at]
        last = min(before, key=lambda e: e["ago"] - e["seconds"], default=None)
        return _Moment(None, at - _end(last, state) if last else 0.0, last)

    def _waited_for(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for; of a collective those that have not come, nor been in it and left."""
        moment = self.moments[rank]
        entry = moment.entry or {}
        others = [other for other in entry.get("ranks", ()) if other != rank]
        if len(others) < 2 and not entry.get("number"):
            return others
        return [other for other in others if other in self.silent or not (
            other in self.moments and (self.moments[other].key == moment.key or self._left(other, entry)))]

    def _left(self, rank: int, entry: _State) -> bool:
        """Return True if a rank has been in this collective at the moment."""
        state = self.states[rank]
        seen = [e for e in (*state["open"], *state["last"]) if _same(e, entry)]
        if seen and self.at is not None:
            return any(state["time"] - e["ago"] <= self.at for e in seen)
        return any(kind == entry["kind"] and ranks == entry["ranks"] and number >= entry["number"] > 0
                   for kind, ranks, number in state.get("counts", ()))

    def _reached(self, start: int) -> set[int]:
        """Return the ranks that `start` waits for, directly or by others."""
        seen: set[int] = set()
        todo = list(self.edges.get(start, ()))
        while todo:
            if (rank := todo.pop()) not in seen:
                seen.add(rank)
                todo += self.edges.get(rank, ())
        return seen

    # -- how it is said

    def _name(self, rank: int) -> str:
        return rank_name(rank, self.sizes)

    def _names(self, ranks: Sequence[int]) -> str:
        return self._name(ranks[0]) if len(ranks) == 1 else rank_ranges(ranks)

    def _known(self, rank: int) -> bool:
        return rank in self.states or rank in self.silent

    def _blame(self, root: int, alone: Sequence[int], unknown: Sequence[int]) -> Diagnosis:
        """unknown: of which nothing has been heard, and who are waited for by as many as the root."""
        waiting = [rank for rank in self.edges if root in self._reached(rank)]
        whole = len(waiting) >= len(self.states) - (root in self.states)
        who = "everything waits" if whole else f"{rank_ranges(waiting)} wait{'s' * (len(waiting) == 1)}"
        if not self._known(root) and len(unknown) > 1:
            return self._said(None, f"{who} for {rank_ranges(unknown)}: they have not been heard of")
        text = f"{who} for {self._name(root)}: it {self._does(root)}"
        if root in alone:
            text += _LEFT
        return self._said(root, text)

    def _alone(self, alone: Sequence[int]) -> Diagnosis:
        """Nobody is missing in what they wait for."""
        entry = self.moments[alone[0]].entry or {}
        together = [rank for rank in alone if self.moments[rank].key == self.moments[alone[0]].key]
        if set(entry["ranks"]) == set(together):
            return self._said(None, f"{rank_ranges(together)} are in {_title(entry)}, and it does not end: suspect the "
                              "network, or that they gave it different tensors")
        return self._said(together[0] if len(together) == 1 else None,
                          f"{self._names(together)}, in {_title(entry)}{_LEFT}")

    def _circle(self, circle: Sequence[int]) -> Diagnosis:
        """Each waits for another one of them."""
        ranks_of: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for each in circle:
            ranks_of[self.moments[each].key].append(each)
        odd = [ranks[0] for ranks in ranks_of.values() if len(ranks) == 1]
        collective = any((self.moments[each].entry or {}).get("number") for each in circle)
        rank: int | None = odd[0] if len(odd) == 1 and len(circle) > 2 and collective else None
        ordered = sorted(ranks_of.values(), key=lambda ranks: rank not in ranks)
        texts = [f"{self._names(ranks)} {'is' if len(ranks) == 1 else 'are'} in {_title(self.moments[ranks[0]].entry)}"
                 for ranks in ordered]
        why = "the programs of the ranks differ" if collective else "they wait for each other"
        return self._said(rank, f"{', '.join(texts)}: {why}")

    def _said(self, rank: int | None, text: str) -> Diagnosis:
        """With a line for each thing that other ranks are at."""
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for other in sorted({*self.states, *self.silent} - {rank}):
            ranks_of[self._does(other)].append(other)
        lines = [f"  {self._names(ranks)} {does if len(ranks) == 1 else _plural(does)}"
                 for does, ranks in ranks_of.items()]
        more = [f"  ... and {len(lines) - _LINES} lines more"] * (len(lines) > _LINES)
        state = {} if rank is None else self.states.get(rank) or {}
        stack = [f"    {frame}" for frame in state.get("stacks", {}).get("MainThread", [])[-_FRAMES:]]
        stack = [f"  the Python stack of {self._name(rank or 0)}, innermost last:", *stack] if stack else []
        return Diagnosis(rank, [text, *lines[:_LINES], *more, *stack, *_unlike(self.states)])

    def _does(self, rank: int) -> str:
        if rank in self.silent or rank not in self.states:
            return self.silent.get(rank, "has not been heard of")
        if ahead := self.edges[rank]:
            return f"waits for {rank_ranges(ahead)} in {_title(self.moments[rank].entry)}"
        return str(self.moments[rank])


def _unlike(states: Mapping[int, _State]) -> Iterator[str]:
    """Yield the differences between ranks' collectives in torch's flight recorder, by group and number."""
    ranks_of: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, state in states.items():
        for each in state.get("flight", ()):
            if not each["p2p"]:
                sizes = f" of {each['sizes']}" if "all_reduce" in each["name"] else ""  # others may differ in size
                ranks_of[each["group"], each["number"]][each["name"] + sizes].append(rank)
    for (group, number), found in sorted(ranks_of.items(), key=lambda at: at[0][1]):
        if len(found) > 1:
            each = ", ".join(f"{rank_ranges(ranks)} {what}" for what, ranks in found.items())
            yield f"  torch's flight recorder, collective {number} of group {group}: {each}: they do not match"
            return


def _plural(does: str) -> str:
    verb, _, rest = does.partition(" ")
    return f"{dict(waits='wait', has='have', **{'is': 'are'}).get(verb, verb)} {rest}"


def _end(entry: _State, state: _State) -> float:
    """When an entry ended, by the clock of the rank's host."""
    return float(state["time"] - entry["ago"] + entry["seconds"])


def _same(entry: _State, other: _State) -> bool:
    """Return True if entries are of the same collective."""
    return all(entry.get(name) == other.get(name) for name in ("kind", "ranks", "number"))


def _title(entry: _State | None) -> str:
    """Such as "W(stage 2, micro-batch 5)", or "loss number 7 of ranks 0-3 (the loss of all pipelines)"."""
    if entry is None:
        return "nothing"
    kind, what = entry["kind"], entry["what"]
    if entry.get("number"):
        return f"{kind} number {entry['number']} of {rank_ranges(entry['ranks'])} ({what})"
    return what if "(" in what else f"{kind} ({what})" if what else kind  # an action, or a segment of one; all else


def report(folder: Path, *, as_json: bool = False) -> list[str]:
    """The diagnosis from what ranks have left in a run's folder, or in `why` there, and what each of them is at.

    Raises ValueError where there is nothing.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    states: dict[int, Any] = dict.fromkeys(range(max((state["world_size"] for state in found), default=0)))
    states |= {state["rank"]: state for state in found}
    processes = read_stuck(folder)
    states |= dict.fromkeys(processes)  # what such a rank wrote before is older: a state empties the file of stacks
    if not states:
        raise ValueError(f"{folder} has no states of ranks: they write them when nothing goes on for watchdog.timeout, "
                         "when a rank is lost, and when one of them gets SIGUSR2")
    rank, lines = diagnose(states, processes)
    if as_json:
        return [json.dumps({"rank": rank, "lines": lines, "states": states, "processes": processes})]
    for state in states.values():
        if state is not None:
            done = "" if state["lost"] is None else f"; it {state['lost']}"
            lines += ["", f"{state['name']}, process {state['pid']} on {state['host']}, step {state['step']}{done}"]
            lines += [f"  {entry['seconds']:8.3f} s  {_title(entry)}" for entry in state["last"][-_LINES:]]
            lines += [f"    {frame}" for frame in state["stacks"].get("MainThread", ())]
    return lines


def read_stuck(folder: Path) -> dict[int, str]:
    """Return the text for ranks, by number, that have left no more than a stack in this folder."""
    found = {}
    for file in folder.glob("rank-*.stack"):
        stack = file.read_text().partition("Current thread")[2].splitlines()
        if len(stack) > 1:
            found[int(file.stem.removeprefix("rank-"))] = f"holds Python's lock, so that no more is known:{stack[1]}"
    return found


def state_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's state."""
    return folder / f"rank-{rank:05}.json"


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's Python stacks, written while it cannot do so itself."""
    return folder / f"rank-{rank:05}.stack"


def process_state(process: int) -> str:
    """The state of a process by /proc, as in ps; "" where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    return ""


def halted(processes: Mapping[int, int]) -> dict[int, str]:
    """Return the text for processes, by rank, that do nothing and wait for nobody."""
    letters = {rank: process_state(process) for rank, process in processes.items()}
    if "D" in letters.values():  # which is mostly short
        time.sleep(0.1)
        letters = {rank: process_state(processes[rank]) if letter == "D" else letter for rank, letter in letters.items()}
    return {rank: HALTED[letter] for rank, letter in letters.items() if letter in HALTED}
