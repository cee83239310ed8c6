"""Loading a checkpoint into the tensors of a run, in any layout.

Nothing is changed before everything is known to fit: the files are whole (all ranks share the reading), and names,
shapes and dtypes are those of the model. No code of a checkpoint is run, and nothing outside its directory is read.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import native_random
from dualpipe.checkpoint.agree import Ranks
from dualpipe.checkpoint.hub_files import raise_for
from dualpipe.checkpoint.native_folder import Checkpoint, Manifest, find, verify_files
from dualpipe.checkpoint.native_save import layout_of
from dualpipe.checkpoint.native_state import Part, parts_of
from dualpipe.checkpoint.native_store import read_metadata, read_parts
from dualpipe.parallel.sharding import short_name

_NEAREST = 20  # of so many names is the nearest looked for, which takes a while


class Loaded(NamedTuple):
    """What was loaded beside the tensors."""

    path: Path
    manifest: Manifest  # step, config, extra, layout, dtypes, versions
    random_restored: bool  # else it was derived from seed, step and rank, as the layout is another
    damaged: tuple[str, ...]  # what is wrong with the newer checkpoints that were passed over
    allowed: tuple[str, ...]  # the differences that `allow` named


def load(path: str | PathLike[str], state: Mapping[str, Tensor], *, mesh: DeviceMesh | None = None,
         allow: Sequence[str] = (), allow_at_start: Sequence[str] = (), seed: int = 0) -> Loaded:  # fmt: skip
    """Fill `state` (from `training_state`) in place and restore this rank's random state. Collective over `mesh`.

    path: a checkpoint, or a directory of them: then the one that was committed last and is undamaged. That newer ones
        were passed over is warned about, and said in the result.
    allow: globs of names that may be missing on either side or have another shape, which leaves the tensor as it is,
        or have another dtype, which casts it.
    allow_at_start: the same, for a checkpoint of step 0 alone, which `import_hf` makes.
    seed: what the random state is derived from if it was saved in another layout.

    Raises on all ranks:
        ValueError: before anything is changed, with a line for each: no checkpoint that is whole; names, shapes and
            dtypes that differ.
        RuntimeError: reading failed after all that, as when a disk fails. The tensors are not usable then.
    """
    ranks = Ranks(mesh)
    parts = ranks.agree(lambda: parts_of(state))
    checkpoint, metadata, damaged = _newest(Path(path), ranks)
    globs = (*allow, *(() if checkpoint.manifest.step else allow_at_start))
    allowed = _compare(ranks, checkpoint.path, metadata, parts, globs)
    stored = metadata.state_dict_metadata
    fitting = {name: part for name, part in parts.items() if name in stored and stored[name].size == part.shape}
    ranks.agree(lambda: read_parts(checkpoint.path, metadata, fitting))
    restored = ranks.agree(lambda: _restore_random(checkpoint, layout_of(mesh), ranks.rank, seed))
    for line in damaged if ranks.rank == 0 else ():
        warnings.warn(f"loading {checkpoint.path}: {line}", stacklevel=2)
    return Loaded(*checkpoint, restored, damaged, allowed)


# -- which one


def _newest(path: Path, ranks: Ranks) -> tuple[Checkpoint, Metadata, tuple[str, ...]]:
    """The first candidate that is whole, what it holds, and what is wrong with those before it."""
    candidates, wrong = ranks.first(lambda: _candidates(path))
    for candidate in candidates:
        problems = _problems(candidate, ranks)
        if not problems:
            metadata, problems = ranks.first(lambda c=candidate: _metadata(c))
        if not problems:
            return candidate, metadata, tuple(wrong)
        wrong += problems
    raise_for(f"{path} has no checkpoint that is whole:", wrong or ["there is none at all"])
    raise AssertionError("raise_for raises for any problem")


def _candidates(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """What could be loaded, best first, and what is wrong with others that have the name of a checkpoint."""
    found = find(path)
    return found.committed, [*found.damaged.values()]


def _problems(checkpoint: Checkpoint, ranks: Ranks) -> list[str]:
    """What is wrong with the files; every rank reads some."""
    share = sorted(checkpoint.manifest.files)[ranks.rank :: ranks.size]
    found = ranks.gather(lambda: verify_files(*checkpoint, share))
    return [problem for problems in found for problem in problems]


def _metadata(checkpoint: Checkpoint) -> tuple[Metadata | None, list[str]]:
    try:
        return read_metadata(checkpoint.path, checkpoint.manifest.files.keys()), []
    except ValueError as error:
        return None, [str(error)]


# -- whether it fits


def _compare(
    ranks: Ranks, path: Path, metadata: Metadata, parts: Mapping[str, Part], allow: Sequence[str]
) -> tuple[str, ...]:  # fmt: skip
    """The differences that are allowed, the same on all ranks; raises ValueError for all others."""
    stored = sorted(metadata.state_dict_metadata)
    known = sum(1 << place for place, name in enumerate(stored) if name in parts)  # small, to be sent to all
    differ, missing, known_anywhere = {}, set(), 0
    for rank_differ, rank_missing, rank_known in ranks.gather(lambda: (*_differences(metadata, parts), known)):
        differ |= rank_differ
        missing |= rank_missing
        known_anywhere |= rank_known
    unexpected = {name for place, name in enumerate(stored) if not known_anywhere >> place & 1}
    differ |= dict(_named(missing, "is missing from the checkpoint", unexpected, stored))
    differ |= dict(_named(unexpected, "is in the checkpoint only", missing, ()))
    allowed = {name for name in differ if any(fnmatchcase(name, pattern) for pattern in allow)}
    lines = {name: f"{name} {difference}" for name, difference in sorted(differ.items())}
    raise_for(f"{path} does not fit the model; name what may differ in `allow`:",
              [line for name, line in lines.items() if name not in allowed])  # fmt: skip
    return tuple(line for name, line in lines.items() if name in allowed)


def _differences(metadata: Metadata, parts: Mapping[str, Part]) -> tuple[dict[str, str], set[str]]:
    """Of this rank's tensors: what is otherwise in the checkpoint, and what is not there."""
    differ, missing = {}, set()
    for name, part in parts.items():
        entry = metadata.state_dict_metadata.get(name)
        if entry is None:
            missing.add(name)
        elif entry.size != part.shape:
            differ[name] = f"has shape {tuple(entry.size)} in the checkpoint, {tuple(part.shape)} in the model"
        elif (dtype := entry.properties.dtype) != part.tensor.dtype:
            differ[name] = f"is {short_name(dtype)} in the checkpoint, {short_name(part.tensor.dtype)} in the model"
    return differ, missing


def _named(names: Iterable[str], what: str, others: Iterable[str], rest: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each name with what is said of it, the first ones with the nearest of the others, or else of the rest."""
    for number, name in enumerate(sorted(names)):
        near = []
        if number < _NEAREST:
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
