"""What fails on one rank is heard by all."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dualpipe.ranks import RankSync
from dualpipe.schedule import ScheduleError
from ranks import run_ranks


def caught(call, argument):
    try:
        return call(argument)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def fails_on(rank, *errors):
    """What gives the rank's number, or raises its error."""

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


def test_errors_of_what_all_ranks_do_and_of_what_the_first_does():
    first, second = run_ranks(errors_of_work, 2, reuse=True)
    assert first == second == [
        [0, 1], 0,
        ("ValueError", "rank 1: refused"), 0,
        ("ValueError", "rank 0, 1: refused"), ("ValueError", "refused"),
        ("RuntimeError", "rank 0: KeyError: 'broken'; rank 1: refused"), ("RuntimeError", "rank 0: KeyError: 'broken'"),
        ("RuntimeError", "rank 0: KeyError: 'broken'"), ("RuntimeError", "rank 0: KeyError: 'broken'"),
    ]


def long_record(rank):
    ranks = RankSync(dist.group.WORLD)

    def tell(value):
        with ranks.together(ValueError) as told:
            told.value = value
        return told.conclusion

    return caught(tell, "x" * 9000 if rank == 1 else ""), tell(rank)


def test_a_record_that_is_too_long_is_an_error_on_every_rank():
    for (kind, text), afterwards in run_ranks(long_record, 2, group_timeout=10):
        assert kind == "ValueError"
        assert text.startswith("rank 1: a record of 9010 bytes exceeds the 8192 that travel")
        assert afterwards == [0, 1]


@pytest.mark.parametrize("error", [ScheduleError("refused"), ValueError("refused")])
def test_a_value_error_speaks_for_itself(error):
    with pytest.raises(ValueError, match=r"^rank 0: refused$"), RankSync(None).together(ValueError):
        raise error
