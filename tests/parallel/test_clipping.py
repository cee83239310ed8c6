"""`Pipeline.clip_grad_norm_` equals torch's `clip_grad_norm_` of the whole model, on any number of ranks."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dualpipe import DualPipeV, Pipeline
from dualpipe.models import Qwen3MoeConfig
from dualpipe.parallel.clipping import clip_grad_norm_
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.step import build_model, build_whole
from models import compare_gradients
from ranks import run_ranks
from toys import make_stages, relative_error, stages_of_rank

CPU = torch.device("cpu")
CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, initializer_range=0.3,
)
NORMS = [(0.1, 2.0), (0.01, math.inf), (0.5, 1.0), (0.1, 3.5), (1e6, 2.0), (math.inf, 2.0), (0.0, 2.0)]


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters()]


# -- a real model


def as_the_whole(
    rank: int, shapes: list[tuple[int, int, int]], tied: bool, name: str = "dualpipev"
) -> list[tuple[float, float]]:
    """Return the errors by layout and norm, against the whole model.

    They are the relative error of the norm and the largest of a clipped gradient. The last pair is the error of an
    evaluation's loss, in which the first stage is done before the last one begins, and 0.
    """
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    found = []
    for shape in shapes:
        mesh = build_mesh(*shape, CPU)
        common = {"dtypes": torch.float64, "device": CPU}
        schedule = build(name, shape[0], 2)
        model = build_model(config, schedule, mesh["pp"].get_local_rank(), mesh=mesh, **common)
        whole = build_whole(config, **common)
        replicas, replica = Mesh.of(mesh).replicas, Mesh.of(mesh).replica
        rows = torch.randint(config.vocab_size, (2 * replicas, 7), generator=torch.Generator().manual_seed(0))
        pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule=schedule)
        mine = rows[2 * replica : 2 * replica + 2]
        step = partial(pipe.step, mine if model.has_first else None, num_chunks=2, criterion=MicroBatchLoss(2),
                       labels=mine if model.has_last else None)
        with torch.no_grad():
            losses, _ = step()
            evaluated = sum(MicroBatchLoss(2)(whole(part[None]), part[None]) for part in mine)
        step()
        for part in rows:
            MicroBatchLoss(len(rows))(whole(part[None]), part[None]).backward()
        kept = [g.clone() for g in gradients(*model.stages)], [g.clone() for g in gradients(whole)]
        for max_norm, norm_type in NORMS:
            for module, grads in zip((pipe, whole), kept):
                for p, g in zip((p for p in module.parameters() if p.grad is not None), grads):
                    p.grad = g.clone()
            norm = pipe.clip_grad_norm_(max_norm, norm_type)
            expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
            assert (norm.shape, norm.dtype) == ((), torch.float64)
            worst = max(d.relative for d in compare_gradients(model.stages, whole)) if max_norm else float(
                max(g.to_local().abs().max() if isinstance(g, DTensor) else g.abs().max() for g in gradients(pipe)))
            found.append((abs(norm.item() / expected.item() - 1), worst))
        found.append((0.0 if losses is None else abs(losses.sum().item() / evaluated.item() - 1), 0.0))
    return found


@pytest.mark.parametrize("shapes, tied, name", [
    ([(2, 1, 1)], True, "dualpipev"),
    pytest.param([(2, 2, 1), (2, 1, 2)], False, "dualpipev", marks=pytest.mark.slow),
    pytest.param([(2, 2, 1), (2, 1, 2)], True, "dualpipev", marks=pytest.mark.slow),
    pytest.param([(1, 2, 2)], True, "dualpipev", marks=pytest.mark.slow),
    ([(2, 1, 1)], True, "1f1b"),
    pytest.param([(2, 2, 1), (2, 1, 2), (4, 1, 1)], True, "1f1b", marks=pytest.mark.slow),
    ([(2, 1, 1)], True, "interleaved_1f1b"),
], ids=str)
def test_norm_and_gradients_are_those_of_the_whole_model(shapes, tied, name):
    for found in run_ranks(as_the_whole, math.prod(shapes[0]), shapes, tied, name):
        assert len(found) == len(shapes) * (len(NORMS) + 1)
        assert max(max(errors) for errors in found) < 1e-10


# -- what one rank can hold


def with_gradients(shapes=((4, 5), (7,), (3, 2), (6, 6), (1,)), dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return parameters


def flat(parameters) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


@pytest.mark.parametrize("norm_type", [2, 1, 2.5, math.inf])
def test_one_rank_without_torch_distributed(norm_type):
    stages, expected = make_stages(2), make_stages(2)
    for stage in (*stages, *expected):
        for p in stage.parameters():
            p.grad = torch.arange(p.numel(), dtype=p.dtype).view_as(p) - 3
    pipe = DualPipeV(stages)
    stages[0].up.bias.grad = expected[0].up.bias.grad = None
    norm = pipe.clip_grad_norm_(1, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(nn.ModuleList(expected).parameters(), 1.0, norm_type))
    assert relative_error(flat(pipe.parameters()), flat(nn.ModuleList(expected).parameters())) < 1e-12


def test_tied_parameters_count_once():
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    a.weight.grad = torch.full((3, 3), 2.0)
    assert clip_grad_norm_([a.weight, b.weight], math.inf, device=CPU).item() == pytest.approx(6.0)
    assert DualPipeV([a, b]).clip_grad_norm_(3.0).item() == pytest.approx(6.0)
    assert a.weight.grad.norm().item() == pytest.approx(3.0)


def test_gradients_of_several_dtypes_are_measured_in_float32_at_least():
    parameters = [p for dtype in (torch.bfloat16, torch.float32, torch.float16) for p in with_gradients(dtype=dtype)]
    exact, before = flat(parameters).norm(), flat(parameters)
    norm = clip_grad_norm_(parameters, 0.5, device=CPU)
    assert abs(norm / exact - 1) < 1e-6  # in bfloat16, 2^-9 of each
    assert {p.grad.dtype for p in parameters} == {torch.bfloat16, torch.float32, torch.float16}
    assert relative_error(flat(parameters), before * (0.5 / exact)) < 2**-8


def test_sparse_gradients_and_those_of_empty_parameters():
    embedding, empty = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.zeros(0, 3))
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    empty.grad = torch.zeros(0, 3)
    for norm_type, expected in ((math.inf, 2.0), (2.0, math.sqrt(15.0))):
        norm = clip_grad_norm_([empty, embedding.weight], math.inf, norm_type, device=CPU)
        assert norm.item() == pytest.approx(expected)
    clip_grad_norm_([embedding.weight, empty], 1.0, device=CPU)
    assert embedding.weight.grad.to_dense().norm().item() == pytest.approx(1.0)


def test_no_gradients_at_all():
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, device=CPU).tolist() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite(bad, norm_type):
    """A non-finite norm is returned, or raises and leaves the gradients unchanged, as in torch."""
    (weight,) = with_gradients([(3,)])
    weight.grad[1] = bad
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match=f"the norm of the gradients is {bad}"):
        clip_grad_norm_([weight], 1.0, norm_type, error_if_nonfinite=True, device=CPU)
    torch.testing.assert_close(weight.grad, before, equal_nan=True, rtol=0, atol=0)
    assert str(clip_grad_norm_([weight], math.inf, norm_type, device=CPU).item()) == str(bad)
    torch.testing.assert_close(weight.grad, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("max_norm, norm_type", [(-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -math.inf)])
def test_norms_that_there_are_not(max_norm, norm_type):
    with pytest.raises(ValueError, match=r"norm_type must be above 0 and max_norm at least 0, got norm_type = "):
        clip_grad_norm_([], max_norm, norm_type, device=CPU)


class Events(TorchDispatchMode):
    """Logs when gradients are scaled, and when the host reads a value, which makes it wait."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_foreach_mul_", "_local_scalar_dense", "is_nonzero", "nonzero", "_to_copy"):
            wanted = name != "_to_copy" or torch.device((kwargs or {}).get("device", "meta")).type == "cpu"
            self.seen += [name] if wanted else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_the_host_waits_for_nothing_before_the_scaling_is_queued(error_if_nonfinite):
    pipe = DualPipeV(make_stages(2))
    for p in pipe.parameters():
        p.grad = torch.ones_like(p)
    with Events() as events:
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=error_if_nonfinite)
    assert events.seen[0] == "_foreach_mul_"
    assert ("_local_scalar_dense" in events.seen) == error_if_nonfinite


