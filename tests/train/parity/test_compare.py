"""A custom model in a pipeline of real ranks passes, and planted faults are located."""

from __future__ import annotations

import pytest
import torch

import own_model
from dualpipe.parallel.mesh import build_mesh
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.compare import Report, compare
from ranks import run_ranks

PP2, PP2_EP2, EP2 = (2, 1, 1), (2, 1, 2), (1, 1, 2)
FLOAT64, BF16 = torch.float64, torch.bfloat16
ROUTERS = [f"layers.{number}.router" for number in range(4)]


def reports(rank, layout, names, dtype) -> dict[str, Report]:
    """Return the report of each model, by the name of its function."""
    cpu = torch.device("cpu")
    job = Job(cpu, build_mesh(*layout, cpu))
    found = {}
    for name in names:
        torch.manual_seed(0)
        found[name] = compare(getattr(own_model, name)(), job, dtype, 1e-10)
    return found


def compare_on_ranks(layout, names, dtype) -> dict[str, Report]:
    """Return the reports, which are the same on all ranks."""
    first, *others = run_ranks(reports, torch.tensor(layout).prod().item(), layout, names, dtype)
    assert others == [first] * len(others)
    return first


def test_models_that_are_right_pass():
    names = ["right", "defaults", "copied_cut", "tied", "dropout", "side_inputs"]
    for report in compare_on_ranks(PP2, names, FLOAT64).values():
        assert len(report.errors) == 25 and not report.failures and not report.origin


def test_bf16_models_that_are_right_pass():
    for name, report in compare_on_ranks(PP2, ["right", "defaults", "copied_cut", "tied"], BF16).items():
        assert not report.failures and not report.origin, name
        assert list(report.routes.unpipelined.made) == ROUTERS, name
        assert report.routes.pipelined.made == report.routes.unpipelined.made and not report.routes.unreplayed


@pytest.mark.parametrize("dtype", [FLOAT64, pytest.param(BF16, marks=pytest.mark.slow)])
def test_experts_over_ranks_pass(dtype):
    report = compare_on_ranks(PP2_EP2, ["right"], dtype)["right"]
    assert len(report.errors) == 26 and not report.failures, "with a loss of each pipeline"
    if dtype is BF16:
        assert report.routes.pipelined.made == dict.fromkeys(ROUTERS, 192), "those of both pipelines"


def test_choices_that_rounding_turns_are_no_errors():
    """Without routes, all gradients together are wrong by 66% in both models, with routes by 3%."""
    report = compare_on_ranks(PP2, ["close_scores"], BF16)["close_scores"]
    assert report.routes.pipelined.changed.total() > 10
    for error in report.errors:
        assert error.relative < 0.1 and error.unpipelined < 0.1, error.name
    assert not report.failures


FAULTS = {
    "lost_microbatch": ("norm.weight", "stage 3, micro-batch 2)", "the gradient is zero"),
    "bf16_accumulation": ("norm.weight", "stage 3, micro-batch 0)", "bfloat16"),
    "swapped_experts": ("layers.1.experts.", "F(stage 1, micro-batch 0), in layers.1.experts", ""),
    "swapped_weights": ("layers.1.experts.down.weight", "the weights of stage 1, before any step", ""),
    "tied_without_sum": ("layers.0.norm.weight", "micro-batch 0)", "tied: stages 0 and 1 have it"),
    "side_inputs_swapped": ("layers.2.norm.", "F(stage 2, micro-batch 0), in layers.2.norm", ""),
    "wrong_cut": ("norm.", "F(stage 3, micro-batch 0), in norm", "no stage uses the parameter"),
}
EP_FAULTS = {  # where tokens travel, and stages run by their segments
    "swapped_experts": ("layers.2.experts.", "F(stage 1, micro-batch 0)", ""),
    "silent_hook": ("layers.2.", "F(stage 1, micro-batch 0)", "Layer has forward hooks, and the pipeline does not"),
}
BF16_FAULTS = {
    "bf16_accumulation": ("norm.weight", "B(stage 3, micro-batch 1)", "all its elements are bfloat16 values"),
    "bf16_reduction": ("layers.3.norm.", "B(stage 3, micro-batch 1)", "all its elements are bfloat16 values"),
    "no_policy": ("layers.3.norm.", "B(stage 3, micro-batch 1)", "all its elements are bfloat16 values"),
    "lost_microbatch": ("norm.weight", "B(stage 3, micro-batch 2)", "the gradient is zero"),
    "swapped_weights": FAULTS["swapped_weights"],
    "swapped_experts": ("layers.1.", "F(stage 1, micro-batch 0)", ""),
    "tied_without_sum": ("layers.0.norm.weight", "micro-batch 0)", ""),
    "wrong_cut": FAULTS["wrong_cut"],
}
BF16_SHARDED_FAULTS = {name: BF16_FAULTS[name] for name in ("bf16_reduction", "swapped_experts")}


@pytest.mark.parametrize(("layout", "dtype", "faults"), [
    (PP2, FLOAT64, FAULTS),
    pytest.param(EP2, FLOAT64, EP_FAULTS, marks=pytest.mark.slow),
    pytest.param(PP2, BF16, BF16_FAULTS, marks=pytest.mark.slow),
    pytest.param(PP2_EP2, BF16, BF16_SHARDED_FAULTS, marks=pytest.mark.slow),
], ids=["float64", "float64 over ep", "bf16", "bf16 over ep"])
def test_planted_faults_are_named(layout, dtype, faults):
    found = compare_on_ranks(layout, list(faults), dtype)
    for name, (parameter, where, hint) in faults.items():
        origin = found[name].origin
        assert found[name].failures and origin.startswith(parameter), (name, origin)
        assert where in origin and hint in origin, (name, origin)


def test_routers_that_choose_wrongly_are_reported():
    (failure,) = compare_on_ranks(PP2, ["wrong_router"], BF16)["wrong_router"].failures
    assert failure.startswith("layers.0.router would choose ") and "0 of 96 in the unpipelined model" in failure


def test_models_without_top_k_are_reported():
    found = compare_on_ranks(PP2, ["without_top_k", "sorting_pipeline"], BF16)
    assert not found["without_top_k"].routes.unpipelined.made
    assert not found["without_top_k"].failures
    assert found["sorting_pipeline"].routes.unreplayed == ROUTERS


@pytest.mark.parametrize(("name", "dtype", "text"), [
    ("missing_parameter", FLOAT64,
     "no stage has 18 of the unpipelined model's parameters, such as 'layers.1.norm.weight'"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("float32_stages", BF16, "the outputs of stage 0 are torch.float32, but --dtype bf16 needs torch.bfloat16; m"),
        ("wide_choice", BF16, "layers.1.router chooses 3 of 4 in 12 rows, and 2 of 4 in 12 rows in the unpipelined"),
    )),
])
def test_stages_that_cannot_be_compared_are_refused_on_all_ranks(name, dtype, text):
    for error in run_ranks(reports, 2, PP2, [name], dtype, check=False):
        assert text in str(error) and (name == "wide_choice" or isinstance(error, ValueError))
