"""`bench_overlap.py` on tiny layers: its measurements, and the use of the costs that it writes."""

import json
import re
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dualpipe.cli import main
from dualpipe.schedule import validate
from scripts import TORCHRUN, run_script

SCRIPT = "bench_overlap.py"
SMALL = ("--device", "cpu", "--repeats", "1", "--tokens", "32")


@pytest.fixture
def bench(script):
    return script("bench_overlap")


def check_costs(path, capsys):
    costs = json.loads(path.read_text())
    assert set(costs) == {"F", "B", "I", "W", "FB", "pairs"}
    assert set(costs["pairs"]) == {"FF", "FI", "FW", "BB", "BI", "BW", "II", "IW"}
    assert main(["schedule", "--ranks", "2", "--microbatches", "6", "--costs", str(path)]) == 0
    assert "dualpipev" in capsys.readouterr().out


def test_pairs_that_were_measured_shorter_than_an_action_are_written_as_long_as_that(bench, tmp_path, capsys):
    measured = dict.fromkeys(bench.WORK, 1.5) | {"F": 0.6, "B": 1.3, "I": 0.7, "W": 0.6, "FB": 1.28, "BW": 1.2}
    bench.write_costs(tmp_path / "costs.json", measured)
    assert capsys.readouterr().out == (
        "FB measured 1.28 ms, less than B alone: taken as 1.3 ms\nBW measured 1.2 ms, less than B alone: taken as 1.3 "
        f"ms\nwrote {tmp_path}/costs.json\n")
    check_costs(tmp_path / "costs.json", capsys)


@pytest.mark.slow
def test_between_real_ranks(tmp_path, capsys):
    result = run_script(SCRIPT, *SMALL, "--group", "--costs", str(tmp_path), launcher=TORCHRUN)
    assert "FAILED" not in result.stdout and result.stdout.count("goal: ") == 1, result.stdout + result.stderr
    check_costs(tmp_path / "overlap_tiny_32.json", capsys)


def test_every_kind_and_pair_is_a_step_of_a_valid_schedule(bench):
    schedule, names = bench.schedule_of_all()
    validate(schedule)
    steps = [";".join(map(str, step)) for step in schedule.ranks[0]]
    assert all(steps.count(name) == 1 for name in names)
    assert sorted(names.values()) == sorted(bench.WORK)


def test_what_is_hidden(bench):
    """F of 2 and I of 3 units with 2 of communication each, W of 1."""
    computing = dict.fromkeys(bench.WORK, 0.0) | {"F": 2.0, "I": 3.0, "W": 1.0}
    given = dict.fromkeys(bench.WORK, 10.0) | {"F": 4.0, "I": 5.0, "W": 1.0, "B": 5.0, "FB": 7.0}
    rows = {row["work"]: row for row in bench.rows_of(computing, given, {})}
    assert rows["F"]["hidden"] == 0.0 and rows["W"]["hidden"] is None
    assert (rows["B"]["alone ms"], rows["B"]["communication ms"], rows["B"]["hidden"]) == (6.0, 2.0, 0.5)
    assert (rows["F&B"]["alone ms"], rows["F&B"]["communication ms"], rows["F&B"]["hidden"]) == (10.0, 4.0, 0.75)
    assert rows["F&B"]["of alone"] == 0.7 and rows["F&B"]["x alone"] >= bench.goals([], 0)[0].minimum


def test_beside_blocks_no_more_is_lost_than_their_multiprocessors_and_five_percent(bench):
    """The goal where 32 of 132 multiprocessors are lost is 1.32 times as long, and 0.05 more."""
    computing = dict.fromkeys(bench.WORK, 100.0)
    beside = {4: computing | {"F": 109.0, "W": 107.0}, 32: computing | {"F": 136.0, "W": 138.0}}
    rows = list(bench.rows_of(computing, dict.fromkeys(bench.WORK, 110.0), beside))
    _, few, many = bench.goals(beside, 132)
    assert [row["work"] for row in few.missed(rows)] == ["F"] and [row["work"] for row in many.missed(rows)] == ["W"]
    assert len(few.rows(rows)) == len(bench.WORK)


@pytest.mark.skipif(find_spec("triton") is None, reason="ptxas comes with Triton")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_blocks_have_the_registers_of_nccls(script, tmp_path, arch):
    stand_ins, path = script("stand_ins"), tmp_path / "hold.ptx"
    path.write_text(stand_ins.held_ptx())
    tool = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    tool /= "ptxas-blackwell" if arch == 100 and (tool / "ptxas-blackwell").exists() else "ptxas"
    command = [tool, "-v", f"--gpu-name=sm_{arch}", path, "-o", tmp_path / "hold.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores" in said
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert -(-registers // 8) * 8 == stand_ins.REGISTERS  # they are given out in eights


@pytest.mark.gpu
def test_blocks_stay_until_the_work_beside_them_is_done(script):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    blocks, x = script("stand_ins").Blocks(torch.device("cuda")), torch.ones(4, device="cuda")
    with blocks.held(4):
        assert x.sum().item() == 4
    with pytest.raises(RuntimeError, match=r"4 blocks gave up after 0\.01 s"), blocks.held(4, limit_us=10_000):
        time.sleep(0.1)


class Clock:
    """Stand-in for the module `time`; only `sleep` advances it."""

    now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_modelled_ranks_take_the_time_of_what_is_sent_to_others(bench, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    mirror = bench.Mirror(4, torch.device("cpu"), None)
    sent = torch.arange(8, dtype=torch.uint8).view(4, 2)
    received = torch.empty_like(sent)
    mirror.start(received, sent, [1] * 4, [1] * 4).wait()
    assert received.equal(sent)
    mirror.seconds_per_byte = 0.01
    works = [mirror.start(received, sent, [1] * 4, [1] * 4) for _ in range(2)]
    assert clock.now == 100.0, "nobody waits yet"
    ends = []
    for work in works:
        work.wait()
        ends.append(clock.now)
    assert ends == pytest.approx([100.06, 100.12]), "one after the other: twice 6 bytes to others"


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_runs_on_a_gpu(tmp_path, capsys):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    result = run_script(SCRIPT, "--quick", "--costs", str(tmp_path), "--model", "qwen3-30b-a3b")
    assert result.returncode in (0, 1) and "FAILED" not in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
    check_costs(tmp_path / "overlap_qwen3-30b-a3b_16384.json", capsys)
