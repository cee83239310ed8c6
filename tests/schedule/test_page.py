"""The page of timelines: its content, and its display in a browser."""

import json
import random
import re
from html.parser import HTMLParser
from math import floor

import pytest

from browser import Browser
from dualpipe.schedule import Action, Costs, Schedule, Span, build, simulate, to_html
from dualpipe.schedule.draw import LOOKS
from schedules import SCHEDULES

COSTS = Costs(FB=2.6, p2p=0.1)
EVIL = "</script><script>window.evil = 1</script><!-- & \u2028 \ud800"


class Parts(HTMLParser):
    """Collects the text of each script, the other tags, and the values of all attributes."""

    def __init__(self, page):
        super().__init__()
        self.scripts, self.tags, self.values, self._inside = [], [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.values += [f"{name}={value}" for name, value in attributes]
        self._inside = tag == "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts.append(data)
            self._inside = False


def data_of(page):
    return json.loads(Parts(page).scripts[0])


def actions_of(timeline):
    """Return (rank, start, end, kind, stage, micro-batch, source) for each action of a timeline in the page's data."""
    rows = enumerate(timeline["ranks"])
    return [(rank, start, end, *action) for rank, row in rows for start, end, *step in row for action in step]


def test_the_page_needs_no_other_file():
    page = to_html([simulate(build("dualpipev", 4, 10))], title="one")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bimport\(|fetch|XMLHttp|WebSocket", page)
    parts = Parts(page)
    assert not {"link", "img", "iframe", "base", "object"} & set(parts.tags)
    assert not [value for value in parts.values if value.startswith(("src=", "href="))]
    assert "content=default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in parts.values


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_data_says_when_each_action_runs_and_where_its_input_comes_from(name):
    timeline = simulate(build(name, 3, 7), Costs(FB=2.6, p2p=0.1, R=2))
    (data,) = data_of(to_html([timeline], title=""))["timelines"]
    actions = actions_of(data)
    assert [(rank, start, end, Action(*action)) for rank, start, end, *action, _ in actions] == [
        (span.rank, pytest.approx(span.start), pytest.approx(span.end), action)
        for row in timeline.spans for span in row for action in span.step
    ]
    last = timeline.schedule.num_stages - 1
    for rank, start, _, kind, stage, microbatch, source in actions:
        if source < 0:
            assert (kind, stage) == ("F", 0)
            continue
        sender, _, done, *what, _ = actions[source]
        assert what[1:] == [stage + {"F": -1, "B": stage < last, "I": stage < last, "W": 0}[kind], microbatch]
        assert what[0] in ("F" if kind == "F" or (kind in "BI" and stage == last) else "I" if kind == "W" else "BI")
        assert start >= done + (0.1 if sender != rank else 0) - 1e-6
    assert data["makespan"] == pytest.approx(timeline.makespan)
    assert sum(map(len, data["reductions"])) == timeline.schedule.num_stages


def test_measured_steps_are_drawn_like_simulated_ones():
    timeline = simulate(build("dualpipev", 4, 10), Costs(FB=2.6))
    spans = [span._replace(start=span.start + 1e6, end=span.end + 1e6) for row in timeline.spans for span in row]
    random.Random(0).shuffle(spans)
    page = data_of(to_html([spans, timeline], title="both", unit="ms"))
    measured, simulated = page["timelines"]
    assert (measured.pop("name"), simulated.pop("name"), page["unit"]) == ("measured", "dualpipev", "ms")
    seen, expected = map(actions_of, (measured, simulated))
    assert [action[:1] + action[3:] for action in seen] == [action[:1] + action[3:] for action in expected]
    assert [action[1:3] for action in seen] == [pytest.approx(action[1:3]) for action in expected]
    assert measured.pop("makespan") == pytest.approx(simulated.pop("makespan"))
    del measured["ranks"], simulated["ranks"]
    assert measured == simulated


def test_an_input_that_was_not_measured_has_no_source():
    rank_1 = simulate(build("1f1b", 2, 2)).spans[1]
    (data,) = data_of(to_html([list(rank_1)], title=""))["timelines"]
    assert [source for *_, source in actions_of(data)] == [-1, 0, -1, 2], "forwards have theirs on rank 0"


def test_names_from_outside_stay_text():
    page = to_html([simulate(build("1f1b", 2, 2))] * 2, title=EVIL, names=[EVIL, "plain"], unit=EVIL, notes=EVIL)
    assert Parts(page).tags == Parts(to_html([simulate(build("1f1b", 2, 2))], title="")).tags
    data = data_of(page)
    assert [data[name] for name in ("title", "unit", "notes")] == [EVIL] * 3
    assert [timeline["name"] for timeline in data["timelines"]] == [EVIL, "plain"]


@pytest.mark.parametrize("timelines, names, message", [
    ([], (), "0 timelines and 0 names; give one or more"),
    ([simulate(build("1f1b", 1, 1))], ("a", "b"), "1 timelines and 2 names"),
    ([[]], ("mine",), "timeline 'mine' has no steps"),
    ([[Span(0, 0.0, float("inf"), (Action("F", 0, 0),))]], (), "Out of range"),
])
def test_what_cannot_be_drawn(timelines, names, message):
    with pytest.raises(ValueError, match=message):
        to_html(timelines, title="", names=names)


# -- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open timelines in the browser; afterwards check that it asked for no other file and that no script failed."""
    file = tmp_path / "page.html"

    def show(*timelines, title="A page", **options):
        file.write_text(to_html(timelines, title=title, **options), encoding="utf-8")
        browser.open(file)
        return browser

    yield show
    assert browser.requests == [file.as_uri()] and browser.errors == []


def two():
    return [simulate(build(name, 4, 10), COSTS) for name in ("dualpipev", "zbv")]


def view_of(browser):
    return [float(time) for time in re.match(r"Time ([\d.]+) to ([\d.]+?)\.?(?: |$)", browser.text("#view")).groups()]


def axes(browser):
    """Return at(chart, rank, time): a point of the window, `part` of the rank's height down, in the current view."""
    start, end = view_of(browser)
    places = browser("""[...document.querySelectorAll("canvas")].map((canvas) => {
        const { left, top, width } = canvas.getBoundingClientRect();
        return [left, top, width];
    })""")

    def at(chart, rank, time, part=0.3):
        left, top, width = places[chart]
        return round(left + 62 + (time - start) / (end - start) * (width - 74), 2), top + 6 + 36 * rank + 30 * part

    return at


def colours(browser, points):
    """Return the colours of canvases at points of the window, as #rrggbb."""
    pixels = browser(json.dumps(points) + """.map(([x, y]) => {
        const canvas = document.elementFromPoint(x, y), { left, top } = canvas.getBoundingClientRect();
        return [...canvas.getContext("2d").getImageData(x - left, y - top, 1, 1).data];
    })""")
    return ["#{:02x}{:02x}{:02x}".format(*pixel) for pixel in pixels]


def spans_of(timeline):
    return [span for row in timeline.spans for span in row]


def find(timeline, action):
    return next(span for span in spans_of(timeline) if action in span.step)


def test_the_headings_compare(show):
    timelines = two()
    browser = show(*timelines, title="Two schedules", notes="a\n  b")
    assert browser("document.title") == browser.text("h1") == "Two schedules" and browser.text("#notes") == "a\n  b"
    first, second = browser("[...document.querySelectorAll('section')].map((section) => section.innerText)")
    assert first.startswith("dualpipev\n") and second.startswith("zbv\n")
    assert "4 ranks, 8 stages, 10 micro-batches; makespan 62.2, bubble 10.1%, at most 9 live activations" in first
    assert "makespan 64.3, bubble 6.7%, at most 8 live activations" in second
    assert "against dualpipev: makespan +2.1 (+3.4%), bubble \u22123.4 points" in second and "against" not in first
    for timeline, text in zip(timelines, (first, second)):
        assert f"bubble {100 * timeline.bubble_fraction:.1f}%" in text
        assert f"at most {max(timeline.peak_activations)} live" in text
        bars = [f"{rank}: {100 * idle / timeline.makespan:.1f}%" for rank, idle in enumerate(timeline.bubble)]
        assert [line for line in text.splitlines() if re.match(r"\d+: ", line)] == bars
    legend = browser.text("#legend")
    assert all(f"{kind} {meaning}" in legend for kind, (meaning, *_) in LOOKS.items())
    assert "reduced" not in legend


def test_each_step_has_its_place_and_colour(show):
    timelines = two()
    browser = show(*timelines)
    at, points, expected = axes(browser), [], []
    for chart, timeline in enumerate(timelines):
        for span in spans_of(timeline):
            for part, action in enumerate(span.step):
                down = (part + 0.25) / len(span.step)
                points.append(at(chart, span.rank, span.start + 0.15, down))
                expected.append(LOOKS[action.kind][2 if action.stage > 3 else 1])
    assert colours(browser, points) == expected


def test_hovering_tells_times_messages_and_memory(show):
    timelines = two()
    browser = show(*timelines)
    at = axes(browser)
    assert browser.text("#tip") == ""
    pair = find(timelines[0], Action("F", 7, 4))
    browser.pointer("Moved", *at(0, 0, pair.start + 1, 0.25))
    assert browser.text("#tip").split("\n\n") == [
        "forward (F) of micro-batch 4, stage 7, rank 0",
        "overlapped with B0 of stage 0",
        "22.4 to 25, 2.6 long, after 2.2 of idle time",
        "waits for the activation of rank 1: F4 of stage 6, done at 22.3, here at 22.4",
        "hands on to B4 of stage 7, which starts at 25",
        "live activations: 9; pending weight gradients: 0",
    ]
    browser.pointer("Moved", *at(0, 0, pair.start + 1, 0.75))
    assert browser.text("#tip").startswith("backward (B) of micro-batch 0, stage 0, rank 0")
    deferred = find(timelines[1], Action("I", 5, 3))
    browser.pointer("Moved", *at(1, 2, deferred.start + 0.5))
    text = browser.text("#tip")
    assert text.startswith("backward for the input (I) of micro-batch 3, stage 5, rank 2")
    assert "waits for the gradient of rank 1: I3 of stage 6, done at " in text
    assert "hands on to W3 of stage 5, which starts at " in text
    assert "sends the gradient to rank 3 for I3 of stage 4, which starts at " in text
    assert text.endswith("pending weight gradients: 1")
    browser.pointer("Moved", *at(1, 3, 1))  # idle
    assert browser.text("#tip") == ""


def test_a_click_lights_up_the_way_of_a_micro_batch(show):
    timelines = two()
    browser = show(*timelines)
    spans = [(chart, span) for chart, timeline in enumerate(timelines) for span in spans_of(timeline)
             if len(span.step) == 1 and span.start > 0]
    at = axes(browser)
    points = [at(chart, span.rank, span.start + 0.15, 0.15) for chart, span in spans]  # clear of the lines
    plain = colours(browser, points)
    mine, other = at(0, 0, 4.5), at(0, 0, 5.5)  # F4 and F5
    browser.click(*mine)
    assert browser.text("#lit") == "Micro-batch 4 in dualpipev: 16 actions, 4 to 46.4; zbv: 24 actions, 4 to 45."
    alike = [now == before for now, before in zip(colours(browser, points), plain)]
    assert alike == [span.step[0].microbatch == 4 for _, span in spans]
    browser.click(*mine)
    assert browser.text("#lit") == "" and colours(browser, points) == plain
    browser.click(*other)
    assert browser.text("#lit").startswith("Micro-batch 5 in")
    browser.press("Escape")
    assert browser.text("#lit") == "" and colours(browser, points) == plain


def test_the_wheel_zooms_around_the_pointer_and_dragging_pans(show):
    browser = show(*two())
    assert browser.text("#view") == "Time 0 to 64.3."
    x, y = axes(browser)(1, 1, 20.0)
    browser.pointer("Moved", x := floor(x), y)  # wheels have whole pixels
    time = (x - 20 - 62) / (1160 - 74) * 64.3
    for delta, factor in ((-400, 2.71828), (-400, 7.38906), (400, 2.71828)):
        browser.pointer("Wheel", x, y, deltaX=0, deltaY=delta)
        start, end = view_of(browser)
        assert end - start == pytest.approx(64.3 / factor, rel=1e-3)
        assert axes(browser)(1, 1, time)[0] == pytest.approx(x, abs=0.1), "what is under the pointer stays there"
    assert f"of 64.3, {64.3 / (end - start):.3f}" in browser.text("#view")
    wide = end - start
    browser.pointer("Pressed", x, y, button="left", buttons=1, clickCount=1)
    browser.pointer("Moved", x + 110, y, button="left", buttons=1)
    browser.pointer("Released", x + 110, y, button="left", clickCount=1)
    moved, _ = view_of(browser)
    assert moved == pytest.approx(start - 110 * wide / (1160 - 74), abs=1e-3)
    assert axes(browser)(0, 1, time)[0] == pytest.approx(x + 110, abs=0.1), "both charts have one axis"
    assert browser.text("#lit") == "", "a drag is no click"
    browser.pointer("Wheel", x, y, deltaX=0, deltaY=4000)
    assert browser.text("#view") == "Time 0 to 64.3.", "no further out than all"
    browser.pointer("Wheel", x, y, deltaX=0, deltaY=-40000)
    start, end = view_of(browser)
    assert end - start == pytest.approx(0.0643, rel=1e-2), "no further in than a thousandth"


def test_keys_go_from_action_to_action_and_zoom(show):
    timelines = two()
    browser = show(*timelines)
    browser.press("Tab")
    heads = []
    for key in (None, "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowLeft"):
        if key:
            browser.press(key)
        heads.append(browser.text("#tip").split("\n")[0])
    assert [re.findall(r"\d+", head) for head in heads] == [  # micro-batch, stage, rank
        ["0", "0", "0"], ["1", "0", "0"], ["0", "1", "1"], ["0", "2", "2"], ["1", "1", "1"], ["0", "1", "1"],
        ["0", "1", "1"],  # there is none before it
    ]
    assert browser("document.activeElement.getAttribute('aria-label')") == "dualpipev"
    browser.press("Enter")
    assert browser.text("#lit").startswith("Micro-batch 0 in")
    browser.press("Tab")
    assert browser("document.activeElement.getAttribute('aria-label')") == "zbv"
    assert browser.text("#tip").startswith("forward (F) of micro-batch 0, stage 0, rank 0")
    browser.press("+", "+")
    assert browser.text("#view").endswith("2.25 times as large.")
    browser.press("-")
    assert browser.text("#view").endswith("1.5 times as large.")
    browser.press("+", "+", "+", *["ArrowRight"] * 30)
    start, end = view_of(browser)
    shown = timelines[1].spans[0][30]
    assert start <= shown.start and shown.end <= end, "the view goes with the action"
    browser.press("0", "Escape")
    assert browser.text("#view") == "Time 0 to 64.3." and browser.text("#lit") == ""
    described = browser("document.getElementById(document.activeElement.getAttribute('aria-describedby')).innerText")
    assert "Escape clears" in described
    assert browser("document.getElementById('tip').getAttribute('role')") == "status"  # read out as it changes


def test_names_are_not_run(show):
    browser = show(*two(), title=EVIL, names=[EVIL, "plain"], unit="<b>", notes=EVIL)
    assert browser("typeof window.evil") == "undefined" and browser("document.querySelectorAll('b').length") == 0
    assert browser.text("h2").startswith("</script><script>window.evil = 1</script><!-- &")


def test_odd_timelines_are_drawn(show):
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    schedule = Schedule("with a rank that does nothing", 2, 1, 1, (((f,), (b,)), ()))
    timelines = [simulate(schedule, costs) for costs in (Costs(), Costs(F=0, B=0, W=0), Costs(F=1e-9, B=1e6, R=5))]
    timelines.append(simulate(Schedule("nothing", 1, 1, 1, ((),))))
    browser = show(*timelines, simulate(build("dualpipev", 1, 1)))
    texts = browser("[...document.querySelectorAll('section')].map((section) => section.innerText)")
    assert [re.search("makespan ([^,]*), bubble ([^,]*)", text).groups() for text in texts] == [
        ("3", "50.0%"), ("0", "0.0%"), ("1000010", "50.0%"), ("0", "0.0%"), ("6", "0.0%"),
    ]
    assert "gradients reduced" in browser.text("#legend")
    browser.press("Tab", *["ArrowRight", "ArrowDown", "Enter", "Tab"] * 5)
