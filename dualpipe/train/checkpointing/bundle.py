"""Bundles: checkpoints of the state before a bad step, with its batch, so that `dualpipe replay` can rerun the step."""

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
from dualpipe.train.config.schema import replace_field
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.step.step_runner import StepRunner

BUNDLES = "bundles"  # folder in output.dir
MAX_BUNDLES = 3  # newest bundles to keep


def batch_tensors(runner: StepRunner, batch: TokenBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch that the stages of this rank read, by names that no other rank uses."""
    first = runner.model.has_first
    last = runner.model.has_last
    tensors: dict[str, Tensor] = {}
    if first:
        tensors |= {"tokens": batch.tokens, "positions": batch.positions}
    if last:
        tensors["targets"] = batch.targets
    if first and not last and runner.model.config.mtp_depth > 0:  # MTP layers read the next tokens from the targets
        tensors["ahead"] = batch.targets
    return {f"bundle/{name}-{runner.job.place.replica}": tensor for name, tensor in tensors.items()}


def write_bundle(
    runner: StepRunner, state: TrainingState, step: int, batch: TokenBatch, values: Mapping[str, Any],
    rerun: Mapping[str, Any], *, expert_gemm: str, attention: str,
) -> Path:
    """Write all that a rerun of a step needs, and return the path of the bundle. Collective.

    Args:
        runner: the step runner of the run.
        state: the current state, which must be that before the step.
        step: counted from 1.
        batch: of the step.
        values: metrics of the step.
        rerun: record of the rerun, from `Rerun.to_record`.
        expert_gemm, attention: the kernels of the run. The bundle has them in [model], because a replay that timed them
            for "auto" again could choose others, with other bits.

    Raises:
        OSError: on all ranks, if the bundle cannot be written.
    """
    config = replace_field(runner.config, "model", "expert_gemm", expert_gemm)
    config = replace_field(config, "model", "attention", attention)
    model = runner.model
    job = runner.job
    losses = job.ranks.gather(lambda: values["loss"])
    loss = next((loss for loss in losses if not math.isnan(loss)), math.nan)  # NaN on ranks without the last stage
    first_run = {"loss": float(loss).hex(), "norm": float(values["grad_norm"]).hex()}
    loader = state.loader.state_dict() | {"step": step - 1}
    results = {"then": first_run, "again": dict(rerun)}  # of the step in the run, and of its rerun there
    timeout = timedelta(seconds=config.parallel.timeout)
    folder = Path(config.output.dir, BUNDLES).absolute()
    with Checkpoints(folder, job.mesh, keep_last=MAX_BUNDLES, timeout=timeout, finite=False) as bundles:
        bundle = bundles.save(
            dict(state.tensors()) | batch_tensors(runner, batch), step=step, plan=model.plan,
            config=describe(config, model), extra={"loader": loader, **results},
        )
    path = folder / bundle.name
    model_config = json.dumps(model.config.to_dict(), indent=2)
    job.ranks.first(lambda: replace_file(path / "config.json", model_config))
    return path
