"""Where the ranks of a job meet first: before there is any group, they compare what they were started with.

Ranks that train on with other seeds, learning rates or models than the rest do not fail; they spoil the result. So each
leaves a digest of its settings in the store that MASTER_ADDR and MASTER_PORT name, and rank 0 compares; the settings
themselves are exchanged only where they differ: a job of thousands of ranks sends 64 bytes a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dualpipe import __version__
from dualpipe.train.launch import RankInfo
from dualpipe.train.tables import Config

_SHOWN, _CHARACTERS = 8, 80  # fields that differ, and of each value
_PATIENCE = timedelta(seconds=30)  # of a job that ends, for others to come and read why
_MAY_DIFFER = ("model.config", "output.dir")  # paths on each node

T = TypeVar("T")


def connect(info: RankInfo, timeout: timedelta) -> dist.Store:
    """The store of the job, on rank 0's machine; ValueError where MASTER_ADDR and MASTER_PORT lead to none."""
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_ADDR = {address!r} and MASTER_PORT = {port!r} must be rank 0's host and a free port "
                         "there, 1 to 65535; set them on every rank, or start the job by torchrun")
    hosts_store = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store still has what the last one wrote
    try:
        store = dist.TCPStore(address, int(port), info.world_size, hosts_store, timeout, False, multi_tenant=True)
        return dist.PrefixStore(f"attempt {attempt}", store)
    except dist.DistError as error:
        line = str(error).partition("\n")[0]
        raise ValueError(f"rank {info.rank} cannot meet the others at MASTER_ADDR:MASTER_PORT = {address}:{port}; give "
                         f"rank 0's host and a port that is free there, the same on every rank ({line})") from error


def agree(store: dist.Store, info: RankInfo, prepare: Callable[[dict[str, Any]], T], timeout: timedelta) -> T:
    """Do `prepare` on every rank, compare their settings, and return what it gave here.

    prepare: puts what must be the same on all ranks (values as in JSON) into the given dictionary.

    Raises ValueError, with the same text on every rank, where settings differ (fields, ranks, values) or `prepare`
    raised it on some rank; TimeoutError where ranks do not come.
    """
    settings: dict[str, Any] = {}
    record = {"settings": settings, "error": ""}
    prepared: list[T] = []
    error = None
    try:
        prepared.append(prepare(settings))
    except Exception as raised:  # told to the others before it is raised here
        error = raised
        record["error"] = str(raised) if isinstance(raised, ValueError) else repr(raised)
    try:
        wrong = _compare(store, info, record, timeout)
    except dist.DistError as lost:
        raise TimeoutError(f"rank {info.rank} lost rank 0, or waited {timeout.total_seconds():g} s for it, while all "
                           "ranks compared their settings; see what rank 0 printed") from lost
    if error is not None and not isinstance(error, ValueError):
        raise error
    if wrong:
        raise ValueError(wrong) from error
    return prepared[0]


def tell_others(info: RankInfo, error: ValueError) -> None:
    """Have the other ranks raise `error` too, which kept this one from knowing its settings. Waits 30 s at most."""

    def fail(settings: dict[str, Any]) -> None:
        raise error

    with suppress(ValueError, TimeoutError):  # it is raised here in any case
        agree(connect(info, _PATIENCE), info, fail, _PATIENCE)


def run_settings(config: Config) -> Iterator[tuple[str, Any]]:
    """What makes two ranks part of the same run, by name: their configuration, the model's, and the code.

    What may differ from node to node is left out: the path of the model's config.json, whose content is compared, and
    output.dir, unless checkpoints, which all ranks write, are in it.
    """
    from dualpipe.train.model import read_model_config

    for table, fields in asdict(config).items():
        for name, value in fields.items():
            if f"{table}.{name}" not in _MAY_DIFFER:
                yield f"{table}.{name}", value
    if config.checkpoint.interval and config.checkpoint.mode != "off":
        yield "the directory of checkpoints", str(config.checkpoint_directory)
    yield "version of torch", str(torch.__version__)
    yield "version of dualpipe", __version__
    yield "sources of dualpipe (digest)", _source_digest()
    for name, value in read_model_config(config).to_dict().items():
        yield f"the model's {name}", value


@cache
def _source_digest() -> str:
    """A digest of every Python file that is imported as `dualpipe`."""
    files: dict[Path, Path] = {}  # by name: of an installed package the last two are in the first, else they are not
    for package in ("dualpipe", "dualpipe.kernels", "dualpipe.models"):
        folder = Path(find_spec(package).submodule_search_locations[0])  # type: ignore[union-attr, index]
        files |= {Path(*package.split("."), path.relative_to(folder)): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compare(store: dist.Store, info: RankInfo, record: dict[str, Any], timeout: timedelta) -> str:
    """What is wrong on any rank, the same text on all; empty where nothing is."""
    text = json.dumps(record, sort_keys=True, default=str)
    digests = _gather(store, info, "digest", hashlib.sha256(text.encode()).hexdigest(), timeout)
    if info.rank == 0:
        store.set("settings/asked", "for" if len(set(digests)) > 1 or record["error"] else "")
    if not store.get("settings/asked"):
        return ""
    records = [json.loads(each) for each in _gather(store, info, "record", text, timeout)]
    if info.rank == 0:
        store.set("settings/wrong", "; ".join(_differences(records)))
    wrong = store.get("settings/wrong").decode()
    with suppress(TimeoutError):
        _gather(store, info, "read", "", _PATIENCE)
    return wrong


def _gather(store: dist.Store, info: RankInfo, what: str, value: str, timeout: timedelta) -> list[bytes]:
    """Each rank's value, on rank 0; raises TimeoutError there that names the ranks which do not come."""
    store.set(f"settings/{what}/{info.rank}", value)
    if info.rank != 0:
        return []
    keys = [f"settings/{what}/{rank}" for rank in range(info.world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistError as error:
        missing = _ranges([rank for rank, key in enumerate(keys) if not store.check([key])])
        raise TimeoutError(f"rank 0 waited {timeout.total_seconds():g} s for {missing} of {info.world_size}; they were "
                           "not started or have failed: see what they printed") from error
    return store.multi_get(keys)


def _differences(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """records: of each rank its settings, as far as it got, and its error."""
    different, settings = [], [record["settings"] for record in records]
    for name in dict.fromkeys(chain.from_iterable(settings)):
        ranks_of = _by_value({rank: repr(each[name]) for rank, each in enumerate(settings) if name in each})
        if len(ranks_of) > 1:
            values = ", ".join(f"{value[:_CHARACTERS]} on {_ranges(ranks)}" for value, ranks in ranks_of.items())
            different.append(f"{name} is {values}")
    if different:
        more = f" (and {len(different) - _SHOWN} more)" if len(different) > _SHOWN else ""
        yield (f"the ranks were started with different settings: {', '.join(different[:_SHOWN])}{more}; start all with "
               "the same command, files and versions")
    errors = {rank: record["error"] for rank, record in enumerate(records) if record["error"]}
    for error, ranks in _by_value(errors).items():
        yield error if len(ranks) == len(records) else f"{_ranges(ranks)}: {error}"


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def _ranges(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
