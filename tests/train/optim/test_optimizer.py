"""fp32 masters, decay, moments and groups of the optimizer."""

import math

import pytest
import torch
from torch import nn

from dualpipe import Pipeline
from dualpipe.models import config_from_dict
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import OptimizerGroup
from dualpipe.train.metrics import read_metrics
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.trainer import train
from hub import FAMILIES, TINY
from models import whole

ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def test_vectors_are_not_decayed():
    model = make_model()
    optimizer = Optimizer([model], **{**ADAMW, "weight_decay": 0.5})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step(0.1)
    for name, p in model.named_parameters():
        factor = 0.95 if p.dim() == 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, msg=name)


NOT_DECAYED = {  # by family, the last two segments of the names
    "qwen3_moe": {"input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight",
                  "norm.weight"},
    "deepseek_v2": {"input_layernorm.weight", "post_attention_layernorm.weight", "kv_a_layernorm.weight",
                    "norm.weight"},
    "deepseek_v3": {"input_layernorm.weight", "post_attention_layernorm.weight", "q_a_layernorm.weight",
                    "kv_a_layernorm.weight", "norm.weight"},
    "gpt_oss": {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight", "self_attn.sinks",
                "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "gate.bias", "gate_up_proj.bias",
                "down_proj.bias"},
}


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("family", NOT_DECAYED)
def test_matrices_are_decayed_whatever_the_shapes_of_other_parameters(family, algorithm):
    config = config_from_dict({"model_type": family} | ({"qwen3_moe": TINY} | FAMILIES)[family])
    stage = whole(config)
    optimizer = Optimizer([stage], **{**ADAMW, "weight_decay": 0.5}, name=algorithm)
    states = optimizer.state_tensors()
    kept: set[str] = set()
    for name, parameter in stage.named_parameters():
        nn.init.ones_(parameter)  # biases begin at zero, where no decay shows
        parameter.grad = torch.zeros_like(parameter)
        short = ".".join(name.split(".")[-2:])
        if short in NOT_DECAYED[family]:
            assert "momentum_buffer" not in states[parameter], name
            kept.add(short)
    optimizer.step(0.1)
    assert kept == NOT_DECAYED[family]
    for name, parameter in stage.named_parameters():
        factor = 1.0 if ".".join(name.split(".")[-2:]) in kept else 0.95
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, factor), msg=name)


def test_a_group_cannot_give_stacked_biases_to_muon():
    stage = whole(config_from_dict({"model_type": "gpt_oss"} | FAMILIES["gpt_oss"]))
    groups = [OptimizerGroup("*.experts", algorithm="muon")]
    with pytest.raises(ValueError, match=r"gate_up_proj\.bias \(4, 64\) is neither a matrix nor a stack"):
        Optimizer([stage], **ADAMW, groups=groups)
    optimizer = Optimizer([stage], **ADAMW, groups=[OptimizerGroup("*.experts.*.weight", algorithm="muon")])
    assert optimizer.state_tensors()[stage.layers["0"].mlp.experts.down_proj.weight].keys() == {
        "master", "momentum_buffer"}


def test_equals_torch_adamw_and_resumes():
    ours, theirs = make_model(), make_model()
    optimizer, reference = Optimizer([ours], **ADAMW), torch.optim.AdamW(theirs.parameters(), **ADAMW, fused=True)
    x = torch.randn(4, 5)
    for step in range(4):
        if step == 2:  # as after a restart
            before = optimizer.state_tensors()
            optimizer = Optimizer([ours], **ADAMW)
            for parameter, tensors in optimizer.state_tensors().items():
                for name, tensor in tensors.items():
                    tensor.detach().copy_(before[parameter][name])
            optimizer.round_parameters()
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().mean().backward()
        optimizer.step(0.1)
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q)


