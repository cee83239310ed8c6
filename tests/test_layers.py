"""Rooms: what each may import and how large it is. Nothing imports upwards, and nothing in a circle."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import dualpipe

ROOT = Path(dualpipe.__file__).parent
DOCUMENTS = Path(__file__).parents[1]
ORDER = (  # a room imports those before it, and itself; those of one entry do not import each other
    {"_moved"}, {"runtime"}, {"schedule", "kernels"}, {"trace", "quantized"}, {"nn"}, {"parallel"}, {"pipeline"},
    {"utils", "models"}, {"checkpoint"}, {"train"}, {"plan"}, {"cli"}, {"__main__"},
)
MOST_FILES = 14  # of a room
MIXED_ROOMS = {"dualpipe.schedule dualpipe.schedule.search", "dualpipe.checkpoint dualpipe.checkpoint.hub"}
MOST_PARAMETERS = 10  # of a public constructor
MIRRORS = {  # classes, or all of a module, with as many fields as what they mirror
    "dualpipe.train.config.schema": "a table of the TOML file",
    "dualpipe.train.metrics.StepMetrics": "a line of metrics.jsonl",
    "dualpipe.models.hub.HubConfig": "a config.json",
    "dualpipe.checkpoint.manifest.Manifest": "a checkpoint's manifest",
    "dualpipe.plan.machines.Machine": "a table of machines.toml",
    "dualpipe.plan.costs.Setting": "what a layer's costs depend on, a key of their cache",
    "dualpipe.train.metrics.Console": "rich's own, with its constructor",
}
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, also inside of functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dualpipe."))
        elif isinstance(node, ast.ImportFrom) and node.module == "dualpipe":
            names = [alias.name for alias in node.names if not alias.name.startswith("__")]
            yield from (dualpipe._EXPORTS.get(name, f"dualpipe.{name}") for name in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualpipe."):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (each if each in MODULES else node.module for each in submodules)


def modules() -> dict[str, Path]:
    """The files of the library by module name; kernels and models lie beside dualpipe/ in a checkout."""
    folders = {"dualpipe": ROOT}
    for name in ("kernels", "models"):
        folders[f"dualpipe.{name}"] = ROOT / name if (ROOT / name).is_dir() else ROOT.parent / name
    found = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()
ROOMS = {name: path for name, path in MODULES.items() if path.name == "__init__.py" and name != "dualpipe"}


def room_of(module: str) -> str:
    """Return the package that a module is in; a package is its own."""
    return module if module in ROOMS else module.rpartition(".")[0]


def circles(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return what is left of a graph without all that leads to no circle."""
    left = {name: targets - {name} for name, targets in edges.items()}
    while leaves := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    return {name: targets & left.keys() for name, targets in left.items()}


def test_nothing_imports_upwards() -> None:
    wrong = []
    for name, path in MODULES.items():
        if name == "dualpipe":  # loads its names on first use
            continue
        layer = name.split(".")[1]
        for imported in imports(path):
            other = imported.split(".")[1]
            if other != layer and LEVEL[other] >= LEVEL[layer]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_the_documents_list_the_rooms_in_this_order() -> None:
    text = " ".join((DOCUMENTS / "CONTRIBUTING.md").read_text().split())
    (said,) = re.findall(r"Nothing imports upwards: (.*?), as \[", text)
    levels = [set(names.split(", ")) for names in said.split(" ← ")]
    assert levels == [names - {"utils"} for names in ORDER if not any(name.startswith("_") for name in names)]
    folders = re.findall(r"^    (?:dualpipe/)?(\w+)/  ", (DOCUMENTS / "README.md").read_text(), re.M)
    assert set(folders) == set.union(*levels) - {"cli"}
    assert [LEVEL[name] for name in folders] == sorted(LEVEL[name] for name in folders)


def test_no_circles() -> None:
    """Not between files, lazy imports and those for type checkers among them."""
    assert not circles({name: set(imports(path)) for name, path in MODULES.items() if name != "dualpipe"})


