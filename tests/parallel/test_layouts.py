"""Qwen3-MoE over pp x dp x ep ranks: loss and every gradient are those of the unpipelined, unsharded model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn import Router, cross_entropy_loss
from dualpipe.nn.router import RouterStep
from dualpipe.parallel.expert import ExpertParallel, shard_experts
from dualpipe.parallel.materialize import build_on_meta, materialize
from dualpipe.parallel.mesh import build_mesh, dense_mesh
from dualpipe.parallel.precision import DTypePolicy, Rule, resolve_dtypes, shard
from dualpipe.pipeline import PipelineError
from dualpipe.schedule import build
from dualpipe.train.model import build_model, build_whole, micro_batch_loss
from dualpipe.train.parity import compare_gradients, difference
from ranks import run_ranks

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,),
    intermediate_size=24, initializer_range=0.3,
)  # fmt: skip
LAYOUTS = [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 1, 1)]
MICRO_BATCHES = 5


def to_the_first(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Every token to the same experts, all of them on the first rank."""
    return torch.arange(experts_TK.shape[1]).expand_as(experts_TK)


def set_routers(model: nn.Module, num_chunks: int, skewed: bool) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            module.step = RouterStep(num_chunks=num_chunks, balance=0.1, level="sequence", z=0.01)
            module.choice = to_the_first if skewed else None


def layout(
    rank: int, shape: tuple[int, int, int], schedule: str, overlap: bool, recompute: tuple[str, ...], skewed: bool,
    dtype: torch.dtype,
) -> tuple[float, float]:  # fmt: skip
    """The worst gradient and loss of this rank."""
    mesh = build_mesh(*shape, torch.device("cpu"))
    replicas, replica = dense_mesh(mesh).size(), dense_mesh(mesh).get_local_rank()
    common = {"seed": 0, "dtype": dtype, "device": torch.device("cpu")}
    plan = build(schedule, shape[0], MICRO_BATCHES)
    model = build_model(CONFIG, plan, mesh["pp"].get_local_rank(), mesh=mesh, recompute=recompute, **common)
    whole = build_whole(CONFIG, **common)
    for stage in model.stages:
        set_routers(stage, MICRO_BATCHES, skewed)
    set_routers(whole, MICRO_BATCHES * replicas, skewed)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(CONFIG.vocab_size, (2 * MICRO_BATCHES * replicas, 8), generator=generator)
    tokens, targets = rows[:, :-1], rows[:, 1:].contiguous()
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule=schedule, overlap=overlap)
    mine = slice(replica * 2 * MICRO_BATCHES, (replica + 1) * 2 * MICRO_BATCHES)
    loss, _ = pipe.step(
        *((tokens[mine],) if model.has_first else ()), num_chunks=MICRO_BATCHES,
        criterion=micro_batch_loss(MICRO_BATCHES) if model.has_last else None,
        labels=(targets[mine],) if model.has_last else (),
    )  # fmt: skip
    criterion, losses = micro_batch_loss(MICRO_BATCHES * replicas), []
    for xs, ys in zip(tokens.split(2), targets.split(2)):
        one = criterion(whole(xs), ys)
        one.backward()
        losses.append(one.detach())
    expected = torch.stack(losses).split(MICRO_BATCHES)[replica] * replicas
    worst = max(d.relative for d in compare_gradients(model.stages, whole))
    return worst, 0.0 if loss is None else difference("loss", loss, expected).relative


def check(shape, schedule="dualpipev", overlap=True, recompute=(), skewed=False, dtype=torch.float64) -> None:
    pp, dp, ep = shape
    arguments = (shape, schedule, overlap, recompute, skewed, dtype)
    allowed = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    for gradients, losses in run_ranks(layout, pp * dp * ep, *arguments):
        assert gradients < allowed and losses < allowed


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_overlapped(shape):
    check(shape)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 1, 4)], ids=str)
def test_one_after_the_other_recomputed_and_skewed(shape):
    check(shape, overlap=False, recompute=("layer",), skewed=True)


@pytest.mark.parametrize("schedule", ["zbv", "1f1b", "interleaved_1f1b"])
def test_other_schedules_in_float32(schedule):
    check((2, 1, 2), schedule, recompute=("experts", "norms"), dtype=torch.float32)


MATRIX = list(itertools.product(
    LAYOUTS, ["dualpipev", "1f1b"], [True, False], [(), ("attention", "experts:0-2")], [True, False],
))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shape, schedule, overlap, recompute, skewed", MATRIX, ids=str)
def test_matrix(shape, schedule, overlap, recompute, skewed):
    check(shape, schedule, overlap, recompute, skewed)


# -- failures and bits


