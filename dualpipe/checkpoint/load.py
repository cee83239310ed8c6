"""Loading a checkpoint into the tensors of a run, in any layout.

Nothing is changed before everything is known to fit: the files are whole (all ranks share the reading), and names,
shapes and dtypes are those of the model. No code of a checkpoint is run, and nothing outside its directory is read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, groupby, takewhile
from os import PathLike
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.directory import FoundCheckpoints, find, none_whole, step_of
from dualpipe.checkpoint.manifest import RANDOM, Checkpoint, Manifest, StoredTensor, file_of, layout_of
from dualpipe.checkpoint.state import (
    VALUES,
    CheckpointState,
    ParameterState,
    TensorPart,
    check_groups,
    derive_random,
    is_allowed,
    numbered,
    parts_of,
    restore_random,
)
from dualpipe.checkpoint.tensors import Box, TensorHeader, block_rows, in_file, read_box, read_header
from dualpipe.kernels.formats import Format
from dualpipe.kernels.quantize import dequantize
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import filling
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import nearest, raise_for
from dualpipe.runtime.rank_sync import RankSync

_NEAREST, _MANY = 20, 2000  # of so many names is the nearest looked for, among so many, which takes a while
_TRIES = 20  # to read beside a job that deletes old checkpoints while new ones come


class Loaded(NamedTuple):
    """What was loaded beside the tensors."""

    path: Path
    manifest: Manifest  # step, config, extra, layout, dtypes, versions
    random_restored: bool  # else it was derived from seed, step and rank, as the layout is another
    damaged: dict[Path, str]  # what is wrong with those that were passed over
    allowed: tuple[str, ...]  # the differences that `allow` named


def load(path: str | PathLike[str], state: CheckpointState, *, mesh: DeviceMesh | None = None,
         allow: Sequence[str] = (), allow_at_start: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Fill `state` (from `training_state`) in place and restore this rank's random state. Collective over `mesh`.

    path: a checkpoint, or a directory of them: then the one that was committed last and is undamaged. That newer ones
        were passed over is warned about, and said in the result. Another job may save there, and delete old ones.
    allow: globs of names that may be missing on either side or have another shape, which leaves the tensor as it is,
        or have another dtype or format, which casts, quantizes or dequantizes it.
    allow_at_start: the same, for a checkpoint of step 0 alone, which `import_hf` makes.
    seed: what the random state is derived from if it was saved in another layout.

    Raises on all ranks:
        ValueError: before anything is changed, with a line for each: no checkpoint that is whole; names, shapes and
            dtypes that differ.
        RuntimeError: reading failed after all that, as when a disk fails. The tensors are not usable then.
    """
    ranks, path = RankSync.of_mesh(mesh), Path(path)
    found, touched = FoundCheckpoints([], {}), False
    for attempt in range(_TRIES):
        try:
            found = ranks.first(lambda: find(path))
            if found.later:  # to go back to an older one would lose what it has
                raise ValueError(found.later)
            loaded = _load(path, found, state, ranks, layout_of(mesh), allow, allow_at_start, seed)
        except (ValueError, RuntimeError, OSError) as error:  # on all ranks
            touched = touched or not isinstance(error, ValueError)
            if attempt < _TRIES - 1 and not ranks.first(partial(all, map(Checkpoint.is_there, found.committed))):
                continue
            if touched and isinstance(error, ValueError):
                raise RuntimeError(f"{error}; the tensors are not usable, as reading had begun") from error
            raise
        for line in loaded.damaged.values() if ranks.rank == 0 else ():
            warnings.warn(f"passed over for {loaded.path}: {line}", stacklevel=2)
        return loaded
    raise AssertionError("the last attempt returns or raises")