def test_no_circles_between_rooms_that_lie_side_by_side() -> None:
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        for imported in imports(path):
            here, there = room_of(name), room_of(imported)
            if here.rpartition(".")[0] == there.rpartition(".")[0] and here in ROOMS:
                edges[here].add(there)
    assert not circles(edges)


def test_no_circles_between_a_room_and_those_inside() -> None:
    """A package's `__init__` hands names on: what it imports from inside is no circle."""
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        if name in ROOMS:
            continue
        for imported in imports(path):
            here, there = room_of(name), room_of(imported)
            if f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}."):
                edges[here].add(there)
    circular = {f"{outer} {inner}" for outer in list(edges) for inner in edges[outer]
                if inner.startswith(f"{outer}.") and outer in edges.get(inner, ())}
    assert circular <= MIXED_ROOMS


def constructors() -> Iterator[tuple[type, int]]:
    """Yield the public classes of the library with the number of parameters that they are made of."""
    for name in MODULES:
        if name == "dualpipe.__main__":
            continue
        module = import_module(name)
        for title, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == name and not title.startswith("_"):
                with suppress(ValueError, TypeError):  # of what C or a protocol makes
                    parameters = inspect.signature(kind).parameters.values()
                    yield kind, sum(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)


def test_no_public_constructor_has_many_parameters() -> None:
    def mirrors_a_file(kind: type) -> bool:
        return any(f"{base.__module__}.{base.__qualname__}" in MIRRORS or base.__module__ in MIRRORS
                   for base in kind.__mro__)

    assert not {f"{kind.__module__}.{kind.__qualname__}": count for kind, count in constructors()
                if count > MOST_PARAMETERS and not mirrors_a_file(kind)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_files_and_says_in_three_lines_what_it_is_and_may_import(room: str) -> None:
    files = list(ROOMS[room].parent.glob("*.py"))
    assert len(files) <= MOST_FILES, sorted(file.name for file in files)
    lines = (ast.get_docstring(ast.parse(ROOMS[room].read_text())) or "").splitlines()
    assert lines and len(lines) <= 5 and lines[-1].endswith("."), lines
    _, _, said = " ".join(lines).rpartition("Imports ")
    allowed = [f"dualpipe.{name}" for name in re.findall(r"`([a-z0-9_.]+)`", said)]
    assert allowed or said == "nothing.", said
    used = set()
    for name, path in MODULES.items():
        if room_of(name) != room:
            continue
        for imported in imports(path):
            fits = [other for other in allowed if f"{imported}.".startswith(f"{other}.")]
            used.update(fits)
            assert fits or f"{imported}.".startswith(f"{room}."), f"{name} imports {imported}, which {room} may not"
    assert used == set(allowed), "what it says that it imports, it does"


def test_old_paths_give_the_modules_at_their_new_ones() -> None:
    code = ("import importlib, warnings\n"
            "from dualpipe._moved import MOVED\n"
            "for old, new in MOVED.items():\n"
            "    with warnings.catch_warnings(record=True) as caught:\n"
            "        warnings.simplefilter('always')\n"
            "        module = importlib.import_module(old)\n"
            "    assert module is importlib.import_module(new), old\n"
            "    assert module.__spec__.name == new, module.__spec__\n"
            "    assert any(f'{old} has moved to {new}' in str(each.message) for each in caught), old\n"
            "from dualpipe.parallel import materialize, shard\n"
            "assert callable(materialize) and callable(shard)\n")
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def loaded_by(module: str) -> set[str]:
    """Those of ours that a fresh interpreter has after `import module`."""
    code = f"import sys, {module}; print(*(m for m in sys.modules if m.split('.')[0] == 'dualpipe'))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_lower_layers_load_no_upper_ones() -> None:
    assert not {name for name in loaded_by("dualpipe.nn") if name.startswith(("dualpipe.p", "dualpipe.m"))}
    rooms = {name.split(".")[1] for name in loaded_by("dualpipe.parallel.mesh") if "." in name}
    assert rooms == {"_moved", "kernels", "parallel", "quantized", "runtime"}, "kernels for what formats are"
