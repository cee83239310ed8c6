"""Muon against `torch.optim.Muon`, and over shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dualpipe.models import read_config
from dualpipe.nn import Linear
from dualpipe.nn.accumulators import local
from dualpipe.nn.init import seeded_normal_
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule import build
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.load import load_config
from dualpipe.train.metrics import read_metrics
from dualpipe.train.optim import muon
from dualpipe.train.optim.muon import Muon, orthogonalize
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import build_model, resolve_run_dtypes
from dualpipe.train.trainer import train
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
