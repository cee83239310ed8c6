"""Write docs/config.md, docs/cli.md and docs/api.md from the code.

    python docs/generate/reference.py            write the pages
    python docs/generate/reference.py --check    write nothing; exit status 1 if a page is not current

A test compares the pages with what this script makes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstrings

DOCS = Path(__file__).parents[1]
NOTE = "<!-- Written by docs/generate/reference.py from the code: change the code, then run `make reference`. -->\n"

# Modules with public names, in the order of the page. A tuple names the public ones where a module has no `__all__`.
MODULES: dict[str, tuple[str, ...] | None] = {
    "dualpipe": None,
    "dualpipe.pipeline": None,
    "dualpipe.schedule": None,
    "dualpipe.nn": None,
    "dualpipe.nn.attention": None,
    "dualpipe.parallel": None,
    "dualpipe.parallel.mesh": ("Mesh", "build_mesh"),
    "dualpipe.parallel.context": None,
    "dualpipe.parallel.fsdp.forward_hooks": ("with_forward_hooks",),
    "dualpipe.checkpoint": None,
    "dualpipe.runtime.storage.location": ("RemotePath",),
    "dualpipe.models": None,
    "dualpipe.hf": None,
    "dualpipe.quantized": None,
    "dualpipe.kernels": None,
    "dualpipe.train.model_parity": None,
}


@cache
def tree_of(path: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def cell(text: str) -> str:
    """Escape a text for a cell of a table, as one line."""
    return docstrings.escape(" ".join(text.split())).replace("|", "\\|") or " "


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


def field_documents(module: ModuleType) -> dict[tuple[str, str], str]:
    """Return the text below each field in the source of a module, by class and field."""
    documents = {}
    for node in tree_of(str(module.__file__)).body:
        if isinstance(node, ast.ClassDef):
            for name, text in documented_fields(node):
                documents[node.name, name] = text
    return documents


def documented_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the annotated fields of a class with the string below each, "" without one."""
    for statement, below in zip(node.body, [*node.body[1:], None]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = " ".join(str(below.value.value).split()) if is_text else ""  # type: ignore[union-attr]
            yield statement.target.id, text


def config_page() -> str:
    """Return the page of all tables and fields of a run's TOML file."""
    schema = import_module("dualpipe.train.config.schema")
    documents = field_documents(schema)
    lines = [CONFIG_HEAD]
    kinds = get_type_hints(schema.Config)
    lines += table(("table", "subject"), (
        (f"[`[{name}]`](#{name})", cell(subject(kind, name))) for name, kind in kinds.items()))
    for name, kind in kinds.items():
        lines += [f"## {name}", "", f"`[{name}]`: {cell(sentence(subject(kind, name)))}", ""]
        lines += field_table(kind, documents)
        for field_name, hint in get_type_hints(kind).items():
            (rule, *_) = get_args(hint) or (None,)
            if is_dataclass(rule):
                lines += rule_section(f"{name}.{field_name}", rule, documents)
    return "\n".join(lines)


def subject(kind: type, name: str) -> str:
    """Return the first line of the docstring of a table's class, without the table's name."""
    (first, *_) = inspect.cleandoc(kind.__doc__ or "").splitlines()
    return first.removeprefix(f"[{name}]:").strip()


def sentence(text: str) -> str:
    """Return a text that ends in a full stop."""
    return text if text.endswith(".") else f"{text}."


def rule_section(name: str, kind: Any, documents: dict[tuple[str, str], str]) -> list[str]:
    """Return the lines on the elements of a list of rules."""
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return [f"### {name}", "", f"`[[{name}]]`: {cell(sentence(text))} On the command line each is "
            f'`"PATTERN,FIELD=VALUE,..."`, and they replace those of the file.', "", *field_table(kind, documents)]


def field_table(kind: Any, documents: dict[tuple[str, str], str]) -> list[str]:
    """Return a table of the fields of a table's class: names, values, defaults and meanings."""
    hints = get_type_hints(kind)
    classes = [each.__name__ for each in kind.__mro__]
    rows = []
    for each in fields(kind):
        (text,) = [documents[name, each.name] for name in classes if (name, each.name) in documents][:1] or [""]
        remedy = each.metadata.get("remedy", "")
        limit = f"; {remedy}" if "must" in remedy else ""
        default = "" if each.default is MISSING else shown_value(each.default)
        rows.append((f"`{each.name}`", values_of(hints[each.name]), default, cell(text + limit)))
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


def values_of(kind: Any) -> str:
    """Return the values of an annotation: the choices, or the kind of value."""
    inside = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{choice}"`' for choice in inside)
    if get_origin(kind) in (UnionType, Union):
        return ", ".join(values_of(part) for part in inside if part is not NoneType)
    if get_origin(kind) is tuple:
        if is_dataclass(inside[0]):
            return "rules"
        return f"list of {values_of(inside[0])}s" if inside[-1] is ... else f"{len(inside)} {values_of(inside[0])}s"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}[kind]


