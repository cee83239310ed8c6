"""`dualpipe parity` passes for a right pipeline, and detects planted faults."""

import json
import re
from dataclasses import replace

import pytest
import torch

from dualpipe import cli
from dualpipe.nn import linear
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train import step
from dualpipe.train.config.fit import resolve
from dualpipe.train.config.load import load_config
from dualpipe.train.launch.join import Job
from dualpipe.train.parity import models
from dualpipe.train.parity.command import check_parity, print_errors
from dualpipe.train.parity.compare import Comparison, Report
from dualpipe.train.parity.errors import Error
from dualpipe.train.parity.models import ConfigModel
from dualpipe.train.parity.steps import StagesInPipeline
from hub import FAMILIES
from ranks import run_ranks

ALONE = RankInfo(0, 1, 0, 1)


def run(run_toml, *overrides, dtype="float64", tolerance=None):
    config = load_config(run_toml, ["--parallel.pp", "1", "--parallel.device", "cpu", *overrides])
    return check_parity(config, ALONE, model=None, dtype=dtype, tolerance=tolerance, worst=3)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_quantized_weights_are_compared_with_what_they_dequantize_to(run_toml, monkeypatch, dtype):
    rules = ["*.experts,storage=nvfp4", "*.self_attn,gather=mxfp8"]
    options = ["--dtypes.rules", *rules, "*.q_norm,compute=bf16"]  # other dtypes than those of formats are left out
    assert run(run_toml, *options, dtype=dtype) == 0
    monkeypatch.setattr(models, "copy_parameters", lambda *_: None)  # they stay as they were
    assert run(run_toml, *options, dtype=dtype) == 1


@pytest.mark.parametrize(("schedule", "dtype"), [
    ("dualpipev", "float64"), ("1f1b", "float32"), pytest.param("auto", "float64", marks=pytest.mark.slow),
])
def test_one_rank_passes(run_toml, capsys, schedule, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(run_toml, "--parallel.schedule", schedule, dtype=dtype) == 0
    out = capsys.readouterr().out
    assert "parity passed" in out and "relative" in out


def test_a_name_is_printed_in_one_piece(capsys, monkeypatch):
    """A narrow terminal does not break the name either."""
    monkeypatch.setenv("COLUMNS", "40")
    name = "layers.47.mlp.experts.gate_up_proj.weight" * 3
    errors = [Error(name, (2, 3), 1e-12, 1e-12, 1.0), Error("loss", (4,), 0.0, 0.0, 1.0)]
    print_errors(Report("", errors, []), "1f1b, float64", 2)
    _, header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["tensor", "stage", "shape", "max", "abs", "relative"]
    assert first.split()[:4] == [name, "-", "(2,", "3)"]
    assert second.split()[:3] == ["loss", "-", "(4,)"] and len(second) == len(first)


def parameter_of(pipeline, stage, name):
    return pipeline.stages[stage].module.get_parameter(name)


def broken_gradient(right):
    def train(self, *arguments, **options):
        losses = right(self, *arguments, **options)
        parameter_of(self, 0, "layers.0.self_attn.q_proj.weight").grad[0, 0] += 1e-7
        return losses

    return train


def missing_gradient(right):
    def train(self, counted=None, *arguments, **options):
        losses = right(self, counted, *arguments, **options)
        if counted is None or len(counted) > 1:  # a whole step, not one of its micro-batches alone
            parameter_of(self, -1, "norm.weight").grad = None
        return losses

    return train


def wrong_loss(right):
    return lambda *arguments, **options: [
        loss._replace(tensor=loss.tensor.flip(0)) for loss in right(*arguments, **options)]


@pytest.mark.parametrize(("breaking", "name", "place"), [
    (broken_gradient, "q_proj.weight", "first: layers.0.self_attn.q_proj.weight: .* B.stage 0, micro-batch 0."),
    (missing_gradient, "norm.weight", "first: norm.weight: .* the step as a whole, and in no micro-batch alone"),
    (wrong_loss, "loss of the micro-batches", "first: loss of the micro-batches: .* the loss behind stage 1"),
])
def test_a_wrong_pipeline_fails_and_is_named(run_toml, capsys, monkeypatch, breaking, name, place):
    monkeypatch.setattr(StagesInPipeline, "train", breaking(StagesInPipeline.train))
    assert run(run_toml) == 1
    out = capsys.readouterr().out
    assert "parity FAILED: 1 of" in out
    lines = out.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("tensor "))
    assert name in lines[header + 1], "the worst comes first"
    assert re.match(place, lines[-1])


# -- routers


