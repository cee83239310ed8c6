"""Run each setting of a benchmark on all ranks of a job, in its own processes.

A setting that runs out of memory, hangs in a collective or is killed does not affect the others.

    start    one process per rank under torchrun or SLURM, else one for all ranks; they share only the job's store
      -> run(setting): each starts its ranks (fork server), which join each other under the setting's own prefix
      -> a rank that fails sets a key in the store: the others get `GRACE` seconds to report their own errors, and are
         then killed
      -> every process reads the results of all ranks, and continues with the next setting
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from dualpipe.runtime.errors import die_with
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.launch.environment import rank_from_environment, slurm_rendezvous
from dualpipe.train.launch.join import connect

GRACE = 10.0
_GROUP_TIMEOUT = timedelta(minutes=30)
_PRELOADED = [
    "torch", "dualpipe.train.step", "torch.distributed.pipelining.schedules", "torch.distributed.tensor",
]

Found = dict[str, Any]
Measure = Callable[[Any, RankInfo, str], Found]  # (setting, rank, prefix of the ranks' keys in the store) -> result


class RankProcesses:
    """The processes of all ranks of a benchmark.

    first: True in the process of rank 0; size: the number of ranks.
    """

    def __init__(self, measure: Measure, *, alone: int, seconds: float) -> None:
        """Connect to the job's store.

        measure: joins the other ranks by `dualpipe.train.launch.join.join` or `join_gloo`, with the prefix that
        it receives, and returns its result as JSON. alone: number of ranks to start without torchrun and SLURM.
        seconds: timeout of a setting.
        """
        self._measure, self._seconds, self._number = measure, seconds, 0
        info = rank_from_environment(os.environ)
        if info is None:
            self._infos = [RankInfo(rank, alone, rank, alone) for rank in range(alone)]
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{probe.getsockname()[1]}"}
        else:
            self._infos = [info]
            if "RANK" not in os.environ:
                os.environ |= slurm_rendezvous(os.environ)
        self.size, self.first = self._infos[0].world_size, self._infos[0].rank == 0
        self._store = connect(self._infos[0], timedelta(seconds=seconds))
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def run(self, setting: Any) -> list[Found]:
        """Return the result of each rank; {"error": reason} if it failed, {} if killed after another's failure."""
        self._number += 1
        prefix = f"setting {self._number}"
        failed, running = f"{prefix} failed", {}

        def tell(info: RankInfo, found: Found) -> None:
            self._store.set(f"{prefix} found {info.rank}", json.dumps(found))
            if "error" in found:
                self._store.set(failed, "yes")

        for info in self._infos:
            ours, theirs = self._context.Pipe(duplex=False)
            # Passed, not inherited: the fork server has the environment of its own start.
            meeting = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
            child = self._context.Process(
                target=_run_rank, args=(theirs, self._measure, setting, info, prefix, meeting))
            child.start()
            theirs.close()  # so that the pipe ends with the process
            running[ours] = info, child
        deadline, told = time.monotonic() + self._seconds, False
        while running:
            for pipe in wait(list(running), timeout=0.2):
                info, child = running.pop(pipe)
                try:
                    found = pipe.recv()
                except EOFError:
                    found = None
                child.join()
                tell(info, found or {"error": f"rank {info.rank} ended with exit status {child.exitcode}"})
            if not told and self._store.check([failed]):
                deadline, told = min(deadline, time.monotonic() + GRACE), True
            if time.monotonic() > deadline:
                for info, child in running.values():
                    child.kill()
                    child.join()
                    tell(info, {} if told else {"error": f"no end after {self._seconds:g} s"})
                running = {}
        keys = [f"{prefix} found {rank}" for rank in range(self.size)]
        self._store.wait(keys, timedelta(seconds=self._seconds + 6 * GRACE))
        return [json.loads(self._store.get(key)) for key in keys]

    def from_first(self, value: int) -> int:
        """Broadcast rank 0's value to all ranks, which wait for it."""
        own = self._infos[0].rank
        if self.first:
            self._store.set("value", f"{value}")
        found = int(self._store.get("value"))
        self._store.set(f"read {own}", "")
        if self.first and self.size > len(self._infos):  # the store may be in this process
            self._store.wait([f"read {rank}" for rank in range(self.size)], timedelta(seconds=GRACE))
        return found


def join_gloo(info: RankInfo, prefix: str) -> None:
    """Create the default process group of CPU ranks, without a mesh."""
    store = connect(info, _GROUP_TIMEOUT, prefix=prefix)
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size, timeout=_GROUP_TIMEOUT)


def results_of(found: list[Found]) -> list[Found]:
    """Return the results unchanged; if a rank failed, print its error and end the program with status 1."""
    errors = [f"rank {rank}: {result['error']}" for rank, result in enumerate(found) if "error" in result]
    if errors:
        sys.exit("FAILED: " + "; ".join(errors))
    return found


def _run_rank(
    pipe: Connection, measure: Measure, setting: Any, info: RankInfo, prefix: str, meeting: Mapping[str, str]
) -> None:
    die_with(os.getppid())
    os.environ |= meeting
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    try:
        found = measure(setting, info, prefix)
    except ValueError as error:
        found = {"error": str(error)}
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    pipe.send(found)
    os._exit(0)  # skip the destructors of process groups, which wait for ranks that are gone
