"""`bench_training.py`: its settings, rows and comparisons; tests/test_scripts.py runs it."""

import json
import sys
import time
from functools import partial

import pytest
import torch

from run_files import MODEL
from scripts import BENCHMARKS, TORCHRUN, fork_script, run_script

SCRIPT = "bench_training.py"


@pytest.fixture
def bench(script):
    return script("bench_training")


@pytest.mark.slow
def test_experts_on_two_ranks_beside_fsdp2(tmp_path):
    """A setting for three ranks fails, and those for two run."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    result = fork_script(SCRIPT, "--device", "cpu", "--model", str(tmp_path / "config.json"), "--steps", "1", "--mesh",
                         "3x1x1", "1x1x2", "--schedule", "1f1b", "--seconds", "200", "--save", str(tmp_path))
    rows = json.loads((tmp_path / "training.json").read_text())["rows"]
    refused = [row["error"] for row in rows if row["mesh"] == "3x1x1"]
    assert refused and all("cannot be 2" in error for error in refused), result.stdout + result.stderr
    measured = [row for row in rows if row["mesh"] == "1x1x2"]
    assert [(row["run by"], row["error"]) for row in measured] == [("dualpipe", None), ("FSDP2", None)]
    for row in measured:
        assert row["tokens/s"] > 0 and row["TFLOP/s"] > 0 and 0 < row["exposed"] < 1 and row["MFU"] is None


def test_settings_differ(bench, monkeypatch):
    """Overlap is no choice for a schedule without pairs, and torch's pipelines need more than one rank."""
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--recompute", "none", "experts"])
    args = bench.parse()
    options = bench.options_of(args, 8, "")
    assert options.meshes == ((1, 1, 8), (2, 1, 4), (4, 1, 2), (8, 1, 1)) and options.tokens == 8 * 4 * 32
    found = [(*row.values(),) for row in bench.settings(args, options) if row["mesh"] in ("1x1x8", "2x1x4")]
    assert len(set(found)) == len(found)
    ours = [("dualpipev", True), ("dualpipev", False), ("zbv", False), ("1f1b", False)]
    for mesh, others in (("1x1x8", [("FSDP2", "1f1b")]), ("2x1x4", [("torch", "dualpipev"), ("torch", "1f1b")])):
        wanted = [("dualpipe", *each, mesh, "none") for each in ours]
        wanted += [(*each, False, mesh, "none") for each in others]
        assert [row for row in found if row[3:] == (mesh, "none")] == wanted
        assert [row[:3] for row in found if row[3:] == (mesh, "experts")] == [("dualpipe", *each) for each in ours]


def test_a_model_with_fewer_layers(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["", "--model", "gpt-oss-20b", "--layers", "3"])
    options = bench.options_of(bench.parse(), 4, str(tmp_path))
    model = bench.read_config(options.model)
    assert model.num_hidden_layers == len(model.layer_types) == 3
    assert options.dtype == "bf16" and options.tokens == 4 * 16 * 4096


