"""What the actions of a stage cost: a pair hides what fits behind the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dualpipe.models import read_config
from dualpipe.plan.machines import read_machine
from dualpipe.plan.meta_run import kinds_of
from dualpipe.plan.operators import Operator, layer_parts
from dualpipe.plan.stage_costs import Seconds, host_seconds, walk_seconds
from plans import EXAMPLES


def test_a_pair_hides_what_fits_behind_the_other():
    action = [Seconds(1.0, 2.0), Seconds(3.0)]
    assert walk_seconds([action], 0.0) == 6
    # F 0-1, B 1-2; F's message 1-3, B's 3-5; F 3-6, B 6-9
    assert walk_seconds([action, action], 0.0) == 9
    # messages go one after the other: 1-5 and 5-9
    assert walk_seconds([[Seconds(1.0, 4.0), Seconds(1.0)]] * 2, 0.0) == 10
    # alone, a backward hides its message behind its own weight gradients
    assert walk_seconds([[Seconds(1.0, 2.0, deferred=1.5), Seconds(3.0)]], 0.0) == 6
    # what computes beside a message is slower by half: 1, then 1 of 2 seconds
    assert walk_seconds([[Seconds(1.0, 2.0, deferred=1.0), Seconds(0.0)]], 0.5) == 3
    assert walk_seconds([[Seconds(1.0, 2.0, deferred=1.5), Seconds(0.0)]], 0.5) == 3.5


def test_the_host_takes_longer_for_products_of_experts_and_kernels_in_triton():
    machine = read_machine("h100")
    costs = [host_seconds(operator, machine) * 1e6 for operator in (
        Operator("gemm"), Operator("grouped", is_triton=True), Operator("fp8 grouped", is_triton=True),
        Operator("memory", is_triton=True), Operator("memory", launches=4, is_triton=True), Operator("memory"),
    )]
    assert costs == pytest.approx([5, 21, 21, 13, 28, 5])
    alike = replace(machine, launch=50.0, launch_grouped=0.0, launch_kernel=0.0)
    assert host_seconds(Operator("grouped", launches=2, is_triton=True), alike) == pytest.approx(100e-6)


def test_operators_of_a_layer_know_what_triton_launches():
    config = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    parts = layer_parts(config, kinds_of(config, [0])[0], 8, torch.bfloat16)
    operators = [each for part in (*parts.forward, *parts.backward) for each in (*part.operators, *part.deferred)]
    of_triton = [each.kind for each in operators if each.is_triton]
    assert of_triton.count("grouped") == 6 and 8 <= of_triton.count("memory") <= 20
