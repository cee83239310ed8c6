"""Load the configuration of a training run from a TOML file and command-line options.

    config = load_config("examples/tiny-cpu.toml", ["--optimizer.lr", "3e-4"])

The tables and fields are in `schema`. `Kind` reads the annotation of a field, for TOML values, the texts of options
`--table.field VALUE`, the help, and docs/config.md. An option becomes the TOML value that its text stands for, so one
conversion checks both. A TOML value must have the type of its field; only integers are converted, to floats.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, cast, get_args, get_origin, get_type_hints

from dualpipe.runtime.errors import nearest
from dualpipe.runtime.files import read_toml
from dualpipe.train.config import schema
from dualpipe.train.config.schema import (
    AUTO,
    BYTES,
    STDLIB,
    Config,
    ParallelConfig,
    replace_field,
)

# Fields that hold the path of an input of the run, by table; and for each, the values that are not paths.
_INPUT_PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {"config": ()}, "init": {"from_hf": ()}, "lora": {"config": (), "adapter": ()},
    "data": {"path": (STDLIB,), "tokenizer": (BYTES, AUTO), "validation_path": (), "chat_template": ()},
}
# Field names of other trainers whose spelling is not close to the name of the field here.
FIELDS_BY_FOREIGN_NAME = {
    "learning_rate": "optimizer.lr", "max_lr": "optimizer.lr", "min_lr": "optimizer.min_lr_ratio",
    "lr_scheduler": "optimizer.schedule", "lr_scheduler_type": "optimizer.schedule", "decay_lr": "optimizer.schedule",
    "grad_clip": "optimizer.clip_norm", "max_norm": "optimizer.clip_norm", "max_grad_norm": "optimizer.clip_norm",
    "num_train_steps": "train.steps", "max_steps": "train.steps", "max_iters": "train.steps",
    "seq_len": "train.sequence_length", "seq_length": "train.sequence_length", "block_size": "train.sequence_length",
    "global_batch_size": "train.batch_size", "local_batch_size": "train.micro_batch_size",
    "num_microbatches": "train.num_chunks", "gradient_accumulation_steps": "train.num_chunks",
    "save_interval": "checkpoint.interval", "save_steps": "checkpoint.interval", "tokenizer_path": "data.tokenizer",
    "lora_r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets", "lora_target_modules": "lora.targets", "use_rslora": "lora.rslora",
    "tensorboard_dir": "output.dir", "wandb_project": "metrics.wandb",
}
_ANY_NUMBER = "*"  # argparse's nargs
_NOUNS: dict[type, str] = {bool: "true or false", int: "integer", float: "number", str: "string"}
_METAVARS: dict[type, str] = {bool: "True|False", int: "INT", float: "FLOAT", str: "TEXT"}


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
    config = _convert(Kind(Config), tables, f"{path}")
    config = replace_input_paths(config, lambda value: str(path.parent / value))
    if overrides:
        config = _apply_options(config, overrides)
    if not config.model_path:
        raise ValueError(f"{path}: there is no model; give model.config, the path of a hub-style config.json, or "
                         "init.from_hf, a directory with a checkpoint")
    _check_schedule_options(config.parallel)
    return config


def recorded_config(tables: Mapping[str, Any]) -> Config:
    """Return the configuration that a run has recorded.

    Args:
        tables: the result of `dataclasses.asdict`, as read back from JSON.

    Raises:
        ValueError: `tables` is not a configuration of this version.
    """
    return cast(Config, _convert(Kind(Config), tables, "the recorded configuration"))


def _check_schedule_options(parallel: ParallelConfig) -> None:
    """Raise ValueError if a setting of the schedule "auto" is set for another one, or for another number of ranks."""
    memory = parallel.schedule_memory
    if parallel.schedule == AUTO:
        if isinstance(memory, tuple) and len(memory) != parallel.pp:
            raise ValueError(f"parallel.schedule_memory has {len(memory)} numbers, and parallel.pp is {parallel.pp}; "
                             "give one number, or one for each pipeline rank")
        return
    for name in ("schedule_costs", "schedule_memory"):
        value = getattr(parallel, name)
        if value:
            raise ValueError(f"parallel.{name} = {value!r} is for the schedule {AUTO!r} alone, and parallel.schedule "
                             f"is {parallel.schedule!r}; leave it out, or set parallel.schedule = {AUTO!r}")


# -- paths


def replace_input_paths(config: Config, new_path: Callable[[str], str]) -> Config:
    """Return `config` with `new_path(path)` in place of the path of every input of the run."""
    for table, names in _INPUT_PATHS.items():
        for name, words in names.items():
            value = getattr(getattr(config, table), name)
            if value and value not in words:
                config = replace_field(config, table, name, new_path(value))
    sources = [source if source.path == STDLIB else replace(source, path=new_path(source.path))
               for source in config.data.sources]
    config = replace_field(config, "data", "sources", tuple(sources))
    costs = config.parallel.schedule_costs
    if costs.endswith(".json"):
        config = replace_field(config, "parallel", "schedule_costs", new_path(costs))
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


# -- the annotations of the schema, and the strings below the fields


class Kind(NamedTuple):
    """The values of a field.

    base: type of a value, or of each element of a list: bool, int, float, str, or the class of a table.
    choices: the valid values; empty: all of the type.
    nargs: number of elements of a list, as argparse has it; None: the value is not a list.
    or_one: True if one element alone is a value too, instead of a list.
    optional: True if None is a value too.
    """

    base: type
    choices: tuple[str, ...] = ()
    nargs: int | str | None = None
    or_one: bool = False
    optional: bool = False

    @classmethod
    def of(cls, annotation: Any) -> Kind:
        """Read an annotation: a dataclass, a scalar type, a Literal, a tuple of these, or one of these with None.

        A scalar type with a tuple of it is a list or one element.
        """
        origin = get_origin(annotation)
        if origin is None:
            return cls(annotation)
        arguments = get_args(annotation)
        if origin is Literal:
            return cls(str, choices=arguments)
        if origin in (UnionType, Union):
            if arguments[1] is NoneType:
                return cls.of(arguments[0])._replace(optional=True)
            return cls.of(arguments[1])._replace(or_one=True)
        return cls.of(arguments[0])._replace(nargs=_ANY_NUMBER if arguments[-1] is ... else len(arguments))

    @property
    def is_table(self) -> bool:
        """True for a table, False for other values and for a list of tables."""
        return self.nargs is None and is_dataclass(self.base)

    @property
    def noun(self) -> str:
        """The name of the type, such as "integer" or "list of 2 numbers"."""
        noun = _NOUNS.get(self.base, "table")
        if self.nargs is None:
            return noun
        list_noun = f"list of {noun}s" if self.nargs == _ANY_NUMBER else f"list of {self.nargs} {noun}s"
        return f"{noun} or {list_noun}" if self.or_one else list_noun

    @property
    def expected(self) -> str:
        """The end of an error message: the valid values."""
        if self.choices:
            return "it must be one of " + ", ".join(map(repr, self.choices))
        if self.base is bool:
            return f"it must be {self.noun}"
        return f"it must be an {self.noun}" if self.noun == "integer" else f"it must be a {self.noun}"

    @property
    def metavar(self) -> str:
        """The form of a value, or of each element of a list, as the text of an option."""
        return "|".join(self.choices) or _METAVARS.get(self.base) or self.base.text_form  # type: ignore[attr-defined]


@cache
def kinds_of(table_class: type) -> dict[str, Kind]:
    """Return the kind of every field of a table, or of every table of `Config`, by name."""
    return {name: Kind.of(annotation) for name, annotation in get_type_hints(table_class).items()}


def read_documentation() -> dict[str, dict[str, str]]:
    """Return the string below each field in the source of the schema, on one line, by class and field."""
    documentation: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts: dict[str, str] = {}
        for base in node.bases:
            texts |= documentation.get(ast.unparse(base), {})
        for statement, below in zip(node.body, node.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[statement.target.id] = " ".join(str(below.value.value).split())
        documentation[node.name] = texts
    return documentation


# -- conversion


def _convert(kind: Kind, value: Any, where: str) -> Any:
    """Return a TOML value as a value of `kind`. Converts integers to floats, and no other scalar type.

    Args:
        value: may be None for an optional value: TOML has no null, but JSON and options have one.
        where: the place of the value, which error messages begin with.

    Raises:
        ValueError: an unknown key, or a value of the wrong type.
    """
    if value is None and kind.optional:
        return None
    if kind.or_one and not isinstance(value, list):
        with suppress(ValueError):
            return _convert(kind._replace(nargs=None, or_one=False), value, where)
    elif kind.nargs is not None:
        if isinstance(value, list) and kind.nargs in (_ANY_NUMBER, len(value)):
            element_kind = kind._replace(nargs=None, or_one=False)
            return tuple(_convert(element_kind, element, where) for element in value)
    elif kind.is_table:
        return _convert_table(kind.base, value, where)
    elif kind.choices:
        if value in kind.choices:
            return value
        raise ValueError(f"{where} = {value!r} is not a valid choice; {kind.expected}")
    elif kind.base is float and type(value) is int:
        return float(value)
    elif type(value) is kind.base:
        return value
    raise ValueError(f"{where} = {value!r} has the wrong type; {kind.expected}")


def _convert_table(table_class: Any, value: Any, where: str) -> Any:
    """Return a TOML table as an instance of a dataclass. Raises as `_convert` does."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, got {value!r}")
    kinds = kinds_of(table_class)
    converted = {}
    for key, inner in value.items():
        if key not in kinds:
            raise ValueError(f"{where}: unknown key {key!r}; {_suggest_name(key, kinds)}")
        name = f"[{key}]" if kinds[key].is_table else key
        converted[key] = _convert(kinds[key], inner, f"{where}: {name}")
    return table_class(**converted)


