"""Choices that are recorded in one model and replayed in another."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dualpipe.nn import Router
from dualpipe.pipeline.lower import Instruction
from dualpipe.pipeline.microbatch_state import SegmentRun
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Action
from dualpipe.train.parity.routes import Microbatch, Replay, RouteCounts, RouteReport, Routes, choosing
from dualpipe.train.parity.steps import StageObserver, run_backward_in_modes

CLOSE = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3]])
TURNED = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.4, 0.1, 0.2, 0.3]])  # expert 3 instead of 2 for the first token


class TopK(nn.Module):
    """Chooses two; `dim` 0 is an expert's choice of tokens."""

    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, scores):
        return torch.topk(scores, 2, dim=self.dim)

    def choose(self, scores):
        """A method that is called without the module's hooks, as by a segment."""
        return (lambda: scores.topk(2, self.dim))()


class Twice(nn.Module):
    """Makes two choices of one size."""

    def forward(self, scores):
        return scores.topk(2).values - (-scores).topk(2).values


def run(module, chooser, scores, number=0, method="forward"):
    """Call a module for a micro-batch, with `chooser` to decide."""
    with choosing({module: "router"}, lambda _: Microbatch(0, number), chooser):
        return getattr(module, method)(scores)


@pytest.mark.parametrize("method", ["forward", "choose"])
@pytest.mark.parametrize("dim", [-1, 0])
def test_values_are_those_of_the_running_model(method, dim):
    module = TopK(dim)
    recorded = CLOSE if dim else CLOSE.t().contiguous()
    own = (TURNED if dim else TURNED.t().contiguous()).clone().requires_grad_()
    routes = Routes()
    right = run(module, routes, recorded)
    replay = Replay(routes)
    values, indices = run(module, replay, own, method=method)
    assert torch.equal(indices, right.indices)
    assert torch.equal(values, own.gather(dim, right.indices))
    values.sum().backward()
    assert own.grad.sum() == 4 and own.grad.flatten()[torch.argmin((own - 0.4).abs().flatten())] == 1
    assert replay.counts == ({"router": 4}, {"router": 1})


def test_tokens_may_be_in_rows():
    routes = Routes()
    run(TopK(), routes, CLOSE)
    found = run(TopK(), Replay(routes), TURNED.view(1, 2, 4))
    assert found.indices.tolist() == [[[1, 2], [0, 3]]]


def test_each_microbatch_has_its_own():
    module, routes = TopK(), Routes()
    run(module, routes, CLOSE, 0)
    run(module, routes, TURNED, 1)
    replay = Replay(routes)
    assert run(module, replay, CLOSE, 1).indices.tolist() == [[1, 3], [0, 3]]
    assert run(module, replay, CLOSE, 0).indices.tolist() == [[1, 2], [0, 3]]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_runs_twice_chooses_the_same_twice(use_reentrant):
    module, routes = Twice(), Routes()
    scores = CLOSE.clone().requires_grad_()

    def step(chooser, own):
        with choosing({module: "router"}, lambda _: Microbatch(0, 0), chooser):
            values = checkpoint(module, own, use_reentrant=use_reentrant)
            run_backward_in_modes(values, torch.ones_like(values))

    step(routes, scores)
    own = TURNED.clone().requires_grad_()
    replay = Replay(routes)
    step(replay, own)
    assert torch.equal(own.grad, scores.grad)
    assert replay.counts == ({"router": 8}, {"router": 2}), "the recomputation is not counted"


def test_others_are_left_alone():
    module = TopK()
    microbatch = None

    class Refuse:
        def choose(self, place, indices):
            raise AssertionError(place)

    with choosing({module: "router"}, lambda _: microbatch, Refuse()):
        module(CLOSE)  # outside of a micro-batch
        microbatch = Microbatch(0, 0)
        torch.topk(CLOSE, 2)
        TopK()(CLOSE)  # not among the modules
        module(torch.arange(4).view(1, 4))


def test_this_librarys_router_is_replayed_by_its_choice():
    torch.manual_seed(0)
    router = Router(8, 4, 2)
    before = router.choice
    routes = Routes()
    x = torch.randn(6, 8)
    _, experts = run(router, routes, x)
    replay = Replay(routes)
    weights, replayed = run(router, replay, -x)
    assert torch.equal(replayed, experts) and router.choice is before
    assert torch.equal(weights, (router.weight @ -x.t()).t().softmax(-1).gather(1, experts))
    assert replay.counts.made["router"] == 12 and replay.counts.changed["router"] > 0


def test_choices_of_another_size_are_refused():
    routes = Routes()
    run(TopK(), routes, CLOSE)
    with pytest.raises(ValueError, match="router chooses 2 of 4 in 1 rows, and 2 of 4 in 2 rows in the unpipelined"):
        run(TopK(), Replay(routes), CLOSE[:1])
    with pytest.raises(ValueError, match="router chooses 2 of 4 in 2 rows, and nothing in the unpipelined model"):
        run(TopK(), Replay(Routes()), CLOSE)


def test_the_microbatch_of_a_pipeline_is_that_of_the_running_action():
    first, second, recorder = nn.Identity(), nn.Identity(), Recorder()
    observer = StageObserver(3, {first: 0, second: 1})
    position = observer.position
    recorder.subscribe(observer)
    assert position(first) is None
    pair = Instruction((), (Action("F", 0, 5), Action("B", 1, 2)), (), (), "", "FB")
    with recorder.doing("FB", pair):
        assert position(first) == Microbatch(3, 5) and position(second) == Microbatch(3, 2)
        with recorder.doing("segment", SegmentRun("R", 0, 1, 0)):
            assert position(first) == Microbatch(3, 1), "a recomputation"
        assert position(first) == Microbatch(3, 5)
    assert position(first) is None


def test_two_actions_of_one_stage_are_told_apart():
    module, recorder, found = nn.Identity(), Recorder(), []
    observer = StageObserver(0, {module: 0})
    recorder.subscribe(observer)

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(observer.position(module).number)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.append(observer.position(module).number)
            return gradient

    pair = Instruction((), (Action("F", 0, 5), Action("B", 0, 2)), (), (), "", "FB")
    with recorder.doing("FB", pair):
        Look.apply(torch.ones(1, requires_grad=True)).backward()
    assert found == [5, 2]


def test_a_rank_with_some_columns_has_their_choices():
    routes = Routes()
    run(TopK(), routes, torch.cat([CLOSE, TURNED]))  # two sequences of two tokens
    replay = Replay(routes, torch.tensor([0]), length=2)
    assert run(TopK(), replay, torch.zeros(2, 4)).indices.tolist() == [[1, 2], [1, 3]]


def test_routes_that_are_not_replayed_are_named():
    first, second = "layers.0.router", "layers.1.router"
    unpipelined = RouteCounts(Counter({first: 96, second: 96}), Counter({first: 0, second: 1}))
    text = RouteReport(unpipelined, RouteCounts(Counter({first: 96}), Counter({first: 3}))).describe()
    assert "would have changed 3 of 96 choices pipelined, 1 of 192 unpipelined" in text
    assert "routes of 1 modules were recorded and not replayed, such as layers.1.router: " in text


def test_a_model_without_routes_is_told_so():
    none = RouteCounts(Counter(), Counter())
    text = RouteReport(none, none).describe()
    assert text.startswith("no routes were recorded: no module calls torch.topk on scores")
