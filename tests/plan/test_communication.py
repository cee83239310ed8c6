"""Seconds of bytes from rank to rank, and what ranks that share sequences send."""

from dataclasses import replace
from math import comb

import pytest
import torch

from dualpipe.models import read_config
from dualpipe.nn.routing.router import ExpertGroups, Router
from dualpipe.plan.communication import (
    all_to_all_seconds,
    ring_seconds,
    row_share,
    send_seconds,
    takes_two_hops,
    two_hop_seconds,
)
from dualpipe.plan.machines import read_machine
from dualpipe.plan.meta_run import kinds_of
from dualpipe.plan.operators import layer_parts
from dualpipe.plan.stage_costs import Setting, context_seconds, layer_costs, stage_costs
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


def test_two_hops_go_over_the_network_once_for_each_node_and_then_over_nvlink():
    machine = replace(read_machine("h100"), links=1, networks=1, latency=0, network_latency=0, imbalance=1)
    assert two_hop_seconds(machine, 16e9, 16, 0.5) == pytest.approx(4e9 / 50e9 + 14e9 / 450e9)
    late = replace(machine, latency=1, network_latency=10, imbalance=2)
    assert two_hop_seconds(late, 16e9, 16, 0.5) == pytest.approx(2 * (4e9 / 50e9 + 14e9 / 450e9) + 11e-6)


@pytest.mark.parametrize("ranks, dispatch, node, expected", [
    (16, "auto", 8, True), (16, "two_hop", 8, True), (16, "all_to_all", 8, False), (8, "auto", 8, False),
    (8, "two_hop", 8, False), (12, "two_hop", 8, False), (4, "auto", 1, False), (4, "two_hop", 1, True)])
def test_rows_take_two_hops_where_a_run_would(ranks, dispatch, node, expected):
    assert takes_two_hops(node, ranks, dispatch) is expected


@pytest.mark.parametrize("groups, chosen, places", [(1, 1, 8), (8, 4, 4), (8, 8, 8), (4, 2, 4), (16, 4, 4)])
def test_a_router_that_is_limited_to_groups_sends_a_token_to_their_nodes(groups, chosen, places):
    """On 8 nodes: 4 groups are 2 nodes each, and of 16 groups 2 may be in one node, which the bound does not count."""
    gate = Router(8, 256, 8, groups=ExpertGroups(groups, chosen), device="meta")
    share = row_share(read_machine("h100"), 64, gate)
    experts = 256 * chosen // groups
    num_ranks = max(1, 64 // groups) * chosen
    nodes, ranks = (number * (1 - comb(experts - experts // number, 8) / comb(experts, 8))
                    for number in (places, num_ranks))
    assert share == pytest.approx(nodes / ranks)


@pytest.mark.parametrize("ep, ranks", [(8, 3.63), (16, 5.34), (64, 7.36)])
def test_a_limited_router_bounds_the_bytes_of_one_hop(ep, ranks):
    """The experts of a token of DeepSeek-V3 are in 4 of 8 groups: on at most 4 of 8 ranks, each of which is a group."""
    model = read_config(EXAMPLES / "models" / "deepseek-v3" / "config.json")
    parts = layer_parts(model, kinds_of(model, [4], ())[0], ep, torch.bfloat16)
    combine = [part.sent for part in parts.forward][-2]
    assert combine == pytest.approx(ranks * 7168 * 2, rel=0.005)


def test_two_hops_shorten_the_dispatch_and_the_backward_of_the_combine():
    machine = read_machine("h800")
    model = read_config(EXAMPLES / "models" / "deepseek-v3" / "config.json")
    one, two = (Setting(model, machine, torch.bfloat16, 64, 4096, 4096, dispatch=way)
                for way in ("all_to_all", "two_hop"))
    kind = kinds_of(model, [4], ())[0]
    forward, backward = (
        [(a.sent, b.sent) for a, b in zip(getattr(layer_costs(one, kind, 1e6), part),
                                          getattr(layer_costs(two, kind, 1e6), part)) if a.sent]
        for part in ("forward", "backward"))
    (dispatch, combine), (combine_back, dispatch_back) = forward, backward
    assert dispatch[1] < 0.8 * dispatch[0]
    assert combine_back[1] < 0.8 * combine_back[0]
    assert combine[0] == combine[1]
    assert dispatch_back[0] == dispatch_back[1]


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
