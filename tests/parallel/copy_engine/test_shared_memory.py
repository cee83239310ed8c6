"""Memory that ranks on one host share: what is refused, and what is left behind. Exchanges: test_exchange.py."""

import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dualpipe.parallel.copy_engine import shared_memory
from dualpipe.parallel.copy_engine.shared_memory import SharedMemory
from ranks import run_ranks


def refused(rank, what):
    """The error of a rank where rank 1 cannot have the memory that it asks for, or not that of rank 0."""
    real_open = os.open

    def open_no_other(path, flags, *mode):
        if not flags & os.O_CREAT:
            raise FileNotFoundError("no such file")
        return real_open(path, flags, *mode)

    planted = {
        "no room": mock.patch.object(os, "posix_fallocate", side_effect=OSError("no space left")),
        "another host": mock.patch.object(os, "open", open_no_other),
    }
    before = files()
    try:
        if rank == 1:
            with planted[what]:
                SharedMemory(dist.group.WORLD, 4096)
        else:
            SharedMemory(dist.group.WORLD, 4096)
    except ValueError as error:
        dist.barrier()
        return str(error), files() - before


def files():
    """Files of this process."""
    return {path.name for path in Path(shared_memory._FOLDER).glob(f"dualpipe-{os.getpid()}-*")}


@pytest.mark.parametrize("what, text", [
    ("no room", "no room for 4224 bytes of shared memory in /dev/shm: no space left; enlarge it"),
    ("another host", "the memory of rank 0 cannot be mapped: no such file; start all ranks of the group on one host"),
])
def test_all_ranks_raise_and_leave_no_file(what, text):
    for error, left in run_ranks(refused, 2, what):
        assert text in error and not left


def killed_while_alone(rank):
    """Files of rank 0, which is killed while it waits for rank 1 to come."""
    if rank == 0:
        dist.send(torch.tensor(os.getpid()), 1)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        SharedMemory(dist.group.WORLD, 4096)
    pid = torch.tensor(0)
    dist.recv(pid, 0)
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.05)
    return [path.name for path in Path(shared_memory._FOLDER).glob(f"dualpipe-{pid}-*")]


def test_a_rank_that_is_killed_before_the_others_come_leaves_no_file():
    assert run_ranks(killed_while_alone, 2, check=False, fresh=True)[1] == []


def allocated(rank):
    before = files()
    memory = SharedMemory(dist.group.WORLD, 4096)
    dist.barrier()
    return files() - before, memory.slot_bytes


def test_the_files_of_a_group_are_gone_once_they_are_mapped():
    assert run_ranks(allocated, 2) == [(set(), 2048)] * 2
