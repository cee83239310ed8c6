"""Bundles: a checkpoint of the state before a bad step with its batch, for `dualpipe replay` to run it again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from dualpipe.checkpoint import Checkpoints
from dualpipe.runtime.files import replace_file
from dualpipe.train.checkpointing.training_state import TrainingState, describe
from dualpipe.train.data.loader import TokenBatch
from dualpipe.train.step.step_runner import StepRunner

BUNDLES, KEPT = "bundles", 3  # a folder in output.dir, and how many stay in it


def batch_tensors(runner: StepRunner, batch: TokenBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch that this rank reads, by names that no other rank has."""
    first, last = runner.model.has_first, runner.model.has_last
    read = {"tokens": (batch.tokens, first), "positions": (batch.positions, first), "targets": (batch.targets, last),
            "ahead": (batch.targets, first and not last and runner.model.config.mtp_depth > 0)}
    return {f"bundle/{name}-{runner.job.place.replica}": tensor for name, (tensor, reads) in read.items() if reads}


def write_bundle(
    runner: StepRunner, state: TrainingState, step: int, batch: TokenBatch, values: Mapping[str, Any],
    again: Mapping[str, Any],
) -> Path:
    """Keep what it takes to run a step, from 1, again, from the state before it, which is that of now. Collective.

    values: the step's own metrics; again: the record of running it again.

    Raises OSError, on all ranks, where it cannot be written.
    """
    config, model, job = runner.config, runner.model, runner.job
    loss = next((told for told in job.ranks.gather(lambda: values["loss"]) if told == told), math.nan)
    then = {"loss": float(loss).hex(), "norm": float(values["grad_norm"]).hex()}
    loader = state.loader.state_dict() | {"step": step - 1}
    timeout = timedelta(seconds=config.parallel.timeout)
    folder = Path(config.output.dir, BUNDLES)
    with Checkpoints(folder, job.mesh, keep_last=KEPT, timeout=timeout, finite=False) as bundles:
        bundle = bundles.save(
            dict(state.tensors()) | batch_tensors(runner, batch), step=step, plan=model.plan,
            config=describe(config, model), extra={"loader": loader, "then": then, "again": dict(again)},
        )
    path = folder / bundle.name
    model_config = json.dumps(model.config.to_dict(), indent=2)
    job.ranks.first(lambda: replace_file(path / "config.json", model_config))
    return path
