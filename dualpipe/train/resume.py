"""Saving the whole state of a run, and going on from it: what `[checkpoint]` asks for.

A checkpoint has the parameters and buffers, the optimizer, the loads that the routers go by, the random state of every
rank, and the loader's position; beside them the run's configuration and the model's, so that it can be exported without
the files it was started with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from dualpipe.checkpoint import Checkpoints, Loaded, latest, load, training_state
from dualpipe.nn.router_set import RouterSet
from dualpipe.train.data import Loader
from dualpipe.train.job import Job
from dualpipe.train.model import Model
from dualpipe.train.optimizer import Optimizer
from dualpipe.train.tables import Config

# A checkpoint that `dualpipe hf import` made has step 0, and none of these yet.
NOT_IMPORTED = ("optimizer/*", "routers/*")


class Saver:
    """The checkpoints of one run. Collective, as all of its methods; a context manager around the training."""

    def __init__(
        self, config: Config, job: Job, model: Model, optimizer: Optimizer, routers: RouterSet, loader: Loader
    ) -> None:
        self._config, self._job, self._model = config, job, model
        self._optimizer, self._routers, self._loader = optimizer, routers, loader
        self._settings = settings = config.checkpoint
        self.directory = Path(settings.dir or Path(config.output.dir) / "checkpoints")
        self._checkpoints = None
        if settings.mode != "off" and settings.interval:
            self._checkpoints = Checkpoints(
                self.directory, job.mesh, kind=settings.writer, keep_last=settings.keep_last or None,
                keep_every=settings.keep_every or None, timeout=timedelta(seconds=config.parallel.timeout),
            )  # fmt: skip

    def resume(self, say: Callable[[str], None]) -> int:
        """Go on from a checkpoint where there is one; the steps that are done.

        Raises ValueError, on all ranks, for a checkpoint that does not fit or is damaged, and for another order of the
        data than the one it was saved in.
        """
        path = self._source()
        if path is None:
            return 0
        loaded = load(
            path, self._state(), mesh=self._job.mesh, allow=self._settings.allow, allow_at_start=NOT_IMPORTED,
            seed=self._config.train.seed,
        )  # fmt: skip
        self._optimizer.round_parameters()
        if loaded.manifest.step:
            self._loader.load_state_dict(loaded.manifest.extra["loader"])
        self._say(say, loaded)
        return loaded.manifest.step

    def save(self, step: int) -> None:
        """Where it is time to."""
        settings = self._settings
        if self._checkpoints is None or (step % settings.interval and step != self._config.train.steps):
            return
        save = self._checkpoints.save if settings.mode == "sync" else self._checkpoints.save_async
        save(self._state(), step=step, plan=self._model.plan, config=describe(self._config, self._model),
             extra={"loader": self._loader.state_dict()})  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if self._checkpoints is not None:
            self._checkpoints.__exit__(kind, error, trace)

    def _source(self) -> str | Path | None:
        resume = self._settings.resume
        if resume == "never":
            return None
        if resume != "auto":
            return resume
        return self.directory if self._job.first_rank(lambda: latest(self.directory) is not None) else None

    def _state(self) -> dict[str, Tensor]:
        return training_state(self._model.stages, self._optimizer) | self._routers.state_tensors()

    def _say(self, say: Callable[[str], None], loaded: Loaded) -> None:
        layout = loaded.manifest.layout
        saved = " x ".join(f"{name} {layout[name]}" for name in ("pp", "dp", "ep"))
        random = "" if loaded.random_restored else "; random numbers start anew, as the layout is another"
        say(f"resuming from {loaded.path}, after step {loaded.manifest.step}, saved by {saved}{random}")


def describe(config: Config, model: Model) -> dict[str, Any]:
    """What a checkpoint says of where it comes from."""
    return {"run": dataclasses.asdict(config), "model": model.config.to_dict()}
