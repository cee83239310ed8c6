"""Segments: run one after the other as a forward, and refused where a pipeline could not run them."""

import pytest
import torch
from torch import nn

from dualpipe import Pipeline
from dualpipe.nn.segments import Communicate, Compute, run_segments, validate_segments
from toys import Handed, Rolled


def test_segments_run_as_a_forward_have_the_gradients_of_the_formula():
    """Nothing is recomputed, and an ordinary backward runs each communication backward once."""
    first, second = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
    log = []
    segments = [
        Compute(lambda x: (x, first(x).tanh()), "x", ("residual", "rows"), recompute=True),
        Communicate(Rolled(log), "rows", "rows", recompute=True),
        Compute(lambda residual, rows: residual + second(rows), ("residual", "rows"), "x", recompute=True),
    ]
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    carry = run_segments(segments, {"x": x, "unread": 3})
    expected = x + second(first(x).tanh().roll(1, 0))
    assert carry["unread"] == 3 and torch.equal(carry["x"], expected)
    leaves = [x, *first.parameters(), *second.parameters()]
    found = torch.autograd.grad(carry["x"].square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), leaves), rtol=1e-12, atol=1e-12)
    assert log == ["forward", "advance", "wait", "backward", "advance", "wait"]


def double(x):
    return 2 * x


REFUSED = {
    "segment 0 reads .'rows'.": [Compute(double, "rows", "x")],
    "segment 0 writes .'loss'.": [Compute(double, "x", "loss"), Compute(double, "loss", "x")],
    "segment 1 is a communication with recompute": [
        Compute(double, "x", "d", True), Communicate(Rolled(), "d", "d", True), Compute(double, "d", "x")],
    "segment 0 is a communication with recompute": [Communicate(Rolled(), "x", "x", True)],
    "must have the method `recompute`": [
        Communicate(Handed(), "x", "x", True), Compute(double, "x", "x", True)],
    "must write the outputs": [Compute(double, "x", ("x", "x1"))],
    "returned 1 values": [
        Compute(double, "x", ("a", "b")), Communicate(Rolled(), "a", "a"), Compute(torch.add, ("a", "b"), "x")],
}


class Listed(nn.Linear):
    """A stage of given segments."""

    def __init__(self, segments):
        super().__init__(2, 2)
        self.made = segments

    def segments(self):
        return self.made


@pytest.mark.parametrize("message", REFUSED)
def test_segments_that_cannot_be_run_are_refused(message):
    stage = Listed(REFUSED[message])
    with pytest.raises((ValueError, RuntimeError), match=message):
        Pipeline([stage]).step(torch.ones(4, 2), num_chunks=2, criterion=lambda *outputs: outputs[0].sum())


def test_side_inputs_may_be_read():
    segments = [Compute(torch.add, ("x", "positions"), "x")]
    validate_segments(segments, ("positions",))
    with pytest.raises(ValueError, match=r"segment 0 reads .'positions'."):
        validate_segments(segments)


def test_an_error_while_segments_are_made_is_a_value_error():
    stage = Listed([])
    stage.segments = lambda: 1 / 0
    with pytest.raises(ValueError, match="division"):
        Pipeline([stage])