# -- several ranks


def share_of_ranks(rank: int) -> list:
    """Clip on two ranks with different plain parameters: one rank has none, or NaN is on one rank alone."""
    found = []
    for share in (((0, 3, 4), (1, 2)), ((0, 1, 2, 3, 4), ())):
        parameters = with_gradients()
        mine = [parameters[i] for i in share[rank]]
        for norm_type in (2.0, math.inf):
            norm = clip_grad_norm_(mine, 1e6, norm_type, group=dist.group.WORLD, device=CPU).item()
            found.append(norm / torch.linalg.vector_norm(flat(parameters), norm_type).item())
        clip_grad_norm_(mine, 1.0, group=dist.group.WORLD, device=CPU)
        square = torch.tensor(sum(p.grad.double().square().sum() for p in mine), dtype=torch.float64)
        dist.all_reduce(square)
        found.append(square.sqrt().item())
    parameters = with_gradients([(2,)])
    for culprit, norm_type in ((0, 2.0), (0, math.inf), (1, 2.0), (1, math.inf)):
        parameters[0].grad.fill_(math.nan if rank == culprit else 1.0)
        norm = clip_grad_norm_(parameters, math.inf, norm_type, group=dist.group.WORLD, device=CPU)
        found.append(1.0 if norm.isnan() else 0.0)
    return found


