"""Transformers' causal LMs in a pipeline whose head runs in parts with the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualpipe import Pipeline
from dualpipe.hf import load_stages
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.accumulators import drop
from dualpipe.nn.head import HeadRows, LinearHead
from dualpipe.pipeline.compiled_stage import plain_head
from hf_families import VOCAB, batch_of, config_of

SCALES_AND_CAPS = {"llama": (1.0, None), "qwen3_moe": (1.0, None), "granite": (0.5, None), "cohere": (0.0625, None),
                   "gemma2": (1.0, 30.0)}


class Loss:
    """Mean over two micro-batches, that counts the calls with rows."""

    part_bytes = 5 * VOCAB * 8

    def __init__(self, takes_head_rows):
        self.takes_head_rows = takes_head_rows
        self.calls = 0

    def __call__(self, logits, labels):
        self.calls += isinstance(logits, HeadRows)
        return cross_entropy_loss(logits, labels, upstream=0.5) / 2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SCALES_AND_CAPS)
def test_a_step_equals_the_plain_form(family, tied, recompute):
    torch.manual_seed(0)
    stages = load_stages(config_of(family, tie_word_embeddings=tied), 2, (0, 1), dtype=torch.float64)
    for stage in stages:
        stage.recompute = lambda part, number: recompute
        for parameter in stage.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
    head = plain_head(stages[-1])
    assert head is not None and (head.scale, head.cap) == SCALES_AND_CAPS[family]
    pipe = Pipeline(stages, schedule="dualpipev")
    tokens, labels = batch_of(0, rows=2)
    labels[0, :5] = -100
    results = []
    for takes_rows in (True, False):
        loss = Loss(takes_rows)
        losses, _ = pipe.step(tokens, num_chunks=2, criterion=loss, labels=(labels,))
        gradients = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
        results.append((losses, gradients))
        assert loss.calls == 2 * takes_rows
        drop(parameter for stage in stages for parameter in stage.parameters())
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_a_head_of_another_form_runs_on_all_tokens():
    """The model's own forward decides, not the names in its configuration."""
    (stage,) = load_stages(config_of("llama"), 1, (0,), dtype=torch.float64)
    forward = type(stage.causal_lm).forward

    class Shifted(type(stage.causal_lm)):
        def forward(self, **arguments):
            output = forward(self, **arguments)
            output.logits = output.logits + 1
            return output

    stage.causal_lm.__class__ = Shifted
    assert stage.linear_head() is None and plain_head(stage) is None
    first, _ = load_stages(config_of("llama"), 2, (0, 1))
    assert first.linear_head() is None


def test_an_adapter_on_the_head_runs_on_all_tokens():
    (stage,) = load_stages(config_of("llama"), 1, (0,), dtype=torch.float64)
    assert isinstance(plain_head(stage), LinearHead)
    stage.lm_head = nn.Sequential(stage.lm_head)
    assert plain_head(stage) is None