def test_tokens_that_cannot_be_divided(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--tokens", "96", "--mesh", "1x1x2"])
    args = bench.parse()
    options = bench.options_of(args, 2, "")
    with pytest.raises(ValueError, match="96 tokens are not so many micro-batches of 1 x 32 for each of 2 pipelines"):
        bench.config_of(options, next(bench.settings(args, options)))


FOUND = {"seconds": 2.0, "exposed": 0.1, "loss": 5.0, "norm": 1.0, "bubble": 0.2, "bytes": 4e9, "gpu": "NVIDIA H100"}


@pytest.fixture
def options(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--model", "qwen3-30b-a3b", "--tokens", "800000"])
    return bench.options_of(bench.parse(), 2, "")


def test_a_row_is_of_the_worst_rank(bench, options):
    row = bench.row_of([FOUND, FOUND | {"seconds": 4.0, "bubble": 0.4, "bytes": 6e9, "loss": None}], options)
    assert (row["step ms"], row["tokens/s"], row["GB"], row["loss"]) == (4000, 100_000, 6.0, 5.0)
    assert row["bubble"] == pytest.approx(0.3) and row["MFU"] == pytest.approx(row["TFLOP/s"] / 989)
    assert row["TFLOP/s"] > 100_000 * 6 * 3e9 / 1e12, "6 operations for each of 3 billion active parameters"


def test_a_row_says_why_there_is_none(bench, options):
    """The row names the root cause of several errors; a rank that ended because of others has none."""
    lost = {"error": "RuntimeError: Connection closed by peer"}
    row = bench.row_of([lost, {}, {"error": "OutOfMemoryError: CUDA out of memory. Tried ..."}], options)
    assert row["error"].startswith("OutOfMemoryError") and row["step ms"] is None
    assert bench.not_fitting(row["error"]) and not bench.not_fitting(lost["error"])


def test_a_setting_that_computes_something_else_is_an_error(bench):
    rows = [{"error": "no", "loss": None, "norm": None}, {"error": None, "loss": 5.0, "norm": 1.0}]
    assert bench.checked(rows[1], rows[:1], 1e-3)["error"] is None
    assert bench.checked(rows[1] | {"norm": 1.0005}, rows, 1e-3)["error"] is None
    wrong = bench.checked(rows[1] | {"norm": 2.0}, rows, 1e-3)
    assert wrong["error"] == "computes another step: loss 5 instead of 5, norm 2 instead of 1"
    assert bench.checked(rows[1] | {"loss": float("nan")}, rows, 1e-3)["error"]


def test_compared_with_the_fastest_on_the_same_mesh(bench):
    def row(run_by, speed, mesh="2x1x1", recompute="none", error=None):
        return {"run by": run_by, "tokens/s": speed, "mesh": mesh, "recompute": recompute, "error": error,
                "x others": None}

    rows = [row("dualpipe", 30.0), row("dualpipe", 10.0, recompute="layer"), row("torch", 20.0), row("torch", 10.0),
            row("torch", None, error="no"), row("FSDP2", 60.0, mesh="1x1x2")]
    bench.compared(rows)
    assert [each["x others"] for each in rows] == [1.5, None, None, None, None, None]


FAILING = f"""
import os, signal, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
""" + """
import rank_processes
rank_processes.GRACE = 1.0

def measure(setting, info, prefix):
    if setting != "goes well" and info.rank == 0:
        time.sleep(600)  # in a collective, that the other rank never comes to
    if setting == "raises":
        raise RuntimeError("CUDA out of memory")
    if setting == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rank": info.rank, "of": info.world_size}

if __name__ == "__main__":
    processes = rank_processes.RankProcesses(measure, alone=2, seconds=300.0)
    found = [processes.run(sys.argv[1]), processes.run("goes well")]
    if processes.first:
        print(found)
    sys.exit(processes.from_first(0 if processes.first else 7))
"""
WHY = {"raises": "RuntimeError: CUDA out of memory", "dies": "rank 1 ended with exit status -9"}


@pytest.mark.slow
@pytest.mark.parametrize("setting, run", [
    ("raises", fork_script), pytest.param("dies", partial(run_script, launcher=TORCHRUN), marks=pytest.mark.long),
])
def test_a_rank_that_fails_ends_its_setting_alone(tmp_path, setting, run):
    """The setting ends on all ranks, long before the other rank would give up, and the next one runs."""
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    start = time.monotonic()
    result = run(path, setting)
    assert result.returncode == 0, result.stdout + result.stderr
    went_well = [{"rank": rank, "of": 2} for rank in range(2)]
    assert result.stdout.splitlines()[-1] == str([[{}, {"error": WHY[setting]}], went_well])
    assert time.monotonic() - start < 200


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_runs_on_gpus(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    few = ("--layers", "4", "--steps", "2", "--schedule", "dualpipev", "--seconds", "120")
    result = run_script(SCRIPT, *few, "--save", str(tmp_path))
    assert result.returncode in (0, 1) and "FAILED" not in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
    rows = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert any(row["MFU"] for row in rows if row["run by"] == "dualpipe")
