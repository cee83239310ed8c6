"""CSV both ways, and what torch's own reader makes of it."""

from dataclasses import replace

import pytest

from dualpipe.schedule import Action, Schedule, ScheduleError, build, validate
from schedules import SCHEDULES


def test_the_format():
    assert build("dualpipev", 2, 4).to_torch_csv() == (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,"
        "0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,"
        "2I3,1I3,2W3,1W3\n"
    )


def build_for_torch(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Build a schedule, and take apart the pairs that torch's CSV cannot express: all but F&B."""
    schedule = build(name, num_ranks, num_microbatches)
    ranks = [
        [part for step in steps
         for part in ([step] if {action.kind for action in step} == {"F", "B"} else [(action,) for action in step])]
        for steps in schedule.ranks
    ]
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip(name):
    for num_ranks, num_microbatches in ((1, 1), (1, 3), (2, 3), (4, 10), (5, 7)):
        schedule = build_for_torch(name, num_ranks, num_microbatches)
        text = schedule.to_torch_csv()
        assert Schedule.from_torch_csv(text, name, messages_in_flight=schedule.messages_in_flight) == schedule


def test_pairs_that_torch_cannot_express_are_written_one_after_the_other():
    f, b, i, w = (Action(kind, 0, 0) for kind in "FBIW")
    other = Action("F", 0, 1)
    pairs = ((f, other), (other, i), (w, other), (b, other))
    assert Schedule("s", 1, 1, 2, (pairs,)).to_torch_csv() == "0F0,0F1,0F1,0I0,0W0,0F1,(0F1;0B0)OVERLAP_F_B\n"


def test_empty_cells_blank_ends_and_spaces():
    text = ",0F0, 0F1 ,,(0F2; 0B0)OVERLAP_F_B\r\n\r\n"
    f0, f1, f2, b0 = Action("F", 0, 0), Action("F", 0, 1), Action("F", 0, 2), Action("B", 0, 0)
    assert Schedule.from_torch_csv(text) == Schedule("csv", 1, 1, 3, (((f0,), (f1,), (f2, b0)),))


@pytest.mark.parametrize("text, message", [
    ("0F0,0B0\n1F0,1X0", "row 1, cell 1: '1X0'"), ("0F", "row 0, cell 0: '0F'"), ("0F0 0F1", "'0F0 0F1'"),
    ("-1F0", "'-1F0'"), ("0SEND_F0", "'0SEND_F0'"), ("0F0,(0F1;0B0)OVERLAP", "row 0, cell 1"),
    ("(0F1;0B)OVERLAP_F_B", "'0B'"), ("(0F1;0B1;0F2)OVERLAP_F_B", "not an action"), ("²F0", "'²F0'"),
    ("0F12345678901234567890", "not an action"), ("999999999F0", "stage 999999999"), ("", "no actions"),
    (",,\n,", "no actions"),
])
def test_malformed_text_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_torch_csv(text)


def test_a_schedule_from_csv_can_be_validated():
    validate(Schedule.from_torch_csv("0F0,0B0\n1F0,1B0\n"))
    with pytest.raises(ScheduleError, match="0F1 is missing"):
        validate(Schedule.from_torch_csv("0F0,0B0\n1F0,1B0,1F1,1B1\n"))


def torch_runtime(schedule: Schedule):
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime = object.__new__(_PipelineScheduleRuntime)  # its constructor wants stages and process groups
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime.pp_group_size, runtime._num_stages = schedule.num_ranks, schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    # What torch 2.15 asks for besides, with its constructor's defaults.
    runtime._max_active_stages, runtime._unshard_lookahead = 3, "full"
    runtime._defer_reduce_grad_wait, runtime._max_outstanding_sends = False, None
    return runtime


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_validates_and_lowers_it(name, tmp_path):
    for num_ranks, num_microbatches in ((1, 2), (2, 3), (2, 4), (4, 5), (4, 10)):
        schedule = build_for_torch(name, num_ranks, num_microbatches)
        file = tmp_path / "schedule.csv"
        file.write_text(schedule.to_torch_csv())
        runtime = torch_runtime(schedule)
        runtime._load_csv(str(file), format="compute_only")
        theirs = [
            [tuple(map(str, action.sub_actions or (action,))) for action in runtime.pipeline_order[rank]]
            for rank in range(num_ranks)
        ]
        assert theirs == [[tuple(map(str, step)) for step in steps] for steps in schedule.ranks]
        assert tuple(runtime.stage_index_to_group_rank[s] for s in range(schedule.num_stages)) == schedule.placement
        runtime._dump_csv(str(file), format="compute_only")
        text = file.read_text()
        assert Schedule.from_torch_csv(text, name, messages_in_flight=schedule.messages_in_flight) == schedule
