"""The contract of every family: transformers' results, stages and segments with the bits of the whole, its sizes."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, modeling_rope_utils
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from dualpipe import Pipeline
from dualpipe.models import build_stages, config_from_dict, read_config
from dualpipe.models.flops import parameter_counts
from dualpipe.models.stages import Recompute
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.attention import Yarn
from dualpipe.nn.init import local_part, seeded_normal_
from models import (
    Float64Torch,
    batch,
    errors_against_whole,
    grads,
    ours,
    randomize_vectors,
    relative,
    split_experts,
    train,
    whole,
)
from ranks import run_ranks
from tiny_models import GPT_OSS_YARN, TINY, tiny

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def stretched(**changes: Any) -> dict[str, Any]:
    # The original length has the ramp end inside of the 4 frequencies of the tiny head.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
    return {"max_position_embeddings": 256, "rope_parameters": yarn | changes}


class Family(NamedTuple):
    reference: Any  # transformers' file
    variants: dict[str, dict[str, Any]]  # changes of the tiny config.json


WINDOWS = {"layer_types": ["sliding_attention"] * 3}
NO_WINDOWS = {"layer_types": ["full_attention"] * 3}
OF_DEEPSEEK = {
    "plain": {},
    "queries without a latent": {"q_lora_rank": None},
    "biased attention": {"attention_bias": True},
    "biased attention, queries without a latent": {"attention_bias": True, "q_lora_rank": None},
    "wide values": {"v_head_dim": 16},
    "yarn": stretched(),
    "yarn, one mscale": stretched(mscale=0.707, mscale_all_dim=0.707),
    "yarn, two mscales": stretched(mscale=1.0, mscale_all_dim=0.5, beta_fast=4, beta_slow=0.5),
    "yarn, mscale of all dimensions only": stretched(mscale_all_dim=1.0),
    "yarn, attention factor": stretched(attention_factor=0.8),
    "all layers dense": {"first_k_dense_replace": 3},
    "more dense layers than layers": {"first_k_dense_replace": 5},
    "no layer dense": {"first_k_dense_replace": 0},
    "one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "one dense layer": {"num_hidden_layers": 1},
    "top 1": {"num_experts_per_tok": 1},
    "one shared expert": {"n_shared_experts": 1},
    "no shared experts": {"n_shared_experts": 0},  # in transformers, an MLP of no width
    "tied": {"tie_word_embeddings": True},
}
FAMILIES = {
    "qwen3_moe": Family(modeling_qwen3_moe, {
        "plain": {},
        "multi-head, unnormalised": {"num_key_value_heads": 4, "norm_topk_prob": False},
        "multi-query, top 1": {"num_key_value_heads": 1, "num_experts_per_tok": 1, "norm_topk_prob": False},
        "top 1, normalised": {"num_experts_per_tok": 1},
        "all experts": {"num_experts_per_tok": 6},
        "biased attention": {"attention_bias": True},
        "dense first layer": {"mlp_only_layers": [0]},
        "every second layer sparse": {"decoder_sparse_step": 2},
        "tied": {"tie_word_embeddings": True},
        "yarn": stretched(rope_theta=1e4),
        "yarn, all said": stretched(rope_theta=1e6, factor=8.0, original_max_position_embeddings=512, beta_fast=16.0,
                                    beta_slow=2.0, attention_factor=1.5, truncate=False),
    }),
    "deepseek_v2": Family(modeling_deepseek_v2, {
        **OF_DEEPSEEK,
        "greedy, one group": {"n_group": 1, "topk_group": 1},
        "greedy in spite of groups": {"n_group": 4, "topk_group": 1},
        "best groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                        "routed_scaling_factor": 16.0},
        "best one of one group": {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1},
        "all experts": {"num_experts_per_tok": 8},
    }),
    "deepseek_v3": Family(modeling_deepseek_v3, {
        **OF_DEEPSEEK,
        "one group": {"n_group": 1, "topk_group": 1},
        "all groups": {"topk_group": 4, "num_experts_per_tok": 8},
        "unnormalised": {"norm_topk_prob": False},
        "top 1, unnormalised": {"num_experts_per_tok": 1, "norm_topk_prob": False},
        "halves rotated": {"rope_interleave": False},
        "halves rotated, yarn": {"rope_interleave": False} | stretched(mscale=1.0, mscale_all_dim=1.0),
    }),
    "gpt_oss": Family(modeling_gpt_oss, {
        "plain": {},
        "multi-head, all experts": {"num_key_value_heads": 4, "num_experts_per_tok": 6},
        "multi-query, top 1": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
        "unbiased attention": {"attention_bias": False},
        "no window": NO_WINDOWS,
        "windows only": WINDOWS,
        "only the token itself": WINDOWS | {"sliding_window": 1},
        "window of the sequence": {"sliding_window": 11},
        "window longer than the sequence": {"sliding_window": 64},
        "one layer": {"num_hidden_layers": 1},
        "one layer, no window": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "tied": {"tie_word_embeddings": True},
        "clamped early": {"swiglu_limit": 0.5, "swiglu_alpha": 2.0},
        "yarn": {"rope_parameters": GPT_OSS_YARN | {"rope_theta": 1e4, "truncate": True, "factor": 4.0}},
        "unstretched": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    }),
}
families = pytest.mark.parametrize("family", FAMILIES)


def hf_model(family: str, changes: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY[family] | changes)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **how).to(dtype)
    randomize_vectors(model)
    return model


def pair(family: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple:
    """Return transformers' model, and ours with its values and its configuration."""
    reference, config = hf_model(family, changes, dtype), tiny(family, **changes)
    model = whole(config, dtype=dtype)
    model.load_state_dict(ours(config, model.state_dict(), reference.state_dict()))
    return reference, model, config


