"""Layers that a compiler keeps out of."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from dualpipe.nn import GroupedLinear, Linear, defer_weight_grads
from dualpipe.nn.deferral import WeightGradStore
from linears import Conv1D, assert_same_grads, backward


def test_a_compiler_keeps_out_of_linears_which_defer_as_without_it():
    """It would look into every size anew, and give up at the ninth."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Linear(n, n + 1) for n in range(4, 14)))
    ours, counter = copy.deepcopy(plain), CompileCounter()
    ours.compile(backend=counter)
    x = torch.randn(5, 4)
    for module in (plain, ours):
        for store in (None, WeightGradStore()):
            backward(module, x, torch.ones(5, 14), store)
            if store is not None:
                store.run("I")
    assert counter.frame_count == 0
    assert_same_grads(ours, plain)


class ScaledInside(nn.Module):
    """Layers of both kinds that `defer_weight_grads` converts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), Conv1D(4, 6))

    def forward(self, x):
        return 2 * self.layers(x)


def test_one_graph_has_the_gradients_of_plain_layers():
    torch.manual_seed(0)
    plain = ScaledInside()
    ours = defer_weight_grads(copy.deepcopy(plain))
    counter = CompileCounter()
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    x, store = torch.randn(5, 6), WeightGradStore()
    backward(plain, x, torch.ones(5, 4))
    backward(compiled, x, torch.ones(5, 4), store)
    store.run("I")
    assert counter.frame_count == 1
    assert_same_grads(ours, plain)


@pytest.mark.parametrize("strict", [False, True])
def test_export_has_the_operators_of_plain_layers(strict):
    plain = ScaledInside()
    ours, x = defer_weight_grads(copy.deepcopy(plain)), torch.randn(5, 6)
    programs = [torch.export.export(module, (x,), strict=strict) for module in (plain, ours)]
    operators = [[node.target for node in program.graph.nodes if node.op == "call_function"] for program in programs]
    assert operators[1] == operators[0]
    assert torch.equal(programs[1].module()(x), plain(x))


@pytest.mark.parametrize("run", [
    lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True)(*x),
    lambda layer, x: torch.export.export(layer, x, strict=False),
    lambda layer, x: torch.export.export(layer, x, strict=True),
], ids=["fullgraph", "export", "strict export"])
def test_grouped_layers_are_refused_in_one_graph_with_the_remedy(run):
    x = torch.randn(3, 6), torch.tensor([1, 3], dtype=torch.int32)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=r"grouped GEMMs.*without fullgraph=True"):
        run(GroupedLinear(2, 6, 4), x)
