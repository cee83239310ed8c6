"""Dispatch on the meta device: its rows, bytes and memory are those of a dispatch between ranks."""

from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor

from dualpipe.nn.routing.router import ExpertGroups, Router
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.mesh import build_mesh
from dualpipe.plan.activations import _LiveBytes
from dualpipe.plan.meta_dispatch import ExpertChoice, MetaDispatcher
from ranks import run_ranks

TOKENS, WIDTH, EXPERTS, TOP_K = 2048, 256, 16, 4


@pytest.mark.parametrize("places, choice, expected", [
    (8, ExpertChoice(128, 8), 5.34), (64, ExpertChoice(256, 8), 7.68), (64, ExpertChoice(256, 8, 8, 4), 7.36),
    (8, ExpertChoice(256, 8, 8, 4), 3.63), (4, ExpertChoice(16, 1), 1), (128, ExpertChoice(128, 8), 8),
    (4, ExpertChoice(16, 16), 4), (16, ExpertChoice(16, 4, 16, 4), 4),
], ids=str)
def test_places_with_experts_of_a_token(places, choice, expected):
    assert choice.expected_places(places) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("places", [8, 16, 64])
def test_a_router_that_is_limited_to_groups_reaches_the_places_of_these(places):
    """4 of 8 groups are on half of the places, from which the experts are chosen; at 8 places a token has at most 4."""
    gate = Router(8, 256, 8, groups=ExpertGroups(8, 4), device="meta")
    half = places // 2
    expected = half * (1 - comb(128 - 256 // places, 8) / comb(128, 8))
    assert ExpertChoice.of(gate).expected_places(places) == pytest.approx(expected)
    assert expected < half


def test_groups_that_hold_too_few_experts_are_not_those_of_the_router():
    x = torch.empty(64, WIDTH, device="meta")
    experts = torch.empty(64, 4, dtype=torch.int64, device="meta")
    plans = [MetaDispatcher(8, 8, **groups).plan(x, x.new_ones(64, 4), experts)[2]
             for groups in ({}, {"n_group": 8, "topk_group": 2})]
    assert torch.equal(plans[0].counts, plans[1].counts)


def moved(dispatcher: Any, x: Tensor, experts: Tensor) -> list[int]:
    """Dispatch, combine and recompute with the backwards between; return the most bytes that each took at once."""
    live = _LiveBytes([x, experts], False, False)
    peaks = []

    def peak() -> None:
        peaks.append(live.take_peak())

    with torch.no_grad(), live:
        rows, weights, plan = dispatcher.plan(x, x.new_ones(experts.shape), experts)
        peak()
        (sent, weights_RK, received), context = dispatcher.dispatch.forward((rows, weights, plan)).wait()
        peak()
        del rows, weights
        (combined,), combine_context = dispatcher.combine.forward((sent, received)).wait()
        del sent
        peak()
        d_rows, _ = dispatcher.combine.backward(combine_context, (combined,)).wait()[0]
        del combined
        peak()
        gradients = dispatcher.dispatch.backward(context, (d_rows, weights_RK, None)).wait()
        peak()
        del gradients
        rows, weights, plan = dispatcher.plan(x, x.new_ones(experts.shape), experts)
        again = dispatcher.dispatch.recompute(context, (rows, weights, plan)).wait()
        peak()
        del again
    return peaks


def real(rank: int, ranks_per_node: int) -> list[int]:
    """Return the result of `moved` for tokens whose experts are chosen at random.

    The least of some repeats: gloo's thread may hold the tensors of a communication that is over for a moment longer.
    """
    mesh = build_mesh(1, 1, 4, torch.device("cpu"))
    dispatcher = ExpertParallel(EXPERTS, mesh["ep"], ranks_per_node=ranks_per_node).dispatcher()
    generator = torch.Generator().manual_seed(rank)
    experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    repeats = [moved(dispatcher, torch.zeros(TOKENS, WIDTH), experts) for _ in range(5)]
    return [*map(min, zip(*repeats))]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_memory_is_that_of_the_real_dispatchers(nodes):
    """Compared per communication: the plan, dispatch, combine, both backwards, and a recompute."""
    x = torch.empty(TOKENS, WIDTH, device="meta")
    experts = torch.empty(TOKENS, TOP_K, dtype=torch.int64, device="meta")
    counted = moved(MetaDispatcher(EXPERTS, 4, nodes=nodes), x, experts)
    for measured in run_ranks(real, 4, 4 // nodes):
        print(nodes, [f"{mine / theirs:.3f}" for mine, theirs in zip(counted, measured)])
        assert counted == pytest.approx(measured, rel=0.06)


def test_a_recompute_sends_rows_alone():
    dispatcher = MetaDispatcher(EXPERTS, 4)
    x = torch.empty(TOKENS, WIDTH, device="meta")
    moved(dispatcher, x, torch.empty(TOKENS, TOP_K, dtype=torch.int64, device="meta"))
    rows = round(TOKENS * 4 * (1 - comb(12, 4) / comb(16, 4)))
    sent = rows * WIDTH * 4
    weights = rows * TOP_K * 4
    assert [(transfer.kind, transfer.exchanges) for transfer in dispatcher.transfers] == [
        ("dispatch", [sent, 2 * weights]), ("combine", [sent]), ("combine backward", [sent]),
        ("dispatch backward", [sent, weights]), ("recompute", [sent]),
    ]
    assert [transfer.by_node for transfer in dispatcher.transfers] == [True, False, True, False, True]
