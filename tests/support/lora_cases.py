"""Tiny models with random adapters of peft, and the comparison of stages' gradients with peft's."""

from __future__ import annotations

import importlib
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import peft
import torch
from transformers import AutoModelForCausalLM, modeling_rope_utils

from dualpipe.nn.lora import adapter_places, full_factors
from dualpipe.parallel.mesh import Mesh
from hf_families import error_of, save_tiny, train_step, whole_losses
from models import Float64Torch

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS = {  # attention, a router, the experts, and the head of each family
    "olmoe": (["q_proj", "o_proj", "lm_head"], [*EXPERTS, "mlp.gate.weight"]),
    "qwen3_moe": (["k_proj", "v_proj", "lm_head"], [*EXPERTS, "mlp.gate.weight"]),
    "gpt_oss": (["q_proj", "o_proj", "lm_head"], [*EXPERTS, "mlp.router.weight"]),
    "deepseek_v3": (["q_b_proj", "kv_a_proj_with_mqa", "shared_experts.down_proj", "lm_head"], EXPERTS),
}


def config_of(family, **options):
    """Return the LoRA configuration of a tiny model, with two ranks and scalings."""
    modules, parameters = TARGETS[family]
    options = {"r": 4, "lora_alpha": 6, "rank_pattern": {"o_proj": 2}, "use_rslora": True} | options
    return peft.LoraConfig(target_modules=list(modules), target_parameters=list(parameters), **options)


def adapted_whole(folder, config):
    """Return the whole model with adapters of peft, whose factors are all random."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").train()
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert "lora_" in name
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def save_case(folder, family, **options):
    """Write a tiny base model and random adapters as peft does."""
    save_tiny(folder / "base", family, tie_word_embeddings=False)
    adapted_whole(folder / "base", config_of(family, **options)).save_pretrained(folder / "adapter")


@contextmanager
def wide_transformers(family):
    """Have transformers compute norms, rotary angles and routers in float64, which it casts to float32."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with ExitStack() as patches:
        for file in (modeling, modeling_rope_utils):
            patches.enter_context(mock.patch.object(file, "torch", Float64Torch()))
        if "deepseek" in family:
            patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def step_errors(mesh, stages, pipe, folder, family, options, *, wide=False):
    """Run a step; return the errors of losses and adapters' gradients against peft, and the names of all of these.

    wide: compare with transformers in float64 throughout.
    """
    losses = train_step(mesh, pipe)
    place = Mesh.of(mesh)
    with wide_transformers(family) if wide else nullcontext():
        whole = adapted_whole(folder / "base", config_of(family, **options))
        expected_losses = whole_losses(whole, place.replicas)
    expected = {name.replace(".default", ""): p.grad for name, p in whole.named_parameters() if p.requires_grad}
    errors = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert (parameter.grad is not None) is ("lora_" in name), f"{name} has a gradient, or none"
            assert parameter.requires_grad is ("lora_" in name)
        for adapted in adapter_places(stage):
            for factor in (adapted.adapter.lora_A, adapted.adapter.lora_B):  # the layout of peft's files, for gradients
                factor.weight.data.copy_(factor.weight.grad)
            for factor, values in zip("AB", full_factors(adapted.adapter)):
                name = f"base_model.model.{adapted.adapter.key}.lora_{factor}.weight"
                errors[name] = error_of(values, expected[name])
    if losses is not None:
        errors["losses"] = error_of(losses, torch.tensor(expected_losses[place.replica], dtype=torch.float64))
    return errors, set(expected)


def assert_small(results):
    """Assert that all errors of all ranks are below 1e-10, and that no adapter of peft is missing."""
    found = set()
    for errors, _ in results:
        assert max(errors.values()) < 1e-10, {name: error for name, error in errors.items() if error >= 1e-10}
        found |= errors.keys()
    assert found == results[0][1] | {"losses"}, "every adapter of peft is in one of the stages"
