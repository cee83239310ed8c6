"""Qwen3-MoE over pp x dp x ep ranks has the loss and gradients of the unpipelined, unsharded model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.models.decoder import SparseMLP
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.routing.losses import RouterStep
from dualpipe.nn.routing.router import Choice, Router
from dualpipe.parallel import DTypePolicy, Rule, resolve_dtypes, shard
from dualpipe.parallel.experts.dispatcher import ExpertParallel, shard_experts
from dualpipe.parallel.fsdp.materialize import build_on_meta, materialize
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, MemoryConfig
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.step import build_model
from models import errors_against_whole
from ranks import run_ranks
from refusals import refusal
from routes import BalancedRoutes, Routes

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,),
    intermediate_size=24, initializer_range=0.3,
)
LAYOUTS = [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 1, 1)]
MICRO_BATCHES = 5


def to_the_first(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Send every token to the same experts, all of them on the first rank."""
    return torch.arange(experts_TK.shape[1]).expand_as(experts_TK)


def set_routers(model: nn.Module, num_chunks: int, *, choice: Choice | None) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            module.step = RouterStep(num_microbatches=num_chunks, balance=0.1, level="sequence", z=0.01)
            module.choice = choice


def layout(
    rank: int, shape: tuple[int, int, int], schedule: str, overlap: bool, recompute: tuple[str, ...], skewed: bool,
) -> tuple[float, float]:
    prepare = partial(set_routers, choice=to_the_first if skewed else None)
    return errors_against_whole(
        CONFIG, shape, schedule=schedule, overlap=overlap, recompute=recompute, prepare=prepare)


PARTS = ("attention", "experts:0-2", "dispatch:3")
ALL = ("layer", "dispatch")


# Each layout with each schedule, and each pair of the other settings.
@pytest.mark.parametrize("shape, schedule, overlap, recompute, skewed", [
    ((2, 1, 2), "dualpipev", True, (), False),
    ((2, 2, 1), "dualpipev", True, (), False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ((2, 1, 2), "dualpipev", True, ALL, True), ((2, 1, 2), "dualpipev", False, PARTS, True),
        ((2, 1, 2), "zbv", True, PARTS, True), ((2, 1, 2), "1f1b", True, PARTS, True),
        ((2, 1, 2), "1f1b", False, ALL, False), ((2, 1, 2), "interleaved_1f1b", True, ALL, False),
        ((1, 2, 2), "dualpipev", True, PARTS, False), ((1, 2, 2), "dualpipev", False, (), True),
        ((1, 2, 2), "zbv", False, ALL, False), ((1, 2, 2), "1f1b", True, (), True),
        ((2, 2, 1), "zbv", False, (), True), ((2, 2, 1), "1f1b", False, PARTS, False),
        ((2, 2, 1), "interleaved_1f1b", False, PARTS, True),
        ((1, 1, 4), "dualpipev", True, ALL, True), ((1, 1, 4), "dualpipev", False, PARTS, False),
        ((1, 1, 4), "zbv", True, (), False), ((1, 1, 4), "1f1b", False, ALL, True),
        ((2, 1, 1), "dualpipev", True, PARTS, False), ((2, 1, 1), "dualpipev", False, ALL, False),
        ((2, 1, 1), "zbv", True, ALL, False), ((2, 1, 1), "1f1b", True, (), False),
        ((2, 1, 1), "interleaved_1f1b", False, (), False))),
], ids=str)
def test_losses_and_gradients_are_those_of_the_whole_model(shape, schedule, overlap, recompute, skewed):
    for gradients, losses in run_ranks(layout, math.prod(shape), shape, schedule, overlap, recompute, skewed):
        assert gradients < 1e-10 and losses < 1e-10


# -- bfloat16


def with_two_experts(rank: int, shape: tuple[int, int, int]) -> tuple[float, float]:
    config = dataclasses.replace(CONFIG, num_experts_per_tok=2)
    prepare = partial(set_routers, choice=BalancedRoutes(3))
    return errors_against_whole(config, shape, dtype=torch.bfloat16, prepare=prepare)


