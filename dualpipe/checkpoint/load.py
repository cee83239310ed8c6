"""Load a checkpoint into the tensors of a run, in any layout.

Nothing is changed before everything is known to fit: the files are intact (all ranks share the reading), and names,
shapes and dtypes match the model. Loading runs no code from a checkpoint and reads nothing outside of its directory.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count, groupby, takewhile
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.directory import FoundCheckpoints, find, raise_none_complete, step_of
from dualpipe.checkpoint.manifest import (
    RANDOM,
    TENSORS,
    Checkpoint,
    Manifest,
    StoredTensor,
    mesh_layout,
    tensor_file_name,
)
from dualpipe.checkpoint.optimizer_state import VALUES, ParameterState, check_groups, is_allowed
from dualpipe.checkpoint.state import (
    CheckpointState,
    TensorPart,
    derive_random,
    parts_of,
    restore_random,
    stage_numbers,
)
from dualpipe.checkpoint.tensors import (
    Box,
    TensorHeader,
    block_rows,
    dtype_and_shape_in_file,
    read_box_with,
    read_header,
)
from dualpipe.kernels.formats import Format
from dualpipe.kernels.quantize import dequantize
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import filling
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import nearest, raise_for
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.storage import Location, ReadInto, StrLocation, as_location, open_ranges, require_shared

# The search for the nearest name is slow: at most so many names, each among fewer candidates than this.
_MAX_NEAREST = 20
_MAX_CANDIDATES = 2000
_TRIES = 20  # attempts while another job deletes old checkpoints and commits new ones


class Loaded(NamedTuple):
    """The result of `load`, besides the tensors."""

    path: Location
    manifest: Manifest  # step, config, extra, layout, dtypes, versions
    random_restored: bool  # False: derived from seed, step and rank, because the layout differs
    damaged: dict[Location, str]  # the newer checkpoints that were passed over, and their problems
    allowed: tuple[str, ...]  # differences that `allow` permitted


def load(path: StrLocation, state: CheckpointState, *, mesh: DeviceMesh | None = None,
         allow: Sequence[str] = (), allow_at_start: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Fill `state` in place and restore the random state of this rank. Collective over `mesh`.

    Args:
        path: a checkpoint, or a directory of checkpoints; or the URL of either, from which every rank reads only the
            byte ranges of its own part. From a directory, loads the checkpoint that was committed last and is
            undamaged; newer ones that are damaged are passed over with a warning and listed in the result. Another job
            may save to the directory and delete old checkpoints in the meantime.
        state: from `training_state`.
        mesh: from `build_mesh`; None: this process alone.
        allow: globs of names that may differ. A tensor that is missing on either side, or has another shape, stays
            unchanged. A tensor of another dtype or format is cast, quantized or dequantized.
        allow_at_start: more globs, for checkpoints of step 0 only, as `import_hf` writes them.
        seed: used to derive the random state if the checkpoint was saved in another layout.

    Raises (on all ranks):
        ValueError: before anything is changed: there is no complete checkpoint, the directory or store cannot be
            listed, or names, shapes or dtypes differ; one line per difference.
        OSError (RuntimeError with several ranks): before anything is changed: a store could be listed, but then not be
            reached.
        RuntimeError: reading failed after that, for example because of a disk failure. The tensors are unusable then.
    """
    ranks = RankSync.of_mesh(mesh)
    path = as_location(path)
    layout = mesh_layout(mesh)
    require_shared(path, layout["world"])
    checkpoints = FoundCheckpoints([], {})
    has_begun_reading = False
    for attempt in range(_TRIES):
        try:
            checkpoints = ranks.first(lambda: find(path))
            if checkpoints.newer_release:  # loading an older checkpoint would lose the progress since then
                raise ValueError(checkpoints.newer_release)
            loaded = _load(path, checkpoints, state, ranks, layout, allow, allow_at_start, seed)
        except (ValueError, RuntimeError, OSError) as error:  # on all ranks
            has_begun_reading = has_begun_reading or not isinstance(error, ValueError)
            if attempt < _TRIES - 1 and not ranks.first(partial(_all_exist, checkpoints.committed)):
                continue
            if has_begun_reading and isinstance(error, ValueError):
                raise RuntimeError(f"{error}; the tensors are not usable, as reading had begun") from error
            raise
        for problem in loaded.damaged.values() if ranks.rank == 0 else ():
            warnings.warn(f"passed over for {loaded.path}: {problem}", stacklevel=2)
        return loaded
    raise AssertionError("the last attempt returns or raises")


