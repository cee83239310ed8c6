"""Loading a checkpoint into the tensors of a run, in any layout.

Nothing is changed before everything is known to fit: the files are whole (all ranks share the reading), and names,
shapes and dtypes are those of the model. No code of a checkpoint is run, and nothing outside its directory is read.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import native_random
from dualpipe.checkpoint.native_folder import (
    Checkpoint,
    Found,
    Manifest,
    find,
    is_still_there,
    none_whole,
    step_of,
    stored_in,
    verify_files,
)
from dualpipe.checkpoint.native_optimizer import VALUES, ParameterState, check_groups
from dualpipe.checkpoint.native_read import read_parts
from dualpipe.checkpoint.native_save import layout_of
from dualpipe.checkpoint.native_state import Part, State, numbered, parts_of, placed, states_in
from dualpipe.dtypes import short_name
from dualpipe.errors import raise_for
from dualpipe.parallel.description import StoredTensor
from dualpipe.ranks import RankSync

_NEAREST, _MANY = 20, 2000  # of so many names is the nearest looked for, among so many, which takes a while
_TRIES = 20  # to read beside a job that deletes old checkpoints while new ones come


class Loaded(NamedTuple):
    """What was loaded beside the tensors."""

    path: Path
    manifest: Manifest  # step, config, extra, layout, dtypes, versions
    random_restored: bool  # else it was derived from seed, step and rank, as the layout is another
    damaged: dict[Path, str]  # what is wrong with those that were passed over
    allowed: tuple[str, ...]  # the differences that `allow` named


def load(path: str | PathLike[str], state: State, *, mesh: DeviceMesh | None = None,
         allow: Sequence[str] = (), allow_at_start: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Fill `state` (from `training_state`) in place and restore this rank's random state. Collective over `mesh`.

    path: a checkpoint, or a directory of them: then the one that was committed last and is undamaged. That newer ones
        were passed over is warned about, and said in the result. Another job may save there, and delete old ones.
    allow: globs of names that may be missing on either side or have another shape, which leaves the tensor as it is,
        or have another dtype, which casts it.
    allow_at_start: the same, for a checkpoint of step 0 alone, which `import_hf` makes.
    seed: what the random state is derived from if it was saved in another layout.

    Raises on all ranks:
        ValueError: before anything is changed, with a line for each: no checkpoint that is whole; names, shapes and
            dtypes that differ.
        RuntimeError: reading failed after all that, as when a disk fails. The tensors are not usable then.
    """
    ranks, path = RankSync.of_mesh(mesh), Path(path)
    ranks.agree(lambda: _writable(parts_of(state)))
    found, touched = Found([], {}), False
    for attempt in range(_TRIES):
        try:
            found = ranks.first(lambda: find(path))
            return _load(path, found, state, ranks, layout_of(mesh), allow, allow_at_start, seed)
        except (ValueError, RuntimeError, OSError) as error:  # on all ranks
            touched = touched or not isinstance(error, ValueError)
            if attempt < _TRIES - 1 and not ranks.first(lambda seen=found: all(map(is_still_there, seen.committed))):
                continue
            if touched and isinstance(error, ValueError):
                raise RuntimeError(f"{error}; the tensors are not usable, as reading had begun") from error
            raise
    raise AssertionError("the last attempt returns or raises")


def _load(
    path: Path, found: Found, state: State, ranks: RankSync, layout: dict[str, int], allow: Sequence[str],
    allow_at_start: Sequence[str], seed: int,
) -> Loaded:
    checkpoint, stored, damaged = _newest(path, found, ranks)
    parts = ranks.agree(lambda: parts_of(placed(state, stored)))
    globs = (*allow, *(() if checkpoint.manifest.step else allow_at_start))
    allowed = _compare(ranks, checkpoint.path, stored, parts, globs)
    fitting = {name: part for name, part in parts.items() if name in stored and stored[name].shape == part.shape}
    states = states_in(state)
    ranks.agree(lambda: _read_groups(checkpoint.path, stored, fitting, states))
    try:
        ranks.agree(lambda: read_parts(checkpoint.path, stored, fitting))
        for each in states.values():
            each.restore()
        restored = ranks.agree(lambda: _restore_random(checkpoint, layout, ranks.rank, seed))
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{checkpoint.path} could not be read to its end: {error}") from error
    _must_be_there(ranks, checkpoint)
    for line in damaged.values() if ranks.rank == 0 else ():
        warnings.warn(f"passed over for {checkpoint.path}: {line}", stacklevel=3)
    return Loaded(*checkpoint, restored, damaged, allowed)


def _read_groups(
    path: Path, stored: Mapping[str, StoredTensor], fitting: Mapping[str, Part], states: Mapping[str, ParameterState]
) -> None:
    """Of torch's optimizers the hyperparameters, which must fit the groups before anything is changed."""
    if values := {name: part for name in states if (part := fitting.get(f"{name}/{VALUES}")) is not None}:
        read_parts(path, stored, {f"{name}/{VALUES}": part for name, part in values.items()})
        check_groups(states)


