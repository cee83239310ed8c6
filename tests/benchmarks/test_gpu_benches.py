"""The kernels' benchmarks: their decisions on any device, their measurements of tiny layers, and their runs."""

import json
import sys

import pytest
import torch

from scripts import run_script

MEMORY_BOUND = ("norm", "rotary", "top_k", "skewed_routing", "weighted_swiglu", "cross_entropy")
TINY = [
    ("bench_grouped_gemm", {"share": 2, "routing": "skewed"}),
    ("bench_expert_layer", {"routing": "skewed"}),
    *(("bench_memory_bound", {"kernel": kernel}) for kernel in MEMORY_BOUND),
    ("bench_quantized", {"share": 2, "routing": "balanced", "format": "fp8_block"}),
    ("bench_attention", {"kind": "documents"}),
]
BENCHES = tuple(dict.fromkeys(name for name, _ in TINY))


@pytest.fixture
def bench(script):
    return script("gpu_bench")


@pytest.fixture
def machine(bench):
    return bench.Machine(torch.device("cpu"), copy_gb_per_s=10.0, dense_tflops=0.1)


# ---------------------------------------------------------------------------------------------------------- on any CPU


@pytest.mark.parametrize("model", ["tiny", "tiny clamped"])
@pytest.mark.parametrize(("name", "setting"), TINY)
def test_measures_a_tiny_layer(script, machine, name, setting, model):
    module = script(name)
    torch.manual_seed(0)
    rows = list(module.measure(machine, model, tokens=64, **setting))
    assert rows
    setting = {"model": model, "tokens": 4096, **setting}
    for goal in module.BENCH.goals:
        assert all(goal.column in row for row in rows), goal.text
        goal.missed([setting | row for row in rows])


def test_a_wrong_product_is_not_timed(script, machine, monkeypatch):
    module = script("bench_grouped_gemm")

    def leaves_a_row_out(x, w, offs, gather=None):
        y = x.new_empty(x.shape[0], w.shape[1])
        y[1:] = module_grouped_gemm(x, w, offs, gather=gather)[1:]
        return y

    module_grouped_gemm = module.grouped_gemm
    monkeypatch.setattr(module, "grouped_gemm", leaves_a_row_out)
    with pytest.raises(RuntimeError, match="up forward: relative error nan"):
        list(module.measure(machine, "tiny", tokens=64, share=2, routing="skewed"))


def test_new_tensors_are_poisoned_and_then_not(bench):
    before = torch.are_deterministic_algorithms_enabled()
    with bench.poisoned():
        new = torch.zeros(2).new_empty(3), torch.empty(3, dtype=torch.bfloat16)
        numbers = torch.empty(3, dtype=torch.int32)
    assert all(t.isnan().all() for t in new) and (numbers == 2**31 - 1).all()
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("shape", [(5, 5), (25,), (2, 3, 5), ()])
def test_errors_are_summed_over_chunks(bench, monkeypatch, shape):
    monkeypatch.setattr(bench, "CHUNK", 7)
    expected = torch.randn(shape)
    actual = expected + 0.1 * torch.randn(shape)
    wanted = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert bench.relative_errors(actual, expected)[0] == pytest.approx(wanted.item())
    actual.view(-1)[-1] = torch.nan
    with pytest.raises(RuntimeError, match="nan"):
        bench.check_close("it", actual, expected, 1.0)


def test_one_wrong_row_of_many_shows(bench):
    expected = torch.randn(10_000, 16)
    actual = expected.clone()
    actual[7] = -actual[7]
    whole, worst = bench.relative_errors(actual, expected)
    assert whole < 0.03 and 1.0 < worst <= 2.0
    with pytest.raises(RuntimeError, match="worst row"):
        bench.check_close("it", actual, expected, 0.03)


def test_goals(bench, capsys):
    goal = bench.Goal("large ones at least half", "rate", 0.5, lambda row: row["tokens"] >= 10)
    rows = [{"tokens": t, "rate": r} for t, r in ((1, 0.1), (10, 0.5), (11, 0.4), (12, None), (13, float("nan")))]
    assert [row["tokens"] for row in goal.missed(rows)] == [11, 13]
    assert bench.report([goal], bench.Outcome(rows[:2])) == 0
    assert bench.report([goal], bench.Outcome(rows)) == 1
    assert bench.report([goal], bench.Outcome(rows[:2], failures=[{"tokens": 9, "error": "why"}])) == 1
    out = capsys.readouterr().out
    assert "met on all 1 rows" in out and "MISSED on 2 of 3 rows" in out and "0.4 tokens 11" in out
    assert "FAILED: tokens 9, error why" in out


def test_a_failing_setting_leaves_the_others(bench, machine):
    def measure(machine, model, tokens):
        yield {"ms": 1.0}
        if tokens == 2:
            raise RuntimeError("wrong")

    settings = [{"model": "m", "tokens": t} for t in (1, 2, 3)]
    it = bench.Bench("", "it", settings, {}, measure, ())
    outcome = bench.run_settings(it, settings, machine, minutes=1.0)
    assert [row["tokens"] for row in outcome.rows] == [1, 2, 3]
    assert outcome.failures == [{"model": "m", "tokens": 2, "error": "wrong"}]
    assert bench.run_settings(it, settings, machine, minutes=-1.0).skipped == settings


def test_the_main_program(script, bench, machine, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "require_gpu", lambda: machine.device)
    monkeypatch.setattr(bench, "copy_gb_per_s", lambda device: machine.copy_gb_per_s)
    monkeypatch.setattr(bench, "dense_tflops", lambda device: machine.dense_tflops)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(sys, "argv", ["", "--tokens", "64", "--save", str(tmp_path)])
    module = script("bench_memory_bound")
    settings = [{"model": "tiny", "tokens": tokens, "kernel": "skewed_routing"} for tokens in (64, 128)]
    goals = (bench.Goal("possible", "us", 0.0), bench.Goal("impossible", "eager", 1e9))
    assert bench.run_bench(bench.Bench("doc", "it", settings, {}, module.measure, goals)) == 1
    out = capsys.readouterr().out
    assert "goal: possible: met on all 6 rows" in out and "goal: impossible: MISSED on 6 of 6 rows" in out
    rows = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert [row["pass"] for row in rows] == [
        "destinations", "sort", "dispatch", "combine", "combine backward", "dispatch backward"]


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("skewed", [False, True])
def test_route(script, share, skewed):
    shapes = script("expert_shapes")
    layer = shapes.route(shapes.Model(8, 8, 16, 4), 1000, 16 // share, skewed, torch.device("cpu"))
    assert sum(layer.counts) == 4000 // share and len(layer.counts) == 16 // share
    assert layer.offs.dtype == torch.int32
    assert layer.offs.tolist() == torch.tensor(layer.counts).cumsum(0).tolist()
    assert [at.stop for _, at in layer.slices] == layer.offs.tolist() and layer.slices[0][1].start == 0
    low, high = min(layer.counts), max(layer.counts)
    assert high > 1.7 * low if skewed else high - low <= 1


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BENCHES)
def test_runs_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    result = run_script(f"{name}.py", "--quick")
    assert result.returncode in (0, 1) and "FAILED" not in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
    assert "goal: " in result.stdout
