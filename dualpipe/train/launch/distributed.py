"""A rank of a running job: its device, its process groups and its position in the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.runtime import device as cuda
from dualpipe.runtime.nccl import TOTALS, nccl_options
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.config.fit import Resolved, resolve
from dualpipe.train.config.schema import Config, ParallelConfig
from dualpipe.train.health.watchdog import Watchdog
from dualpipe.train.launch.settings_check import agree, model_settings, run_settings
from dualpipe.train.launch.store import confine, connect

T = TypeVar("T")


@dataclass(eq=False)
class Job:
    """The device of this rank and the mesh of all ranks.

    Attributes:
        device: of this rank.
        mesh: of all ranks; None for a single rank.
        watchdog: of this rank; None without one.
        place: the mesh as this rank sees it: sizes, its coordinates, and the process groups that it belongs to.
        ranks: synchronizes all ranks.
        rank: global rank.
        group: process group of all ranks; None for a single rank.
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    watchdog: Watchdog | None = None
    place: Mesh = field(init=False)
    ranks: RankSync = field(init=False)
    rank: int = field(init=False)
    group: dist.ProcessGroup | None = field(init=False)

    def __post_init__(self) -> None:
        self.place = Mesh.of(self.mesh)
        self.ranks = RankSync.of_mesh(self.mesh)
        self.rank = self.ranks.rank
        self.group = None if self.mesh is None else dist.group.WORLD


@contextmanager
def join(
    config: Config, info: RankInfo, watchdog: Watchdog | None = None, prefix: str = ""
) -> Iterator[tuple[Job, Resolved]]:
    """Join the other ranks of the job for the length of a `with` block, over gloo and, with CUDA devices, NCCL.

    Yields the job, and the configuration resolved for the number of ranks. prefix: see `connect`.

    Raises ValueError, on all ranks, if they were started with different settings, `config` does not fit their number,
    or one has no device; see `agree`.
    """

    def prepare(settings: dict[str, Any]) -> tuple[ParallelConfig, Resolved]:
        settings.update(run_settings(config))
        resolved = resolve(config, info.world_size)
        settings.update(model_settings(resolved.model))
        return resolved.config.parallel, resolved

    def watch(store: dist.Store) -> None:
        if watchdog is not None:
            limit = config.parallel.timeout
            watchdog.watch(store if info.world_size > 1 else None, info, Path(config.output.dir),
                           patience=config.watchdog.timeout or limit / 2, limit=limit)

    with join_prepared(config.parallel, info, prepare, watch=watch, prefix=prefix) as (job, resolved):
        job.watchdog = watchdog
        yield job, resolved


@contextmanager
def join_prepared(
    layout: ParallelConfig, info: RankInfo, prepare: Callable[[dict[str, Any]], tuple[ParallelConfig, T]], *,
    watch: Callable[[dist.Store], None] | None = None, prefix: str = "",
) -> Iterator[tuple[Job, T]]:
    """Join the other ranks of the job after `prepare` has run on all of them.

    Args:
        layout: timeout, interface and device for the rendezvous.
        prepare: fills a dictionary with the settings that must be the same on all ranks. It returns the layout for the
            number of ranks, and a value for this rank.
        watch: called with the store before ranks wait for each other.
        prefix: see `connect`.

    Yields the job and the value of `prepare`. Raises ValueError, on all ranks, if `prepare` raised it on any, settings
    differ, or a rank has no device.
    """

    def prepare_device(settings: dict[str, Any]) -> tuple[ParallelConfig, T, torch.device]:
        settings["number of ranks"] = info.world_size
        parallel, prepared = prepare(settings)
        if parallel.ep > 1:  # tokens go to experts by nodes, which all ranks must see alike
            settings["parallel.ranks_per_node (else LOCAL_WORLD_SIZE)"] = (
                parallel.ranks_per_node or info.local_world_size)
        confine(info, layout.interface)
        device = choose_device(info, layout.device, lambda uuid: store.add(f"device {uuid}", 1) == 1)
        settings["kind of device"] = device.type
        return parallel, prepared, device

    if info.world_size > 1 and layout.device != "cpu":
        cuda.set_environment()
    timeout = timedelta(seconds=layout.timeout)
    store = connect(info, timeout, layout.interface, prefix) if info.world_size > 1 else dist.HashStore()
    if watch is not None:
        watch(store)
    parallel, prepared, device = agree(store, info, prepare_device, timeout)
    cuda.select(device)
    if info.world_size == 1:
        yield Job(device), prepared
        return
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=store, rank=info.rank, world_size=info.world_size,
        timeout=timeout, pg_options=nccl_options(TOTALS, timeout) if on_cuda else None,
    )
    # Wait for all ranks: if one failed before the others connect, torch would log a broken store on them.
    with Recorder.current().collective("meet", "all ranks", range(info.world_size)):
        dist.all_reduce(torch.zeros(1, device="cpu"))
    mesh = build_mesh(parallel.pp, parallel.dp, parallel.ep, device, cp=parallel.cp,
                      dp_replicate=parallel.dp_replicate, timeout=timeout,
                      ranks_per_node=parallel.ranks_per_node or info.local_world_size)
    yield Job(device, mesh), prepared
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks


def choose_device(info: RankInfo, kind: str, is_free: Callable[[str], bool]) -> torch.device:
    """Return the device of this rank.

    Args:
        kind: "cpu", "cuda", or "auto" for CUDA if torch finds any CUDA device.
        is_free: returns True if no other rank uses the CUDA device with a given UUID. A launcher may make a
            single device visible to each rank, and a different one to every rank (SLURM's --gpus-per-task,
            CUDA_VISIBLE_DEVICES=$LOCAL_RANK, a container per rank).

    Raises ValueError if this machine has fewer CUDA devices than ranks. "auto" does not fall back to the CPU then: a
    job for GPUs would continue a hundred times slower, or with some of its ranks on CPU.
    """
    devices = cuda.count() if kind != "cpu" else 0
    if devices >= info.local_world_size:
        return torch.device("cuda", info.local_rank)
    if devices == 1 and is_free(str(cuda.properties(0).uuid)):
        return torch.device("cuda", 0)
    if kind == "cuda" or devices:
        raise ValueError(
            f"parallel.device = {kind!r}, but torch finds {devices} CUDA devices here for {info.local_world_size} "
            "ranks; start fewer ranks, set parallel.device = 'cpu', or, if they are on several machines, set "
            "LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return torch.device("cpu")
