"""Saving checkpoints of a run: at once, or in the background while training goes on.

    with Checkpoints("run/checkpoints", mesh, keep_last=3) as checkpoints:
        ...
        checkpoints.save_async(training_state(stages, optimizer), step=step, plan=plan, extra={"loader": ...})

Every rank calls the same methods in the same order. What fails on one rank raises on all; a rank that died is noticed
by the others when their connection to it breaks, or after `timeout`. See `directory` for what is on disk, and `state`
for what is in it.
"""

from __future__ import annotations

import json
import platform
import shutil
import signal
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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dualpipe
from dualpipe.checkpoint.directory import Directory
from dualpipe.checkpoint.manifest import RANDOM, Manifest, file_of
from dualpipe.checkpoint.plan import Planned, offers_of, plan_together
from dualpipe.checkpoint.staging import HostMemory
from dualpipe.checkpoint.state import State, as_number, capture_random, parts_of
from dualpipe.checkpoint.tensors import NewFile, lay_out, read_header, storable
from dualpipe.checkpoint.writer import write_in_process
from dualpipe.dtypes import short_name
from dualpipe.errors import raise_for
from dualpipe.files import CHECKSUMS, Written, write_files
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import DIMENSIONS, Mesh
from dualpipe.ranks import RankSync

MAX_FILE_BYTES = 2**34  # of tensors in a file


class CheckpointError(OSError):
    """A checkpoint was not saved; those that were committed before are as they were."""


