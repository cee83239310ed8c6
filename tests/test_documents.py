"""The Python in README.md and docs/ passes a type checker; support/given.pyi has all other names that it uses."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GIVEN = ROOT / "tests/support/given.pyi"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINKED = (*DOCUMENTS, *sorted((ROOT / "docs/results").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
          ROOT / "benchmarks/README.md")


class Reads(ast.NodeVisitor):
    """Collects in `names` the names that code reads before it binds them; functions are read last."""

    def __init__(self, tree):
        self.bound, self.names, self.functions = set(), set(), []
        self.visit(tree)
        for function in self.functions:
            self.generic_visit(function)

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif node.id not in self.bound:
            self.names.add(node.id)

    def visit_Assign(self, node):
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_For(self, node):
        for part in (node.iter, node.target, *node.body):
            self.visit(part)

    def visit_FunctionDef(self, node):
        self.bound.add(node.name)
        self.functions.append(node)

    def visit_ClassDef(self, node):
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_alias(self, node):
        self.bound.add(node.asname or node.name)


def taken_as_given(block):
    return Reads(ast.parse(block)).names & Reads(ast.parse(GIVEN.read_text())).bound


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """Return a folder with each block as a file, behind the code it assumes, and the packages laid out by a wheel."""
    folder = tmp_path_factory.mktemp("blocks")
    for document in DOCUMENTS:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)):
            given = ", ".join(sorted(taken_as_given(block)))
            start = f"from given import {given}\n" if given else "\n"
            (folder / f"{document.stem}_{number}.py").write_text(start + block)
    (folder / "lib/dualpipe").mkdir(parents=True)
    for part in (*(ROOT / "dualpipe").iterdir(), ROOT / "kernels", ROOT / "models"):
        (folder / "lib/dualpipe" / part.name).symlink_to(part)
    (folder / "lib/given.pyi").symlink_to(GIVEN)
    (folder / "README_wrong.py").write_text("from given import stage_a, DualPipeV\nDualPipeV((stage_a,), chunks=8)\n")
    settings = {"extraPaths": [str(folder / "lib")], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return folder


def anchors(document):
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_what_they_name(document):
    text = document.read_text()
    links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    files = [target.partition("#")[0] for target in links]
    assert [file for file in files if not (document.parent / file).exists()] == []
    inside = [target.partition("#") for target in links if "#" in target]
    assert [(file, anchor) for file, _, anchor in inside
            if anchor not in anchors(document.parent / file if file else document)] == []
    named = re.findall(r"`(\w+)`\s+in\s+\[`[^`]+`\]\(([^)]+)\)", text)
    assert [(name, file) for name, file in named if name not in (document.parent / file).read_text()] == []
    folders = "dualpipe|kernels|models|tests|examples|benchmarks|docs"
    paths = re.findall(rf"(?:^|[\s`])((?:{folders})/[\w./-]*\w/?)(?=[\s`,;:)]|$)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_library_names_documents_that_exist():
    """Messages, docstrings, scripts and examples name documents that exist: renaming a page renames it there too."""
    named = defaultdict(set)
    for folder in ("dualpipe", "kernels", "models", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".md", ".sbatch"):
                for name in re.findall(r"\bdocs/[\w/-]+\.md\b(?:#[\w-]+)?", path.read_text(encoding="utf-8")):
                    named[name].add(path.name)
    assert len(named) > 5
    for name, files in named.items():
        page, _, anchor = name.partition("#")
        assert (ROOT / page).exists(), files
        in_tests = files == {"test_site.py"}  # which makes up a page
        assert not anchor or in_tests or anchor in anchors(ROOT / page), (anchor, files)


def test_every_page_can_be_reached_from_the_readme():
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            text = page.read_text()
            targets = (target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target)
            left += [page.parent / target for target in targets if target]
    assert set((ROOT / "docs").rglob("*.md")) <= seen


def test_the_engines_rows_in_the_results_are_those_that_were_measured():
    measured = json.loads((ROOT / "benchmarks/results/engine_overhead.json").read_text())
    rows = re.findall(r"(\d+) us \(([\d.]+)x\) \| (\d+) us", (ROOT / "docs/results/cpu.md").read_text())
    host = [row["host"] for row in measured["rows"]]
    assert rows == [(f"{h['ours_us']:.0f}", f"{h['ratio']:.2f}", f"{h['torch_us']:.0f}") for h in host]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright(blocks):
    files = sorted(path.name for path in blocks.glob("*.py"))
    assert {"README_0.py", "README_1.py", "README_2.py", "models_1.py"} <= set(files)
    command = [sys.executable, "-P", "-m", "pyright", "--pythonpath", sys.executable, *files]
    done = subprocess.run(command, cwd=blocks, capture_output=True, text=True)
    files_with_errors = {Path(file).name for file in re.findall(r"^\s*(\S+\.py):\d+.*\berror:", done.stdout, re.M)}
    assert files_with_errors == {"README_wrong.py"}, done.stdout + done.stderr
