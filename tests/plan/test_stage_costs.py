"""Costs of a stage's actions: a pair hides what fits behind the other action."""

from dataclasses import replace

import pytest
import torch

from dualpipe.models import read_config
from dualpipe.plan.machines import read_machine
from dualpipe.plan.meta_run import kinds_of
from dualpipe.plan.operators import Operator, layer_parts
from dualpipe.plan.stage_costs import (
    TILE,
    Seconds,
    Setting,
    _merged_seconds,
    _seconds_if_merged,
    host_seconds,
    walk_seconds,
)
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
    # computing beside a message is slower by half: 1, then 1 of 2 seconds
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
    assert (of_triton.count("grouped"), of_triton.count("memory")) == (6, 24)


def test_merged_products_of_experts_read_and_write_accumulators_once():
    """Merged GEMMs read and write the accumulators once.

    Memory takes 4 s, and 1 s for each micro-batch: 5, (4 + 2) / 2, (4 + 3) / 3; operations take 2 s.
    """
    machine = replace(
        read_machine("h100"), hbm=1.0, bandwidth=1.0, tflops=1.0, grouped=1.0, gemm=1.0, launch=0.0, launch_grouped=0.0,
        launch_kernel=0.0, host_waits=False)
    model = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    setting = Setting(model, machine, torch.bfloat16, ep=1, tokens=10**6, length=4096)
    no_tile = 1 + TILE / 2 / (setting.tokens * model.num_experts_per_tok / model.num_experts)
    grouped = Operator("grouped", flops=2e6 / no_tile, token_bytes=1e3, bytes=4e9)
    alone = Operator("gemm", flops=1e6)
    assert [_seconds_if_merged([grouped], setting, size) for size in (1, 2, 3)] == pytest.approx([5, 3, 7 / 3])
    assert [_seconds_if_merged([alone], setting, size) for size in (1, 2, 3)] == pytest.approx([1, 1, 1])
    # Five are two kernels, of two and three; more than four cost no less than the operations.
    two, three, four, five, *_ = _merged_seconds([grouped], setting)
    assert (two, three, four) == pytest.approx((3, 7 / 3, 2))
    assert five == pytest.approx((2 * 3 + 3 * 7 / 3) / 5)
    assert _merged_seconds([grouped], replace(setting, machine=replace(machine, fp8=0.0)))[1] == pytest.approx(
        (5 + 2 * 3) / 3), "chips before sm_90 merge two"
    assert _merged_seconds([grouped], replace(setting, machine=replace(machine, host_waits=True))) == ()
