"""The shapes of pictures: numbers, ticks, and text from outside."""

from xml.etree import ElementTree

import pytest

from dualpipe.schedule.svg import legend, number, picture, rect, text, tick_step, titled

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("value", "written"), [(3, "3"), (3.0, "3"), (0.5, "0.5"), (1.239, "1.24"), (100, "100"),
                                                (0.001, "0")])
def test_numbers_have_at_most_two_decimals(value, written):
    assert number(value) == written


@pytest.mark.parametrize(("least", "step"), [(1, 1), (1.1, 2), (2.0, 2), (3, 5), (7, 10), (0.3, 0.5), (0.02, 0.02),
                                             (140, 200)])
def test_ticks_are_round_and_not_closer_than_asked(least, step):
    assert tick_step(least) == pytest.approx(step)


def test_a_picture_is_a_frame_around_its_shapes():
    root = ElementTree.fromstring(picture(30.2, 20, [rect(1, 2, 3, 4, "#abc", "k"), text(5, 6, "<&>", "m")], ".k{}"))
    assert (root.get("width"), root.get("height"), root.get("viewBox")) == ("30", "20", "0 0 30 20")
    background, shape = root.findall(f"{SVG}rect")
    assert background.get("fill") == "#fff"
    assert shape.attrib == {"x": "1", "y": "2", "width": "3", "height": "4", "fill": "#abc", "class": "k"}
    assert root.find(f"{SVG}text").text == "<&>"
    assert root.find(f"{SVG}style").text.endswith(".k{}")


def test_a_title_stands_over_its_shapes():
    group = ElementTree.fromstring(titled("a < b", [rect(0, 0, 1, 1), rect(1, 0, 1, 1)]))
    assert group.find("title").text == "a < b" and len(group.findall("rect")) == 2


def test_a_legend_has_a_box_for_each_name_one_behind_the_other():
    root = ElementTree.fromstring(picture(300, 20, legend(10, 0, [("one", "#111"), ("two", "#222")])))
    boxes = root.findall(f"{SVG}rect")[1:]
    assert [box.get("fill") for box in boxes] == ["#111", "#222"]
    assert [word.text for word in root.findall(f"{SVG}text")] == ["one", "two"]
    assert float(boxes[0].get("x")) == 10 and float(boxes[1].get("x")) > 10 + 12
