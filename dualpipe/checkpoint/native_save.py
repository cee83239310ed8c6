"""Saving checkpoints of a run: at once, or in the background while training goes on.

    with Checkpoints("run/checkpoints", mesh, keep_last=3) as checkpoints:
        ...
        checkpoints.save_async(training_state(stages, optimizer), step=step, plan=plan, extra={"loader": ...})

Every rank calls the same methods in the same order. What fails on one rank raises on all; a rank that died is noticed
by the others when their connection to it breaks, or after `timeout`. See `native_folder` for what is on disk, and
`native_state` for what is in it.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh

import dualpipe
from dualpipe.checkpoint.native_commit import Directory
from dualpipe.checkpoint.native_folder import Manifest
from dualpipe.checkpoint.native_optimizer import as_number
from dualpipe.checkpoint.native_random import capture
from dualpipe.checkpoint.native_read import stored_dtype
from dualpipe.checkpoint.native_staging import HostMemory, Place
from dualpipe.checkpoint.native_state import Part, State, parts_of
from dualpipe.checkpoint.native_store import (
    FileInfo,
    Written,
    global_plan,
    hashed_file,
    local_plan,
    write_description,
    write_parts,
)
from dualpipe.checkpoint.native_writer import WriterProcess
from dualpipe.dtypes import short_name
from dualpipe.errors import raise_for
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import DIMENSIONS
from dualpipe.ranks import RankSync

Write = Callable[[Path, SavePlan], Written]


class CheckpointError(OSError):
    """A checkpoint was not saved; those that were committed before are as they were."""


class Checkpoints:
    """Saves into one directory, and holds what is in flight.

    kind: what writes in the background. Both block training for the copy to host memory (15 ms for 200 MB on a CPU).
        "thread" needs nothing more, but takes turns with training in one interpreter: beside a loop of pure Python it
        needs 5.7 s for 200 MB. "process" needs 1.2 s, and another process with torch in it on every rank (some 400 MB,
        most of it shared by the ranks of a machine; seconds to start, while the first save is in flight).
    keep_last, keep_every: which checkpoints stay: the last so many, and those of steps that are multiples. None: all.
    timeout: after which a rank that waits for another gives up; longer than a save takes.
    """

    def __init__(
        self, directory: str | PathLike[str], mesh: DeviceMesh | None = None, *,
        kind: Literal["thread", "process"] = "thread", keep_last: int | None = None, keep_every: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Collective over `mesh` (from `build_mesh`; None: this process alone); in the main thread.

        Raises ValueError on all ranks for a directory that cannot be written to, or that another job saves to.
        """
        if kind not in ("thread", "process"):
            raise ValueError(f"checkpoints are written by a 'thread' or a 'process'; got {kind!r}")
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be at least 1, or None to keep all; got {number}")
        self.directory = Path(directory).absolute()
        self._kind, self._timeout, self._planned = kind, timeout.total_seconds(), None
        self._layout = layout_of(mesh)
        # Which ranks have the same stages, only "pp" tells. Without it, all that have a tensor must have the same.
        is_named = "pp" in ((mesh and mesh.mesh_dim_names) or ())
        self._stages = mesh["pp"].get_local_rank() if is_named else 0 if mesh is None else mesh.get_rank()
        # The background talks while training does, so never in a group of training's; gloo, as it sends no tensors.
        self._group = None if self._layout["world"] == 1 else dist.new_group(backend="gloo", timeout=timeout)
        self._ranks = RankSync.of_mesh(mesh, self._group)
        self._memory, self._process = HostMemory(shared=kind == "process"), None
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._pending_step = 0
        self._is_open, self._target = True, None
        try:
            self._target = self._ranks.agree(
                lambda: Directory(self.directory, keep_last, keep_every) if self._ranks.rank == 0 else None
            )
        except BaseException:
            self.close()
            raise

    # -- saving

    def save(self, state: State, *, step: int, plan: DTypePlan | None = None, config: Any = None,
             extra: Any = None) -> Path:
        """Write a checkpoint and return its path, on the disk and committed.

        state: this rank's tensors by name, from `training_state`; what several ranks hold is written once.
        step: the number of optimizer steps behind it. An earlier checkpoint of the same step is replaced.
        plan: recorded; what it saves in float32 is checked to be stored so.
        config, extra: of rank 0, anything that JSON can hold: the run's configuration; scheduler, loader position.

        Raises on all ranks: ValueError for arguments; CheckpointError where it could not be written, or for an earlier
        one that failed in the background.
        """
        self._settle()

        def prepare() -> tuple[dict[str, Part], _Job]:
            return parts_of(state), _job(step, plan, config, extra)

        with self._reported(step):
            parts, job = self._agreed(step, prepare)
            return self._write(job, parts, lambda folder, planned: write_parts(folder, planned, parts))

    def save_async(self, state: State, *, step: int, plan: DTypePlan | None = None, config: Any = None,
                   extra: Any = None) -> None:
        """As `save`, but return as soon as the tensors are copied to host memory: they may change then.

        Waits for the save before it, if that is still being written, and raises what has failed there; then nothing is
        saved by this call, as with `save`: call it again, or `wait` first. Call it in a thread that lives as long as
        this object: the system ends a writer process together with the thread that has started it.
        """
        self._settle()

        def prepare() -> tuple[dict[str, Place], _Job]:
            places = self._memory.copy(parts_of(state))
            if self._kind == "process" and (self._process is None or not self._process.alive):
                self._process = WriterProcess(0.8 * self._timeout)  # before the others give this rank up
            return places, _job(step, plan, config, extra)

        with self._reported(step):
            places, job = self._agreed(step, prepare)
        self._pending_step = step
        self._pending = self._executor.submit(self._write_copy, job, places)

    def wait(self) -> Path | None:
        """Wait until nothing is in flight; the path of what was, None where nothing was.

        Raises on all ranks what `save` would have; once, so that a run may go on and save again.
        """
        if self._pending is None:
            return None
        wait_for([self._pending])  # an interrupt leaves it pending: its memory and its directory are still in use
        pending, self._pending = self._pending, None
        with self._reported(self._pending_step):
            return pending.result()

    def close(self) -> None:
        """Wait, then give everything back: call it at the end of the run. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._process is not None:
                self._process.close()
            self._memory.close()
            if self._target is not None:
                self._target.close()
            if self._group is not None:
                dist.destroy_process_group(self._group)
            self._process = self._target = self._group = None
            self._is_open = False

    def ignore(self, damaged: Iterable[Path]) -> None:
        """Do not count these checkpoints, such as `Loaded.damaged`, among the last that are kept."""
        if self._target is not None:
            self._target.ignore(damaged)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and: {failure}")

    # -- on every rank

    def _settle(self) -> None:
        """Nothing is in flight afterwards."""
        if not self._is_open:
            raise ValueError("these checkpoints are closed; make new ones to save more")
        self.wait()
        self._executor.submit(int).result()  # an interrupt may have hidden one from `wait`

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            what = f"the checkpoint of step {step} was not saved to {self.directory}"
            raise CheckpointError(f"{what}: {error}") from error

    def _agreed(self, step: int, prepare: Callable[[], Any]) -> Any:
        """What `prepare` gives here, once it has worked on all ranks, with the same step."""
        prepared: list[Any] = []
        steps = set(self._ranks.gather(lambda: (prepared.append(prepare()), step)[1]))
        if len(steps) > 1:
            raise ValueError(f"all ranks must save the same step; got {sorted(steps)}")
        return prepared[0]

    def _write_copy(self, job: _Job, places: dict[str, Place]) -> Path:
        parts = self._memory.parts(places)

        def write(folder: Path, planned: SavePlan) -> Written:
            if self._process is not None:
                return self._process.write(folder, planned, self._memory, places)
            return write_parts(folder, planned, parts)

        return self._write(job, parts, write)

    def _write(self, job: _Job, parts: Mapping[str, Part], write: Write) -> Path:
        """Plan together, write apart, and have rank 0 commit when all have written."""
        ranks = self._ranks
        folder = ranks.first(lambda: self._target.begin(job.step))
        try:
            planned, metadata = self._plan(folder, parts)

            def work() -> Written:
                written = write(folder, planned)
                raise_for("what the dtype plan saves in float32 must be stored so:",
                          _narrowed(folder, written.results, job.dtypes))
                name = f"rank-{ranks.rank:05}.json"
                with hashed_file(folder / name, written.files) as out:
                    out.write(json.dumps({"random": job.random}).encode())
                return written

            written = ranks.agree(work)
            names = {item.index.fqn for item in planned.items}
            dtypes = {name: dtypes for name, dtypes in job.dtypes.items() if name in names}
            all_written = ranks.collect((written, dtypes))
            return ranks.first(lambda: self._finish(folder, job, metadata, all_written))
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _plan(self, folder: Path, parts: Mapping[str, Part]) -> tuple[SavePlan, Metadata | None]:
        """What this rank writes; on rank 0 also what all do. As for the save before, where all have the same parts."""
        had = {name: (part.shape, part.offsets, part.tensor.shape, part.tensor.dtype) for name, part in parts.items()}
        if not all(self._ranks.gather(lambda: self._planned is not None and self._planned.had == had)):
            plans = self._ranks.collect(self._ranks.agree(lambda: local_plan(parts, self._stages)))
            planned, metadata = self._ranks.agree(
                lambda: global_plan(folder, plans) if plans is not None else (None, None)
            )
            self._planned = _Planned(had, self._ranks.hand_out(planned), metadata)
        return self._planned.own, self._planned.all

    # -- rank 0 alone

    def _finish(
        self, folder: Path, job: _Job, metadata: Metadata, written: list[tuple[Written, dict[str, Any]]]
    ) -> Path:
        files: dict[str, FileInfo] = {}
        dtypes: dict[str, dict[str, str]] = {}
        for rank_written, rank_dtypes in written:
            files |= rank_written.files
            dtypes |= rank_dtypes
        files |= write_description(folder, metadata, [rank_written.results for rank_written, _ in written])
        return self._target.commit(folder, Manifest(
            step=job.step, sequence=0, saved_at=datetime.now(UTC).isoformat(timespec="seconds"), layout=self._layout,
            versions=_versions(), dtypes=dtypes, config=job.config, extra=job.extra, files=dict(sorted(files.items())),
        ))


def save(directory: str | PathLike[str], state: State, *, step: int, mesh: DeviceMesh | None = None,
         plan: DTypePlan | None = None, config: Any = None, extra: Any = None) -> Path:
    """Write one checkpoint into a directory, as `Checkpoints.save` does."""
    with Checkpoints(directory, mesh) as checkpoints:
        return checkpoints.save(state, step=step, plan=plan, config=config, extra=extra)


def layout_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Sizes by name: "world", "pp", "dp", "ep", and those of other dimensions that a mesh of one's own has."""
    own = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    return {"world": 1 if mesh is None else mesh.size(), **dict.fromkeys(DIMENSIONS, 1), **own}


