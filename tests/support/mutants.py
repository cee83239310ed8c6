"""The share of small faults that the tests find, by room: mutants, each tried against the tests of its room.

    pip install "dualpipe[mutants]"
    python tests/support/mutants.py --count 200 --seed 0 --jobs 2 --out mutants.json

A mutant is one file with one small change: another operator or comparison, a number off by one, `not` in front of a
condition, a loop that never runs, `break` for `continue`. Faults in annotations, docstrings, and texts of errors are
left out. Each is written into a copy of the tree, where the fast tests of its room run until the first failure, those
named after the file first. It is found if a test fails, or if the tests do not end. Started again with the same file,
it goes on after those that it has.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from difflib import unified_diff
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 900.0  # seconds for the tests of a mutant; the fast tests of the slowest room take a third
ROOMS = {  # by name: the files of a room, and the folder of its tests
    "schedule": ("dualpipe/schedule/**/*.py", "tests/schedule"),
    "pipeline": ("dualpipe/pipeline/*.py", "tests/pipeline"),
    "nn": ("dualpipe/nn/**/*.py", "tests/nn"),
    "parallel": ("dualpipe/parallel/**/*.py", "tests/parallel"),
    "checkpoint": ("dualpipe/checkpoint/**/*.py", "tests/checkpoint"),
    "kernels": ("kernels/*.py", "tests/kernels"),  # the PyTorch references alone
    "data": ("dualpipe/train/data/*.py", "tests/train/data"),
}
KINDS = (  # of the operators of cosmic-ray, by the beginnings of their names
    "core/ReplaceBinaryOperator", "core/ReplaceComparisonOperator", "core/NumberReplacer", "core/AddNot",
    "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak", "core/ZeroIterationForLoop",
    "core/ReplaceUnaryOperator",
)


@dataclass
class Mutant:
    """One change to one file, and whether the tests found it.

    Attributes:
        room: key of `ROOMS`.
        file: relative to the root.
        line: of the change, from 1.
        operator: name of cosmic-ray's operator.
        occurrence: number of the change among those that the operator can make to the file.
        is_found: a test failed, or the time limit passed.
        seconds: duration of the tests.
        by: the first test that failed, or "".
    """

    room: str
    file: str
    line: int
    operator: str
    occurrence: int
    is_found: bool = False
    seconds: float = 0.0
    by: str = ""

    def changed(self, source: str) -> str:
        """Return the source of the file with the change."""
        return MutationVisitor.mutate_code(source, get_operator(self.operator)(), self.occurrence)


def lines_of_behaviour(source: str, *, only_references: bool) -> set[int]:
    """Return the lines of a file where a change is a fault: within functions, outside annotations and texts.

    only_references: take the functions named as references alone.
    """
    lines: set[int] = set()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ("reference" in node.name or not only_references):
            lines |= _lines(node.body[0], node.body[-1])
            left_out |= {node.lineno, *_lines(node, node.body[0])} - _lines(node.body[0], node.body[-1])
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign | ast.JoinedStr):
            left_out |= _lines(node, node)
    return lines - left_out


def _lines(first: ast.AST, last: ast.AST) -> set[int]:
    """Return the lines from the beginning of one node to the end of another."""
    return set(range(first.lineno, last.end_lineno + 1))  # type: ignore[attr-defined]


def find_mutants(room: str) -> Iterator[Mutant]:
    """Yield every mutant of a room."""
    pattern, _ = ROOMS[room]
    names = sorted(name for name in operator_names() if name.startswith(KINDS))
    for path in sorted(ROOT.glob(pattern)):
        source = path.read_text(encoding="utf-8")
        lines = lines_of_behaviour(source, only_references=room == "kernels")
        changes = _Changes(names)
        changes.walk(get_ast(source))
        for name, change_lines in changes.lines.items():
            for occurrence, line in enumerate(change_lines):
                if line in lines:
                    yield Mutant(room, str(path.relative_to(ROOT)), line, name, occurrence)


class _Changes(Visitor):
    """Notes the line of each change that some operators can make to a file, by operator, in the order of the file."""

    def __init__(self, names: Sequence[str]) -> None:
        self._operators = {name: get_operator(name)() for name in names}
        self.lines: dict[str, list[int]] = {name: [] for name in names}

    def visit(self, node: Any) -> Any:
        """Note the changes to a node of the syntax tree."""
        for name, operator in self._operators.items():
            self.lines[name] += [start[0] for start, _ in operator.mutation_positions(node)]
        return node


def choose(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Return `count` random mutants, as many of each room; each kind of change is as likely as the others."""
    generator = random.Random(seed)
    chosen = []
    for number, room in enumerate(rooms):
        by_kind: dict[str, list[Mutant]] = {}
        for mutant in find_mutants(room):
            by_kind.setdefault(next(filter(mutant.operator.startswith, KINDS)), []).append(mutant)
        for mutants in by_kind.values():
            generator.shuffle(mutants)
        of_room = count // len(rooms) + (number < count % len(rooms))
        for _ in range(of_room):
            kind = generator.choice(sorted(kind for kind, mutants in by_kind.items() if mutants))
            chosen.append(by_kind[kind].pop())
    return chosen


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files to a folder from which Python imports them, and return it."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for name in ("kernels", "models"):  # inside dualpipe, as in an installation
        (folder / "dualpipe" / name).symlink_to(folder / name)
    return folder