TERMS = ("--router.balance", "0.5", "--router.z_loss", "0.1")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["microbatch", "sequence", "global"])
def test_router_losses_are_compared(run_toml, capsys, level):
    assert run(run_toml, *TERMS, "--router.balance_level", level) == 0
    assert run(run_toml) == 0
    with_terms, without = re.findall(r"all (\d+) within", capsys.readouterr().out)
    assert int(with_terms) == int(without) + 2, "both losses besides the gradients"


@pytest.mark.parametrize(("level", "table", "field", "value"), [
    ("global", "router", "balance", 0.499),
    pytest.param("sequence", "router", "z_loss", 0.099, marks=pytest.mark.slow),
    pytest.param("global", "train", "num_chunks", 5, marks=pytest.mark.slow),
])
def test_another_router_loss_fails(run_toml, capsys, monkeypatch, level, table, field, value):
    """The routers of the pipeline are configured otherwise than those of the unpipelined model."""
    right = step.build_routers

    def build_routers(config, *stages, **options):
        other = replace(config, **{table: replace(getattr(config, table), **{field: value})})
        return right(other, *stages, **options)

    monkeypatch.setattr(step, "build_routers", build_routers)
    assert run(run_toml, *TERMS, "--router.balance_level", level) == 1
    assert "mlp.gate.weight" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    ("--dp", "2"), pytest.param(("--ep", "2"), marks=pytest.mark.slow),
], ids=" ".join)
def test_router_losses_of_two_pipelines(run_folder, dualpipe, layout):
    terms = (*TERMS, "--router.balance_level", "global", "--train.num_chunks", "3")
    done = dualpipe(run_folder, "parity", "run.toml", "--pp", "1", *layout, *terms)
    assert done.returncode == 0, done.stdout + done.stderr


# -- gradients that are zero


@pytest.fixture
def one_expert(run_toml):
    """Return a model whose routing weights are all 1, so that its routers' gradients are zero up to rounding."""
    file = run_toml.parent / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts_per_tok": 1}))
    return run_toml.parent


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
def test_zero_gradients_that_are_rounded_differently_pass(one_expert, dualpipe, dtype):
    done = dualpipe(one_expert, "parity", "run.toml", "--pp", "1", "--ep", "2", "--dtype", dtype)
    assert "parity passed" in done.stdout, done.stdout + done.stderr


def zeroed(right):
    def train(self, *arguments, **options):
        losses = right(self, *arguments, **options)
        parameter_of(self, 0, "layers.0.mlp.gate.weight").grad.zero_()
        return losses

    return train


def added(share):
    """Add an error to the router's gradient, as large as a share of the whole gradient."""

    def breaking(right):
        def train(self, *arguments, **options):
            losses = right(self, *arguments, **options)
            whole = torch.cat([parameter.grad.flatten() for _, _, parameter in self.parameters()]).norm()
            parameter_of(self, 0, "layers.0.mlp.gate.weight").grad[0, 0] += share * whole
            return losses

        return train

    return breaking


def test_a_gradient_that_should_not_be_zero_fails(run_toml, capsys, monkeypatch):
    monkeypatch.setattr(StagesInPipeline, "train", zeroed(StagesInPipeline.train))
    assert run(run_toml) == 1
    assert "parity FAILED: 1 of" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "eps"), [("float64", 2e-16), ("float32", 1.2e-7)])
def test_an_error_in_a_zero_gradient_fails_from_a_few_eps_on(one_expert, monkeypatch, dtype, eps):
    right = StagesInPipeline.train
    for share, failed in ((0.2 * eps, 0), (3 * eps, 1)):
        monkeypatch.setattr(StagesInPipeline, "train", added(share)(right))
        assert run(one_expert / "run.toml", dtype=dtype) == failed


# -- bfloat16