def _suggest_name(name: str, valid: Collection[str]) -> str:
    """Return the part of an error message that suggests a replacement for an unknown name.

    Args:
        name: a table, a key in a table, or an option "--table.field".
        valid: the names of the same kind that exist.
    """
    key = name.rpartition(".")[2].removeprefix("--").replace("-", "_")
    path = FIELDS_BY_FOREIGN_NAME.get(key)
    if path is None:
        same_name = [f"{table}.{key}" for table, kind in kinds_of(Config).items() if key in kinds_of(kind.base)]
        if len(same_name) != 1:
            return f"the nearest valid name is {nearest(name, valid, cutoff=0)[0]!r}"
        path = same_name[0]
    for candidate in (f"--{path}", path.rpartition(".")[2]):
        if candidate in valid:
            return f"the nearest valid name is {candidate!r}"
    return f"this setting is in another table: {path!r}"


# -- options


def _apply_options(config: Config, options: Sequence[str]) -> Config:
    """Return `config` with the values of command-line options. `--help` prints all options and exits.

    Raises:
        ValueError: an option does not exist (the message names the nearest one), or a value is not valid.
    """
    kinds = {f"--{table}.{name}": kind for table, table_kind in kinds_of(Config).items()
             for name, kind in kinds_of(table_kind.base).items()}
    normalized = [_normalize_option(option) if option.startswith("--") else option for option in options]
    for option, as_written in zip(normalized, options):
        name = option.partition("=")[0]
        if option.startswith("--") and name not in (*kinds, "--help"):
            name_as_written = as_written.partition("=")[0]
            raise ValueError(f"unknown option {name_as_written!r}; {_suggest_name(name, list(kinds))}")
    given = Counter(option.partition("=")[0] for option in normalized if option.startswith("--"))
    for name, times in given.items():
        if times > 1 and name in kinds and kinds[name].nargs is not None:
            raise ValueError(f"{name} is given {times} times, of which only the last would count; give it once, with "
                             "all its values one after the other")
    parser = _build_parser(config, with_help="--help" in options)
    changes: dict[str, dict[str, Any]] = {}  # applied together: a table checks its fields together
    for option, text in vars(parser.parse_args(normalized)).items():
        table, name = option.removeprefix("--").split(".")
        value = _read_text(kinds[option], text)
        changes.setdefault(table, {})[name] = _convert(kinds[option], value, option)
    tables = {table: replace(getattr(config, table), **values) for table, values in changes.items()}
    return replace(config, **tables)