# -- cli.md

CLI_HEAD = """# The command line

`dualpipe` is one command with subcommands; `python -m dualpipe` is the same. Each of them takes `--help`. Options may
stand before or after `CONFIG`. All other words after `CONFIG` are [settings](config.md) of the run.

| exit status | meaning |
| --- | --- |
| 0 | done |
| 1 | a failure, or a check that found something |
| 2 | an error that you can put right, in one line on stderr |
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


# -- api.md

API_HEAD = """# Public names

Every public name, by the module to import it from. A name that is in several modules is described under the first one.
Shapes are in the names of tensors: `x_TH` has T rows of H columns.
"""


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module."""
    named = MODULES[module.__name__]
    names = list(module.__all__ if named is None else named)
    return [name for name in names if not name.startswith("__")]


def api_page() -> str:
    """Return the page of all public names."""
    modules = [import_module(name) for name in MODULES]
    owners: dict[int, str] = {}
    lines = [API_HEAD]
    lines += table(("module", "subject"), (
        (f"[`{module.__name__}`](#{anchor(module.__name__)})", cell(summary(module))) for module in modules))
    for module in modules:
        lines += [f"## {module.__name__}", "", cell(summary(module)), ""]
        for name in public_names(module):
            value = getattr(module, name)
            owner = owners.setdefault(id(value), module.__name__)
            lines += [f"### {name}", ""] if owner == module.__name__ else []
            if owner == module.__name__:
                lines += described(name, value, module)
        others = [name for name in public_names(module) if owners[id(getattr(module, name))] != module.__name__]
        if others:
            links = ", ".join(f"[`{name}`](#{anchor(name)})" for name in others)
            lines += [f"Described above: {links}.", ""]
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return heading.lower().replace(".", "")


def summary(module: ModuleType) -> str:
    """Return the first paragraph of a module's docstring."""
    return inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0]


def described(name: str, value: Any, module: ModuleType) -> list[str]:
    """Return the lines on a public name: its signature, then its docstring."""
    if inspect.isclass(value):
        return class_lines(name, value)
    if inspect.isfunction(inspect.unwrap(value)):
        return function_lines(name, inspect.unwrap(value))
    node, text = assignment(name, module)
    shown = f" = {ast.unparse(node.value)}" if node is not None and node.value is not None else ""
    shown = shown if len(shown) < 200 else f": {type(value).__name__}"
    return ["```py", f"{name}{shown}", "```", "", *([cell(text), ""] if text else [])]


def assignment(name: str, module: ModuleType) -> tuple[ast.Assign | ast.AnnAssign | None, str]:
    """Return where a name that is no class or function is assigned, and the comment on that line."""
    tree = tree_of(str(module.__file__))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == name for each in node.names):
            return assignment(name, import_module(str(node.module)))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(t, "id", "") == name for t in targets):
            line = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()[(node.end_lineno or 1) - 1]
            return node, line.partition("  # ")[2]
    return None, ""


def definition(value: Any) -> ast.ClassDef | ast.FunctionDef:
    """Return the syntax tree of a class or function."""
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return node


def signature(node: ast.FunctionDef, *, is_method: bool = False, name: str = "") -> str:
    """Return a function's signature, on several lines where one would be long. is_method: leave out `self`."""
    arguments = node.args
    if is_method and "staticmethod" not in decorators(node):
        (arguments.posonlyargs or arguments.args).pop(0)
    is_constructor = node.name == "__init__"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not is_constructor else ""
    start = name or node.name
    line = f"{start}({ast.unparse(arguments)}){returns}"
    if len(line) <= 100:
        return line
    parts = split_arguments(ast.unparse(arguments))
    return f"{start}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def split_arguments(text: str) -> list[str]:
    """Split the text of a function's parameters at the commas between them."""
    parts: list[str] = []
    depth = 0
    part = ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()]


