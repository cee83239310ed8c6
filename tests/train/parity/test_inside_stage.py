"""The modules between the last right output and the first wrong one."""

import torch
from torch import nn

from dualpipe.train.parity.compare import Verdict, find_suspects
from dualpipe.train.parity.routes import Microbatch
from dualpipe.train.parity.steps import Call, CallKey, recorded_calls

NAMES = ("norm", "router", "experts", "last")
ONE = torch.ones(2)


def suspects_of(is_right, hooked=()):
    """Return the suspects among four modules, by the verdicts on those that the pipeline calls."""
    calls = {CallKey(name, 0): Call(nn.Identity(), []) for name in NAMES}
    for (name, _), call in calls.items():
        if name in hooked:
            call.module.register_forward_hook(lambda *_: None)
    return find_suspects(calls, {CallKey(name, 0): Verdict(value, 1) for name, value in is_right.items()})


def test_modules_after_the_last_right_one_are_suspected():
    right = {"norm": True, "router": True}
    assert suspects_of(right | {"experts": False, "last": False}).names == ["experts"]
    assert suspects_of(right | {"last": False}).names == ["experts", "last"], "experts are not called"
    assert suspects_of(right | {"last": True}) is None
    assert suspects_of(right) is None


def test_a_module_with_hooks_that_is_not_called_is_the_suspect():
    suspects = suspects_of({"norm": True, "router": True, "last": False}, hooked=["experts"])
    assert suspects.names == ["experts"] and "Identity has forward hooks" in suspects.hint


def test_calls_are_recorded_by_microbatch():
    module, microbatch = nn.Linear(2, 2), None
    with recorded_calls({module: "linear"}, lambda _: microbatch) as calls:
        module(ONE)  # outside of a micro-batch
        for number in range(2):
            microbatch = Microbatch(0, number)
            first, second = module(ONE + number), module(ONE)
    outputs = [calls[Microbatch(0, 1)]["linear", number].outputs for number in range(2)]
    assert torch.equal(outputs[0][0], first) and torch.equal(outputs[1][0], second)
    assert len(calls) == 2 and not module._forward_hooks
