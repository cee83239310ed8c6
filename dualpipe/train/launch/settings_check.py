"""The check that all ranks of a job were started with the same settings.

Ranks with different seeds, learning rates or models do not fail; they spoil the result. So before any process group
exists, each rank puts a digest of its settings into the store at MASTER_ADDR and MASTER_PORT, and rank 0 compares them.
The settings themselves are exchanged only if digests differ: a job of thousands of ranks sends 64 bytes per rank.
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

ANSWER = timedelta(seconds=5)  # other ranks wait this much longer than rank 0, for it to name the missing rank
PATIENCE = timedelta(seconds=30)  # time that a failing rank waits for the others to arrive and read its error
_MAX_FIELDS = 8  # different settings in an error
_MAX_CHARACTERS = 80  # of a value in an error
_MAY_DIFFER = ("model.config", "output.dir", "parallel.interface")  # from node to node

T = TypeVar("T")


def run_settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the settings, by name, that all ranks of a run must share besides the model: configuration and code.

    Settings that may differ from node to node are left out: the path of the model's config.json, whose content is
    compared, the network interface, and output.dir, unless it contains the checkpoints, which all ranks write.
    """
    for table, fields in asdict(config).items():
        for name, value in fields.items():
            if f"{table}.{name}" not in _MAY_DIFFER:
                yield f"{table}.{name}", value
    if config.checkpoint.interval and config.checkpoint.mode != "off":
        yield "the directory of checkpoints", str(config.checkpoint_directory)
    yield "version of torch", str(torch.__version__)
    yield "version of dualpipe", __version__
    # Keyed by module path, so that no file counts twice: once installed, kernels and models are inside dualpipe.
    sources: dict[Path, Path] = {}
    for package in ("dualpipe", "dualpipe.kernels", "dualpipe.models"):
        folder = Path(find_spec(package).submodule_search_locations[0])  # type: ignore[union-attr, index]
        sources |= {Path(*package.split("."), path.relative_to(folder)): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    yield "sources of dualpipe (digest)", digest.hexdigest()[:16]


def model_settings(model: TrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the model's configuration, by name, that all ranks must share."""
    for name, value in model.to_dict().items():
        yield f"the model's {name}", value


def agree(store: dist.Store, info: RankInfo, prepare: Callable[[dict[str, Any]], T], timeout: timedelta) -> T:
    """Run `prepare` on every rank, compare the settings of all ranks, and return this rank's result.

    prepare: fills the dictionary that it receives with the settings that must be the same on all ranks, as JSON values.

    Raises ValueError, with the same text on every rank, if settings differ (naming fields, ranks and values) or
    `prepare` raised one on any rank; TimeoutError if ranks are missing.
    """
    settings: dict[str, Any] = {}
    error: Exception | None = None
    try:
        result = prepare(settings)
    except Exception as raised:  # sent to the other ranks first, and raised below
        error = raised
    error_text = "" if error is None else _text_of(error)
    record = json.dumps({"settings": settings, "error": error_text}, sort_keys=True, default=str)
    with Recorder.current().collective("meet", "the settings of all ranks", range(info.world_size)):
        problem = _compare(store, info, record, bool(error_text), timeout)
    if problem:
        with suppress(TimeoutError, dist.DistError):  # rank 0 serves the store, so it stays until others have read
            _gather(store, info, "read", "", PATIENCE)
    if error is not None and not isinstance(error, ValueError):
        raise error
    if problem:
        raise ValueError(problem) from error
    return result


def _text_of(error: Exception) -> str:
    """Return the text of an error for the other ranks; never ""."""
    text = str(error) if isinstance(error, ValueError) else ""
    return text or repr(error)


def _compare(store: dist.Store, info: RankInfo, record: str, failed: bool, timeout: timedelta) -> str:
    """Return the problem in the records of all ranks, the same text on each; "" if there is none.

    failed: the record of this rank contains an error.
    """
    # Longer than rank 0 waits: rank 0 names the missing rank, and its message must come first.
    answer_timeout = timeout if info.rank == 0 else timeout + ANSWER
    try:
        digests = _gather(store, info, "digest", hashlib.sha256(record.encode()).hexdigest(), timeout)
        if info.rank == 0:
            # "yes": rank 0 asks for the settings themselves; "": all digests are equal.
            store.set("settings/asked", "yes" if failed or len(set(digests)) > 1 else "")
        store.wait(["settings/asked"], answer_timeout)
        if not store.get("settings/asked"):
            return ""
        records = [json.loads(text) for text in _gather(store, info, "record", record, timeout)]
        if info.rank == 0:
            store.set("settings/wrong", "; ".join(_problems(records)))
        store.wait(["settings/wrong"], answer_timeout)
        return str(store.get("settings/wrong").decode())
    except dist.DistError as lost:
        raise TimeoutError(f"rank {info.rank} lost rank 0, or waited {answer_timeout.total_seconds():g} s for it, "
                           "while all ranks compared their settings; see what rank 0 printed") from lost


def _gather(store: dist.Store, info: RankInfo, name: str, value: str, timeout: timedelta) -> list[bytes]:
    """Return the value of every rank on rank 0, [] on others. Raises TimeoutError on rank 0, naming missing ranks."""
    store.set(f"settings/{name}/{info.rank}", value)
    if info.rank != 0:
        return []
    keys = [f"settings/{name}/{rank}" for rank in range(info.world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistError as error:
        missing = rank_ranges([rank for rank, key in enumerate(keys) if not store.check([key])])
        raise TimeoutError(f"rank 0 waited {timeout.total_seconds():g} s for {missing} of {info.world_size}; they were "
                           "not started or have failed: see what they printed") from error
    return store.multi_get(keys)


def _problems(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a text about different settings, and one for each error.

    records: the settings of each rank, as far as `prepare` got, and its error.
    """
    differences = list(_differences([record["settings"] for record in records]))
    if differences:
        shown = ", ".join(differences[:_MAX_FIELDS])
        more = f" (and {len(differences) - _MAX_FIELDS} more)" if len(differences) > _MAX_FIELDS else ""
        yield (f"the ranks were started with different settings: {shown}{more}; start all with the same command, files "
               "and versions")
    ranks_by_error = defaultdict(list)
    for rank, record in enumerate(records):
        ranks_by_error[record["error"]].append(rank)
    for error, ranks in ranks_by_error.items():
        if error:
            yield error if len(ranks) == len(records) else f"{rank_ranges(ranks)}: {error}"


def _differences(settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a text for each setting that differs between ranks, with its values. settings: of each rank."""
    for name in dict.fromkeys(chain.from_iterable(settings)):
        ranks_by_value = defaultdict(list)
        for rank, rank_settings in enumerate(settings):
            if name in rank_settings:
                ranks_by_value[repr(rank_settings[name])].append(rank)
        if len(ranks_by_value) > 1:
            values = ", ".join(f"{value[:_MAX_CHARACTERS]} on {rank_ranges(ranks)}"
                               for value, ranks in ranks_by_value.items())
            yield f"{name} is {values}"