def function_lines(name: str, value: Callable[..., Any]) -> list[str]:
    """Return the lines on a function."""
    node = definition(value)
    assert isinstance(node, ast.FunctionDef), name
    return ["```py", signature(node), "```", "", *docstrings.to_markdown(inspect.getdoc(value) or "")]


def class_lines(name: str, value: type) -> list[str]:
    """Return the lines on a class: its constructor or fields, its docstring, its public methods and properties."""
    node = definition(value)
    assert isinstance(node, ast.ClassDef), name
    constructor = constructor_of(value)
    own_fields = [(field, text) for field, text in documented_fields(node) if not field.startswith("_")]
    if constructor is not None:
        head = "class " + signature(constructor, is_method=True, name=name)
    elif own_fields:
        stated = {each.target.id: ast.unparse(each) for each in node.body  # type: ignore[union-attr]
                  if isinstance(each, ast.AnnAssign)}
        head = f"class {name}:\n" + "".join(f"    {stated[field]}\n" for field, _ in own_fields).rstrip("\n")
    else:
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"class {name}({bases})" if bases else f"class {name}"
    text = value.__doc__ or ""
    text = "" if text.startswith(f"{name}(") else inspect.cleandoc(text)  # dataclasses without one
    lines = ["```py", head, "```", "", *docstrings.to_markdown(text)]
    documented = [f"- `{field}`: {cell(note)}" for field, note in own_fields if note]
    lines += [*documented, ""] if documented else []
    methods = list(public_methods(node))
    rows = [(code(shown_member(each)), cell(first_paragraph(each))) for each in methods]
    lines += table(("member", "purpose"), rows) if rows else []
    for method in methods:
        if is_long(method):
            shown = f"{name}.{method.name}"
            lines += [f"#### {shown}", "", "```py", signature(method, is_method=True, name=shown), "```", ""]
            lines += docstrings.to_markdown(ast.get_docstring(method) or "")
    return lines


def constructor_of(value: type) -> ast.FunctionDef | None:
    """Return the constructor of a class that is written out, its own or that of a base class of this library."""
    for each in value.__mro__:
        is_written = "__init__" in vars(each) and not is_dataclass(each) and not getattr(each, "_is_protocol", False)
        if is_written and each.__module__.startswith("dualpipe"):
            node = definition(vars(each)["__init__"])
            assert isinstance(node, ast.FunctionDef)
            return node
    return None


def public_methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the public methods and properties of a class that have a docstring, without setters."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
            continue
        is_setter = any(decorator.endswith(".setter") for decorator in decorators(method))
        if first_paragraph(method) and not is_setter:
            yield method


def decorators(node: ast.FunctionDef) -> set[str]:
    """Return the decorators of a function as text."""
    return {ast.unparse(each) for each in node.decorator_list}


def is_property(method: ast.FunctionDef) -> bool:
    """Return True for a property."""
    return bool(decorators(method) & {"property", "cached_property"})


def shown_member(method: ast.FunctionDef) -> str:
    """Return a property's name, or a method's with the names of its parameters."""
    return method.name if is_property(method) else f"{method.name}({short_arguments(method)})"


def first_paragraph(method: ast.FunctionDef) -> str:
    """Return the first paragraph of a method's docstring."""
    return (ast.get_docstring(method) or "").partition("\n\n")[0]


def is_long(method: ast.FunctionDef) -> bool:
    """Return True if a method's docstring has more than the paragraph that a table shows."""
    return not is_property(method) and "\n\n" in (ast.get_docstring(method) or "")


def short_arguments(method: ast.FunctionDef) -> str:
    """Return the names of a method's parameters, without annotations."""
    arguments = method.args
    positional = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    names = positional if "staticmethod" in decorators(method) else positional[1:]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [each.arg for each in arguments.kwonlyargs]
    return ", ".join([*names, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])])


PAGES: dict[str, Callable[[], str]] = {"config.md": config_page, "cli.md": cli_page, "api.md": api_page}


def page(name: str) -> str:
    """Return the text of a generated page."""
    (title, rest) = PAGES[name]().split("\n", 1)
    return f"{title}\n\n{NOTE}{rest}".rstrip("\n") + "\n"


def main() -> int:
    """Write the pages, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is not current")
    check = parser.parse_args().check
    stale = [name for name in PAGES if not (DOCS / name).exists() or (DOCS / name).read_text("utf-8") != page(name)]
    for name in stale:
        if not check:
            (DOCS / name).write_text(page(name), encoding="utf-8")
        print(f"docs/{name}: {'not current; run make reference' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
