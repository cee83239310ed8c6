"""The check that all ranks of a job were started with the same settings.

Ranks that train on with other seeds, learning rates or models than the rest do not fail; they spoil the result. So
before there is any group, each leaves a digest of its settings in the store that MASTER_ADDR and MASTER_PORT name, and
rank 0 compares; the settings themselves are exchanged only where they differ: a job of thousands of ranks sends 64
bytes a rank.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dualpipe import __version__
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Recorder, rank_ranges
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config

ANSWER = timedelta(seconds=5)  # for rank 0 to say which rank does not come
PATIENCE = timedelta(seconds=30)  # of a job that ends, for others to come and read why
_SHOWN, _CHARACTERS = 8, 80  # fields that differ, and of each value
_MAY_DIFFER = ("model.config", "output.dir", "parallel.interface")  # of each node

T = TypeVar("T")


def run_settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield what two ranks of one run have in common, by name, besides the model: their configuration, and the code.

    What may differ from node to node is left out: the path of the model's config.json, whose content is compared, and
    output.dir, unless checkpoints, which all ranks write, are in it.
    """
    for table, fields in asdict(config).items():
        for name, value in fields.items():
            if f"{table}.{name}" not in _MAY_DIFFER:
                yield f"{table}.{name}", value
    if config.checkpoint.interval and config.checkpoint.mode != "off":
        yield "the directory of checkpoints", str(config.checkpoint_directory)
    yield "version of torch", str(torch.__version__)
    yield "version of dualpipe", __version__
    sources: dict[Path, Path] = {}  # by name: of an installed package the last two are in the first, else they are not
    for package in ("dualpipe", "dualpipe.kernels", "dualpipe.models"):
        folder = Path(find_spec(package).submodule_search_locations[0])  # type: ignore[union-attr, index]
        sources |= {Path(*package.split("."), path.relative_to(folder)): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    yield "sources of dualpipe (digest)", digest.hexdigest()[:16]


def model_settings(model: TrainedModel) -> Iterator[tuple[str, Any]]:
    """The model's configuration, by name, which all ranks must have the same of."""
    for name, value in model.to_dict().items():
        yield f"the model's {name}", value


def agree(store: dist.Store, info: RankInfo, prepare: Callable[[dict[str, Any]], T], timeout: timedelta) -> T:
    """Do `prepare` on every rank, compare their settings, and return what it gave here.

    prepare: puts what must be the same on all ranks (values as in JSON) into the given dictionary.

    Raises ValueError, with the same text on every rank, where settings differ (fields, ranks, values) or `prepare`
    raised it on some rank; TimeoutError where ranks do not come.
    """
    settings: dict[str, Any] = {}
    said, error = "", None
    try:
        prepared = prepare(settings)
    except Exception as raised:  # told to the others before it is raised here
        said, error = (isinstance(raised, ValueError) and str(raised)) or repr(raised), raised
    record = json.dumps({"settings": settings, "error": said}, sort_keys=True, default=str)
    with Recorder.current().collective("meet", "the settings of all ranks", range(info.world_size)):
        wrong = _compare(store, info, record, bool(said), timeout)
    if wrong:
        with suppress(TimeoutError, dist.DistError):  # rank 0, which has the store, stays for the others to read it
            _gather(store, info, "read", "", PATIENCE)
    if error is not None and not isinstance(error, ValueError):
        raise error
    if wrong:
        raise ValueError(wrong) from error
    return prepared


def _compare(store: dist.Store, info: RankInfo, record: str, failed: bool, timeout: timedelta) -> str:
    """Return the problem in the records of all ranks, the same text on each; "" where there is none.

    failed: whether this rank's record tells of an error.
    """
    # Longer than rank 0 waits, which names the rank that does not come: its word is the one to be read.
    answered = timeout if info.rank == 0 else timeout + ANSWER
    try:
        digests = _gather(store, info, "digest", hashlib.sha256(record.encode()).hexdigest(), timeout)
        if info.rank == 0:
            store.set("settings/asked", "for" if failed or len(set(digests)) > 1 else "")
        store.wait(["settings/asked"], answered)
        if not store.get("settings/asked"):
            return ""
        records = [json.loads(each) for each in _gather(store, info, "record", record, timeout)]
        if info.rank == 0:
            store.set("settings/wrong", "; ".join(_differences(records)))
        store.wait(["settings/wrong"], answered)
        return str(store.get("settings/wrong").decode())
    except dist.DistError as lost:
        raise TimeoutError(f"rank {info.rank} lost rank 0, or waited {answered.total_seconds():g} s for it, while all "
                           "ranks compared their settings; see what rank 0 printed") from lost


def _gather(store: dist.Store, info: RankInfo, what: str, value: str, timeout: timedelta) -> list[bytes]:
    """Each rank's value, on rank 0; raises TimeoutError there that names the ranks which do not come."""
    store.set(f"settings/{what}/{info.rank}", value)
    if info.rank != 0:
        return []
    keys = [f"settings/{what}/{rank}" for rank in range(info.world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistError as error:
        missing = rank_ranges([rank for rank, key in enumerate(keys) if not store.check([key])])
        raise TimeoutError(f"rank 0 waited {timeout.total_seconds():g} s for {missing} of {info.world_size}; they were "
                           "not started or have failed: see what they printed") from error
    return store.multi_get(keys)


def _differences(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """records: of each rank its settings, as far as it got, and its error."""
    different, settings = [], [record["settings"] for record in records]
    for name in dict.fromkeys(chain.from_iterable(settings)):
        ranks_of = defaultdict(list)
        for rank, each in enumerate(settings):
            if name in each:
                ranks_of[repr(each[name])].append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value[:_CHARACTERS]} on {rank_ranges(ranks)}" for value, ranks in ranks_of.items())
            different.append(f"{name} is {values}")
    if different:
        more = f" (and {len(different) - _SHOWN} more)" if len(different) > _SHOWN else ""
        yield (f"the ranks were started with different settings: {', '.join(different[:_SHOWN])}{more}; start all with "
               "the same command, files and versions")
    ranks_of = defaultdict(list)
    for rank, record in enumerate(records):
        ranks_of[record["error"]].append(rank)
    for error, ranks in ranks_of.items():
        if error:
            yield error if len(ranks) == len(records) else f"{rank_ranges(ranks)}: {error}"
