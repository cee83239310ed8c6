"""Writing the model in Hugging Face's form at the end of a run, as [export] says."""

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
    """Refuse what `save_hf` would refuse at the end."""
    target, source = cast(Path, config.export_directory), config.init.from_hf
    is_free = not target.is_symlink() and (not target.exists() or (target.is_dir() and not any(target.iterdir())))
    if config.export.to_hf != AUTO and not is_free:
        raise ValueError(f"export.to_hf = {str(target)!r} exists and is not empty; give a directory to make")
    if source and Path(source).resolve() == target.resolve():
        raise ValueError(f"export.to_hf would take the place of init.from_hf = {source!r}, which it is made from; give "
                         "another output.dir or export.to_hf")
    if config.export.quantized:
        check_quantized(cast(HubConfig, model.config), model.plan)  # others are refused when they are read
    # Without model.config the model is that of init.from_hf.
    if isinstance(model.config, HubConfig) and source and config.model.config and (
        replace(read_config(source), mtp_depth=model.config.mtp_depth) != model.config
    ):
        raise ValueError(f"export.to_hf takes config.json from init.from_hf = {source!r}, but model.config says "
                         "another model; change the config.json there and leave out model.config")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"export.to_hf = {str(target)!r} cannot be made: {error.strerror}") from error


def export(config: Config, model: Model, job: Job) -> None:
    """Write the model in Hugging Face's form, where that is wanted. Collective."""
    target, settings = config.export_directory, config.export
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
