"""Save checkpoints of a run: at once, or in the background while training continues.

    with Checkpoints("run/checkpoints", mesh, keep_last=3) as checkpoints:  # or "s3://bucket/run"
        ...
        checkpoints.save_async(training_state(stages, optimizer), step=step, plan=plan, extra={"loader": ...})

Every rank calls the same methods in the same order. A failure on one rank raises on all of them. `pending` describes
how ranks wait for each other, `directory` how files are committed, and `state` their contents.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import __version__
from dualpipe.checkpoint.assign import Offer, agree_on_writers
from dualpipe.checkpoint.directory import open_directory
from dualpipe.checkpoint.manifest import RANDOM, Manifest, StoredTensor, mesh_layout, tensor_file_name
from dualpipe.checkpoint.optimizer_state import tensor_to_number
from dualpipe.checkpoint.pending import PendingSave, SaveAbandoned
from dualpipe.checkpoint.state import CheckpointState, TensorPart, capture_random, find_non_finite, parts_of
from dualpipe.checkpoint.tensors import NewFile, lay_out, storable
from dualpipe.checkpoint.writer import HostMemory
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import TRAFFIC, Mesh
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import RankLost, raise_for
from dualpipe.runtime.files import CHECKSUMS, Written, report_writes
from dualpipe.runtime.nccl import TOTALS
from dualpipe.runtime.ranks.process_groups import create_groups
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder
from dualpipe.runtime.storage import (
    Location,
    RemotePath,
    StrLocation,
    absolute,
    as_location,
    check_shared,
    require_shared,
    write_files,
)

MAX_FILE_BYTES = 2**34  # of tensors in a file
_MAX_LOCK_WAIT = 10.0  # seconds that rank 0 waits for the directory, while the other ranks wait for rank 0

_FLOAT32_OR_WIDER = (torch.float32, torch.float64, torch.complex64, torch.complex128)

WriteFiles = Callable[[Location], dict[str, Written]]  # writes this rank's files to a folder


class CheckpointError(OSError):
    """A checkpoint was not saved. Checkpoints that were committed before are unchanged."""


class SaveRequest(NamedTuple):
    """The arguments of `Checkpoints.save`."""

    state: CheckpointState
    step: int
    plan: DTypePlan | None
    config: Any
    extra: Any


class Snapshot(NamedTuple):
    """The content of a checkpoint on this rank. The tensors share memory with the run."""

    manifest: Manifest  # sequence, time and files are not known yet
    random: str  # random state, as JSON
    parts: dict[str, TensorPart]
    offers: dict[str, Offer]

    @classmethod
    def take(cls, request: SaveRequest, layout: dict[str, int], checksum: str) -> Snapshot:
        """Take a snapshot of a run; raise ValueError if it cannot be saved."""
        manifest = _describe(request, layout, checksum)
        parts = parts_of(request.state)
        _check_float32(parts, manifest.dtypes)
        offers = {name: Offer(part.dtype, part.shape, part.box) for name, part in parts.items()}
        return cls(manifest, json.dumps(capture_random()), parts, offers)


class _WritePlan(NamedTuple):
    """The assignment of boxes to ranks, valid while the offers of all ranks stay the same."""

    offers: dict[str, Offer]  # of this rank
    names: list[str]  # tensors that this rank writes
    stored: dict[str, StoredTensor]  # all tensors, on rank 0


class _RankReport(NamedTuple):
    """The state of a rank at the start of a save."""

    step: int
    is_as_planned: bool  # its offers are those of the current write plan
    non_finite: list[str]
    newest: Location | None  # newest complete checkpoint, on rank 0


class Checkpoints:
    """Save checkpoints to one directory, one save at a time.

    Constructing is collective over `mesh`, in the main thread.

    Args:
        directory: receives the checkpoints; created if it does not exist. Or a URL that fsspec knows, such as
            "s3://bucket/run".
        mesh: from `build_mesh`; None: this process alone.
        kind: writer of background saves. Both kinds block training during the copy to host memory (15 ms for 200 MB on
            a CPU). "thread" needs nothing else, but shares the interpreter with training. "process" starts another
            process for each save (0.1 s, 20 MB).
        keep_last: number of newest checkpoints to keep. None: keep all.
        keep_every: also keep checkpoints of steps that are multiples of this number.
        checksum: algorithm for the checksums of files. SHA-256 takes as long as writing the files, XXH3 far less.
            SHA-256 also detects manipulation, XXH3 only damage.
        timeout: time without progress after which a rank is given up. A save may take longer.
        finite: refuse to save parameters and optimizer states that are infinite or NaN.

    Raises:
        ValueError: on all ranks, if an argument is invalid, the directory cannot be written to, or another job saves
            to it.
    """

    def __init__(
        self, directory: StrLocation, mesh: DeviceMesh | None = None, *,
        kind: Literal["thread", "process"] = "thread", keep_last: int | None = None, keep_every: int | None = None,
        checksum: Literal["xxh3_128", "sha256"] = "xxh3_128", timeout: timedelta = timedelta(minutes=10),
        finite: bool = True,
    ) -> None:
        if kind not in ("thread", "process"):
            raise ValueError(f"checkpoints are written by a 'thread' or a 'process'; got {kind!r}")
        if checksum not in CHECKSUMS:
            raise ValueError(f"checksum must be one of {', '.join(CHECKSUMS)}; got {checksum!r}")
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be at least 1, or None to keep all; got {number}")
        self.directory = absolute(as_location(directory))
        if isinstance(self.directory, RemotePath) and self.directory.protocol == "memory" and kind == "process":
            raise ValueError(f"{self.directory} is in the memory of this process, where kind='process' cannot write; "
                             "give kind='thread', or another directory")
        self._kind = kind
        self._checksum = checksum
        self._finite = finite
        self._timeout = timeout.total_seconds()
        self._layout = mesh_layout(mesh)
        require_shared(self.directory, self._layout["world"])
        # Ranks with the same position along "pp" have the same stages. In a mesh without "pp", each rank counts as one
        # with other stages, so the copies of a tensor on several ranks are checked for equal values.
        has_pp = mesh is None or "pp" in (mesh.mesh_dim_names or ())
        self._stages = Mesh.of(mesh).rank("pp") if has_pp else dist.get_rank()
        # Background saves communicate during training, so they need a separate group; gloo, as they send no tensors.
        self._group = None
        if self._layout["world"] > 1:
            world: Any = dist.group.WORLD
            request = (range(world.size()), TOTALS)
            self._group = create_groups([request], parent=world, timeout=timeout, backend="gloo")[0]
        self._ranks = RankSync.of_mesh(mesh, self._group)
        self._write_plan = _WritePlan({}, [], {})
        self._memory = HostMemory(is_shared=kind == "process")
        # This thread blocks Ctrl-C, and so do the writer processes that it starts: only the rank handles it.
        blocked = (signal.SIG_BLOCK, {signal.SIGINT})
        self._executor = ThreadPoolExecutor(1, "checkpoint", signal.pthread_sigmask, blocked)
        self._recorder = Recorder.current()
        self._pending: PendingSave | None = None
        self._abandoned: PendingSave | None = None  # last save, if its writer may still be running
        self._abandoned_patience = 1.0  # seconds to wait for that writer in `close`
        self._is_open = True
        self._target: Any = None  # a Directory, on rank 0
        lock_wait = min(_MAX_LOCK_WAIT, self._timeout / 2)
        try:
            self._target = self._ranks.agree(
                lambda: open_directory(self.directory, keep_last, keep_every, lock_wait) if self._ranks.rank == 0
                else None
            )
            if isinstance(self.directory, Path):
                check_shared(self.directory, self._ranks)
        except BaseException:
            self.close()
            raise

    def save(self, state: CheckpointState, *, step: int, plan: DTypePlan | None = None, config: Any = None,
             extra: Any = None) -> Location:
        """Write a checkpoint and return its path. On return, it is on the disk and committed. Collective.

        Args:
            state: this rank's tensors by name, from `training_state`. Boxes that several ranks hold are written once.
            step: number of optimizer steps taken. Replaces an earlier checkpoint of the same step.
            plan: the dtype plan, which is recorded. Tensors that it saves in float32 are checked to have that dtype.
            config: the configuration of the run, as JSON-compatible values. Rank 0's is recorded.
            extra: any other state, as JSON-compatible values, such as scheduler and loader position. Rank 0's is
                recorded.

        Raises (on all ranks):
            ValueError: an argument is invalid.
            FloatingPointError: a parameter or an optimizer state is infinite or NaN.
            CheckpointError: this checkpoint could not be written, or an earlier background save failed. Its cause is a
                RankLost if a rank is lost.
        """
        self.wait()
        with self._report_errors(step), self._recorder.doing("save", f"the checkpoint of step {step}"):
            _, write = self._begin(SaveRequest(state, step, plan, config, extra), is_staged=False)
            return write()

    def save_async(self, state: CheckpointState, *, step: int, plan: DTypePlan | None = None, config: Any = None,
                   extra: Any = None) -> None:
        """Like `save`, but returns as soon as the tensors are copied to host memory. From then on they may change.

        Waits for the previous save if that is still in progress. If the previous save failed, this call raises its
        error and saves nothing, like `save`: call it again, or call `wait` first.
        """
        self.wait()
        with self._report_errors(step), self._recorder.doing("save", f"the copy for the checkpoint of step {step}"):
            pending, write = self._begin(SaveRequest(state, step, plan, config, extra), is_staged=True)
        lane = self._recorder.lane("checkpoint")

        def write_in_background() -> None:
            try:
                with lane.activate():
                    pending.end(write())
            except BaseException as error:
                pending.end(error)

        self._executor.submit(write_in_background)
        self._pending = pending

    def wait(self) -> Location | None:
        """Wait for the save in progress and return its path, or None if there is none.

        Raises what `save` would have raised, on all ranks; once, so that a run may continue and save again.
        """
        pending = self._pending
        if pending is None:
            return None
        with self._recorder.doing("save", f"the checkpoint of step {pending.step}"):
            wait([pending.ended])  # after an interrupt it stays pending: its memory and directory are still in use
        self._pending = None
        self._abandoned = pending if pending.refused else None
        with self._report_errors(pending.step):
            return pending.ended.result()

    def close(self) -> None:
        """Wait for the save in progress and release all resources, at the end of the run. Raises like `wait`."""
        try:
            self.wait()
        finally:
            is_idle = self._abandoned is None or self._is_idle(self._abandoned_patience)
            self._executor.shutdown(wait=is_idle, cancel_futures=not is_idle)
            target = self._target
            if target is not None:
                target.close()
            if is_idle:  # else the writer that hangs may still use them
                self._memory.close()
                if self._group is not None:
                    dist.destroy_process_group(self._group)
            elif self._abandoned is not None and self._abandoned.folder is not None:
                target.discard(self._abandoned.folder)
            self._target = None
            self._group = None
            self._is_open = False

    def _is_idle(self, patience: float) -> bool:
        """Return True if no earlier save is in progress on this rank, or if it ends within `patience` seconds."""
        return not wait([self._executor.submit(int)], patience).not_done

    def keep_before_anomaly(self, step: int) -> None:
        """Keep the newest checkpoint before `step`, a step whose result may be wrong, whatever else is deleted.

        This is not recorded on disk: call it again after a restart.
        """
        if self._target is not None:
            self._target.anomaly = max(step, self._target.anomaly)

    def ignore(self, damaged: Iterable[Location]) -> None:
        """Do not count damaged checkpoints, such as `Loaded.damaged`, among the `keep_last` newest."""
        if self._target is not None:
            self._target.ignore(damaged)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Like `close`.

        After an error, wait up to `timeout` for a save in progress, or not at all if a rank is lost.
        """
        pending = self._pending
        if error is not None and pending is not None:
            if isinstance(error, RankLost) or self._recorder.lost is not None:
                self._abandoned_patience = 0.0
                self._timeout = 0.0
            wait([pending.ended], self._timeout)
            if not pending.ended.done():
                reason = SaveAbandoned("it was still being written when the run ended")
                pending.forbid_commit(str(reason))
                pending.end(reason)
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and: {failure}")

    @contextmanager
    def _report_errors(self, step: int) -> Iterator[None]:
        """Raise CheckpointError for any error inside but ValueError and FloatingPointError."""
        try:
            yield
        except (ValueError, FloatingPointError):
            raise
        except Exception as error:
            message = f"the checkpoint of step {step} was not saved to {self.directory}: {error}"
            raise CheckpointError(message) from error

    def _begin(self, request: SaveRequest, *, is_staged: bool) -> tuple[PendingSave, Callable[[], Location]]:
        """Agree on the content of a checkpoint; return the save and a function that writes and commits it.

        is_staged: copy the tensors to host memory first.
        """
        if not self._is_open:
            raise ValueError("these checkpoints are closed; make new ones to save more")
        pending = PendingSave(request.step, self._ranks, self._timeout)
        snapshot = self._agree_on_snapshot(request)
        names = self._write_plan.names
        tensors = {name: storable(snapshot.parts[name].tensor) for name in names}
        files = lay_out({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, MAX_FILE_BYTES,
                        lambda number, _: tensor_file_name(self._ranks.rank, number), {RANDOM: snapshot.random})
        write = self._stage(pending, files, tensors) if is_staged else self._writer(
            pending, {file.name: file.pieces(tensors) for file in files})
        return pending, partial(self._write, pending, snapshot.manifest, names, self._write_plan.stored, write)

    def _agree_on_snapshot(self, request: SaveRequest) -> Snapshot:
        """Take a snapshot on every rank, check all of them together, and update the write plan. Collective."""
        snapshots: list[Snapshot] = []

        def prepare() -> _RankReport:
            # `wait` does not know of a save that was given up, or that began just before an interrupt.
            if not self._is_idle(self._patience):
                raise SaveAbandoned(f"an earlier save has not ended on this rank for {self._patience:.0f} s")
            snapshot = Snapshot.take(request, self._layout, self._checksum)
            snapshots.append(snapshot)
            non_finite = find_non_finite(request.state, snapshot.parts) if self._finite else []
            newest = None if self._target is None else self._target.newest
            return _RankReport(request.step, snapshot.offers == self._write_plan.offers, non_finite, newest)

        reports = self._ranks.gather(prepare)
        self._check_reports(reports)
        (snapshot,) = snapshots
        if not all(report.is_as_planned for report in reports):
            names, stored = agree_on_writers(self._ranks, self._stages, snapshot.parts)
            self._write_plan = _WritePlan(snapshot.offers, names, stored)
        return snapshot

    @property
    def _patience(self) -> float:
        """Seconds to wait for a writer: fewer than the timeout, after which the other ranks give this rank up."""
        return 0.8 * self._timeout

    def _check_reports(self, reports: Sequence[_RankReport]) -> None:
        """Raise the same error on all ranks if steps differ or a tensor has an infinite or NaN element."""
        steps = {report.step for report in reports}
        if len(steps) > 1:
            raise ValueError(f"all ranks must save the same step; got {sorted(steps)}")
        non_finite = [f"{name} on {self._recorder.name(rank)}" for rank, report in enumerate(reports)
                      for name in report.non_finite]
        if non_finite:
            more = f" and {len(non_finite) - 1} more" if len(non_finite) > 1 else ""
            raise FloatingPointError(f"{non_finite[0]}{more}: not finite, so there is no checkpoint of step "
                                     f"{reports[0].step}; the newest complete checkpoint: "
                                     f"{reports[0].newest or 'none'}")

    def _stage(self, pending: PendingSave, files: Sequence[NewFile], tensors: Mapping[str, Tensor]) -> WriteFiles:
        """Copy the tensors to host memory on all ranks; return a function that writes the copy to a folder."""

        def copy() -> WriteFiles:
            memory = self._memory
            checksum = self._checksum
            patience = self._patience
            memory.fill(files, tensors)
            if self._kind == "process":
                return lambda folder: memory.write_in_process(folder, checksum, patience, pending.report_written)
            return self._writer(pending, memory.pieces())

        return self._ranks.agree(copy)

    def _writer(self, pending: PendingSave, pieces: Mapping[str, Iterable[bytes | memoryview]]) -> WriteFiles:
        """Return a function that writes files to a folder in this process, and reports progress."""
        checksum = self._checksum
        reported = {name: report_writes(file_pieces, pending.report_written) for name, file_pieces in pieces.items()}
        return lambda folder: write_files(folder, reported, checksum)

    def _write(
        self, pending: PendingSave, manifest: Manifest, names: Sequence[str], stored: Mapping[str, StoredTensor],
        write: WriteFiles,
    ) -> Location:
        """Write this rank's files; rank 0 commits when all ranks have written theirs. Return the checkpoint's path.

        names: the tensors that this rank writes. stored: all tensors, on rank 0.
        """
        ranks = self._ranks
        target = self._target
        recorder = Recorder.current()

        def begin() -> Location:
            pending.folder = self._target.begin(manifest.step, pending.report_progress)
            return pending.folder

        def write_own_files() -> dict[str, Written]:
            with recorder.doing("write", f"{tensor_file_name(ranks.rank)} of step {manifest.step}"):
                return write(folder)

        def commit() -> Location:
            complete = dataclasses.replace(
                manifest, saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                files={name: file for rank_files, _ in written for name, file in rank_files.items()},
                dtypes={name: uses for _, rank_dtypes in written for name, uses in rank_dtypes.items()},
            )
            with recorder.doing("commit", f"step {manifest.step}"):
                return self._target.commit(folder, complete, stored, pending.report_progress, pending.committing())

        try:
            folder = pending.first(begin)
            files = pending.agree(write_own_files)
            dtypes = {name: manifest.dtypes[name] for name in names if name in manifest.dtypes}
            written = ranks.collect((files, dtypes)) or []
            return pending.first(commit)
        finally:
            if pending.folder is not None:
                target.discard(pending.folder)  # does nothing if it was committed


def _check_float32(parts: Mapping[str, TensorPart], dtypes: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ValueError for tensors that the dtype plan saves in float32 but that have a narrower dtype."""
    problems = []
    for name, part in parts.items():
        is_saved_in_float32 = dtypes.get(name, {}).get("save") == "fp32"
        if is_saved_in_float32 and isinstance(part.dtype, torch.dtype) and part.dtype not in _FLOAT32_OR_WIDER:
            problems.append(f"{name} is stored in {short_name(part.dtype)}")
    raise_for("what the dtype plan saves in float32 must be stored so:", problems)


def _describe(request: SaveRequest, layout: dict[str, int], checksum: str) -> Manifest:
    """Return this rank's description of a checkpoint. Later changes of config and extra do not affect it."""
    if type(request.step) is not int or request.step < 0:
        raise ValueError(f"step must be a number of optimizer steps, 0 or more; got {request.step!r}")
    return Manifest(
        step=request.step, sequence=0, saved_at="", layout=layout,
        own_dimensions=[name for name in layout if name not in ("world", *TRAFFIC)],
        versions={"dualpipe": __version__, "torch": torch.__version__, "python": platform.python_version()},
        dtypes=_dtype_names(request.plan),
        config=_json_copy("config", request.config), extra=_json_copy("extra", request.extra),
        checksum=checksum, files={},
    )


def _dtype_names(plan: DTypePlan | None) -> dict[str, dict[str, str]]:
    """Return the dtypes of a plan by tensor and use, such as {"storage": "bf16", "compute": "bf16", "save": "bf16"}.

    A quantized tensor also has the name of its format, under "gathered" or "stored".
    """
    if plan is None:
        return {}
    names = {}
    for name, dtypes in plan.tensors.items():
        names[name] = {use: short_name(getattr(dtypes, use)) for use in ("storage", "compute", "save")}
        if dtypes.format:
            names[name]["gathered" if dtypes.gathered else "stored"] = dtypes.format.name
    return names


def _json_copy(name: str, value: Any) -> Any:
    """Return a value as it will be read from JSON; raise ValueError for one that JSON cannot hold."""
    try:
        return json.loads(json.dumps(value, default=tensor_to_number))
    except TypeError as error:
        raise ValueError(f"{name} must be what JSON can hold, as numbers, strings, lists and dicts: {error}") from None


def save(directory: StrLocation, state: CheckpointState, *, step: int, mesh: DeviceMesh | None = None,
         plan: DTypePlan | None = None, config: Any = None, extra: Any = None) -> Location:
    """Write one checkpoint to a directory and return its path, like `Checkpoints.save`."""
    with Checkpoints(directory, mesh) as checkpoints:
        return checkpoints.save(state, step=step, plan=plan, config=config, extra=extra)
