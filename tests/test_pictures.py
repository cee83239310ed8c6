"""The pictures in docs/pictures have a dark mode, are shown, and agree with the tree and with the commands."""

import re
import tomllib
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from dualpipe.cli import main

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
SVG = "{http://www.w3.org/2000/svg}"


def test_every_picture_is_shown():
    shown = {Path(link).name for document in DOCUMENTS for link in re.findall(
        r"\]\(([^)]*pictures/[^)]+)\)", document.read_text(encoding="utf-8"))}
    assert {path.name for path in FOLDER.iterdir()} == shown


def test_the_picture_of_dualpipev_is_that_of_its_command(tmp_path, capsys):
    text = (ROOT / "docs/schedules.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"dualpipe (schedule .*) --svg dualpipev\.svg", text)
    assert main([*command.split(), "--svg", str(tmp_path / "drawn.svg")]) == 0
    assert (tmp_path / "drawn.svg").read_text() == (FOLDER / "dualpipev.svg").read_text(encoding="utf-8")


def test_the_rooms_are_drawn_and_listed_in_their_order():
    """In the picture, and from the ground floor up in docs/architecture.md, as in the contract of pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(line.split(" | ")) - {"_cli_arguments", "utils", "__main__"} for line in contracts[0]["layers"]]
    layers = [names for names in layers if names]
    root = ElementTree.fromstring((FOLDER / "layers.svg").read_text(encoding="utf-8"))
    titles = [text for text in root.iter(f"{SVG}text") if text.get("class") == "j t"]
    rows = groupby(sorted(titles, key=lambda text: int(text.get("y"))), key=lambda text: text.get("y"))
    assert [{text.text for text in row} for _, row in rows] == layers
    document = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^    (?:dualpipe/)?(\w+)/  ", document, re.M)
    levels = [level for name in reversed(listed) for level, names in enumerate(layers) if name in names]
    assert levels == sorted(levels) and set(listed) == set.union(*layers) - {"cli"}


def test_files_in_the_picture_of_a_step_exist():
    root = ElementTree.fromstring((FOLDER / "step.svg").read_text(encoding="utf-8"))
    notes = " ".join(text.text for text in root.iter(f"{SVG}text") if text.get("class") == "j")
    named = re.findall(r"([\w/]+/(?:\w+\.py|(?=[,:])))", notes)
    assert named and [path for path in named if not (ROOT / "dualpipe" / path).exists()] == []
