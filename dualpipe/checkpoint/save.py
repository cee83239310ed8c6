"""Saving checkpoints of a run: at once, or in the background while training goes on.

    with Checkpoints("run/checkpoints", mesh, keep_last=3) as checkpoints:
        ...
        checkpoints.save_async(training_state(stages, optimizer), step=step, plan=plan, extra={"loader": ...})

Every rank calls the same methods in the same order. What fails on one rank raises on all; see `pending` for how they
wait for each other, `directory` for what is on disk, and `state` for what is in it.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import __version__
from dualpipe.checkpoint.assign import Offer, plan_together
from dualpipe.checkpoint.directory import Directory
from dualpipe.checkpoint.manifest import RANDOM, Manifest, StoredTensor, file_of, layout_of
from dualpipe.checkpoint.pending import GivenUp, PendingSave
from dualpipe.checkpoint.state import CheckpointState, as_number, capture_random, not_finite, parts_of
from dualpipe.checkpoint.tensors import lay_out, storable
from dualpipe.checkpoint.writer import HostMemory
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import TRAFFIC, Mesh
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import RankLost, raise_for
from dualpipe.runtime.files import CHECKSUMS, Written, reporting, write_files
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder

MAX_FILE_BYTES = 2**34  # of tensors in a file
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class CheckpointError(OSError):
    """A checkpoint was not saved; those that were committed before are as they were."""


class Checkpoints:
    """Saves into one directory, and holds the one that is under way.

    kind: what writes in the background. Both block training for the copy to host memory (15 ms for 200 MB on a CPU).
        "thread" needs nothing more, but takes turns with training in one interpreter; "process" starts another one for
        each save (0.1 s, 20 MB).
    keep_last, keep_every: which checkpoints stay: the last so many, and those of steps that are multiples. None: all.
    checksum: of the files. SHA-256 takes as long as writing them, which XXH3 does not, and withstands more than damage.
    timeout: after which a rank that does not go on, or does not come, is given up. A save may take longer.
    finite: refuse to save parameters and optimizer states that are infinite or NaN.
    """

    def __init__(
        self, directory: str | PathLike[str], mesh: DeviceMesh | None = None, *,
        kind: Literal["thread", "process"] = "thread", keep_last: int | None = None, keep_every: int | None = None,
        checksum: Literal["xxh3_128", "sha256"] = "xxh3_128", timeout: timedelta = timedelta(minutes=10),
        finite: bool = True,
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
        self._kind, self._checksum, self._finite, self._timeout = kind, checksum, finite, timeout.total_seconds()
        self._layout = layout_of(mesh)
        # Which ranks have the same stages, only "pp" tells. Without it, all that have a tensor must have the same.
        is_named = mesh is None or "pp" in (mesh.mesh_dim_names or ())
        self._stages = Mesh.of(mesh).rank("pp") if is_named else dist.get_rank()
        # The background talks while training does, so never in a group of training's; gloo, as it sends no tensors.
        self._group = None if self._layout["world"] == 1 else dist.new_group(backend="gloo", timeout=timeout)
        self._ranks = RankSync.of_mesh(mesh, self._group)
        # What this rank has to offer and, while all ranks have the same, what it writes; what all write, on rank 0.
        self._planned: tuple[dict[str, Offer], list[str], dict[str, StoredTensor]] = {}, [], {}
        self._memory = HostMemory(is_shared=kind == "process")
        # Ctrl-C is for the rank: a process that this thread starts inherits what the thread has blocked.
        blocked = signal.SIG_BLOCK, {signal.SIGINT}
        self._executor = ThreadPoolExecutor(1, "checkpoint", signal.pthread_sigmask, blocked)
        self._recorder = Recorder.current()
        self._pending: PendingSave | None = None
        self._given_up: PendingSave | None = None  # the last save, where what writes it may go on
        self._patience = 1.0  # s, for that to come to its end
        self._is_open = True
        self._target: Any = None  # a Directory, on rank 0
        patience = min(10.0, self._timeout / 2)  # of rank 0, for which the others wait
        try:
            self._target = self._ranks.agree(
                lambda: Directory(self.directory, keep_last, keep_every, patience) if self._ranks.rank == 0 else None
            )
        except BaseException:
            self.close()
            raise

    def save(self, state: CheckpointState, *, step: int, plan: DTypePlan | None = None, config: Any = None,
             extra: Any = None) -> Path:
        """Write a checkpoint and return its path, on the disk and committed.

        state: this rank's tensors by name, from `training_state`; what several ranks hold is written once.
        step: the number of optimizer steps behind it. An earlier checkpoint of the same step is replaced.
        plan: recorded; what it saves in float32 is checked to be stored so.
        config, extra: of rank 0, anything that JSON can hold: the run's configuration; scheduler, loader position.

        Raises on all ranks: ValueError for arguments; FloatingPointError where a parameter or a state of the optimizer
        is not finite; CheckpointError where it could not be written, or for an earlier one that failed in the
        background; its cause is a RankLost where a rank is gone.
        """
        self.wait()
        with self._reported(step), self._recorder.doing("save", f"the checkpoint of step {step}"):
            return self._begin(state, step, plan, config, extra, is_staged=False)[1]()

    def save_async(self, state: CheckpointState, *, step: int, plan: DTypePlan | None = None, config: Any = None,
                   extra: Any = None) -> None:
        """As `save`, but return as soon as the tensors are copied to host memory: they may change then.

        Waits for the save before it, if that is still being written, and raises what has failed there; then nothing is
        saved by this call, as with `save`: call it again, or `wait` first.
        """
        self.wait()
        with self._reported(step), self._recorder.doing("save", f"the copy for the checkpoint of step {step}"):
            pending, write = self._begin(state, step, plan, config, extra, is_staged=True)
        lane = self._recorder.lane("checkpoint")

        def fly() -> None:
            try:
                with lane.activate():
                    pending.end(write())
            except BaseException as error:
                pending.end(error)

        self._executor.submit(fly)
        self._pending = pending

    def wait(self) -> Path | None:
        """Wait until no save is under way; the path of what was, None where nothing was.

        Raises on all ranks what `save` would have; once, so that a run may go on and save again.
        """
        if (pending := self._pending) is None:
            return None
        with self._recorder.doing("save", f"the checkpoint of step {pending.step}"):
            wait([pending.ended])  # an interrupt leaves it pending: its memory and its directory are still in use
        self._pending, self._given_up = None, pending if pending.refused else None
        with self._reported(pending.step):
            return pending.ended.result()

    def close(self) -> None:
        """Wait, then give everything back: call it at the end of the run. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            is_idle = self._given_up is None or self._is_idle(self._patience)
            self._executor.shutdown(wait=is_idle, cancel_futures=not is_idle)
            if self._target is not None:
                self._target.close()
            if is_idle:  # else what hangs may go on with them
                self._memory.close()
                if self._group is not None:
                    dist.destroy_process_group(self._group)
            elif self._given_up is not None and self._given_up.folder is not None:
                shutil.rmtree(self._given_up.folder, ignore_errors=True)
            self._target = self._group = None
            self._is_open = False

    def _is_idle(self, patience: float) -> bool:
        """Return True if nothing of an earlier save goes on here, or has come to its end within so many seconds."""
        return not wait([self._executor.submit(int)], patience).not_done

    def anomaly(self, step: int) -> None:
        """Keep the newest checkpoint of before this step, which may have gone wrong, whatever else is deleted. It is
        not recorded: call it again after a start."""
        if self._target is not None:
            self._target.anomaly = max(step, self._target.anomaly)

    def ignore(self, damaged: Iterable[Path]) -> None:
        """Do not count these checkpoints, such as `Loaded.damaged`, among the last that are kept."""
        if self._target is not None:
            self._target.ignore(damaged)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """As `close`; after an error what is under way has `timeout` to come to its end, without a rank none."""
        if error is not None and (pending := self._pending) is not None:
            if isinstance(error, RankLost) or self._recorder.lost is not None:
                self._patience = self._timeout = 0.0
            wait([pending.ended], self._timeout)
            if not pending.ended.done():
                why = GivenUp("it was still being written when the run ended")
                pending.refuse(str(why))
                pending.end(why)
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and: {failure}")

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        what = f"the checkpoint of step {step} was not saved to {self.directory}"
        try:
            yield
        except (ValueError, FloatingPointError):
            raise
        except Exception as error:
            raise CheckpointError(f"{what}: {error}") from error

    def _begin(
        self, state: CheckpointState, step: int, plan: DTypePlan | None, config: Any, extra: Any, *, is_staged: bool
    ) -> tuple[PendingSave, Callable[[], Path]]:
        """Agree on what is saved, and copy it if it is to be staged; returns what writes and commits it."""
        if not self._is_open:
            raise ValueError("these checkpoints are closed; make new ones to save more")
        ranks, mine, pending = self._ranks, [], PendingSave(step, self._ranks, self._timeout)
        patience = 0.8 * self._timeout  # before the others give this rank up

        def prepare() -> tuple[int, bool, list[str], Path | None]:
            """Check what is to be saved: its step, whether it is planned for since the last time, and what of it is not
            finite; the newest checkpoint."""
            if not self._is_idle(patience):  # given up, or an interrupt has hidden it from `wait`
                raise GivenUp(f"an earlier one has not come to its end here for {patience:.0f} s")
            manifest, parts = self._describe(step, plan, config, extra), parts_of(state)
            offers = {name: (part.dtype, part.shape, part.box) for name, part in parts.items()}
            raise_for("what the dtype plan saves in float32 must be stored so:",
                      [f"{name} is stored in {short_name(dtype)}" for name, (dtype, _, _) in offers.items()
                       if manifest.dtypes.get(name, {}).get("save") == "fp32" and isinstance(dtype, torch.dtype)
                       and dtype not in _WIDE])
            mine.append((manifest, json.dumps(capture_random()), parts, offers))
            wrong = not_finite(state, parts) if self._finite else []
            return step, offers == self._planned[0], wrong, None if self._target is None else self._target.newest

        found = ranks.gather(prepare)
        if len(steps := {step for step, *_ in found}) > 1:
            raise ValueError(f"all ranks must save the same step; got {sorted(steps)}")
        if wrong := [f"{name} on {self._recorder.name(rank)}" for rank, (*_, names, _) in enumerate(found)
                     for name in names]:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise FloatingPointError(f"{wrong[0]}{more}: not finite, so there is no checkpoint of step {step}; the "
                                     f"newest that is whole: {found[0][-1] or 'none'}")
        manifest, random, parts, offers = mine[0]
        if not all(is_as_planned for _, is_as_planned, *_ in found):
            self._planned = offers, *plan_together(ranks, self._stages, parts)
        _, names, stored = self._planned
        tensors = {name: storable(parts[name].tensor) for name in names}
        files = lay_out({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, MAX_FILE_BYTES,
                        lambda number, _: file_of(ranks.rank, number), {RANDOM: random})

        def writing() -> Callable[[Path], dict[str, Written]]:
            """What writes the files into a folder, after the copy to host memory if it is to be staged."""
            memory, checksum = self._memory, self._checksum
            if is_staged:
                memory.fill(files, tensors)
                if self._kind == "process":
                    return lambda folder: memory.write_in_process(folder, checksum, patience, pending.wrote)
            pieces = memory.pieces() if is_staged else {each.name: each.pieces(tensors) for each in files}
            watched = {name: reporting(each, pending.wrote) for name, each in pieces.items()}
            return lambda folder: write_files(folder, watched, checksum)

        write = ranks.agree(writing) if is_staged else writing()
        return pending, partial(self._write, pending, manifest, names, stored, write)

    def _describe(self, step: int, plan: DTypePlan | None, config: Any, extra: Any) -> Manifest:
        """What this rank has to say of a checkpoint, as it is when saving begins."""
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be a number of optimizer steps, 0 or more; got {step!r}")
        dtypes = {} if plan is None else {
            name: {use: short_name(getattr(of, use)) for use in ("storage", "compute", "save")}
            | ({"gathered" if of.gathered else "stored": of.format.name} if of.format else {})
            for name, of in plan.tensors.items()
        }
        copies = []  # as they will be read
        for what, value in (("config", config), ("extra", extra)):
            try:
                copies.append(json.loads(json.dumps(value, default=as_number)))
            except TypeError as error:
                raise ValueError(f"{what} must be what JSON can hold, as numbers, texts, lists and dicts: "
                                 f"{error}") from None
        return Manifest(
            step=step, sequence=0, saved_at="", layout=self._layout,
            own_dimensions=[name for name in self._layout if name not in ("world", *TRAFFIC)],
            versions={"dualpipe": __version__, "torch": torch.__version__, "python": platform.python_version()},
            dtypes=dtypes, config=copies[0], extra=copies[1], checksum=self._checksum, files={},
        )

    def _write(
        self, pending: PendingSave, manifest: Manifest, names: Sequence[str], stored: Mapping[str, StoredTensor],
        write: Callable[[Path], dict[str, Written]],
    ) -> Path:
        """Write apart, and have rank 0 commit when all have written."""
        ranks, recorder = self._ranks, Recorder.current()

        def begin() -> Path:
            pending.folder = self._target.begin(manifest.step, pending.moved)
            return pending.folder

        def write_here() -> dict[str, Written]:
            with recorder.doing("write", f"{file_of(ranks.rank)} of step {manifest.step}"):
                return write(folder)

        def commit() -> Path:
            complete = dataclasses.replace(
                manifest, saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                files={name: each for files, _ in written for name, each in files.items()},
                dtypes={name: each for _, dtypes in written for name, each in dtypes.items()},
            )
            with recorder.doing("commit", f"step {manifest.step}"):
                return self._target.commit(folder, complete, stored, pending.moved, pending.committing())

        try:
            folder = pending.first(begin)
            files = pending.agree(write_here)
            dtypes = {name: manifest.dtypes[name] for name in names if name in manifest.dtypes}
            written = ranks.collect((files, dtypes)) or []
            return pending.first(commit)
        finally:
            if pending.folder is not None:
                shutil.rmtree(pending.folder, ignore_errors=True)  # if it was not committed: else it has another name


def save(directory: str | PathLike[str], state: CheckpointState, *, step: int, mesh: DeviceMesh | None = None,
         plan: DTypePlan | None = None, config: Any = None, extra: Any = None) -> Path:
    """Write one checkpoint into a directory, as `Checkpoints.save` does."""
    with Checkpoints(directory, mesh) as checkpoints:
        return checkpoints.save(state, step=step, plan=plan, config=config, extra=extra)