def test_bf16_parameters_do_not_lose_small_updates():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Optimizer([nn.ParameterList([weight])], **ADAMW)
    for _ in range(20):
        weight.grad = torch.ones(4, 4)  # fp32 for a bf16 parameter
        optimizer.step(1e-3)  # one update is below bf16's spacing of 2^-8 under 1
        optimizer.zero_grad()
    assert weight.dtype is torch.bfloat16
    torch.testing.assert_close(weight.detach().float(), torch.full((4, 4), 0.98), atol=2**-8, rtol=0)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, moments):
    weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = Optimizer([nn.ParameterList([weight])], **{**ADAMW, "weight_decay": 0.5}, moments=moments)

    def step(gradient, norm):
        weight.grad = torch.full((4, 4), gradient)
        optimizer.step(1e-2, torch.tensor(norm, dtype=torch.float64))
        return [tensor.clone() for tensor in (weight, *optimizer.state_tensors()[weight].values())]

    first = step(1.0, 4.0)
    for gradient, norm in ((math.nan, math.nan), (3e38, math.inf)):
        assert all(map(torch.equal, step(gradient, norm), first))
    assert not any(map(torch.equal, step(1.0, 4.0), first))


def test_tied_parameters_are_updated_once():
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    assert len(Optimizer([a, b], **ADAMW).parameters) == 1


def test_a_norm_that_is_not_finite_ends_the_training_with_the_parameters_as_they_were(run_toml, tmp_path, monkeypatch):
    clip, before = Pipeline.clip_grad_norm_, []

    def poisoned(self, max_norm):
        before.append([(p, p.detach().clone()) for p in self.parameters()])
        if len(before) == 2:
            next(self.parameters()).grad.view(-1)[0] = float("nan")
        return clip(self, max_norm)

    monkeypatch.setattr(Pipeline, "clip_grad_norm_", poisoned)
    config = load_config(run_toml, ["--parallel.pp", "1", "--output.dir", str(tmp_path / "out")])
    with pytest.raises(FloatingPointError, match=r"the gradient norm is nan at step 2; lower optimizer\.lr"):
        train(config, RankInfo(0, 1, 0, 1))
    assert all(torch.equal(p, value) for p, value in before[1])
    assert not all(torch.equal(p, value) for p, value in before[0])


def test_bf16_moments_are_updated_in_fp32_and_rounded():
    weight = nn.Parameter(torch.randn(64, 3))
    expected, first, second = weight.detach().clone(), torch.zeros(64, 3), torch.zeros(64, 3)
    optimizer = Optimizer([nn.ParameterList([weight])], **{**ADAMW, "weight_decay": 0.1}, moments=torch.bfloat16)
    for step in range(1, 6):
        weight.grad = torch.randn(64, 3)
        first = 0.9 * first + 0.1 * weight.grad
        second = 0.95 * second + 0.05 * weight.grad.square()
        update = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * update
        first, second = first.bfloat16().float(), second.bfloat16().float()
        optimizer.step(0.01)
        state = optimizer.state_tensors()[weight]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.bfloat16)
        # A rounding that falls to the other side for the last bit of float32 is 2^-8 of a moment.
        torch.testing.assert_close(state["exp_avg"].float(), first, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].float(), second, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("beta", "decays"), [(0.9, True), (0.9955, True), (0.999, False)])
def test_bf16_moments_decay_by_the_betas_that_are_allowed(beta, decays):
    """For every value of the mantissa. 0.999 does not decay them, so it is refused."""
    weight = nn.Parameter(torch.zeros(128, 1))
    optimizer = Optimizer([nn.ParameterList([weight])], **{**ADAMW, "betas": (beta, beta)}, moments=torch.bfloat16)
    moment = optimizer.state_tensors()[weight]["exp_avg_sq"]
    moment.copy_((1 + torch.arange(128) / 128).unsqueeze(1))
    before, weight.grad = moment.clone(), torch.zeros(128, 1)
    optimizer.step(0.1)
    assert torch.all(moment < before) if decays else torch.equal(moment, before)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_with_bf16_moments_has_the_same_loss(run_toml, tmp_path):
    """Within a hundredth, over the last third of its steps."""
    means = []
    for moments in ("fp32", "bf16"):
        out = tmp_path / moments
        options = ["--parallel.pp", "1", "--train.steps", "60", "--train.eval_batches", "0", "--output.dir", str(out)]
        assert train(load_config(run_toml, [*options, "--optimizer.moments", moments]), RankInfo(0, 1, 0, 1)) == 0
        losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl")]
        means.append(sum(losses[40:]) / 20)
    assert means[1] == pytest.approx(means[0], rel=0.01) and means[0] != means[1]
    assert means[0] < 0.9 * losses[0]