def _load(
    path: Path, found: FoundCheckpoints, state: CheckpointState, ranks: RankSync, layout: Mapping[str, int],
    allow: Sequence[str], allow_at_start: Sequence[str], seed: int,
) -> Loaded:

    def must_be_there() -> None:
        """Else a job that saves there has deleted or replaced it; there are newer ones then."""
        if not ranks.first(checkpoint.is_there):
            raise RuntimeError(f"{checkpoint.path} was deleted or replaced while it was read")

    # The first that is whole, and what is wrong with those that should come before it.
    damaged: dict[Path, str] = {}
    for checkpoint in found.committed:
        share = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.size]  # every rank reads some
        problems = [line for lines in ranks.gather(partial(checkpoint.damage, share)) for line in lines]
        stored, problems = ({}, problems) if problems else ranks.first(checkpoint.tensors)
        if not problems:
            break
        must_be_there()
        damaged[checkpoint.path] = "; ".join(problems)
    else:
        none_whole(path, [*damaged.values(), *found.damaged.values()])
    path, manifest = checkpoint
    damaged |= {each: what for each, what in found.damaged.items() if step_of(each) > manifest.step}

    # Whether it fits.
    parts = ranks.agree(lambda: parts_of(state, stored))
    allow = [*allow, *(() if manifest.step else allow_at_start)]
    allowed = _compare(ranks, path, stored, parts, allow)
    fitting = {name: part for name, part in parts.items() if name in stored and stored[name].shape == part.shape}
    states = {name: each for name, each in state.items() if isinstance(each, ParameterState)}
    converted = {name: part for name, part in fitting.items()  # quantized, and stored otherwise: read into masters
                 if part.quantized is not None and stored[name].dtype != part.dtype}

    def read_groups() -> set[str]:
        """Read the hyperparameters of torch's optimizers, which must fit the groups before anything is changed; those
        that begin anew."""
        if values := {name: fitting[name] for each in states if (name := f"{each}/{VALUES}") in fitting}:
            read_parts(checkpoint, stored, values)
        return check_groups(states, allow) if values else set()

    def restore() -> bool:
        """Read everything into its place, and go on with the random state; whether it was that of this rank."""
        masters = {name: TensorPart(part.shape, part.box, cast(Tensor, cast(QuantizedTensor, part.quantized).master))
                   for name, part in converted.items()}
        read_parts(checkpoint, stored, fitting | masters)
        for name, part in fitting.items():
            if part.quantized is not None and part.quantized.master is not None and name not in masters:
                part.quantized.master.copy_(part.quantized.dequantize())
        for name, each in states.items():
            if name not in anew:
                each.restore()
        if manifest.layout != layout:
            derive_random(seed, manifest.step, ranks.rank)
            return False
        restore_random(json.loads(read_header(path / file_of(ranks.rank))[1][RANDOM]))
        return True

    anew = ranks.agree(read_groups)
    fitting = {name: part for name, part in fitting.items() if name.rpartition("/")[0] not in anew}
    try:
        with filling(cast(Tensor, state[name]) for name in converted):
            restored = ranks.agree(restore)
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{path} could not be read to its end: {error}") from error
    must_be_there()
    return Loaded(path, manifest, restored, damaged, allowed)


def read_parts(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], parts: Mapping[str, TensorPart]) -> None:
    """Fill the parts of this rank. Shapes must be those stored; other dtypes are cast.

    Raises RuntimeError where a file does not hold what the description of the checkpoint says.
    """
    wanted: dict[int, list[tuple[str, Box, Box]]] = {}  # by the rank that wrote them: boxes, and what is wanted of each
    for name, part in parts.items():
        for box, rank in stored[name].boxes.items():
            if (shared := box.intersection(part.box)) is not None:
                wanted.setdefault(rank, []).append((name, box, shared))
    for rank, boxes in wanted.items():
        files = takewhile(checkpoint.manifest.files.__contains__, (file_of(rank, number) for number in count()))
        headers = {name: each for file in files for name, each in read_header(checkpoint.path / file)[0].items()}
        for name, box, _ in boxes:
            dtype, found = stored[name].dtype, headers.get(name)
            if found is None or (found.dtype, found.shape) != in_file(dtype, box.shape):
                raise RuntimeError(f"{checkpoint.path / file_of(rank)} does not hold {dtype} {box.shape} of {name}, as "
                                   "it should")
            if not isinstance(dtype, Format):
                headers[name] = found._replace(dtype=dtype, shape=box.shape)  # also of what is held as bytes
        boxes.sort(key=lambda each: headers[each[0]][2:])  # by file, and as they lie in it
        for file, inside in groupby(boxes, key=lambda each: headers[each[0]].file):
            with open(checkpoint.path / file, "rb", buffering=0) as opened:
                for name, box, shared in inside:
                    part, dtype = parts[name], stored[name].dtype
                    there, here = shared.within(box), shared.within(part.box)
                    if not isinstance(dtype, Format):
                        read_box(opened.fileno(), headers[name], there, part.tensor[here.slices])
                    elif part.quantized is not None:
                        rows = block_rows(here, dtype, box.shape[-1])
                        read_box(opened.fileno(), headers[name], block_rows(there, dtype, box.shape[-1]),
                                 part.tensor[rows.slices])
                    else:
                        _read_numbers(opened.fileno(), headers[name], dtype, box, there, part.tensor[here.slices])


