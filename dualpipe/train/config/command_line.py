"""Settings on the command line: `--table.field VALUE`, for every field of the schema.

The parser is argparse's, made from the schema's annotations: text means what it does in the TOML file, and errors are
exceptions. tyro, which was used before, prints errors in a frame for people to read, and takes half a second to load.
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
from dualpipe.train.config.schema import REMOVED_FIELDS, Config, DTypeRule, OptimizerGroup

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


def nearest_name(name: str, valid: Collection[str]) -> str:
    """Say which valid name is meant by an unknown one: a key in a table, a table, or an option "--table.field".

    Of a field that has been removed, say what to do instead.
    """
    for removed, remedy in REMOVED_FIELDS.items():
        if name in (f"--{removed}", removed.rpartition(".")[2]):
            return f"{removed} has been removed: {remedy}"
    key = name.rpartition(".")[2].removeprefix("--").replace("-", "_")
    place = OTHER_NAMES.get(key) or _places_of_fields().get(key)
    if place is None:
        return f"the nearest valid name is {nearest(name, valid, cutoff=0)[0]!r}"
    for meant in (f"--{place}", place.rpartition(".")[2]):
        if meant in valid:
            return f"the nearest valid name is {meant!r}"
    return f"what is meant is in another table: {place!r}"


def _places_of_fields() -> dict[str, str]:
    """Return "table.field" by the names of fields that only one table has."""
    places: dict[str, list[str]] = {}
    for table, kind in get_type_hints(Config).items():
        for field in fields(kind):
            places.setdefault(field.name, []).append(f"{table}.{field.name}")
    return {name: first for name, (first, *others) in places.items() if not others}


def describe(kind: Any) -> str:
    """Say in words what a value of an annotation is, such as "an integer"."""
    inside = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, inside))
    if inside and inside[-1] is ...:
        return f"a list, each {describe(inside[0])}"
    if inside:
        return f"a list of {len(inside)}: " + ", ".join(map(describe, inside))
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(kind, "a table")


def apply_options(config: Config, options: Sequence[str]) -> Config:
    """Return `config` with the values of command-line options. `--help` prints all options and exits.

    Raises ValueError for an option that does not exist, naming the nearest, and for a value that cannot be.
    """
    parser, valid = _parser(config, with_help="--help" in options)
    for option in (option.partition("=")[0] for option in options if option.startswith("--")):
        if _underscored(option) not in (*valid, "--help"):
            raise ValueError(f"unknown option {option!r}; {nearest_name(_underscored(option), list(valid))}")
    named = [_underscored(option) if option.startswith("--") else option for option in options]
    changes: dict[str, dict[str, Any]] = {}  # of all at once: fields are checked together
    for name, value in vars(parser.parse_args(named)).items():
        table, field = name.split(".")
        (kind, *_) = get_args(valid[f"--{name}"]) or (None,)
        if kind in (DTypeRule, OptimizerGroup):  # which name themselves in their errors
            value = tuple(kind.parse(text) for text in value)
        changes.setdefault(table, {})[field] = value
    return replace(config, **{table: replace(getattr(config, table), **values) for table, values in changes.items()})


def _underscored(option: str) -> str:
    """An option with "_" for "-" in its name, not in its value."""
    name, equals, value = option[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what is wrong instead of printing it."""
        raise ValueError(message.removeprefix("argument "))


def _parser(config: Config, *, with_help: bool) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """A parser of all fields, with the values of `config` in its help, and its options with their annotations."""
    parser = _Parser(
        prog="dualpipe train CONFIG", description="Every field of the TOML file can be given here as well.",
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )
    documents = _field_documents() if with_help else {}
    options: dict[str, Any] = {}
    for table, kind in get_type_hints(Config).items():
        group = parser.add_argument_group(inspect.cleandoc(kind.__doc__ or "").partition("\n")[0])
        kinds = get_type_hints(kind)
        for field in fields(kind):
            option = f"--{table}.{field.name}"
            options[option] = kinds[field.name]
            reader = _reader(kinds[field.name])
            default = getattr(getattr(config, table), field.name)
            text = f"{documents.get((kind.__name__, field.name), '')} (now: {_shown(default)})"
            group.add_argument(
                option, dest=f"{table}.{field.name}", type=reader.read, nargs=reader.number, metavar=reader.metavar,
                action=_AsTuple if reader.number is not None else "store", help=text.replace("%", "%%"),
            )
    return parser, options


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value}" or '""'


class _AsTuple(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


class _Reader(NamedTuple):
    """The reader of a field's text: of one value, with argparse's number of values, and their name."""

    read: Callable[[str], Any]
    number: int | str | None
    metavar: Any


def _reader(kind: Any) -> _Reader:
    inside = get_args(kind)
    if get_origin(kind) is tuple:
        one = _reader(inside[0])
        if inside[-1] is ...:
            return _Reader(one.read, "*", one.metavar)
        return _Reader(one.read, len(inside), (one.metavar,) * len(inside))
    if get_origin(kind) in (UnionType, Union) and NoneType in inside:
        (rest,) = (part for part in inside if part is not NoneType)
        of_rest = _reader(rest)
        return of_rest._replace(read=lambda text: None if text == "None" else of_rest.read(text))
    if kind in (DTypeRule, OptimizerGroup):
        return _Reader(str, None, "PATTERN,FIELD=VALUE,...")
    if get_origin(kind) is Literal:
        return _Reader(_explained(lambda text: _choice(text, kind)), None, "|".join(map(str, inside)))
    metavar = {int: "INT", float: "FLOAT", bool: "True|False"}.get(kind, "TEXT")
    return _Reader(_explained(lambda text: _value(text, kind)), None, metavar)


def _explained(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read`, whose ValueErrors argparse reports with their text."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reading


def _choice(text: str, kind: Any) -> str:
    if text not in get_args(kind):
        raise ValueError(f"{text!r} is no valid choice; it must be {describe(kind)}")
    return text


def _value(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is no valid value; it must be {describe(kind)}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no valid value; it must be {describe(kind)}") from error


def _field_documents() -> dict[tuple[str, str], str]:
    """The text under each field in the schema's source, by class and field, on one line."""
    documents = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, below in zip(node.body, node.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                documents[node.name, statement.target.id] = " ".join(str(below.value.value).split())
    return documents
