"""Saving the whole state of a run, and going on from it: what `[checkpoint]` asks for.

A checkpoint has the parameters and buffers, the optimizer, the loads that the routers go by, the random state of every
rank, and the loader's position; beside them the run's configuration and the model's, so that it can be exported without
the files it was started with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dualpipe.checkpoint import CheckpointError, Checkpoints, Loaded, load, training_state
from dualpipe.checkpoint.native_folder import find
from dualpipe.nn.router_set import RouterSet
from dualpipe.parallel.sharding import dtype_of
from dualpipe.train.data import Loader
from dualpipe.train.job import Job
from dualpipe.train.model import Model
from dualpipe.train.optimizer import Optimizer
from dualpipe.train.tables import Config

# A checkpoint that `dualpipe hf import` made has step 0, and none of these yet.
NOT_IMPORTED = ("optimizer/*", "routers/*")
_LOADER = "loader"  # in checkpoint.allow
_NOT_COMPARED = ("output", "checkpoint", "export", "init")  # tables that do not change what is computed


class State(NamedTuple):
    """What a checkpoint of a run is made of."""

    model: Model
    optimizer: Optimizer
    routers: RouterSet
    loader: Loader

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, sharing memory."""
        return training_state(self.model.stages, self.optimizer) | self.routers.state_tensors()


class Saver:
    """The checkpoints of one run. Collective, as all of its methods; a context manager around the run.

    say: prints a line, of one rank.
    source: the checkpoint, or directory of them, to go on from; None: a new run.
    """

    def __init__(self, config: Config, job: Job, say: Callable[[str], None]) -> None:
        """Raises ValueError, on all ranks, where checkpoints cannot be saved, or there is none whole to go on from."""
        self._config, self._job, self._say = config, job, say
        self._settings = settings = config.checkpoint
        self._failed = False
        self._checkpoints = None
        directory = Path(settings.dir or Path(config.output.dir) / "checkpoints")
        if settings.mode != "off" and settings.interval:  # first, so that no other job saves there any more
            self._checkpoints = Checkpoints(
                directory, job.mesh, kind=settings.writer, keep_last=settings.keep_last or None,
                keep_every=settings.keep_every or None, timeout=timedelta(seconds=config.parallel.timeout),
            )  # fmt: skip
        try:
            self.source, self.source_dtypes = job.first_rank(lambda: _find_source(settings.resume, directory))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def resume(self, state: State) -> int:
        """Go on from the source where there is one; the steps that are done.

        Raises ValueError, on all ranks, for a checkpoint that does not fit or is damaged, and for another order of the
        data than the one it was saved in.
        """
        if self.source is None:
            return 0
        loaded = load(
            self.source, state.tensors(), mesh=self._job.mesh, allow=self._settings.allow, allow_at_start=NOT_IMPORTED,
            seed=self._config.train.seed,
        )  # fmt: skip
        state.optimizer.round_parameters()
        for line in (_origin(loaded), *self._differences(loaded, state)):
            self._say(line)
        if loaded.manifest.step:
            self._resume_loader(loaded, state.loader)
        return loaded.manifest.step

    def save(self, state: State, step: int) -> None:
        """Where it is time to.

        One checkpoint that cannot be written is said and training goes on; the error of a second in a row is raised, as
        is that of the last.
        """
        settings, is_last = self._settings, step == self._config.train.steps
        if self._checkpoints is None or (step % settings.interval and not is_last):
            return
        self._tolerate(self._checkpoints.wait)
        save = self._checkpoints.save if settings.mode == "sync" else self._checkpoints.save_async
        self._tolerate(
            lambda: save(state.tensors(), step=step, plan=state.model.plan, config=describe(self._config, state.model),
                         extra={"loader": state.loader.state_dict()}),
            last=is_last,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if self._checkpoints is not None:
            self._checkpoints.__exit__(kind, error, trace)

    def _tolerate(self, write: Callable[[], Path | None], last: bool = False) -> None:
        try:
            if write() is not None:
                self._failed = False
        except CheckpointError as error:
            if self._failed or last:
                raise
            self._failed = True
            self._say(f"WARNING: no checkpoint was written; training goes on, and ends if the next fails too: {error}")

    def _resume_loader(self, loaded: Loaded, loader: Loader) -> None:
        position = (loaded.manifest.extra or {}).get("loader", {})
        try:
            loader.load_state_dict(position)
        except ValueError as error:
            if not any(fnmatchcase(_LOADER, pattern) for pattern in self._settings.allow):
                raise ValueError(f"{loaded.path}: {error}; or name {_LOADER!r} in checkpoint.allow") from error
            loader.step = loaded.manifest.step
            self._say(f"the batches are others, as allowed: {error}")

    def _differences(self, loaded: Loaded, state: State) -> Iterator[str]:
        """Lines that say in what this run is not the one that was saved."""
        if loaded.allowed and loaded.manifest.step:
            yield f"differences that are allowed: {len(loaded.allowed)}, the first: {loaded.allowed[0]}"
        now = describe(self._config, state.model)
        before = loaded.manifest.config if isinstance(loaded.manifest.config, Mapping) else {}
        if changed := list(_changed(before.get("run"), now["run"])):
            yield f"settings that have changed since: {', '.join(changed)}"


def describe(config: Config, model: Model) -> dict[str, Any]:
    """What a checkpoint says of where it comes from."""
    return {"run": dataclasses.asdict(config), "model": model.config.to_dict()}


def _find_source(resume: str, directory: Path) -> tuple[Path | None, dict[str, torch.dtype]]:
    """What to go on from, and the dtypes that its tensors are to have in an export."""
    if resume == "never":
        return None, {}
    path = directory if resume == "auto" else Path(resume)
    found = find(path)
    if not found.committed:
        if resume == "auto" and not found.damaged:
            return None, {}
        raise ValueError("\n  ".join([f"{path} has no checkpoint that is whole:",
                                      *(found.damaged.values() or ["there is none at all"])]))  # fmt: skip
    return path, {name: dtype_of(of["save"]) for name, of in found.committed[0].manifest.dtypes.items()}


def _origin(loaded: Loaded) -> str:
    layout = loaded.manifest.layout
    saved = " x ".join(f"{name} {layout[name]}" for name in ("pp", "dp", "ep"))
    random = "" if loaded.random_restored else "; random numbers start anew, as the layout is another"
    return f"resuming from {loaded.path}, after step {loaded.manifest.step}, saved by {saved}{random}"


def _changed(before: object, now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for table, fields in now.items():
        was = before.get(table) if isinstance(before, Mapping) else None
        if table in _NOT_COMPARED or not isinstance(was, Mapping):
            continue
        for name, value in fields.items():
            value = list(value) if isinstance(value, tuple) else value
            if name in was and was[name] != value:
                yield f"{table}.{name} {was[name]!r} -> {value!r}"
