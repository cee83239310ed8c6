"""Who imports whom: nothing imports upwards, and lower layers load nothing of the upper ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dualpipe

ROOT = Path(dualpipe.__file__).parent
ORDER = (  # a layer imports those before it, and itself; those of one entry do not import each other
    {"errors", "dtypes", "device", "files", "background"}, {"recorder"}, {"ranks", "schedule"}, {"trace"}, {"kernels"},
    {"quantized"},
    {"nn"}, {"parallel"}, {"pipeline"}, {"utils"}, {"models"}, {"checkpoint"}, {"train", "doctor"}, {"plan"}, {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path: Path, *, at_start: bool) -> Iterator[str]:
    """The modules of ours that a file imports; `at_start`: not those inside of functions or for type checkers."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in nodes if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dualpipe."))
        elif isinstance(node, ast.ImportFrom) and node.module == "dualpipe":
            names = [alias.name for alias in node.names if not alias.name.startswith("__")]
            yield from (dualpipe._EXPORTS.get(name, f"dualpipe.{name}") for name in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualpipe."):
            yield node.module


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


def test_nothing_imports_upwards() -> None:
    wrong = []
    for name, path in modules().items():
        if name == "dualpipe":  # loads its names on first use
            continue
        layer = name.split(".")[1]
        for imported in imports(path, at_start=False):
            other = imported.split(".")[1]
            if other != layer and LEVEL[other] >= LEVEL[layer]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_no_circles() -> None:
    known = modules()
    edges = {name: {i for i in imports(path, at_start=True) if i in known} - {name} for name, path in known.items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert not edges


def loaded_by(module: str) -> set[str]:
    """Those of ours that a fresh interpreter has after `import module`."""
    code = f"import sys, {module}; print(*(m for m in sys.modules if m.split('.')[0] == 'dualpipe'))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_lower_layers_load_no_upper_ones() -> None:
    assert not {name for name in loaded_by("dualpipe.nn") if name.startswith(("dualpipe.p", "dualpipe.m"))}
    assert len(loaded_by("dualpipe.parallel.mesh")) < 34  # kernels among them, for what formats are
