"""The cause of a failure, from what the launcher knows of its ranks. test_local.py has the failures of real ranks."""

import pytest

from dualpipe.runtime.recorder import BEGAN, Recorder
from dualpipe.train.launch.cause import Evidence, find_cause

SIZES = {"dp": 2}


def lost_the_other():
    """Return the state of rank 0, which has given up on rank 1 after 2 s."""
    recorder = Recorder(0, SIZES)
    with pytest.raises(RuntimeError), recorder.wait("reduce", "the gradients of stage 0", (1,)):
        recorder._open[-1][BEGAN] -= 2_000_000_000
        raise RuntimeError("[../gloo/pair.cc:1] Connection closed")
    return recorder.state()


def computes():
    """Return the state of rank 1, which has been in a weight gradient for 3 s."""
    recorder = Recorder(1, SIZES)
    recorder.begin("W", "W(stage 0, micro-batch 3)")[BEGAN] -= 3_000_000_000
    return recorder.state()


@pytest.mark.parametrize(("has_given_up", "first_line"), [
    (True, "error: everything waits for rank 1 (dp 1): it has been in W(stage 0, micro-batch 3)"),
    (False, "error: rank 0 (dp 0) is in disk sleep"),
])
def test_disk_sleep_is_a_cause_unless_the_rank_had_given_up_on_another(tmp_path, has_given_up, first_line):
    states = {0: lost_the_other() if has_given_up else Recorder(0, SIZES).state(), 1: computes()}
    evidence = Evidence(
        sizes=SIZES, statuses=[None, None], letters={0: "D", 1: "S"}, reports={}, states=states, folder=tmp_path,
        out_of_memory=False,
    )
    assert find_cause(evidence).lines[0].startswith(first_line)
