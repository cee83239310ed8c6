"""Reading the settings of a training run: a TOML file, and what the command line says instead.

    config = load_config("examples/tiny-cpu.toml", ["--optimizer.lr", "3e-4"])

What there is to set is in `tables`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from dualpipe.train.tables import BYTES, STDLIB, Config, DTypeRule, DTypesConfig, InitConfig, ModelConfig


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read the TOML file `path` and apply command-line `overrides` (`--table.field value`).

    Relative paths of what a run starts with, as in [model] and [data], are relative to the file; those in [output],
    [checkpoint] and [export], and those in `overrides`, to the working directory.

    Raises:
        ValueError: the file is missing or no TOML, a table, key or option does not exist (the message names the
            nearest that does), or a value has the wrong type or is impossible.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    config = apply_overrides(_anchor_paths(_table(Config, tables, where=str(path)), path.parent), overrides)
    if not config.model_path:
        raise ValueError(f"{path}: there is no model; give model.config, the path of a hub-style config.json, or "
                         "init.from_hf, a directory with a checkpoint")
    return config


def apply_overrides(config: Config, overrides: typing.Sequence[str]) -> Config:
    """`config` with the fields named by `--table.field value` replaced. `--help` prints all fields and exits."""
    if not overrides:
        return config
    import tyro

    _check_option_names(overrides)
    messages, as_text = io.StringIO(), tyro.constructors.ConstructorRegistry()

    @as_text.primitive_rule
    def dtype_rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        return None if info.type is not DTypeRule else tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar="PATTERN,FIELD=DTYPE,...", instance_from_str=lambda text: text[0],  # parsed below
            is_instance=lambda value: isinstance(value, DTypeRule), str_from_instance=lambda rule: [str(rule)],
        )

    try:
        with contextlib.redirect_stderr(messages), as_text:
            changed = tyro.cli(
                tyro.conf.FlagConversionOff[Config], default=config, args=list(overrides), prog="dualpipe train CONFIG",
                description="Every field of the TOML file can be given here as well.", use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ValueError(_plain_message(messages.getvalue())) from None
    rules = tuple(rule if isinstance(rule, DTypeRule) else DTypeRule.parse(rule) for rule in changed.dtypes.rules)
    return dataclasses.replace(changed, dtypes=DTypesConfig(rules))


def fit_world(config: Config, world_size: int) -> Config:
    """`config` with parallel.dp filled in; ValueError for a number of ranks that the layout does not need."""
    parallel = config.parallel
    pipelines, rest = divmod(world_size, parallel.pp * parallel.ep)
    if rest or pipelines == 0 or parallel.dp not in (0, pipelines):
        dp = parallel.dp or "any"
        raise ValueError(
            f"parallel.pp * dp * ep = {parallel.pp} * {dp} * {parallel.ep} cannot be {world_size}, the number of ranks "
            f"that were started; start {parallel.world_size}, or change parallel.pp or parallel.dp"
        )
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, dp=pipelines))


def _anchor_paths(config: Config, folder: Path) -> Config:
    def anchored(value: str | None, *special: str) -> str | None:
        return value if not value or value in special else str(folder / value)

    data = dataclasses.replace(
        config.data,
        path=anchored(config.data.path, STDLIB),
        tokenizer=anchored(config.data.tokenizer, BYTES),
        validation_path=anchored(config.data.validation_path),
    )
    model, init = ModelConfig(anchored(config.model.config)), InitConfig(anchored(config.init.from_hf))
    return dataclasses.replace(config, model=model, init=init, data=data)


def _nearest(name: str, valid: typing.Iterable[str]) -> str:
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"the nearest valid name is {close[0]!r}" if close else f"valid names are {', '.join(valid)}"


def _table(cls: type, values: object, *, where: str) -> Any:
    """Build the dataclass `cls` from a TOML table, refusing unknown keys and wrong types."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table, got {values!r}")
    hints = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; {_nearest(unknown[0], hints)}")
    return cls(**{key: _value(hints[key], value, where=f"{where}: {key}") for key, value in values.items()})


def _value(kind: Any, value: object, *, where: str) -> Any:
    """`value` as the annotation `kind`; an integer is taken for a float, nothing else is converted."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _table(kind, value, where=where.replace(": ", ": [", 1) + "]")
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and arguments[-1] is Ellipsis and isinstance(value, list):
        make = _table if dataclasses.is_dataclass(arguments[0]) else _value
        return tuple(make(arguments[0], v, where=where) for v in value)
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_value(k, v, where=where) for k, v in zip(arguments, value))
    if origin in (types.UnionType, typing.Union):
        return _value(arguments[0], value, where=where)  # TOML has no null: a given value is of the first kind
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} = {value!r} has the wrong type; it must be {_describe(kind)}")


def _describe(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if dataclasses.is_dataclass(kind):
        return "a table"
    if arguments and arguments[-1] is Ellipsis:
        return f"a list, each {_describe(arguments[0])}"
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(arguments)}: " + ", ".join(_describe(a) for a in arguments)
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(kind, str(kind))


def _check_option_names(overrides: typing.Sequence[str]) -> None:
    hints = typing.get_type_hints(Config)
    valid = [f"--{t}.{f.name}" for t, cls in hints.items() for f in dataclasses.fields(cls)]
    for argument in overrides:
        name = argument.split("=", 1)[0].replace("-", "_")
        name = "--" + name[2:]
        if argument.startswith("--") and name != "--help" and name not in valid:
            raise ValueError(f"unknown option {argument.split('=', 1)[0]!r}; {_nearest(name, valid)}")


def _plain_message(boxed: str) -> str:
    """tyro's message without its frame, of which there is one in ASCII too: the lines between the first two rules."""
    parts = [[]]
    for line in boxed.splitlines():
        if re.search("[─-]{3}", line):
            parts.append([])
        else:
            parts[-1].append(line.strip("│| "))
    text = " ".join(line for line in parts[1 if len(parts) > 1 else 0] if line) or boxed.strip()
    return re.sub(r"^Error parsing \w+: (?=\w+\.)", "", text)  # of a table, whose message names the field
