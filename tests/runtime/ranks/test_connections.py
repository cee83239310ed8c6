"""Sockets and store operations of ranks: they grow with the logarithm of the number of ranks, and steps add none."""

import os
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dualpipe import Pipeline
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard
from dualpipe.runtime.errors import PipelineError, RankLost
from dualpipe.runtime.nccl import LINK, SHARDS, TOTALS
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.ranks import process_groups
from dualpipe.runtime.ranks.process_groups import connect_all, connecting_lazily, create_groups
from dualpipe.train.config.schema import ParallelConfig
from dualpipe.train.launch import join
from ports import free_ports
from ranks import run_ranks

WAIT = 60.0  # seconds
SHORT_WAIT = 3.0
CULPRIT = 5
GROWING_GROUPS = 3  # of all ranks, along "dp", and of those with the same stages; pipelines have two ranks


class CountingStore(dist.Store):
    """A store that counts the operations of this rank."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.operations = 0

    def _count(name):
        def operation(self, *args):
            self.operations += 1
            return getattr(self.store, name)(*args)

        return operation

    add, append, check, compare_set, delete_key = map(_count, ("add", "append", "check", "compare_set", "delete_key"))
    get, multi_get, multi_set, set, wait = map(_count, ("get", "multi_get", "multi_set", "set", "wait"))

    def has_extended_api(self):
        return self.store.has_extended_api()

    def clone(self):
        return self.store.clone()


def num_sockets():
    """Return the number of sockets of this process."""
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith("socket:") for name in names if os.path.lexists(name))


class Opened(NamedTuple):
    """Sockets that a rank has opened and operations of the store that it has made, until its first step has ended."""

    sockets: int
    operations: int


MOST_OPENED = {2: Opened(8, 13), 4: Opened(14, 25), 8: Opened(18, 33), 32: Opened(30, 57)}  # by ranks; not on rank 0


@contextmanager
def joined(rank, size, port):
    """Join `size / 2` pipelines of two ranks, like a rank of `dualpipe train`; yield the job, its store, a pipeline."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    info = RankInfo(rank, size, rank, size)
    layout = ParallelConfig(pp=2, dp=size // 2, device="cpu", timeout=WAIT)
    store = CountingStore(join.connect(info, timedelta(seconds=WAIT)))
    join.confine(info, "")
    with join.process_groups(layout, info, store, torch.device("cpu")) as job:
        stages = [defer_weight_grads(nn.Linear(2, 2)) for _ in range(2)]
        for stage in stages:
            plan = resolve_dtypes(stage, DTypePolicy(torch.float32, torch.float32, torch.float32))
            if layout.dp > 1:
                shard(stage, job.place.dense, plan)
        yield job, store, Pipeline(stages, process_group=job.place.group("pp"), schedule="dualpipev")


def step(pipeline, criterion=torch.sum):
    inputs = [torch.ones(4, 2)] if pipeline.rank == 0 else []
    pipeline.step(*inputs, num_chunks=4, criterion=criterion)


def train(rank, size, port):
    """Run steps and all kinds of agreements; return what the rank has opened until its first step."""
    inherited = num_sockets()
    with joined(rank, size, port) as (job, store, pipeline):
        opened = Opened(num_sockets() - inherited, store.operations)
        step(pipeline)
        step(pipeline)
        assert job.ranks.collect(rank) == (list(range(size)) if rank == 0 else None)
        assert job.ranks.scatter(list(range(size)) if rank == 0 else None) == rank
        assert job.ranks.gather(lambda: rank) == list(range(size))
        assert job.ranks.first(lambda: rank) == 0
        assert Opened(num_sockets() - inherited, store.operations) == opened
        dist.barrier()
    return tuple(opened)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 8), (2, 8, 32)])
def test_each_doubling_of_the_ranks_adds_two_connections_to_a_group(sizes):
    opened = {}
    for size in sizes:
        counts = run_ranks(train, size, size, free_ports(1)[0], default_group=False)
        opened[size] = [Opened(*count) for count in counts]
    for fewer, more in pairwise(sizes):
        doublings = more.bit_length() - fewer.bit_length()
        most = 2 * doublings * GROWING_GROUPS
        for before, after in zip(opened[fewer][1:], opened[more][1:]):
            assert after.sockets - before.sockets <= most, opened
            assert after.operations - before.operations <= 2 * most, opened  # gloo waits for an address, and gets it
    for size, (first, *others) in opened.items():  # rank 0 serves the store
        assert max(other.sockets for other in others) <= MOST_OPENED[size].sockets, opened
        assert max(other.operations for other in others) <= MOST_OPENED[size].operations, opened
        assert first.sockets <= max(other.sockets for other in others) + size + 2, opened
        assert first.operations <= max(other.operations for other in others), opened