class _LoadPlan(NamedTuple):
    """The tensors to read from a checkpoint."""

    checkpoint: Checkpoint
    stored: Mapping[str, StoredTensor]
    parts: Mapping[str, TensorPart]  # of this rank, with the shapes of `stored`
    states: Mapping[str, ParameterState]

    @property
    def requantized(self) -> list[str]:
        """Names of quantized tensors that are stored in another dtype or format: read into masters, then quantized."""
        return [name for name, part in self.parts.items()
                if part.quantized is not None and self.stored[name].dtype != part.dtype]


def _load(
    path: Location, checkpoints: FoundCheckpoints, state: CheckpointState, ranks: RankSync, layout: Mapping[str, int],
    allow: Sequence[str], allow_at_start: Sequence[str], seed: int,
) -> Loaded:
    """Load the newest intact checkpoint of `checkpoints`. The first half checks that it fits and changes nothing."""
    checkpoint, stored, damaged = _choose_intact(path, checkpoints, ranks)
    manifest = checkpoint.manifest
    parts = ranks.agree(lambda: parts_of(state, stored))
    if manifest.step == 0:
        allow = [*allow, *allow_at_start]
    allowed = _compare(ranks, checkpoint.path, stored, parts, allow)
    fitting = {name: part for name, part in parts.items() if name in stored and stored[name].shape == part.shape}
    states = {name: value for name, value in state.items() if isinstance(value, ParameterState)}
    uninitialized = ranks.agree(lambda: _check_optimizer(_LoadPlan(checkpoint, stored, fitting, states), allow))

    plan = _LoadPlan(
        checkpoint, stored,
        {name: part for name, part in fitting.items() if name.rpartition("/")[0] not in uninitialized},
        {name: value for name, value in states.items() if name not in uninitialized},
    )

    def restore() -> bool:
        _restore_tensors(plan)
        return _restore_random(checkpoint, layout, ranks.rank, seed)

    try:
        with filling(cast(Tensor, state[name]) for name in plan.requantized):
            random_restored = ranks.agree(restore)
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{checkpoint.path} could not be read to its end: {error}") from error
    _require_existing(checkpoint, ranks)
    return Loaded(checkpoint.path, manifest, random_restored, damaged, allowed)


def _choose_intact(
    path: Location, checkpoints: FoundCheckpoints, ranks: RankSync
) -> tuple[Checkpoint, dict[str, StoredTensor], dict[Location, str]]:
    """Return the newest intact checkpoint, its tensors, and the problems of the newer ones. Ranks share the reading."""
    damaged: dict[Location, str] = {}
    for checkpoint in checkpoints.committed:
        share = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.size]
        problems = [line for lines in ranks.gather(partial(checkpoint.find_damage, share)) for line in lines]
        stored: dict[str, StoredTensor] = {}
        if not problems:
            stored, problems = ranks.first(checkpoint.read_tensors)
        if not problems:
            damaged |= {other: problem for other, problem in checkpoints.damaged.items()
                        if step_of(other) > checkpoint.manifest.step}
            return checkpoint, stored, damaged
        _require_existing(checkpoint, ranks)
        damaged[checkpoint.path] = "; ".join(problems)
    raise_none_complete(path, [*damaged.values(), *checkpoints.damaged.values()])


def _all_exist(checkpoints: Iterable[Checkpoint]) -> bool:
    """Return True if the job that saves there has deleted no checkpoint, or if the store cannot be reached."""
    try:
        return all(checkpoint.still_exists() for checkpoint in checkpoints)
    except OSError:
        return True


def _require_existing(checkpoint: Checkpoint, ranks: RankSync) -> None:
    """Raise RuntimeError if the job that saves there has deleted or replaced a checkpoint: there are newer ones."""
    if not ranks.first(checkpoint.still_exists):
        raise RuntimeError(f"{checkpoint.path} was deleted or replaced while it was read")


def _check_optimizer(plan: _LoadPlan, allow: Sequence[str]) -> set[str]:
    """Read the hyperparameters of torch's optimizers and check them; return the names of states not to load.

    Called before anything is changed, so that a mismatch with the parameter groups leaves the run as it was.
    """
    names = [f"{name}/{VALUES}" for name in plan.states]
    values = {name: plan.parts[name] for name in names if name in plan.parts}
    if not values:
        return set()
    read_parts(plan.checkpoint, plan.stored, values)
    return check_groups(plan.states, allow)


