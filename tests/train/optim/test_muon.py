"""Muon against `torch.optim.Muon` and over shards; groups, learning rates and custom classes of the optimizer."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dualpipe.checkpoint import Checkpoints, load, training_state
from dualpipe.hf.model import TransformersModel
from dualpipe.models import read_config
from dualpipe.nn import Linear
from dualpipe.nn.deferral import local
from dualpipe.nn.init import seeded_normal_
from dualpipe.parallel.mesh import build_mesh
from dualpipe.plan.memory import estimate
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule import build
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.load import load_config
from dualpipe.train.metrics import read_metrics
from dualpipe.train.optim import muon
from dualpipe.train.optim.groups import find_trainable_parameters, is_hidden_matrix
from dualpipe.train.optim.muon import Muon, orthogonalize
from dualpipe.train.optim.optimizer import Optimizer, build_optimizer
from dualpipe.train.step import build_model, resolve_run_dtypes
from dualpipe.train.trainer import train
from hf_families import config_of
from ranks import run_ranks
from run_files import MODEL, write_files

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("shape", [(16, 24), (40, 24), (32, 32), (1, 8)])
def test_muon_equals_torch_muon_bit_for_bit(shape):
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1]).view(shape).clone()) for _ in range(2))
    optimizer = Muon([ours], lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        assert torch.equal(ours, theirs)


def test_matrices_of_a_stack_are_orthogonalized_separately():
    stack = nn.Parameter(torch.randn(5, 16, 24))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    large = nn.Parameter(torch.randn(32, 24))  # so that two of the stack are computed together
    optimizer, reference = Muon([stack, large], lr=0.02), Muon(alone, lr=0.02)
    assert sorted(batch.num_matrices for batch in optimizer._unsharded) == [1, 1, 2, 2]
    for _ in range(2):
        stack.grad, large.grad = torch.randn_like(stack), torch.randn_like(large)
        for matrix, grad in zip(alone, stack.grad):
            matrix.grad = grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in alone]))


@pytest.mark.parametrize(("coefficients", "low", "high"), [("jordan", 0.65, 1.25), ("polar_express", 0.85, 1.15)])
def test_singular_values_are_about_1(coefficients, low, high):
    """Jordan's coefficients leave them within 0.7 and 1.2, but for the rounding of bf16; Polar Express nearer to 1."""
    u, _, v = torch.linalg.svd(torch.randn(3, 48, 64), full_matrices=False)
    matrices = u @ torch.diag_embed(torch.logspace(0, -1.5, 48).expand(3, 48)) @ v
    values = torch.linalg.svdvals(orthogonalize(matrices, coefficients).float())
    assert low < values.min() and values.max() < high
    alone = torch.linalg.svdvals(orthogonalize(matrices[0].mT, coefficients).float())
    torch.testing.assert_close(alone, values[0], atol=0.02, rtol=0)


def test_a_norm_that_is_not_finite_changes_nothing():
    model = nn.Sequential(Linear(8, 8, bias=False))
    optimizer = Optimizer([model], lr=0.1, name="muon", **ADAMW)
    (weight,) = model.parameters()
    for grad, norm, moves in ((1.0, 1.0, True), (float("nan"), float("nan"), False), (1.0, float("inf"), False)):
        before = [t.detach().clone() for t in optimizer.state_tensors()[weight].values()]
        weight.grad = torch.full((8, 8), grad)
        optimizer.step(0.1, torch.tensor(norm))
        after = list(optimizer.state_tensors()[weight].values())
        assert [torch.equal(a, b) for a, b in zip(before, after)] == [not moves] * 2