@pytest.mark.slow
def test_bf16_passes_and_prints_both_errors(run_toml, capsys):
    assert run(run_toml, *TERMS, "--router.balance_level", "global", dtype="bf16") == 0
    out = capsys.readouterr().out
    errors = re.search(r"([\d.e-]+) pipelined, ([\d.e-]+) unpipelined: ([\d.]+) times", out)
    pipelined, unpipelined, times = errors.groups()
    assert 1e-3 < float(pipelined) < 0.05 and float(unpipelined) == pytest.approx(float(pipelined), rel=0.5)
    assert float(times) == pytest.approx(1, abs=0.5) and "parity passed: all 50 within" in out
    with pytest.raises(ValueError, match=r"--tolerance 0.1: the bounds of bf16 are derived"):
        run(run_toml, dtype="bf16", tolerance=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bf16"])
@pytest.mark.parametrize(("schedule", "count"), [("dualpipev", 48), ("1f1b", 47)])
def test_tied_embeddings_are_compared_once_in_each_stage(run_toml, capsys, dtype, schedule, count):
    file = run_toml.parent / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    assert run(run_toml, "--parallel.schedule", schedule, dtype=dtype) == 0
    assert f"parity passed: all {count} within" in capsys.readouterr().out


def rounded_sums(monkeypatch):
    """Accumulate weight gradients in bfloat16, in buffers that are float32."""

    weight_grad = linear._outer_product

    def rounded(weight, dy, x, out=None):
        dw = weight_grad(weight, dy, x, out)
        return dw.copy_(dw.bfloat16())

    monkeypatch.setattr(linear, "_outer_product", rounded)


def one_lost(monkeypatch):
    """Drop one weight's gradient of one of four micro-batches."""
    right, weight_grad = StagesInPipeline.train, linear._outer_product

    def train(self, counted=None, *arguments, **options):
        calls = []

        def losing(weight, dy, x, out=None):
            calls.append(weight.shape)
            return weight_grad(weight, dy * (calls.count((32, 32)) != 5), x, out)

        if counted is None or len(counted) > 1:
            monkeypatch.setattr(linear, "_outer_product", losing)
        losses = right(self, counted, *arguments, **options)
        monkeypatch.setattr(linear, "_outer_product", weight_grad)
        return losses

    monkeypatch.setattr(StagesInPipeline, "train", train)


def all_lost(monkeypatch):
    """Drop one weight's gradient of all micro-batches."""
    monkeypatch.setattr(StagesInPipeline, "train", missing_gradient(StagesInPipeline.train))


@pytest.mark.parametrize("planted", [one_lost, *(pytest.param(each, marks=pytest.mark.slow)
                                                 for each in (rounded_sums, all_lost))])
def test_bf16_fails_where_a_gradient_is_lost_or_accumulated_in_bf16(run_toml, capsys, monkeypatch, planted):
    planted(monkeypatch)
    assert run(run_toml, dtype="bf16") == 1
    failed = re.sub(r"\s+", " ", capsys.readouterr().out).split("parity FAILED: ")[1]
    assert "weight is not the sum of its micro-batches' gradients" in failed
    assert ("times as far from float64" in failed) == (planted is not rounded_sums)


def measure(toml, options, dtype):
    """Return what a comparison of a configuration measures."""
    resolved, cpu = resolve(load_config(toml, options), 4), torch.device("cpu")
    p = resolved.config.parallel
    job = Job(cpu, build_mesh(p.pp, p.dp, p.ep, cpu, dp_replicate=p.dp_replicate))
    return Comparison(ConfigModel(resolved), job, dtype, 1e-10).run()


def bf16_on_ranks(rank, toml, options):
    return measure(toml, options, torch.bfloat16).failures


PIPELINED = ["--parallel.pp", "2", "--parallel.ep", "2"]
BF16_RUNS = [
    ("qwen3_moe", [*PIPELINED, *TERMS]),
    ("qwen3_moe", [*PIPELINED, "--dtypes.rules", "*.experts,gather=mxfp8", "*.o_proj,storage=nvfp4"]),
    *((family, ["--parallel.pp", "1", "--parallel.dp", "2", "--parallel.ep", "2", "--train.num_chunks", "3"])
      for family in ("gpt_oss", "deepseek_v2", "deepseek_v3")),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, options", BF16_RUNS, ids=["plain", "quantized", *(f for f, _ in BF16_RUNS[2:])])
def test_bf16_of_every_family_over_fsdp2_and_expert_parallel_ranks(run_toml, family, options):
    if family != "qwen3_moe":
        config = run_toml.parent / f"{family}.json"
        config.write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
        options = [*options, "--model.config", str(config)]
    assert run_ranks(bf16_on_ranks, 4, str(run_toml), options) == [[]] * 4


def replicated_on_ranks(rank, toml, runs):
    """Return the largest relative difference of each run from the unpipelined model in float64."""
    largest = []
    for options in runs:
        errors = measure(toml, options, torch.float64).errors
        assert any(error.name.startswith("loss") for error in errors)
        largest.append(max(error.relative for error in errors))
    return largest


@pytest.mark.slow
def test_parts_of_dp_with_all_parameters_have_the_gradients_of_the_whole_batch(run_toml):
    """Layouts are dp 4 as two parts of two; and two parts of one rank with experts over two, one copy a part."""
    runs = [["--parallel.pp", "1", "--parallel.dp", dp, "--parallel.dp_replicate", "2", "--parallel.ep", ep]
            for dp, ep in (("4", "1"), ("2", "2"))]
    for largest in run_ranks(replicated_on_ranks, 4, str(run_toml), runs):
        assert max(largest) < 1e-10


def test_parts_that_do_not_divide_dp_are_refused(run_toml, capsys):
    assert cli.main(["parity", str(run_toml), "--pp", "1", "--dp", "1", "--dp-replicate", "2"]) == 2
    assert "error: parallel.dp_replicate = 2 does not divide dp = 1, " in capsys.readouterr().err
