"""Traces of schedules as if they had been run, with times that are known; and what makes a file one of Chrome's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from dualpipe.schedule import Schedule, Step
from dualpipe.schedule.messages import all_messages, play
from dualpipe.trace.file import COMMUNICATION, COMPUTE, Slice, Trace

MS = 1_000_000  # nanoseconds


def played(
    schedule: Schedule, duration: Callable[[int, int, Step], float], *, latency: int = MS // 2, runs: int = 3,
    replicas: int = 1, loads: dict[str, list[float]] | None = None,
) -> Trace:
    """A trace of `runs` steps, each after an agreement of 1 ms, by `replicas` pipelines: rank r of pipeline d is the
    global rank r * replicas + d. duration: of a global rank's step of the schedule in a run, in ms."""
    slices: list[Slice] = []
    messages, size = all_messages(schedule), schedule.num_ranks * replicas
    now = 0
    for run in range(runs):
        ends = dict.fromkeys(range(size), now + MS)
        slices += [Slice(rank, COMMUNICATION, "agree", "word", now, now + MS, {"ranks": [not rank], "number": 0})
                   for rank in range(size) if size > 1]
        for replica in range(replicas):
            sent: dict[Any, int] = {}
            done: dict[int, int] = defaultdict(int)

            def do(place: int, step: Step, replica: int = replica, sent=sent, done=done, ends=ends, run=run) -> bool:
                rank, own = place * replicas + replica, messages[place][done[place]]
                if any(message not in sent for message in own.incoming):
                    return False
                done[place] += 1

                def add(thread: str, kind: str, name: str, start: int, end: int, **args: Any) -> None:
                    slices.append(Slice(rank, thread, kind, name, start, end, {"step": run + 1, **args}))

                def about(message: Any, peer: int) -> dict[str, Any]:
                    ends_of = [each * replicas + replica for each in (message.src, message.dst)]
                    return {"ranks": [peer * replicas + replica], "number": 0, "bytes": 8,
                            "flow": f"{message.title} from {ends_of[0]} to {ends_of[1]}, {run}"}

                for message in own.incoming:
                    until = max(ends[rank], sent[message] + latency)
                    add(COMMUNICATION, "receive", message.title, ends[rank], until, **about(message, message.src))
                    ends[rank] = until
                end = ends[rank] + round(duration(rank, run, step) * MS)
                alone = {"stage": step[0].stage, "microbatch": step[0].microbatch} if len(step) == 1 else {}
                add(COMPUTE, "".join(a.kind for a in step), " and ".join(a.title for a in step), ends[rank], end,
                    actions=list(map(str, step)), **alone)
                for message in own.outgoing:
                    sent[message] = end
                    add(COMMUNICATION, "send", message.title, end, end, **about(message, message.dst))
                ends[rank] = end
                return True

            assert not any(play(schedule.ranks, do))
        now = max(ends.values())
    ranks = {
        f"{place * replicas + replica}": {
            "name": f"rank {place * replicas + replica}", "clock_error_us": 1.5, "place": place,
            "members": [each * replicas + replica for each in range(schedule.num_ranks)],
        } for place in range(schedule.num_ranks) for replica in range(replicas)
    }
    steps = [[";".join(map(str, step)) for step in row] for row in schedule.ranks]
    given = {"name": schedule.name, "num_microbatches": schedule.num_microbatches, "placement": schedule.placement,
             "ranks": steps}
    return Trace(slices, [(0, MS, 2**20)], {"ranks": ranks, "schedule": given, "loads": loads or {}})


def check_format(found: dict[str, Any]) -> None:
    """Assert the rules of the format for the events of a file: https://docs.google.com/document/d/
    1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, as far as they are used."""
    events = found["traceEvents"]
    assert {event["ph"] for event in events} <= set("XMCsf")
    names = {kind: {(event["pid"], event.get("tid")): event["args"]["name"] for event in events
                    if event["ph"] == "M" and event["name"] == kind} for kind in ("process_name", "thread_name")}
    threads = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float) and event["ts"] >= 0 and isinstance(event["pid"], int)
            assert (event["pid"], None) in names["process_name"]
        if event["ph"] in "Xsf":
            assert (event["pid"], event["tid"]) in names["thread_name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["name"], str) and event["name"]
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    for slices in threads.values():  # of one thread those that overlap are within each other
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= start + 1e-4:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-4
            open_until.append(end)
    errors = {int(rank): told["clock_error_us"] for rank, told in found["otherData"]["ranks"].items()}
    flows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert isinstance(event["id"], int) and event["ph"] not in flows[event["id"]], "a flow has one of each end"
            flows[event["id"]][event["ph"]] = event
            around = [(start, end) for start, end in threads[event["pid"], event["tid"]]
                      if start - 1e-4 <= event["ts"] <= end + 1e-4]
            assert around, "a flow is bound to a slice"
    for ends in flows.values():
        start, end = ends["s"], ends["f"]
        assert end["bp"] == "e" and end["ts"] >= start["ts"] - errors[start["pid"]] - errors[end["pid"]]
