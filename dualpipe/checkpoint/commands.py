"""`dualpipe checkpoint`: which checkpoints a directory has, whether they are whole, and what is in one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from dualpipe.checkpoint.directory import find, none_whole
from dualpipe.checkpoint.manifest import Manifest, StoredTensor, verify
from dualpipe.checkpoint.tensors import bytes_in_file
from dualpipe.runtime.byte_sizes import format_bytes
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import raise_for


def ls(path: str | PathLike[str]) -> Iterator[str]:
    """A line for each checkpoint, newest first, and for what is unfinished. Checks sizes; reads no tensors."""
    unfinished, found = sorted(Path(path).glob(".tmp-step-*")), find(path)
    if not (found.committed or found.damaged or unfinished):
        none_whole(path, ())
    yield f"{'step':>10}  {'saved at':25}  {'size':>9}  {'layout':22}  {'dtypes':15}  state"
    for checkpoint in found.committed:
        manifest, (stored, wrong) = checkpoint.manifest, checkpoint.tensors()
        if wrong and not checkpoint.is_there():
            continue  # deleted meanwhile, by the job that saves here
        dtypes = ", ".join(sorted({short_name(entry.dtype) for entry in stored.values()}))
        state, size = f"DAMAGED: {wrong[0]}" if wrong else "complete", format_bytes(manifest.size)
        yield f"{manifest.step:>10}  {manifest.saved_at:25}  {size:>9}  {_layout(manifest):22}  {dtypes:15}  {state}"
    for problem in found.damaged.values():
        yield f"{'-':>10}  DAMAGED: {problem}"
    for folder in unfinished:
        yield f"{'-':>10}  not complete: {folder} is being written, or was left by a job that died"


def check(path: str | PathLike[str]) -> Iterator[str]:
    """Read every byte of a checkpoint, or of all in a directory; at the end raises ValueError for what is wrong."""
    found = find(path)
    problems = [*found.damaged.values()]
    if not (found.committed or problems):
        none_whole(path, ())
    for each in found.committed:
        wrong = verify(each.path)
        if wrong and not each.is_there():
            yield f"{each.path}: deleted meanwhile"
            continue
        problems += wrong
        yield f"{each.path}: " + ("DAMAGED" if wrong else f"complete, {format_bytes(each.manifest.size)} verified")
    raise_for("what cannot be loaded:", problems)


def show(path: str | PathLike[str]) -> Iterator[str]:
    """What is in a checkpoint, of a directory in the newest. Reads no tensors. Raises ValueError for a damaged one."""
    while True:
        found = find(path)
        if not found.committed:
            none_whole(path, found.damaged.values())
        checkpoint = found.committed[0]
        stored, wrong = checkpoint.tensors()
        if not wrong or checkpoint.is_there():  # else a job that saves here has deleted it
            break
    raise_for(f"{checkpoint.path}:", wrong)
    manifest = checkpoint.manifest
    yield f"{checkpoint.path}: step {manifest.step}, saved at {manifest.saved_at}, {format_bytes(manifest.size)}"
    yield f"layout: {_layout(manifest)} ({manifest.layout['world']} ranks)"
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    parts: dict[str, list[StoredTensor]] = {"model": []}  # by what stands before the first "/", such as "optimizer"
    for name, entry in stored.items():
        parts.setdefault(name.split("/")[0] if "/" in name else "model", []).append(entry)
    for title, tensors in parts.items():
        counts = Counter(short_name(entry.dtype) for entry in tensors)
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())
        elements = sum(prod(entry.shape) for entry in tensors)
        size = sum(bytes_in_file(entry.dtype, entry.shape) for entry in tensors)
        yield f"{title}: {len(tensors):,} tensors ({dtypes}), {elements:,} elements, {format_bytes(size)}"
    for title, used in (("extra", manifest.extra), ("config", manifest.config)):
        if used is not None:
            yield f"{title}:"
            yield from (f"  {name} = {json.dumps(value)}" for name, value in _leaves(used))
    for name, entry in sorted(stored.items()):
        if "/" not in name:
            uses = ", ".join(f"{use} {dtype}" for use, dtype in manifest.dtypes.get(name, {}).items())
            yield f"  {name}  {entry.shape}  {short_name(entry.dtype)}" + (f"  ({uses})" if uses else "")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values inside nested objects, such as ("optimizer.groups[0].lr", 0.1); lists of values are values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{index}]")
    else:
        yield name or "-", value


def _layout(manifest: Manifest) -> str:
    return ", ".join(f"{name} {size}" for name, size in manifest.layout.items() if name != "world")