def _writable(parts: dict[str, Part]) -> dict[str, Part]:
    for name, part in parts.items():
        if any(stride == 0 and size > 1 for stride, size in zip(part.tensor.stride(), part.tensor.shape)):
            raise ValueError(f"{name} is expanded: its elements share memory, so it cannot be loaded into")
    return parts


# -- which one


def _newest(
    path: Path, found: Found, ranks: RankSync
) -> tuple[Checkpoint, dict[str, StoredTensor], dict[Path, str]]:
    """The first candidate that is whole, what it holds, and what is wrong with those that should come before it."""
    wrong: dict[Path, str] = {}
    for candidate in found.committed:
        problems = _problems(candidate, ranks)
        if not problems:
            stored, problems = ranks.first(lambda c=candidate: stored_in(c))
        if not problems:
            newer = {each: what for each, what in found.damaged.items() if step_of(each) > candidate.manifest.step}
            return candidate, stored, wrong | newer
        _must_be_there(ranks, candidate)
        wrong[candidate.path] = "; ".join(problems)
    none_whole(path, [*wrong.values(), *found.damaged.values()])


def _must_be_there(ranks: RankSync, checkpoint: Checkpoint) -> None:
    """Raise RuntimeError where a job that saves there has deleted or replaced it; there are newer ones then."""
    if not ranks.first(lambda: is_still_there(checkpoint)):
        raise RuntimeError(f"{checkpoint.path} was deleted or replaced while it was read")


def _problems(checkpoint: Checkpoint, ranks: RankSync) -> list[str]:
    """What is wrong with the files; every rank reads some."""
    share = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.size]
    found = ranks.gather(lambda: verify_files(*checkpoint, share))
    return [problem for problems in found for problem in problems]


# -- whether it fits


def _compare(
    ranks: RankSync, path: Path, stored: Mapping[str, StoredTensor], parts: Mapping[str, Part], allow: Sequence[str]
) -> tuple[str, ...]:
    """The differences that are allowed, the same on all ranks; raises ValueError for all others."""
    names = sorted(stored)
    known = sum(1 << place for place, name in enumerate(names) if name in parts)  # small, to be sent to all
    differ, missing, known_anywhere = {}, set(), 0
    for rank_differ, rank_missing, rank_known in ranks.gather(lambda: (*_differences(stored, parts), known)):
        differ |= rank_differ
        missing |= rank_missing
        known_anywhere |= rank_known
    unexpected = {name for place, name in enumerate(names) if not known_anywhere >> place & 1}
    differ |= dict(_named(missing, "is missing from the checkpoint", unexpected, names))
    differ |= dict(_named(unexpected, "is in the checkpoint only", missing, ()))
    allowed = {name for name in differ if any(fnmatchcase(name, pattern) for pattern in allow)}
    had, have = numbered(names), set().union(*ranks.gather(lambda: numbered(parts)))
    if had != have:
        raise ValueError(f"{path} has names by the numbers of {len(had)} stages, the model by those of {len(have)}: "
                         "such a checkpoint can be loaded into a pipeline of the same stages alone")
    lines = {name: f"{name} {difference}" for name, difference in sorted(differ.items())}
    raise_for(f"{path} does not fit the model; name what may differ in `allow`:",
              [line for name, line in lines.items() if name not in allowed])
    return tuple(line for name, line in lines.items() if name in allowed)


def _differences(
    stored: Mapping[str, StoredTensor], parts: Mapping[str, Part]
) -> tuple[dict[str, str], set[str]]:
    """Of this rank's tensors: what is otherwise in the checkpoint, and what is not there."""
    differ, missing = {}, set()
    for name, part in parts.items():
        entry = stored.get(name)
        if entry is None:
            missing.add(name)
        elif entry.shape != part.shape:
            differ[name] = f"has shape {entry.shape} in the checkpoint, {tuple(part.shape)} in the model"
        elif (dtype := entry.dtype) != part.tensor.dtype:
            differ[name] = f"is {short_name(dtype)} in the checkpoint, {short_name(part.tensor.dtype)} in the model"
    return differ, missing


def _named(
    names: Iterable[str], what: str, others: Collection[str], rest: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Each name with what is said of it, the first ones with the nearest of the others, or else of the rest."""
    for number, name in enumerate(sorted(names)):
        near = []
        if number < _NEAREST and len(others) < _MANY:
            near = difflib.get_close_matches(name, others, 1) or difflib.get_close_matches(name, rest, 1)
        yield name, what + (f"; the nearest name is {near[0]}" if near else "")


# -- random numbers


def _restore_random(checkpoint: Checkpoint, layout: dict[str, int], rank: int, seed: int) -> bool:
    same = checkpoint.manifest.layout == layout
    if same:
        content = json.loads((checkpoint.path / f"rank-{rank:05}.json").read_text(encoding="utf-8"))
        native_random.restore(content["random"])
    else:
        native_random.derive(seed, checkpoint.manifest.step, rank)
    return same
