"""Stand-ins: modules that replace others for one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualpipe.hf.stand_ins import ForwardStop, ForwardStopped, OutputRecorder, OutputReplay, swap_modules


def test_everything_is_back_in_its_place_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    before = dict(model.named_modules())
    stand_ins = {"0": OutputRecorder(model[0]), "1.1": ForwardStop()}
    with pytest.raises(ForwardStopped) as stopped, swap_modules(model, stand_ins):
        model(torch.ones(1, 2))
    assert dict(model.named_modules()) == before
    assert torch.equal(stopped.value.inputs[0], model[1][0](model[0](torch.ones(1, 2))))


def test_a_known_result_is_returned_once_and_then_the_module_is_called():
    module = nn.Linear(2, 2)
    known = OutputReplay(module)
    known.results = ["noted"]
    assert known(torch.ones(1, 2)) == "noted" and torch.equal(known(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_what_a_module_returns_is_noted_in_order():
    noted = OutputRecorder(nn.Identity())
    assert [noted(1), noted(2)] == noted.results == [1, 2]
    assert not list(noted.parameters()) and not list(noted.children())


def test_a_place_that_is_not_there_is_an_error_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2))
    before = dict(model.named_modules())
    with pytest.raises((AttributeError, KeyError)), swap_modules(model, {"0": ForwardStop(), "1": ForwardStop()}):
        pass
    assert dict(model.named_modules()) == before
