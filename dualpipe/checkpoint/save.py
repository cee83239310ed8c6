"""Saving checkpoints of a run: at once, or in the background while training goes on.

    with Checkpoints("run/checkpoints", mesh, keep_last=3) as checkpoints:
        ...
        checkpoints.save_async(training_state(stages, optimizer), step=step, plan=plan, extra={"loader": ...})

Every rank calls the same methods in the same order. What fails on one rank raises on all; a rank that died is noticed
by the others when their connection to it breaks, or after `timeout`. See `directory` for what is on disk, and `state`
for what is in it.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
from dualpipe.checkpoint.directory import Directory
from dualpipe.checkpoint.manifest import RANDOM, Manifest, StoredTensor, file_of, gaps_in, layout_of
from dualpipe.checkpoint.state import REPEATED, Part, State, as_number, capture_random, parts_of
from dualpipe.checkpoint.tensors import Box, as_bytes, bytes_in_file, bytes_of, lay_out, storable
from dualpipe.checkpoint.writer import HostMemory
from dualpipe.dtypes import short_name
from dualpipe.errors import raise_for
from dualpipe.files import CHECKSUMS, Written, write_files
from dualpipe.kernels.formats import Format
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.mesh import DIMENSIONS, Mesh
from dualpipe.ranks import RankSync

MAX_FILE_BYTES = 2**34  # of tensors in a file
_SAMPLE = 64  # elements of a part
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# What a rank could write of a tensor: its dtype and shape, a box.
Offer = tuple[torch.dtype | Format, tuple[int, ...], Box]


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
        # What this rank has to offer and, while all ranks have the same, what it writes; what all write, on rank 0.
        self._planned: tuple[dict[str, Offer], list[str], dict[str, StoredTensor]] = {}, [], {}
        self._memory = HostMemory(is_shared=kind == "process")
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
        with self._reported(step):
            return self._begin(state, step, plan, config, extra, is_staged=False)()

    def save_async(self, state: State, *, step: int, plan: DTypePlan | None = None, config: Any = None,
                   extra: Any = None) -> None:
        """As `save`, but return as soon as the tensors are copied to host memory: they may change then.

        Waits for the save before it, if that is still being written, and raises what has failed there; then nothing is
        saved by this call, as with `save`: call it again, or `wait` first.
        """
        with self._reported(step):
            finish = self._begin(state, step, plan, config, extra, is_staged=True)
        self._pending_step = step
        self._pending = self._executor.submit(finish)

    def wait(self) -> Path | None:
        """Wait until nothing is in flight; the path of what was, None where nothing was.

        Raises on all ranks what `save` would have; once, so that a run may go on and save again.
        """
        if self._pending is None:
            return None
        wait([self._pending])  # an interrupt leaves it pending: its memory and its directory are still in use
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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and: {failure}")

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, CheckpointError):
            raise
        except Exception as error:
            what = f"the checkpoint of step {step} was not saved to {self.directory}"
            raise CheckpointError(f"{what}: {error}") from error

    def _begin(
        self, state: State, step: int, plan: DTypePlan | None, config: Any, extra: Any, *, is_staged: bool
    ) -> Callable[[], Path]:
        """Agree on what is saved, and copy it if it is to be staged; returns what writes and commits it."""
        if not self._is_open:
            raise ValueError("these checkpoints are closed; make new ones to save more")
        self.wait()
        self._executor.submit(int).result()  # an interrupt may have hidden one from `wait`
        ranks, mine = self._ranks, []

        def prepare() -> tuple[int, bool]:
            """Check what is to be saved: its step, and whether it is planned for since the last time."""
            manifest, parts = self._describe(step, plan, config, extra), parts_of(state)
            offers = {name: (part.dtype, part.shape, part.box) for name, part in parts.items()}
            raise_for("what the dtype plan saves in float32 must be stored so:",
                      [f"{name} is stored in {short_name(dtype)}" for name, (dtype, _, _) in offers.items()
                       if manifest.dtypes.get(name, {}).get("save") == "fp32" and isinstance(dtype, torch.dtype)
                       and dtype not in _WIDE])
            mine.append((manifest, json.dumps(capture_random()), parts, offers))
            return step, offers == self._planned[0]

        found = ranks.gather(prepare)
        if len(steps := {step for step, _ in found}) > 1:
            raise ValueError(f"all ranks must save the same step; got {sorted(steps)}")
        manifest, random, parts, offers = mine[0]
        if not all(is_as_planned for _, is_as_planned in found):
            self._planned = offers, *plan_together(ranks, self._stages, parts)
        _, names, stored = self._planned
        tensors = {name: storable(parts[name].tensor) for name in names}
        files = lay_out({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, MAX_FILE_BYTES,
                        lambda number, _: file_of(ranks.rank, number), {RANDOM: random})

        def writing() -> Callable[[Path], dict[str, Written]]:
            """What writes the files into a folder, after the copy to host memory if it is to be staged."""
            memory, checksum = self._memory, self._checksum
            if not is_staged:
                return lambda folder: write_files(folder, {each.name: each.pieces(tensors) for each in files}, checksum)
            memory.fill(files, tensors)
            if self._kind == "thread":
                return lambda folder: write_files(folder, memory.pieces(), checksum)
            timeout = 0.8 * self._timeout  # before the others give this rank up
            return lambda folder: memory.write_in_process(folder, checksum, timeout)

        write = ranks.agree(writing) if is_staged else writing()
        return partial(self._write, manifest, names, stored, write)

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
            own_dimensions=[name for name in self._layout if name not in ("world", *DIMENSIONS)],
            versions={"dualpipe": __version__, "torch": torch.__version__, "python": platform.python_version()},
            dtypes=dtypes, config=copies[0], extra=copies[1], checksum=self._checksum, files={},
        )

    def _write(
        self, manifest: Manifest, names: Sequence[str], stored: Mapping[str, StoredTensor],
        write: Callable[[Path], dict[str, Written]],
    ) -> Path:
        """Write apart, and have rank 0 commit when all have written."""
        ranks = self._ranks
        folder = ranks.first(lambda: self._target.begin(manifest.step))
        try:
            files = ranks.agree(lambda: write(folder))
            dtypes = {name: manifest.dtypes[name] for name in names if name in manifest.dtypes}
            written = ranks.collect((files, dtypes)) or []

            def commit() -> Path:
                complete = dataclasses.replace(
                    manifest, saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                    files={name: each for files, _ in written for name, each in files.items()},
                    dtypes={name: each for _, dtypes in written for name, each in dtypes.items()},
                )
                return self._target.commit(folder, complete, stored)

            return ranks.first(commit)
        finally:
            if ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # where it was not committed: else it has another name


def save(directory: str | PathLike[str], state: State, *, step: int, mesh: DeviceMesh | None = None,
         plan: DTypePlan | None = None, config: Any = None, extra: Any = None) -> Path:
    """Write one checkpoint into a directory, as `Checkpoints.save` does."""
    with Checkpoints(directory, mesh) as checkpoints:
        return checkpoints.save(state, step=step, plan=plan, config=config, extra=extra)


def plan_together(
    ranks: RankSync, stages: int, parts: Mapping[str, Part]
) -> tuple[list[str], dict[str, StoredTensor]]:
    """Who writes what, every box of every tensor once: the names that this rank writes and, on rank 0, all tensors.

    stages: a number that ranks with the same stages share. Raises ValueError, on all ranks, where they disagree on a
    tensor, or its parts overlap or leave a gap.
    """

    def sampled() -> tuple[int, dict[str, tuple[Offer, bytes]]]:
        """What this rank has, with the first elements of each part: they tell copies from different tensors."""
        samples: dict[str, bytes] = {}
        for device in {part.tensor.device for part in parts.values()} if ranks.size > 1 else ():
            heads = {name: as_bytes(part.tensor.reshape(-1)[:_SAMPLE].contiguous()) for name, part in parts.items()
                     if part.tensor.device == device}
            together = torch.cat([*heads.values()]).cpu()  # the host waits for the device once
            samples |= {name: bytes(bytes_of(head))
                        for name, head in zip(heads, together.split([*map(len, heads.values())]))}
        return stages, {name: ((part.dtype, part.shape, part.box), samples.get(name, b""))
                        for name, part in parts.items()}

    held = ranks.collect(ranks.agree(sampled))
    names, stored = ranks.agree(lambda: (None, {}) if held is None else assign(held))
    return ranks.hand_out(names), stored


def assign(
    held: Sequence[tuple[int, Mapping[str, tuple[Offer, bytes]]]],
) -> tuple[list[list[str]], dict[str, StoredTensor]]:
    """The names that each rank writes, and the tensors: of several that hold a box, the one with least writes it.

    held: of each rank the number of its stages, and by name what it offers, with a sample of the values. Raises
    ValueError where ranks disagree on a tensor, or its parts overlap or leave a gap.
    """
    stored: dict[str, StoredTensor] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    wrong = []
    for rank, (stages, offers) in enumerate(held):
        for name, ((dtype, shape, box), sample) in offers.items():
            if not box.numel and 0 not in shape:
                continue  # a shard without elements is nobody's
            holding = holders.setdefault((name, box), [])
            holding.append(rank)
            other_stages, others = held[holding[0]]
            if other_stages != stages and others[name][1] != sample:
                wrong.append(f"{name} has other values on rank {rank} than in an earlier one's stages; {REPEATED}")
            if stored.setdefault(name, StoredTensor(dtype, shape, {}))[:2] != (dtype, shape):
                wrong.append(f"{name} is {short_name(dtype)} {shape} on rank {rank}, and another on an earlier one")
    raise_for("all ranks must have the same tensors, in the dtypes of one plan for the whole model:", wrong)
    names: list[list[str]] = [[] for _ in held]
    filled = [0] * len(held)
    for (name, box), ranks in sorted(holders.items(), key=lambda item: len(item[1]) > 1):  # what one alone has first
        writer = min(ranks, key=filled.__getitem__)
        filled[writer] += bytes_in_file(stored[name].dtype, box.shape)
        names[writer].append(name)
        stored[name].boxes[box] = writer
    raise_for("all ranks together must have all of every tensor; a mesh that spans them must be given, and saving be "
              "called on each:", gaps_in(stored))
    return names, stored
