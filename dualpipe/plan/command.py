"""`dualpipe plan`: the runs of a model that fit on N GPUs, best first, and the parts of their steps.

`dualpipe.plan.search` says what a run is.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from dualpipe.plan.machines import GPUS_PER_NODE, read_machine
from dualpipe.plan.memory import GB
from dualpipe.plan.predict import Prediction
from dualpipe.plan.search import PlanRequest, plan
from dualpipe.runtime.files import check_parent, write_texts
from dualpipe.schedule.search.progress import SearchProgress
from dualpipe.train.config.load import load_config, replace_input_paths
from dualpipe.train.config.model_config import read_own_model_config
from dualpipe.train.config.schema import Config

COLUMNS = ("row", "pp", "dp", "cp", "ep", "schedule", "chunks", "recompute", "step s", "tok/s/GPU", "MFU",
           "bubble", "all-to-all", "sends", "shards", "GB", "limited by")
LEFT_OUT_FIRST = "sends", "shards", "all-to-all", "bubble", "limited by", "MFU"  # of the columns, in a narrow terminal


def run(args: argparse.Namespace, overrides: Sequence[str]) -> Iterator[str]:
    """Run the command, and yield the lines to print.

    Args:
        args: arguments of `dualpipe plan`.
        overrides: options that replace fields of the configuration.

    Raises:
        ValueError: an argument is invalid, the model cannot be planned, or no run fits.
    """
    config = load_config(args.config, overrides)
    sequence_length = args.sequence_length or config.train.sequence_length
    config = replace(
        config,
        train=replace(config.train, sequence_length=sequence_length),
        parallel=replace(config.parallel, device="cuda"),
    )
    for name in ("gpus", "nodes_of", "rows"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give 1 or more")
    if args.nodes_of and config.parallel.ranks_per_node:
        config = replace(config, parallel=replace(config.parallel, ranks_per_node=args.nodes_of))
    per_node = args.nodes_of or config.parallel.ranks_per_node or GPUS_PER_NODE
    machine = read_machine(args.gpu, node=per_node, measured=tuple(args.costs))
    if args.write:  # before the search, which takes long
        row, path = args.write
        if not row.isdecimal() or int(row) < 1:
            raise ValueError(f"--write has the row {row!r}; give a row of the table, from 1")
        check_parent(Path(path))
    model = read_own_model_config(config, "dualpipe plan")
    request = PlanRequest(
        config, model, machine, args.gpus, _sequences(config, args.global_batch, args.gpus),
        by_memory=args.objective == "memory",
    )
    with SearchProgress(f"layouts of {args.gpus} GPUs") as progress:
        runs = plan(request, args.rows, progress)
    yield from table(runs, by_memory=request.by_memory, width=get_terminal_size((120, 24)).columns)
    if config.parallel.schedule == "auto":
        yield "no schedule is searched for here: choose a mesh, then set parallel.schedule = \"auto\" for it"
    if args.write:
        if int(row) > len(runs):
            raise ValueError(f"there is no row {row}; give one of 1 to {len(runs)}")
        yield from write_texts((path, lambda: to_toml(runs[int(row) - 1].config, Path(path))))


def _sequences(config: Config, tokens: int, gpus: int) -> int:
    """Return the number of sequences per step. tokens: tokens per step, or 0 for the batch of the configuration."""
    t = config.train
    p = config.parallel
    if tokens % t.sequence_length or tokens < 0:
        unit = gpus * t.sequence_length
        nearest = max(1, round(tokens / unit)) * unit
        raise ValueError(f"--global-batch {tokens} is no multiple of a sequence's {t.sequence_length} tokens; give "
                         f"{nearest}")
    if tokens:
        return tokens // t.sequence_length
    return t.batch_size or t.micro_batch_size * t.num_chunks * p.sizes["dp"] * p.ep


def table(runs: Sequence[Prediction], *, by_memory: bool = False, width: int = 0) -> Iterator[str]:
    """Yield the lines of the table: a row per run, with percentages of its step.

    by_memory: as in `PlanRequest`. width: columns of a line that the rows must fit into, with fewer percentages if need
    be; 0: any.
    """
    cells = zip(*(_cells(i, run) for i, run in enumerate(runs, start=1)))
    columns = {name: [name, *values] for name, values in zip(COLUMNS, cells)}
    if all(run.config.parallel.cp == 1 for run in runs):
        del columns["cp"]
    left_out = []
    for name in LEFT_OUT_FIRST:
        if not width or sum(max(map(len, column)) + 2 for column in columns.values()) - 2 <= width:
            break
        del columns[name]
        left_out.append(name)
    widths = [max(map(len, column)) for column in columns.values()]
    for row in zip(*columns.values()):
        yield "  ".join(cell.rjust(size) for cell, size in zip(row, widths)).rstrip()
    best = runs[0]
    kind, order = ("smallest", "least memory") if by_memory else ("fastest", "shortest step")
    yield f"predicted, not measured: a row is the {kind} run that fits on its mesh, of all schedules; {order} first"
    if left_out:
        yield f"left out, as lines would be longer than {width}: {', '.join(left_out)}; a wider terminal shows them"
    length = best.config.train.sequence_length
    yield (f"{best.tokens:,} tokens a step in sequences of {length}; GB of the worst rank, beside "
           f"{best.machine.reserve:g} for CUDA and the allocator")
    replicated = next((run.config.parallel for run in runs if run.config.parallel.dp_replicate > 1), None)
    if replicated is not None:
        parts = replicated.dp_replicate
        size = replicated.dp // parts
        yield f"dp {parts}x{size}: {parts} parts (parallel.dp_replicate), each shards parameters over {size} ranks"
    unpipelined = next((run for run in runs if run.config.parallel.pp == 1), None)
    if unpipelined is None:
        yield "without a pipeline no run fits"
    elif unpipelined is best:
        yield "a pipeline does not pay here: row 1 has none"
    else:
        ratio = unpipelined.step_seconds / best.step_seconds
        yield f"without a pipeline a step takes {ratio:.2f} times as long: row {runs.index(unpipelined) + 1}"


def _cells(number: int, run: Prediction) -> Iterator[str]:
    """Yield the cells of row `number`, in the order of `COLUMNS`."""
    p = run.config.parallel
    t = run.config.train
    parts = run.parts
    rules = "+".join(run.config.memory.recompute) or "none"
    dp = p.dp if p.dp_replicate == 1 else f"{p.dp_replicate}x{p.dp // p.dp_replicate}"
    yield from map(str, (number, p.pp, dp, p.cp, p.ep, p.schedule, f"{t.num_chunks}x{t.micro_batch_size}", rules))
    yield from (f"{run.step_seconds:.4g}", f"{run.tokens_per_second:,.0f}", f"{100 * run.mfu:.1f}%")
    shards = parts["gather"] + parts["reduce"] + parts["optimizer"]
    for part in (parts["bubble"], parts["all-to-all"], parts["sends"], shards):
        yield f"{max(0.0, 100 * part / run.step_seconds):.1f}%"
    yield f"{run.peak / GB:.1f}"
    yield run.limit


def to_toml(config: Config, path: Path) -> str:
    """Return a configuration as TOML: the fields that differ from the defaults.

    Paths that are relative to a configuration file are made relative to `path`, where the TOML will be written.
    """
    folder = path.resolve().parent
    config = replace_input_paths(config, lambda value: os.path.relpath(Path(value).resolve(), folder))
    lines: list[str] = []
    for section, defaults in asdict(Config()).items():
        values: Mapping[str, Any] = asdict(getattr(config, section))
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        subtables = {name: value for name, value in changed.items() if _is_list_of_tables(value)}
        plain = {name: value for name, value in changed.items() if name not in subtables}
        if plain:
            lines += [f"[{section}]", *_toml_lines(plain), ""]
        for name, rows in subtables.items():
            for row in rows:
                lines += [f"[[{section}.{name}]]", *_toml_lines(row), ""]
    return "\n".join(lines)


def _is_list_of_tables(value: Any) -> bool:
    """Return True for values that TOML writes as [[tables]]."""
    return isinstance(value, tuple) and any(isinstance(row, dict) for row in value)


def _toml_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of a TOML table. Fields that are None are left out: TOML has no null."""
    return (f"{name} = {_toml(value)}" for name, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # JSON strings are valid TOML strings
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, tuple | list) else repr(value)