def compare(family: str, changes: dict[str, Any], dtype: torch.dtype, positions=None, **packed: Any) -> None:
    """Compare logits, loss and every gradient; `packed` tells transformers what `positions` tells us."""
    reference, model, config = pair(family, changes, dtype)
    expected, expected_loss = train(reference, config, use_cache=False, **packed)
    actual, loss = train(model, config, positions=positions)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    assert relative(actual, expected) < tolerance
    assert relative(loss, expected_loss) < tolerance
    expected_grads = ours(config, grads(model), grads(reference))
    assert grads(model).keys() == expected_grads.keys()
    # One normalised choice has the same weight whatever the router says: its gradient is zero but for rounding.
    normalised = family == "gpt_oss" or getattr(config, "norm_topk_prob", False)
    is_constant = normalised and config.num_experts_per_tok == 1
    largest = max(grad.norm().item() for grad in expected_grads.values())
    for name, grad in grads(model).items():
        floor = largest if is_constant and ".mlp.gate." in name else 1e-30
        assert relative(grad, expected_grads[name], floor) < tolerance, name


@pytest.fixture
def wide_transformers(request, monkeypatch):
    """Have transformers compute norms, rotary angles and routers in float64, which it casts to float32."""
    family = request.getfixturevalue("family")
    for file in (FAMILIES[family].reference, modeling_rope_utils):
        monkeypatch.setattr(file, "torch", Float64Torch())
    if "deepseek" in family:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize(("family", "variant"), [
    (name, variant) for name, family in FAMILIES.items() for variant in family.variants])
def test_logits_and_gradients_equal_transformers(family, variant, wide_transformers):
    compare(family, FAMILIES[family].variants[variant], torch.float64)


@pytest.mark.parametrize("variant", ["plain", "yarn", "tied"])
@families
def test_logits_and_gradients_equal_transformers_in_float32(family, variant):
    compare(family, FAMILIES[family].variants[variant], torch.float32)


