"""The pictures in docs/pictures are what docs/generate/draw_pictures.py draws, with a dark mode, and are shown."""

import ast
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dualpipe.cli import main

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def drawing():
    sys.path.append(str(ROOT / "docs/generate"))
    try:
        import draw_pictures
        yield draw_pictures
    finally:
        sys.path.remove(str(ROOT / "docs/generate"))


def test_pictures_are_current(drawing):
    for name, picture in drawing.pictures():
        assert (FOLDER / name).read_text(encoding="utf-8") == picture, f"{name}: run `make reference`"


def test_every_picture_is_drawn_and_shown(drawing):
    drawn = {name for name, _ in drawing.pictures()} | {"schedule-page.png"}  # a browser's picture of schedules.html
    shown = {Path(link).name for document in DOCUMENTS for link in re.findall(
        r"\]\(([^)]*pictures/[^)]+)\)", document.read_text(encoding="utf-8"))}
    assert drawn == {path.name for path in FOLDER.iterdir()} == shown


def test_drawings_have_a_dark_mode_and_are_xml(drawing):
    for path in FOLDER.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert drawing.DARK in text and drawing.with_dark_mode(text) == text
        assert re.search(r'<rect (x="0" y="0" )?width="[^"]+" height="[^"]+" fill="#fff"/>', text), "its background"
        ElementTree.fromstring(text)


def test_the_picture_of_dualpipev_is_that_of_its_command(drawing, tmp_path, capsys):
    text = (ROOT / "docs/schedules.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"dualpipe (schedule .*) --svg dualpipev\.svg", text)
    assert main([*command.split(), "--svg", str(tmp_path / "drawn.svg")]) == 0
    drawn = drawing.with_dark_mode((tmp_path / "drawn.svg").read_text())
    assert drawn == (FOLDER / "dualpipev.svg").read_text(encoding="utf-8")


def test_the_rooms_are_drawn_in_their_order(drawing):
    tree = ast.parse((ROOT / "tests/test_layers.py").read_text(encoding="utf-8"))
    (order,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "ORDER"]
    levels = [names - {"_moved", "_cli_arguments", "utils", "__main__"} for names in ast.literal_eval(order)]
    drawn = [{title for title, _, _ in row} for row in drawing.LAYERS]
    assert drawn == [names for names in reversed(levels) if names]


def test_files_in_the_picture_of_a_step_exist(drawing):
    named = re.findall(r"([\w/]+/(?:\w+\.py|(?=[,:])))", " ".join(note for _, note, _ in drawing.FLOW))
    assert named and [path for path in named if not (ROOT / "dualpipe" / path).exists()] == []


def test_the_script_tells_a_stale_picture(drawing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drawing, "FOLDER", tmp_path)
    monkeypatch.setattr(drawing, "STORED", ())
    monkeypatch.setattr(drawing, "PICTURES", {"layers.svg": drawing.layers})
    monkeypatch.setattr(sys, "argv", ["draw_pictures.py", "--check"])
    assert drawing.main() == 1 and not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["draw_pictures.py"])
    assert drawing.main() == 0 and (tmp_path / "layers.svg").read_text() == drawing.layers()
    assert drawing.main() == 0 and capsys.readouterr().out.count("layers.svg") == 2
