"""Layers that a compiler keeps out of."""

import copy

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from dualpipe.nn import Linear
from dualpipe.nn.deferral import WeightGradStore
from linears import assert_same_grads, backward


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
