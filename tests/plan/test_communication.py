"""Seconds of bytes from rank to rank, and what ranks that share sequences send."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dualpipe.models import read_config
from dualpipe.plan.communication import all_to_all_seconds, ring_seconds, send_seconds
from dualpipe.plan.machines import read_machine
from dualpipe.plan.stage_costs import Setting, context_seconds, stage_costs
from plans import EXAMPLES


def test_bytes_go_over_the_links_that_there_are():
    machine = replace(read_machine("h100"), links=1, networks=1, latency=0, network_latency=0, imbalance=1)
    assert all_to_all_seconds(machine, 8e9, 8) == pytest.approx(7e9 / 450e9)
    assert all_to_all_seconds(machine, 16e9, 16) == pytest.approx(8e9 / 50e9)
    assert all_to_all_seconds(machine, 1e9, 1) == ring_seconds(machine, 1e9, 1) == send_seconds(machine, 1e9, 1, 8) == 0
    assert ring_seconds(machine, 8e9, 8) == pytest.approx(7e9 / 450e9)
    assert ring_seconds(machine, 16e9, 16) == pytest.approx(15e9 / 400e9)
    assert ring_seconds(machine, 16e9, 16, 8) == pytest.approx(15e9 / 50e9)
    assert send_seconds(machine, 1e9, 2, 4) == pytest.approx(1 / 450)
    assert send_seconds(machine, 1e9, 2, 8) == pytest.approx(1 / 50)


@pytest.mark.parametrize("name, method, layer, forward, backward", [
    ("qwen3-30b-a3b", "ring", 0, 7 * 2 * 4 * 128, 14 * 2 * 4 * 128),  # 4 heads; there, again and back
    ("deepseek-v3", "auto", 5, 7 * 576, 14 * 576),  # the latent and the rotated key
    ("deepseek-v3", "all_to_all", 5, 7 / 8 * 2 * 128 * (192 + 128), 7 / 8 * 2 * 128 * (192 + 128)),
    ("gpt-oss-20b", "ring", 0, 2 * 127 * 8 / 32768 * 2 * 8 * 64, 2 * 2 * 127 * 8 / 32768 * 2 * 8 * 64),  # its window
])
def test_what_ranks_that_share_sequences_send(name, method, layer, forward, backward):
    machine = replace(read_machine("h100"), links=1, latency=0, network_latency=0)
    model, tokens = read_config(EXAMPLES / "models" / name), 4096
    setting = Setting(model, machine, torch.bfloat16, 1, tokens, 8 * tokens, cp=8, cp_method=method)
    expected = [numbers * tokens * 2 / 450e9 for numbers in (forward, backward)]
    assert context_seconds(setting, layer) == pytest.approx(expected)
    assert context_seconds(replace(setting, cp=1), layer) == (0, 0)
    whole, shared = (stage_costs(one, range(layer, layer + 1), last=False) for one in (replace(setting, cp=1), setting))
    assert shared.sent - whole.sent == pytest.approx(sum(expected)) and shared.costs.F > whole.costs.F
