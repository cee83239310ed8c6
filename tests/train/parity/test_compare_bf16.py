"""A bfloat16 model in a pipeline of real ranks passes with replayed routes, and planted faults are located."""

from __future__ import annotations

import pytest
import torch

import own_model
from dualpipe.parallel.mesh import build_mesh
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.compare import Report, compare
from ranks import run_ranks

PP2, PP2_EP2 = (2, 1, 1), (2, 1, 2)


def reports(rank, layout, names) -> dict[str, Report]:
    """Return the report of each model, by the name of its function."""
    cpu = torch.device("cpu")
    job = Job(cpu, build_mesh(*layout, cpu))
    found = {}
    for name in names:
        torch.manual_seed(0)
        found[name] = compare(getattr(own_model, name)(), job, torch.bfloat16, 0.0)
    return found


def test_models_that_are_right_pass():
    first, second = run_ranks(reports, 2, PP2, ["right", "defaults", "copied_cut", "tied"])
    assert first == second
    for name, report in first.items():
        assert not report.failures and not report.origin, name
        assert list(report.routes.unpipelined.made) == [f"layers.{number}.router" for number in range(4)], name
        routes = report.routes
        assert routes.pipelined.made == routes.unpipelined.made and not routes.unreplayed


@pytest.mark.slow
def test_experts_over_ranks_pass():
    report, *others = [found["right"] for found in run_ranks(reports, 4, PP2_EP2, ["right"])]
    assert others == [report] * 3 and not report.failures
    both_pipelines = {f"layers.{number}.router": 192 for number in range(4)}
    assert report.routes.pipelined.made == both_pipelines


def test_choices_that_rounding_turns_are_no_errors():
    """Without routes, all gradients together are wrong by 66% in both models, with routes by 3%."""
    report = run_ranks(reports, 2, PP2, ["close_scores"])[0]["close_scores"]
    assert report.routes.pipelined.changed.total() > 10
    for each in report.errors:
        assert each.relative < 0.1 and each.unpipelined < 0.1, each.name
    assert not report.failures


FAULTS = {
    "bf16_accumulation": ("norm.weight", "B(stage 3, micro-batch 1)", "all its elements are bfloat16 values"),
    "bf16_reduction": ("layers.3.norm.", "B(stage 3, micro-batch 1)", "all its elements are bfloat16 values"),
    "no_policy": ("layers.3.norm.", "B(stage 3, micro-batch 1)", "all its elements are bfloat16 values"),
    "lost_microbatch": ("norm.weight", "B(stage 3, micro-batch 2)", "the gradient is zero"),
    "swapped_weights": ("layers.1.experts.down.weight", "the weights of stage 1, before any step", ""),
    "swapped_experts": ("layers.1.", "F(stage 1, micro-batch 0)", ""),
    "tied_without_sum": ("layers.0.norm.weight", "micro-batch 0)", ""),
    "wrong_cut": ("norm.", "F(stage 3, micro-batch 0), in norm", "no stage uses the parameter"),
}


def check_located(world_size, layout, names):
    """Check that each fault fails the comparison, with the same report on all ranks, which names its place."""
    found = run_ranks(reports, world_size, layout, names)
    assert found == [found[0]] * world_size
    for name in names:
        parameter, where, hint = FAULTS[name]
        report = found[0][name]
        assert report.failures, name
        origin = report.origin
        assert origin.startswith(parameter) and where in origin and hint in origin, (name, origin)


@pytest.mark.slow
def test_planted_faults_are_located():
    check_located(2, PP2, list(FAULTS))


@pytest.mark.slow
def test_faults_of_sharded_stages_are_located():
    check_located(4, PP2_EP2, ["bf16_reduction", "swapped_experts"])


def test_routers_that_choose_wrongly_are_reported():
    report = run_ranks(reports, 2, PP2, ["wrong_router"])[0]["wrong_router"]
    (failure,) = report.failures
    assert failure.startswith("layers.0.router would choose ") and "0 of 96 in the unpipelined model" in failure


def test_models_without_top_k_are_reported():
    found = run_ranks(reports, 2, PP2, ["without_top_k", "sorting_pipeline"])[0]
    assert not found["without_top_k"].routes.unpipelined.made
    assert not found["without_top_k"].failures
    assert found["sorting_pipeline"].routes.unreplayed == [f"layers.{number}.router" for number in range(4)]


def test_stages_with_other_dtypes_are_refused_on_all_ranks():
    text = "the outputs of stage 0 are torch.float32, but --dtype bf16 needs torch.bfloat16; make place"
    for error in run_ranks(reports, 2, PP2, ["float32_stages"], check=False):
        assert isinstance(error, ValueError) and text in str(error)


def test_choices_that_cannot_be_replayed_end_all_ranks():
    for error in run_ranks(reports, 2, PP2, ["wide_choice"], check=False):
        assert "layers.1.router chooses 3 of 4 in 12 rows, and 2 of 4 in 12 rows in the unpipelined model" in str(error)