def documents_in_rows(window: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the positions of documents in rows, and masks of what each token sees, by the type of a layer."""
    lengths = [[11], [4, 7], [1, 1, 6, 3]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    query, key = torch.arange(11).unsqueeze(1), torch.arange(11)
    seen = (documents.unsqueeze(1) == documents.unsqueeze(2)) & (key <= query)
    masks = {}
    for kind, mask in {"full": seen, "sliding": seen & (key > query - window)}.items():
        scores = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        masks[f"{kind}_attention"] = scores.unsqueeze(1)
    return positions, masks


@pytest.mark.parametrize(("family", "changes"), [
    ("qwen3_moe", {}), ("qwen3_moe", stretched()),
    *((family, stretched(mscale_all_dim=0.707, mscale=0.707)) for family in ("deepseek_v2", "deepseek_v3")),
    *(("gpt_oss", {"sliding_window": window}) for window in (1, 3, 64)),
])
def test_documents_in_a_row_equal_transformers(family, changes, wide_transformers):
    positions, masks = documents_in_rows(changes.get("sliding_window", 0))
    # transformers' gpt-oss does not look for documents in position ids.
    packed = {"attention_mask": masks} if family == "gpt_oss" else {}
    compare(family, changes, torch.float64, positions, position_ids=positions, **packed)


@families
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family):
    experts = 6 if family in ("qwen3_moe", "gpt_oss") else 8
    changes = {"num_experts_per_tok": experts, "n_group": 1, "topk_group": 1}  # rounding must not choose other experts
    if "deepseek" not in family:
        changes = {"num_experts_per_tok": experts}
    exact, _, config = pair(family, changes)
    expected, expected_loss = train(exact, config)
    rounded, model = hf_model(family, changes, torch.bfloat16), whole(config, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())  # torch 2.11 draws other numbers in bfloat16
    model.load_state_dict(ours(config, model.state_dict(), rounded.state_dict()))
    errors = []
    for each in (model, rounded):
        logits, loss = train(each, config)
        assert logits.dtype is torch.bfloat16 and loss.dtype is torch.float32
        assert all(grad.dtype is torch.bfloat16 for grad in grads(each).values())
        assert loss.item() == pytest.approx(expected_loss.item(), rel=0.02)
        errors.append(relative(logits.float(), expected))
    assert errors[0] < 1.5 * errors[1] < 0.06  # three layers of 8 bits


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_per_expert_state_dict_is_stacked(family):
    fused, config = hf_model(family, {}, torch.float32).state_dict(), tiny(family)
    shapes = whole(config).state_dict()
    expected, actual = ours(config, shapes, fused), ours(config, shapes, split_experts(fused))
    assert actual.keys() == expected.keys() == shapes.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


# -- stages


@pytest.mark.parametrize(("num_stages", "changes"), [
    (1, {}), (2, {"tie_word_embeddings": True}), (3, {}), (4, {"tie_word_embeddings": True}), (5, {})], ids=str)
@families
def test_stages_in_sequence_are_the_whole_model(family, changes, num_stages):
    config = tiny(family, **changes)
    model, stages = whole(config), build_stages(config, num_stages)
    for stage in stages:
        stage.init_weights(0)
    assert torch.equal(train(nn.Sequential(*stages), config)[0], train(model, config)[0])
    staged = {name: grad for stage in stages for name, grad in grads(stage).items()}
    tied = {"lm_head.weight"} if changes else set()
    assert staged.keys() - tied == grads(model).keys()
    for name, grad in grads(model).items():
        assert torch.equal(staged[name], grad), name
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(model.state_dict())


WITH_A_DENSE_LAYER = {"qwen3_moe": {"mlp_only_layers": [1]}}


@pytest.mark.parametrize("rules", [(), ("attention",), ("experts:1-2", "norms"), ("layer",)], ids=str)
@families
def test_segments_have_the_bits_of_the_forward(family, rules):
    config = tiny(family, **WITH_A_DENSE_LAYER.get(family, {}))
    plain, cut = whole(config), whole(config)
    cut.recompute = Recompute(rules)
    tokens, labels = batch(config)
    _, loss = train(plain, config)
    losses, _ = Pipeline([cut], schedule="1f1b").step(
        tokens, num_chunks=1, criterion=cross_entropy_loss, labels=(labels,))
    assert torch.equal(losses[0], loss)
    for (name, p), q in zip(cut.named_parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad), name


FOUR_LAYERS = {"num_hidden_layers": 4} | stretched(mscale=0.707, mscale_all_dim=0.707)
PIPELINED = {
    "deepseek_v2": FOUR_LAYERS | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": FOUR_LAYERS,
    "gpt_oss": {"num_hidden_layers": 5, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 3},
}


def with_biases(model: nn.Module, num_chunks: int) -> None:
    """Fill biases, which start at zero and would hide a mix-up; equal values in every layout."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            seeded_normal_(buffer, std=0.2, seed=0, name=name)
        for name, param in model.named_parameters():
            if name.endswith(".bias"):
                local, part = local_part(param)
                local.copy_(torch.linspace(-0.3, 0.3, param.shape[-1]).expand(param.shape)[part])


def pipelined(rank: int, family: str, shape: tuple[int, int, int], schedule: str, is_packed: bool):
    return errors_against_whole(tiny(family, **PIPELINED[family]), shape, schedule=schedule, prepare=with_biases,
                                is_packed=is_packed, recompute=("layer", "dispatch") if is_packed else ())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape", "schedule", "is_packed"), [
    ("deepseek_v2", (2, 1, 2), "dualpipev", False), ("deepseek_v2", (2, 1, 1), "1f1b", True),
    ("deepseek_v3", (2, 1, 2), "dualpipev", True), ("deepseek_v3", (2, 1, 1), "dualpipev", False),
    ("gpt_oss", (2, 1, 2), "dualpipev", True), ("gpt_oss", (2, 1, 2), "1f1b", False),
    ("gpt_oss", (2, 1, 1), "dualpipev", False),
], ids=str)
def test_pipelined_equals_the_whole_model(family, shape, schedule, is_packed):
    for gradients, losses in run_ranks(pipelined, prod(shape), family, shape, schedule, is_packed):
        assert gradients < 1e-10 and losses < 1e-10


