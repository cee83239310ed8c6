"""Checkpoints of a run: their content, the one to begin with, when they are saved, resuming, and rolling back.

A checkpoint holds the parameters and buffers, the optimizer, the expert loads that the routers use, the random state of
every rank, and the position of the loader. With them it holds the configurations of the run and of the model, so that
it can be exported without the files that the run was started with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dualpipe.checkpoint import CheckpointError, Checkpoints, Loaded, load, training_state
from dualpipe.checkpoint.directory import AllDamaged, FoundCheckpoints, find, raise_none_complete, scan
from dualpipe.checkpoint.hub.files import checksum
from dualpipe.checkpoint.manifest import Manifest
from dualpipe.checkpoint.optimizer_state import ParameterState
from dualpipe.checkpoint.state import OPTIMIZER
from dualpipe.models import HubConfig
from dualpipe.nn.lora import has_adapters
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel.mesh import TRAFFIC
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import restart_count
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.storage import Location, as_location, contains, resolve
from dualpipe.train.config.fit import Resolved, SavedBatch, keep_batch
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config
from dualpipe.train.data.loader import Loader
from dualpipe.train.launch.join import Job
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import Model

# Tensors that a checkpoint of `dualpipe hf import`, which has step 0, does not contain.
_NOT_IMPORTED = ("optimizer/*", "routers/*")
_NOT_COMPARED = ("output", "metrics", "checkpoint", "export", "init")  # tables that do not affect the computation
# Ends the error of a run whose checkpoints are all damaged.
_START_ANEW = (
    '\ncheckpoint.resume = "never" starts from the initial weights; a path there resumes from another checkpoint')

# -- the content of a checkpoint


class FrozenBase(NamedTuple):
    """The frozen base of adapters, which the checkpoints of a run do not hold; empty if the run trains all weights.

    path: init.from_hf. checksum: of its files.
    """

    path: str = ""
    checksum: str = ""

    @staticmethod
    def find(config: Config, ranks: RankSync) -> FrozenBase:
        """Return the base of a run. Collective: the ranks share the reading of its files."""
        if not config.lora.is_enabled:
            return FrozenBase()
        folder = config.init.from_hf
        seed = f"random weights of train.seed = {config.train.seed}"
        return FrozenBase(folder, checksum(folder, ranks) if folder else seed)

    def to_record(self) -> dict[str, str]:
        """Return the base for a manifest; {} if there is none."""
        return self._asdict() if self.checksum else {}

    def check(self, path: object, manifest: Manifest) -> None:
        """Raise ValueError if the adapters of the checkpoint at `path` were trained on another base."""
        recorded = FrozenBase(**((manifest.extra or {}).get("base") or {}))
        if recorded.checksum != self.checksum:
            raise ValueError(f"{path} has adapters of {recorded}, but init.from_hf has {self}; give the base that they "
                             "were trained on")

    def __str__(self) -> str:
        return f"the base {self.path!r} ({self.checksum})" if self.checksum else "no frozen base"


class TrainingState(NamedTuple):
    """The objects of a run whose state a checkpoint holds."""

    model: Model
    optimizer: Optimizer
    routers: RouterSet
    loader: Loader
    base: FrozenBase

    def tensors(self) -> Mapping[str, Tensor | ParameterState]:
        """Return the tensors of model, optimizer and routers by name, sharing memory."""
        return model_tensors(self.model, self.optimizer) | self.routers.state_tensors()


def model_tensors(model: Model, optimizer: Optimizer) -> dict[str, Tensor | ParameterState]:
    """Return the tensors of a rank's stages and of their optimizer, by names that are the same in every layout.

    Of a model with adapters, the adapters alone: everything else is that of init.from_hf. In a model of transformers
    with a tied embedding, a rank with the last stage but not the first holds the embedding
    as its head only. The tensor is named after the embedding, as on the rank of the first stage.
    """
    tensors = training_state(model.stages, optimizer)
    if has_adapters(model.stages):
        trained = {name for stage in model.stages for name, param in stage.named_parameters() if param.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained or name.startswith(OPTIMIZER)}
    if isinstance(model.config, HubConfig) or not model.config.is_tied:
        return tensors
    embedding = f"{model.config.name_prefix}embed_tokens.weight"
    return {name.replace("lm_head.weight", embedding): tensor for name, tensor in tensors.items()}


def describe(config: Config, model: Model) -> dict[str, Any]:
    """Return the description of a checkpoint's origin: the configuration of the run and of the model, as JSON."""
    return {"run": dataclasses.asdict(config), "model": model.config.to_dict()}


