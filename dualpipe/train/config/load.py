"""Reading the settings of a training run: a TOML file, and what the command line says instead.

    config = load_config("examples/tiny-cpu.toml", ["--optimizer.lr", "3e-4"])

What there is to set is in `tables`. TOML has types, which are checked as they are: tyro, which reads the command line,
would take "1" and true for 1, and a path called "None" for no path.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from dualpipe.runtime.errors import nearest
from dualpipe.runtime.files import read_toml
from dualpipe.train.config.schema import AUTO, BYTES, STDLIB, TOKENIZER, Config, DTypeRule, OptimizerGroup

# Names of other trainers for fields of ours, whose spelling does not lead to them.
OTHER_NAMES = {
    "learning_rate": "optimizer.lr", "max_lr": "optimizer.lr", "min_lr": "optimizer.min_lr_ratio",
    "lr_scheduler": "optimizer.schedule", "lr_scheduler_type": "optimizer.schedule", "decay_lr": "optimizer.schedule",
    "grad_clip": "optimizer.clip_norm", "max_norm": "optimizer.clip_norm", "max_grad_norm": "optimizer.clip_norm",
    "num_train_steps": "train.steps", "max_steps": "train.steps", "max_iters": "train.steps",
    "seq_len": "train.sequence_length", "seq_length": "train.sequence_length", "block_size": "train.sequence_length",
    "global_batch_size": "train.batch_size", "local_batch_size": "train.micro_batch_size",
    "num_microbatches": "train.num_chunks", "gradient_accumulation_steps": "train.num_chunks",
    "save_interval": "checkpoint.interval", "save_steps": "checkpoint.interval", "tokenizer_path": "data.tokenizer",
    "tensorboard_dir": "output.dir", "wandb_project": "metrics.wandb",
}

# What a run starts with, by table; and the words that are no path there.
PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {"config": ()}, "init": {"from_hf": ()},
    "data": {"path": (STDLIB,), "tokenizer": (BYTES, AUTO), "validation_path": ()},
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file `path` and apply command-line `overrides` (`--table.field value`).

    Relative paths of what a run starts with, as in [model] and [data], are relative to the file; those in [output],
    [checkpoint] and [export], and those in `overrides`, to the working directory. `--help` prints all fields and exits.

    Raises ValueError where the file is missing or no TOML, a table, key or option does not exist (the message names the
    nearest that does), or a value has the wrong type or is impossible.
    """
    path = Path(path)
    config = _typed(Config, read_toml(path, "the config "), f"{path}")
    for table, names in PATHS.items():
        for name, words in names.items():
            if (value := getattr(getattr(config, table), name)) and value not in words:
                config = _replace(config, table, name, str(path.parent / value))
    if (costs := config.parallel.schedule_costs).endswith(".json"):
        config = _replace(config, "parallel", "schedule_costs", str(path.parent / costs))
    if overrides:
        config = _overridden(config, overrides)
    if not config.model_path:
        raise ValueError(f"{path}: there is no model; give model.config, the path of a hub-style config.json, or "
                         "init.from_hf, a directory with a checkpoint")
    if config.data.tokenizer == AUTO:
        of_checkpoint = Path(config.init.from_hf, TOKENIZER)
        has_one = bool(config.init.from_hf) and of_checkpoint.is_file()
        config = _replace(config, "data", "tokenizer", str(of_checkpoint) if has_one else BYTES)
    return config


def recorded_config(tables: Mapping[str, Any]) -> Config:
    """The configuration that a run has recorded, as `dataclasses.asdict` makes it and JSON keeps it; ValueError where
    it is none of this version."""
    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(each) for key, each in value.items() if each is not None}
        return [known(each) for each in value] if isinstance(value, list) else value

    return cast(Config, _typed(Config, known(tables), "the recorded configuration"))


