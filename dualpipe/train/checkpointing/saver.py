"""Saving the whole state of a run, and going on from it: what `[checkpoint]` asks for.

A checkpoint has the parameters and buffers, the optimizer, the loads that the routers go by, the random state of every
rank, and the loader's position; beside them the run's configuration and the model's, so that it can be exported without
the files it was started with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Self

from dualpipe.checkpoint import CheckpointError, Checkpoints, load
from dualpipe.checkpoint.directory import scan
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.models import HubConfig
from dualpipe.parallel.mesh import TRAFFIC
from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.printing import say
from dualpipe.runtime.storage import Location
from dualpipe.train.checkpointing.training_state import TrainingState, describe
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config
from dualpipe.train.config.source import find_source, saved_settings
from dualpipe.train.launch.distributed import Job

# A checkpoint that `dualpipe hf import` made has step 0, and none of these yet.
NOT_IMPORTED = ("optimizer/*", "routers/*")
_NOT_COMPARED = ("output", "metrics", "checkpoint", "export", "init")  # tables that do not change what is computed


class Saver:
    """The checkpoints of one run. Collective, as all of its methods; a context manager around the run.

    source: the checkpoint, or directory of them, to go on from; None: a new run.
    source_dtypes: what its tensors were computed in, by name; None: a new run.
    """

    def __init__(self, config: Config, job: Job) -> None:
        """Raises ValueError, on all ranks, where checkpoints cannot be saved, or there is none whole to go on from."""
        self._config, self._job = config, job
        self._settings = settings = config.checkpoint
        self._failed = False
        self._loaded: Checkpoint | None = None  # what the run goes on from
        self._newest: Location | None = None  # this, or what the run has committed since
        self._anomaly = 0
        self._begun = -1  # the step that was saved last, and where, once it is committed
        self._path: Location | None = None
        self._last: CheckpointError | None = None  # of the last step, which is raised after an export
        self._checkpoints = None
        if settings.mode != "off" and settings.interval:  # first, so that no other job saves there any more
            self._checkpoints = Checkpoints(
                config.checkpoint_directory, job.mesh, kind=settings.writer, keep_last=settings.keep_last or None,
                keep_every=settings.keep_every or None, checksum=settings.checksum,
                timeout=timedelta(seconds=config.parallel.timeout),
            )
        try:
            self.source, self.source_dtypes, notes = job.ranks.first(lambda: find_source(config))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self._say(*notes)

    def resume(self, state: TrainingState) -> int:
        """Go on from the source where there is one; the steps that are done.

        Raises ValueError, on all ranks, for a checkpoint that does not fit or is damaged, and for another order of the
        data than the one it was saved in.
        """
        if self.source is None:
            return 0
        try:
            loaded = load(
                self.source, state.tensors(), mesh=self._job.mesh, allow=self._settings.allow,
                allow_at_start=NOT_IMPORTED, seed=self._config.train.seed,
            )
        except ValueError as error:
            raise ValueError(f"{error}{_other_mtp(state.model.config, self.source_dtypes or ())}") from error
        state.optimizer.round_parameters()
        manifest, steps, changed = loaded.manifest, self._config.train.steps, []
        self._loaded, self._newest = Checkpoint(loaded.path, manifest), loaded.path
        self.anomaly((manifest.extra or {}).get("anomaly", 0))
        saved = " x ".join(f"{name} {manifest.layout[name]}" for name in TRAFFIC if name in manifest.layout)
        random = "" if loaded.random_restored else "; random numbers start anew, as the layout is another"
        self._say(f"resuming from {loaded.path}, after step {manifest.step}, saved by {saved}{random}")
        if loaded.allowed and manifest.step:
            self._say(f"differences that are allowed: {len(loaded.allowed)}, the first: {loaded.allowed[0]}")
        for table, settings in dataclasses.asdict(self._config).items():
            was = {} if table in _NOT_COMPARED else saved_settings(manifest.config, table)
            for name, value in settings.items():
                value = list(value) if isinstance(value, tuple) else value
                if was.get(name, value) != value:
                    changed.append(f"{table}.{name} {was[name]!r} -> {value!r}")
        if changed:
            self._say(f"settings that have changed since: {', '.join(changed)}")
        if manifest.step >= steps:
            self._say(f"nothing is left to do: train.steps = {steps}")
        try:
            if manifest.step and (note := state.loader.load_state_dict((manifest.extra or {}).get("loader", {}))):
                self._say(f"WARNING: {note}")
        except ValueError as error:
            if "loader" not in self._settings.allow:
                raise ValueError(f"{loaded.path}: {error}; or name 'loader' in checkpoint.allow") from error
            state.loader.step = manifest.step
            self._say(f"the batches are others, as allowed: {error}")
        if self._checkpoints is not None:
            self._checkpoints.ignore(loaded.damaged)
        return manifest.step

    def is_due(self, step: int) -> bool:
        """Return True if `save` saves after this step."""
        settings, is_last = self._settings, step == self._config.train.steps
        return self._checkpoints is not None and (step % settings.interval == 0 or is_last)

    def save(self, state: TrainingState, step: int, *, now: bool = False) -> Location | None:
        """Save where it is due.

        One checkpoint that cannot be written is said and training goes on; the error of a second in a row is raised. So
        is that of the last, when this is left: all that is wanted of the run besides has been done then.

        now: save in any case, once, and return the path when it is committed; None where the run has no checkpoints.
        Raises CheckpointError where it cannot be written.
        """
        checkpoints, settings = self._checkpoints, self._settings
        if checkpoints is None or not (now or self.is_due(step)):
            return None
        save = checkpoints.save if now or settings.mode == "sync" else checkpoints.save_async

        def write() -> Location | None:
            self._begun, self._path = step, None
            return save(state.tensors(), step=step, plan=state.model.plan, config=describe(self._config, state.model),
                        extra={"loader": state.loader.state_dict(), "anomaly": self._anomaly})

        is_last = step == self._config.train.steps
        self._attempt(checkpoints.wait, is_last=is_last)
        if not now:
            self._attempt(write, is_last=is_last, is_new=True)
        elif self._path is None or self._begun != step:
            self._path = write()
        return self._path if now else None

    def _attempt(self, work: Callable[[], Location | None], *, is_last: bool, is_new: bool = False) -> None:
        """Wait for a checkpoint, or begin a new one; is_last: of the last step, or while that one waits."""
        try:
            if (path := work()) is not None:
                self._failed, self._path, self._newest = False, path, path
        except CheckpointError as error:
            if isinstance(error.__cause__, RankLost):
                raise
            if is_new and is_last:  # nothing is saved after it
                self._last = error
            elif self._failed and not is_last:
                raise
            else:
                self._failed = True
                rest = "" if is_last else "; training goes on, but ends if the next one is not saved either"
                self._say(f"WARNING: {error}{rest}")

    def go_back(self, state: TrainingState) -> int | None:
        """Load the newest checkpoint of this run, or what it began with; the steps that are done then. None where there
        is none. Of the directory it need not be the newest: the run may go on from an older one."""
        if self._checkpoints is not None:
            self._attempt(self._checkpoints.wait, is_last=False)
        if self._newest is None:
            return None
        loaded = load(self._newest, state.tensors(), mesh=self._job.mesh, allow=self._settings.allow,
                      allow_at_start=NOT_IMPORTED, seed=self._config.train.seed)
        state.optimizer.round_parameters()
        return loaded.manifest.step

    def anomaly(self, step: int) -> None:
        """Keep the newest checkpoint of before this step, which may have gone wrong; also after the run goes on."""
        self._anomaly, self._begun = max(step, self._anomaly), -1
        if self._checkpoints is not None:
            self._checkpoints.anomaly(self._anomaly)

    def advice(self, step: int) -> str:
        """Return the advice where the numbers of this step are not finite; "" unless it is the first after a resume."""
        if self._loaded is None or step != self._loaded.manifest.step + 1:
            return ""
        path, sequence = self._loaded.path, self._loaded.manifest.sequence
        older = [each for each in scan(path.parent).committed
                 if each.manifest.step < step - 1 and each.manifest.sequence < sequence and not each.damage()]
        first = f"the first step after {path} is not finite"
        if not older:
            return f"{first}, and there is no other checkpoint of before"
        return f"{first}; checkpoint.resume = {str(older[0].path)!r} goes on from before"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        error = raised[1]
        if self._checkpoints is not None:
            self._checkpoints.__exit__(*raised)
        if self._last is not None:
            if error is None:
                raise self._last
            error.add_note(f"and: {self._last}")
        if error is None and self._checkpoints is not None:
            self._say(f"checkpoints: {self._checkpoints.directory}")

    def _say(self, *lines: str) -> None:
        for line in lines if self._job.rank == 0 else ():
            say(line)


def _other_mtp(model: TrainedModel, names: Iterable[str]) -> str:
    """What to do where the tensors of a checkpoint are of a run that trained layers for multi-token prediction, and
    this one does not, or the other way round; "" elsewhere."""
    if not isinstance(model, HubConfig):
        return ""
    there, announced = model.mtp_depth_of(names), model.mtp_layers or model.carried_layers
    if bool(there) == bool(model.mtp_depth) or there > len(announced):
        return ""
    told = ("has the layers for multi-token prediction, which this run does not train: set mtp.weight above 0"
            if there else "has no layers for multi-token prediction, which this run trains: set mtp.weight = 0, import "
            "it with `dualpipe hf import --mtp`")
    patterns, rest = ", ".join(f"*layers.{layer}.*" for layer in announced), "without" if there else "with new ones"
    return f"\nit {told}, or name them in checkpoint.allow ({patterns}) to go on {rest}"
