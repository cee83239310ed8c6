"""DeepSeek-V2 and -V3 against transformers' models, their stages against the whole, and the published sizes."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import modeling_rope_utils
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from dualpipe import Pipeline
from dualpipe.checkpoint.hub.load import model_shapes
from dualpipe.models import DeepseekV2Config, DeepseekV3Config, build_stages, config_from_dict, read_config
from dualpipe.models.deepseek import LatentAttention
from dualpipe.models.stages import Recompute
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.attention import Yarn
from dualpipe.nn.init import seeded_normal_
from dualpipe.parallel.fsdp.materialize import build_on_meta
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.parity.errors import difference
from dualpipe.train.step import build_model, build_whole
from models import (
    Float64Torch,
    batch,
    compare_gradients,
    grads,
    ours,
    randomize_vectors,
    relative,
    split_experts,
    train,
    whole,
)
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
SHARED = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 5, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
}
TINY = {
    "v2": SHARED | {"model_type": "deepseek_v2", "topk_method": "greedy", "routed_scaling_factor": 1.5},
    "v3": SHARED | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
}
FAMILIES = {"v2": DeepseekV2Config, "v3": DeepseekV3Config}
REFERENCES = {"v2": modeling_deepseek_v2, "v3": modeling_deepseek_v3}


def stretched(**changes):
    # The original length has the ramp end inside of the 4 frequencies of the tiny head.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
    return {"max_position_embeddings": 256, "rope_parameters": yarn | changes}


BOTH = {
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
    "tied": {"tie_word_embeddings": True},
}
VARIANTS = {
    "v2": BOTH | {
        "greedy, one group": {"n_group": 1, "topk_group": 1},
        "greedy in spite of groups": {"n_group": 4, "topk_group": 1},
        "best groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                        "routed_scaling_factor": 16.0},
        "best one of one group": {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1},
        "all experts": {"num_experts_per_tok": 8},
    },
    "v3": BOTH | {
        "one group": {"n_group": 1, "topk_group": 1},
        "all groups": {"topk_group": 4, "num_experts_per_tok": 8},
        "unnormalised": {"norm_topk_prob": False},
        "top 1, unnormalised": {"num_experts_per_tok": 1, "norm_topk_prob": False},
        "halves rotated": {"rope_interleave": False},
        "halves rotated, yarn": {"rope_interleave": False} | stretched(mscale=1.0, mscale_all_dim=1.0),
    },
}
CASES = {f"{version}, {name}": (version, changes) for version, of in VARIANTS.items() for name, changes in of.items()}
versions = pytest.mark.parametrize("version", TINY)
cases = pytest.mark.parametrize(("version", "changes"), CASES.values(), ids=CASES)


def tiny(version, **changes):
    return config_from_dict(TINY[version] | changes)


def hf_config(version, changes):
    values = TINY[version] | changes
    name = type(tiny(version)).__name__
    return getattr(transformers, name)(**values, attn_implementation="eager", experts_implementation="eager")


def hf_model(version, changes, dtype):
    torch.manual_seed(0)
    config = hf_config(version, changes)
    model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config).to(dtype)
    randomize_vectors(model)
    return model


def wide_transformers(monkeypatch, version):
    """transformers casts norms, rotary angles and the router to float32, by names of `torch` and by a method."""
    for module in (REFERENCES[version], modeling_rope_utils):
        monkeypatch.setattr(module, "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def check(version, changes, dtype, positions=None):
    reference = hf_model(version, changes, dtype)
    config = tiny(version, **changes)
    model = whole(config, dtype=dtype)
    model.load_state_dict(ours(config, model.state_dict(), reference.state_dict()))
    packed = {} if positions is None else {"position_ids": positions}
    expected, expected_loss = train(reference, config, use_cache=False, **packed)
    actual, loss = train(model, config, positions=positions)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    assert relative(actual, expected) < tolerance
    assert relative(loss, expected_loss) < tolerance
    expected_grads = ours(config, grads(model), grads(reference))
    assert grads(model).keys() == expected_grads.keys()
    # One normalised choice has the same weight whatever the router says: its gradient is zero but for rounding.
    constant = config.num_experts_per_tok == 1 and getattr(config, "norm_topk_prob", False)
    largest = max(grad.norm().item() for grad in expected_grads.values())
    for name, grad in grads(model).items():
        floor = largest if constant and name.endswith("mlp.gate.weight") else 1e-30
        assert relative(grad, expected_grads[name], floor) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@cases
def test_logits_and_gradients_equal_transformers(version, changes, dtype, monkeypatch):
    if dtype is torch.float64:
        wide_transformers(monkeypatch, version)
    check(version, changes, dtype)


@versions
def test_packed_documents_equal_transformers(version, monkeypatch):
    wide_transformers(monkeypatch, version)
    rows = ((11,), (4, 7), (1, 1, 9))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    check(version, stretched(mscale_all_dim=0.707, mscale=0.707), torch.float64, positions)


@versions
def test_no_shared_experts(version):
    """transformers has an MLP of no width for them, whose result is zero."""
    changes = {"n_shared_experts": 0}
    reference, config = hf_model(version, changes, torch.float32), tiny(version, **changes)
    model = whole(config)
    assert not any("shared_experts" in name for name in model.state_dict())
    model.load_state_dict(ours(config, model.state_dict(), reference.state_dict()))
    assert relative(train(model, config)[0], train(reference, config)[0]) < 1e-5
    assert tiny(version, n_shared_experts=None) == dataclasses.replace(config, n_shared_experts=None)
    assert whole(tiny(version, n_shared_experts=None)).state_dict().keys() == model.state_dict().keys()


@versions
def test_bfloat16_is_as_near_to_float32_as_transformers_is(version):
    reference, config = hf_model(version, {}, torch.float32), tiny(version)
    model = whole(config)
    model.load_state_dict(ours(config, model.state_dict(), reference.state_dict()))
    expected = train(model, config)[1].item()
    narrow = whole(config, dtype=torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    logits, loss = train(narrow, config)
    assert logits.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    assert all(grad.dtype is torch.bfloat16 for grad in grads(narrow).values())
    _, hf_loss = train(reference.to(torch.bfloat16), config)
    allowed = 0.02  # three layers of 8 bits each, and experts that were nearly chosen
    assert loss.item() == pytest.approx(expected, rel=allowed)
    assert hf_loss.item() == pytest.approx(expected, rel=allowed)


@versions
def test_per_expert_state_dict_is_stacked(version):
    config = tiny(version)
    fused = hf_model(version, {}, torch.float32).state_dict()
    model = whole(config)
    expected = ours(config, model.state_dict(), fused)
    actual = ours(config, model.state_dict(), split_experts(fused))
    assert actual.keys() == expected.keys() == model.state_dict().keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_correction_bias_changes_the_choice_and_not_the_weights():
    model = whole(tiny("v3", n_group=1, topk_group=1, norm_topk_prob=False))
    gate = model.layers["1"].mlp.gate
    x_TH = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.e_score_correction_bias[5] = 10.0
        weights_TK, experts_TK = gate(x_TH)
        chosen = experts_TK == 5
        assert chosen.any(dim=1).all()
        torch.testing.assert_close(weights_TK[chosen], 2.5 * (x_TH @ gate.weight[5]).sigmoid())


# -- stages


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"first_k_dense_replace": 3}], ids=str)
@versions
def test_stages_in_sequence_are_the_whole_model(version, changes, num_stages):
    config = tiny(version, **changes)
    model, stages = whole(config), build_stages(config, num_stages)
    for stage in stages:
        stage.init_weights(0)
    assert torch.equal(train(nn.Sequential(*stages), config)[0], train(model, config)[0])
    staged = {name: grad for stage in stages for name, grad in grads(stage).items()}
    for name, grad in grads(model).items():
        assert torch.equal(staged[name], grad), name
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(model.state_dict())


@pytest.mark.parametrize("rules", [(), ("attention", "experts:1"), ("layer",)], ids=str)
@versions
def test_segments_have_the_bits_of_the_forward(version, rules):
    config = tiny(version, **stretched(mscale=0.707, mscale_all_dim=0.707))
    plain, cut = whole(config), whole(config)
    cut.recompute = Recompute(rules)
    tokens, labels = batch(config)
    _, loss = train(plain, config)
    losses, _ = Pipeline([cut], schedule="1f1b").step(
        tokens, num_chunks=1, criterion=cross_entropy_loss, labels=(labels,)
    )
    assert torch.equal(losses[0], loss)
    for (name, p), q in zip(cut.named_parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad), name


MICRO_BATCHES = 5
PIPELINED = {
    "v2": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_hidden_layers": 4},
    "v3": {"num_hidden_layers": 4},
}


def pipelined(rank, version, shape):
    """The worst gradient and the loss of this rank, against the unpipelined model."""
    config = tiny(version, **PIPELINED[version], **stretched(mscale=0.707, mscale_all_dim=0.707))
    mesh = build_mesh(*shape, torch.device("cpu"))
    replicas, replica = Mesh.of(mesh).replicas, Mesh.of(mesh).replica
    common = {"dtypes": torch.float64, "device": torch.device("cpu")}
    schedule = build("dualpipev", shape[0], MICRO_BATCHES)
    model = build_model(config, schedule, mesh["pp"].get_local_rank(), mesh=mesh, **common)
    reference = build_whole(config, **common)
    for stage in (*model.stages, reference):
        for name, buffer in stage.named_buffers():
            seeded_normal_(buffer, std=0.2, seed=0, name=name)
    rows = torch.randint(61, (2 * MICRO_BATCHES * replicas, 8), generator=torch.Generator().manual_seed(2))
    tokens, targets = rows[:, :-1], rows[:, 1:].contiguous()
    mine = slice(replica * 2 * MICRO_BATCHES, (replica + 1) * 2 * MICRO_BATCHES)
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev")
    loss, _ = pipe.step(
        *((tokens[mine],) if model.has_first else ()), num_chunks=MICRO_BATCHES,
        criterion=MicroBatchLoss(MICRO_BATCHES) if model.has_last else None,
        labels=(targets[mine],) if model.has_last else (),
    )
    criterion, losses = MicroBatchLoss(MICRO_BATCHES * replicas), []
    for xs, ys in zip(tokens.split(2), targets.split(2)):
        one = criterion(reference(xs), ys)
        one.backward()
        losses.append(one.detach())
    expected = torch.stack(losses).split(MICRO_BATCHES)[replica] * replicas
    worst = max(d.relative for d in compare_gradients(model.stages, reference))
    return worst, 0.0 if loss is None else difference("loss", loss, expected).relative


@pytest.mark.slow
@pytest.mark.parametrize(("version", "shape"), [
    ("v3", (2, 1, 2)), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("v2", (2, 1, 2)), ("v2", (2, 1, 1)), ("v3", (2, 1, 1)))),
], ids=str)
def test_pipelined_equals_the_whole_model(version, shape):
    pp, dp, ep = shape
    for gradients, losses in run_ranks(pipelined, pp * dp * ep, version, shape):
        assert gradients < 1e-10 and losses < 1e-10


# -- config.json


@versions
def test_config_from_both_hub_forms(version, tmp_path):
    yarn = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096}
    others = {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "pretraining_tp": 1, "moe_layer_freq": 1,
              "attention_dropout": 0.0, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    older = TINY[version] | others | {"rope_theta": 500, "rope_scaling": yarn | {"type": "yarn"}}
    newer = hf_config(version, {"rope_parameters": yarn | {"rope_type": "yarn", "rope_theta": 500}})
    newer.save_pretrained(tmp_path)
    (tmp_path / "older.json").write_text(json.dumps(older))
    expected = dataclasses.replace(
        tiny(version), rope_theta=500.0, yarn=Yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707)
    )
    family = FAMILIES[version]
    assert read_config(tmp_path / "older.json") == expected
    assert read_config(tmp_path / "config.json") == expected
    assert read_config(tmp_path) == expected
    assert family.from_dict(newer.to_dict()) == expected


@versions
def test_null_is_not_the_same_as_left_out(version):
    family = FAMILIES[version]
    nulls = {"q_lora_rank": None, "n_group": None, "topk_group": None, "num_key_value_heads": None}
    config = family.from_dict(TINY[version] | nulls)
    assert config.q_lora_rank is config.n_group is None
    assert config.gate().n_group == config.gate().topk_group == 1
    least = {key: value for key, value in TINY[version].items() if key not in nulls and "dense" not in key}
    with pytest.raises(ValueError, match=r"the configuration lacks q_lora_rank$"):
        family.from_dict(least)
    hub = type(hf_config(version, {}))(**least)
    left_out = family.from_dict(least | {"q_lora_rank": 12})
    for key in ("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor", "tie_word_embeddings"):
        assert getattr(left_out, key) == getattr(hub, key), key


REFUSED = {
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "attention_dropout=0.1": {"attention_dropout": 0.1},
    "mlp_bias=True": {"mlp_bias": True},
    "moe_layer_freq=2": {"moe_layer_freq": 2},
    "scoring_func='tanh'": {"scoring_func": "tanh"},
    "hidden_act='gelu'.*scoring_func='tanh'.*num_expert=3 \\(unknown\\)": {
        "hidden_act": "gelu", "scoring_func": "tanh", "num_expert": 3,
    },
    "topk_method.*'random'": {"topk_method": "random"},
    "rope_type 'linear'": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "model_type must be 'deepseek_v[23]'": {"model_type": "deepseek"},
    "num_key_value_heads must be num_attention_heads \\(4\\).*; got 2": {"num_key_value_heads": 2},
    "qk_rope_head_dim must be even.*; got 7": {"qk_rope_head_dim": 7},
    "q_lora_rank must be at least 1, or null.*; got 0": {"q_lora_rank": 0},
    "top_k must be 1 to the .* experts.*; got 9": {"num_experts_per_tok": 9},
    "wrong type or size: num_experts_per_tok=0$": {"num_experts_per_tok": 0},
    "lacks kv_lora_rank, num_experts_per_tok": {"kv_lora_rank": None, "num_experts_per_tok": None},
}
REFUSED_V2 = {
    "norm_topk_prob=True \\(only False\\)": {"norm_topk_prob": True},
    "rope_interleave=False": {"rope_interleave": False},
    "topk_method must be 'greedy' or 'group_limited_greedy'; got 'noaux_tc'": {"topk_method": "noaux_tc"},
    "scoring_func='sigmoid'": {"scoring_func": "sigmoid"},
    "n_group must divide the number of experts \\(8\\); got 3": {"topk_method": "group_limited_greedy", "n_group": 3},
}
REFUSED_V3 = {
    "topk_method='greedy' \\(only 'noaux_tc'\\)": {"topk_method": "greedy"},
    "scoring_func='softmax'": {"scoring_func": "softmax"},
    "n_group must divide the number of experts \\(8\\); got 3": {"n_group": 3},
    "topk_group must be 1 to n_group \\(4\\); got 5": {"topk_group": 5},
    "group_best must be 1 to the size of a group \\(1\\); got 2": {"n_group": 8},
}


@pytest.mark.parametrize(
    ("version", "message", "changes"),
    [*(("v2", *pair) for pair in (REFUSED | REFUSED_V2).items()),
     *(("v3", *pair) for pair in (REFUSED | REFUSED_V3).items())],
)
def test_unsupported_options_are_named(version, message, changes):
    with pytest.raises(ValueError, match=message):
        FAMILIES[version].from_dict(TINY[version] | changes)


# -- the published models


# All parameters, and how many a token passes. The papers say 15.7B and 2.4B (without embedding), 236B and 21B, 671B and
# 37B.
PUBLISHED = {
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v2": (235_741_434_880, 21_375_800_320),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
}
published = pytest.mark.parametrize("name", PUBLISHED)


def on_meta(name):
    config = read_config(EXAMPLES / name)
    if name == "deepseek-v3":  # whose largest parameter, 30 GB, is more than a small machine has even for a moment
        with torch.device("meta"):
            return build_stages(config, 1)[0]
    return build_on_meta(lambda: build_stages(config, 1))[0]


def hub_shapes(config):
    """Every tensor of a hub checkpoint without multi-token prediction, as its DeepSeek's code names them."""
    hidden, heads, rope = config.hidden_size, config.num_attention_heads, config.qk_rope_head_dim
    latent, queries = config.kv_lora_rank, heads * (config.qk_nope_head_dim + rope)
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,),
              "lm_head.weight": (config.vocab_size, hidden)}

    def mlp(prefix, width):
        for projection in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.{projection}.weight"] = (width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention = {
            "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_a_layernorm": (latent,),
            "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
            "o_proj": (hidden, heads * config.v_head_dim),
        }
        if config.q_lora_rank is None:
            attention["q_proj"] = (queries, hidden)
        else:
            attention |= {"q_a_proj": (config.q_lora_rank, hidden), "q_a_layernorm": (config.q_lora_rank,),
                          "q_b_proj": (queries, config.q_lora_rank)}
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        if layer < config.first_k_dense_replace:
            mlp(f"{prefix}.mlp", config.intermediate_size)
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (config.n_routed_experts, hidden)
        if isinstance(config, DeepseekV3Config):
            shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
        mlp(f"{prefix}.mlp.shared_experts", config.n_shared_experts * config.moe_intermediate_size)
        for expert in range(config.n_routed_experts):
            mlp(f"{prefix}.mlp.experts.{expert}", config.moe_intermediate_size)
    return shapes


