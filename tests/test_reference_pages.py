"""docs/config.md, docs/cli.md and the pictures of schedules are what the code says."""

import sys
from pathlib import Path

import pytest

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


def test_files_are_what_the_code_says(reference):
    for name, text in reference.generated_files():
        assert (reference.DOCS / name).read_text(encoding="utf-8") == text, f"docs/{name}: run `make reference`"


def test_a_field_shows_its_values_default_and_limit(reference):
    page = reference.config_page()
    assert "| `steps` | integer | `100` | optimizer steps; must be at least 1 |" in page.splitlines()
    assert {f"## {name}" for name in vars(Config())} <= set(page.splitlines())
    assert all(f"| `{name}` |" in page for name in vars(TrainConfig()))


def test_the_script_tells_a_stale_file(tmp_path, reference, monkeypatch, capsys):
    (tmp_path / "cli.md").write_text("old")
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(reference, "generated_files", lambda: [("cli.md", "new")])
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 1 and (tmp_path / "cli.md").read_text() == "old"
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert reference.main() == 0 and (tmp_path / "cli.md").read_text() == "new"
    assert reference.main() == 0 and capsys.readouterr().out.count("docs/cli.md") == 2
