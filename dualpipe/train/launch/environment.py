"""Which rank this process is, by the variables of torchrun, of SLURM or of `dualpipe` itself; and its configuration.

Does not import torch, for the process that starts ranks.
"""

from __future__ import annotations

import json
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
    """The configuration, and which rank of its job this process is; None where its ranks are still to be started.

    Raises ValueError where either is wrong; if on this rank alone, the others are told, for 30 s at most, instead of
    waiting for it.
    """
    info = rank_of_job()
    try:
        config = _handed_on() or load_config(path, overrides)
    except ValueError as error:
        if info is not None and info.world_size > 1:
            from dualpipe.train.launch.settings_check import PATIENCE, agree  # loads torch
            from dualpipe.train.launch.store import connect

            def fail(settings: dict[str, Any], error: ValueError = error) -> None:
                raise error

            with suppress(ValueError, TimeoutError):  # it is raised here in any case
                agree(connect(info, PATIENCE), info, fail, PATIENCE)
        raise
    if info is None and config.parallel.world_size == 1:
        info = RankInfo(0, 1, 0, 1)
    return config, info


def rank_of_job(world_size: int = 0) -> RankInfo | None:
    """Return this process's rank in its job, with SLURM's rendezvous set up; None where ranks are still to be started.

    world_size: the number of ranks to start, where it is known. One needs no start.
    """
    info = rank_from_environment(os.environ)
    if info is not None and "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    return RankInfo(0, 1, 0, 1) if info is None and world_size == 1 else info


def _handed_on() -> Config | None:
    """Return the configuration that the launcher has parsed for its ranks; None where this process has none."""
    file = os.environ.get(CONFIG_FILE)
    return None if file is None else recorded_config(json.loads(Path(file).read_text(encoding="utf-8")))


def rank_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """This process's place as torchrun or SLURM (`srun` with several tasks) tells it; None where neither started it.

    A batch script that SLURM runs is no task of `srun`, though it too has SLURM_PROCID = 0 and the job's SLURM_NTASKS.

    Raises ValueError for half of torchrun's variables, for what is no number, and for a rank that cannot be.
    """

    def number(name: str, default: object = "") -> int:
        text = environment.get(name, f"{default}")
        if not text.isdecimal():
            raise ValueError(f"{name} = {text!r} must be a number from 0; start the job by torchrun, or set RANK and "
                             "WORLD_SIZE, both, on every rank")
        return int(text)

    if "RANK" in environment or "WORLD_SIZE" in environment:
        rank, world = number("RANK"), number("WORLD_SIZE")
        info = RankInfo(rank, world, number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world))
    elif "SLURM_PROCID" in environment and number("SLURM_STEP_NUM_TASKS", 1) > 1:
        world, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES", 1)
        info = RankInfo(number("SLURM_PROCID"), world, number("SLURM_LOCALID", 0), -(-world // max(1, nodes)))
    else:
        return None
    if info.rank >= info.world_size or info.local_rank >= info.local_world_size:
        raise ValueError(f"rank {info.rank} of {info.world_size}, on its machine {info.local_rank} of "
                         f"{info.local_world_size}, cannot be: ranks count from 0; see RANK, WORLD_SIZE, LOCAL_RANK "
                         "and LOCAL_WORLD_SIZE")
    return info


def slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT where they are not set: the step's first node, a port made of the numbers of job and
    step, as several steps of a job may run on one node at once."""
    address = "127.0.0.1"
    # Multiplied by a prime, so that the steps of one job have ports that are far from those of the next jobs.
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
    found = {"MASTER_ADDR": address, "MASTER_PORT": f"{port}"}
    return {name: value for name, value in found.items() if name not in environment}
