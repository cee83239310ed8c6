"""The documents as a site: its links, its navigation, and every public name in docs/api.md."""

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass, isfunction
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DESCRIBED = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def hooks():
    sys.path.append(str(ROOT / "docs/generate"))
    try:
        import site_hooks
        yield site_hooks
    finally:
        sys.path.remove(str(ROOT / "docs/generate"))


@pytest.mark.parametrize("source, uri, text, expected", [
    ("README.md", "index.md", "[a](docs/cli.md#x) ![b](docs/pictures/c.svg)", "[a](cli.md#x) ![b](pictures/c.svg)"),
    ("README.md", "index.md", "[`d`](dualpipe/cli.py) and [e](CONTRIBUTING.md)", "`d` and [e](contributing.md)"),
    ("docs/cli.md", "cli.md", "[f](../README.md) [g](results/cpu.md)", "[f](index.md) [g](results/cpu.md)"),
    ("docs/results/cpu.md", "results/cpu.md", "[j](../gpu.md) [k](https://l.org)", "[j](../gpu.md) [k](https://l.org)"),
    ("docs/cli.md", "cli.md", "[m](../Makefile)\n```py\n[n](../o.py)\n```\n", "m\n```py\n[n](../o.py)\n```\n"),
    ("docs/cli.md", "cli.md", "| [`[train]`](#train) |", "| [`[train]`](#train) |"),
])
def test_links_hold_on_the_site(hooks, source, uri, text, expected):
    assert hooks.rewrite(text, source, uri) == expected


def test_the_schedule_page_is_embedded(hooks):
    text = hooks.rewrite((ROOT / "docs/schedules.md").read_text(encoding="utf-8"), "docs/schedules.md", "schedules.md")
    assert text.count('<iframe src="pictures/schedules.html"') == 1 and "schedule-page.png" not in text


def test_every_page_is_in_the_navigation(hooks):
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == pages | set(hooks.PAGES.values())


def packages_with_names():
    """Return the public names of each package that has some."""
    names = {}
    for folder, package in (("dualpipe", "dualpipe"), ("kernels", "dualpipe.kernels"), ("models", "dualpipe.models")):
        for path in (ROOT / folder).rglob("__init__.py"):
            if "__all__" in path.read_text(encoding="utf-8"):
                module = import_module(".".join((package, *path.relative_to(ROOT / folder).parent.parts)))
                names[module.__name__] = [name for name in module.__all__ if not name.startswith("__")]
    return names


def test_every_package_with_public_names_is_on_their_page():
    """The names of these packages are described under another one."""
    elsewhere = {"dualpipe.pipeline", "dualpipe.parallel.context"}
    assert set(packages_with_names()) - elsewhere <= set(DESCRIBED)


def test_public_names_have_docstrings():
    for package, names in packages_with_names().items():
        for name in names:
            value = getattr(import_module(package), name)
            if callable(value) and getattr(value, "__module__", "").startswith("dualpipe"):
                assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"{package}.{name}"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="needs the extra docs")
def test_it_builds_without_warnings_and_describes_every_public_name(tmp_path):
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "pictures/schedules.html").exists(), done.stderr
    page = (tmp_path / "api.html").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r'id="(dualpipe\.[\w.]+)"', page)}
    for package, names in packages_with_names().items():
        values = [getattr(import_module(package), name) for name in names]
        assert {value.__name__ for value in values if isclass(value) or isfunction(value)} <= shown, package