def tests_of(mutant: Mutant) -> list[str]:
    """Return the test files of a mutant's room; those named after its file, or its folder, first."""
    _, folder = ROOMS[mutant.room]
    path = Path(mutant.file)
    files = sorted(ROOT.glob(f"{folder}/**/test_*.py"), key=lambda file: (
        not file.stem.startswith(f"test_{path.stem}"), file.parent.name != path.parent.name, str(file)))
    return [str(file.relative_to(ROOT)) for file in files]


def try_mutant(mutant: Mutant, tree: Path) -> None:
    """Run the tests of a mutant in a copy of the tree, and note whether they find it."""
    file = tree / mutant.file
    source = file.read_text(encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", "--timeout", "120",
               *tests_of(mutant)]
    began = time.monotonic()
    file.write_text(mutant.changed(source), encoding="utf-8")
    process = subprocess.Popen(command, cwd=tree, env=environment, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        mutant.is_found = process.returncode != 0
        mutant.by = failed[0][:200] if failed else f"exit status {process.returncode}" * mutant.is_found
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        mutant.is_found = True
        mutant.by = f"no end within {TIME_LIMIT:g} s"
    finally:
        file.write_text(source, encoding="utf-8")
    mutant.seconds = time.monotonic() - began


def resumed(mutants: Sequence[Mutant], records: Sequence[dict[str, Any]]) -> list[Mutant]:
    """Return the mutants with the results of an earlier run. Raises ValueError if that run tried others."""
    earlier = [Mutant(**record) for record in records]
    changes = [[(mutant.file, mutant.operator, mutant.occurrence) for mutant in some] for some in (mutants, earlier)]
    if changes[0] != changes[1]:
        raise ValueError("--out is the file of other mutants, or the sources have changed; give another")
    return earlier


def show(mutant: Mutant) -> str:
    """Return a mutant as a line, and its change."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    lines = unified_diff(source.splitlines(), mutant.changed(source).splitlines(), n=0, lineterm="")
    change = "\n".join(f"    {line}" for line in list(lines)[3:])
    verdict = f"found by {mutant.by}" if mutant.is_found else "NOT FOUND"
    return f"{mutant.file}:{mutant.line} {verdict} ({mutant.seconds:.0f} s)\n{change}"


def main() -> None:
    """Try random mutants, print each and the share that is found by room, and write all as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()
    mutants = choose(options.count, options.seed, options.rooms)
    if options.out.exists():
        mutants = resumed(mutants, json.loads(options.out.read_text(encoding="utf-8")))
    trees: SimpleQueue[Path] = SimpleQueue()
    with TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder, str(job))))

        def try_one(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                try_mutant(mutant, tree)
            finally:
                trees.put(tree)
            print(show(mutant), flush=True)
            options.out.write_text(json.dumps(list(map(asdict, mutants)), indent=1), encoding="utf-8")

        list(pool.map(try_one, [mutant for mutant in mutants if not mutant.seconds]))
    total = Counter(mutant.room for mutant in mutants)
    found = Counter(mutant.room for mutant in mutants if mutant.is_found)
    for room in options.rooms:
        print(f"{room}: {found[room]} of {total[room]} found")
    print(f"all: {found.total()} of {total.total()} found")


if __name__ == "__main__":
    main()
