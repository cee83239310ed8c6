"""The modules between the last right output and the first wrong one."""

import torch
from torch import nn

from dualpipe.train.parity.routes import Microbatch, UnpipelinedPosition
from dualpipe.train.parity.search import Verdict, find_suspects
from dualpipe.train.parity.steps import Call, recorded_calls

NAMES = ("norm", "router", "experts", "last")
FIRST = Microbatch(0, 0)
ONE = torch.ones(2)


def suspects_of(is_right, hooked=()):
    """Return the suspects among four modules, by the verdicts on those that the pipeline calls."""
    calls = [Call(nn.Identity(), name, []) for name in NAMES]
    for call in calls:
        if call.name in hooked:
            call.module.register_forward_hook(lambda *_: None)
    verdicts = {NAMES.index(name): Verdict(value, 1) for name, value in is_right.items()}
    return find_suspects(calls, verdicts, FIRST)


def test_modules_after_the_last_right_one_are_suspected():
    right = {"norm": True, "router": True}
    assert suspects_of(right | {"experts": False, "last": False}).names == ["experts"]
    assert suspects_of(right | {"experts": None, "last": False}).names == ["experts", "last"]
    assert suspects_of(right | {"last": False}).names == ["experts", "last"], "experts are not called"
    assert suspects_of(right | {"last": True}) is None
    assert suspects_of(right | {"experts": None}) is None


def test_a_module_with_hooks_that_is_not_called_is_the_suspect():
    suspects = suspects_of({"norm": True, "router": True, "last": False}, hooked=["experts"])
    assert suspects.names == ["experts"] and "Identity has forward hooks" in suspects.hint


def test_calls_are_recorded_by_microbatch():
    module, position = nn.Linear(2, 2), UnpipelinedPosition()
    with recorded_calls({module: "linear"}, position) as calls:
        module(ONE)  # outside of a micro-batch
        for number in range(2):
            position.microbatch = Microbatch(0, number)
            y = module(ONE + number)
    ((_, name, (output,)),) = calls[Microbatch(0, 1)]
    assert name == "linear" and torch.equal(output, y) and len(calls) == 2
    assert not module._forward_hooks
