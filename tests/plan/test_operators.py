"""Operators that a layer launches, counted against the model's own formulas."""

from dataclasses import replace

import pytest
import torch

from dualpipe.models import read_config
from dualpipe.models.flops import head_flops, layer_flops
from dualpipe.plan.machines import read_machine
from dualpipe.plan.meta_run import kinds_of
from dualpipe.plan.operators import FP8_BYTES, FP8Usage, LayerParts, head_parts, layer_parts
from dualpipe.plan.stage_costs import Setting, stage_costs
from plans import EXAMPLES


def operators(parts: LayerParts, *, forward: bool = True):
    sides = parts if forward else parts[1:]
    return [each for side in sides for part in side for each in (*part.operators, *part.deferred)]


@pytest.mark.parametrize("name, layer", [("qwen3-30b-a3b", 0), ("deepseek-v3", 0), ("deepseek-v3", 5),
                                         ("gpt-oss-20b", 1)])
@pytest.mark.parametrize("ep", [1, 4])
def test_products_are_those_of_the_model(name, layer, ep):
    config = read_config(EXAMPLES / "models" / name)
    plain, again = (layer_parts(config, kinds_of(config, [layer], rules)[0], ep, torch.bfloat16)
                    for rules in ((), ("layer",)))
    expected = layer_flops(config, layer, 0)
    assert sum(each.flops for each in operators(plain)) == pytest.approx(3 * expected, rel=1e-3)
    assert sum(each.flops for each in operators(again)) == pytest.approx(4 * expected, rel=1e-3)
    fused = [each.kind for each in operators(plain) if each.kind.startswith("attention")]
    assert fused == ["attention", "attention backward"]
    assert sum(each.flops for each in operators(head_parts(config, torch.bfloat16))) == pytest.approx(
        3 * head_flops(config), rel=1e-3)


@pytest.mark.parametrize("ep, counted", [(1, 71), (8, 99)])
def test_launches_are_about_those_that_are_counted_on_a_pretend_device(ep, counted):
    """tests/models/test_launches.py counts them, with the statistics of routers and two ranks."""
    config = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    parts = layer_parts(config, kinds_of(config, [0])[0], ep, torch.bfloat16)
    assert sum(each.launches for each in operators(parts)) == pytest.approx(counted, rel=0.1)
    assert [part.sent > 0 for part in parts.forward] == ([True, True, False] if ep > 1 else [False])


@pytest.mark.parametrize("fp8_dispatch", [False, True])
def test_a_recomputed_dispatch_sends_rows_alone(fp8_dispatch):
    """Weights and choices, 64 bytes of a row, are sent once; in FP8 dispatch, so are the rows of a recompute."""
    config = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    kind = kinds_of(config, [0], ("layer", "dispatch"))[0]
    parts = layer_parts(config, kind, 8, torch.bfloat16, FP8Usage(dispatch=fp8_dispatch))
    forward, backward = ([part for part in side if part.sent] for side in parts)
    per_rank = 5.34 * 2048 * 2
    quantized = FP8_BYTES / 2 if fp8_dispatch else 1
    extra = [5.34 * 8 * 8, 0, 0, 0, 5.34 * 8 * 4]  # float32 weights and int32 choices, and gradients of weights
    rows = [quantized * per_rank, per_rank, per_rank, quantized * per_rank, per_rank]
    sent = [part.sent for part in (*forward, *backward)]
    assert sent == pytest.approx([each + more for each, more in zip(rows, extra)], rel=0.005)
    assert [part.by_node for part in (*forward, *backward)] == [True, False, True, True, False]


def test_experts_on_more_ranks_read_fewer_weights():
    config = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    few, many = (layer_parts(config, kinds_of(config, [0])[0], ep, torch.bfloat16) for ep in (2, 16))
    weights = [sum(each.bytes for each in operators(parts) if each.kind == "grouped") for parts in (few, many)]
    assert weights[0] == pytest.approx(8 * weights[1], rel=0.01)


@pytest.mark.parametrize("ep", [1, 4])
def test_layers_for_multi_token_prediction_are_in_the_last_stage(ep):
    """The stage has the operations that the model has, in two depths; and the head three times."""
    model = read_config(EXAMPLES / "models/deepseek-v3")
    config = replace(model, num_nextn_predict_layers=2).with_mtp()
    kinds = kinds_of(config, config.mtp_layers)
    assert kinds[0] == kinds[1] != kinds_of(config, [60])[0]
    layer, plain = (layer_parts(config, kind, ep, torch.bfloat16) for kind in (kinds[0], kinds_of(config, [60])[0]))
    for parts, expected in ((layer, layer_flops(config, 61, 0)), (head_parts(config, torch.bfloat16),
                                                                 3 * head_flops(config))):
        assert sum(each.flops for each in operators(parts)) == pytest.approx(3 * expected, rel=1e-3)
    assert [part.sent for part in layer.forward] == [part.sent for part in plain.forward]
    setting = Setting(config, read_machine("h100"), torch.bfloat16, ep, 4096, 4096)
    with_them, without = (stage_costs(replace(setting, model=each), range(58, 61), last=True)
                          for each in (config, model))
    more = sum(one.flops - without.spent[kind].flops for kind, one in with_them.spent.items()
               if not kind.startswith(("attention", "grouped", "memory")))
    dense = layer_flops(config, 61, 0) - 8 * 6 * 7168 * 2048  # without routed experts, some of whose tiles are empty
    assert more == pytest.approx(3 * 2 * (dense + head_flops(config)) * 4096, rel=1e-3)
    assert stage_costs(setting, range(3, 6), last=False).spent == stage_costs(
        replace(setting, model=model), range(3, 6), last=False).spent
