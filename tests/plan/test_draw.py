"""The picture of a plan: a bar for each run, as long as its step."""

import re
from xml.etree import ElementTree

import pytest

from dualpipe.plan.draw import COLOURS, LEFT, WIDTH, to_svg
from dualpipe.plan.predict import PARTS
from plans import prediction

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs():
    return [prediction("--parallel.ep", "2"), prediction("--parallel.pp", "1", "--parallel.schedule", "1f1b")]


def test_every_part_has_a_colour():
    assert tuple(COLOURS) == PARTS and len({*COLOURS.values()}) == len(PARTS)


def test_bars_are_as_long_as_steps_and_their_parts(runs):
    root = ElementTree.fromstring(to_svg(runs))
    groups = root.findall(f"{SVG}g")
    assert len(groups) == len(runs) * len(PARTS)
    longest = max(run.step_seconds for run in runs)
    for number, run in enumerate(runs):
        parts = groups[number * len(PARTS) : (number + 1) * len(PARTS)]
        boxes = [part.find(f"{SVG}rect") for part in parts]
        assert [part.find(f"{SVG}title").text.partition(":")[0] for part in parts] == list(PARTS)
        assert [box.get("fill") for box in boxes] == list(COLOURS.values())
        widths = [float(box.get("width")) for box in boxes]
        assert widths == pytest.approx([run.parts[name] * WIDTH / longest for name in PARTS], abs=0.01)
        assert float(boxes[0].get("x")) == LEFT
        assert sum(widths) == pytest.approx(run.step_seconds * WIDTH / longest, abs=0.1)


def test_numbers_are_written_beside_the_bars(runs):
    words = " ".join(text.text for text in ElementTree.fromstring(to_svg(runs)).iter(f"{SVG}text"))
    assert f"{runs[0].tokens:,} tokens" in words and f"A step on {runs[0].config.parallel.world_size} GPUs" in words
    for run in runs:
        assert re.search(rf"{run.step_seconds:.3g} s, {run.tokens_per_second:,.0f} tokens/s/GPU", words)
