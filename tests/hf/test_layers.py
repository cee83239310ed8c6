"""Decoder layers of transformers' models, cut at their experts: two parts compute the same as the whole layer."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from dualpipe.hf.cut import cut_model
from dualpipe.hf.experts import NAME
from dualpipe.hf.layers import CannotSplit, SplitLayer, check_split
from dualpipe.hf.stage import CausalLMStage
from dualpipe.nn.segments import run_segments
from dualpipe.parallel.experts.dispatcher import is_interface_experts
from hf_families import MOE, error_of, tiny_model


def layers_of(family, **changes):
    """Return the layers of a tiny model, the arguments of every layer, and hidden states."""
    model = tiny_model(family, **changes)
    model.set_experts_implementation(NAME)
    cut_model(model, range(4), is_first=False, is_last=True)
    stage = CausalLMStage(model, is_first=False, is_last=True)
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, arguments = stage.layer_arguments(x)
    return [layer for _, layer in stage.layers.numbered()], arguments, x


def run(forward, layer, x):
    leaf = x.clone().requires_grad_()
    y = forward(leaf)
    inputs = [leaf, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)
    return [y, *gradients]


def run_in_parts(split, arguments, x):
    return run_segments(split.hooked_segments("a"), {"x": x, "a": arguments})["x"]


@pytest.mark.parametrize("family", MOE)
def test_two_parts_compute_what_the_layer_does(family):
    layers, arguments, x = layers_of(family)
    split_layers = 0
    for layer, layer_arguments in zip(layers, arguments):
        if not any(is_interface_experts(module) for module in layer.modules()):
            with pytest.raises(CannotSplit, match="has no experts"):
                check_split(layer, x, layer_arguments)
            continue
        split = check_split(layer, x, layer_arguments)
        whole = run(partial(layer, **layer_arguments.kwargs), layer, x)
        parts = run(partial(run_in_parts, split, layer_arguments), layer, x)
        assert max(map(error_of, parts, whole)) < 1e-10
        split_layers += 1
    assert split_layers >= 2


def test_modules_before_the_experts_are_called_once():
    layers, arguments, x = layers_of("qwen3_moe")
    split = check_split(layers[0], x, arguments[0])
    calls = []
    for name, module in layers[0].named_modules():
        if name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp.experts"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    run_segments(split.segments("a"), {"x": x, "a": arguments[0]})
    assert calls == ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp.experts"]


def test_modules_that_are_replaced_after_the_cut_run_in_both_parts():
    layers, arguments, x = layers_of("qwen3_next")
    split = check_split(layers[1], x, arguments[1])
    for parent, name in ((layers[1], "self_attn"), (layers[1].mlp, "shared_expert")):
        module = getattr(parent, name)
        setattr(parent, name, copy.deepcopy(module))
        for parameter in getattr(parent, name).parameters():
            parameter.data *= 2
    whole = run(partial(layers[1], **arguments[1].kwargs), layers[1], x)
    parts = run(partial(run_in_parts, split, arguments[1]), layers[1], x)
    assert max(map(error_of, parts, whole)) < 1e-10
    assert split.fits(layers[1]) and not split.fits(layers[3])
    layers[1].mlp.experts = copy.deepcopy(layers[1].mlp.experts)
    assert not split.fits(layers[1]), "new experts run in the whole layer"


def test_a_layer_of_the_same_form_needs_no_check():
    layers, arguments, x = layers_of("gpt_oss")
    first = check_split(layers[0], x, arguments[0])
    second = first.split_same(layers[1])
    y = run_segments(second.segments("a"), {"x": x, "a": arguments[1]})["x"]
    assert error_of(y, layers[1](x, **arguments[1].kwargs)) < 1e-12


def test_forward_hooks_of_the_layer_run_once_around_both_parts():
    layers, arguments, x = layers_of("qwen3_moe")
    split = check_split(layers[0], x, arguments[0])
    layers[0].register_forward_hook(lambda module, args, y: 2 * y)
    y = run_segments(split.hooked_segments("a"), {"x": x, "a": arguments[0]})["x"]
    assert error_of(y, layers[0](x, **arguments[0].kwargs)) < 1e-12


def test_a_layer_with_random_numbers_runs_as_a_whole():
    layers, arguments, x = layers_of("mixtral", router_jitter_noise=0.3)
    with pytest.raises(CannotSplit, match=r"draws random numbers twice in two parts: mlp.jitter_noise = 0.3; only"):
        check_split(layers[0], x, arguments[0])


def test_dropout_of_a_module_before_the_experts_is_drawn_once():
    layers, arguments, x = layers_of("qwen3_moe", attention_dropout=0.5)
    split = check_split(layers[0].train(), x, arguments[0])
    torch.manual_seed(3)
    parts = run_segments(split.segments("a"), {"x": x, "a": arguments[0]})["x"]
    torch.manual_seed(3)
    assert error_of(parts, layers[0](x, **arguments[0].kwargs)) < 1e-12
    torch.manual_seed(4)
    assert error_of(parts, layers[0](x, **arguments[0].kwargs)) > 1e-3


def test_a_layer_that_computes_something_else_in_two_parts_runs_as_a_whole():
    layers, arguments, x = layers_of("qwen3_moe")
    whole = layers[0].forward
    layers[0].forward = lambda x, **kwargs: whole(x + torch.rand_like(x), **kwargs)
    with pytest.raises(CannotSplit, match="computes something else in two parts: the output differs"):
        check_split(layers[0], x, arguments[0])


def test_a_part_with_a_hook_that_would_run_twice_runs_as_a_whole():
    layers, _, _ = layers_of("qwen3_moe")
    layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(CannotSplit, match="has hooks on mlp, which would run twice"):
        SplitLayer(layers[0])


def test_a_layer_with_two_modules_of_experts_runs_as_a_whole():
    layers, _, _ = layers_of("qwen3_moe")
    layers[0].more = copy.deepcopy(layers[0].mlp)
    with pytest.raises(CannotSplit, match=r"several modules of experts: mlp\.experts, more\.experts"):
        SplitLayer(layers[0])


def test_experts_that_are_not_called_are_noticed():
    class Idle(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.experts = experts
            self.proj = nn.Linear(32, 32, dtype=torch.float64)

        def forward(self, x):
            return self.proj(x)

    layers, arguments, x = layers_of("qwen3_moe")
    with pytest.raises(CannotSplit, match="does not call its experts"):
        check_split(Idle(layers[0].mlp.experts), x, arguments[0]._replace(kwargs={}))


def test_a_layer_that_changes_its_calls_is_an_error_and_not_a_wrong_result():
    layers, arguments, x = layers_of("qwen3_moe")
    split = check_split(layers[0], x, arguments[0])
    split._called_paths.append("mlp.gate")  # as if the check had recorded one more call
    with pytest.raises(RuntimeError, match="it cannot run in two parts"):
        split.run_before_experts(x, arguments[0])


def test_gradient_checkpointing_by_transformers_runs_as_a_whole():
    layers, arguments, x = layers_of("qwen3_moe")
    layers[0].gradient_checkpointing = True
    with pytest.raises(CannotSplit, match="is checkpointed by transformers"):
        check_split(layers[0], x, arguments[0])