def test_bf16_parameters_have_masters_and_moments_may_be_bf16():
    torch.manual_seed(0)
    narrow, wide = (nn.Sequential(Linear(24, 16, bias=False, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    wide.load_state_dict(narrow.state_dict())
    optimizers = [Optimizer([model], lr=0.02, name="muon", moments=moments, **ADAMW)
                  for model, moments in ((narrow, torch.bfloat16), (wide, torch.float32))]
    for _ in range(4):
        grad = torch.randn(16, 24)
        for model, optimizer in zip((narrow, wide), optimizers):
            model[0].weight.grad = grad.clone()
            optimizer.step(0.02)
    state = optimizers[0].state_tensors()[narrow[0].weight]
    assert state["momentum_buffer"].dtype is torch.bfloat16 and state["master"].dtype is torch.float32
    assert torch.equal(narrow[0].weight, state["master"].bfloat16())
    torch.testing.assert_close(state["master"], wide[0].weight.detach(), atol=2e-3, rtol=0)  # of a bf16 mean


# -- over ranks


def _model(rank, path, dp, ep):
    config = load_config(path, ["--parallel.pp", "1", "--parallel.dp", str(dp), "--parallel.ep", str(ep)])
    mesh = build_mesh(1, dp, ep, torch.device("cpu")) if dp * ep > 1 else None
    hub = read_config(config.model.config)
    return build_model(hub, build("1f1b", 1, 1), 0, dtypes=resolve_run_dtypes(Resolved.of(config, hub), {}),
                       device=torch.device("cpu"), mesh=mesh)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _updated(rank, path, dp, ep):
    """Return the parameters after three steps with gradients that depend on their names, and the elements sent."""
    model, sent, send = _model(rank, path, dp, ep), [], dist.all_to_all_single
    optimizer = Optimizer(model.stages, lr=0.02, name="muon", **ADAMW)

    def counted(received, tensor, received_sizes, sizes, **options):
        sent.append(sum(sizes) - sizes[dist.get_rank(options["group"])])
        return send(received, tensor, received_sizes, sizes, **options)

    dist.all_to_all_single = counted
    try:
        for step in range(3):
            for stage in model.stages:
                for name, parameter in stage.named_parameters():
                    parameter.grad = torch.empty_like(parameter)
                    seeded_normal_(parameter.grad, std=1.0, seed=step, name=name)
            optimizer.step(0.02)
    finally:
        dist.all_to_all_single = send
    (stage,) = model.stages
    return {name: _whole(p.detach()).numpy() for name, p in stage.named_parameters()}, sum(sent)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow),
                                        pytest.param(3, 1, marks=pytest.mark.slow)])
def test_shards_give_the_same_update_and_send_the_documented_amount(tmp_path, dp, ep):
    path = str(write_files(tmp_path, MODEL | {"hidden_size": 28, "head_dim": 14}))  # rows that do not divide
    (expected, nothing), = run_ranks(_updated, 1, path, 1, 1)
    by_rank = run_ranks(_updated, dp * ep, path, dp, ep)
    assert nothing == 0
    for parameters, _ in by_rank:
        for name, values in parameters.items():
            torch.testing.assert_close(torch.from_numpy(values), torch.from_numpy(expected[name]), atol=1e-5, rtol=0,
                                       msg=name)
    layers, experts = MODEL["num_hidden_layers"], MODEL["num_experts"]
    attention, experts = 28 * 14 * (2 + 1 + 1 + 2) * layers, 3 * 28 * 32 * experts * layers
    # Sent and returned in three steps: all elements but those that stay on a rank. FSDP2 shards experts over dp through
    # their matrices if there are several ep ranks, and between them with one.
    shared = attention * (1 - 1 / (dp * ep)) + (experts * (1 - 1 / dp) if ep > 1 else 0)
    assert sum(sent for _, sent in by_rank) == pytest.approx(2 * 3 * shared, rel=0.02)  # rows do not divide


def _matrices_in_flight(rank):
    """Return, for each matrix that this rank computes, the number of gathers that had begun and were not computed."""
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))["dp"]
    parameters = [nn.Parameter(DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)])) for _ in range(7)]
    optimizer, gathers, in_flight = Muon(parameters, lr=0.1), [], []
    gather, compute = optimizer._gather, muon.orthogonalize
    optimizer._gather = lambda *arguments: gathers.append(1) or gather(*arguments)
    muon.orthogonalize = lambda *arguments: in_flight.append(len(gathers) - len(in_flight)) or compute(*arguments)
    try:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        muon.orthogonalize = compute
    return in_flight


def test_at_most_one_more_matrix_is_in_flight():
    assert run_ranks(_matrices_in_flight, 2) == [[2, 2, 2, 1], [2, 2, 2]]


def _without_gradient(rank):
    """Return whether each of three shared matrices and its momentum change, where the second has no gradient."""
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))["dp"]
    parameters = [nn.Parameter(DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)])) for _ in range(3)]
    optimizer = Muon(parameters, lr=0.1, weight_decay=0.5)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"].fill_(1.0)
        parameter.grad = torch.full_like(parameter, 2.0)
    parameters[1].grad = None
    optimizer.step()
    return [[not bool((local(tensor) == 1).all()) for tensor in (p.detach(), optimizer.state[p]["momentum_buffer"])]
            for p in parameters]


def test_a_shared_matrix_without_a_gradient_does_not_change():
    assert run_ranks(_without_gradient, 2) == [[[True, True], [False, False], [True, True]]] * 2


# -- groups, rates and other classes


