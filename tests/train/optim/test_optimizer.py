"""The optimizer: fp32 masters, decay, moments, groups, and custom classes."""

import json
import math

import pytest
import torch
from torch import nn

from dualpipe.checkpoint import Checkpoints, load, training_state
from dualpipe.hf.model import TransformersModel
from dualpipe.models import config_from_dict, read_config
from dualpipe.nn import Linear
from dualpipe.plan.memory import estimate
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule import build
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import OptimizerGroup
from dualpipe.train.metrics import read_metrics
from dualpipe.train.optim.groups import find_trainable_parameters, is_hidden_matrix
from dualpipe.train.optim.optimizer import Optimizer, build_optimizer
from dualpipe.train.step import build_model, resolve_run_dtypes
from dualpipe.train.trainer import train
from hf_families import config_of
from hub import FAMILIES, TINY
from models import whole
from run_files import write_files

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


# -- built from a configuration: groups, Muon and custom classes


def build_from(path, *options):
    config = load_config(path, ["--parallel.pp", "1", *options])
    hub = read_config(config.model.config)
    resolved = Resolved.of(config, hub)
    dtypes = resolve_run_dtypes(resolved, {})
    model = build_model(hub, build("1f1b", 1, 1), 0, dtypes=dtypes, device=torch.device("cpu"))
    return config, model, build_optimizer(
        config.optimizer, hub, model.stages, moments=resolved.dtypes.moments, masters=model.masters)


def test_muon_updates_hidden_matrices_only(tmp_path):
    _, model, optimizer = build_from(str(write_files(tmp_path)), "--optimizer.name", "muon")
    (stage,) = model.stages
    names = {p: name for name, p in stage.named_parameters()}
    updated = {names[p] for p in optimizer.parameters if "momentum_buffer" in optimizer.state_tensors()[p]}
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    assert updated == {name for name in names.values() if name.split(".")[-2] in kinds}
    assert estimate(load_config(str(tmp_path / "run.toml"), ["--parallel.pp", "1", "--optimizer.name", "muon"]),
                    model.config, activations=False)[0].optimizer == sum(
        4 * p.numel() * (1 if name in updated else 2) for p, name in names.items())


def test_groups_set_learning_rate_decay_and_algorithm(tmp_path):
    groups = ("*.mlp.gate,lr=1e-3", "*.self_attn,weight_decay=0.5,algorithm=adamw", "layers.0,lr=0.5")
    _, model, optimizer = build_from(
        str(write_files(tmp_path)), "--optimizer.name", "muon", "--optimizer.lr", "0.01", "--optimizer.layer_decay",
        "0.5", "--optimizer.groups", *groups)
    (stage,) = model.stages
    parameters = dict(stage.named_parameters())

    def of(name):
        algorithm, group = optimizer._groups[parameters[name]]
        return algorithm, group["lr_factor"] * 0.01, group["weight_decay"]

    assert of("layers.0.mlp.gate.weight") == ("adamw", 0.5, 0.1)
    assert of("layers.3.mlp.gate.weight") == ("adamw", pytest.approx(1e-3), 0.1)
    assert of("layers.3.self_attn.q_proj.weight") == ("adamw", pytest.approx(0.01 * 0.5), 0.5)
    assert of("layers.1.mlp.experts.down_proj.weight") == ("muon", pytest.approx(0.01 * 0.5**3), 0.1)
    assert of("embed_tokens.weight") == ("adamw", pytest.approx(0.01 * 0.5**5), 0.1)
    assert of("lm_head.weight") == ("adamw", 0.01, 0.1)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.01)
    for name, share, decay in (("layers.3.self_attn.q_proj.weight", 0.5, 0.5), ("lm_head.weight", 1, 0.1)):
        torch.testing.assert_close(parameters[name].detach(), before[name] * (1 - 0.01 * share * decay))


@pytest.mark.parametrize("family, expected", [
    ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ("olmoe", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}),
    ("granitemoe", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}),
])
def test_routers_of_transformers_models_are_not_muon_matrices(family, expected):
    stages = TransformersModel.from_dict(config_of(family).to_dict()).meta_stages()
    parameters = find_trainable_parameters(stages).items()
    selected = {name for parameter, (name, owner) in parameters if is_hidden_matrix(name, owner, parameter)}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in selected} == expected


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_group_with_muon_has_the_settings_of_muon(tmp_path, name):
    _, _, optimizer = build_from(
        str(write_files(tmp_path)), "--optimizer.name", name, "--optimizer.groups", "*.q_proj,algorithm=muon",
        "--optimizer.momentum", "0.8", "--optimizer.nesterov", "False", "--optimizer.coefficients", "polar_express")
    inner = optimizer._inner["muon"]
    assert inner._coefficients == "polar_express"
    assert {(group["momentum"], group["nesterov"]) for group in inner.param_groups} == {(0.8, False)}


def test_a_custom_optimizer_updates_and_resumes(tmp_path):
    path = str(write_files(tmp_path))
    options = ("--optimizer.name", "torch.optim.NAdam", "--optimizer.options", json.dumps({"momentum_decay": 0.01}))
    (_, model, optimizer), (_, twin, _) = build_from(path, *options), build_from(path)
    ours, theirs = ([*built.stages[0].parameters()] for built in (model, twin))
    reference = torch.optim.NAdam([{"params": [p for p in theirs if p.dim() >= 2], "weight_decay": 0.1},
                                   {"params": [p for p in theirs if p.dim() < 2], "weight_decay": 0.0}],
                                  lr=3e-4, momentum_decay=0.01)
    for step in range(4):
        if step == 2:
            with Checkpoints(tmp_path / "saved") as checkpoints:
                checkpoints.save(training_state(model.stages, optimizer), step=2)
            _, model, optimizer = build_from(path, *options)
            load(next((tmp_path / "saved").glob("step-*")), training_state(model.stages, optimizer))
            optimizer.round_parameters()
            ours = [*model.stages[0].parameters()]
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        optimizer.step(3e-4, torch.tensor(1.0))
        reference.step()
        optimizer.step(3e-4, torch.tensor(float("nan")))  # which changes nothing
    assert all(map(torch.equal, ours, theirs))


