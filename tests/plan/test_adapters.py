"""Adapters (LoRA) in a plan: the work and the memory of what is trained, and of what is frozen."""

import re
from dataclasses import replace

import pytest
import torch

from dualpipe.cli import main
from dualpipe.hf.model import TransformersModel
from dualpipe.models import Qwen3MoeConfig
from dualpipe.models.flops import head_flops, layer_flops
from dualpipe.models.stages import Recompute
from dualpipe.plan.activations import activation_bytes, head_in_parts
from dualpipe.plan.meta_run import kinds_of, start_layers
from dualpipe.plan.operators import head_parts, layer_parts
from dualpipe.plan.predict import PARTS, Prediction
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig
from plans import TINY, plan, prediction

pytest.importorskip("peft", reason='needs peft: pip install "dualpipe[hf]"')

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24)
LAYERS = range(4)
BF16 = torch.bfloat16
RANK = 2
QUERIES = 2 * RANK * (32 + 4 * 16)  # FLOPs of a token in an adapter of q_proj: RANK x 32, and 64 x RANK
DOWN = 4 * 2 * RANK * (24 + 32)  # of 4 experts' down_proj
SIZES = {"batch": 4, "sequence_length": 16}
TOKENS = 4 * 16


def lora_of(*targets: str) -> LoRAConfig:
    return LoRAConfig(rank=RANK, targets=targets)


def flops_of(parts, *, deferred: bool) -> float:
    return sum(operator.flops for part in parts for operator in (part.deferred if deferred else part.operators))


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize(("targets", "adapters"), [
    (("q_proj",), QUERIES), (("q_proj", "experts.down_proj"), QUERIES + DOWN)], ids=str)
def test_a_layer_computes_weight_gradients_of_its_adapters_alone(ep, targets, adapters):
    lora = lora_of(*targets)
    kind = kinds_of(CONFIG, [1], lora=lora)[0]
    assert not kind.is_start
    parts = layer_parts(CONFIG, kind, ep, BF16, lora=lora)
    expected = layer_flops(CONFIG, 1, 0) + adapters
    assert flops_of(parts.forward, deferred=False) == pytest.approx(expected, rel=1e-3)
    assert flops_of(parts.backward, deferred=False) == pytest.approx(expected, rel=1e-3), "input gradients"
    assert flops_of(parts.backward, deferred=True) == pytest.approx(adapters, rel=1e-3)


def test_layers_before_the_first_adapter_have_no_backward():
    lora = lora_of("2.self_attn.q_proj")
    kinds = kinds_of(CONFIG, LAYERS, lora=lora)
    assert [kind.is_start for kind in kinds] == [True, True, True, False]
    shared = kinds_of(CONFIG, LAYERS, lora=lora, cp=2)
    assert [kind.is_start for kind in shared] == [True, False, False, False], "a ring computes its blocks again"
    assert [kind.first for kind in kinds] == [0, 0, 2, 0]
    frozen, adapted, after = (layer_parts(CONFIG, kind, 1, BF16, lora=lora) for kind in kinds[1:])
    assert flops_of(frozen.backward, deferred=False) == flops_of(frozen.backward, deferred=True) == 0
    assert 0 < flops_of(adapted.backward, deferred=False) < flops_of(after.backward, deferred=False)
    assert flops_of(adapted.backward, deferred=True) == pytest.approx(QUERIES, rel=1e-3)
    assert flops_of(after.backward, deferred=True) == 0


def test_what_follows_a_recomputed_part_needs_a_gradient():
    lora = lora_of("2.self_attn.q_proj")
    rules = Recompute(("attention:1",), 4)
    assert start_layers(CONFIG, rules, lora) == range(2)
    assert start_layers(CONFIG, rules, lora_of("lm_head")) == range(2)
    assert start_layers(CONFIG, Recompute(), lora_of("lm_head")) == range(4)
    assert start_layers(CONFIG, Recompute(), NO_ADAPTERS) == range(0), "the embedding is trained"


def test_a_frozen_head_has_no_weight_gradient_and_an_adapted_one_whole_logits():
    frozen = head_parts(CONFIG, BF16, lora=lora_of("q_proj"))
    assert flops_of((*frozen.forward, *frozen.backward), deferred=False) == pytest.approx(2 * head_flops(CONFIG))
    assert flops_of(frozen.backward, deferred=True) == 0
    adapted = head_parts(CONFIG, BF16, lora=lora_of("lm_head"))
    factors = 2 * RANK * (32 + 61)
    assert flops_of(adapted.forward, deferred=False) == pytest.approx(head_flops(CONFIG) + factors)
    assert flops_of(adapted.backward, deferred=True) == pytest.approx(factors)
    assert head_in_parts(CONFIG, BF16, lora_of("q_proj")) is not None
    assert head_in_parts(CONFIG, BF16, lora_of("lm_head")) is None


