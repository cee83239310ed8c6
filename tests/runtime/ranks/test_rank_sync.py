"""RankSync: failures on one rank raise on all ranks."""

import re
import time

import pytest
import torch.distributed as dist

from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.failure import hang_up
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import ScheduleError
from ranks import run_ranks


def caught(call, argument):
    try:
        return call(argument)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def fails_on(rank, *errors):
    """Return work that returns the rank's number, or raises its error."""

    def work():
        if errors[rank] is not None:
            raise errors[rank]
        return rank

    return work


def errors_of_work(rank):
    ranks = RankSync(dist.group.WORLD)
    refused, broken = ScheduleError("refused"), KeyError("broken")
    cases = ((None, None), (None, refused), (refused, refused), (broken, refused), (broken, None))
    return [caught(call, fails_on(rank, *errors)) for errors in cases for call in (ranks.gather, ranks.first)]


def test_errors_of_the_work_of_all_ranks_and_of_the_first():
    first, second = run_ranks(errors_of_work, 2)
    assert first == second == [
        [0, 1], 0,
        ("ValueError", "rank 1: refused"), 0,
        ("ValueError", "ranks 0-1: refused"), ("ValueError", "refused"),
        ("RuntimeError", "rank 0: KeyError: 'broken'; rank 1: refused"), ("RuntimeError", "rank 0: KeyError: 'broken'"),
        ("RuntimeError", "rank 0: KeyError: 'broken'"), ("RuntimeError", "rank 0: KeyError: 'broken'"),
    ]


def long_record(rank):
    ranks = RankSync(dist.group.WORLD)
    return caught(ranks.exchange, "x" * 9000 if rank == 1 else ""), ranks.exchange(rank)


def test_a_record_that_is_too_long_is_an_error_on_every_rank():
    for (kind, text), afterwards in run_ranks(long_record, 2, group_timeout=10, fresh=True):
        assert kind == "ValueError"
        assert text.startswith("rank 1: a record of 90") and "bytes exceeds the limit of 8192" in text
        assert afterwards == [0, 1]


@pytest.mark.parametrize("error", [ScheduleError("refused"), ValueError("refused")])
def test_a_value_error_has_no_type_in_its_text(error):
    with pytest.raises(ValueError, match=r"^rank 0: refused$"):
        RankSync(None).exchange(error)


def equal_errors(rank):
    ranks = RankSync(dist.group.WORLD)

    same, another = ValueError("the same"), ValueError("another")
    return caught(ranks.exchange, same), caught(ranks.exchange, another if rank == 1 else same)


def test_equal_errors_are_joined():
    for said in run_ranks(equal_errors, 3):
        assert said == (("ValueError", "ranks 0-2: the same"), ("ValueError", "ranks 0, 2: the same; rank 1: another"))


def one_has_left(rank):
    """Return the error of the ranks that wait for one that has left, after a wait for a late one."""
    ranks = RankSync(dist.new_group())
    if rank == 2:
        hang_up(ranks.groups)
        return None
    if rank == 0:
        time.sleep(0.5)
    with pytest.raises(RankLost) as error:
        ranks.exchange(None)
    assert error.value.ranks == [2]
    return str(error.value)


def test_a_rank_that_has_left_is_named_and_a_wait_counts_from_its_beginning():
    first, second, _ = run_ranks(one_has_left, 3, group_timeout=40, fresh=True)
    left = (r"rank 2: cannot be reached: waited ([\d.]+ s|(\d+|less than 1) ms) for an agreement message from rank 2, "
            r"which has left \(")
    assert re.search(left, first) and re.search(left, second)
    seconds = re.search(r"waited ([\d.]+) s for an agreement message from rank 2", second)
    assert float(seconds[1]) > 0.3, "rank 1 waited for rank 0 first, which was late"
