"""The rank that a job waits for, from the states of recorders."""

from __future__ import annotations

import json

import pytest

from dualpipe.runtime.recorder import BEGAN, ENDED, Recorder, rank_ranges
from dualpipe.train.launch import diagnose as why
from dualpipe.train.launch.diagnose import diagnose

SIZES = {"pp": 2, "dp": 2, "ep": 1}


def make_recorder(rank: int) -> Recorder:
    return Recorder(rank, SIZES)


def state(rank, *entries, seconds=62.0, **more):
    """Return a state with open entries: (kind, what), with ranks for a message, and a number for a collective."""
    recorder = make_recorder(rank)
    for kind, what, *waited in entries:
        if len(waited) == 2:  # a collective
            for _ in range(waited[1]):
                with recorder.collective(kind, what, tuple(waited[0])):
                    entry = recorder._open[-1]
                    shown = entry
            shown[ENDED] = 0
            recorder._open.append(shown)
        else:
            recorder.begin(kind, what, *waited)
    for entry in recorder._open:
        entry[BEGAN] -= int(seconds * 1e9)
    return recorder.state() | more


def past(rank, kind, what, ranks, number):
    """Return the state of a rank that has left a collective and is in a forward."""
    recorder = make_recorder(rank)
    for _ in range(number):
        with recorder.collective(kind, what, tuple(ranks)):
            pass
    recorder.begin("F", "F(stage 0, micro-batch 0)")
    return recorder.state()


def test_a_rank_that_computes_while_all_others_wait_is_named_with_what_it_is_in():
    found = diagnose({
        0: state(0, ("reduce", "the gradients of stage 0", [0, 1], 3)),
        1: state(1, ("receive", "the gradient for stage 2, micro-batch 4", [3])),
        2: state(2, ("agree", "word", [0])),
        3: state(3, ("W", "W(stage 2, micro-batch 5)"), stacks={"MainThread": ["user.py:7 in spin"]}),
    })
    assert found.rank == 3
    assert found.lines[0] == ("everything waits for rank 3 (pp 1, dp 1): it has been in W(stage 2, micro-batch 5) for "
                              "62 s")
    assert "  rank 1 (pp 0, dp 1) waits for rank 3 in receive (the gradient for stage 2, micro-batch 4)" in found.lines
    assert "  rank 0 (pp 0, dp 0) waits for rank 1 in reduce number 3 of ranks 0-1 (the gradients of stage 0)" in (
        found.lines)
    assert found.lines[-2:] == ["  the Python stack of rank 3 (pp 1, dp 1), innermost last:", "    user.py:7 in spin"]


@pytest.mark.parametrize(("processes", "text"), [
    ({}, "it has written nothing: it is dead or stopped, or its host is"),
    ({3: "is stopped (SIGSTOP)"}, "it is stopped (SIGSTOP)"),
    ({3: "is in disk sleep"}, "it is in disk sleep"),
])
def test_a_rank_without_a_state_is_at_fault(processes, text):
    others = {rank: state(rank, ("clip", "the norm", range(4), 7)) for rank in range(3)}
    found = diagnose({**others, 3: None}, processes)
    assert found.rank == 3 and found.lines == [
        f"everything waits for rank 3 (pp 1, dp 1): {text}",
        "  ranks 0-2 wait for rank 3 in clip number 7 of ranks 0-3 (the norm)",
    ]


def test_ranks_that_have_not_reported():
    """Without a store, healthy ranks may not have sent their states."""
    others = {rank: state(rank, ("meet", "the settings of all ranks", range(4), 1)) for rank in range(3)}
    found = diagnose(others)
    assert found.rank == 3 and found.lines[0] == "everything waits for rank 3 (pp 1, dp 1): it has not reported"
    found = diagnose({2: others[2]})
    assert found.rank is None and found.lines[0] == "everything waits for ranks 0-1, 3: they have not reported"


def test_a_stopped_rank_is_at_fault_though_it_has_written_a_state():
    states = {0: state(0, ("receive", "the activation", [1])), 1: state(1, ("receive", "the gradient", [0]))}
    assert diagnose(states, {1: "is stopped (SIGSTOP)"}).rank == 1
    states[0]["halted"] = {"1": "is stopped (SIGSTOP)"}  # as a rank of the same host has seen
    assert diagnose(states).rank == 1


