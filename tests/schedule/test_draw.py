"""Text, tables and pictures of timelines."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from dualpipe.schedule import Action, Costs, Schedule, build, simulate, to_svg, to_text
from dualpipe.schedule.draw import number, table, tick_step
from schedules import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"


def test_text_at_two_characters_a_unit():
    timeline = simulate(build("1f1b", 2, 2))
    assert to_text(timeline, width=7 + 2 * 9) == (
        "rank 0 F0F1....B0  ..B1\n"
        "rank 1 ..F0B0  F1B1\n"
        "F forward, B backward, I backward for the input only, W weight gradients, . idle\n"
    )


def test_text_marks_the_way_back_and_pairs():
    lines = to_text(simulate(build("dualpipev", 2, 4)), width=7 + 2 * 26).splitlines()
    assert lines[0] == "rank 0 F0F1F2f0i0w0f1F3b1  ..f2B0  b2  ..f3B1  b3  I2W2I3W3"
    assert lines[1].startswith("rank 1 ..F0f0F1f1F2b0  f2B0  F3b1")
    assert lines[-1].endswith("lower case: the later stages of a rank")


@pytest.mark.parametrize("width, parts", [(1, 1), (20, 1), (77, 2), (400, 1)])
def test_text_keeps_to_its_width(width, parts):
    timeline = simulate(build("dualpipev", 4, 10), Costs(FB=2.6, p2p=0.3))
    text = to_text(timeline, width=width)
    ranks = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(ranks) == 4 * parts
    assert all(len(line) <= max(width, 8) for line in ranks)
    assert ("to name all micro-batches takes" in text) == (width < 77)


@pytest.mark.parametrize("name, costs", [
    ("dualpipev", Costs(FB=2.6)), ("zbv", Costs(F=1.3, p2p=0.21)), ("1f1b", Costs(F=1, B=17)),
], ids=["pairs", "messages", "steps longer than a part"])
def test_text_of_80_columns_names_every_step_once(name, costs):
    timeline = simulate(build(name, 3, 9), costs)
    lines = to_text(timeline, width=80).splitlines()
    assert lines[0].startswith("time 0 to ") and max(map(len, lines[:-2])) <= 80
    for rank, spans in enumerate(timeline.spans):
        text = " ".join(line[7:] for line in lines if line.startswith(f"rank {rank}"))
        named = [(kind.upper(), int(number)) for kind, number in re.findall(r"([FBIWfbiw])(\d+)", text)]
        assert named == [(action.kind, action.microbatch) for span in spans for action in span.step]


def test_table():
    costs = Costs(F=2, B=4, W=2)
    timelines = [simulate(build("dualpipev", 4, 10)), simulate(build("1f1b", 4, 10), costs)]
    assert table(timelines, [1, 2]) == (
        "schedule   stages  makespan  relative  bubble  peak activations  peak memory\n"
        "dualpipev       8        66     1.000    9.1%                 9            9\n"
        "1f1b            4        78     1.182   23.1%                 8            8\n"
    )


def groups(svg: str) -> dict[str, list[ElementTree.Element]]:
    root = ElementTree.fromstring(svg)
    return {group.find(f"{SVG}title").text: list(group) for group in root.iter(f"{SVG}g")}


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_cell_for_every_step(name):
    schedule = build(name, 3, 7)
    steps = groups(to_svg(simulate(schedule, Costs(FB=2.6))))
    assert len(steps) == sum(map(len, schedule.ranks))
    rows = Counter(title.splitlines()[1].split(",")[0] for title in steps)
    assert rows == {f"rank {rank}": len(steps) for rank, steps in enumerate(schedule.ranks)}


def test_svg_pair_shares_a_cell_in_two_colours():
    steps = groups(to_svg(simulate(build("dualpipev", 4, 10))))
    title = (
        "forward of micro-batch 7, stage 0 overlapped with backward of micro-batch 3, stage 7\n"
        "rank 0, 17 to 20"
    )
    _, upper, seven, lower, three, frame = steps[title]
    assert (seven.text, three.text, frame.get("class")) == ("7", "3", "o")
    assert upper.get("fill") != lower.get("fill")
    assert upper.get("x") == lower.get("x")
    assert upper.get("width") == lower.get("width")
    assert float(upper.get("y")) + float(upper.get("height")) == float(lower.get("y"))


def test_svg_colours_tell_kind_and_half():
    steps = groups(to_svg(simulate(build("dualpipev", 4, 10))))
    fills = {}
    for title, parts in steps.items():
        if "overlapped" not in title:
            kind, stage = title.split(" of ")[0], int(title.split("stage ")[1].split("\n")[0])
            fills.setdefault((kind, stage >= 4), set()).add(parts[1].get("fill"))
    assert len(fills) == 8
    assert len(set.union(*fills.values())) == 8


def test_svg_escapes_names_and_survives_odd_timelines():
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    schedule = Schedule('<"&', 2, 1, 1, (((f,), (b,)), ()))
    for costs in (Costs(), Costs(F=0, B=0, W=0), Costs(F=1e-9, B=1e6), Costs(F=1e-9, B=1e-9, W=0)):
        root = ElementTree.fromstring(to_svg(simulate(schedule, costs)))
        assert any(text.text == '<"&' for text in root.iter(f"{SVG}text"))
        assert float(root.get("width")) < 7000
        to_text(simulate(schedule, costs))


def test_pictures_show_reductions_where_there_are_any():
    actions = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]
    schedule = Schedule("mine", 1, 2, 1, (tuple((action,) for action in actions),))
    timeline, plain = simulate(schedule, Costs(R=3)), simulate(schedule)
    text = to_text(timeline, width=47)
    assert text.splitlines()[1] == " " * 23 + "R1==========R0==========", text
    assert "reduced" in text
    picture = to_svg(timeline)
    assert picture.count("gradients of stage") == 2 and "gradients reduced" in picture
    assert "reduced" not in to_text(plain) + to_svg(plain)


@pytest.mark.parametrize(("value", "written"), [(3, "3"), (3.0, "3"), (0.5, "0.5"), (1.239, "1.24"), (100, "100"),
                                                (0.001, "0")])
def test_numbers_have_at_most_two_decimals(value, written):
    assert number(value) == written


@pytest.mark.parametrize(("least", "step"), [(1, 1), (1.1, 2), (2.0, 2), (3, 5), (7, 10), (0.3, 0.5), (0.02, 0.02),
                                             (140, 200)])
def test_ticks_are_round_and_not_closer_than_asked(least, step):
    assert tick_step(least) == pytest.approx(step)
