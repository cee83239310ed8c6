"""Processes that anneal, one for each chain. They end with the process that started them, or when it is interrupted."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable

from dualpipe.runtime.errors import die_with
from dualpipe.schedule.search.anneal import anneal
from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import Schedule

WORKER_PROGRAM = "from dualpipe.schedule.search.workers import work; work()"

AnnealJob = tuple[Schedule, Costs, float, int, float, float, int]  # arguments of `anneal`
AnnealResult = tuple[float, Schedule]  # result of `anneal`


def anneal_in_processes(jobs: Iterable[AnnealJob]) -> list[AnnealResult]:
    """Run `anneal` for each job in a process of its own, and return the results in the order of the jobs."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(map(start_worker, jobs))  # one by one, so that an interrupt ends all that have started
        return [_result_of(process) for process in processes]
    finally:
        for process in processes:
            with process:  # waits for it
                process.kill()


def start_worker(job: AnnealJob) -> subprocess.Popen[bytes]:
    """Start a process that anneals.

    It imports neither the caller's main module nor torch. It is in a process group of its own, which Ctrl-C does not
    reach.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER_PROGRAM, str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0,
    )
    assert process.stdin is not None, "stdin is a pipe"
    with process.stdin as pipe:
        pickle.dump(job, pipe)
    return process


def _result_of(process: subprocess.Popen[bytes]) -> AnnealResult:
    """Wait for a process, and return its result."""
    assert process.stdout is not None, "stdout is a pipe"
    output = process.stdout.read()
    status = process.wait()
    if status != 0:
        raise RuntimeError(f"a process of the schedule search ended with status {status}; see its error above")
    return pickle.loads(output)


def work() -> None:
    """Anneal the job on stdin, and write the result to stdout. Main function of a worker process."""
    parent = int(sys.argv[1])
    die_with(parent)
    result = anneal(*pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(pickle.dumps(result))