@published
def test_published_models(name):
    stage = on_meta(name)
    config, sizes = stage.config, {name: param.numel() for name, param in stage.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    idle = routed // config.num_experts * (config.num_experts - config.num_experts_per_tok)
    assert (sum(sizes.values()), sum(sizes.values()) - idle) == PUBLISHED[name]
    assert config.rotary.head_dim == config.rotary_dim == 64
    parts = [part for name, tensor in stage.state_dict().items() for part in config.hub_parts(name, tensor.shape)[0]]
    found = {part.name: part.shape for part in parts}
    assert found == hub_shapes(config)
    assert len(found) == len(parts)
    assert not any(config.ignored_on_hub(name) for name in found)


def test_published_names_by_example():
    shapes = hub_shapes(read_config(EXAMPLES / "deepseek-v2-lite"))
    assert shapes["model.layers.1.mlp.experts.0.gate_proj.weight"] == (1408, 2048)
    assert shapes["model.layers.26.mlp.shared_experts.down_proj.weight"] == (2048, 2816)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (10944, 2048)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (3072, 2048)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (576, 2048)


@published
def test_published_routers_and_scales_are_those_of_transformers(name):
    """One layer of transformers' own, narrowed to where its size does not matter, read from the same file."""
    hub = json.loads((EXAMPLES / name / "config.json").read_text())
    hub |= {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    version = hub["model_type"].removeprefix("deepseek_")
    reference = REFERENCES[version]
    narrow = type(hf_config(version, {}))(**{k: v for k, v in hub.items() if k != "quantization_config"})
    config = config_from_dict(hub)
    attention = getattr(reference, f"Deepseek{version.upper()}Attention")
    with torch.device("meta"):
        assert attention(narrow, 0).scaling == pytest.approx(LatentAttention(config).scale, rel=1e-12)
    rotary = getattr(reference, f"Deepseek{version.upper()}RotaryEmbedding")(narrow)
    positions = torch.tensor([[0, 1, 5000, 160_000]])
    cos, _ = config.rotary.tables(positions, torch.float32)
    expected = rotary(torch.zeros(1), positions)
    expected = expected.real if version == "v2" else expected[0][..., :32]
    torch.testing.assert_close(cos[..., :32], expected, rtol=0, atol=0.02)  # 160000 radians, of which 2^-24 is 0.01
    gate = getattr(reference, f"Deepseek{version.upper()}TopkRouter")(narrow)
    torch.nn.init.normal_(gate.weight, std=0.02)
    x_TH = torch.randn(64, config.hidden_size)
    router = config.gate()
    router.load_state_dict(gate.state_dict())
    _, weights_TK, experts_TK = gate(x_TH)
    own_weights_TK, own_experts_TK = router(x_TH)
    zeros_TE = torch.zeros(64, config.num_experts)
    expected = zeros_TE.scatter(1, experts_TK, weights_TK)
    torch.testing.assert_close(zeros_TE.scatter(1, own_experts_TK, own_weights_TK), expected)


def test_kimi_k2_is_read_as_it_was_published():
    """Kimi-K2-Instruct's config.json; a trillion parameters (arXiv:2507.20534, table 2)."""
    config = config_from_dict({
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                                                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                                                "type": "yarn"},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
    })
    assert isinstance(config, DeepseekV3Config) and config.model_type == "kimi_k2" and not config.carried_layers
    assert config.rotary.yarn.factor == 32
    sizes = [prod(shape) for shape in model_shapes(config).values()]
    assert 1.02e12 < sum(sizes) < 1.04e12


def test_multi_token_prediction_is_ignored_on_the_hub():
    config = read_config(EXAMPLES / "deepseek-v3")
    assert config.ignored_on_hub("model.layers.61.embed_tokens.weight")
    assert config.ignored_on_hub("model.layers.61.mlp.experts.3.up_proj.weight")
    for name in ("model.layers.60.input_layernorm.weight", "model.layers.62.input_layernorm.weight", "lm_head.weight"):
        assert not config.ignored_on_hub(name)
    without = dataclasses.replace(config, num_nextn_predict_layers=0)
    assert not without.ignored_on_hub("model.layers.61.embed_tokens.weight")
    assert DeepseekV3Config.from_dict(TINY["v3"] | {"num_mtp_layers": 2}).num_nextn_predict_layers == 2
    lite = read_config(EXAMPLES / "deepseek-v2-lite")
    assert not lite.ignored_on_hub("model.layers.27.input_layernorm.weight")
