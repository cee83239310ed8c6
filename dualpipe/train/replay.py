"""`dualpipe replay BUNDLE`: run a recorded step again on the layout that it had, and compare all bit for bit.

A bundle is a checkpoint of the state before the step, with the random state of every rank and the batch; see
`checkpointing.bundle`. The data of the run need not exist any more.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import torch

from dualpipe.checkpoint import load
from dualpipe.checkpoint.manifest import Checkpoint, Manifest
from dualpipe.models import read_hub_json
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.anomaly.localize import run_again
from dualpipe.train.checkpointing.bundle import batch_tensors
from dualpipe.train.checkpointing.saver import Saver
from dualpipe.train.checkpointing.training_state import model_tensors
from dualpipe.train.config.load import recorded_config
from dualpipe.train.config.model_config import model_from_dict
from dualpipe.train.config.schema import CheckpointConfig, Config, ExportConfig, InitConfig
from dualpipe.train.data.loader import is_masked
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.launch.distributed import join
from dualpipe.train.step.step_runner import StepRunner


def read_bundle(path: str | Path) -> tuple[Config, Manifest]:
    """The configuration to run a bundle with, and what was recorded. ValueError where it is no bundle, or changed."""
    path = Path(path).resolve()
    manifest = Checkpoint.read(path).manifest
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    if not isinstance(manifest.config, dict) or not {"then", "again"} <= extra.keys():
        raise ValueError(f"{path} is a checkpoint, but no bundle; give one of those in `bundles` of output.dir")
    config = recorded_config(manifest.config["run"])
    backend = config.model.backend
    file, hub = read_hub_json(path)
    if model_from_dict(hub, backend) != model_from_dict(manifest.config["model"], backend):
        raise ValueError(f"{file} has changed: it is not the model of the bundle's manifest")
    return dataclasses.replace(
        config, init=InitConfig(), export=ExportConfig(), model=dataclasses.replace(config.model, config=str(path)),
        checkpoint=CheckpointConfig(dir=str(path / "none"), resume=str(path)),
    ), manifest


def replay(config: Config, manifest: Manifest, info: RankInfo) -> int:
    """Run the step as rank `info`; the exit status: 0 where it gives the same bits, else 1, which rank 0 tells."""
    recorder = Recorder(info.rank)
    with ExitStack() as held:
        held.enter_context(recorder.activate())
        held.enter_context(deterministic(config.train.deterministic))
        job, resolved = held.enter_context(join(config, info))
        saver = held.enter_context(Saver(config, job))
        runner = StepRunner(resolved, job, saver.source_dtypes)
        runner.weighs_targets = is_masked(manifest.extra["loader"])
        train, model, split = config.train, runner.model, runner.split
        recorder.step = manifest.step
        own = train.micro_batch_size * train.num_chunks if model.has_first or model.has_last else 0
        here = split.counts(train.sequence_length)[split.rank]
        depths = (1 + depth,) if (depth := model.config.mtp_depth) else ()
        batch = TokenBatch(*(torch.zeros(own, *shape, dtype=torch.int64, device=job.device)
                        for shape in ((here,), (here, *depths), (train.sequence_length,))))
        tensors = model_tensors(model, runner.optimizer) | runner.routers.state_tensors()
        load(config.checkpoint.resume, tensors | batch_tensors(runner, batch), mesh=job.mesh)
        runner.optimizer.round_parameters()
        found = run_again(runner, batch, manifest.step)
        now = found.record()
        then, again = manifest.extra["then"], manifest.extra["again"]
        same = now == again and all(now[name] == value for name, value in then.items())
        if job.rank == 0:
            say(f"step {manifest.step}, run again: {found.text()}")
            for name, recorded in (("in the run", then), ("run again there", again)):
                numbers = ", ".join(f"{key} {float.fromhex(recorded[key])}" for key in ("loss", "norm"))
                equal = all(now[key] == value for key, value in recorded.items())
                say(f"{name}: {numbers}; {'the same bits' if equal else 'other bits'} now")
            say("reproduced" if same else f"NOT reproduced: loss {found.loss}, norm {found.norm}")
    return 0 if same else 1
