"""Export of the trained model to Hugging Face's format at the end of a run, as configured in [export]."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from dualpipe.checkpoint import save_hf
from dualpipe.checkpoint.hub.save_quantized import check_quantized
from dualpipe.models import HubConfig, read_config
from dualpipe.runtime.printing import say
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.config.schema import AUTO, Config
from dualpipe.train.launch.distributed import Job
from dualpipe.train.metrics import set_aside
from dualpipe.train.step.stages import Model
from dualpipe.train.step.transformers_stages import save_transformers_stages


def check_export(config: Config, model: Model) -> None:
    """Raise ValueError before training for an export that would fail at the end."""
    target = cast(Path, config.export_directory)
    source = config.init.from_hf
    if config.export.to_hf != AUTO and not _is_free(target):
        raise ValueError(f"export.to_hf = {str(target)!r} exists and is not empty; give a new directory")
    if source and Path(source).resolve() == target.resolve():
        raise ValueError(f"export.to_hf would replace init.from_hf = {source!r}, which it is made from; give another "
                         "output.dir or export.to_hf")
    if config.export.quantized:
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


def export(config: Config, model: Model, job: Job) -> None:
    """Write the model in Hugging Face's format if [export] asks for it. Collective."""
    target = config.export_directory
    settings = config.export
    if target is None:
        return
    with Recorder.current().doing("export", str(target)):
        if settings.to_hf == AUTO:
            job.ranks.first(partial(set_aside, target))
        if isinstance(model.config, HubConfig):
            save_hf(model.stages, target, job.mesh, model.plan, quantized=settings.quantized,
                    source=config.init.from_hf or None)
        else:
            save_transformers_stages(
                model.stages, target, mesh=job.mesh, plan=model.plan, source=config.init.from_hf)
    if job.rank == 0:
        say(f"the model: {target}")
