"""`dualpipe checkpoint`: list the checkpoints of a directory, verify them, show one, and clean up after jobs that died.

Every path may be a URL.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from math import prod
from shlex import quote
from typing import Any

from dualpipe.checkpoint.directory import (
    find,
    find_unfinished,
    is_checkpoint,
    is_copy,
    open_directory,
    raise_none_complete,
)
from dualpipe.checkpoint.manifest import (
    MARKER,
    WRITE_MARKER,
    Checkpoint,
    Manifest,
    StoredTensor,
    identity_of,
    verify,
)
from dualpipe.checkpoint.tensors import bytes_in_file
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import CheckFailed, raise_for
from dualpipe.runtime.printing import format_bytes
from dualpipe.runtime.storage import Location, StrLocation, as_location


def ls(path: StrLocation) -> Iterator[str]:
    """Yield a table with a line for each checkpoint, newest first, then damaged and unfinished ones.

    Checks the sizes of files. Reads no tensors. The paths can be pasted into a shell.

    Raises:
        ValueError: there is nothing to list at `path`.
    """
    unfinished = _unfinished(as_location(path))
    checkpoints = find(path)
    if not (checkpoints.committed or checkpoints.damaged or unfinished):
        raise_none_complete(path, ())
    paths = [checkpoint.path for checkpoint in checkpoints.committed]
    width = max(len(quote(str(location))) for location in (*paths, *checkpoints.damaged, *unfinished))
    yield f"{'step':>10}  {'saved at':25}  {'size':>9}  {'layout':22}  {'dtypes':15}  {'path':{width}}  state"
    for checkpoint in checkpoints.committed:
        stored, problems = checkpoint.read_tensors()
        if problems and not checkpoint.still_exists():
            continue  # the job that saves to this directory has just deleted it
        manifest = checkpoint.manifest
        dtypes = ", ".join(sorted({short_name(tensor.dtype) for tensor in stored.values()}))
        size = format_bytes(manifest.size)
        state = f"DAMAGED: {problems[0]}" if problems else "complete"
        shown = quote(str(checkpoint.path))
        yield (f"{manifest.step:>10}  {manifest.saved_at:25}  {size:>9}  {_layout(manifest):22}  {dtypes:15}  "
               f"{shown:{width}}  {state}")
    for location, problem in checkpoints.damaged.items():
        yield f"{'-':>10}  {quote(str(location))}  DAMAGED: {problem}"
    for location, reason in unfinished.items():
        yield f"{'-':>10}  {quote(str(location))}  not complete: {reason}"


def _unfinished(path: Location) -> dict[Location, str]:
    """Return the saves in a directory that are not committed, each with the reason."""
    being_written = "it is being written or deleted, or was left by a job that died"
    copy = (f"it has no {MARKER}, and no job wrote it here: a copy of a local checkpoint, which stays; to use it, make "
            f"the object by {WRITE_MARKER}")
    return {save: copy if is_copy(save) else being_written for save in find_unfinished(path)}


def clean(path: StrLocation) -> Iterator[str]:
    """Remove the unfinished saves of jobs that died from a directory; yield a line for each.

    A store has no locks: there, no job may be saving meanwhile.

    Raises:
        ValueError: there is nothing at `path`, it is a single checkpoint, or a job is saving to this local directory.
    """
    directory = as_location(path)
    if is_checkpoint(directory):
        raise ValueError(f"{directory} is one checkpoint; give the directory that holds it")
    checkpoints = find(directory)
    if not (checkpoints.committed or checkpoints.damaged or _unfinished(directory)):
        raise_none_complete(directory, ())
    with closing(open_directory(directory, patience=1.0)) as opened:
        leftovers = opened.remove_unfinished(lambda: None)
    for leftover in leftovers:
        yield f"{leftover}: removed"
    yield f"{directory}: {len(leftovers) or 'nothing'} removed"


def check(path: StrLocation) -> Iterator[str]:
    """Read every byte of a checkpoint, or of all checkpoints in a directory, and yield a line for each.

    Raises:
        ValueError: there is no checkpoint.
        CheckFailed: after the last line, if some checkpoints are damaged; lists all problems.
        OSError: the store of a URL cannot be reached. Notes list the damage found before.
    """
    location = as_location(path)
    try:
        checkpoints = find(location)
    except ValueError as error:
        if is_checkpoint(location) and identity_of(location) is not None:
            raise CheckFailed(str(error)) from error
        raise
    if not (checkpoints.committed or checkpoints.damaged):
        raise_none_complete(path, ())
    problems = [*checkpoints.damaged.values()]
    for checkpoint in checkpoints.committed:
        try:
            damage = verify(checkpoint.path)
            is_deleted = bool(damage) and not checkpoint.still_exists()
        except OSError as error:
            outage = OSError(f"{checkpoint.path} is not verified, as the store cannot be reached: {error}; try again")
            for problem in problems:
                outage.add_note(problem)
            raise outage from error
        if is_deleted:
            yield f"{checkpoint.path}: deleted in the meantime"
            continue
        problems += damage
        result = "DAMAGED" if damage else f"complete, {format_bytes(checkpoint.manifest.size)} verified"
        yield f"{checkpoint.path}: {result}"
    raise_for("these checkpoints are damaged and cannot be loaded:", problems, CheckFailed)


def show(path: StrLocation) -> Iterator[str]:
    """Yield lines about the contents of a checkpoint, or of the newest one in a directory. Reads no tensors.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    checkpoint, stored = _newest_tensors(path)
    manifest = checkpoint.manifest
    yield f"{checkpoint.path}: step {manifest.step}, saved at {manifest.saved_at}, {format_bytes(manifest.size)}"
    yield f"layout: {_layout(manifest)} ({manifest.layout['world']} ranks)"
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield from _summarize(stored)
    for title, content in (("extra", manifest.extra), ("config", manifest.config)):
        if content is not None:
            yield f"{title}:"
            yield from (f"  {name} = {json.dumps(value)}" for name, value in _flatten(content))
    for name, tensor in sorted(stored.items()):
        if "/" not in name:
            uses = ", ".join(f"{use} {dtype}" for use, dtype in manifest.dtypes.get(name, {}).items())
            yield f"  {name}  {tensor.shape}  {short_name(tensor.dtype)}" + (f"  ({uses})" if uses else "")


