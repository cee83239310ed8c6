"""`RankSync.compare`: few messages if nothing is new, an exchange of records otherwise, one conclusion for all."""

import math
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.ranks.records import RECORD_BYTES, HostMessages, Summary
from ranks import run_ranks


@dataclass(frozen=True)
class Numbers:
    size: int
    own: list[int]


def add_up(ranks: list[Numbers]) -> int:
    """Return the sum of the ranks' own numbers. Raises ValueError if their sizes differ."""
    if len({numbers.size for numbers in ranks}) > 1:
        raise ValueError(f"ranks disagree about the size: {[numbers.size for numbers in ranks]}")
    return sum(number for numbers in ranks for number in numbers.own)


# -- many ranks in one process, with counted messages


class Mailboxes:
    """Mailboxes of groups with any number of ranks in one process; a send never waits."""

    def __init__(self) -> None:
        self.boxes: defaultdict[tuple, SimpleQueue] = defaultdict(SimpleQueue)
        self.sent: Counter[tuple[str, int]] = Counter()  # messages by group and size


class MailGroup:
    """Stand-in for a process group, with the methods that `HostMessages` uses."""

    def __init__(self, mail: Mailboxes, name: str, rank: int, size: int) -> None:
        self._mail, self._name, self._rank, self._size = mail, name, rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._mail.sent[self._name, tensors[0].numel()] += 1
        self._mail.boxes[self._name, self._rank, peer, tag].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        box = self._mail.boxes[self._name, peer, self._rank, tag]
        return SimpleNamespace(wait=lambda: tensors[0].copy_(box.get(timeout=60)))


@pytest.mark.parametrize("size", [1, 2, 3, 16, 128])
def test_summaries_are_combined_in_few_messages(size):
    mail = Mailboxes()
    ranks = [HostMessages(MailGroup(mail, "all", rank, size)) for rank in range(size)]
    results = in_threads(size, lambda rank: ranks[rank].combine(
        Summary(has_error=rank == 1, lowest=rank, highest=rank, key=rank + 5, known=7 - (rank == size - 1))))
    assert set(results) == {Summary(size > 1, 0, size - 1, 5, 6)}
    assert sum(mail.sent.values()) == size * math.ceil(math.log2(size))


def agreeing(mail: Mailboxes, rank: int, size: int) -> RankSync:
    return RankSync(MailGroup(mail, "pipeline", rank, size))


def in_threads(size: int, work: Any) -> list[Any]:
    """Return what `work` returns for each rank, on a thread for each, as ranks wait for messages of others."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


def test_records_are_exchanged_once_for_each_new_set_of_them():
    size, mail = 4, Mailboxes()
    syncs = in_threads(size, lambda rank: agreeing(mail, rank, size))
    in_threads(size, lambda rank: syncs[rank].compare_replicas())
    for number, exchanges in [(1, 1), (1, 0), (2, 1), (1, 0), (2, 0)]:
        before = mail.sent["pipeline", RECORD_BYTES]
        outcomes = in_threads(size, lambda rank, number=number: syncs[rank].compare(
            Numbers, Numbers(0, [number] if rank == 0 else []), add_up))
        assert [outcome.conclusion for outcome in outcomes] == [number] * size, "rank 0 alone knows the number"
        assert mail.sent["pipeline", RECORD_BYTES] - before == exchanges * size * (size - 1)


def test_more_sets_of_records_than_the_cache_holds_are_compared_correctly():
    size, mail = 2, Mailboxes()
    syncs = in_threads(size, lambda rank: agreeing(mail, rank, size))
    in_threads(size, lambda rank: syncs[rank].compare_replicas())
    for number in (*range(300), 0, 299):
        outcomes = in_threads(size, lambda rank, number=number: syncs[rank].compare(
            Numbers, Numbers(0, [number]), add_up))
        assert [outcome.conclusion for outcome in outcomes] == [2 * number] * size


# -- real ranks


def compared(rank: int) -> list[tuple[Any, str | None]]:
    ranks = RankSync(dist.group.WORLD)
    ranks.compare_replicas()

    attempts = [
        Numbers(1, [rank]),
        Numbers(rank, []),
        KeyError("planted") if rank == 1 else Numbers(1, [rank]),
        Numbers(1, ["x" * 9000] if rank == 2 else [0]),
        Numbers(1, [{1, 2}] if rank == 2 else [0]),
        Numbers(1, [rank]),
    ]
    outcomes = [ranks.compare(Numbers, attempt, add_up) for attempt in attempts]
    return [(outcome.conclusion, outcome.problem) for outcome in outcomes]


def test_all_ranks_get_the_same_conclusion_or_problem():
    results = run_ranks(compared, 3)
    assert results[0] == results[1] == results[2]
    good, sizes, failed, long, unfit, again = results[0]
    assert good == again == (3, None)
    assert sizes == (None, "ranks disagree about the size: [0, 1, 2]")
    assert failed == (None, "rank 1: KeyError: 'planted'")
    assert long[0] is None and long[1].startswith("rank 2: a record of 90") and "exceeds the limit of 8192" in long[1]
    assert unfit == (None, "rank 2: TypeError: Object of type set is not JSON serializable")


def with_replicas(rank: int) -> list[str | None]:
    """Share the problems of two pipelines of two ranks, the second time with ranks that have no replicas."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    problems = []
    for shares in (lambda rank: True, lambda rank: rank % 2 == 0):
        own = [replicas[rank % 2]] if shares(rank) else []
        ranks = RankSync(pipelines[rank // 2], replicas=own)
        ranks.compare_replicas()
        for culprit, same in ((None, 1), (1, 1), (None, rank // 2)):
            record = ValueError("planted") if rank == culprit else Numbers(1, [])
            problems.append(ranks.compare(Numbers, record, add_up, same_everywhere=same).problem)
        problems.append(str(ranks.lowest(rank + 3)))
    return problems


def test_replicas_share_their_problems():
    for found in run_ranks(with_replicas, 4):
        assert found == [None, "rank 1: planted", "data-parallel ranks disagree: by rank [0, 1]", "3"] * 2


def flags_of_replicas(rank: int) -> list[list[bool]]:
    """Return the flags that all replicas have set: two pipelines of two ranks, where a rank and its replica are rank
    and rank + 2. A few flags, and more than there are bits."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ranks = RankSync(pipelines[rank // 2], replicas=[replicas[rank % 2]])
    ranks.compare_replicas()
    modulus = 2 if rank < 2 else 3
    offset = rank % 2  # other ranks of the pipeline have other flags, and another number of them
    return [ranks.wait_for_all([(index + offset) % modulus == 0 for index in range(count + offset)])
            for count in (0, 10, 900)]


def test_flags_that_all_replicas_have_set():
    for rank, found in enumerate(run_ranks(flags_of_replicas, 4)):
        offset = rank % 2
        assert found == [[(index + offset) % 6 == 0 for index in range(count + offset)] for count in (0, 10, 900)]


def one_leaves(rank: int) -> str:
    ranks = RankSync(dist.group.WORLD)
    ranks.compare_replicas()
    if rank == 1:
        return ""
    with pytest.raises(RankLost) as raised:
        ranks.wait_for_all()
    return str(raised.value)


def test_a_rank_that_has_left_is_named_by_the_rank_that_waits():
    first, _ = run_ranks(one_leaves, 2, fresh=True, group_timeout=20)
    assert "for an agreement message from rank 1, which has left" in first
