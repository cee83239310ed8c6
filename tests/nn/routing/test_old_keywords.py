"""Routers take their old keyword arguments for a release."""

import pytest
from torch import nn

from dualpipe.nn import ExpertGroups, Router, RouterSet, Scoring


def test_a_router_of_old_keywords_is_that_of_the_new_ones():
    options = dict(score="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5, n_group=4, topk_group=2)
    with pytest.warns(DeprecationWarning, match="n_group, norm_topk_prob.*: give groups, scoring instead"):
        old = Router(8, 8, 2, **options, correction_bias=True)
    new = Router(8, 8, 2, scoring=Scoring("sigmoid", True, 2.5), groups=ExpertGroups(4, 2), correction_bias=True)
    assert all(getattr(old, name) == getattr(new, name) == value for name, value in options.items())
    assert old.extra_repr() == new.extra_repr()


def test_a_router_set_of_old_keywords_has_the_same_losses():
    stage = nn.ModuleDict({"a": Router(8, 4, 2)})
    with pytest.warns(DeprecationWarning, match="num_chunks: give num_microbatches instead"):
        old = RouterSet([stage], num_chunks=3, z=0.5, level="global")
    new = RouterSet([stage], num_microbatches=3, z=0.5, level="global")
    steps = []
    for routers in (old, new):
        with routers.step():
            steps.append(stage["a"].step)
    assert all(step.num_microbatches == 3 and step.z == 0.5 and step.level == "global" for step in steps)


def test_both_are_refused():
    with pytest.raises(TypeError, match="score is part of scoring, which is given too"), pytest.warns():
        Router(8, 4, 2, score="sigmoid", scoring=Scoring())
    with pytest.raises(TypeError, match="unknown"):
        Router(8, 4, 2, unknown=1)