def broken_once(rank: int, shape: tuple[int, int, int], where: str) -> list[tuple[str, float]]:
    """Of every rank failing in turn: the error, and the worst gradient of the step after it."""
    mesh = build_mesh(*shape, torch.device("cpu"))
    common = {"seed": 0, "dtype": torch.float64, "device": torch.device("cpu")}
    stage_rank, pp = mesh["pp"].get_local_rank(), shape[0]
    model = build_model(CONFIG, build("dualpipev", pp, 4), stage_rank, mesh=mesh, **common)
    whole = build_whole(CONFIG, **common)
    tokens = torch.randint(CONFIG.vocab_size, (4, 8), generator=torch.Generator().manual_seed(2))
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev")
    layer = next(iter(model.stages[0].layers.values()))
    calls = []

    def fail(module, args, output):
        calls.append(1)
        if len(calls) == 3 and where == "forward":
            raise RuntimeError("out of luck")
        if len(calls) == 3:
            output.register_hook(lambda grad: 1 / 0)

    def step() -> None:
        pipe.step(
            *((tokens,) if model.has_first else ()), num_chunks=4,
            criterion=micro_batch_loss(4) if model.has_last else None, labels=(tokens,) if model.has_last else (),
        )  # fmt: skip

    for part in tokens.split(1):
        micro_batch_loss(4)(whole(part), part).backward()
    found = []
    for failing in range(4):
        handle = layer.self_attn.register_forward_hook(fail) if rank == failing else None
        calls.clear()
        try:
            step()
            message = ""
        except PipelineError as error:
            message = str(error)
        if handle is not None:
            handle.remove()
        pipe.zero_grad()
        step()
        found.append((message, max(d.relative for d in compare_gradients(model.stages, whole))))
        pipe.zero_grad()
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 1, 4)], ids=str)
def test_a_failure_beside_tokens_in_flight_raises_everywhere_and_the_next_step_is_right(shape, where):
    for found in run_ranks(broken_once, 4, shape, where, timeout=90, group_timeout=20):
        for message, error in found:
            assert ("out of luck" if where == "forward" else "division") in message
            assert error < 1e-10


def losses_of_training(rank: int, overlap: bool, recompute: tuple[str, ...]) -> list:
    mesh = build_mesh(2, 1, 2, torch.device("cpu"))
    schedule = build("dualpipev", 2, MICRO_BATCHES)
    model = build_model(
        CONFIG, schedule, mesh["pp"].get_local_rank(), mesh=mesh, recompute=recompute, seed=0, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev", overlap=overlap)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dense_mesh(mesh).get_local_rank())
    rows = torch.randint(CONFIG.vocab_size, (2 * MICRO_BATCHES, 9), generator=generator)
    losses = []
    for _ in range(4):
        loss, _ = pipe.step(
            *((rows[:, :-1],) if model.has_first else ()), num_chunks=MICRO_BATCHES,
            criterion=micro_batch_loss(MICRO_BATCHES) if model.has_last else None,
            labels=(rows[:, 1:].contiguous(),) if model.has_last else (),
        )  # fmt: skip
        losses.append(None if loss is None else loss.tolist())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_losses_of_a_training_are_the_same_bits_however_it_is_run():
    expected = run_ranks(losses_of_training, 4, True, ())
    assert expected[0][0] != expected[0][-1]
    for overlap, recompute in ((False, ()), (True, ("layer",)), (False, ("experts", "norms"))):
        assert run_ranks(losses_of_training, 4, overlap, recompute) == expected


def norms_in_float32(rank: int) -> tuple[set, set]:
    """Dtypes at the stage's end, and whether gradients are finite, where norms and routers compute in float32."""
    mesh = build_mesh(1, 1, 2, torch.device("cpu"))
    (stage,) = build_on_meta(lambda: build_stages(CONFIG, 1))
    shard_experts(stage, mesh["ep"])
    stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, mesh["ep"]))
    rules = [Rule("layers.*.input_layernorm", torch.float32), Rule("layers.*.post_attention_layernorm", torch.float32),
             Rule("layers.*.mlp.gate", torch.float32)]  # fmt: skip
    plan = resolve_dtypes([stage], DTypePolicy(torch.bfloat16, torch.float32, torch.float32, rules))
    shard(stage, dense_mesh(mesh), plan, expert_mesh=mesh["dp"])
    materialize(stage, "cpu", plan, seed=0)
    seen = set()

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        seen.add(logits.dtype)
        return cross_entropy_loss(logits, targets)

    tokens = torch.randint(CONFIG.vocab_size, (4, 8), generator=torch.Generator().manual_seed(rank))
    pipe = Pipeline([stage], process_group=mesh["pp"].get_group(), schedule="1f1b")
    pipe.step(tokens, num_chunks=2, criterion=criterion, labels=(tokens,))
    return seen, {bool(p.grad.full_tensor().isfinite().all()) for p in stage.parameters()}


def test_a_dtype_plan_holds_for_stages_that_are_run_by_segments():
    for outputs, finite in run_ranks(norms_in_float32, 2):
        assert outputs == {torch.float32}, "the policy's output dtype"
        assert finite == {True}
