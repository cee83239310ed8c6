"""Export of the trained model to Hugging Face's format at the end of a run, as configured in [export].

`export.json` in output.dir has the directory of the last export, the checkpoint that holds the same state, and the
settings that the files depend on. A complete run that is started again with the same ones does not export again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from dualpipe.checkpoint import save_hf
from dualpipe.checkpoint.directory import find
from dualpipe.checkpoint.hub.files import CONFIG
from dualpipe.checkpoint.hub.save import check_quantized
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.models import HubConfig, read_config
from dualpipe.nn.lora import check_merge, merge_adapters
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.printing import say, warn
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder
from dualpipe.runtime.storage import Location, RemotePath, as_location
from dualpipe.train.config.lora import ADAPTER_CONFIG, adapter_plan
from dualpipe.train.config.schema import AUTO, Config
from dualpipe.train.launch.join import Job
from dualpipe.train.metrics import set_aside
from dualpipe.train.step import Model

EXPORT_FILE = "export.json"  # in output.dir


def is_exported(config: Config, source: Location | None) -> bool:
    """Return True if the run is complete, and its export was made from the checkpoint that it resumes from.

    source: the checkpoint, or directory of checkpoints, that the run resumes from. None: a new run.
    """
    target = config.export_directory
    config_file = ADAPTER_CONFIG if _exports_adapters(config) else CONFIG
    if target is None or source is None or not (target / config_file).is_file():
        return False
    committed = find(source).committed
    if not committed or committed[0].manifest.step != config.train.steps:
        return False
    try:
        record = json.loads((Path(config.output.dir) / EXPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == _describe_export(config, committed[0]))


def _exports_adapters(config: Config) -> bool:
    """Return True if the run exports adapters alone, without the weights that they adapt."""
    return config.lora.is_enabled and not config.export.merged


def _describe_export(config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the record of an export, as JSON: its directory, its settings, and a hash of the checkpoint's content."""
    written = sorted((name, file.checksum) for name, file in checkpoint.manifest.files.items())
    settings = {"quantized": config.export.quantized, "dtypes": asdict(config.dtypes), "init": asdict(config.init)}
    if config.lora.is_enabled:
        settings |= {"merged": config.export.merged, "lora": asdict(config.lora)}
    record = {
        "directory": str(cast(Path, config.export_directory).resolve()),
        "checkpoint": hashlib.sha256(json.dumps([checkpoint.manifest.step, written]).encode()).hexdigest(),
        "settings": settings,
    }
    return cast(dict[str, Any], json.loads(json.dumps(record)))


def check_export(config: Config, model: Model, ranks: RankSync) -> None:
    """Raise ValueError, on all ranks, before training for an export that would fail at the end. Collective."""
    ranks.first(partial(_check_target, config, model))
    if config.export.merged:
        ranks.agree(partial(check_merge, model.stages))  # of each rank's own stages


def _check_target(config: Config, model: Model) -> None:
    """Raise ValueError for a directory that cannot be written, or for settings that do not fit the model."""
    target = cast(Path, config.export_directory)
    source = config.init.from_hf
    if isinstance(as_location(config.export.to_hf), RemotePath):
        raise ValueError(f"export.to_hf = {config.export.to_hf!r} is a URL, but models are exported to local "
                         "directories; give one, and copy the model when the run has ended")
    if config.export.to_hf != AUTO and not _is_free(target):
        raise ValueError(f"export.to_hf = {str(target)!r} exists and is not empty; give a new directory")
    if source and Path(source).resolve() == target.resolve():
        raise ValueError(f"export.to_hf would replace init.from_hf = {source!r}, which the export reads; give another "
                         "output.dir or export.to_hf")
    if config.export.quantized and not config.lora.is_enabled:
        # A transformers model with this option is refused when the configuration is read.
        check_quantized(cast(HubConfig, model.config), model.plan)
    # Without model.config the model is that of init.from_hf.
    has_two_configs = source and config.model.config and isinstance(model.config, HubConfig)
    if has_two_configs and not _is_same_model(source, cast(HubConfig, model.config)):
        raise ValueError(f"export.to_hf copies config.json from init.from_hf = {source!r}, but model.config is another "
                         "model; change the config.json there and leave out model.config")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"export.to_hf = {str(target)!r} cannot be made: {error.strerror}; give another") from error


def _is_same_model(source: str, model: HubConfig) -> bool:
    """Return True if the checkpoint `source` has this configuration, apart from its number of MTP layers."""
    return replace(read_config(source), mtp_depth=model.mtp_depth) == model


def _is_free(target: Path) -> bool:
    """Return True if `target` does not exist or is an empty directory."""
    if target.is_symlink():
        return False
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def export(config: Config, model: Model, job: Job, checkpoint: Location | None) -> None:
    """Write the model, or its adapters, in Hugging Face's format if [export] asks for it. Collective.

    checkpoint: of the same state; None: it could not be written.
    """
    target = config.export_directory
    if target is None:
        return
    source = config.init.from_hf or None
    with Recorder.current().doing("export", str(target)):
        job.ranks.first(lambda: _prepare(config, target, checkpoint))
        if config.export.merged:
            merge_adapters(model.stages)
        if _exports_adapters(config):
            from dualpipe.hf.lora import save_adapter

            save_adapter(model.stages, target, adapter_plan(model.config, config.lora).config, mesh=job.mesh,
                         base=source)
        elif isinstance(model.config, HubConfig):
            save_hf(model.stages, target, job.mesh, model.plan, quantized=config.export.quantized, source=source)
        else:
            from dualpipe.hf import CausalLMStage, save_stages

            save_stages(cast("Sequence[CausalLMStage]", model.stages), target, mesh=job.mesh, plan=model.plan,
                        source=source)
    if job.rank == 0:
        say(f"the {'adapters' if _exports_adapters(config) else 'model'}: {target}")


def _prepare(config: Config, target: Path, checkpoint: Location | None) -> None:
    """Set an earlier export aside, and record the one that follows; a record that cannot be written is a warning.

    The record comes before the export, which then appears as a whole: wherever the run is killed, the next start finds
    a complete export with its record, or no export.
    """
    file = Path(config.output.dir) / EXPORT_FILE
    with suppress(OSError):
        file.unlink()  # of an earlier export
    if config.export.to_hf == AUTO:
        set_aside(target)
    if checkpoint is None:
        return
    try:
        replace_file(file, json.dumps(_describe_export(config, Checkpoint.read(checkpoint)), indent=1) + "\n")
    except (OSError, ValueError) as error:
        warn(f"{file} cannot be written: {error}; the run would export again if it is started again")