class Counting(torch.optim.SGD):
    """SGD that counts its steps in its groups."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_a_resumed_custom_optimizer_has_the_settings_of_the_run(tmp_path, monkeypatch):
    path, name = str(write_files(tmp_path)), ("--optimizer.name", "torch.optim.Counting")
    monkeypatch.setattr(torch.optim, "Counting", Counting, raising=False)
    saved = (*name, "--optimizer.options", '{"momentum": 0.9}', "--optimizer.layer_decay", "0.5")
    changed = (*name, "--optimizer.options", '{"dampening": 0.5}', "--optimizer.weight_decay", "0",
               "--optimizer.groups", "*.mlp,lr=1e-9")
    (_, model, optimizer), (_, others, now) = build_from(path, *saved), build_from(path, *changed)
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(training_state(model.stages, optimizer), step=1)
    load(tmp_path / "saved", training_state(others.stages, now))
    assert {(g["momentum"], g["dampening"], g["weight_decay"], g["lr_factor"], g["count"])
            for g in now._inner[name[1]].param_groups} == {(0, 0.5, 0, 1.0, 1), (0, 0.5, 0, 1e-9 / 3e-3, 1)}
    resumed, before = now._inner[name[1]].state, optimizer._inner[name[1]].state
    assert all(torch.equal(resumed[here]["momentum_buffer"], before[there]["momentum_buffer"])
               for here, there in zip(now.parameters, optimizer.parameters))


def test_another_optimizer_class_starts_from_no_state_if_allowed(tmp_path):
    path, allow = str(write_files(tmp_path)), ["optimizer/*"]
    for before, after in (("SGD", "NAdam"), ("NAdam", "SGD"), ("Adam", "NAdam")):
        (_, model, optimizer), (_, others, now) = (
            build_from(path, "--optimizer.name", f"torch.optim.{name}") for name in (before, after))
        for parameter in optimizer.parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-3)
        with Checkpoints(tmp_path / before) as checkpoints:
            checkpoints.save(training_state(model.stages, optimizer), step=1)
        with pytest.raises(ValueError, match=rf"optimizer/\S+ is the state of the optimizer {before}, which {after}"):
            load(tmp_path / before, training_state(others.stages, now))
        load(tmp_path / before, training_state(others.stages, now), allow=allow)
        (inner,) = now._inner.values()
        assert not inner.state and all(map(torch.equal, optimizer.parameters, now.parameters))
        for parameter in now.parameters:
            parameter.grad = torch.ones_like(parameter)
        now.step(1e-3)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "Adafactor", "NAdam", "RMSprop"])
def test_torch_optimizers_update_only_if_the_norm_is_finite(name):
    model = nn.Sequential(Linear(8, 8, bias=False))
    optimizer = Optimizer([model], name=f"torch.optim.{name}", **ADAMW | {"weight_decay": 0.1})
    (weight,) = model.parameters()
    for norm in (1.0, float("inf")):
        before = weight.detach().clone()
        weight.grad = torch.ones(8, 8)
        optimizer.step(0.1, torch.tensor(norm))
        assert torch.equal(weight, before) == (norm != 1.0)


@pytest.mark.parametrize(("options", "message"), [
    (("--optimizer.name", "sgd"), "optimizer.name = 'sgd': give adamw, muon, or the import path"),
    (("--optimizer.name", "torch.optim.Nothing"), "has no attribute 'Nothing'; give adamw, muon"),
    (("--optimizer.name", "torch.nn.Linear"), "is not a torch.optim.Optimizer"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.options", '{"rho": 1}'), "unexpected keyword argument 'rho'"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.options", "{rho"), "optimizer.options = '{rho': not JSON"),
    (("--optimizer.options", '{"rho": 1}'), "give a JSON object, and optimizer.name the import path"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.moments", "bf16"), "only adamw and muon support it"),
    (("--optimizer.moments", "bf16", "--optimizer.momentum", "0.998"), "optimizer.momentum = 0.998: a mean in bf16"),
    (("--optimizer.groups", "*.gate,lr=fast"), "lr = 'fast' has the wrong type; it must be a number"),
    (("--optimizer.groups", "*.gate"), "a group needs a pattern and at least one of lr"),
    (("--optimizer.groups", "*.gate,algorithm=sgd"), "algorithm = 'sgd' is not a valid choice"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.groups", "*.gate,algorithm=muon"), "not torch.optim.SGD"),
    (("--optimizer.groups", "nope,lr=1"), r"no trained parameter matches 'nope'; nearest: \w"),
    (("--optimizer.groups", "*.gate,lr=inf"), "and both finite"),
    (("--optimizer.groups", "norm,algorithm=muon"), r"norm\.weight \(32,\) is neither a matrix nor a stack"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.options", '{"lr": 9}'), "leave out lr and weight_decay"),
    (("--optimizer.name", "torch.optim.Rprop", "--optimizer.lr", "1e-3"), "it has no weight_decay: set optimizer"),
])
def test_refuses_invalid_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_from(str(write_files(tmp_path)), *options)
    assert str(caught.value).count(options[-2].removeprefix("--")) <= 1, "the setting is named once"


# -- runs


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
