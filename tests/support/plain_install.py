"""Hide what a plain `pip install` of this library would not have brought, from a process and those that it starts."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# As if they were not installed: the finder of files does not find them.
SITECUSTOMIZE = """
from importlib.machinery import PathFinder

hidden, find = {hidden}, PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name.partition(".")[0] in hidden else find(name, *where)
"""


def hide_undeclared(folder: Path) -> None:
    """Write a sitecustomize.py, which a Python that has `folder` on its path runs when it starts.

    Hides every installed package but those that pyproject.toml asks for without an extra, and what they ask for.
    """
    needed = {"dualpipe"}
    for line in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]:
        _add_closure(line, needed)
    modules = packages_distributions()
    hidden = {name for name, found in modules.items() if needed.isdisjoint(map(_normal, found))}
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hidden=hidden))


def _add_closure(line: str, needed: set[str]) -> None:
    wanted = Requirement(line)
    name = _normal(wanted.name)
    if name in needed or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
        return
    needed.add(name)
    try:
        further = requires(wanted.name) or ()
    except PackageNotFoundError:
        return
    for next_line in further:
        _add_closure(next_line, needed)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
