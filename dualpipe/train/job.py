"""One rank of a running job: its device, its process group, and its share of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import device as cuda
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.ranks import RankSync
from dualpipe.train.config import Config, fit_world
from dualpipe.train.launch import RankInfo
from dualpipe.train.rendezvous import agree, connect, run_settings
from dualpipe.train.tables import ParallelConfig


@dataclass(frozen=True)
class Job:
    """Where this rank runs: its device, and the mesh of all ranks; None where it is the only one."""

    device: torch.device
    mesh: DeviceMesh | None = None

    @cached_property
    def place(self) -> Mesh:
        """Where this rank stands in the mesh."""
        return Mesh.of(self.mesh)

    @cached_property
    def ranks(self) -> RankSync:
        """All ranks of the job, for what they agree on."""
        return RankSync.of_mesh(self.mesh)

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.ranks.rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks."""
        return None if self.mesh is None else dist.group.WORLD


def choose_device(info: RankInfo, wanted: str, is_free: Callable[[str], bool]) -> torch.device:
    """The device of this rank: "cpu", "cuda", or "auto" for CUDA where torch finds any CUDA device.

    is_free: whether no other rank has asked for the CUDA device of this name. A launcher may show every rank its own
    as the only one (SLURM's --gpus-per-task, CUDA_VISIBLE_DEVICES=$LOCAL_RANK, a container for each).

    Raises:
        ValueError: this machine has fewer CUDA devices than ranks. "auto" does not take the CPU then: a job that was
            meant for GPUs would go on a hundred times slower, or with some of its ranks on CPU.
    """
    devices = cuda.count() if wanted != "cpu" else 0
    if devices >= info.local_world_size:
        return torch.device("cuda", info.local_rank)
    if devices == 1 and is_free(cuda.uuid(0)):
        return torch.device("cuda", 0)
    if wanted == "cuda" or devices:
        raise ValueError(
            f"parallel.device = {wanted!r}, but torch finds {devices} CUDA devices here for {info.local_world_size} "
            "ranks; start fewer ranks, set parallel.device = 'cpu', or, where they are on several machines, set "
            "LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return torch.device("cpu")


@contextmanager
def join(config: Config, info: RankInfo) -> Iterator[Job]:
    """Join the job's other ranks (gloo, and NCCL where the ranks have CUDA devices) for the length of a `with` block.

    Raises ValueError, on all ranks, where they were not started with the same settings, `config` does not fit their
    number, or one has no device; see `rendezvous.agree`.
    """

    def prepare(settings: dict[str, Any]) -> tuple[ParallelConfig, torch.device]:
        if store is not None:
            settings["number of ranks"] = info.world_size
            settings.update(run_settings(config))
        parallel = fit_world(config, info.world_size).parallel
        chosen = choose_device(
            info, parallel.device, lambda device: store is None or store.add(f"device {device}", 1) == 1
        )
        settings["kind of device"] = chosen.type
        return parallel, chosen

    timeout = timedelta(seconds=config.parallel.timeout)
    store = connect(info, timeout) if info.world_size > 1 else None
    parallel, chosen = prepare({}) if store is None else agree(store, info, prepare, timeout)
    cuda.select(chosen)
    if store is None:
        yield Job(chosen)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", store=store, rank=info.rank,
        world_size=info.world_size, timeout=timeout, device_id=chosen if chosen.type == "cuda" else None,
    )
    # A rank that fails before all have met would have the others log a broken store.
    dist.all_reduce(torch.zeros(1, device="cpu"))
    yield Job(chosen, build_mesh(parallel.pp, parallel.dp, parallel.ep, chosen, timeout=timeout))
    dist.destroy_process_group()  # after an error the process leaves without: destroying would wait for the others
