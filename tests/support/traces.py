"""Traces of schedules as if they had been run, with times that are known; and what makes a file one of Chrome's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dualpipe.schedule import Costs, Schedule, Step, build
from dualpipe.schedule.messages import Message, all_messages, play
from dualpipe.trace.file import COMMUNICATION, COMPUTE, Slice, Trace

MS = 1_000_000  # nanoseconds


class _Played:
    """The slices of one step of one pipeline, whose rank r is the global rank r * replicas + replica."""

    def __init__(self, schedule: Schedule, run: int, replica: int, replicas: int, ends: dict[int, int]) -> None:
        """ends: when each global rank is free."""
        self.messages, self.done = all_messages(schedule), [0] * schedule.num_ranks
        self.run, self.replica, self.replicas, self.ends = run, replica, replicas, ends
        self.sent: dict[Message, int] = {}
        self.slices: list[Slice] = []

    def rank(self, place: int) -> int:
        return place * self.replicas + self.replica

    def add(self, place: int, kind: str, name: str, end: int, **args: Any) -> None:
        thread, rank = COMMUNICATION if "ranks" in args else COMPUTE, self.rank(place)
        self.slices.append(Slice(rank, thread, kind, name, self.ends[rank], end, {"step": self.run + 1, **args}))
        self.ends[rank] = end

    def message(self, message: Message, peer: int) -> dict[str, Any]:
        flow = f"{message} from {self.rank(message.src)} to {self.rank(message.dst)}, {self.run}"
        return {"ranks": [self.rank(peer)], "number": 0, "bytes": 8, "flow": flow}

    def do(self, place: int, step: Step, duration: Callable[[int, int, Step], float], latency: int) -> bool:
        """Do the next step of a rank, if what it needs was sent."""
        rank, own = self.rank(place), self.messages[place][self.done[place]]
        if any(message not in self.sent for message in own.incoming):
            return False
        self.done[place] += 1
        for message in own.incoming:
            arrived = max(self.ends[rank], self.sent[message] + latency)
            self.add(place, "receive", str(message), arrived, **self.message(message, message.src))
        alone = {"stage": step[0].stage, "microbatch": step[0].microbatch} if len(step) == 1 else {}
        end = self.ends[rank] + round(duration(rank, self.run, step) * MS)
        self.add(place, "".join(a.kind for a in step), " and ".join(a.title for a in step), end,
                 actions=list(map(str, step)), run=self.run + 1, **alone)
        for message in own.outgoing:
            self.sent[message] = end
            self.add(place, "send", str(message), end, **self.message(message, message.dst))
        return True


def played(
    schedule: Schedule, duration: Callable[[int, int, Step], float], *, latency: int = MS // 2, runs: int = 3,
    replicas: int = 1, loads: dict[str, list[float]] | None = None,
) -> Trace:
    """A trace of `runs` steps, each after an agreement of 1 ms, by `replicas` pipelines. duration: of a global rank's
    step of the schedule in a run, in ms; latency: of a message, in ns."""
    slices: list[Slice] = []
    size, now = schedule.num_ranks * replicas, 0
    for run in range(runs):
        ends = dict.fromkeys(range(size), now + MS)
        slices += [Slice(rank, COMMUNICATION, "agree", "word", now, now + MS, {"ranks": [not rank], "number": 0})
                   for rank in range(size) if size > 1]
        for replica in range(replicas):
            one = _Played(schedule, run, replica, replicas, ends)
            assert not any(play(schedule.ranks, partial(one.do, duration=duration, latency=latency)))
            slices += one.slices
        now = max(ends.values())
    ranks = {
        f"{place * replicas + replica}": {
            "name": f"rank {place * replicas + replica}", "clock_error_us": 1.5, "place": place,
            "members": [each * replicas + replica for each in range(schedule.num_ranks)],
        } for place in range(schedule.num_ranks) for replica in range(replicas)
    }
    steps = [[";".join(map(str, step)) for step in row] for row in schedule.ranks]
    given = {"name": schedule.name, "num_microbatches": schedule.num_microbatches, "placement": schedule.placement,
             "messages_in_flight": schedule.messages_in_flight, "ranks": steps}
    return Trace(slices, [(0, MS, 2**20)], {"ranks": ranks, "schedule": given, "loads": loads or {}})


def check_format(found: dict[str, Any]) -> None:
    """Assert the rules of the format for the events of a file: https://docs.google.com/document/d/
    1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, as far as they are used; and those of Perfetto's importer (its
    slice_tracker.cc, json_parser.h): nothing of a thread overlaps, by nanoseconds that are cut off, of what begins at
    the same time what is around comes first, a number is of one thread, and a flow is in the slice that was begun last.
    """
    events = found["traceEvents"]
    assert {event["ph"] for event in events} <= set("XMCsf")
    names = {kind: {(event["pid"], event.get("tid")): event["args"]["name"] for event in events
                    if event["ph"] == "M" and event["name"] == kind} for kind in ("process_name", "thread_name")}
    tids = [tid for _, tid in names["thread_name"]]
    assert len({*tids}) == len(tids)
    threads = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float) and event["ts"] >= 0 and event["pid"] > 0
            assert (event["pid"], None) in names["process_name"]
        if event["ph"] in "Xsf":
            assert event["tid"] > 0 and (event["pid"], event["tid"]) in names["thread_name"]
            threads[event["tid"]].append(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["name"], str) and event["name"]
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    errors = {int(rank): told["clock_error_us"] for rank, told in found["otherData"]["ranks"].items()}
    flows = defaultdict(dict)
    for of_thread in threads.values():
        open_until: list[int] = []
        for event in sorted(of_thread, key=lambda event: int(event["ts"] * 1000.0)):
            start = int(event["ts"] * 1000.0)
            if event["ph"] == "X":
                end = start + int(event["dur"] * 1000.0)
                while open_until and open_until[-1] <= start:
                    open_until.pop()
                assert not open_until or end <= open_until[-1], "of one thread what overlaps is within the other"
                open_until.append(end)
            else:
                assert isinstance(event["id"], int) and event["ph"] not in flows[event["id"]], "one of each end"
                assert open_until and start <= open_until[-1], "a flow is bound to a slice"
                flows[event["id"]][event["ph"]] = event
    for ends in flows.values():
        start, end = ends["s"], ends["f"]
        assert end["bp"] == "e" and end["ts"] >= start["ts"] - errors[start["pid"] - 1] - errors[end["pid"] - 1] - 1e-3


COSTS = Costs(F=3.0, B=5.0, I=3.0, W=2.0, FB=7.0, p2p=0.5)


def per_stage(num_stages):
    """Each stage is bigger than the one before."""
    return replace(COSTS, per_stage={stage: COSTS.scaled(1 + stage / 4) for stage in range(1, num_stages)})


PER_STAGE = per_stage(8)
SCHEDULE = build("dualpipev", 4, 8)


def as_planned(schedule=SCHEDULE, given=PER_STAGE, **options):
    return played(schedule, lambda rank, run, step: given.of(step), **options)
