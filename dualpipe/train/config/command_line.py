"""Command-line options `--table.field VALUE`, one for every field of the schema.

An argparse parser is built from the annotations of the schema. The text of a value has the same meaning as in the TOML
file, and errors are exceptions. (tyro draws boxes around its errors, and takes half a second to import.)
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from dualpipe.runtime.errors import nearest
from dualpipe.train.config import schema
from dualpipe.train.config.schema import Config, DataSource, DTypeRule, OptimizerGroup

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
    "tensorboard_dir": "output.dir", "wandb_project": "metrics.wandb",
}


def suggest_name(name: str, valid: Collection[str]) -> str:
    """Return the part of an error message that suggests a replacement for an unknown name.

    Args:
        name: a table, a key in a table, or an option "--table.field".
        valid: the names of the same kind that exist.
    """
    key = name.rpartition(".")[2].removeprefix("--").replace("-", "_")
    path = FIELDS_BY_FOREIGN_NAME.get(key) or _paths_of_unique_fields().get(key)
    if path is None:
        return f"the nearest valid name is {nearest(name, valid, cutoff=0)[0]!r}"
    for candidate in (f"--{path}", path.rpartition(".")[2]):
        if candidate in valid:
            return f"the nearest valid name is {candidate!r}"
    return f"this setting is in another table: {path!r}"


def _paths_of_unique_fields() -> dict[str, str]:
    """Return "table.field" by field name, for the names that occur in one table only."""
    paths: dict[str, list[str]] = {}
    for table, table_class in get_type_hints(Config).items():
        for field in fields(table_class):
            paths.setdefault(field.name, []).append(f"{table}.{field.name}")
    return {name: same_name[0] for name, same_name in paths.items() if len(same_name) == 1}


def describe_type(annotation: Any) -> str:
    """Describe the values of an annotation in words, such as "an integer"."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if arguments and arguments[-1] is ...:
        return f"a list, each {describe_type(arguments[0])}"
    if arguments:
        return f"a list of {len(arguments)}: " + ", ".join(map(describe_type, arguments))
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(annotation, "a table")


def apply_options(config: Config, options: Sequence[str]) -> Config:
    """Return `config` with the values of command-line options. `--help` prints all options and exits.

    Raises:
        ValueError: an option does not exist (the message names the nearest one), or a value is not valid.
    """
    parser, annotations = _build_parser(config, with_help="--help" in options)
    normalized = [_normalize_option(option) if option.startswith("--") else option for option in options]
    for option, as_written in zip(normalized, options):
        name = option.partition("=")[0]
        if option.startswith("--") and name not in (*annotations, "--help"):
            name_as_written = as_written.partition("=")[0]
            raise ValueError(f"unknown option {name_as_written!r}; {suggest_name(name, list(annotations))}")
    changes: dict[str, dict[str, Any]] = {}  # applied together: a table checks its fields together
    for path, value in vars(parser.parse_args(normalized)).items():
        table, field = path.split(".")
        element_type = next(iter(get_args(annotations[f"--{path}"])), None)
        # Not parsed by argparse, which would name the field a second time in their errors.
        if element_type in (DTypeRule, OptimizerGroup, DataSource):
            value = tuple(element_type.parse(text) for text in value)
        changes.setdefault(table, {})[field] = value
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


def _build_parser(config: Config, *, with_help: bool) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """Return a parser for all fields, and the annotation of every field by the name of its option.

    Args:
        config: the current values, which the help shows.
        with_help: read the documentation of the fields from the source of the schema.
    """
    parser = _Parser(
        prog="dualpipe train CONFIG", description="Options for all fields of the TOML file.", allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    documentation = _read_field_documentation() if with_help else {}
    annotations: dict[str, Any] = {}
    for table, table_class in get_type_hints(Config).items():
        group = parser.add_argument_group(inspect.cleandoc(table_class.__doc__ or "").partition("\n")[0])
        field_types = get_type_hints(table_class)
        for field in fields(table_class):
            option = f"--{table}.{field.name}"
            annotations[option] = field_types[field.name]
            reader = _make_reader(field_types[field.name])
            current = _format_value(getattr(getattr(config, table), field.name))
            text = f"{documentation.get((table_class.__name__, field.name), '')} (now: {current})"
            group.add_argument(
                option, dest=f"{table}.{field.name}", type=reader.read, nargs=reader.nargs, metavar=reader.metavar,
                action=_StoreTuple if reader.nargs is not None else "store", help=text.replace("%", "%%"),
            )
    return parser, annotations


def _format_value(value: object) -> str:
    """Return the value of a field as text for the help."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value}" or '""'


class _StoreTuple(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


class _Reader(NamedTuple):
    """Arguments of `add_argument` for a field.

    read: converts the text of one value; raises argparse.ArgumentTypeError.
    nargs: number of values. None: one value, not a tuple.
    """

    read: Callable[[str], Any]
    nargs: int | str | None
    metavar: Any


def _make_reader(annotation: Any) -> _Reader:
    """Return the reader for the annotation of a field."""
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        element = _make_reader(arguments[0])
        if arguments[-1] is ...:
            return _Reader(element.read, "*", element.metavar)
        return _Reader(element.read, len(arguments), (element.metavar,) * len(arguments))
    if get_origin(annotation) in (UnionType, Union) and NoneType in arguments:
        (not_none,) = (argument for argument in arguments if argument is not NoneType)
        reader = _make_reader(not_none)
        return reader._replace(read=lambda text: None if text == "None" else reader.read(text))
    if annotation in (DTypeRule, OptimizerGroup):
        return _Reader(str, None, "PATTERN,FIELD=VALUE,...")
    if annotation is DataSource:
        return _Reader(str, None, "PATH,weight=W")
    if get_origin(annotation) is Literal:
        return _Reader(_for_argparse(lambda text: _read_choice(text, annotation)), None, "|".join(map(str, arguments)))
    metavar = {int: "INT", float: "FLOAT", bool: "True|False"}.get(annotation, "TEXT")
    return _Reader(_for_argparse(lambda text: _read_value(text, annotation)), None, metavar)


def _for_argparse(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `read` to raise ArgumentTypeError, whose text argparse reports, instead of ValueError."""

    def read_for_argparse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_for_argparse


def _read_choice(text: str, annotation: Any) -> str:
    """Return `text` if it is one of the values of a Literal; else raise ValueError."""
    if text not in get_args(annotation):
        raise ValueError(f"{text!r} is not a valid choice; it must be {describe_type(annotation)}")
    return text


def _read_value(text: str, annotation: Any) -> Any:
    """Convert `text` to bool, int, float or str. Raises ValueError."""
    if annotation is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is not a valid value; it must be {describe_type(annotation)}")
        return text.lower() == "true"
    try:
        return annotation(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a valid value; it must be {describe_type(annotation)}") from error


def _read_field_documentation() -> dict[tuple[str, str], str]:
    """Return the string below each field in the source of the schema, on one line, by class and field."""
    documentation = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, below in zip(node.body, node.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                documentation[node.name, statement.target.id] = " ".join(str(below.value.value).split())
    return documentation
