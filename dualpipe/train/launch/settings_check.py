"""The check that all ranks of a job were started with the same settings.

Ranks with different seeds, learning rates or models do not fail; they spoil the result. So before any process group
exists, rank 0 compares digests of all settings, through the store at MASTER_ADDR and MASTER_PORT. The settings
themselves are sent only if digests differ: a job of thousands of ranks sends 64 bytes per rank.
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
from dualpipe.runtime.ranks.objects import StoreObjects
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder, rank_ranges
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config

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
    record = {"settings": settings, "error": "" if error is None else _text_of(error)}
    objects = StoreObjects(store, info.rank, info.world_size, topic="settings", timeout=timeout)
    problem = ""
    try:
        with Recorder.current().collective("meet", "the settings of all ranks", range(info.world_size)):
            _compare(RankSync(None, objects=objects), record)
    except ValueError as refusal:
        problem = str(refusal)
        with suppress(TimeoutError, dist.DistError):  # rank 0 serves the store, so it stays until others have read
            objects.gather("read", PATIENCE)
    if error is not None and not isinstance(error, ValueError):
        raise error
    if problem:
        raise ValueError(problem) from error
    return result


def _text_of(error: Exception) -> str:
    """Return the text of an error for the other ranks; never ""."""
    text = str(error) if isinstance(error, ValueError) else ""
    return text or repr(error)


def _compare(ranks: RankSync, record: Mapping[str, Any]) -> None:
    """Compare the records of all ranks on rank 0. Raises ValueError on all ranks if there is a problem in them.

    record: the settings of this rank, as far as `prepare` got, and the text of its error, "" without one.
    """
    text = json.dumps(record, sort_keys=True, default=str)
    digest = "failed" if record["error"] else hashlib.sha256(text.encode()).hexdigest()
    digests = set(ranks.collect(digest) or ())
    if ranks.first(lambda: len(digests) == 1 and "failed" not in digests):
        return
    records = ranks.collect(record) or []
    ranks.first(lambda: _raise_problems(records))


def _raise_problems(records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError about different settings and errors. records: of each rank; see `_compare`."""
    problems = list(_problems(records))
    if problems:
        raise ValueError("; ".join(problems))


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