# Routes are fixed, because a choice that rounding changes would change everything after it: tokens 0, 1, ... have
# experts (0, 3), (6, 1), ..., on all ranks of the layouts.
@pytest.mark.slow
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_bfloat16_with_two_experts_is_rounded_as_in_the_whole_model(shape):
    """bfloat16 with two experts per token gives the whole model's activations, bit for bit.

    Two experts of a token are on one rank, which rounds their sum as the whole model does, or each is alone on its
    rank, with nothing to sum. So activations have the same bits, and gradients differ by the order of float32 sums:
    1e-7. A gradient that was accumulated or reduced in bfloat16 would be 5e-3 away.
    """
    for gradients, losses in run_ranks(with_two_experts, math.prod(shape), shape):
        assert gradients < 1e-5 and losses == 0


# -- bytes


def counted(rank: int, shape: tuple[int, int, int], recompute: tuple[str, ...]) -> tuple[int, int]:
    """Return the bytes that a step sent to other expert-parallel ranks, and the bytes that their routes predict."""
    mesh, ranks = build_mesh(*shape, torch.device("cpu")), shape[2]
    settings = Config(memory=MemoryConfig(recompute=recompute))
    common = {"dtypes": torch.bfloat16, "device": torch.device("cpu"), "settings": settings}
    plan = build("dualpipev", shape[0], MICRO_BATCHES)
    model = build_model(CONFIG, plan, mesh["pp"].get_local_rank(), mesh=mesh, **common)
    experts, routes = ExpertParallel(CONFIG.num_experts, mesh["ep"]), Routes(MICRO_BATCHES)
    for stage in model.stages:
        stage.use_expert_parallelism(experts)
        for name, module in stage.named_modules():
            if isinstance(module, Router):
                module.choice = routes.record(name)
    generator = torch.Generator().manual_seed(Mesh.of(mesh).replica)
    tokens = torch.randint(CONFIG.vocab_size, (2 * MICRO_BATCHES, 7), generator=generator)
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev")
    pipe.step(tokens if model.has_first else None, num_chunks=MICRO_BATCHES, criterion=MicroBatchLoss(MICRO_BATCHES),
              labels=tokens if model.has_last else None)
    chosen = [{}] * ranks
    dist.all_gather_object(chosen, routes.experts, group=mesh["ep"].get_group())
    place, again = mesh["ep"].get_local_rank(), "dispatch" in recompute
    return experts.sent_bytes, deduplicated_bytes(chosen, place, again=again)


