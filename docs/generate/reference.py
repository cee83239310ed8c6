"""Write docs/config.md, docs/cli.md and the pictures of schedules in docs/pictures from the code.

    python docs/generate/reference.py            write the files
    python docs/generate/reference.py --check    write nothing; exit status 1 if a file is not current

A test compares the files with what this script makes. The other pictures in docs/pictures are drawn by hand.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from dualpipe.schedule import Costs, build, simulate, to_svg
from dualpipe.schedule.builders import overlap_costs
from dualpipe.train.config.load import Kind, kinds_of, read_documentation
from dualpipe.train.config.schema import Config

DOCS = Path(__file__).parents[1]
NOTE = "<!-- Written by docs/generate/reference.py from the code: change the code, then run `make reference`. -->\n"


def escape(text: str) -> str:
    """Escape what Markdown would take for its own, outside of code between backticks."""
    parts = re.split(r"(``.*?``|`[^`]*`)", text)
    return "".join(part if part.startswith("`") else escape_plain(part) for part in parts)


def escape_plain(text: str) -> str:
    """Escape what Markdown would take for its own."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("](", "]\\(")


def cell(text: str) -> str:
    """Escape a text for a cell of a table, as one line."""
    return escape(" ".join(text.split())).replace("|", "\\|") or " "


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table. Cells are not escaped."""
    names = list(header)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


# -- config.md

CONFIG_HEAD = """# Configuration

A run is one TOML file. Every field is optional. Every field is also an option of the command line, which replaces the
value of the file: `--train.steps 200`, `--memory.recompute attention experts`. `dualpipe train CONFIG --help` prints
all fields with the values of your file. A field that does not exist is an error that names the nearest one.
"""


def config_page() -> str:
    """Return the page of all tables and fields of a run's TOML file."""
    documentation = read_documentation()
    lines = [CONFIG_HEAD]
    classes = {name: kind.base for name, kind in kinds_of(Config).items()}
    lines += table(("table", "subject"), (
        (f"[`[{name}]`](#{name})", cell(subject(table_class, name))) for name, table_class in classes.items()))
    for name, table_class in classes.items():
        lines += [f"## {name}", "", f"`[{name}]`: {cell(sentence(subject(table_class, name)))}", ""]
        lines += field_table(table_class, documentation)
        for field_name, kind in kinds_of(table_class).items():
            if is_dataclass(kind.base):
                lines += rule_section(f"{name}.{field_name}", kind, documentation)
    return "\n".join(lines)


def subject(table_class: type, name: str) -> str:
    """Return the first line of the docstring of a table's class, without the table's name."""
    (first, *_) = inspect.cleandoc(table_class.__doc__ or "").splitlines()
    return first.removeprefix(f"[{name}]:").strip()


def sentence(text: str) -> str:
    """Return a text that ends in a full stop."""
    return text if text.endswith(".") else f"{text}."


def rule_section(name: str, kind: Kind, documentation: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines on the elements of a list of tables."""
    text = " ".join(inspect.cleandoc(kind.base.__doc__ or "").split())
    return [f"### {name}", "", f"`[[{name}]]`: {cell(sentence(text))} On the command line each is "
            f'`"{kind.metavar}"`, and they replace those of the file.', "", *field_table(kind.base, documentation)]


def field_table(table_class: Any, documentation: dict[str, dict[str, str]]) -> list[str]:
    """Return a table of the fields of a table's class: names, values, defaults and meanings."""
    kinds = kinds_of(table_class)
    texts = documentation[table_class.__name__]
    rows = []
    for field in fields(table_class):
        kind = kinds[field.name]
        values = ", ".join(f'`"{choice}"`' for choice in kind.choices) or kind.noun
        remedy = field.metadata.get("remedy", "")
        limit = f"; {remedy}" if "must" in remedy else ""
        rows.append((f"`{field.name}`", values, shown_value(field.default), cell(texts[field.name] + limit)))
    return table(("field", "value", "default", "meaning"), rows)


def shown_value(value: Any) -> str:
    """Return a default as TOML has it; an empty cell for None."""
    if value is None:
        return " "
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(map(str, value)) + "]`"
    return f"`{value:g}`" if isinstance(value, float) else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


# -- cli.md

CLI_HEAD = """# The command line

`dualpipe` is one command with subcommands; `python -m dualpipe` is the same. Each of them takes `--help`. Options may
stand before or after `CONFIG`. All other words are [settings](config.md) of the run and stand after `CONFIG`.

| exit status | meaning |
| --- | --- |
| 0 | done |
| 1 | a failure, or a check that found something |
| 2 | an error that you can put right, in one line on stderr (a missing argument: after a line of usage) |
| 75 | `train`: stopped by `train.time_limit`; start it again |
| 128 + signal | `train`: stopped by a signal, or a rank was killed by it |
"""


def subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction | None:
    """Return the action that holds a parser's subcommands."""
    return next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)


def leaf_commands(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command without subcommands, by its words."""
    inner = subparsers(parser)
    if inner is None:
        yield prefix.strip(), parser
        return
    for name, child in inner.choices.items():
        yield from leaf_commands(child, f"{prefix} {name}")


def cli_page() -> str:
    """Return the page of all commands and their options."""
    from dualpipe import cli

    commands = sorted(leaf_commands(cli._parser()), key=lambda command: command[0])
    lines = [CLI_HEAD]
    lines += table(("command", "purpose"), (
        (f"[`dualpipe {name}`](#dualpipe-{name.replace(' ', '-')})", cell(purpose(parser)))
        for name, parser in commands))
    for name, parser in commands:
        positional = [action for action in parser._actions if not action.option_strings]
        options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        usage = " ".join(["dualpipe", name, *(usage_of(action) for action in positional)])
        lines += [f"## dualpipe {name}", "", f"`{usage}`", "", cell(sentence(purpose(parser))), ""]
        rows = [(code(argument_name(action)), cell(help_of(action, parser))) for action in [*positional, *options]]
        lines += table(("argument", "meaning"), rows) if rows else []
    return "\n".join(lines)


def purpose(parser: argparse.ArgumentParser) -> str:
    """Return a command's description, as a sentence without the command's name."""
    text = (parser.description or "").strip()
    text = text.partition(": ")[2] if text.startswith("`dualpipe ") else text
    return text[:1].upper() + text[1:]


def usage_of(action: argparse.Action) -> str:
    """Return a positional argument as a usage line has it."""
    name = str(action.metavar or action.dest)
    if action.nargs == argparse.REMAINDER:
        return f"[{name} ...]"
    return {"+": f"{name}...", "?": f"[{name}]"}.get(str(action.nargs), name)


def argument_name(action: argparse.Action) -> str:
    """Return an argument with the name of its values."""
    if not action.option_strings:
        return usage_of(action)
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    metavar = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return f"{name} {' '.join(metavar) if isinstance(metavar, tuple) else metavar}"


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return an argument's help with its placeholders filled in."""
    return (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""


# -- pictures of schedules


def schedule_picture(name: str, costs: Costs) -> str:
    """Return the picture of a schedule, as `dualpipe schedule --svg` draws it."""
    return to_svg(simulate(build(name, 4, 10), costs))


PAGES: dict[str, Callable[[], str]] = {"config.md": config_page, "cli.md": cli_page}
PICTURES = {
    "1f1b": Costs(F=2, B=4, W=2),  # half as many stages, twice as large
    "zb1p": Costs(F=2, B=4, W=2),
    "interleaved_1f1b": Costs(F=1, B=2, W=1),
    "zbv": Costs(F=1, B=2, W=1),
    "v_half": Costs(F=1, B=2, W=1),
    "v_min": Costs(F=1, B=2, W=1),
    "dualpipev": Costs(F=1, B=2, W=1, FB=2.6),  # a pair takes 2.6 instead of 3
    "dualpipev_half": overlap_costs(0.3),
}


def generated_files() -> Iterator[tuple[str, str]]:
    """Yield the path of every generated file in docs/, and its text."""
    for name, make_page in PAGES.items():
        title, rest = make_page().split("\n", 1)
        yield name, f"{title}\n\n{NOTE}{rest}".rstrip("\n") + "\n"
    for name, costs in PICTURES.items():
        yield f"pictures/{name}.svg", schedule_picture(name, costs)


def main() -> int:
    """Write the files, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is not current")
    check = parser.parse_args().check
    status = 0
    for name, text in generated_files():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
        print(f"docs/{name}: {'not current; run make reference' if check else 'written'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
