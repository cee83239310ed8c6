"""Parameters in the graph of a forward: FLOPs of GEMMs counted by hand, and uses that are no GEMM."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from dualpipe.pipeline.deferral_report import gemm_flops, parameter_uses


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def uses_of(y: Tensor, computing=()):
    """Return the uses by kind and operator, and their FLOPs."""
    found = {}
    for use in parameter_uses([get_gradient_edge(y)], computing):
        key = use.kind, use.operator
        found[key] = found.get(key, 0) + use.flops
    return found


X = torch.randn(2, 5, 6)  # 10 rows of 6
GEMMS = {
    "linear": (lambda w: F.linear(X, w), (4, 6), 2 * 10 * 24),
    "linear of a vector": (lambda w: F.linear(X[0, 0], w), (4, 6), 2 * 24),
    "matmul": (lambda w: X @ w, (6, 4), 2 * 10 * 24),
    "weight on the left": (lambda w: w @ X[0].T, (4, 6), 2 * 5 * 24),
    "matrix and vector": (lambda w: w @ X[0, 0], (4, 6), 2 * 24),
    "addmm": (lambda w: torch.addmm(torch.ones(4), X.view(-1, 6), w), (6, 4), 2 * 10 * 24),
    "a slice": (lambda w: F.linear(X, w[:3]), (4, 6), 2 * 10 * 18),
    "another dtype": (lambda w: F.linear(X.double(), w.double()), (4, 6), 2 * 10 * 24),
    "experts by einsum": (lambda w: torch.einsum("eth,ehn->etn", X, w), (2, 6, 4), 2 * 10 * 24),
    "experts in a loop": (lambda w: F.linear(X[0], w[0]) + F.linear(X[1], w[1]), (2, 4, 6), 2 * 10 * 24),
    "experts of rows": (lambda w: torch.bmm(X.view(10, 1, 6), w[torch.arange(10) % 2]), (2, 6, 4), 2 * 10 * 24),
    "experts with a bias": (lambda w: torch.baddbmm(torch.ones(2, 5, 4), X, w), (2, 6, 4), 2 * 10 * 24),
    "depthwise convolution": (lambda w: F.conv1d(X.mT, w, groups=6), (6, 1, 3), 2 * (2 * 6 * 3) * 3),
    "no rows": (lambda w: F.linear(X[:0], w), (4, 6), 0),
}


@pytest.mark.parametrize("case", GEMMS)
def test_flops_of_gemms(case):
    forward, shape, flops = GEMMS[case]
    found = uses_of(forward(parameter(*shape)).sum())
    assert {kind for kind, _ in found} == {"gemm"} and sum(found.values()) == flops, found


def test_a_grouped_product_counts_all_rows_once():
    weight, ends = parameter(2, 8, 16), torch.tensor([3, 8], dtype=torch.int32)
    y = F.grouped_mm(torch.randn(8, 8).bfloat16(), weight.bfloat16(), offs=ends)
    assert uses_of(y.float().sum()) == {("gemm", "GroupedMm"): 2 * 8 * 8 * 16}
    assert gemm_flops(weight.shape, 8) == 2 * 8 * 8 * 16


def test_a_weight_joined_from_several_is_shared_by_their_elements():
    first, second = parameter(1, 6), parameter(3, 6)
    y = F.linear(X, torch.cat([first, second]))
    flops = {use.parameter.shape[0]: use.flops for use in parameter_uses([get_gradient_edge(y)])}
    assert flops == {1: 2 * 10 * 6, 3: 2 * 10 * 18}


def test_uses_that_are_no_gemm():
    table, position = parameter(9, 6), parameter(5, 6)
    y = F.embedding(torch.tensor([[1, 2, 3, 4, 5]]), table) + position
    assert uses_of(y.sum()) == {("other", "Embedding"): 0, ("other", "Add"): 0}
    assert uses_of(F.layer_norm(X, (6,), parameter(6)).sum()) == {}, "vectors are not looked at"


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        raise AssertionError


def test_the_inside_of_a_function_counts_as_one_gemm():
    assert uses_of(Product.apply(X, parameter(4, 6)).sum()) == {("function", "Product"): 2 * 10 * 24}
    assert uses_of(Product.apply(X, parameter(2, 4, 6)[0]).sum()) == {("function", "Product"): 2 * 10 * 24}


def test_a_weight_that_is_computed_counts_for_the_parameter_it_is_from():
    norm, direction = parameter(4, 1), parameter(4, 6)
    y = F.linear(X, norm * F.normalize(direction, dim=1)).sum()
    assert uses_of(y, {norm, direction})["computed", "Mm"] == 2 * 10 * 24
    assert ("computed", "Mm") not in uses_of(y)


def test_checkpointed_layers_are_seen_and_not_run():
    layer, runs = nn.Linear(6, 4), []
    layer.register_forward_hook(lambda *_: runs.append(1))
    y = checkpoint(layer, X.clone().requires_grad_(), use_reentrant=False).sum()
    assert sum(uses_of(y).values()) == 2 * 10 * 24 and runs == [1]


def test_a_graph_that_branches_is_read_once():
    weight, x = parameter(6, 6), X
    for _ in range(40):  # 2**40 ways
        x = F.linear(x, weight)
        x = x + x.tanh()
    assert uses_of(x.sum()) == {("gemm", "Mm"): 40 * 2 * 10 * 36}
