"""`Pipeline.deferral_report` and the warning of little deferred work; the report of docs/overlap.md is reproduced."""

import contextlib
import io
import re
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualpipe import DeferralReport, DualPipeV, Pipeline, PipelineError
from dualpipe.nn import defer_weight_grads
from dualpipe.pipeline.deferral_report import ParameterWork, shortfall
from dualpipe.schedule import Costs, build, simulate
from ranks import run_ranks

WIDTH = 8
DOCUMENT = Path(__file__).parents[2] / "docs" / "overlap.md"


def plain():
    return nn.Linear(WIDTH, WIDTH)


def deferring():
    return defer_weight_grads(plain())


def step(pipe, num_chunks=4):
    x = torch.randn(8, WIDTH)
    pipe.step(x, num_chunks=num_chunks, criterion=F.mse_loss, labels=(x,))


def warned(pipe, steps=1, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(pipe, **options)
    return [str(warning.message) for warning in caught]


def work(stage, name, deferred, undeferred, reason="r"):
    return ParameterWork(stage, name, (2, 2), deferred, undeferred, reason if undeferred else "")


def test_shares_by_stage_and_in_total():
    schedule = build("dualpipev", 1, 4)
    report = DeferralReport.of(0, [work(0, "a", 30, 0), work(0, "b", 0, 10), work(1, "c", 0, 60)], schedule)
    assert report.share == 0.3
    assert [(stage.stage, stage.flops, stage.share) for stage in report.stages] == [(0, 40, 0.75), (1, 60, 0.0)]
    assert [(each.name, each.flops_share) for each in report.parameters] == [("c", 0.6), ("b", 0.1)]
    with pytest.raises(FrozenInstanceError):
        report.rank = 1


def test_the_bubble_is_that_of_the_simulator():
    schedule = build("dualpipev", 2, 6)
    half = DeferralReport.of(0, [work(0, "a", 1, 1), work(3, "b", 1, 1)], schedule)
    assert half.bubble == simulate(schedule, Costs(W=0.5)).bubble_fraction
    assert half.bubble_if_all_deferred == simulate(schedule, Costs()).bubble_fraction < half.bubble
    everything = DeferralReport.of(0, [work(0, "a", 1, 0), work(3, "b", 1, 0)], schedule)
    assert everything.bubble == everything.bubble_if_all_deferred
    one_stage = DeferralReport.of(0, [work(0, "a", 1, 0), work(3, "b", 0, 1)], schedule)
    costs = Costs(W=0.5, I=1.5, per_stage={0: Costs(), 3: Costs(W=0.0, I=2.0)})
    assert one_stage.bubble == simulate(schedule, costs).bubble_fraction


@pytest.mark.parametrize("name", ["dualpipev", "zbv", "1f1b"])
def test_a_pipeline_on_one_rank(name):
    modules = [deferring(), plain()] if name != "1f1b" else [plain()]
    pipe = Pipeline(modules, schedule=name)
    step(pipe)
    report = pipe.deferral_report()
    assert (report.rank, report.schedule.name, report.schedule.num_microbatches) == (0, name, 4)
    assert report.share == (0.5 if name != "1f1b" else 0.0)
    assert [stage.stage for stage in report.stages] == list(range(len(modules)))
    assert report.bubble == 0.0 and "nn.Linear, not passed to defer_weight_grads" in str(report)


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_to_do(frozen):
    """Without parameters in one stage, or with all of it frozen, that stage has no work; nor is there a warning."""
    first = plain().requires_grad_(False) if frozen else nn.Identity()
    pipe = DualPipeV([first, deferring()])
    assert warned(pipe) == []
    report = pipe.deferral_report()
    assert report.stages[0].flops == 0 and report.stages[0].share == report.share == 1.0 and not report.parameters
    assert "stage 0: 100.0%" in str(report)


def test_before_a_training_step_there_is_none():
    pipe = DualPipeV([plain(), plain()])
    with pytest.raises(ValueError, match="no training step"):
        pipe.deferral_report()
    with torch.no_grad():
        assert warned(pipe) == []
    with pytest.raises(ValueError, match="no training step"):
        pipe.deferral_report()


class Failing(nn.Linear):
    fails = True

    def forward(self, x):
        if self.fails:
            raise ArithmeticError
        return super().forward(x)


def test_a_step_that_fails_is_not_reported_and_the_next_one_is():
    pipe = DualPipeV([Failing(WIDTH, WIDTH), deferring()])
    with pytest.raises(PipelineError):
        step(pipe)
    with pytest.raises(ValueError, match="no training step"):
        pipe.deferral_report()
    assert pipe.weight_grad_store.observer is None
    pipe.module[0].fails = False
    step(pipe)
    (parameter,) = pipe.deferral_report().parameters
    assert parameter.reason == "subclass Failing of nn.Linear with its own forward" and parameter.flops_share == 0.5


def test_steps_in_another_order_are_not_reported():
    pipe = DualPipeV([plain(), plain()])
    for deferred in (True, False):
        with pipe.in_order(deferred=deferred):
            assert warned(pipe, num_chunks=1) == []
    with pytest.raises(ValueError, match="no training step"):
        pipe.deferral_report()
    assert len(warned(pipe)) == 1


def test_the_warning_comes_once_in_one_line_and_points_to_the_caller():
    pipe = DualPipeV([nn.Sequential(plain(), nn.Linear(WIDTH, 4 * WIDTH)), nn.Linear(4 * WIDTH, WIDTH)])
    with pytest.warns(UserWarning, match="weight-gradient work") as caught:
        step(pipe)
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert "only 0%" in text and "1.weight (32, 8) of stage 0" in text and "call defer_weight_grads" in text
    assert warned(pipe, steps=2) == []


def test_no_warning_where_half_is_deferred_or_nothing_waits():
    assert warned(DualPipeV([deferring(), plain()])) == []
    assert warned(Pipeline([plain()], schedule="1f1b")) == []
    assert shortfall(0, []) is None
    assert shortfall(0, [work(0, "a", 1, 1)]) is None
    text = shortfall(3, [work(0, "a", 49, 51)])
    assert "only 49%" in text and "rank 3" in text and "call defer_weight_grads" not in text


def test_a_warning_that_is_an_error_leaves_the_pipeline_usable():
    pipe = DualPipeV([plain(), plain()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="weight-gradient work"):
            step(pipe)
        step(pipe)
    assert pipe.deferral_report().share == 0.0


def report_of_two_ranks(rank):
    """The first rank's stages defer, the second's do not."""
    make = deferring if rank == 0 else plain
    pipe = DualPipeV([make(), make()])
    x = torch.randn(8, WIDTH) if rank == 0 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, num_chunks=4, criterion=F.mse_loss, labels=() if x is None else (x,))
    report = pipe.deferral_report()
    stages = [(stage.stage, stage.share) for stage in report.stages]
    return report.rank, stages, report.bubble, report.bubble_if_all_deferred, len(caught)


def test_each_rank_reports_its_own_stages():
    first, second = run_ranks(report_of_two_ranks, 2)
    assert first[:2] == (0, [(0, 1.0), (3, 1.0)]) and second[:2] == (1, [(1, 0.0), (2, 0.0)])
    assert first[2] == first[3] == second[3] < second[2]
    assert (first[4], second[4]) == (0, 1)


def test_the_program_of_the_document_prints_its_report():
    section = DOCUMENT.read_text().partition("## Deferred weight gradients")[2]
    program, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.S)[:2]
    output = io.StringIO()
    names = {"__name__": "document"}
    with contextlib.redirect_stdout(output):
        exec(compile(program, str(DOCUMENT), "exec"), names)
    assert output.getvalue() == printed
    last = {0: 0, 1: 7}  # the rank's stages there
    found = [each._replace(stage=last[each.stage]) for each in names["pipe"]._observed.work]
    on_four_ranks = DeferralReport.of(0, found, build("dualpipev", 4, 8))
    as_there = re.search(r"on four ranks it is (\S+%), and (\S+%) with", section).groups()
    assert as_there == (f"{on_four_ranks.bubble:.1%}", f"{on_four_ranks.bubble_if_all_deferred:.1%}")
