"""Rules of style that ruff does not have, for the library's code; a part of `make lint`.

    python -P tests/support/style_rules.py

A docstring begins with a verb or a noun phrase, a tuple assignment sets at most two attributes, and a walrus is rare.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIBRARY = ("dualpipe", "kernels", "models")
FIRST_WORDS = frozenset({"What", "Those", "That", "Of", "As", "Whether", "How", "Where", "Who", "In", "From"})
MOST_WALRUSES = 30  # in the whole library
MOST_ATTRIBUTES = 2  # of a tuple assignment
PHRASES = ("of one's own",)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Violation(NamedTuple):
    """A place that breaks a rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def check(paths: Iterable[Path], root: Path) -> list[Violation]:
    """Return what breaks a rule in a set of files, with paths relative to `root`."""
    problems: list[Violation] = []
    walruses: dict[Path, int] = {}
    for path in sorted(paths):
        name = path.relative_to(root)
        source = path.read_text()
        tree = ast.parse(source)
        problems += violations(name, source, tree)
        count = sum(isinstance(node, ast.NamedExpr) for node in ast.walk(tree))
        if count:
            walruses[name] = count
    total = sum(walruses.values())
    if total > MOST_WALRUSES:
        ordered = sorted(walruses.items(), key=lambda item: -item[1])
        where = ", ".join(f"{name} {count}" for name, count in ordered)
        problems.append(Violation(ordered[0][0], 1, f"{total} walruses in the library, at most {MOST_WALRUSES}; keep "
                                  f"those that save an expensive call: {where}"))
    return problems


def violations(name: Path, source: str, tree: ast.Module) -> Iterator[Violation]:
    """Yield what breaks a rule within one file."""
    for number, line in enumerate(source.splitlines(), 1):
        for phrase in PHRASES:
            if phrase in line:
                yield Violation(name, number, f"{phrase!r}; name the thing, such as 'a custom optimizer'")
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            word = first_word(node)
            if word in FIRST_WORDS:
                line_number = getattr(node, "lineno", 1)
                yield Violation(name, line_number, f"a docstring begins with {word!r}; use a verb or a noun phrase")
        if isinstance(node, ast.Assign):
            for target in node.targets:
                count = sum(isinstance(element, ast.Attribute) for element in getattr(target, "elts", ()))
                if count > MOST_ATTRIBUTES:
                    yield Violation(name, node.lineno, f"a tuple assignment to {count} attributes; use a line for each")


def first_word(node: Documented) -> str:
    """Return the first word of a docstring, "" without one."""
    words = (ast.get_docstring(node) or "").split(maxsplit=1)
    return words[0].strip(",.:;") if words else ""


def library_files(root: Path = ROOT) -> list[Path]:
    """Return the Python files of the library."""
    return [path for folder in LIBRARY for path in (root / folder).rglob("*.py")]


if __name__ == "__main__":
    found = check(library_files(), ROOT)
    for violation in found:
        print(violation)
    sys.exit(1 if found else 0)
