"""`dualpipe plan`: the runs of a model that fit on so many GPUs, best first, and what their steps are spent on."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dualpipe.plan.draw import to_svg
from dualpipe.plan.explain import explain
from dualpipe.plan.machines import read_machine
from dualpipe.plan.memory import GB
from dualpipe.plan.meshes import PlanRequest, plan
from dualpipe.plan.predict import Prediction
from dualpipe.runtime.files import write_wanted
from dualpipe.schedule.page import WholeStep, to_html
from dualpipe.train.config.load import PATHS, load_config
from dualpipe.train.config.model_config import read_own_model_config
from dualpipe.train.config.schema import Config

DRAWN = 4  # runs whose steps are on a page
COLUMNS = ("row", "pp", "dp", "cp", "ep", "schedule", "micro-batches", "recompute", "step s", "tok/s/GPU", "MFU",
           "bubble", "all-to-all", "sends", "shards", "GB", "limited by")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> Iterator[str]:
    """The lines to print. Raises ValueError for what cannot be planned, and where nothing fits."""
    config = load_config(args.config, overrides)
    config = replace(config, train=replace(config.train, sequence_length=args.sequence_length
                                           or config.train.sequence_length))
    for name in ("gpus", "nodes_of", "rows"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give 1 or more")
    machine = read_machine(args.gpu, node=args.nodes_of, measured=tuple(args.costs))
    model = read_own_model_config(config, "dualpipe plan")
    request = PlanRequest(
        config, model, machine, args.gpus, _sequences(config, args.global_batch),
        by_memory=args.objective == "memory",
    )
    runs = plan(request, args.rows)
    yield from table(runs, by_memory=request.by_memory)
    if config.parallel.schedule == "auto":
        yield "no schedule is searched for here: choose a mesh, then take parallel.schedule = \"auto\" for it"
    for row in filter(None, (args.explain, args.write and args.write[0])):
        if not str(row).isdecimal() or not 1 <= int(row) <= len(runs):
            raise ValueError(f"there is no row {row}; give one of 1 to {len(runs)}")
    if args.explain:
        yield from ("", *explain(runs[int(args.explain) - 1]))
    row, path = args.write or (1, "")
    yield from write_wanted(
        (path, lambda: to_toml(runs[int(row) - 1].config, Path(path))),
        (args.svg, lambda: to_svg(runs)), (args.html, lambda: _page(runs[:DRAWN], by_memory=request.by_memory)),
    )


def _page(runs: Sequence[Prediction], *, by_memory: bool) -> str:
    names = [f"row {row}: {run.config.parallel.schedule}" for row, run in enumerate(runs, start=1)]
    return to_html([run.timeline() for run in runs], title="The steps of a plan", names=names, unit="s",
                   notes="\n".join(table(runs, by_memory=by_memory)), steps=[_whole_step(run.parts) for run in runs])


def _whole_step(parts: Mapping[str, float]) -> WholeStep:
    """The parts of a step that are not computing, as the page draws and counts them."""
    return WholeStep(
        before={"gather": parts["gather"]},
        after={"optimizer": parts["optimizer"]},
        idle={name: max(0.0, parts[name]) for name in ("bubble", "sends", "reduce")},
    )


def _sequences(config: Config, tokens: int) -> int:
    """Those of a step: of so many tokens, or as the configuration has it."""
    t, p = config.train, config.parallel
    if tokens % t.sequence_length or tokens < 0:
        raise ValueError(f"--global-batch {tokens} is no multiple of a sequence's {t.sequence_length} tokens; give "
                         f"{max(1, round(tokens / t.sequence_length)) * t.sequence_length}")
    return tokens // t.sequence_length or t.batch_size or t.micro_batch_size * t.num_chunks * p.sizes["dp"] * p.ep


def table(runs: Sequence[Prediction], *, by_memory: bool = False) -> Iterator[str]:
    """A row for each run; of what is not hidden, percent of its step. by_memory: they are ordered by it."""
    rows = [COLUMNS, *(tuple(_cells(i, run)) for i, run in enumerate(runs, start=1))]
    if all(run.config.parallel.cp == 1 for run in runs):
        at = COLUMNS.index("cp")
        rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()
    kind, order = ("smallest", "least memory") if by_memory else ("fastest", "shortest step")
    yield f"a row is the {kind} run that fits on its mesh, of all schedules; {order} first"
    best, t = runs[0], runs[0].config.train
    tokens = best.tokens
    yield (f"{tokens:,} tokens a step in sequences of {t.sequence_length}; GB of the worst rank, beside "
           f"{best.machine.reserve:g} for CUDA and the allocator")
    replicated = next((run.config.parallel for run in runs if run.config.parallel.dp_replicate > 1), None)
    if replicated is not None:
        parts = replicated.dp_replicate
        size = replicated.dp // parts
        yield f"dp {parts}x{size}: {parts} parts (parallel.dp_replicate), each shards parameters over {size} ranks"
    flat = next((run for run in runs if run.config.parallel.pp == 1), None)
    if flat is None:
        yield "without a pipeline no run fits"
    elif flat is best:
        yield "a pipeline does not pay here: row 1 has none"
    else:
        longer = flat.step_seconds / best.step_seconds
        yield f"without a pipeline a step takes {longer:.2f} times as long: row {runs.index(flat) + 1}"


def _cells(number: int, run: Prediction) -> Iterator[str]:
    p, t, rules, parts = run.config.parallel, run.config.train, run.config.memory.recompute, run.parts
    dp = p.dp if p.dp_replicate == 1 else f"{p.dp_replicate}x{p.dp // p.dp_replicate}"
    yield from map(str, (number, p.pp, dp, p.cp, p.ep, p.schedule, f"{t.num_chunks}x{t.micro_batch_size}",
                         "+".join(rules) or "none"))
    yield from (f"{run.step_seconds:.4g}", f"{run.tokens_per_second:,.0f}", f"{100 * run.mfu:.1f}%")
    shards = parts["gather"] + parts["reduce"] + parts["optimizer"]
    for part in (parts["bubble"], parts["all-to-all"], parts["sends"], shards):
        yield f"{max(0.0, 100 * part / run.step_seconds):.1f}%"
    yield f"{run.peak / GB:.1f}"
    yield run.limit


def to_toml(config: Config, path: Path) -> str:
    """A configuration as a file at `path`: what differs from the defaults; paths of what a run starts with, which are
    relative to the file, lead to the same places."""
    folder, lines = path.resolve().parent, []
    for table, defaults in asdict(Config()).items():
        given: Mapping[str, Any] = asdict(getattr(config, table))
        found = {name: value for name, value in given.items() if value != defaults[name]}
        for name, words in PATHS.get(table, {}).items():
            if found.get(name) and found[name] not in words:
                found[name] = os.path.relpath(Path(found[name]).resolve(), folder)
        rows = {name: value for name, value in found.items()
                if isinstance(value, tuple) and any(isinstance(each, dict) for each in value)}
        if plain := {name: value for name, value in found.items() if name not in rows}:
            lines += [f"[{table}]", *_pairs(plain), ""]
        for name, each in rows.items():
            for row in each:
                lines += [f"[[{table}.{name}]]", *_pairs(row), ""]
    return "\n".join(lines)


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table; TOML has no null, which is what a field of a row is that was left out."""
    return (f"{name} = {_toml(value)}" for name, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # as TOML has it in double quotes
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, tuple | list) else repr(value)