class _Planned(NamedTuple):
    had: dict[str, tuple[Any, ...]]  # of each part what the plan depends on
    own: SavePlan
    all: Metadata | None  # on rank 0


@dataclass(frozen=True)
class _Job:
    """What a checkpoint holds beside tensors, as it was when saving began."""

    step: int
    random: dict[str, Any]
    dtypes: dict[str, dict[str, str]]
    config: Any
    extra: Any


def _job(step: int, plan: DTypePlan | None, config: Any, extra: Any) -> _Job:
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a number of optimizer steps, 0 or more; got {step!r}")
    dtypes = {} if plan is None else {
        name: {use: short_name(getattr(of, use)) for use in ("storage", "compute", "save")}
        for name, of in plan.tensors.items()
    }
    return _Job(step, capture(), dtypes, _as_json("config", config), _as_json("extra", extra))


def _as_json(what: str, value: Any) -> Any:
    """A copy of its own, as it will be read."""
    try:
        return json.loads(json.dumps(value, default=as_number))
    except TypeError as error:
        raise ValueError(f"{what} must be what JSON can hold, as numbers, texts, lists and dicts: {error}") from None


def _narrowed(folder: Path, results: list[WriteResult], dtypes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """What a rank has written in less than the plan asks for, by the headers on the disk."""
    for name, place in ((result.index.fqn, result.storage_data) for result in results):
        if dtypes.get(name, {}).get("save") == "fp32":
            dtype = stored_dtype(folder / place.relative_path, place.offset, place.length)
            if torch.promote_types(dtype, torch.float32) != dtype:
                yield f"{name} is stored in {short_name(dtype)}"


def _versions() -> dict[str, str]:
    return {"dualpipe": dualpipe.__version__, "torch": torch.__version__, "python": platform.python_version()}