# -- the checkpoint that a run begins with


class ResumeSource(NamedTuple):
    """The checkpoint that a run resumes from.

    path: a checkpoint or a directory of checkpoints, local or remote. None: the run starts from its initial weights.
    compute_dtypes: compute dtypes of the run that saved it, by tensor name. None: a new run.
    note: line to print, or "".
    batch: global batch of the run that saved it. None: a new run, or no run saved it (it was imported).
    has_adapters: it holds the adapters of [lora] alone.
    """

    path: Location | None
    compute_dtypes: dict[str, torch.dtype] | None
    note: str
    batch: SavedBatch | None = None
    has_adapters: bool = False


def find_source(config: Config) -> ResumeSource:
    """Find the checkpoint that a run resumes from.

    A run that began with a checkpoint of another run resumes from its own checkpoints once it has saved one, so that
    the same command resumes a job that was killed. If checkpoint.resume is "never" or a checkpoint of the run itself,
    it applies only to the first start of the job; restarts resume from the newest checkpoint.

    Raises:
        ValueError: the checkpoint directory has no complete checkpoint although one is needed, or it belongs to
            a run that did not begin with `checkpoint.resume`.
    """
    resume = config.checkpoint.resume
    directory = config.checkpoint_directory
    is_restart = bool(restart_count())
    new_run = ResumeSource(None, None, "")
    if resume == "never" and not is_restart:
        return new_run
    existing = find(directory)
    has_checkpoints = bool(existing.committed or existing.damaged)
    newest_config = existing.committed[0].manifest.config if existing.committed else None
    began_with = _saved_settings(newest_config, "checkpoint").get("resume")
    if is_restart and began_with == resume:
        return _select_newest(directory, existing)  # `resume` was for the first start, which has saved since
    if resume == "never":
        return new_run
    if resume == "auto":
        return _select_newest(directory, existing) if has_checkpoints else new_run
    target = as_location(resume)
    if contains(directory, target) or not has_checkpoints:
        return _select_newest(target, find(target))
    if existing.committed and not (isinstance(began_with, str) and resolve(as_location(began_with)) == resolve(target)):
        raise ValueError(f"{directory} has checkpoints of a run that did not begin with checkpoint.resume = "
                         f'{resume!r}; give another output.dir, or checkpoint.resume = "auto" to resume from there')
    note = f"this run began with checkpoint.resume = {resume!r}; it resumes from its own checkpoints"
    return _select_newest(directory, existing, note)


def _select_newest(path: Location, checkpoints: FoundCheckpoints, note: str = "") -> ResumeSource:
    """Return the newest of the checkpoints at `path` as the source. Raises ValueError if none is complete."""
    if not checkpoints.committed:
        try:
            raise_none_complete(path, checkpoints.damaged.values())
        except ValueError as error:
            hint = _START_ANEW if isinstance(error, AllDamaged) else ""
            raise ValueError(f"checkpoint.resume: {error}{hint}") from error
    manifest = checkpoints.committed[0].manifest
    has_adapters = bool((manifest.extra or {}).get("base"))
    return ResumeSource(path, recorded_dtypes(manifest), note, _saved_batch(path, manifest), has_adapters)


def recorded_dtypes(manifest: Manifest) -> dict[str, torch.dtype]:
    """Return the dtypes that the tensors of a checkpoint were computed in, by name."""
    return {name: dtype_of(uses["compute"]) for name, uses in manifest.dtypes.items()}


def _saved_batch(path: Location, manifest: Manifest) -> SavedBatch | None:
    """Return the global batch of the run that saved a checkpoint; None if no run saved it."""
    train = _saved_settings(manifest.config, "train")
    parallel = _saved_settings(manifest.config, "parallel")
    try:
        pipelines = parallel["dp"] * parallel["ep"]
        return SavedBatch(train["micro_batch_size"] * train["num_chunks"] * pipelines, pipelines, path)
    except (KeyError, TypeError):
        return None