def test_plain_parameters_of_two_ranks():
    for found in run_ranks(share_of_ranks, 2):
        assert found == pytest.approx([1.0] * 10, rel=1e-5)


def on_meshes(rank: int) -> list:
    """Clip on a (2, 2) mesh.

    Gradients are sharded over both dimensions, over one of them or none, are sums not reduced yet, or exist on one rank
    alone. Replicated ones count once.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    layouts = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())]
    wholes = with_gradients([(4, 5), (3, 2), (6, 6), (4, 2), (5, 3)])  # the second is empty on the last rank
    parameters = []
    for whole, layout in zip(wholes, layouts):
        parameters.append(nn.Parameter(distribute_tensor(whole.detach(), mesh, layout)))
        parameters[-1].grad = distribute_tensor(whole.grad, mesh, layout)
    last = nn.Parameter(distribute_tensor(wholes[-1].detach(), mesh, (Replicate(), Replicate())))
    last.grad = DTensor.from_local(wholes[-1].grad / 4, mesh, (Partial(), Partial()))
    found = []
    for norm_type in (2.0, math.inf, 3.0):
        norm = clip_grad_norm_([*parameters, last], math.inf, norm_type, device=CPU)
        found.append(norm.item() / torch.linalg.vector_norm(flat(wholes), norm_type).item())
    clip_grad_norm_([*parameters, last], 1.0, device=CPU)
    whole = torch.cat([p.grad.full_tensor().flatten() for p in [*parameters, last]])
    found.append(whole.norm().item())
    if mesh.get_local_rank("ep"):  # half of the ranks lack these gradients: the reductions must still match
        parameters[0].grad = None
    clip_grad_norm_(parameters[:1], 1.0, device=CPU)
    return found


def test_gradients_on_meshes_count_every_element_once():
    for found in run_ranks(on_meshes, 4, group_timeout=20):
        assert found == pytest.approx([1.0] * 4, rel=1e-5)


def on_two_meshes(rank: int) -> tuple[float, list[list[int]]]:
    """Clip gradients that are sharded over four ranks as one dimension and as two, and others over two of these ranks.

    Return the relative norm, and the ranks of every reduction.
    """
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_ep",))
    layouts = [(square, (Shard(0), Shard(1))), (line, (Shard(0),)), (square, (Replicate(), Shard(0)))]
    wholes = with_gradients([(4, 6), (8,), (6, 5)])
    parameters = []
    for whole, (mesh, placements) in zip(wholes, layouts):
        parameters.append(nn.Parameter(distribute_tensor(whole.detach(), mesh, placements)))
        parameters[-1].grad = distribute_tensor(whole.grad, mesh, placements)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        norm = clip_grad_norm_(parameters, math.inf, group=None, device=CPU)
    groups = [dist.get_process_group_ranks(call.kwargs["group"]) for call in all_reduce.call_args_list]
    return norm.item() / flat(wholes).norm().item(), groups


def test_gradients_sharded_over_the_same_ranks_are_reduced_once():
    for rank, (norm, groups) in enumerate(run_ranks(on_two_meshes, 4, group_timeout=20)):
        assert norm == pytest.approx(1.0, rel=1e-5)
        assert groups == [[0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1]]


def relayed(rank: int) -> list[tuple[float, float]]:
    """Run a pipeline over three ranks; one stage has no parameters, one is frozen and two are trained."""
    numbers = stages_of_rank("dualpipev", 3, rank)
    stages, expected = make_stages(6), make_stages(6)
    for every in (stages, expected):
        every[1] = nn.Identity()
        every[4] = nn.Identity()  # the second rank has none
        every[2].requires_grad_(False)
    pipe = DualPipeV([stages[i] for i in numbers])
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pipe.step(x if rank == 0 else None, num_chunks=3, criterion=F.mse_loss, labels=x)
    for part in x.chunk(3):
        F.mse_loss(nn.Sequential(*expected)(part), part).backward()
    found = []
    for max_norm, norm_type in ((1.0, 2.0), (0.1, math.inf)):
        norm = pipe.clip_grad_norm_(max_norm, norm_type)
        reference = nn.utils.clip_grad_norm_(nn.ModuleList(expected).parameters(), max_norm, norm_type)
        errors = [relative_error(p.grad, q.grad) for i in numbers
                  for p, q in zip(stages[i].parameters(), expected[i].parameters())]
        found.append((abs(norm.item() / reference.item() - 1), max(errors, default=0.0)))
    return found


def test_ranks_without_parameters_or_gradients():
    for found in run_ranks(relayed, 3):
        assert max(map(max, found)) < 1e-10


# -- beside a loss scale


def scaled(rank: int) -> tuple[list, list, bool]:
    """Run three steps with a loss scale; the second overflows on the rank that has no loss."""
    numbers = stages_of_rank("1f1b", 2, rank)
    stages = make_stages(2)
    pipe = Pipeline([stages[i] for i in numbers], schedule="1f1b")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=100)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scales, norms = [], []
    for step in range(3):
        scaler.scale(torch.zeros(()))  # on ranks without a loss nothing else creates the scale
        loss = lambda out, y: scaler.scale(F.mse_loss(out, y))  # noqa: E731
        pipe.step(x, num_chunks=2, criterion=loss, labels=x)
        if step == 1 and rank == 0:
            next(pipe.parameters()).grad[0] = math.inf
        before = [p.detach().clone() for p in pipe.parameters()]
        scaler.unscale_(optimizer)
        norms.append(pipe.clip_grad_norm_(1e6).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, q) for p, q in zip(pipe.parameters(), before))
        scales.append((scaler.get_scale(), moved))
    plain = make_stages(2)
    for part in x.chunk(2):
        F.mse_loss(nn.Sequential(*plain)(part), part).backward()
    expected = torch.linalg.vector_norm(flat(nn.ModuleList(plain).parameters())).item()
    return scales, norms, norms[0] == pytest.approx(expected, rel=1e-10)


def test_ranks_without_a_loss_share_the_scale_and_skip_the_same_steps():
    for scales, norms, right in run_ranks(scaled, 2):
        assert scales == [(8.0, True), (4.0, False), (4.0, True)] and right
        assert norms[1] == math.inf and math.isfinite(norms[2])
