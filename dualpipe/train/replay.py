"""`dualpipe replay BUNDLE`: repeat a recorded step on the layout of its run and compare the results bit for bit.

A bundle is a checkpoint of the state before the step, with the random state of every rank and the batch; see
`checkpointing.bundle`. It does not need the data of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from dualpipe.checkpoint import load
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.models import read_hub_json
from dualpipe.nn.attention import use_attention_kernel
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.anomaly.localize import rerun_step
from dualpipe.train.checkpointing.bundle import batch_tensors
from dualpipe.train.checkpointing.saver import Saver
from dualpipe.train.checkpointing.training_state import model_tensors
from dualpipe.train.config.load import recorded_config
from dualpipe.train.config.model_config import model_from_dict
from dualpipe.train.config.schema import CheckpointConfig, Config, ExportConfig, InitConfig
from dualpipe.train.data.loader import state_has_loss_mask
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.launch.distributed import join
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step.kernel_choice import choose_kernels
from dualpipe.train.step.step_runner import StepRunner, build_training


def read_bundle(path: str | Path) -> Config:
    """Return the configuration to replay a bundle with, which resumes from it.

    Raises ValueError if `path` is not a bundle, or its config.json was changed.
    """
    path = Path(path).resolve()
    manifest = Checkpoint.read(path).manifest
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    # "then": the results of the step in the run; "again": those of its rerun in the run.
    if not isinstance(manifest.config, dict) or not {"then", "again"} <= extra.keys():
        raise ValueError(f"{path} is a checkpoint, not a bundle; give a folder in `bundles` of output.dir")
    config = recorded_config(manifest.config["run"])
    backend = config.model.backend
    file, hub = read_hub_json(path)
    if model_from_dict(hub, backend) != model_from_dict(manifest.config["model"], backend):
        raise ValueError(f"{file} has changed: it is not the model of the bundle's manifest; restore it")
    model = dataclasses.replace(config.model, config=str(path))
    no_directory = path / "none"  # does not exist, so the replay loads the bundle and no checkpoint of the run
    checkpoint = CheckpointConfig(dir=str(no_directory), resume=str(path))
    return dataclasses.replace(config, init=InitConfig(), export=ExportConfig(), model=model, checkpoint=checkpoint)


def replay(config: Config, info: RankInfo) -> int:
    """Replay the step as rank `info` and return the exit status: 0 if it gives the same bits, else 1.

    config: from `read_bundle`. Rank 0 prints the result.
    """
    manifest = Checkpoint.read(Path(config.checkpoint.resume)).manifest
    recorder = Recorder(info.rank)
    with ExitStack() as resources:
        resources.enter_context(recorder.activate())
        resources.enter_context(deterministic(config.train.deterministic))
        job, resolved = resources.enter_context(join(config, info))
        saver = resources.enter_context(Saver(config, job))
        runner, optimizer = build_training(resolved, job, saver.source_dtypes)
        runner.counts_targets |= state_has_loss_mask(manifest.extra["loader"])
        kernels = choose_kernels(runner)
        resources.enter_context(use_attention_kernel(kernels.attention))
        recorder.step = manifest.step
        batch = _load_state(runner, optimizer, config.checkpoint.resume)
        rerun = rerun_step(runner, batch, manifest.step)
        result = rerun.to_record()
        in_run = manifest.extra["then"]
        rerun_in_run = manifest.extra["again"]
        is_same = result == rerun_in_run and _agrees(result, in_run)
        if job.rank == 0:
            say(f"replay of step {manifest.step}: {rerun.describe()}")
            for name, recorded in (("step in the run", in_run), ("rerun in the run", rerun_in_run)):
                numbers = ", ".join(f"{key} {float.fromhex(recorded[key])}" for key in ("loss", "norm"))
                verdict = "the same bits" if _agrees(result, recorded) else "other bits"
                say(f"{name}: {numbers}; the replay gives {verdict}")
            say("reproduced" if is_same else f"NOT reproduced: loss {rerun.loss}, norm {rerun.norm}")
    return 0 if is_same else 1


def _load_state(runner: StepRunner, optimizer: Optimizer, path: str) -> TokenBatch:
    """Load the state before the step from the bundle at `path`, and return the batch of this rank. Collective."""
    train = runner.config.train
    model = runner.model
    split = runner.split
    length = train.sequence_length
    num_rows = train.micro_batch_size * train.num_chunks if model.has_first or model.has_last else 0
    num_tokens = split.counts(length)[split.rank]  # of a sequence, on this context-parallel rank
    depths = (1 + model.config.mtp_depth,) if model.config.mtp_depth else ()
    shapes = ((num_tokens,), (num_tokens, *depths), (length,))  # tokens, targets, positions
    batch = TokenBatch(*(
        torch.zeros(num_rows, *shape, dtype=torch.int64, device=runner.job.device) for shape in shapes))
    tensors = model_tensors(model, optimizer) | runner.routers.state_tensors()
    load(path, tensors | batch_tensors(runner, batch), mesh=runner.job.mesh)
    optimizer.round_parameters()
    return batch


def _agrees(result: Mapping[str, object], recorded: Mapping[str, object]) -> bool:
    """Return True if `result` has the same bits as every recorded value."""
    return all(result[name] == value for name, value in recorded.items())