def fail(rank, size, port, moment):
    """Fail on the culprit before its first messages in a step or an agreement; return the seconds until an error."""
    with joined(rank, size, port) as (job, store, pipeline):
        store.set(f"ready {rank}", "")
        if rank == CULPRIT:
            store.wait([f"ready {other}" for other in range(size)], timedelta(seconds=WAIT))
            if moment != "raise":
                os._exit(3)
        began = time.monotonic()
        try:
            if moment == "collect":
                job.ranks.collect(rank)
            elif rank == CULPRIT:
                pipeline.module[0].forward = None
                step(pipeline)
            else:
                step(pipeline)
        except (PipelineError, RankLost) as error:
            seconds = time.monotonic() - began
            if moment != "collect":  # nobody else leaves: the waits end before the processes, and the store, do
                store.set(f"raised {rank}", "")
                others = [other for other in range(size) if other != CULPRIT or moment == "raise"]
                with suppress(dist.DistError):  # rank 0, which has the store, is the first to know
                    store.wait([f"raised {other}" for other in others], timedelta(seconds=WAIT))
            return seconds, str(error)
    return time.monotonic() - began, ""


@pytest.mark.parametrize("moment", ["leave", "raise", "collect"])
def test_a_rank_that_fails_before_its_first_messages_ends_all(moment):
    results = run_ranks(fail, 8, 8, free_ports(1)[0], moment, default_group=False, check=False)
    if moment != "raise":
        assert isinstance(results.pop(CULPRIT), ChildProcessError)
    assert all(seconds < WAIT / 2 for seconds, _ in results), results
    errors = [text for _, text in results if text]
    if moment == "collect":  # ranks that have sent their value upwards wait for nobody
        assert any(f"from rank {CULPRIT} (pp 1, dp 1), which has left" in text for text in errors), results
    else:
        assert len(errors) == len(results), results
        says = "TypeError" if moment == "raise" else "which has left"
        assert any(f"rank {CULPRIT} (pp 1, dp 1)" in text and says in text for text in errors), results


def leave(rank, size, moment):
    """Leave on the culprit while ranks connect, or before an all-to-all; return the seconds until an error."""
    timeout = timedelta(seconds=SHORT_WAIT)
    if rank == CULPRIT and moment == "connecting":
        process_groups.connect_neighbours = lambda group: os._exit(3)
    began = time.monotonic()
    with suppress(RuntimeError):
        [group] = create_groups([(range(size), SHARDS)], parent=dist.group.WORLD, timeout=timeout, backend="gloo")
        connect_all(group, torch.device("cpu"))
        dist.barrier()
        if rank == CULPRIT:
            os._exit(3)
        began = time.monotonic()
        rows = torch.zeros(size)
        dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
        return None
    return time.monotonic() - began


@pytest.mark.parametrize("moment", [pytest.param("connecting", marks=pytest.mark.slow), "all-to-all"])
def test_gloo_does_not_wait_several_timeouts_for_a_rank_that_has_left(moment):
    """By itself it waits five times as long for a rank to which it is still connecting."""
    results = run_ranks(leave, 8, 8, moment, fresh=True, check=False)
    assert isinstance(results.pop(CULPRIT), ChildProcessError)
    assert all(seconds is not None and seconds < 3 * SHORT_WAIT for seconds in results), results


def test_a_value_of_the_user_stays(monkeypatch):
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    with connecting_lazily():
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    with connecting_lazily():
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"


@pytest.mark.parametrize("transport", ["TCP_TLS", "UV"])
def test_gloo_connects_all_ranks_where_its_transport_can_do_nothing_else(monkeypatch, transport):
    """torch refuses to make such a group."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", transport)
    with connecting_lazily():
        assert "TORCH_GLOO_LAZY_INIT" not in os.environ


def policies(rank):
    """Return the scheduling policies of this process's threads by name, once it has a pipeline of two ranks."""
    Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], schedule="dualpipev")
    by_name = {}
    for thread in Path("/proc/self/task").iterdir():
        by_name.setdefault((thread / "comm").read_text().strip(), set()).add(os.sched_getscheduler(int(thread.name)))
    return by_name, os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")
def test_threads_of_gloo_do_not_interrupt_computing_ones():
    for by_name, own in run_ranks(policies, 2):
        assert by_name["gloo_tcp_loop"] == {os.SCHED_BATCH} and own == os.SCHED_OTHER


def made_again(rank):
    """Make groups of both ranks and destroy them, again and again; return the sums over them."""
    sums = []
    for _ in range(4):
        requests = [([0, 1], traffic) for traffic in (TOTALS, LINK)]
        groups = create_groups(requests, parent=dist.group.WORLD, timeout=timedelta(seconds=WAIT), backend="gloo")
        for group in groups:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            sums.append(int(total))
            dist.destroy_process_group(group)
    return sums


def test_groups_can_be_made_after_others_have_been_destroyed():
    """torch gives them the same names, under which the store has the addresses of the destroyed ones."""
    assert run_ranks(made_again, 2, fresh=True) == [[2] * 8] * 2
