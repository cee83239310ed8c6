"""Experts and sinks of gpt-oss."""

import pytest
import torch

from dualpipe.models import build_stages
from dualpipe.parallel.experts.dispatcher import Received, run_experts
from models import whole
from tiny_models import tiny


def randomised_experts():
    experts = whole(tiny("gpt_oss"), dtype=torch.float64).layers["0"].mlp.experts
    with torch.no_grad():
        for bias in (experts.gate_up_proj.bias, experts.down_proj.bias):
            bias.normal_(generator=torch.Generator().manual_seed(0))
    return experts


@pytest.mark.parametrize("pairs", [3, 6], ids=["cut", "with room"])
def test_a_weight_multiplies_the_last_bias_and_nobody_s_rows_are_zero(pairs):
    """Experts of one expert-parallel rank: of each row's two experts, none, one or both are on the rank."""
    experts = randomised_experts()
    rows_RH = torch.randn(3, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights_RK = torch.tensor([[0.5, 0.25], [3.0, 7.0], [0.75, 9.0]], dtype=torch.float64, requires_grad=True)
    local_RK = torch.tensor([[4, 1], [-1, -1], [1, -1]])

    y_RH = run_experts(experts, rows_RH, weights_RK, Received(local_RK, 6, pairs, None))
    y_RH.sum().backward()

    def one(expert, row):
        gate_up = experts.gate_up_proj.weight[expert] @ rows_RH[row] + experts.gate_up_proj.bias[expert]
        gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
        h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return experts.down_proj.weight[expert] @ h + experts.down_proj.bias[expert]

    expected = torch.stack([0.5 * one(4, 0) + 0.25 * one(1, 0), torch.zeros(32).double(), 0.75 * one(1, 2)])
    torch.testing.assert_close(y_RH, expected)
    slopes = [[one(4, 0).sum().item(), one(1, 0).sum().item()], [0.0, 0.0], [one(1, 2).sum().item(), 0.0]]
    torch.testing.assert_close(weights_RK.grad, torch.tensor(slopes, dtype=torch.float64))
    bias_grad = torch.zeros(6, 32, dtype=torch.float64)
    bias_grad[4], bias_grad[1] = 0.5, 0.25 + 0.75
    torch.testing.assert_close(experts.down_proj.bias.grad, bias_grad)


def test_float32_weights_do_not_widen_the_rows():
    experts = randomised_experts().to(torch.bfloat16)
    rows_MH, ends = torch.ones(6, 32, dtype=torch.bfloat16), torch.arange(1, 7, dtype=torch.int32)
    assert experts(rows_MH, ends, torch.ones(6)).dtype is torch.bfloat16


def test_a_fresh_model_has_sinks():
    sinks = whole(tiny("gpt_oss")).layers["0"].self_attn.sinks
    assert 0 < sinks.abs().max() < 1
    with torch.device("meta"):
        (stage,) = build_stages(tiny("gpt_oss"), 1)
    stage.to_empty(device="cpu").init_weights(0)
    assert torch.equal(stage.layers["0"].self_attn.sinks, sinks)
