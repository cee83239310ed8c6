"""Routes that are even by construction, in routers; and the number of ranks that a token goes to."""

import pytest
import torch

from dualpipe.nn.routing.losses import LOSSES, RouterStep, load_of
from dualpipe.nn.routing.router import Router, Scoring
from routes import BalancedRoutes, random_like_stride


@pytest.mark.parametrize(("count", "top_k", "experts"), [(7, 3, 8), (64, 8, 16), (1, 5, 5), (5, 1, 3), (0, 2, 4)])
@pytest.mark.parametrize("stride", [1, 7])
def test_loads_differ_by_one_at_most(count, top_k, experts, stride):
    router = Router(4, experts, top_k, scoring=Scoring(norm_topk_prob=True), dtype=torch.float64)
    torch.nn.init.normal_(router.weight)
    totals = torch.zeros(experts + len(LOSSES), dtype=torch.float64)
    router.choice, router.step = BalancedRoutes(stride), RouterStep(totals=totals)
    weights, chosen = router(torch.randn(count, 4, dtype=torch.float64))
    weights.sum().backward()
    load = load_of(totals)
    assert load.max() - load.min() <= 1 and load.sum() == count * top_k
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(count).double())


def test_worked_example():
    own = torch.zeros(3, 2, dtype=torch.long)
    assert BalancedRoutes()(own, 4).tolist() == [[0, 1], [2, 3], [0, 1]]
    assert BalancedRoutes(3)(own, 4).tolist() == [[0, 3], [2, 1], [0, 3]]


def test_a_stride_that_leaves_experts_out_is_refused():
    with pytest.raises(ValueError, match="stride 3 and the number of experts 12 have a divisor in common"):
        BalancedRoutes(3)(torch.zeros(7, 2, dtype=torch.long), 12)


def reached(experts_TK, experts, ranks):
    """Return the mean number of ranks that hold experts of a token."""
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
