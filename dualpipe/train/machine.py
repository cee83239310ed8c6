"""How many ranks one machine can serve, the commands that start a job on several, and how fast a GPU can be.

Imports torch only to refuse, where a second does not matter and its count of GPUs is the one that holds.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# 10^12 operations per second in dense bf16 products, of NVIDIA's data sheets (half of what they give "with sparsity").
# The first row whose words are all in the device's name counts.
_PEAKS = {
    ("GB300",): 2500, ("GB200",): 2500, ("B300",): 2250, ("B200",): 2250,
    ("GH200",): 989, ("H200", "NVL"): 835, ("H200",): 989, ("H20",): 148,
    ("H100", "PCIe"): 756, ("H100", "NVL"): 835, ("H100",): 989, ("H800", "PCIe"): 756, ("H800",): 989,
    ("A100",): 312, ("A800",): 312, ("L40S",): 362, ("A10",): 125, ("L4",): 121,
}

RANKS_PER_CORE = 4  # of CPU ranks: for tests and lessons
_USUAL_GPUS = 8  # of a node, where this machine has none


def check_machine(arguments: Sequence[str], world_size: int, device: str) -> None:
    """Raise ValueError, with the commands that would start them, where this machine cannot serve `world_size` ranks.

    arguments: the command line after `dualpipe`; device: as in parallel.device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = 0 if device == "cpu" else _visible_gpus(os.environ)
    if world_size <= _limit(device, gpus, cores):
        return
    if device != "cpu":
        from dualpipe import device as cuda  # not at the top: it loads torch

        gpus = cuda.count()
    if world_size <= _limit(device, gpus, cores):
        return
    if gpus or device == "cuda":
        reason = f"{world_size} ranks need as many GPUs, and this machine has {gpus}"
    else:
        reason = f"{world_size} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores} cores"
    remedy = ", or set parallel.device = 'cpu'" if world_size <= RANKS_PER_CORE * cores else ""
    error = ValueError(f"{reason}; lower parallel.pp, dp or ep{remedy}, or start them on several machines:")
    for line in start_commands(arguments, world_size, gpus=0 if device == "cpu" else gpus or _USUAL_GPUS, cores=cores):
        error.add_note(line)
    raise error


def start_commands(arguments: Sequence[str], world_size: int, *, gpus: int, cores: int) -> list[str]:
    """Lines that start `dualpipe *arguments` as `world_size` ranks by torchrun, run on every machine, and by SLURM.

    gpus: of each machine, 0 for ranks on CPU, which get a core each.
    """
    local = max(n for n in range(1, (gpus or cores) + 1) if world_size % n == 0)
    nodes, command = world_size // local, shlex.join(arguments)
    per_node = f" --gpus-per-node {local}" if gpus else ""
    return [
        f"  torchrun --nnodes {nodes} --nproc-per-node {local} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 "
        f"-m dualpipe {command}",
        f"  srun --nodes {nodes} --ntasks-per-node {local}{per_node} dualpipe {command}",
    ]


def _limit(device: str, gpus: int, cores: int) -> int:
    return gpus if gpus or device == "cuda" else RANKS_PER_CORE * cores


def _visible_gpus(environment: Mapping[str, str]) -> int:
    """NVIDIA's device files, of which CUDA_VISIBLE_DEVICES may leave some out."""
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return files if visible is None else min(files, len([name for name in visible.split(",") if name.strip()]))


def peak_tflops(device_name: str) -> float | None:
    """10^12 operations per second that a GPU of this name can do in dense bf16 products; None for an
    unknown one, or a part of one."""
    words = set(device_name.replace("-", " ").split())
    whole = "MIG" not in words
    return next((float(peak) for row, peak in _PEAKS.items() if whole and words.issuperset(row)), None)
