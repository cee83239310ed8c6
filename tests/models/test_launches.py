"""Launches that a layer gives to a device, whose host time would be in the way if they were many more.

A launch takes the host about 5 us; 4096 tokens of a layer take the GPU 4 to 5 ms. Counted on a pretend device, where
operators take the ways of CUDA: what two layers launch in a step, less what one does, by micro-batch. One operator is
one launch, but for those below.
"""

from __future__ import annotations

import pytest

from layer_launches import layer_launches


# The first two stand in docs/results/cpu.md.
@pytest.mark.parametrize("ep, format, expected", [
    (False, None, 71), (True, None, 99), (True, "fp8_block", 117),
    pytest.param(True, "mxfp8", 111, marks=pytest.mark.slow),
])
def test_a_layer_of_qwen3_moe(ep, format, expected):
    layer = layer_launches(ep, format)
    most_first = sorted(layer.items(), key=lambda item: -item[1])
    table = "\n".join(f"{count:6.1f} {name:40} {at}" for (name, at), count in most_first)
    assert sum(layer.values()) == expected, f"{sum(layer.values())} launches\n{table}"