def _newest_tensors(path: StrLocation) -> tuple[Checkpoint, dict[str, StoredTensor]]:
    """Return the checkpoint at `path`, or the newest in that directory, and its tensors by name."""
    while True:
        checkpoints = find(path)
        if not checkpoints.committed:
            raise_none_complete(path, checkpoints.damaged.values())
        checkpoint = checkpoints.committed[0]
        stored, problems = checkpoint.read_tensors()
        if not problems:
            return checkpoint, stored
        if checkpoint.still_exists():  # else the job that saves to this directory has just deleted it: look again
            raise_for(f"{checkpoint.path}:", problems)


def _summarize(stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield a line with counts and sizes for each group of tensors, named by the prefix before "/" ("optimizer")."""
    groups: dict[str, list[StoredTensor]] = {"model": []}  # tensors without a prefix
    for name, tensor in stored.items():
        groups.setdefault(name.split("/")[0] if "/" in name else "model", []).append(tensor)
    for title, tensors in groups.items():
        counts = Counter(short_name(tensor.dtype) for tensor in tensors)
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())
        elements = sum(prod(tensor.shape) for tensor in tensors)
        size = sum(bytes_in_file(tensor.dtype, tensor.shape) for tensor in tensors)
        yield f"{title}: {len(tensors):,} tensors ({dtypes}), {elements:,} elements, {format_bytes(size)}"


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of nested JSON, such as ("optimizer.groups[0].lr", 0.1).

    Empty dicts and lists without dicts are values.
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}[{index}]")
    else:
        yield name or "-", value


def _layout(manifest: Manifest) -> str:
    """Return the mesh sizes as text, such as "pp 2, dp 1, ep 4"."""
    return ", ".join(f"{name} {size}" for name, size in manifest.layout.items() if name != "world")