def test_a_rank_between_two_entries_is_in_code_that_records_nothing():
    recorder = make_recorder(1)
    with recorder.doing("optimizer"):
        pass
    recorder._ring[-1][BEGAN] -= int(9e9)
    recorder._ring[-1][ENDED] -= int(8e9)
    found = diagnose({0: state(0, ("receive", "the activation", [1])), 1: recorder.state()})
    assert found.rank == 1
    assert found.lines[0] == ("everything waits for rank 1 (pp 0, dp 1): it is in code that records nothing, 8 s after "
                              "optimizer")


def lost(rank, recorder, kind, what, ranks, ago, seconds=10.0):
    """Return a wait that failed `ago` seconds ago."""
    with pytest.raises(RuntimeError, match="waited"), recorder.wait(kind, what, ranks):
        recorder._open[-1][BEGAN] -= int((seconds + ago) * 1e9)
        raise RuntimeError("[../gloo/pair.cc:1] Connection closed")
    recorder._ring[-1][ENDED] -= int(ago * 1e9)
    assert recorder._ring[-1] is recorder._loss.wait


def test_ranks_are_compared_at_the_moment_when_the_first_gave_up():
    """Rank 1 is late: rank 0 has given up on it, and now rank 1 waits for rank 0."""
    first, late = make_recorder(0), make_recorder(1)
    late.begin("W", "W(stage 2, micro-batch 5)")[BEGAN] -= int(13e9)
    late.end()
    late._ring[-1][ENDED] -= int(0.5e9)
    lost(1, late, "send", "what was sent to be taken", (0,), ago=0.1, seconds=0.1)
    lost(0, first, "receive", "the gradient for stage 0, micro-batch 5", (1,), ago=2.0)
    found = diagnose({0: first.state(), 1: late.state()})
    assert found.rank == 1
    assert found.lines[0] == ("everything waits for rank 1 (pp 0, dp 1): it has been in W(stage 2, micro-batch 5) for "
                              "10.9 s")


def test_a_rank_that_has_given_up_is_not_at_fault_for_its_disk():
    first = make_recorder(0)
    lost(0, first, "reduce", "the gradients of stage 0", (1,), ago=0.5, seconds=2.0)
    states = {0: first.state(), 1: state(1, ("W", "W(stage 0, micro-batch 3)"), seconds=2.9)}
    found = diagnose(states, {0: "is in disk sleep"})
    assert found.rank == 1 and found.lines[0].startswith("everything waits for rank 1 (pp 0, dp 1): it has been in W(")
    states[0] = state(0, ("write", "a checkpoint"))
    assert diagnose(states, {0: "is in disk sleep"}).rank == 0


def test_of_those_that_lose_each_other_in_turn_the_first_one_knows():
    """Rank 0 is gone; rank 1 lost it and closed its connections, by which rank 2 lost rank 1."""
    one, two = make_recorder(1), make_recorder(2)
    lost(1, one, "receive", "the activation", (0,), ago=3.0)
    lost(2, two, "receive", "the activation", (1,), ago=2.0)
    found = diagnose({0: None, 1: one.state(), 2: two.state()})
    assert found.rank == 0 and found.lines[0].startswith("everything waits for rank 0 (pp 0, dp 0): it has written")


def test_collectives_that_do_not_match_are_named():
    found = diagnose({
        **{rank: state(rank, ("loss", "the loss of all pipelines", range(4), 7)) for rank in (0, 2, 3)},
        1: state(1, ("clip", "the norm", range(4), 7)),
    })
    assert found.rank == 1
    assert found.lines[0] == (
        "rank 1 (pp 0, dp 1) is in clip number 7 of ranks 0-3 (the norm), ranks 0, 2-3 are in loss number 7 of ranks "
        "0-3 (the loss of all pipelines): the programs of the ranks differ"
    )
    two = diagnose({0: state(0, ("loss", "it", [0, 1], 2)), 1: state(1, ("loss", "it", [0, 1], 3))})
    assert two.rank in (None, 0) and "loss number 2" in two.lines[0]


def test_a_collective_that_the_others_have_left():
    found = diagnose({0: state(0, ("loss", "it", [0, 1], 2)), 1: past(1, "loss", "it", [0, 1], 2)})
    assert found.rank == 0 and "which the others have left: the programs of the ranks differ" in found.lines[0]