# -- config.json

OF_OLDER_TOOLS = {"torch_dtype": "bfloat16", "hidden_act": "silu", "attention_dropout": 0.0}
OLDER_YARN = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
              "original_max_position_embeddings": 4096}
OLDER_DEEPSEEK = (
    {"rope_theta": 500, "rope_scaling": OLDER_YARN | {"type": "yarn"}, "aux_loss_alpha": 0.001, "seq_aux": True,
     "ep_size": 1, "pretraining_tp": 1, "moe_layer_freq": 1},
    {"rope_parameters": OLDER_YARN | {"rope_type": "yarn", "rope_theta": 500}},
    {"rope_theta": 500.0, "yarn": Yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707)},
)
FORMS = {  # changes of an older config.json, of transformers' configuration, and what they mean
    "qwen3_moe": (
        {"rope_theta": 5e5, "rope_scaling": None, "architectures": ["Qwen3MoeForCausalLM"], "sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5},
    ),
    "deepseek_v2": OLDER_DEEPSEEK,
    "deepseek_v3": OLDER_DEEPSEEK,
    "gpt_oss": (
        {"rope_theta": 150000, "rope_scaling": GPT_OSS_YARN, "experts_per_token": 2, "swiglu_limit": 7.0,
         "initial_context_length": 4096, "quantization_config": {"quant_method": "mxfp4"},
         "router_aux_loss_coef": 0.9},
        {},
        {"rope_theta": 150_000.0, "yarn": Yarn(32.0, 4096, 32.0, 1.0, truncate=False),
         "layer_types": ("sliding_attention", "full_attention", "sliding_attention")},
    ),
}


@families
def test_config_from_both_hub_forms(family, tmp_path):
    older, newer, meaning = FORMS[family]
    own = {key: value for key, value in TINY[family].items() if key != "rope_parameters"}
    hub = CONFIG_MAPPING[family](**TINY[family] | newer)
    hub.save_pretrained(tmp_path)
    (tmp_path / "older.json").write_text(json.dumps(own | OF_OLDER_TOOLS | older | {"model_type": family}))
    expected = dataclasses.replace(tiny(family), **meaning)
    assert read_config(tmp_path / "older.json") == expected
    assert read_config(tmp_path / "config.json") == read_config(tmp_path) == expected
    assert config_from_dict(hub.to_dict()) == expected


REFUSED = [
    *((family, word, changes) for family in FAMILIES for word, changes in (
        ("hidden_act", {"hidden_act": "gelu"}),
        ("attention_dropout", {"attention_dropout": 0.1}),
        ("hidden_act='gelu'.*num_expert=3", {"hidden_act": "gelu", "num_expert": 3}),
        ("vocab_size", {"vocab_size": None}),
        ("num_experts_per_tok=0", {"num_experts_per_tok": 0}),
        ("got 9", {"num_experts_per_tok": 9}))),
    *((family, word, changes) for family in ("qwen3_moe", "gpt_oss") for word, changes in (
        ("model_type", {"model_type": "other"}),
        (r"num_key_value_heads \(3\)", {"num_key_value_heads": 3}),
        ("head_dim must be even", {"head_dim": 7}))),
    *((family, word, changes) for family in ("deepseek_v2", "deepseek_v3") for word, changes in (
        ("mlp_bias", {"mlp_bias": True}),
        ("moe_layer_freq", {"moe_layer_freq": 2}),
        ("scoring_func", {"scoring_func": "tanh"}),
        ("topk_method.*'random'", {"topk_method": "random"}),
        ("'linear'", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("num_key_value_heads", {"num_key_value_heads": 2}),
        ("qk_rope_head_dim must be even", {"qk_rope_head_dim": 7}),
        ("q_lora_rank", {"q_lora_rank": 0}),
        ("lacks kv_lora_rank, num_experts_per_tok", {"kv_lora_rank": None, "num_experts_per_tok": None}))),
    ("qwen3_moe", "use_sliding_window", {"use_sliding_window": True}),
    ("qwen3_moe", "'yarn'", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("qwen3_moe", "partial_rotary_factor",
     {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("qwen3_moe", "decoder_sparse_step", {"decoder_sparse_step": 0}),
    ("qwen3_moe", "intermediate_size", {"intermediate_size": 0, "mlp_only_layers": [1]}),
    ("qwen3_moe", "num_hidden_layers='4', num_key_value_heads=0, norm_topk_prob=1, mlp_only_layers=3",
     {"num_hidden_layers": "4", "num_key_value_heads": 0, "norm_topk_prob": 1, "mlp_only_layers": 3}),
    ("qwen3_moe", "num_experts=0", {"num_experts": None, "num_local_experts": 0}),
    ("qwen3_moe", "JSON object", {"rope_parameters": "yarn"}),
    ("qwen3_moe", "rope_theta='1', factor=0", {"rope_parameters": {"rope_theta": "1", "factor": 0}}),
    ("qwen3_moe", "yarn={}", {"yarn": {}}),
    ("deepseek_v2", "norm_topk_prob=True", {"norm_topk_prob": True}),
    ("deepseek_v2", "rope_interleave=False", {"rope_interleave": False}),
    ("deepseek_v2", "'noaux_tc'", {"topk_method": "noaux_tc"}),
    ("deepseek_v2", "scoring_func='sigmoid'", {"scoring_func": "sigmoid"}),
    ("deepseek_v2", "n_group.*got 3", {"topk_method": "group_limited_greedy", "n_group": 3}),
    ("deepseek_v3", "topk_method='greedy'", {"topk_method": "greedy"}),
    ("deepseek_v3", "scoring_func='softmax'", {"scoring_func": "softmax"}),
    ("deepseek_v3", "n_group.*got 3", {"n_group": 3}),
    ("deepseek_v3", "topk_group.*got 5", {"topk_group": 5}),
    ("deepseek_v3", "group_best.*got 2", {"n_group": 8}),
    ("gpt_oss", "num_experts", {"num_experts": 5}),
    ("gpt_oss", "experts_per_token", {"experts_per_token": 3}),
    ("gpt_oss", "'llama3'", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}),
    ("gpt_oss", r"3 layers; got \['full_attention'\]", {"layer_types": ["full_attention"]}),
    ("gpt_oss", "linear_attention", {"layer_types": ["linear_attention"] * 3}),
    ("gpt_oss", "sliding_window", {"sliding_window": None}),
]


@pytest.mark.parametrize(("family", "word", "changes"), REFUSED)
def test_unsupported_options_are_named(family, word, changes):
    with pytest.raises(ValueError, match=word):
        type(tiny(family)).from_dict(TINY[family] | {"model_type": family} | changes)


# -- the published models, with all parameters and those that a token passes: the embedding and the head count

PUBLISHED = {
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v2": (235_741_434_880, 21_375_800_320),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes_and_the_names_of_the_hub(name):
    config = read_config(EXAMPLES / name)
    hub = AutoConfig.from_pretrained(EXAMPLES / name)
    with torch.device("meta"):
        (model,) = build_stages(config, 1)
        reference = AutoModelForCausalLM.from_config(hub, experts_implementation="eager").state_dict()
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name][0]
    assert parameter_counts(config)[:2] == PUBLISHED[name]
    apart, together = {}, {}  # each expert's own tensors, as on the hub, and all in one, as in transformers' memory
    for key, tensor in model.state_dict().items():
        forms = config.hub_parts(key, tensor.shape)
        apart |= {part.name: part.shape for part in forms[0]}
        together |= {part.name: part.shape for part in forms[-1]}
    assert together == {key: tuple(tensor.shape) for key, tensor in reference.items()}
    if config.model_type != "gpt_oss":  # which is stacked on the hub, too
        assert apart == {key: tuple(tensor.shape) for key, tensor in split_experts(reference).items()}
    assert not any(config.ignored_on_hub(key) for key in apart)
