"""Routes that are even by construction."""

import pytest
import torch

from dualpipe.nn.routing.balanced_routes import BalancedRoutes, random_like_stride
from dualpipe.nn.routing.losses import RouterStep, load_of, make_totals
from routers import over_experts, router, tokens


@pytest.mark.parametrize(("count", "top_k", "experts"), [(7, 3, 8), (64, 8, 16), (1, 5, 5), (5, 1, 3), (0, 2, 4)])
@pytest.mark.parametrize("stride", [1, 7])
def test_balanced_routes(count, top_k, experts, stride):
    r, totals = router(top_k, experts=experts, norm_topk_prob=True), make_totals(experts)
    r.choice, r.step = BalancedRoutes(stride), RouterStep(totals=totals)
    weights, chosen = r(tokens(count))
    weights.sum().backward()
    load = load_of(totals)
    assert load.max() - load.min() <= 1 and load.sum() == count * top_k
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert torch.equal(over_experts(weights, chosen, experts).sum(-1).round(decimals=9), torch.ones(count).double())


def test_balanced_worked_example():
    own = torch.zeros(3, 2, dtype=torch.long)
    assert BalancedRoutes()(own, 4).tolist() == [[0, 1], [2, 3], [0, 1]]
    assert BalancedRoutes(3)(own, 4).tolist() == [[0, 3], [2, 1], [0, 3]]


def reached(experts_TK, experts, ranks):
    """How many ranks have experts of a token, on average."""
    return sum(len(set(token)) for token in (experts_TK // (experts // ranks)).tolist()) / len(experts_TK)


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks"), [(64, 8, 8), (128, 8, 8), (256, 8, 64), (60, 4, 4), (8, 2, 2), (4, 4, 2), (1, 1, 1)]
)
def test_the_stride_that_is_like_random_experts(experts, top_k, ranks):
    stride, own = random_like_stride(experts, top_k, ranks), torch.zeros(1024, top_k, dtype=torch.int64)
    random = torch.rand(1024, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    even = BalancedRoutes(stride)(own, experts)
    assert reached(even, experts, ranks) == pytest.approx(reached(random, experts, ranks), rel=0.15)


def test_worked_example_of_strides():
    own = torch.zeros(64, 8, dtype=torch.int64)
    assert random_like_stride(64, 8, 8) == 5
    assert [reached(BalancedRoutes(stride)(own, 64), 64, 8) for stride in (1, 5, 9)] == [1, 5, 8]
