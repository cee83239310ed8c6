"""`make gpu`: a session goes on after a part that fails, crashes or hangs, and after a session that was cut off."""

import json
import time

import pytest

from scripts import run_script

PLANTED = """
import os, subprocess, sys, time

def good(output):
    output.row(ms=1.0, left=output.left > 0, dry=output.dry)
    output.goal("fast", 1, 0)

def fails(output):
    output.row(ms=2.0)
    output.failure(case="a", error="first line\\nwrong result")
    raise RuntimeError("planted")

def crashes(output):
    output.row(ms=3.0)
    os.abort()

def hangs(output):
    output.row(ms=4.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    output.row(child=child.pid)
    time.sleep(600)

def leaves_a_process(output):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    output.row(ms=5.0)

def misses(output):
    output.goal("fast", 3, 0)
    output.goal("fast", 4, 2)
    output.skip(case="b")
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def modules(script):
    return script("gpu.session"), script("gpu.report")


def run_parts(modules, path, names, seconds=200.0, weights=None):
    """Run planted parts in a session of their own; return the report, as it is in the file."""
    session, report = modules
    weights = dict.fromkeys(names, 1.0) | (weights or {})
    parts = [session.Part(name, f"what is {name}?", f"planted:{name}", weights[name]) for name in names]
    kept = report.SessionReport(path)
    kept.describe_machine()
    session.Session(kept, seconds, ["--dry"]).run(parts)
    return kept, json.loads(path.read_text())["parts"]


def is_running(pid):
    """A process that has ended and that nobody has waited for counts as ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_goes_on_after_a_failure_a_crash_and_what_is_left_behind(modules, planted, tmp_path):
    path = tmp_path / "session.json"
    names = ["fails", "crashes", "leaves_a_process", "misses", "good"]
    kept, parts = run_parts(modules, path, names)
    assert list(parts) == names
    assert [len(part["rows"]) for part in parts.values()] == [1, 1, 1, 0, 1]
    assert parts["good"]["rows"] == [{"ms": 1.0, "left": True, "dry": True}] and parts["good"]["status"] == "ended"
    assert parts["fails"]["status"] == "its process ended with status 1" and len(parts["fails"]["failures"]) == 2
    assert parts["crashes"]["status"] == "its process ended with status -6"
    assert parts["leaves_a_process"]["status"] == "ended"
    text = "\n".join(modules[1].summary(kept, [*names, "later"]))
    assert "goal MISSED on 2 of 4 rows: fast" in text and "goal met on all 1 rows: fast" in text
    assert "FAILED: case a, error wrong result" in text and "0 failures, 1 skipped" in text
    assert "not run yet: later; " in text
    assert not modules[1].is_good(kept, names) and modules[1].is_good(kept, ["good"])


@pytest.mark.slow
def test_a_hang_is_killed_at_its_share_with_all_that_it_started(modules, planted, tmp_path):
    start = time.monotonic()
    _, parts = run_parts(modules, tmp_path / "session.json", ["hangs", "good"], seconds=100.0, weights={"good": 9.0})
    assert time.monotonic() - start < 100
    assert "killed at its share of 10 s" in parts["hangs"]["status"] and parts["good"]["status"] == "ended"
    first, second = parts["hangs"]["rows"]
    assert first == {"ms": 4.0} and not is_running(second["child"])


def test_a_second_call_goes_on_with_the_next_part(modules, planted, tmp_path):
    path = tmp_path / "session.json"
    _, parts = run_parts(modules, path, ["misses", "good"], seconds=4.0)
    assert parts == {}, "less than five seconds for a part: none is begun"
    _, parts = run_parts(modules, path, ["misses"])
    saved = json.loads(path.read_text())
    saved["parts"]["good"] = {**saved["parts"]["misses"], "status": "running", "failures": []}
    path.write_text(json.dumps(saved))
    _, parts = run_parts(modules, path, ["misses", "good", "fails"])
    assert parts["misses"] == saved["parts"]["misses"]
    assert parts["good"]["failures"] == [{"error": "the session ended while it ran"}], "it may be why"
    assert parts["fails"]["rows"] == [{"ms": 2.0}]
    assert len(json.loads(path.read_text())["calls"]) == 3


def test_parts_exist_and_are_asked_for_by_name(script):
    program = script("gpu_session")
    assert len(program.CARD) == 11 and len({part.name for part in (*program.CARD, *program.NODE)}) == 14
    for part in (*program.CARD, *program.NODE):
        module, _, function = part.run.partition(":")
        assert callable(getattr(script(module), function))


@pytest.mark.slow
def test_a_dry_session_writes_json_and_summary(tmp_path):
    """Two of the parts; test_all_parts_of_a_dry_session has all."""
    done = run_script("gpu_session.py", "--dry", "--seconds", "200", "--folder", str(tmp_path), "--only", "rates",
                      "memory-bound")
    saved = json.loads((tmp_path / "session.json").read_text())
    assert {part["status"] for part in saved["parts"].values()} == {"ended"}, done.stdout + done.stderr
    assert not any(part["failures"] for part in saved["parts"].values()), done.stdout
    assert saved["versions"]["torch"] and saved["parts"]["rates"]["rows"][0]["unit"] == "GB/s"
    rows = saved["parts"]["memory-bound"]["rows"]
    assert {row["bench"] for row in rows} == {"expert_layer", "memory_bound"}
    assert {row["kernel"] for row in rows if row["bench"] == "memory_bound"} == {
        "norm", "rotary", "top_k", "skewed_routing", "weighted_swiglu", "cross_entropy"}
    assert f"all rows: {tmp_path / 'session.json'}" in (tmp_path / "summary.txt").read_text()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("node", [False, True])
def test_all_parts_of_a_dry_session(tmp_path, node):
    """The times of a loaded CPU may miss goals; no part may fail. Shares are long: at a load of 25 one took 170 s."""
    done = run_script("gpu_session.py", "--dry", "--seconds", "4000", "--folder", str(tmp_path), *(["--node"] * node))
    parts = json.loads((tmp_path / "session.json").read_text())["parts"]
    assert len(parts) == (3 if node else 11)
    assert {name: part["failures"] for name, part in parts.items() if part["failures"]} == {}, done.stdout
    assert all(part["rows"] for part in parts.values())