def _normalize_option(option: str) -> str:
    """Replace "-" by "_" in the name of an option, not in its value."""
    name, equals, value = option[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of printing the message."""
        raise ValueError(message.removeprefix("argument "))


def _build_parser(config: Config, *, with_help: bool) -> argparse.ArgumentParser:
    """Return a parser of the options for all fields, which leaves their values as text.

    (tyro draws boxes around its errors, and takes half a second to import.)

    Args:
        config: the current values, which the help shows.
        with_help: read the documentation of the fields from the source of the schema.
    """
    parser = _Parser(
        prog="dualpipe train CONFIG", description="Options for all fields of the TOML file.", allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    documentation = read_documentation() if with_help else {}
    for table, table_kind in kinds_of(Config).items():
        table_class = table_kind.base
        texts = documentation.get(table_class.__name__, {})
        group = parser.add_argument_group(inspect.cleandoc(table_class.__doc__ or "").partition("\n")[0])
        for name, kind in kinds_of(table_class).items():
            current = _format_value(getattr(getattr(config, table), name))
            text = f"{texts.get(name, '')} (now: {current})".replace("%", "%%")
            metavar = (kind.metavar,) * kind.nargs if isinstance(kind.nargs, int) else kind.metavar
            option = f"--{table}.{name}"
            group.add_argument(option, dest=option, nargs=kind.nargs, metavar=metavar, help=text)
    return parser


def _format_value(value: object) -> str:
    """Return the value of a field as text for the help."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value}" or '""'


def _read_text(kind: Kind, text: Any) -> Any:
    """Return the TOML value that the text of an option stands for; the text itself if it is no value of `kind`.

    text: a list of texts for a list.
    """
    if kind.nargs is not None:
        elements = [_read_text(kind._replace(nargs=None), element) for element in text]
        return elements[0] if kind.or_one and len(elements) == 1 else elements
    if kind.optional and text == "None":
        return None
    if kind.is_table:
        return _read_table(kinds_of(kind.base), text)
    if kind.base is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    with suppress(ValueError):
        return kind.base(text)
    return text


def _read_table(kinds: Mapping[str, Kind], text: str) -> dict[str, Any]:
    """Return the TOML table of the text "FIRST,FIELD=VALUE,...", with the value of the first field before others.

    A comma begins another field if a name that resembles one, and "=", follow: a path may have commas.
    """
    first, *names = kinds
    values: dict[str, Any] = {}
    while True:
        rest, _, assignment = text.rpartition(",")
        name, equals, value = assignment.partition("=")
        if not equals or not nearest(name, names):
            return {first: text, **values}
        if name in values:
            raise ValueError(f"{text!r} gives {name} twice; give it once")
        values[name] = _read_text(kinds[name], value) if name in kinds else value
        text = rest
