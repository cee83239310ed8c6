"""Reading the settings of a training run: a TOML file, and what the command line says instead.

    config = load_config("examples/tiny-cpu.toml", ["--optimizer.lr", "3e-4"])

What there is to set is in `schema`. TOML has types, which are checked as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from dualpipe.runtime.files import read_toml
from dualpipe.train.config.command_line import apply_options, describe, nearest_name
from dualpipe.train.config.schema import (
    AUTO,
    BYTES,
    REMOVED_CHOICES,
    REMOVED_FIELDS,
    STDLIB,
    TOKENIZER,
    Config,
    replace_field,
)

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
                config = replace_field(config, table, name, str(path.parent / value))
    if (costs := config.parallel.schedule_costs).endswith(".json"):
        config = replace_field(config, "parallel", "schedule_costs", str(path.parent / costs))
    if overrides:
        config = apply_options(config, overrides)
    if not config.model_path:
        raise ValueError(f"{path}: there is no model; give model.config, the path of a hub-style config.json, or "
                         "init.from_hf, a directory with a checkpoint")
    if config.data.tokenizer == AUTO:
        of_checkpoint = Path(config.init.from_hf, TOKENIZER)
        has_one = bool(config.init.from_hf) and of_checkpoint.is_file()
        config = replace_field(config, "data", "tokenizer", str(of_checkpoint) if has_one else BYTES)
    return config


def recorded_config(tables: Mapping[str, Any]) -> Config:
    """The configuration that a run has recorded, as `dataclasses.asdict` makes it and JSON keeps it; ValueError where
    it is none of this version."""
    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(each) for key, each in value.items() if each is not None}
        return [known(each) for each in value] if isinstance(value, list) else value

    recorded = known(tables)
    for removed in REMOVED_FIELDS:
        table, name = removed.split(".")
        if not recorded.get(table, {}).get(name, True):  # off, as in every run that did not set it
            del recorded[table][name]
    return cast(Config, _typed(Config, recorded, "the recorded configuration"))


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` of the TOML as the annotation `kind`; an integer is taken for a float, nothing else is converted."""
    origin, inside = get_origin(kind), get_args(kind)
    if kinds := get_type_hints(kind) if is_dataclass(kind) else {}:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a table, got {value!r}")
        read = {}
        for key, each in value.items():
            if key not in kinds:
                raise ValueError(f"{where}: unknown key {key!r}; {nearest_name(key, kinds)}")
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
            removed = f"; {REMOVED_CHOICES[value]}" if value in REMOVED_CHOICES else ""
            raise ValueError(f"{where} = {value!r} is no valid choice; it must be {describe(kind)}{removed}")
        return value
    if type(value) is kind:
        return value
    raise ValueError(f"{where} = {value!r} has the wrong type; it must be {describe(kind)}")
