"""`dualpipe parity` passes for a right pipeline, and detects planted faults."""

import dataclasses
import json
import re

import pytest
import torch

from dualpipe import cli
from dualpipe.nn import Router, linear
from dualpipe.nn.attention.sequence_split import WHOLE, SequenceSplit
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train import parity, parity_models
from dualpipe.train.config.fit import resolve
from dualpipe.train.config.load import load_config
from dualpipe.train.launch.distributed import Job
from dualpipe.train.parity_errors import difference, print_table
from dualpipe.train.parity_models import EvenRoutes, ParityModels
from dualpipe.train.step.loss import MicroBatchLoss
from hub import FAMILIES
from ranks import run_ranks

ALONE = RankInfo(0, 1, 0, 1)


def run(run_toml, *overrides, dtype="float64", tolerance=None):
    config = load_config(run_toml, ["--parallel.pp", "1", "--parallel.device", "cpu", *overrides])
    return parity.check_parity(config, ALONE, dtype=dtype, tolerance=tolerance, worst=3)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_quantized_weights_are_compared_with_what_they_dequantize_to(run_toml, monkeypatch, dtype):
    options = ["--dtypes.rules", "*.experts,storage=nvfp4", "*.self_attn,gather=mxfp8"]
    assert run(run_toml, *options, dtype=dtype) == 0
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_: None)  # they stay as they were
    assert run(run_toml, *options, dtype=dtype) == 1


@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_rank_passes(run_toml, capsys, schedule, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(run_toml, "--parallel.schedule", schedule, dtype=dtype) == 0
    out = capsys.readouterr().out
    assert "parity passed" in out and "relative" in out


def test_a_name_is_printed_in_one_piece(capsys, monkeypatch):
    """A narrow terminal does not break the name either."""
    monkeypatch.setenv("COLUMNS", "40")
    name = "layers.47.mlp.experts.gate_up_proj.weight" * 3
    print_table("Differences", "1f1b, float64", ("relative",), [(name, "(2, 3)", "1e-12"), ("loss", "(4,)", "0")])
    _, header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["tensor", "shape", "relative"] and first.split() == [name, "(2,", "3)", "1e-12"]
    assert second.split() == ["loss", "(4,)", "0"] and len(second) == len(first)


def broken_gradient(right):
    def step(self, *batch):
        losses = right(self, *batch)
        self.model.stages[0].get_parameter("layers.0.self_attn.q_proj.weight").grad[0, 0] += 1e-7
        return losses

    return step


def missing_gradient(right):
    def step(self, num_microbatches, *batch):
        losses = right(self, num_microbatches, *batch)
        if num_microbatches > 1:  # the step to compare, not one of its micro-batches alone
            self.model.stages[-1].norm.weight.grad = None
        return losses

    return step


def wrong_loss(right):
    return lambda *arguments: right(*arguments).flip(0)


@pytest.mark.parametrize(
    ("breaking", "name"),
    [(broken_gradient, "q_proj.weight"), (missing_gradient, "norm.weight"), (wrong_loss, "loss of the micro-batches")],
)
def test_a_wrong_pipeline_fails_and_is_named(run_toml, capsys, monkeypatch, breaking, name):
    monkeypatch.setattr(ParityModels, "step", breaking(ParityModels.step))
    assert run(run_toml) == 1
    out = capsys.readouterr().out
    assert "parity FAILED: 1 of" in out
    lines = out.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("tensor "))
    assert name in lines[header + 1], "the worst comes first"


def test_a_wrong_criterion_fails(run_toml, monkeypatch):
    criteria = iter([MicroBatchLoss(3), MicroBatchLoss(4)])
    monkeypatch.setattr(parity_models, "MicroBatchLoss", lambda *_: next(criteria))
    assert run(run_toml) == 1


# -- routers


TERMS = ("--router.balance", "0.5", "--router.z_loss", "0.1")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["microbatch", "sequence", "global"])
def test_router_losses_are_compared(run_toml, capsys, level):
    assert run(run_toml, *TERMS, "--router.balance_level", level) == 0
    assert run(run_toml) == 0
    with_terms, without = re.findall(r"all (\d+) within", capsys.readouterr().out)
    assert int(with_terms) == int(without) + 2, "both losses besides the gradients"


def other_terms(change):
    """Make routers of the pipelined model differ from those of the unpipelined one."""

    def breaking(right):
        def step(self, *batch):
            for module in self.model.stages[0].modules():
                if isinstance(module, Router):
                    module.step = dataclasses.replace(module.step, **change)
            return right(self, *batch)

        return step

    return breaking


@pytest.mark.parametrize("change", [{"balance": 0.499}, {"z": 0.099}, {"num_microbatches": 5}], ids=str)
@pytest.mark.parametrize("level", ["sequence", "global"])
def test_another_router_loss_fails(run_toml, capsys, monkeypatch, level, change):
    monkeypatch.setattr(ParityModels, "step", other_terms(change)(ParityModels.step))
    assert run(run_toml, *TERMS, "--router.balance_level", level) == 1
    assert "mlp.gate.weight" in capsys.readouterr().out


def test_even_routes_do_not_depend_on_how_ranks_share_sequences():
    whole = torch.zeros(2 * 9, 2, dtype=torch.int64)
    assert EvenRoutes(WHOLE, 3)(whole[:3], 4).tolist() == [[0, 3], [2, 1], [0, 3]]
    chosen_BSK = EvenRoutes(WHOLE, 9)(whole, 5).unflatten(0, (2, 9))
    for rank in range(2):
        split = SequenceSplit(rank, 2)
        own = split.token_indices(9)
        part = EvenRoutes(split, 9)(whole[: 2 * len(own)], 5)
        assert torch.equal(part, chosen_BSK[:, own].flatten(0, 1))


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
    def step(self, *batch):
        losses = right(self, *batch)
        self.model.stages[0].get_parameter("layers.0.mlp.gate.weight").grad.zero_()
        return losses

    return step