def _saved_settings(manifest_config: Any, table: str) -> Mapping[str, Any]:
    """Return a table of the run's configuration from the `config` of a manifest; empty if no run saved it."""
    settings = manifest_config
    for name in ("run", table):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings if isinstance(settings, Mapping) else {}


# -- saving, resuming and rolling back


class Saver:
    """The checkpoints of a run. A context manager around the run. All methods are collective.

    Attributes:
        source: the checkpoint, or directory of checkpoints, to resume from. None: a new run.
        source_dtypes: dtypes that its tensors were computed in, by name. None: a new run.

    Args:
        config: the configuration of the run; before it is resolved, if `keep_batch` is called.
        job: the job of this rank.

    Raises:
        ValueError: on all ranks, if checkpoints cannot be saved, or there is none to resume from.
    """

    def __init__(self, config: Config, job: Job) -> None:
        self._config = config
        self._job = job
        self._settings = settings = config.checkpoint
        self._loaded: Loaded | None = None  # the checkpoint that the run resumed from
        self._newest: Location | None = None  # that one, or the newest that the run has committed since
        self._saved_step = -1  # the last step whose save began
        self._saved_path: Location | None = None  # its path once it is committed
        self._has_failed = False  # the last save failed
        self._last_error: CheckpointError | None = None  # of the last step: raised at the end, after an export
        self._anomaly = 0  # last step that may be wrong
        self._checkpoints = None
        if settings.mode != "off" and settings.interval:  # locked first, so that no other job saves there
            self._checkpoints = Checkpoints(
                config.checkpoint_directory, job.mesh, kind=settings.writer, keep_last=settings.keep_last or None,
                keep_every=settings.keep_every or None, checksum=settings.checksum,
                timeout=timedelta(seconds=config.parallel.timeout),
            )
        try:
            source = job.ranks.first(lambda: find_source(config))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self.source = source.path
        self.source_dtypes = source.compute_dtypes
        self._source_has_adapters = source.has_adapters
        self._saved_batch = source.batch
        if source.note:
            self._say(source.note)

    # -- resuming

    def keep_batch(self, resolved: Resolved) -> Resolved:
        """Return `resolved` with the global batch of the checkpoint to resume from, and save with it from now on.

        `resolved` stays as it is if the configuration of the run sets parallel.dp or train.batch_size.

        Raises ValueError as `fit.keep_batch` does.
        """
        if not self._config.parallel.dp and not self._config.train.batch_size:
            resolved, note = keep_batch(resolved, self._saved_batch)
            if note:
                self._say(note)
        self._config = resolved.config
        return resolved

    def resume(self, state: TrainingState) -> int:
        """Load the source into `state`, and return the number of completed steps: 0 for a new run.

        Prints the checkpoint and the settings that have changed.

        Raises:
            ValueError: on all ranks, if the checkpoint is damaged or does not fit, or the order of the data differs.
        """
        if self.source is None:
            return 0
        try:
            loaded = self._load(self.source, state)
        except ValueError as error:
            hint = _mtp_hint(state.model.config, self.source_dtypes or ())
            hint += self._lora_hint()
            if isinstance(error, AllDamaged):
                hint = _START_ANEW
            raise ValueError(f"{error}{hint}") from error
        manifest = loaded.manifest
        state.base.check(loaded.path, manifest)
        self._loaded = loaded
        self._newest = loaded.path
        self.mark_anomaly((manifest.extra or {}).get("anomaly", 0))
        self._say(*self._describe_resume(loaded))
        self._resume_loader(state, loaded)
        if self._checkpoints is not None:
            self._checkpoints.ignore(loaded.damaged)
        return manifest.step

    def _lora_hint(self) -> str:
        """Return a hint if exactly one of checkpoint and run has adapters, else ""."""
        if self._source_has_adapters == self._config.lora.is_enabled:
            return ""
        if self._source_has_adapters:
            return "\nit has the adapters of a run with [lora] alone; give the settings of [lora] to resume that run"
        return ("\nit has all weights, and a run with [lora] resumes from adapters; export the checkpoint by `dualpipe "
                "hf export`, and give the result as init.from_hf")

    def _load(self, path: Location, state: TrainingState) -> Loaded:
        """Load a checkpoint into `state`."""
        loaded = load(path, state.tensors(), mesh=self._job.mesh, allow=self._settings.allow,
                      allow_at_start=_NOT_IMPORTED, seed=self._config.train.seed)
        state.optimizer.round_parameters()
        return loaded

    def _describe_resume(self, loaded: Loaded) -> list[str]:
        """Return lines about a loaded checkpoint and its differences from the run."""
        manifest = loaded.manifest
        layout = " x ".join(f"{name} {manifest.layout[name]}" for name in TRAFFIC if name in manifest.layout)
        random = "" if loaded.random_restored else "; random states are drawn anew, because the layout differs"
        lines = [f"resuming from {loaded.path}, after step {manifest.step}, saved by {layout}{random}"]
        if loaded.allowed and manifest.step:
            lines.append(f"differences that are allowed: {len(loaded.allowed)}, the first: {loaded.allowed[0]}")
        changes = self._changed_settings(manifest)
        if changes:
            lines.append(f"settings that have changed since: {', '.join(changes)}")
        total_steps = self._config.train.steps
        if manifest.step >= total_steps:
            lines.append(f"nothing is left to do: train.steps = {total_steps}")
        return lines

    def _changed_settings(self, manifest: Manifest) -> list[str]:
        """Return texts such as "optimizer.lr 0.1 -> 0.2" for settings that differ from those in a manifest."""
        changes = []
        for table, settings in dataclasses.asdict(self._config).items():
            saved = {} if table in _NOT_COMPARED else _saved_settings(manifest.config, table)
            for name, value in settings.items():
                value = list(value) if isinstance(value, tuple) else value  # as JSON
                if saved.get(name, value) != value:
                    changes.append(f"{table}.{name} {saved[name]!r} -> {value!r}")
        return changes

    def _resume_loader(self, state: TrainingState, loaded: Loaded) -> None:
        """Continue at the loader's saved position.

        Raises:
            ValueError: data, sizes or seed differ, and checkpoint.allow does not contain "loader".
        """
        manifest = loaded.manifest
        if not manifest.step:
            return
        try:
            note = state.loader.load_state_dict((manifest.extra or {}).get("loader", {}))
        except ValueError as error:
            if "loader" not in self._settings.allow:
                raise ValueError(f"{loaded.path}: {error}; or name 'loader' in checkpoint.allow") from error
            state.loader.step = manifest.step
            self._say(f"batches differ from those of the saved run, as checkpoint.allow permits: {error}")
            return
        if note:
            self._say(f"WARNING: {note}")

    # -- saving

    def is_due(self, step: int) -> bool:
        """Return True if `save` saves after this step."""
        is_last = step == self._config.train.steps
        return self._checkpoints is not None and (step % self._settings.interval == 0 or is_last)

    def save(self, state: TrainingState, step: int) -> None:
        """Save if it is due after this step.

        A checkpoint that cannot be written gives a warning, and training continues. The error of a second one in a row
        is raised. For the last step's checkpoint, the error is raised when the context is left, after an export.

        Args:
            state: the state to save.
            step: number of completed steps.

        Raises:
            CheckpointError: as above.
        """
        checkpoints = self._checkpoints
        if checkpoints is None or not self.is_due(step):
            return
        is_last = step == self._config.train.steps
        save = checkpoints.save if self._settings.mode == "sync" else checkpoints.save_async
        self._attempt(checkpoints.wait, is_last=is_last)
        self._attempt(partial(self._write, save, state, step), is_last=is_last, is_new=True)

    def save_now(self, state: TrainingState, step: int) -> Location | None:
        """Save unless this step is saved already, and wait until it is committed.

        Args:
            state: the state to save.
            step: number of completed steps.

        Returns:
            The path, or None if the run saves no checkpoints.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            return None
        self._attempt(checkpoints.wait, is_last=step == self._config.train.steps)
        if self._saved_path is None or self._saved_step != step:
            self._saved_path = self._write(checkpoints.save, state, step)
        return self._saved_path

    def _write(self, save: Callable[..., Location | None], state: TrainingState, step: int) -> Location | None:
        """Call a method of `Checkpoints` that saves the state after this step, and return its result."""
        self._saved_step = step
        self._saved_path = None
        extra = {"loader": state.loader.state_dict(), "anomaly": self._anomaly, "base": state.base.to_record()}
        return save(state.tensors(), step=step, plan=state.model.plan, config=describe(self._config, state.model),
                    extra=extra)

    def path_of(self, step: int) -> Location | None:
        """Return the checkpoint of this step, once it is committed; None if the run has none. Collective."""
        if self._loaded is not None and self._saved_step != step and self._loaded.manifest.step == step:
            return self._loaded.path
        if self._checkpoints is None or self._saved_step != step:
            return None
        self._attempt(self._checkpoints.wait, is_last=True, is_new=True)
        return self._saved_path

    def _attempt(self, work: Callable[[], Location | None], *, is_last: bool, is_new: bool = False) -> None:
        """Call `work`, and keep or raise its CheckpointError as `save` describes.

        Args:
            work: begins a save or waits for one; returns a path if it is committed.
            is_last: the run has done its last step.
            is_new: `work` begins a save, or waits for one that no save follows.
        """
        try:
            path = work()
        except CheckpointError as error:
            if isinstance(error.__cause__, RankLost):
                raise
            if is_new and is_last:  # there is no later save
                self._last_error = error
                return
            if self._has_failed and not is_last:
                raise
            self._has_failed = True
            consequence = "" if is_last else "; training goes on, but ends if the next one is not saved either"
            self._say(f"WARNING: {error}{consequence}")
            return
        if path is not None:
            self._has_failed = False
            self._saved_path = path
            self._newest = path

    # -- bad steps

    def roll_back(self, state: TrainingState) -> int | None:
        """Load the newest checkpoint of this run, or the one it resumed from; return its number of completed steps.

        It need not be the newest in the directory, if the run resumed from an older one. Returns None if there is no
        checkpoint.
        """
        if self._checkpoints is not None:
            self._attempt(self._checkpoints.wait, is_last=False)
        if self._newest is None:
            return None
        return self._load(self._newest, state).manifest.step

    def mark_anomaly(self, step: int) -> None:
        """Keep the newest checkpoint before a step that may be wrong, also after the run is resumed."""
        self._anomaly = max(step, self._anomaly)
        self._saved_step = -1
        if self._checkpoints is not None:
            self._checkpoints.keep_before_anomaly(self._anomaly)

    def suggest_older_checkpoint(self, step: int) -> str:
        """Return a hint for a non-finite step if it is the first after resuming, else ""."""
        if self._loaded is None or step != self._loaded.manifest.step + 1:
            return ""
        path = self._loaded.path
        sequence = self._loaded.manifest.sequence
        older = [checkpoint for checkpoint in scan(path.parent).committed
                 if checkpoint.manifest.step < step - 1 and checkpoint.manifest.sequence < sequence
                 and not checkpoint.find_damage()]
        problem = f"the first step after {path} is not finite"
        if not older:
            return f"{problem}, and there is no earlier checkpoint"
        return f"{problem}; checkpoint.resume = {str(older[0].path)!r} resumes from an earlier one"

    # -- the context

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        error = raised[1]
        if self._checkpoints is not None:
            self._checkpoints.__exit__(*raised)
        if self._last_error is not None:
            if error is None:
                raise self._last_error
            error.add_note(f"and: {self._last_error}")
        if error is None and self._checkpoints is not None:
            self._say(f"checkpoints: {self._checkpoints.directory}")

    def _say(self, *lines: str) -> None:
        """Print lines on rank 0."""
        if self._job.rank == 0:
            for line in lines:
                say(line)


def _mtp_hint(model: TrainedModel, names: Iterable[str]) -> str:
    """Return a hint if exactly one of checkpoint and run has layers for multi-token prediction, else "".

    Args:
        model: the model of the run.
        names: of the tensors in the checkpoint.
    """
    if not isinstance(model, HubConfig):
        return ""
    saved_depth = model.mtp_depth_of(names)
    layers = model.mtp_layers or model.carried_layers
    if bool(saved_depth) == bool(model.mtp_depth) or saved_depth > len(layers):
        return ""
    patterns = ", ".join(f"*layers.{layer}.*" for layer in layers)
    if saved_depth:
        return ("\nit has the layers for multi-token prediction, which this run does not train: set mtp.weight above "
                f"0, or name them in checkpoint.allow ({patterns}) to resume without them")
    return ("\nit has no layers for multi-token prediction, which this run trains: set mtp.weight = 0, import it with "
            f"`dualpipe hf import --mtp`, or name them in checkpoint.allow ({patterns}) to resume with new ones")