def test_ranks_that_wait_for_each_other():
    found = diagnose({0: state(0, ("receive", "the gradient", [1])), 1: state(1, ("receive", "the activation", [0]))})
    assert found.rank is None
    assert found.lines[0] == ("rank 0 (pp 0, dp 0) is in receive (the gradient), rank 1 (pp 0, dp 1) is in receive "
                              "(the activation): they wait for each other")


def test_all_in_the_same_collective():
    found = diagnose({rank: state(rank, ("clip", "the norm", [0, 1], 7)) for rank in (0, 1)})
    assert found.rank is None and "ranks 0-1 are in clip number 7" in found.lines[0] and "network" in found.lines[0]


def test_a_save_waits_in_a_lane():
    def saving(rank):
        recorder = make_recorder(rank)
        recorder.begin("save", "the checkpoint of step 7")
        recorder.lane("checkpoint").begin("save", "the checkpoint of step 7", range(3))
        return recorder.state()

    writes = make_recorder(2)
    writes.begin("save", "the checkpoint of step 7")
    writes.lane("checkpoint").begin("write", "rank-00002.safetensors of step 7")
    found = diagnose({0: saving(0), 1: saving(1), 2: writes.state()})
    assert found.rank == 2 and "rank 2 (pp 1, dp 0): it has been in save" in found.lines[0]


def test_nobody_waits():
    assert diagnose({0: state(0, ("F", "F(stage 0, micro-batch 0)"))}).lines[0] == "no rank waits for another"
    assert diagnose({}).rank is None


def test_the_flight_recorder_names_what_does_not_match():
    def entry(number, name, p2p=False):
        return {"group": "0 default_pg", "number": number, "name": name, "sizes": "[[3]]", "state": "scheduled",
                "p2p": p2p}

    common = [entry(1, "nccl:all_reduce"), entry(1, "nccl:send 0->1", p2p=True)]
    found = diagnose({
        0: state(0, ("device", "")) | {"flight": [*common, entry(2, "nccl:all_gather")]},
        1: state(1, ("device", "")) | {"flight": [*common[:1], entry(2, "nccl:all_reduce")]},
    })
    assert found.lines[-1] == ("  torch's flight recorder, collective 2 of group 0 default_pg: rank 0 nccl:all_gather, "
                               "rank 1 nccl:all_reduce of [[3]]: they do not match")


def test_the_report_joins_what_is_in_the_folder(tmp_path, capsys):
    from dualpipe.cli import main

    folder = tmp_path / why.FOLDER
    folder.mkdir()
    assert main(["why", str(tmp_path)]) == 2 and "has no states of ranks" in capsys.readouterr().err
    waiting = state(0, ("receive", "the activation", [1]), world_size=2, stacks={"MainThread": ["a.py:3 in f"]})
    why.state_file(folder, 0).write_text(json.dumps(waiting))
    why.stack_file(folder, 1).write_text('Thread 0x1 (most recent call first):\n  File "b.py", line 1 in g\n\nCurrent '
                                         'thread 0x2 (most recent call first):\n  File "c.py", line 5 in spin\n')
    assert main(["why", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("everything waits for rank 1 (pp 0, dp 1): it holds Python's lock, so that no more is known:"
                          '  File "c.py", line 5 in spin\n')
    assert "rank 0 (pp 0, dp 0), process" in out and "    a.py:3 in f" in out
    assert main(["why", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 1


def test_a_state_from_before_a_rank_held_the_lock_is_not_looked_at(tmp_path):
    """The state is older than the stack: writing a state empties the file of stacks."""
    older = state(1, ("send", "the activation", [0]), world_size=2, stacks={})
    why.state_file(tmp_path, 1).write_text(json.dumps(older))
    waiting = state(0, ("receive", "the activation", [1]), world_size=2, stacks={})
    why.state_file(tmp_path, 0).write_text(json.dumps(waiting))
    assert "holds Python's lock" not in why.report(tmp_path)[0]
    stack = 'Current thread 0x2 (most recent call first):\n  File "c.py", line 5 in spin\n'
    why.stack_file(tmp_path, 1).write_text(stack)
    assert why.report(tmp_path)[0].startswith("everything waits for rank 1 (pp 0, dp 1): it holds Python's lock")


def test_names_of_several_ranks():
    assert rank_ranges([5, 0, 1, 2]) == "ranks 0-2, 5" and rank_ranges([3]) == "rank 3"
