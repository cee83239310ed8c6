"""docs/config.md, docs/cli.md and docs/api.md say what the code says, and name every public name."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dualpipe
from dualpipe.train.config.schema import Config, TrainConfig

GENERATE = Path(__file__).parents[1] / "docs" / "generate"


@pytest.fixture(scope="module")
def reference():
    sys.path.append(str(GENERATE))
    try:
        import reference
        yield reference
    finally:
        sys.path.remove(str(GENERATE))


@pytest.mark.parametrize("name", ["config.md", "cli.md", "api.md"])
def test_a_page_is_what_the_code_says(reference, name):
    assert (reference.DOCS / name).read_text(encoding="utf-8") == reference.page(name), "run `make reference`"


def test_every_package_with_public_names_is_in_the_page(reference):
    root = Path(dualpipe.__file__).parent
    folders = [(root, "dualpipe"), *((Path(import_module(f"dualpipe.{name}").__path__[0]), f"dualpipe.{name}")
                                     for name in ("kernels", "models"))]
    with_names = {
        ".".join((package, *path.relative_to(folder).parent.parts))
        for folder, package in folders for path in folder.rglob("__init__.py") if "__all__" in path.read_text()
    }
    with_names.remove("dualpipe.pipeline.deferral_report")  # its parts; `dualpipe` has the report
    assert with_names == {name for name, public in reference.MODULES.items() if public is None}


def test_public_names_have_docstrings(reference):
    """A name is a class or function with a docstring, or a value whose assignment is shown."""
    for module in map(import_module, reference.MODULES):
        for name in reference.public_names(module):
            value = getattr(module, name)
            if callable(value) and getattr(value, "__module__", "").startswith("dualpipe"):
                assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"{module.__name__}.{name}"


def test_a_field_shows_its_values_default_and_limit(reference):
    page = reference.config_page()
    assert "| `steps` | integer | `100` | optimizer steps; must be at least 1 |" in page.splitlines()
    assert {f"## {name}" for name in vars(Config())} <= set(page.splitlines())
    assert all(f"| `{name}` |" in page for name in vars(TrainConfig()))


def test_docstrings_become_markdown(reference):
    import docstrings

    text = "First a * b.\n\nArgs:\n    x_T, y: of\n        both `a*b`.\n    z: c.\n\nRaises:\n    ValueError: never."
    assert docstrings.to_markdown(text) == [
        "First a \\* b.", "", "**Args**", "", "- `x_T`, `y`: of both `a*b`.", "- `z`: c.", "", "**Raises**", "",
        "- `ValueError`: never.", ""]
    assert docstrings.to_markdown("One.\n\na: first\n    goes on.\nb: second.\nReturns c.") == [
        "One.", "", "- `a`: first goes on.", "- `b`: second.", "- Returns c.", ""]
    assert docstrings.to_markdown("Of this:\n\n    y = x\n\nOr\nnot.") == [
        "Of this:", "", "```py", "y = x", "```", "", "Or not.", ""]


def test_long_signatures_take_a_line_for_each_parameter(reference):
    node, = ast.parse(f"def f(a: tuple[int, str], b={'x' * 90}) -> None: ...").body
    assert reference.signature(node) == f"f(\n    a: tuple[int, str],\n    b={'x' * 90},\n) -> None"


def test_the_script_tells_a_stale_page(tmp_path, reference, monkeypatch, capsys):
    (tmp_path / "cli.md").write_text("old")
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(reference, "PAGES", {"cli.md": reference.cli_page})
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 1 and (tmp_path / "cli.md").read_text() == "old"
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert reference.main() == 0 and (tmp_path / "cli.md").read_text() == reference.page("cli.md")
    assert reference.main() == 0 and capsys.readouterr().out.count("docs/cli.md") == 2