def added(share):
    """Add an error to the router's gradient, as large as a share of the whole gradient."""

    def breaking(right):
        def step(self, *batch):
            losses = right(self, *batch)
            whole = torch.cat([p.grad.flatten() for p in self.pipeline.parameters()]).norm()
            self.model.stages[0].get_parameter("layers.0.mlp.gate.weight").grad[0, 0] += share * whole
            return losses

        return step

    return breaking


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_gradient_that_should_not_be_zero_fails(run_toml, capsys, monkeypatch, dtype):
    monkeypatch.setattr(ParityModels, "step", zeroed(ParityModels.step))
    assert run(run_toml, dtype=dtype) == 1
    assert "parity FAILED: 1 of" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "eps"), [("float64", 2e-16), ("float32", 1.2e-7)])
def test_an_error_in_a_zero_gradient_fails_from_a_few_eps_on(one_expert, monkeypatch, dtype, eps):
    right = ParityModels.step
    for share, failed in ((0.2 * eps, 0), (3 * eps, 1)):
        monkeypatch.setattr(ParityModels, "step", added(share)(right))
        assert run(one_expert / "run.toml", dtype=dtype) == failed


# -- bfloat16


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

    weight_grad = linear._weight_grad

    def rounded(weight, dy, x, out=None):
        dw = weight_grad(weight, dy, x, out)
        return dw.copy_(dw.bfloat16())

    monkeypatch.setattr(linear, "_weight_grad", rounded)


def one_lost(monkeypatch):
    """Drop one weight's gradient of one of four micro-batches."""
    right, weight_grad, calls = ParityModels.step, linear._weight_grad, []

    def losing(weight, dy, x, out=None):
        calls.append(weight.shape)
        return weight_grad(weight, dy * (calls.count((32, 32)) != 5), x, out)

    def step(self, num_microbatches, *batch):
        if num_microbatches > 1:
            monkeypatch.setattr(linear, "_weight_grad", losing)
        losses = right(self, num_microbatches, *batch)
        monkeypatch.setattr(linear, "_weight_grad", weight_grad)
        return losses

    monkeypatch.setattr(ParityModels, "step", step)


def all_lost(monkeypatch):
    """Drop one weight's gradient of all micro-batches."""
    monkeypatch.setattr(ParityModels, "step", missing_gradient(ParityModels.step))


@pytest.mark.parametrize("planted", [rounded_sums, one_lost, all_lost])
def test_bf16_fails_where_a_gradient_is_lost_or_accumulated_in_bf16(run_toml, capsys, monkeypatch, planted):
    planted(monkeypatch)
    assert run(run_toml, dtype="bf16") == 1
    failed = re.sub(r"\s+", " ", capsys.readouterr().out).split("parity FAILED: ")[1]
    assert "weight is not the sum of its micro-batches' gradients" in failed
    assert ("times as far from float64" in failed) == (planted is not rounded_sums)


def bf16_on_ranks(rank, toml, runs):
    """Return the exit status of each run."""
    statuses, cpu = [], torch.device("cpu")
    for options in runs:
        resolved = resolve(load_config(toml, options), 4)
        p = resolved.config.parallel
        job = Job(cpu, build_mesh(p.pp, p.dp, p.ep, cpu))
        statuses.append(parity.check_bf16(resolved, job, worst=3))
    return statuses


@pytest.mark.slow
def test_bf16_of_every_family_over_fsdp2_and_expert_parallel_ranks(run_toml):
    """Qwen3-MoE runs at pp 2 x ep 2, plain and quantized; the other families run at dp 2 x ep 2."""
    layout = ["--parallel.pp", "2", "--parallel.ep", "2"]
    runs = [[*layout, *TERMS], [*layout, "--dtypes.rules", "*.experts,gather=mxfp8", "*.o_proj,storage=nvfp4"]]
    for family in ("gpt_oss", "deepseek_v2", "deepseek_v3"):
        (run_toml.parent / f"{family}.json").write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
        runs.append(["--parallel.pp", "1", "--parallel.dp", "2", "--parallel.ep", "2", "--train.num_chunks", "3",
                     "--model.config", str(run_toml.parent / f"{family}.json")])
    assert run_ranks(bf16_on_ranks, 4, str(run_toml), runs, timeout=120) == [[0] * len(runs)] * 4


def replicated_on_ranks(rank, toml, runs):
    """Return the largest relative difference of each run from the unpipelined model in float64."""
    largest = []
    for options in runs:
        resolved = resolve(load_config(toml, options), 4)
        p, cpu = resolved.config.parallel, torch.device("cpu")
        job = Job(cpu, build_mesh(p.pp, p.dp, p.ep, cpu, dp_replicate=p.dp_replicate))
        differences = parity.compare(resolved, job, torch.float64)
        assert any(each.name.startswith("loss") for each in differences)
        largest.append(max(each.relative for each in differences))
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


def test_difference():
    d = difference("x", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert (d.max_abs, d.relative, d.shape) == (0.5, pytest.approx(0.1), (2,))
    assert difference("x", torch.tensor([2.0]), torch.tensor([0.0])).relative == 2.0
    assert difference("x", torch.tensor([2.0]), torch.tensor([1.0]), floor=4.0).relative == 0.25
    assert difference("x", torch.tensor([9.0]), torch.tensor([8.0]), floor=4.0).relative == 0.125
    assert not difference("x", torch.tensor([float("nan")]), torch.tensor([0.0])).relative <= 1e9
