"""Time of each rank in a trace: its waits, and their causes."""

from dataclasses import replace

from dualpipe.trace.file import COMMUNICATION, COMPUTE, Slice, Trace
from dualpipe.trace.measured import Measured
from traces import MS


def two_ranks(rows):
    """Build a trace of slices (rank, kind, name, start, end, more) in ms; a slice with ranks in `more` communicates."""
    slices = [Slice(rank, COMMUNICATION if "ranks" in more else COMPUTE, kind, name, start * MS, end * MS, more)
              for rank, kind, name, start, end, more in rows]
    ranks = {f"{rank}": {"name": f"rank {rank}", "place": 0, "members": [rank], "clock_error_us": 0} for rank in (0, 1)}
    schedule = {"name": "1f1b", "num_microbatches": 1, "placement": [0], "messages_in_flight": 1,
                "ranks": [["0F0", "0B0"]]}
    return Measured(Trace(slices, [], {"ranks": ranks, "schedule": schedule, "loads": {}}))


def test_a_wait_is_for_who_is_late_and_then_for_the_communication():
    both = {"ranks": [0, 1], "number": 1}
    rows = [
        (0, "F", "F", 0, 30, {"actions": ["0F0"]}), (1, "F", "F", 0, 30, {"actions": ["0F0"]}),
        (0, "exchange", "rows 1", 2, 3, {}), (1, "exchange", "rows 1", 12, 13, {}),
        (0, "all_to_all", "rows 1", 5, 16, both), (1, "all_to_all", "rows 1", 15, 16, both),
        (0, "clip", "norm", 40, 50, both), (1, "clip", "norm", 44, 50, both),
        (0, "evaluate", "evaluate", 50, 60, {}), (0, "clip", "norm", 51, 59, {"ranks": [0, 1], "number": 2}),
    ]
    found = two_ranks(rows)
    first, second = found.spans[0][0], found.spans[1][0]
    assert (first.late, first.exposed["all-to-all"], first.own) == ({1: 7 * MS}, 4 * MS, 19 * MS)
    assert (second.late.total(), second.exposed["all-to-all"], second.own) == (0, MS, 29 * MS)
    assert (first.cost, second.cost) == (23 * MS, 30 * MS), "what a rank is late is no cost of another one's action"
    assert found.hidden[0]["all-to-all"] == found.hidden[1]["all-to-all"] == 2 * MS
    assert [span.late[1] for span in found.spans[0][1:]] == [4 * MS, 0]
    assert found.spans[0][2].exposed.total() == 0, "an evaluation is told as a whole"


def test_what_another_stream_does_is_hidden_unless_it_is_waited_for():
    rows = [
        (0, "F", "F", 0, 30, {"actions": ["0F0"]}), (0, "exchange", "rows 1", 5, 25, {}),
        (0, "all_to_all", "rows 1", 20, 25, {}), (0, "evaluate", "evaluate", 40, 80, {}),
        (0, "exchange", "rows 2", 45, 65, {}), (0, "all_to_all", "rows 2", 60, 65, {}),
    ]
    trace = two_ranks(rows).trace
    slices = [each._replace(thread="device, stream 1" if each.kind == "exchange" else "device")
              for each in trace.slices]
    found = Measured(replace(trace, slices=slices))
    assert found.spans[0][0].exposed["all-to-all"] == 5 * MS
    assert found.hidden[0]["all-to-all"] == 15 * MS, "an evaluation is told as a whole"


def test_a_header_is_waited_for_as_its_message():
    flow = {"ranks": [1], "number": 0, "bytes": 8, "flow": "a from 1 to 0, 1"}
    found = two_ranks([
        (1, "send", "the activation", 20, 23, flow | {"ranks": [0]}),
        (0, "receive", "the activation", 1, 22, {"ranks": [1], "number": 0}),
        (0, "receive", "the activation", 22, 25, flow),
    ])
    assert [(dict(+span.late), dict(+span.exposed)) for span in found.spans[0]] == [
        ({1: 19 * MS}, {"activations": 2 * MS}), ({}, {"activations": 3 * MS})]
    assert found.latency == 5 * MS, "it was not waited for when it was sent: the best there is"