def deduplicated_bytes(chosen: list[dict], rank: int, *, again: bool) -> int:
    """Return the bytes that `rank` sends in a step: a token's row goes once to each other rank with any of its experts.

    chosen: by rank, the experts (T, K) of every layer and micro-batch. again: the rows a second time.
    """
    ranks, top_k = len(chosen), CONFIG.num_experts_per_tok
    copies = [[0] * ranks for _ in range(ranks)]  # by source and destination, over all layers and micro-batches
    for source, of_source in enumerate(chosen):
        assert len(of_source) % MICRO_BATCHES == 0
        for token in itertools.chain.from_iterable(experts_TK.tolist() for experts_TK in of_source.values()):
            for destination in {expert * ranks // CONFIG.num_experts for expert in token} - {source}:
                copies[source][destination] += 1
    sent, received = sum(copies[rank]), sum(of_source[rank] for of_source in copies)
    row, weights, ids = 2 * CONFIG.hidden_size, 4 * top_k, 4 * top_k  # bfloat16, float32, int32
    forward = sent * (row + weights + ids) + received * row  # dispatch, and combine of what others sent here
    backward = sent * row + received * (row + weights)  # of combine, and of dispatch: choices have no gradient
    return forward + backward + again * sent * row


@pytest.mark.parametrize(("shape", "recompute"), [
    ((1, 1, 4), ("dispatch",)), pytest.param((2, 1, 2), ("layer",), marks=pytest.mark.slow),
], ids=str)
def test_the_bytes_of_a_step_are_those_of_deduplicated_dispatch(shape, recompute):
    for sent, expected in run_ranks(counted, math.prod(shape), shape, recompute):
        assert sent == expected > 0


# -- failures and bits


def broken(rank: int, shape: tuple[int, int, int], where: str, failing: int) -> str:
    """Return the error of a step in which the rank `failing` fails."""
    mesh = build_mesh(*shape, torch.device("cpu"))
    common = {"dtypes": torch.float64, "device": torch.device("cpu")}
    stage_rank, pp = mesh["pp"].get_local_rank(), shape[0]
    recompute = ("dispatch",)
    model = build_model(CONFIG, build("dualpipev", pp, 4), stage_rank, mesh=mesh,
                        settings=Config(memory=MemoryConfig(recompute=recompute)), **common)
    tokens = torch.randint(CONFIG.vocab_size, (4, 8), generator=torch.Generator().manual_seed(2))
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev")
    layers = [layer for stage in model.stages for layer in stage.layers.values()]
    layer = next(layer for layer in layers if isinstance(layer.mlp, SparseMLP))
    calls = []

    def fail(module, args, output):
        calls.append(1)
        if where == "again":
            assert not WeightGradStore.current().recomputing, "out of luck"
            return
        if len(calls) == 3 and where == "forward":
            raise RuntimeError("out of luck")
        if len(calls) == 3:
            output.register_hook(lambda grad: 1 / 0)

    if rank == failing:
        module = layer.mlp.gate if where == "again" else layer.self_attn
        module.register_forward_hook(fail)
    return refusal(lambda: pipe.step(
        tokens if model.has_first else None, num_chunks=4, criterion=MicroBatchLoss(4),
        labels=tokens if model.has_last else None))


@pytest.mark.parametrize("where, failing", [
    ("forward", 1),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("forward", 2), ("backward", 3), ("again", 0))),
])
@pytest.mark.parametrize("shape", [(2, 1, 2), pytest.param((1, 1, 4), marks=pytest.mark.slow)], ids=str)
def test_a_failure_beside_tokens_in_flight_raises_everywhere(shape, where, failing):
    for message in run_ranks(broken, 4, shape, where, failing, timeout=90, group_timeout=20, fresh=True):
        assert ("division" if where == "backward" else "out of luck") in message


def losses_of_training(rank: int, overlap: bool, recompute: tuple[str, ...]) -> list:
    mesh = build_mesh(2, 1, 2, torch.device("cpu"))
    schedule = build("dualpipev", 2, MICRO_BATCHES)
    model = build_model(
        CONFIG, schedule, mesh["pp"].get_local_rank(), mesh=mesh, dtypes=torch.bfloat16, device=torch.device("cpu"),
        settings=Config(memory=MemoryConfig(recompute=recompute)),
    )
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev", overlap=overlap)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(Mesh.of(mesh).replica)
    rows = torch.randint(CONFIG.vocab_size, (2 * MICRO_BATCHES, 9), generator=generator)
    losses = []
    for _ in range(4):
        loss, _ = pipe.step(
            rows[:, :-1] if model.has_first else None, num_chunks=MICRO_BATCHES,
            criterion=MicroBatchLoss(MICRO_BATCHES), labels=rows[:, 1:].contiguous() if model.has_last else None)
        losses.append(None if loss is None else loss.tolist())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_losses_of_a_training_are_the_same_bits_however_it_is_run():
    expected = run_ranks(losses_of_training, 4, True, ())
    assert expected[0][0] != expected[0][-1]
    for overlap, recompute in ((False, ()), (False, ("experts", "norms")), (True, ("layer", "dispatch"))):
        assert run_ranks(losses_of_training, 4, overlap, recompute) == expected


def norms_in_float32(rank: int) -> tuple[set, set]:
    """Return the dtypes at the stage's end, and whether gradients are finite, with norms and routers in float32."""
    mesh = build_mesh(1, 1, 2, torch.device("cpu"))
    (stage,) = build_on_meta(lambda: build_stages(CONFIG, 1))
    shard_experts(stage, mesh["ep"])
    stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, mesh["ep"]))
    rules = [Rule("layers.*.input_layernorm", torch.float32), Rule("layers.*.post_attention_layernorm", torch.float32),
             Rule("layers.*.mlp.gate", torch.float32)]
    plan = resolve_dtypes([stage], DTypePolicy(torch.bfloat16, torch.float32, torch.float32, rules))
    shard(stage, Mesh.of(mesh).dense, plan, expert_mesh=mesh["dp"])
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