def _build(path, *options, steps=1):
    config = load_config(path, ["--parallel.pp", "1", *options])
    hub = read_config(config.model.config)
    resolved = Resolved.of(config, hub)
    dtypes = resolve_run_dtypes(resolved, {})
    model = build_model(hub, build("1f1b", 1, 1), 0, dtypes=dtypes, device=torch.device("cpu"))
    return config, model, build_optimizer(
        config.optimizer, hub, model.stages, moments=resolved.dtypes.moments, masters=model.masters)


def test_muon_updates_hidden_matrices_only(tmp_path):
    _, model, optimizer = _build(str(write_files(tmp_path)), "--optimizer.name", "muon")
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
    _, model, optimizer = _build(
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
    _, _, optimizer = _build(
        str(write_files(tmp_path)), "--optimizer.name", name, "--optimizer.groups", "*.q_proj,algorithm=muon",
        "--optimizer.momentum", "0.8", "--optimizer.nesterov", "False", "--optimizer.coefficients", "polar_express")
    inner = optimizer._inner["muon"]
    assert inner._coefficients == "polar_express"
    assert {(group["momentum"], group["nesterov"]) for group in inner.param_groups} == {(0.8, False)}


def test_a_custom_optimizer_updates_and_resumes(tmp_path):
    path = str(write_files(tmp_path))
    options = ("--optimizer.name", "torch.optim.NAdam", "--optimizer.options", json.dumps({"momentum_decay": 0.01}))
    (_, model, optimizer), (_, twin, _) = _build(path, *options), _build(path)
    ours, theirs = ([*built.stages[0].parameters()] for built in (model, twin))
    reference = torch.optim.NAdam([{"params": [p for p in theirs if p.dim() >= 2], "weight_decay": 0.1},
                                   {"params": [p for p in theirs if p.dim() < 2], "weight_decay": 0.0}],
                                  lr=3e-4, momentum_decay=0.01)
    for step in range(4):
        if step == 2:
            with Checkpoints(tmp_path / "saved") as checkpoints:
                checkpoints.save(training_state(model.stages, optimizer), step=2)
            _, model, optimizer = _build(path, *options)
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
    (_, model, optimizer), (_, others, now) = _build(path, *saved), _build(path, *changed)
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
            _build(path, "--optimizer.name", f"torch.optim.{name}") for name in (before, after))
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
    optimizer = Optimizer([model], lr=0.1, name=f"torch.optim.{name}", **ADAMW)
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
    (("--optimizer.groups", "*.gate,rate=1"), "a group needs a pattern and at least one of lr"),
    (("--optimizer.groups", "*.gate"), "a group needs a pattern and at least one of lr"),
    (("--optimizer.groups", "*.gate,algorithm=sgd"), "algorithm = 'sgd' is not a valid choice"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.groups", "*.gate,algorithm=muon"), "not torch.optim.SGD"),
    (("--optimizer.groups", "nope,lr=1"), r"no trained parameter matches 'nope'; nearest: \w"),
    (("--optimizer.groups", "*.gate,lr=inf"), "and both finite"),
    (("--optimizer.groups", "norm,algorithm=muon"), r"norm\.weight \(32,\) is neither a matrix nor a stack"),
    (("--optimizer.name", "torch.optim.SGD", "--optimizer.options", '{"lr": 9}'), "leave out lr and weight_decay"),
    (("--optimizer.name", "torch.optim.Rprop", "--optimizer.lr", "1e-3"), "it has no weight_decay: set optimizer"),
    (("--optimizer.name", "muon", "--optimizer.momentum", "1"), "must be at least 0 and less than 1"),
    (("--optimizer.layer_decay", "0"), "must be above 0 and at most 1"),
])
def test_refuses_invalid_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        _build(str(write_files(tmp_path)), *options)
    assert str(caught.value).count(options[-2].removeprefix("--")) <= 1, "the setting is named once"


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match=r"got a parameter of shape \(3,\); Muon is for matrices and stacks"):
        Muon([nn.Parameter(torch.zeros(3))])


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    path = str(write_files(tmp_path))
    options = ["--parallel.pp", "1", "--optimizer.name", "muon", "--checkpoint.interval", "2", "--train.steps", "4"]

    def losses(folder, *more):
        train(load_config(path, [*options, "--output.dir", str(tmp_path / folder), *more]), RankInfo(0, 1, 0, 1))
        return [row["loss"] for row in read_metrics(tmp_path / folder / "metrics.jsonl")]

    whole = losses("whole")
    (saved,) = (tmp_path / "whole").rglob("step-00000002")
    assert losses("rest", "--checkpoint.resume", str(saved)) == whole[2:]
