"""Load the configuration of a training run from a TOML file and command-line overrides.

    config = load_config("examples/tiny-cpu.toml", ["--optimizer.lr", "3e-4"])

The tables and fields are in `schema`. A TOML value must have the type of its field; only integers are converted, to
floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from dualpipe.runtime.files import read_toml
from dualpipe.train.config.command_line import apply_options, describe_type, suggest_name
from dualpipe.train.config.schema import (
    AUTO,
    BYTES,
    STDLIB,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Config,
    replace_field,
)

# Fields that hold the path of an input of the run, by table; and for each, the values that are not paths.
INPUT_PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {"config": ()}, "init": {"from_hf": ()},
    "data": {"path": (STDLIB,), "tokenizer": (BYTES, AUTO), "validation_path": (), "chat_template": ()},
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file `path` and apply command-line overrides.

    Relative paths of inputs ([model], [init], [data]) in the file are relative to the file. Those in [output],
    [checkpoint] and [export], and all paths in `overrides`, are relative to the working directory.

    Args:
        path: the TOML file.
        overrides: options `--table.field value`. `--help` prints all fields and exits.

    Raises:
        ValueError: the file is missing or not TOML, a table, key or option does not exist (the message names the
            nearest one that does), or a value has the wrong type or is out of range.
    """
    path = Path(path)
    tables = read_toml(path, "the config ")
    config = _convert(Config, tables, f"{path}")
    config = _resolve_input_paths(config, path.parent)
    if overrides:
        config = apply_options(config, overrides)
    if not config.model_path:
        raise ValueError(f"{path}: there is no model; give model.config, the path of a hub-style config.json, or "
                         "init.from_hf, a directory with a checkpoint")
    return _resolve_tokenizer(config)


def _resolve_input_paths(config: Config, folder: Path) -> Config:
    """Return `config` with paths relative to `folder` replaced by paths from the working directory."""
    for table, names in INPUT_PATHS.items():
        for name, words in names.items():
            value = getattr(getattr(config, table), name)
            if value and value not in words:
                config = replace_field(config, table, name, str(folder / value))
    sources = [source if source.path == STDLIB else replace(source, path=str(folder / source.path))
               for source in config.data.sources]
    config = replace_field(config, "data", "sources", tuple(sources))
    costs = config.parallel.schedule_costs
    if costs.endswith(".json"):
        config = replace_field(config, "parallel", "schedule_costs", str(folder / costs))
    return config


def check_data_paths(config: Config) -> None:
    """Raise ValueError if a path of training or validation data does not exist. Names its setting."""
    data = config.data
    paths = [("data.sources", source.path) for source in data.sources] or [("data.path", data.path)]
    if data.validation_path:
        paths.append(("data.validation_path", data.validation_path))
    for name, path in paths:
        if path != STDLIB and not Path(path).exists():
            raise ValueError(f"{name}: there is no file or directory {path}; give a packed directory, or a file or "
                             "folder of text or records (in a TOML file, relative to that file)")


def _resolve_tokenizer(config: Config) -> Config:
    """Replace the tokenizer "auto" by the one of the checkpoint if it has one, else by "bytes"."""
    if config.data.tokenizer != AUTO:
        return config
    checkpoint = config.init.from_hf
    exists = bool(checkpoint) and any(Path(checkpoint, name).is_file() for name in (
        TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model", "vocab.json"))
    return replace_field(config, "data", "tokenizer", checkpoint if exists else BYTES)


def recorded_config(tables: Mapping[str, Any]) -> Config:
    """Return the configuration that a run has recorded.

    Args:
        tables: the result of `dataclasses.asdict`, as read back from JSON.

    Raises:
        ValueError: `tables` is not a configuration of this version.
    """
    return cast(Config, _convert(Config, _drop_none(tables), "the recorded configuration"))


def _drop_none(value: Any) -> Any:
    """Return nested JSON without the keys whose value is null, which TOML does not have."""
    if isinstance(value, dict):
        return {key: _drop_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_drop_none(inner) for inner in value]
    return value


def _convert(annotation: Any, value: Any, where: str) -> Any:
    """Return a TOML value as an instance of `annotation`. Converts integers to floats, and no other scalar type.

    Args:
        annotation: a dataclass, tuple, Literal, scalar type, or one of these with None.
        where: the place of the value, which error messages begin with.

    Raises:
        ValueError: an unknown key, or a value of the wrong type.
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if is_dataclass(annotation):
        return _convert_table(annotation, value, where)
    if origin in (UnionType, Union):
        return _convert(arguments[0], value, where)  # X | None: TOML has no null, so the value is an X
    if origin is tuple and isinstance(value, list) and (arguments[-1] is ... or len(arguments) == len(value)):
        return tuple(_convert(arguments[0], element, where) for element in value)
    if annotation is float and type(value) is int:
        return float(value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} = {value!r} is not a valid choice; it must be {describe_type(annotation)}")
        return value
    if type(value) is annotation:
        return value
    raise ValueError(f"{where} = {value!r} has the wrong type; it must be {describe_type(annotation)}")


def _convert_table(table_class: Any, value: Any, where: str) -> Any:
    """Return a TOML table as an instance of a dataclass. Raises as `_convert` does."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, got {value!r}")
    field_types = get_type_hints(table_class)
    converted = {}
    for key, inner in value.items():
        if key not in field_types:
            raise ValueError(f"{where}: unknown key {key!r}; {suggest_name(key, field_types)}")
        name = f"[{key}]" if is_dataclass(field_types[key]) else key
        converted[key] = _convert(field_types[key], inner, f"{where}: {name}")
    return table_class(**converted)