def _restore_tensors(plan: _LoadPlan) -> None:
    """Read everything into the model and its optimizer."""
    masters = {}
    for name in plan.requantized:
        part = plan.parts[name]
        master = cast(Tensor, cast(QuantizedTensor, part.quantized).master)
        masters[name] = TensorPart(part.shape, part.box, master)
    read_parts(plan.checkpoint, plan.stored, {**plan.parts, **masters})
    for name, part in plan.parts.items():
        if part.quantized is not None and part.quantized.master is not None and name not in masters:
            part.quantized.master.copy_(part.quantized.dequantize())
    for state in plan.states.values():
        state.restore()


def _restore_random(checkpoint: Checkpoint, layout: Mapping[str, int], rank: int, seed: int) -> bool:
    """Restore this rank's random state and return True, or derive one for another layout and return False."""
    path, manifest = checkpoint
    if manifest.layout != layout:
        derive_random(seed, manifest.step, rank)
        return False
    _, metadata = read_header(path / tensor_file_name(rank))
    restore_random(json.loads(metadata[RANDOM]))
    return True


class _BoxRead(NamedTuple):
    """A stored box to read from, and its intersection with this rank's part, in coordinates of the tensor."""

    name: str
    box: Box
    shared: Box


def read_parts(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], parts: Mapping[str, TensorPart]) -> None:
    """Fill this rank's parts from the files of a checkpoint. Other dtypes are cast; shapes must agree.

    Args:
        checkpoint: the checkpoint.
        stored: its tensors by name.
        parts: the parts to fill, by name.

    Raises:
        RuntimeError: a file does not hold the tensors that the description of the checkpoint lists.
    """
    by_writer: dict[int, list[_BoxRead]] = {}
    for name, part in parts.items():
        for box, rank in stored[name].boxes.items():
            shared = box.intersection(part.box)
            if shared is not None:
                by_writer.setdefault(rank, []).append(_BoxRead(name, box, shared))
    for rank, reads in by_writer.items():
        headers = _read_headers(checkpoint, rank, stored, reads)
        reads.sort(key=lambda read: headers[read.name][2:])  # by file and position, for sequential reading
        for file, file_reads in groupby(reads, key=lambda read: headers[read.name].file):
            in_order = list(file_reads)
            ranges = partial(_byte_ranges, in_order, headers, stored)
            with open_ranges(checkpoint.path / file, ranges) as read_into:
                for read in in_order:
                    _read_part(read_into, headers[read.name], stored[read.name].dtype, read, parts[read.name])


def _byte_ranges(
    reads: Iterable[_BoxRead], headers: Mapping[str, TensorHeader], stored: Mapping[str, StoredTensor]
) -> list[tuple[int, int]]:
    """Return start and size of the byte ranges of a file that these reads need, in order."""
    ranges = []
    for read in reads:
        source = read.shared.relative_to(read.box)
        dtype = stored[read.name].dtype
        if isinstance(dtype, Format):
            source = block_rows(source, dtype, read.box.shape[-1])
        ranges += headers[read.name].byte_ranges(source)
    return ranges


def _read_headers(
    checkpoint: Checkpoint, rank: int, stored: Mapping[str, StoredTensor], reads: Iterable[_BoxRead]
) -> dict[str, TensorHeader]:
    """Return the headers of a rank's files, with the original dtype and shape of tensors that are held as bytes."""
    files = takewhile(checkpoint.manifest.files.__contains__, (tensor_file_name(rank, number) for number in count()))
    headers = {name: header for file in files for name, header in read_header(checkpoint.path / file)[0].items()}
    for name, box, _ in reads:
        dtype = stored[name].dtype
        header = headers.get(name)
        if header is None or (header.dtype, header.shape) != dtype_and_shape_in_file(dtype, box.shape):
            raise RuntimeError(f"{checkpoint.path / tensor_file_name(rank)} does not hold {dtype} {box.shape} of "
                               f"{name}, as {TENSORS} says")
        if not isinstance(dtype, Format):
            headers[name] = header._replace(dtype=dtype, shape=box.shape)
    return headers


