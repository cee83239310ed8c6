"""Jobs and trainers of a configuration on the ranks of the process group, or on this process alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dualpipe.parallel.mesh import build_mesh
from dualpipe.train.config.fit import Resolved, resolve
from dualpipe.train.config.load import load_config
from dualpipe.train.launch.join import Job
from dualpipe.train.saver import Saver
from dualpipe.train.trainer import Trainer


def resolve_job(toml: str | Path, options: Sequence[str]) -> tuple[Resolved, Job]:
    """Resolve a configuration for the ranks, and build the mesh that it asks for, on CPU. Collective."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    resolved = resolve(load_config(toml, options), world)
    p = resolved.config.parallel
    cpu = torch.device("cpu")
    mesh = None
    if world > 1:
        mesh = build_mesh(p.pp, p.dp, p.ep, cpu, cp=p.cp, dp_replicate=p.dp_replicate,
                          ranks_per_node=p.ranks_per_node or None)
    return resolved, Job(cpu, mesh)


@contextmanager
def built_trainer(toml: str | Path, options: Sequence[str], **more: Any) -> Iterator[Trainer]:
    """Build the trainer of a run, before its first step. Collective."""
    resolved, job = resolve_job(toml, options)
    with Saver(resolved.config, job) as saver:
        yield Trainer(resolved, job, saver, **more)
