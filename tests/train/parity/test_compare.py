"""A custom model in a pipeline of real ranks passes, and planted faults are located."""

from __future__ import annotations

import pytest
import torch

import own_model
from dualpipe.parallel.mesh import build_mesh
from dualpipe.train.launch.join import Job
from dualpipe.train.parity import compare as parity
from ranks import run_ranks

PP2, PP2_EP2, EP2 = (2, 1, 1), (2, 1, 2), (1, 1, 2)


def compare(rank, layout, names, tolerance=1e-10):
    """Return, by the name of a model's function, the number of failed tensors and the first difference."""
    pp, dp, ep = layout
    cpu = torch.device("cpu")
    job = Job(cpu, build_mesh(pp, dp, ep, cpu))
    found = {}
    for name in names:
        torch.manual_seed(0)
        report = parity.compare(getattr(own_model, name)(), job, torch.float64, tolerance)
        num_wrong = sum(error.is_wrong for error in report.errors)
        found[name] = len(report.errors), num_wrong, report.origin
    return found


def test_models_that_are_right_pass():
    names = ["right", "defaults", "copied_cut", "tied", "dropout", "side_inputs"]
    for found in run_ranks(compare, 2, PP2, names):
        assert found == dict.fromkeys(names, (25, 0, ""))


def test_experts_over_ranks_pass():
    found = run_ranks(compare, 4, PP2_EP2, ["right"])
    assert found == [{"right": (26, 0, "")}] * 4, "with a loss of each pipeline"


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


def check_named(layout, faults):
    """Check that each fault fails the comparison, with the same report on all ranks, which names its place."""
    found = run_ranks(compare, 2, layout, list(faults))
    assert found[0] == found[1]
    for name, (parameter, where, hint) in faults.items():
        _, failed, origin = found[0][name]
        assert failed, name
        assert origin.startswith(parameter), (name, origin)
        assert where in origin and hint in origin, (name, origin)


def test_planted_faults_are_named():
    check_named(PP2, FAULTS)


@pytest.mark.slow
def test_faults_of_experts_over_ranks_are_named():
    check_named(EP2, EP_FAULTS)


def test_stages_that_lack_parameters_are_refused():
    found = run_ranks(compare, 2, PP2, ["missing_parameter"], check=False)
    for error in found:
        assert isinstance(error, ValueError)
        assert "no stage has 18 of the unpipelined model's parameters, such as 'layers.1.norm.weight'" in str(error)
