"""The documents as a site: links that hold there, and every page in its navigation."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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


@pytest.mark.slow
def test_it_builds_without_warnings(tmp_path):
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "schedules.html").exists(), done.stderr