class Checkpoints:
    """Saves into one directory, and holds what is in flight.

    kind: what writes in the background. Both block training for the copy to host memory (15 ms for 200 MB on a CPU).
        "thread" needs nothing more, but takes turns with training in one interpreter; "process" starts another one for
        each save (0.1 s, 20 MB).
    keep_last, keep_every: which checkpoints stay: the last so many, and those of steps that are multiples. None: all.
    checksum: of the files. SHA-256 takes as long as writing them, which XXH3 does not, and withstands more than damage.
    timeout: after which a rank that waits for another gives up; longer than a save takes.
    """

    def __init__(
        self, directory: str | PathLike[str], mesh: DeviceMesh | None = None, *,
        kind: Literal["thread", "process"] = "thread", keep_last: int | None = None, keep_every: int | None = None,
        checksum: Literal["xxh3_128", "sha256"] = "xxh3_128", timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Collective over `mesh` (from `build_mesh`; None: this process alone); in the main thread.

        Raises ValueError on all ranks for a directory that cannot be written to, or that another job saves to.
        """
        if kind not in ("thread", "process"):
            raise ValueError(f"checkpoints are written by a 'thread' or a 'process'; got {kind!r}")
        if checksum not in CHECKSUMS:
            raise ValueError(f"checksum must be one of {', '.join(CHECKSUMS)}; got {checksum!r}")
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be at least 1, or None to keep all; got {number}")
        self.directory = Path(directory).absolute()
        self._kind, self._checksum, self._timeout = kind, checksum, timeout.total_seconds()
        self._layout = layout_of(mesh)
        # Which ranks have the same stages, only "pp" tells. Without it, all that have a tensor must have the same.
        is_named = mesh is None or "pp" in (mesh.mesh_dim_names or ())
        self._stages = Mesh.of(mesh).rank("pp") if is_named else dist.get_rank()
        # The background talks while training does, so never in a group of training's; gloo, as it sends no tensors.
        self._group = None if self._layout["world"] == 1 else dist.new_group(backend="gloo", timeout=timeout)
        self._ranks = RankSync.of_mesh(mesh, self._group)
        self._planned: Planned | None = None
        self._memory = HostMemory(shared=kind == "process")
        # Ctrl-C is for the rank: a process that this thread starts inherits what the thread has blocked.
        blocked = signal.SIG_BLOCK, {signal.SIGINT}
        self._executor = ThreadPoolExecutor(1, "checkpoint", signal.pthread_sigmask, blocked)
        self._pending: Future[Path] | None = None
        self._pending_step = 0
        self._is_open = True
        self._target: Any = None  # a Directory, on rank 0
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
        with self._reported(step):
            prepared = self._prepare(state, lambda: _job(step, plan, config, extra), step)
            content = {file.name: file.pieces(prepared.tensors.__getitem__) for file in prepared.files}
            return self._write(prepared, lambda folder: write_files(folder, content, self._checksum))

    def save_async(self, state: State, *, step: int, plan: DTypePlan | None = None, config: Any = None,
                   extra: Any = None) -> None:
        """As `save`, but return as soon as the tensors are copied to host memory: they may change then.

        Waits for the save before it, if that is still being written, and raises what has failed there; then nothing is
        saved by this call, as with `save`: call it again, or `wait` first.
        """
        self._settle()
        with self._reported(step):
            prepared = self._prepare(state, lambda: _job(step, plan, config, extra), step)
            write = self._ranks.agree(lambda: self._stage(prepared))
        self._pending_step = step
        self._pending = self._executor.submit(self._write, prepared, write)

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
            self._memory.close()
            if self._target is not None:
                self._target.close()
            if self._group is not None:
                dist.destroy_process_group(self._group)
            self._target = self._group = None
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

    def _prepare(self, state: State, job: Callable[[], _Job], step: int) -> _Prepared:
        """What this rank is to write. Planned together, or as for the save before, where all have the same parts."""
        ranks, prepared = self._ranks, []

        def prepare() -> tuple[int, bool]:
            parts = parts_of(state)
            prepared.append((job(), parts))
            return step, self._planned is not None and self._planned.offers == offers_of(parts)

        found = ranks.gather(prepare)
        if len(steps := {step for step, _ in found}) > 1:
            raise ValueError(f"all ranks must save the same step; got {sorted(steps)}")
        (now, parts), planned = prepared[0], self._planned
        if planned is None or not all(is_as_planned for _, is_as_planned in found):
            planned = self._planned = plan_together(ranks, self._stages, parts)
        tensors = {name: storable(parts[name].tensor) for name in planned.names}
        files = lay_out(
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, MAX_FILE_BYTES,
            lambda number, _: file_of(ranks.rank, number), {RANDOM: json.dumps(now.random)},
        )
        return _Prepared(now, planned, files, tensors)

    def _stage(self, prepared: _Prepared) -> Callable[[Path], dict[str, Written]]:
        """Copy the tensors, and return what writes the copy into a folder."""
        memory, checksum = self._memory, self._checksum
        places = memory.fill(prepared.files, prepared.tensors)
        if self._kind == "thread":
            return lambda folder: write_files(folder, memory.pieces(places), checksum)
        timeout = 0.8 * self._timeout  # before the others give this rank up
        return lambda folder: write_in_process(folder, places, checksum, memory.descriptor, timeout)

    def _write(self, prepared: _Prepared, write: Callable[[Path], dict[str, Written]]) -> Path:
        """Write apart, and have rank 0 commit when all have written."""
        ranks, (job, planned, *_) = self._ranks, prepared
        folder = ranks.first(lambda: self._target.begin(job.step))
        try:

            def work() -> dict[str, Written]:
                written = write(folder)
                raise_for("what the dtype plan saves in float32 must be stored so:",
                          [line for file in written for line in _narrowed(folder / file, job.dtypes)])
                return written

            written = ranks.agree(work)
            all_written = ranks.collect((written, {name: job.dtypes[name] for name in planned.names
                                                   if name in job.dtypes}))
            return ranks.first(lambda: self._target.commit(folder, self._manifest(job, all_written), planned.stored))
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _manifest(self, job: _Job, all_written: list[tuple[dict[str, Written], dict[str, Any]]] | None) -> Manifest:
        files: dict[str, Written] = {}
        dtypes: dict[str, dict[str, str]] = {}
        for written, rank_dtypes in all_written or ():
            files |= written
            dtypes |= rank_dtypes
        return Manifest(
            step=job.step, sequence=0, saved_at=datetime.now(UTC).isoformat(timespec="seconds"), layout=self._layout,
            own_dimensions=[name for name in self._layout if name not in ("world", *DIMENSIONS)], versions=_versions(),
            dtypes=dtypes, config=job.config, extra=job.extra, checksum=self._checksum, files=files,
        )


def save(directory: str | PathLike[str], state: State, *, step: int, mesh: DeviceMesh | None = None,
         plan: DTypePlan | None = None, config: Any = None, extra: Any = None) -> Path:
    """Write one checkpoint into a directory, as `Checkpoints.save` does."""
    with Checkpoints(directory, mesh) as checkpoints:
        return checkpoints.save(state, step=step, plan=plan, config=config, extra=extra)


def layout_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Sizes by name: "world", "pp", "dp", "ep", and those of other dimensions that a mesh of one's own has."""
    sizes = Mesh.of(mesh)
    return {"world": sizes.world_size, **sizes.sizes}


# -- what is beside the tensors


@dataclass(frozen=True)
class _Job:
    """What a checkpoint holds beside tensors, as it was when saving began."""

    step: int
    random: dict[str, Any]
    dtypes: dict[str, dict[str, str]]
    config: Any
    extra: Any


class _Prepared(NamedTuple):
    """What a rank writes."""

    job: _Job
    planned: Planned
    files: list[NewFile]
    tensors: dict[str, Tensor]  # that are in them


def _job(step: int, plan: DTypePlan | None, config: Any, extra: Any) -> _Job:
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a number of optimizer steps, 0 or more; got {step!r}")
    dtypes = {} if plan is None else {
        name: {use: short_name(getattr(of, use)) for use in ("storage", "compute", "save")}
        for name, of in plan.tensors.items()
    }
    return _Job(step, capture_random(), dtypes, _as_json("config", config), _as_json("extra", extra))


def _as_json(what: str, value: Any) -> Any:
    """A copy of its own, as it will be read."""
    try:
        return json.loads(json.dumps(value, default=as_number))
    except TypeError as error:
        raise ValueError(f"{what} must be what JSON can hold, as numbers, texts, lists and dicts: {error}") from None


def _narrowed(file: Path, dtypes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """What is in a file in less than the plan asks for, by its header on the disk."""
    for name, (dtype, *_) in read_header(file)[0].items():
        if dtypes.get(name, {}).get("save") == "fp32" and torch.promote_types(dtype, torch.float32) != dtype:
            yield f"{name} is stored in {short_name(dtype)}"


def _versions() -> dict[str, str]:
    return {"dualpipe": dualpipe.__version__, "torch": torch.__version__, "python": platform.python_version()}
