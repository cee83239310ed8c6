"""The rank of this process, from the variables of torchrun, SLURM or `dualpipe`, and its configuration.

Does not import torch: the process that starts ranks uses this file and stays small.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dualpipe.runtime.rank_process import CONFIG_FILE, RankInfo
from dualpipe.train.config.load import recorded_config
from dualpipe.train.config.schema import Config

# Other launchers: the variable of a process's rank, and that of the number of processes, which some do not set.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "PMI_RANK": "PMI_SIZE",  # MPICH, Intel MPI, Cray
    "PMIX_RANK": "PMIX_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",  # MVAPICH2
    "MVP_COMM_WORLD_RANK": "MVP_COMM_WORLD_SIZE",  # MVAPICH
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",  # jsrun
    "PALS_RANKID": "PALS_SIZE",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "HOROVOD_RANK": "HOROVOD_SIZE",
}


@contextmanager
def raising_on_all_ranks() -> Iterator[RankInfo | None]:
    """Load the configuration in a `with` block. A ValueError in it is raised on all ranks, not on this one alone.

    Yields the rank of this process, None if the ranks are not yet started. Sets MASTER_ADDR and MASTER_PORT under
    SLURM.

    Raises ValueError if the variables of the launcher are invalid; on all ranks, too, if their number is valid. It
    takes up to 30 s to tell the other ranks.
    """
    ranks = _global_rank(os.environ)
    if ranks is not None and "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    try:
        yield rank_from_environment(os.environ)
    except ValueError as error:
        if ranks is not None and ranks[1] > 1:
            from dualpipe.train.launch.join import PATIENCE, all_ranks_agree, connect  # loads torch

            info = RankInfo(*ranks, 0, 1)  # its place on its machine may be what is invalid
            with suppress(ValueError, TimeoutError), all_ranks_agree(connect(info, PATIENCE), info, PATIENCE):
                raise error
        raise


def launcher_config() -> Config | None:
    """Return the configuration of the process that has started this rank; None if `dualpipe` has not started it."""
    file = os.environ.get(CONFIG_FILE)
    return None if file is None else recorded_config(json.loads(Path(file).read_text(encoding="utf-8")))


def rank_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that torchrun or SLURM (`srun` with several tasks) gave to this process; None without either.

    A batch script run by SLURM is not a task of `srun`, although it has SLURM_PROCID = 0 and the SLURM_NTASKS of the
    job.

    Raises ValueError if variables of torchrun are missing, are no numbers, or contradict each other; if one node has
    more ranks than another, or the ranks of a node do not follow each other; or if another launcher has started several
    processes.
    """
    ranks = _global_rank(environment)
    if ranks is None:
        return None
    rank, world_size = ranks
    if "RANK" in environment:
        local_rank = _number(environment, "LOCAL_RANK", rank)
        local_world_size = _number(environment, "LOCAL_WORLD_SIZE", world_size)
        remedy = "set LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does"
    else:
        local_rank = _number(environment, "SLURM_LOCALID", 0)
        local_world_size = world_size // _num_nodes(environment)
        remedy = "give srun --distribution=block and --ntasks-per-node"
    if local_world_size == 0 or world_size % local_world_size or local_rank != rank % local_world_size:
        raise ValueError(f"got rank {rank} of {world_size} as rank {local_rank} of {local_world_size} on its machine; "
                         "expected as many on every machine, and the ranks of a machine one after the other, so that "
                         f"groups of ranks stay within machines: {remedy}")
    return RankInfo(rank, world_size, local_rank, local_world_size)


def _global_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank of this process among all ranks, and their number; None if they are not yet started."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        rank = _number(environment, "RANK")
        world_size = _number(environment, "WORLD_SIZE")
    else:
        _refuse_other_launchers(environment)
        if "SLURM_PROCID" not in environment or _number(environment, "SLURM_STEP_NUM_TASKS", 1) <= 1:
            return None
        rank = _number(environment, "SLURM_PROCID")
        world_size = _number(environment, "SLURM_STEP_NUM_TASKS")
        nodes = _num_nodes(environment)
        tasks_per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 8(x2), or 3,1
        if world_size % nodes or len({count.partition("(")[0] for count in tasks_per_node.split(",")}) > 1:
            raise ValueError(f"SLURM runs {world_size} tasks on {nodes} nodes, {tasks_per_node or 'unevenly'}; give "
                             "srun --ntasks-per-node, so that every node runs the same number")
    if rank >= world_size:
        raise ValueError(f"got rank {rank} of {world_size}, but ranks count from 0; correct RANK and WORLD_SIZE")
    return rank, world_size


def _num_nodes(environment: Mapping[str, str]) -> int:
    """Return the number of nodes of a SLURM step."""
    return max(1, _number(environment, "SLURM_STEP_NUM_NODES", 1))


def _number(environment: Mapping[str, str], name: str, default: object = "") -> int:
    """Return the value of a variable. Raises ValueError if it is no number from 0."""
    text = environment.get(name, f"{default}")
    if not text.isdecimal():
        raise ValueError(f"{name} = {text!r} must be a number from 0; start the job by torchrun, or set RANK and "
                         "WORLD_SIZE, both, on every rank")
    return int(text)


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a launcher that sets no RANK has started several processes: each would be a whole run.

    `srun` may give its tasks variables of MPI, which say the same as its own.
    """
    task = (environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS"))
    sizes = [environment[size] for size in (*_LAUNCHERS.values(), "SLURM_STEP_NUM_TASKS") if size in environment]
    for rank_name, size_name in _LAUNCHERS.items():
        if rank_name not in environment:
            continue
        rank = environment[rank_name]
        size = environment.get(size_name, sizes[0] if sizes else "several")
        if size == "1" or (rank, size) == task:
            continue
        raise ValueError(f"{rank_name} = {rank!r} of {size}: a launcher other than torchrun and srun has started "
                         "several processes, and each would be a whole run; start them by `torchrun -m dualpipe ...` "
                         "or `srun dualpipe ...`, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
                         f"and MASTER_PORT in each; for a single process unset {rank_name}")


def slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for a SLURM step, without those that are already set.

    The address is the first node of the step. The port depends on the numbers of job and step, because several steps of
    a job may run on one node at the same time. Raises ValueError if `scontrol` does not name the first node.
    """
    address = "127.0.0.1"
    # Multiplied by a prime, so that ports of the steps of one job are far from those of the next jobs.
    number = int(environment.get("SLURM_JOB_ID", 0)) + 7919 * int(environment.get("SLURM_STEP_ID", 0))
    port = 20000 + number % 20000
    if "MASTER_ADDR" not in environment and int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1:
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            address = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise ValueError(f"cannot tell the first node of SLURM_STEP_NODELIST = {nodes!r}; set MASTER_ADDR"
                             ) from error
    rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": f"{port}"}
    return {name: value for name, value in rendezvous.items() if name not in environment}