def _read_numbers(
    descriptor: int, header: TensorHeader, format: Format, box: Box, there: Box, out: Tensor
) -> None:
    """Read a part of a stored box and dequantize it; blocks of which it has some rows are read whole."""
    columns, rows = box.shape[-1], block_rows(there, format, box.shape[-1])
    data = torch.empty(rows.shape, dtype=torch.uint8, device="cpu")
    read_box(descriptor, header, rows, data)
    start = rows.offsets[1] * format.block[0]
    numbers = dequantize(data, format, min(rows.shape[1] * format.block[0], box.shape[-2] - start), columns)
    first = there.offsets[-2] - start
    wanted = numbers[:, first : first + there.shape[-2], there.slices[-1]]
    out.copy_(wanted.reshape(out.shape))


def _compare(
    ranks: RankSync, path: Path, stored: Mapping[str, StoredTensor], parts: Mapping[str, TensorPart],
    allow: Sequence[str],
) -> tuple[str, ...]:
    """The differences that are allowed, the same on all ranks; raises ValueError for all others."""
    names = sorted(stored)

    def differences() -> tuple[dict[str, str], int]:
        """What of this rank's tensors is otherwise in the checkpoint, or missing; which of its names are known here."""
        differ = {}
        for name, part in parts.items():
            if name not in stored:
                differ[name] = "is missing from the checkpoint"
            elif (there := stored[name].shape) != part.shape:
                differ[name] = f"has shape {there} in the checkpoint, {part.shape} in the model"
            elif (dtype := stored[name].dtype) != part.dtype:
                differ[name] = f"is {short_name(dtype)} in the checkpoint, {short_name(part.dtype)} in the model"
        return differ, sum(1 << place for place, name in enumerate(names) if name in parts)  # small, to be sent to all

    differ: dict[str, str] = {}
    known = 0
    for rank_differ, rank_known in ranks.gather(differences):
        differ |= rank_differ
        known |= rank_known
    missing = differ.keys() - stored.keys()
    unexpected = {name for place, name in enumerate(names) if not known >> place & 1}
    differ |= dict.fromkeys(unexpected, "is in the checkpoint only")
    for here, others, rest in ((missing, unexpected, names), (unexpected, missing, [])):
        for name in sorted(here)[: _NEAREST if len(others) < _MANY else 0]:
            if near := nearest(name, others) or nearest(name, rest):
                differ[name] += f"; the nearest name is {near[0]}"
    numbers = numbered(missing | stored.keys() - unexpected)
    if (had := numbered(names)) != numbers:
        raise ValueError(f"{path} has names by the numbers of {len(had)} stages, the model by those of {len(numbers)}: "
                         "such a checkpoint can be loaded into a pipeline of the same stages alone")
    lines = {name: f"{name} {difference}" for name, difference in sorted(differ.items())}
    allowed = {name: line for name, line in lines.items() if is_allowed(name, allow)}
    raise_for(f"{path} does not fit the model; name what may differ in `allow`:",
              [line for name, line in lines.items() if name not in allowed])
    return tuple(allowed.values())
