"""Reasons why a weight's gradient is not deferred, by the module that has it."""

import pytest
from torch import nn
from torch.nn.utils import parametrizations, prune

from dualpipe.nn import GroupedLinear, defer_weight_grads
from dualpipe.pipeline.deferral_report import is_computed_from, uncounted_reason, undeferred_reason


class Foo(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Bar(nn.Linear):
    pass


class FSDPModule:
    """Has the name of FSDP2's class, by which that is recognized."""


class FSDPLinear(FSDPModule, nn.Linear):
    pass


class MyExperts(nn.Module):
    pass


REASONS = {
    "nn.Linear, not passed to defer_weight_grads": nn.Linear(2, 2),
    "Bar, not passed to defer_weight_grads": Bar(2, 2),
    "Bar defers, but its weight is used outside its forward": defer_weight_grads(Bar(2, 2)),
    "GroupedLinear defers, but its weight is used outside its forward": GroupedLinear(2, 2, 2),
    "FSDPLinear: call defer_weight_grads before fully_shard": FSDPLinear(2, 2),
    "subclass Foo of nn.Linear with its own forward": Foo(2, 2),
    "nn.Conv1d": nn.Conv1d(2, 2, 3),
    "weight of an embedding, used in a GEMM outside a deferring layer": nn.Embedding(2, 2),
    "parameter of MyExperts, used outside a deferring layer": MyExperts(),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_by_module(reason):
    assert undeferred_reason(REASONS[reason], "weight", 2, ()) == reason


def test_weights_computed_from_others():
    normed = parametrizations.weight_norm(nn.Linear(2, 2))
    owner = normed.parametrizations.weight
    assert is_computed_from(owner, "original0") and not is_computed_from(normed, "bias")
    assert undeferred_reason(owner, "original1", 2, ()) == "weight computed from others (parametrized)"
    pruned = prune.identity(nn.Linear(2, 2), "weight")
    assert is_computed_from(pruned, "weight_orig")
    assert undeferred_reason(pruned, "weight_orig", 2, ()) == "weight computed from others (pruned, or by a norm)"


def test_what_is_not_counted():
    assert uncounted_reason(nn.Embedding(2, 2), ()) == "embedding: its gradient is no GEMM, not counted"
    assert uncounted_reason(MyExperts(), {"Mul", "Add"}) == "used by Add, Mul: no GEMM, not counted"
