"""The modules between the last right output of a stage and its first wrong one."""

import torch
from torch import nn

from dualpipe.train.model_parity.inside_stage import Call, ModuleCalls, find_suspects

ONE, TWO, LONG = torch.ones(2), torch.full((2,), 2.0), torch.ones(3)
NAMES = ("norm", "router", "experts", "last")


def suspects_of(pipelined, hooked=()):
    """Return the suspects in a stage whose four modules should return ones."""
    modules = {name: nn.Identity() for name in NAMES}
    for name in hooked:
        modules[name].register_forward_hook(lambda *_: None)
    expected = [Call(name, [ONE]) for name in NAMES]
    return find_suspects([Call(name, [value]) for name, value in pipelined.items()], expected, modules, 1e-10)


def test_modules_after_the_last_right_one_are_suspected():
    assert suspects_of({"norm": ONE, "router": ONE, "experts": TWO, "last": TWO}).names == ["experts"]
    assert suspects_of({"norm": ONE, "router": ONE, "experts": LONG, "last": TWO}).names == ["experts", "last"]
    assert suspects_of({"norm": ONE, "router": ONE, "last": ONE}).names == []


def test_a_module_with_hooks_that_is_not_called_is_the_suspect():
    found = suspects_of({"norm": ONE, "router": ONE, "last": TWO}, hooked=["experts"])
    assert found.names == ["experts"] and "Identity has forward hooks" in found.hint


def test_calls_are_noted_by_microbatch():
    module = nn.Sequential(nn.Linear(2, 2))
    calls = ModuleCalls(3, module)
    with calls.hooked():
        for microbatch in range(2):
            y = module(ONE + microbatch)
            calls.take(2, microbatch)  # of another stage
            calls.take(3, microbatch)
    ((name, (output,)),) = calls.of_microbatch[1]
    assert name == "0" and torch.equal(output, y)
    assert not module[0]._forward_hooks