def _read_part(
    read_into: ReadInto, header: TensorHeader, dtype: torch.dtype | Format, read: _BoxRead, part: TensorPart
) -> None:
    """Read the intersection of a stored box with a part; dequantize it if it is quantized and the part is not."""
    source = read.shared.relative_to(read.box)
    target = read.shared.relative_to(part.box)
    if not isinstance(dtype, Format):
        read_box_with(read_into, header, source, part.tensor[target.slices])
    elif part.quantized is not None:
        columns = read.box.shape[-1]
        target_rows = block_rows(target, dtype, columns)
        read_box_with(read_into, header, block_rows(source, dtype, columns), part.tensor[target_rows.slices])
    else:
        _read_dequantized(read_into, header, dtype, read.box, source, part.tensor[target.slices])


def _read_dequantized(
    read_into: ReadInto, header: TensorHeader, format: Format, box: Box, source: Box, out: Tensor
) -> None:
    """Read the block rows that contain `source`, a region of a stored box, and dequantize the region into `out`."""
    columns = box.shape[-1]
    rows = block_rows(source, format, columns)
    data = torch.empty(rows.shape, dtype=torch.uint8, device="cpu")
    read_box_with(read_into, header, rows, data)
    start = rows.offsets[1] * format.block[0]
    num_rows = min(rows.shape[1] * format.block[0], box.shape[-2] - start)
    values = dequantize(data, format, num_rows, columns)
    first = source.offsets[-2] - start
    region = values[:, first : first + source.shape[-2], source.slices[-1]]
    out.copy_(region.reshape(out.shape))


def _compare(
    ranks: RankSync, path: Location, stored: Mapping[str, StoredTensor], parts: Mapping[str, TensorPart],
    allow: Sequence[str],
) -> tuple[str, ...]:
    """Return a line for each allowed difference, the same on all ranks; raise ValueError for all others."""
    names = sorted(stored)

    def compare_rank() -> tuple[dict[str, str], int]:
        """Return this rank's differences, and a bit mask (a small message) of the checkpoint's names that it has."""
        return _differences(stored, parts), sum(1 << bit for bit, name in enumerate(names) if name in parts)

    differences: dict[str, str] = {}
    known = 0
    for rank_differences, rank_known in ranks.gather(compare_rank):
        differences |= rank_differences
        known |= rank_known
    missing = differences.keys() - stored.keys()
    unexpected = {name for bit, name in enumerate(names) if not known >> bit & 1}
    differences |= dict.fromkeys(unexpected, "is in the checkpoint only")
    _check_stage_numbers(path, stored, missing, unexpected)
    for name, nearest_name in _nearest_names(missing, unexpected, names).items():
        differences[name] += f"; the nearest name is {nearest_name}"
    lines = {name: f"{name} {difference}" for name, difference in sorted(differences.items())}
    allowed = {name: line for name, line in lines.items() if is_allowed(name, allow)}
    raise_for(f"{path} does not fit the model; name what may differ in `allow`:",
              [line for name, line in lines.items() if name not in allowed])
    return tuple(allowed.values())


def _differences(stored: Mapping[str, StoredTensor], parts: Mapping[str, TensorPart]) -> dict[str, str]:
    """Return the tensors of this rank that the checkpoint lacks or has in another shape or dtype, and in what way."""
    differences = {}
    for name, part in parts.items():
        if name not in stored:
            differences[name] = "is missing from the checkpoint"
            continue
        dtype, shape, _ = stored[name]
        if shape != part.shape:
            differences[name] = f"has shape {shape} in the checkpoint, {part.shape} in the model"
        elif dtype != part.dtype:
            differences[name] = f"is {short_name(dtype)} in the checkpoint, {short_name(part.dtype)} in the model"
    return differences


def _nearest_names(missing: set[str], unexpected: set[str], stored: Sequence[str]) -> dict[str, str]:
    """For names that only the model or only the checkpoint has, return the most similar name in the other, if any."""
    similar = {}
    for names, candidates, more_candidates in ((missing, unexpected, stored), (unexpected, missing, ())):
        if len(candidates) >= _MAX_CANDIDATES:
            continue
        for name in sorted(names)[:_MAX_NEAREST]:
            matches = nearest(name, candidates) or nearest(name, more_candidates)
            if matches:
                similar[name] = matches[0]
    return similar


def _check_stage_numbers(
    path: Location, stored: Mapping[str, StoredTensor], missing: set[str], unexpected: set[str]
) -> None:
    """Raise ValueError if names of the checkpoint start with other stage numbers than names of the model."""
    saved = stage_numbers(stored)
    current = stage_numbers(missing | stored.keys() - unexpected)
    if saved != current:
        raise ValueError(f"{path} has names with the numbers of {len(saved)} stages, the model with those of "
                         f"{len(current)}: load it into a pipeline of the same stages")
