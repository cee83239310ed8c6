"""Attention sinks from the log-sum-exp."""

import pytest
import torch

from attention_cases import SCALE, WINDOWS, by_us, make, run
from dualpipe.nn.attention import apply_sinks, attention_reference


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", WINDOWS)
def test_sinks_from_the_log_sum_exp_have_the_reference_s_gradients(window, packed):
    operands, context = make(11, (4, 2, 16, 16), packed=packed)

    def by_lse(q, k, v, sinks_A):
        seen = context.visible(window).expand(3, -1, -1).unsqueeze(1)
        scores = q @ k.repeat_interleave(2, dim=1).mT * SCALE
        scores = scores.masked_fill(~seen, -torch.inf)
        return apply_sinks(scores.softmax(-1) @ v.repeat_interleave(2, dim=1), scores.logsumexp(-1), sinks_A)

    expected = run(by_us(attention_reference, context, window, with_sinks=True), operands)
    for actual, wanted in zip(run(by_lse, operands), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)