MODELS = {
    "native": CONFIG,
    "transformers": TransformersModel.from_dict(CONFIG.to_dict() | {"max_position_embeddings": 64}),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ep", [1, 2])
def test_deferred_operands_are_those_of_adapters_alone(model, ep):
    """A token leaves the normed input (32), and rows of the factors (2 x RANK) and gradients of queries (64)."""
    counted = activation_bytes(model, range(1, 4), **SIZES, ep=ep, lora=lora_of("q_proj"))
    full = activation_bytes(model, range(1, 4), **SIZES, ep=ep)
    operands = 3 * TOKENS * (32 + 2 * RANK + 64) * BF16.itemsize
    assert counted.deferred == pytest.approx(operands, rel=0.02) and counted.deferred < full.deferred / 3
    assert counted.saved < full.saved and counted.input_backward < full.input_backward


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_layers_before_the_first_adapter_keep_nothing(model):
    sizes = [activation_bytes(model, range(2), **SIZES, lora=lora_of(target)).saved
             for target in ("3.self_attn.q_proj", "1.self_attn.q_proj", "q_proj")]
    nothing, second, both = sizes
    assert 0 <= nothing < 0.05 * both and 0.4 * both < second < 0.5 * both


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_adapters_of_experts_are_those_of_a_rank(model):
    counted = activation_bytes(model, range(1, 4), **SIZES, ep=2, lora=lora_of("experts.down_proj"))
    rows = 3 * TOKENS * 4  # of the experts of a rank, as many as it sends
    assert counted.deferred == pytest.approx(rows * (24 + 2 * RANK + 32) * BF16.itemsize, rel=0.1)


LORA = ("--lora.rank", "2", "--lora.targets", "q_proj", "v_proj", "experts.gate_up_proj")


def adapted_prediction(*options: str) -> tuple[Prediction, Prediction]:
    """Return the prediction of a run that trains adapters, and that of a full fine-tune."""
    return prediction(*LORA, *options), prediction(*options)


def test_frozen_weights_are_gathered_but_not_reduced_nor_updated():
    run, full = adapted_prediction("--parallel.dp", "2", "--parallel.ep", "2")
    assert tuple(run.parts) == PARTS and sum(run.parts.values()) == pytest.approx(run.step_seconds)
    for (gather, reduce), (full_gather, full_reduce) in zip(run.shards, full.shards):
        assert full_gather <= gather < 1.2 * full_gather and reduce < full_reduce
    worst = max(run.memory, key=lambda rank: rank.parameters - rank.frozen + rank.optimizer + rank.gradients)
    moved = 2 * (worst.parameters - worst.frozen + worst.optimizer + worst.gradients)
    assert run.optimizer == pytest.approx(moved / (3350e9 * 0.75)) and run.optimizer < full.optimizer / 2
    assert all(rank.frozen == 0 for rank in full.memory)
    assert all(rank.frozen < rank.parameters < rank.total for rank in run.memory)


def test_weights_in_blocks_are_frozen():
    """1 byte of an element and 4 bytes of a block of 128 x 128, which are not all full."""
    run, _ = adapted_prediction()
    quantized, _ = adapted_prediction("--dtypes.rules", "*.mlp.experts.gate_up_proj.weight,storage=fp8_block")
    for plain, blocks in zip(run.memory, quantized.memory):
        saved = plain.frozen - blocks.frozen
        assert saved == plain.parameters - blocks.parameters > 0


def test_muon_computes_for_adapters_alone():
    run, full = adapted_prediction("--optimizer.name", "muon")
    assert 0 < run.muon_flops < full.muon_flops / 5


def test_mfu_counts_what_is_trained():
    """Of a full fine-tune's FLOPs, weight gradients of frozen matrices are left out; adapters are added."""
    run, full = adapted_prediction()
    flops = [each.mfu / each.tokens_per_second for each in (run, full)]
    assert 0.6 < flops[0] / flops[1] < 1
    faster = replace(run, machine=replace(run.machine, tflops=2 * run.machine.tflops))
    assert faster.mfu / faster.tokens_per_second == pytest.approx(flops[0] / 2)


def test_the_command_plans_adapters(capsys):
    lines = plan(capsys, *LORA, "--rows", "1")
    assert re.match(r" +1 +", lines[1]) and lines[1].rstrip()


def test_an_unknown_target_is_refused_in_a_line(capsys):
    options = ("--gpus", "4", "--global-batch", "4096", "--lora.rank", "2", "--lora.targets", "no_proj")
    assert main(["plan", str(TINY), *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "[lora]" in line]
    assert "no_proj" in line
