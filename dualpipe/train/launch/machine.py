"""The number of ranks that this machine can run, and the commands that run more on several machines.

Does not import torch, except to count CUDA devices when they seem too few.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

RANKS_PER_CORE = 4  # maximum CPU ranks per core; CPU ranks are for tests and lessons
_USUAL_GPUS = 8  # GPUs of a node in the suggested commands, if this machine has none


def check_machine(arguments: Sequence[str], world_size: int, device: str) -> None:
    """Raise ValueError if this machine cannot run `world_size` ranks of `dualpipe *arguments`.

    The notes of the error are the commands for several machines: torchrun, to run on each of them, and srun. device:
    see parallel.device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = 0 if device == "cpu" else _count_device_files(os.environ)
    if world_size <= _capacity(gpus, cores, device):
        return
    if device != "cpu":
        from dualpipe.runtime import device as cuda  # imported late: it loads torch, whose count is the right one

        gpus = cuda.count()
        if world_size <= _capacity(gpus, cores, device):
            return
    if gpus or device == "cuda":
        reason = f"{world_size} ranks need as many GPUs, and this machine has {gpus}"
    else:
        reason = f"{world_size} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores} cores"
    remedy = ", or set parallel.device = 'cpu'" if world_size <= RANKS_PER_CORE * cores else ""
    error = ValueError(f"{reason}; lower parallel.pp, dp, cp or ep{remedy}, or start them on several machines:")
    for command in _cluster_commands(arguments, world_size, device, cores if device == "cpu" else gpus or _USUAL_GPUS):
        error.add_note(f"  {command}")
    raise error


def _capacity(gpus: int, cores: int, device: str) -> int:
    """Return the number of ranks that this machine can run: one per GPU, or `RANKS_PER_CORE` on CPU."""
    if gpus or device == "cuda":
        return gpus
    return RANKS_PER_CORE * cores


def _cluster_commands(arguments: Sequence[str], world_size: int, device: str, ranks_per_node: int) -> list[str]:
    """Return the torchrun and the srun command for `world_size` ranks, at most `ranks_per_node` of them on a node."""
    local_ranks = max(number for number in range(1, ranks_per_node + 1) if world_size % number == 0)
    nodes = world_size // local_ranks
    command = shlex.join(arguments)
    gpu_option = "" if device == "cpu" else f" --gpus-per-node {local_ranks}"
    return [
        f"torchrun --nnodes {nodes} --nproc-per-node {local_ranks} --rdzv-backend c10d --rdzv-endpoint "
        f"FIRST_HOST:29500 -m dualpipe {command}",
        f"srun --nodes {nodes} --ntasks-per-node {local_ranks}{gpu_option} dualpipe {command}",
    ]


def _count_device_files(environment: Mapping[str, str]) -> int:
    """Return the number of NVIDIA device files, limited by CUDA_VISIBLE_DEVICES."""
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return files
    return min(files, len([name for name in visible.split(",") if name.strip()]))
