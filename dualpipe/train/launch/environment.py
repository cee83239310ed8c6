"""The rank of this process, from the variables of torchrun, SLURM or `dualpipe`, and its configuration.

Does not import torch, for the process that starts ranks.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualpipe.runtime.rank_process import CONFIG_FILE, RankInfo
from dualpipe.train.config.load import load_config, recorded_config
from dualpipe.train.config.schema import Config


def load_everywhere(path: str, overrides: Sequence[str]) -> tuple[Config, RankInfo | None]:
    """Return the configuration and the rank of this process; None for the rank if the ranks are not yet started.

    Raises ValueError if either is invalid. If that happens on this rank alone, the other ranks raise the same error; it
    takes up to 30 s to tell them.
    """
    info = rank_of_job()
    try:
        config = _config_from_launcher() or load_config(path, overrides)
    except ValueError as error:
        if info is not None and info.world_size > 1:
            _raise_everywhere(error, info)
        raise
    if info is None and config.parallel.world_size == 1:
        info = RankInfo(0, 1, 0, 1)
    return config, info


def _raise_everywhere(error: ValueError, info: RankInfo) -> None:
    """Raise `error` on the other ranks of the job, which would wait for this one."""
    from dualpipe.train.launch.settings_check import PATIENCE, agree  # loads torch
    from dualpipe.train.launch.store import connect

    def fail(settings: dict[str, Any]) -> None:
        raise error

    with suppress(ValueError, TimeoutError):  # the caller raises the error on this rank
        agree(connect(info, PATIENCE), info, fail, PATIENCE)


def rank_of_job(world_size: int = 0) -> RankInfo | None:
    """Return the rank of this process in its job; None if the ranks are not yet started.

    Sets MASTER_ADDR and MASTER_PORT under SLURM. world_size: the number of ranks to start, if known. A single rank
    needs no start.
    """
    info = rank_from_environment(os.environ)
    if info is not None and "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    return RankInfo(0, 1, 0, 1) if info is None and world_size == 1 else info


def _config_from_launcher() -> Config | None:
    """Return the configuration that the launcher has parsed for its ranks; None without a launcher."""
    file = os.environ.get(CONFIG_FILE)
    return None if file is None else recorded_config(json.loads(Path(file).read_text(encoding="utf-8")))


def rank_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of this process as started by torchrun or SLURM (`srun` with several tasks); None by neither.

    A batch script run by SLURM is no task of `srun`, although it has SLURM_PROCID = 0 and the SLURM_NTASKS of the job.

    Raises ValueError if variables of torchrun are missing, are no numbers, or contradict each other.
    """

    def number(name: str, default: object = "") -> int:
        text = environment.get(name, f"{default}")
        if not text.isdecimal():
            raise ValueError(f"{name} = {text!r} must be a number from 0; start the job by torchrun, or set RANK and "
                             "WORLD_SIZE, both, on every rank")
        return int(text)

    if "RANK" in environment or "WORLD_SIZE" in environment:
        rank = number("RANK")
        world_size = number("WORLD_SIZE")
        info = RankInfo(rank, world_size, number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world_size))
    elif "SLURM_PROCID" in environment and number("SLURM_STEP_NUM_TASKS", 1) > 1:
        world_size = number("SLURM_STEP_NUM_TASKS")
        nodes = max(1, number("SLURM_STEP_NUM_NODES", 1))
        info = RankInfo(number("SLURM_PROCID"), world_size, number("SLURM_LOCALID", 0), math.ceil(world_size / nodes))
    else:
        return None
    if info.rank >= info.world_size or info.local_rank >= info.local_world_size:
        raise ValueError(f"got rank {info.rank} of {info.world_size} and, on its machine, rank {info.local_rank} of "
                         f"{info.local_world_size}, but ranks count from 0; correct RANK, WORLD_SIZE, LOCAL_RANK and "
                         "LOCAL_WORLD_SIZE")
    return info


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
