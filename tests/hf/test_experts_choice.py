"""Choice of the experts implementation: it is logged, and one that does not run is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from dualpipe import DualPipeV
from dualpipe.hf import experts_choice, load_stages
from dualpipe.parallel.experts.dispatcher import is_interface_experts
from hf_families import batch_of, config_of, loss_fn

LOG = "dualpipe.hf.experts_choice"


def implementations_of(stages):
    return {module.config._experts_implementation for stage in stages for module in stage.modules()
            if is_interface_experts(module)}


@pytest.mark.parametrize("experts", ["dualpipe", "grouped_mm", "eager"])
def test_the_choice_is_logged_and_trains(experts, caplog):
    with caplog.at_level(logging.INFO, LOG):
        stages = load_stages(config_of("qwen3_moe"), 2, (0, 1), experts=experts)
    assert f"experts run by '{experts}'" in caplog.text and implementations_of(stages) == {experts}
    pipe = DualPipeV(stages)
    tokens, labels = batch_of(0)
    pipe.step(tokens, num_chunks=4, criterion=loss_fn, labels=(labels,))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    undeferred = {name for parameter in pipe.deferral_report().parameters if parameter.flops_share
                  for name in [parameter.name] if ".experts." in name}
    assert bool(undeferred) is (experts != "dualpipe"), "only dualpipe defers the weight gradients of experts"


@pytest.mark.parametrize("experts", ["deepgemm", "sonicmoe"])
def test_an_implementation_that_does_not_run_here_is_refused(experts):
    with pytest.raises(ValueError, match=f"experts='{experts}' does not run here .*or use experts='dualpipe'"):
        load_stages(config_of("qwen3_moe"), 1, (0,), experts=experts, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_an_unknown_implementation_is_refused(family):
    with pytest.raises(ValueError, match='experts_implementation="grouped"` is not supported'):
        load_stages(config_of(family), 1, (0,), experts="grouped")


@pytest.mark.parametrize("faster, slower", [
    ("dualpipe", "grouped_mm"), ("grouped_mm", "dualpipe"), ("sonicmoe", "grouped_mm"),
])
def test_the_fastest_one_is_taken_and_logged_with_all_times(faster, slower, caplog, monkeypatch):
    seconds = {"deepgemm": float("inf"), faster: 0.001}
    monkeypatch.setattr(experts_choice, "_measure_seconds", lambda stages, name: seconds.get(name, 0.002))
    with caplog.at_level(logging.INFO, LOG):
        stages = load_stages(config_of("qwen3_moe"), 1, (0,), experts="auto")
    assert implementations_of(stages) == {faster}
    assert f"experts run by '{faster}': 4096 tokens, forward and backward, take " in caplog.text
    assert "deepgemm" not in caplog.text, "deepgemm does not run here"
    assert f"1.00 ms by '{faster}'" in caplog.text and f"2.00 ms by '{slower}'" in caplog.text
    assert "only those of 'dualpipe' defer weight gradients" in caplog.text


def test_implementations_are_measured_at_the_models_shapes():
    (stage,) = load_stages(config_of("qwen3_moe"), 1, (0,))
    seconds = [experts_choice._measure_seconds([stage], name) for name in ("dualpipe", "grouped_mm", "deepgemm")]
    assert 0 < seconds[0] < 60 and 0 < seconds[1] < 60 and seconds[2] == float("inf")
    assert implementations_of([stage]) == {"dualpipe"}, "measuring does not change it"


def test_a_model_without_experts_needs_no_choice(caplog):
    with caplog.at_level(logging.INFO, LOG):
        load_stages(config_of("llama"), 1, (0,), experts="auto")
    assert "ms by" not in caplog.text
