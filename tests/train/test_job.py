"""A rank of a job gives up waiting after the configured time, in every group of its mesh."""

import time

import pytest
import torch
import torch.distributed as dist

from dualpipe.train.job import join
from dualpipe.train.launch import RankInfo
from ranks import run_ranks


def _wait_for_nobody(rank, dimension, port):
    dist.destroy_process_group()
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with join(RankInfo(rank, 4, rank, 4), device="cpu", timeout=3, pp=2, dp=2) as job:
        if rank in (0, 3):  # each alone in its row and its column
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=job.group_along(dimension))
            waited = time.monotonic() - start
            return waited
        time.sleep(6)
        os._exit(0)


@pytest.mark.parametrize("dimension", ["pp", pytest.param("dp", marks=pytest.mark.slow)])
def test_the_timeout_holds_in_the_groups_of_the_mesh(dimension, free_port):
    results = run_ranks(_wait_for_nobody, 4, dimension, free_port, check=False, timeout=40)
    assert 2 < results[0] < 10 and 2 < results[3] < 10, results