def fit_world(config: Config, world_size: int) -> Config:
    """`config` with parallel.dp filled in, and train.num_chunks where train.batch_size is given.

    Raises ValueError for a number of ranks that the layout does not need, that the batch cannot be cut for, or that
    share sequences of fewer tokens than they have chunks, and for a parallel.dp_replicate that does not divide dp.
    """
    parallel, length = config.parallel, config.train.sequence_length
    if parallel.cp > 1 and length < 2 * parallel.cp:
        raise ValueError(f"train.sequence_length = {length} is too short for parallel.cp = {parallel.cp}, whose ranks "
                         f"have two chunks of a sequence each; give at least {2 * parallel.cp} tokens, or have "
                         f"parallel.cp be at most {max(1, length // 2)}")
    pipelines, rest = divmod(world_size, parallel.world_size // parallel.sizes["dp"])
    if rest or pipelines == 0 or parallel.dp not in (0, pipelines):
        sizes = parallel.sizes | {"dp": parallel.dp or "any"}
        raise ValueError(
            f"parallel.{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))} cannot be {world_size}, the number "
            f"of ranks that were started; start {parallel.world_size}, or change parallel.pp or parallel.dp"
        )
    if parallel.dp_replicate > 1:
        from dualpipe.parallel.mesh import check_replicate  # loads torch

        check_replicate(pipelines, parallel.dp_replicate, "parallel.dp_replicate")
    config = _replace(config, "parallel", "dp", pipelines)
    return with_batch(config, config.train.batch_size) if config.train.batch_size else config


def with_batch(config: Config, batch_size: int) -> Config:
    """`config`, whose parallel.dp is known, with as many micro-batches as make a global batch of so many sequences.
    ValueError, with sizes that are possible, where none do."""
    at_once = config.train.micro_batch_size * config.parallel.batch_shards
    num_chunks, rest = divmod(batch_size, at_once)
    if rest or not num_chunks:
        parts = config.parallel.dp_replicate
        possible = [size for size in range(parts, batch_size // config.parallel.ep + 1, parts)
                    if batch_size % (size * config.train.micro_batch_size * config.parallel.ep) == 0]
        dp = f", or have parallel.dp be one of {', '.join(map(str, possible))}" if possible else ""
        near = " or ".join(f"{size}" for size in (batch_size - rest, batch_size - rest + at_once) if size)
        raise ValueError(
            f"train.batch_size = {batch_size} is no multiple of {at_once}, which is train.micro_batch_size * dp * ep = "
            f"{config.train.micro_batch_size} * {config.parallel.dp} * {config.parallel.ep}; give {near}{dp}"
        )
    return _replace(config, "train", "num_chunks", num_chunks)


def _replace(config: Config, table: str, name: str, value: object) -> Config:
    return replace(config, **{table: replace(getattr(config, table), **{name: value})})


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` of the TOML as the annotation `kind`; an integer is taken for a float, nothing else is converted."""
    origin, inside = get_origin(kind), get_args(kind)
    if kinds := get_type_hints(kind) if is_dataclass(kind) else {}:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a table, got {value!r}")
        read = {}
        for key, each in value.items():
            if key not in kinds:
                raise ValueError(f"{where}: unknown key {key!r}; {_nearest(key, kinds)}")
            read[key] = _typed(kinds[key], each, f"{where}: [{key}]" if is_dataclass(kinds[key]) else f"{where}: {key}")
        return kind(**read)
    if origin in (UnionType, Union):
        return _typed(inside[0], value, where)  # TOML has no null: a given value is of the first kind
    if origin is tuple and isinstance(value, list) and (inside[-1] is ... or len(inside) == len(value)):
        return tuple(_typed(inside[0], each, where) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    if origin is Literal:
        if value not in inside:
            raise ValueError(f"{where} = {value!r} is no valid choice; it must be {_describe(kind)}")
        return value
    if type(value) is kind:
        return value
    raise ValueError(f"{where} = {value!r} has the wrong type; it must be {_describe(kind)}")


def _describe(kind: Any) -> str:
    inside = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, inside))
    if inside and inside[-1] is ...:
        return f"a list, each {_describe(inside[0])}"
    if inside:
        return f"a list of {len(inside)}: " + ", ".join(map(_describe, inside))
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(kind, "a table")


def _nearest(name: str, valid: Collection[str]) -> str:
    """The valid name that is meant by one that is unknown: a key in a table, a table, or an option "--table.field"."""
    place = OTHER_NAMES.get(name.rpartition(".")[2].removeprefix("--").replace("-", "_"))
    if place is None:
        return f"the nearest valid name is {nearest(name, valid, cutoff=0)[0]!r}"
    for meant in (f"--{place}", place.rpartition(".")[2]):
        if meant in valid:
            return f"the nearest valid name is {meant!r}"
    return f"what is meant is in another table: {place!r}"


def _overridden(config: Config, options: Sequence[str]) -> Config:
    """`config` with what the command line says instead."""
    import tyro

    valid = [f"--{table}.{each.name}" for table, cls in get_type_hints(Config).items() for each in fields(cls)]
    for option in (each.partition("=")[0] for each in options if each.startswith("--")):
        if (name := "--" + option[2:].replace("-", "_")) not in (*valid, "--help"):
            raise ValueError(f"unknown option {option!r}; {_nearest(name, valid)}")
    messages, rules = io.StringIO(), tyro.constructors.ConstructorRegistry()

    @rules.primitive_rule
    def by_pattern(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        return None if info.type not in (DTypeRule, OptimizerGroup) else tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar="PATTERN,FIELD=VALUE,...", instance_from_str=lambda text: text[0],  # parsed below
            is_instance=lambda value: isinstance(value, info.type), str_from_instance=lambda rule: [str(rule)],
        )

    try:
        with redirect_stderr(messages), rules:
            config = tyro.cli(
                tyro.conf.FlagConversionOff[Config], default=config, args=list(options), prog="dualpipe train CONFIG",
                description="Every field of the TOML file can be given here as well.", use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        # what tyro says between the first two rules of its frame, of which there is one in ASCII too
        said = re.split(r".*[─-]{3}.*\n", messages.getvalue())[:2][-1]
        text = " ".join(re.sub("^[│|]|[│|]$", "", said, flags=re.MULTILINE).split())
        raise ValueError(text.removeprefix("Error parsing Config: ")) from None
    lists: tuple[tuple[str, str, type[DTypeRule | OptimizerGroup]], ...] = (
        ("dtypes", "rules", DTypeRule), ("optimizer", "groups", OptimizerGroup))
    for table, name, kind in lists:
        given = getattr(getattr(config, table), name)
        parsed = tuple(kind.parse(each) if isinstance(each, str) else each for each in given)
        config = _replace(config, table, name, parsed)
    return config
