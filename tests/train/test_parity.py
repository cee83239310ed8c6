"""`dualpipe parity` says whether the pipelined model is the unpipelined one, and notices when it is not."""

import pytest
import torch

from dualpipe.train import model, parity
from dualpipe.train.config import load_config
from dualpipe.train.launch import RankInfo
from dualpipe.train.parity import difference

ALONE = RankInfo(0, 1, 0, 1)


def run(run_toml, *overrides, dtype="float64", tolerance=None):
    config = load_config(run_toml, ["--parallel.pp", "1", "--parallel.device", "cpu", *overrides])
    return parity.check(config, ALONE, dtype=dtype, tolerance=tolerance, worst=3)


@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_rank_passes(run_toml, capsys, schedule, dtype):
    assert run(run_toml, "--parallel.schedule", schedule, dtype=dtype) == 0
    out = capsys.readouterr().out
    assert "parity passed" in out and "relative" in out


def broken_gradient(pipelined_step):
    def step(built, pipeline, problem):
        losses = pipelined_step(built, pipeline, problem)
        built.stages[0].get_parameter("layers.0.self_attn.q_proj.weight").grad[0, 0] += 1e-7
        return losses

    return step


def missing_gradient(pipelined_step):
    def step(built, pipeline, problem):
        losses = pipelined_step(built, pipeline, problem)
        built.stages[-1].norm.weight.grad = None
        return losses

    return step


def wrong_loss(pipelined_step):
    return lambda *arguments: pipelined_step(*arguments).flip(0)


@pytest.mark.parametrize(
    ("breaking", "name"),
    [(broken_gradient, "q_proj.weight"), (missing_gradient, "norm.weight"), (wrong_loss, "loss of the micro-batches")],
)
def test_a_wrong_pipeline_fails_and_is_named(run_toml, capsys, monkeypatch, breaking, name):
    monkeypatch.setattr(parity, "pipelined_step", breaking(parity.pipelined_step))
    assert run(run_toml) == 1
    out = capsys.readouterr().out
    assert "parity FAILED: 1 of" in out
    assert name in out.split("━┩\n")[1].splitlines()[0], "the worst comes first"


def test_a_wrong_criterion_fails(run_toml, monkeypatch):
    criteria = iter([model.micro_batch_loss(3), model.micro_batch_loss(4)])
    monkeypatch.setattr(parity, "micro_batch_loss", lambda num_chunks: next(criteria))
    assert run(run_toml) == 1


def test_difference():
    d = difference("x", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert (d.max_abs, d.relative, d.shape) == (0.5, pytest.approx(0.1), (2,))
    assert difference("x", torch.tensor([2.0]), torch.tensor([0.0])).relative == 2.0
    assert not difference("x", torch.tensor([float("nan")]), torch.tensor([0.0])).relative <= 1e9
