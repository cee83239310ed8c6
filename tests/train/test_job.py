"""A rank of a job gives up waiting after the configured time, in every group of its mesh."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dualpipe.train.config import load_config
from dualpipe.train.job import join
from dualpipe.train.launch import RankInfo
from ranks import run_ranks


def _wait_for_nobody(rank, config, dimension, port):
    dist.destroy_process_group()
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with join(config, RankInfo(rank, 4, rank, 4)) as job:
        if rank in (0, 3):  # each alone in its row and its column
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=job.place.group(dimension))
            waited = time.monotonic() - start
            return waited
        time.sleep(6)
        os._exit(0)


@pytest.mark.parametrize("dimension", ["pp", pytest.param("dp", marks=pytest.mark.slow)])
def test_the_timeout_holds_in_the_groups_of_the_mesh(run_toml, dimension, free_port):
    config = load_config(run_toml)
    config = replace(config, parallel=replace(config.parallel, dp=2, timeout=3))
    results = run_ranks(_wait_for_nobody, 4, config, dimension, free_port, check=False, timeout=40)
    assert 2 < results[0] < 10 and 2 < results[3] < 10, results
