"""`dualpipe schedule`, and that it needs no torch."""

import argparse
import json
import re
import subprocess
import sys
import textwrap

import pytest

from dualpipe.schedule import Schedule, build
from dualpipe.schedule.command import add_parser
from dualpipe.schedule.search import driver


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["schedule", *arguments])
    return args.run(args)


SMALL = ("--ranks", "4", "--microbatches", "10")


def test_table_and_timeline(capsys):
    assert call(*SMALL, "--compare", "zbv, 1f1b,interleaved_1f1b", "--width", "80") == 0
    out = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in out[1:5]]
    assert rows == [
        ["dualpipev", "8", "66", "1.000", "9.1%", "9", "9"],
        ["zbv", "8", "63", "0.955", "4.8%", "8", "8"],
        ["1f1b", "4", "78", "1.182", "23.1%", "8", "8"],
        ["interleaved_1f1b", "8", "69", "1.045", "13.0%", "12", "12"],
    ]
    assert "4 stages" in out[5] and "2 times" in out[5], "how 1f1b is compared"
    assert [line[:6] for line in out[7:12]] == ["time 0", "rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_smaller_stage_is_scaled_down(capsys):
    assert call(*SMALL, "--name", "1f1b", "--costs", "F=2,B=4,W=2", "--compare", "dualpipev") == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:3]] == ["78", "66"]


def test_files(tmp_path, capsys):
    svg, csv = tmp_path / "a.svg", tmp_path / "a.csv"
    assert call(*SMALL, "--costs", "F=1,B=2,W=1,FB=2.6", "--svg", str(svg), "--csv", str(csv)) == 0
    assert f"wrote {svg}\nwrote {csv}\n" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg")
    assert Schedule.from_torch_csv(csv.read_text(), "dualpipev") == build("dualpipev", 4, 10)


def test_one_page_has_all_schedules(tmp_path, capsys):
    html = tmp_path / "a.html"
    assert call(*SMALL, "--compare", "1f1b,zbv", "--html", str(html)) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"wrote {html}\n")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html.read_text(encoding="utf-8"))
    page = json.loads(data)
    assert page["title"] == "Schedules of 4 ranks and 10 micro-batches"
    assert [timeline["name"] for timeline in page["timelines"]] == ["dualpipev", "1f1b", "zbv"]
    assert [timeline["makespan"] for timeline in page["timelines"]] == [66, 78, 63]
    assert page["notes"] == "\n".join(out.splitlines()[:5]) + "\n", "the table, and how 1f1b is compared"


def test_options_of_a_schedule(capsys):
    assert call(*SMALL, "--name", "interleaved_1f1b", "--stages-per-rank", "4") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "16"


@pytest.mark.parametrize("arguments, message", [
    (("--compare", "chimera"), "chimera"), (("--costs", "F=x"), "'x'"), (("--costs", "F"), "cost F"),
    (("--costs", "Q=1"), "'Q'"), (("--costs", "nowhere.json"), "nowhere.json"), (("--seed", "2"), "'seed'"),
    (("--name", "auto", "--memory", "1.5"), "memory is 1.5"), (("--svg", "/nowhere/a.svg"), "/nowhere/a.svg"),
    (("--html", "/nowhere/a.html"), "/nowhere/a.html"),
])
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys):
    assert call(*SMALL, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dualpipe schedule: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("content", ["[1]", "{", '{"per_stage": 3}', '{"per_stage": {"a": {}}}', '{"F": [1]}'])
def test_wrong_json_is_status_2(tmp_path, capsys, content):
    file = tmp_path / "costs.json"
    file.write_text(content)
    assert call(*SMALL, "--costs", str(file)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and (content != "{" or f"{file} is not valid JSON: " in err)


def test_costs_per_stage_cannot_be_compared_across_numbers_of_stages(tmp_path, capsys):
    file = tmp_path / "costs.json"
    file.write_text('{"per_stage": {"7": {"F": 2}}}')
    assert call(*SMALL, "--costs", str(file), "--compare", "zbv") == 0
    assert call(*SMALL, "--costs", str(file), "--compare", "1f1b") == 2
    assert "compare with a schedule of as many stages" in capsys.readouterr().err


def test_needs_no_torch():
    program = """
        import argparse
        import sys
        from dualpipe.schedule.command import add_parser
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        args = parser.parse_args("schedule --ranks 2 --microbatches 4 --compare 1f1b".split())
        assert args.run(args) == 0
        loaded = {"torch", "numpy", "matplotlib"} & set(sys.modules)
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_auto_says_its_bound_its_gain_and_what_half_the_memory_costs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver.search, "__kwdefaults__", {**driver.search.__kwdefaults__, "effort": 0})
    arguments = ("--name", "auto", "--ranks", "8", "--microbatches", "8", "--memory", "17", "--seed", "3")
    assert call(*arguments, "--compare", "dualpipev,auto") == 0
    out, err = capsys.readouterr()
    rows = [line.split()[:4] for line in out.splitlines()[1:4]]
    assert rows == [["auto", "16", "55", "1.000"], ["dualpipev", "16", "62", "1.127"], ["auto", "16", "55", "1.000"]]
    for number in ("11.3%", "at most 16 of 17", "55, 54, 53, 52, 52, 53, 54, 55", "ratio 0.50", "memory 9: "):
        assert number in out
    assert err == "", "nothing is searched for"


@pytest.fixture
def short_search(monkeypatch, tmp_path):
    """Makes searches short, and keeps what they find to the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver.search, "__kwdefaults__", {**driver.search.__kwdefaults__, "effort": 100_000})
    return "--name", "auto", "--ranks", "2", "--microbatches", "3", "--costs", "F=1,B=1.7,W=0.8,FB=2"


def test_progress_is_one_line_of_a_terminal(capsys, monkeypatch, short_search):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert call(*short_search) == 0
    err = capsys.readouterr().err
    for memory in (5, 3):
        said = rf"\r\x1b\[Ksearching for a schedule of 2 ranks, 3 micro-batches and memory {memory}: "
        assert re.search(said + r"0% done, best [\d.]+, \d+ s\r", err) and re.search(said + "100% done, best ", err)
    assert err.endswith("\r\033[K") and "\n" not in err


def test_progress_is_a_few_lines_elsewhere(capsys, monkeypatch, short_search):
    monkeypatch.setattr("dualpipe.schedule.search.progress.INTERVAL", 1e6)  # also where a round takes long
    assert call(*short_search) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"memory (\d): (\d+)% done, best [\d.]+, \d+ s$", line).groups() for line in lines] == [
        ("5", "0"), ("5", "100"), ("3", "0"), ("3", "100")]
    assert call(*short_search) == 0
    assert capsys.readouterr().err == "", "it is read from the disk"
