"""Qwen3-MoE against transformers' implementation."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig as HFConfig
from transformers import Qwen3MoeForCausalLM, modeling_rope_utils
from transformers.models.qwen3_moe import modeling_qwen3_moe

from dualpipe.models import Qwen3MoeConfig, build_stages, read_config
from dualpipe.models.flops import parameter_counts
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.fsdp.materialize import build_on_meta
from models import Float64Torch, batch, grads, ours, randomize_vectors, relative, split_experts, train, whole
from tiny_qwen3 import TINY, tiny

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
VARIANTS = {
    "grouped-query": {},
    "multi-head, unnormalised": {"num_key_value_heads": 4, "norm_topk_prob": False},
    "multi-query, top 1": {"num_key_value_heads": 1, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "top 1, normalised": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 6},
    "biased attention": {"attention_bias": True},
    "dense first layer": {"mlp_only_layers": [0]},
    "every second layer sparse": {"decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
    "stretched": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                      "original_max_position_embeddings": 64}},
    "stretched, all said": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0,
                                                "original_max_position_embeddings": 512, "beta_fast": 16.0,
                                                "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}},
}


def hf_model(changes, dtype, attention):
    hf_config = HFConfig(**(TINY | changes), attn_implementation=attention, experts_implementation="eager")
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(hf_config).to(dtype)
    randomize_vectors(model)
    return model


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request, monkeypatch):
    if request.param is torch.float64:  # transformers casts norms, rotary angles and the router to float32
        for file in (modeling_qwen3_moe, modeling_rope_utils):
            monkeypatch.setattr(file, "torch", Float64Torch())
    return request.param


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_equal_transformers(changes, dtype, attention):
    check(changes, dtype, attention)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", [{}, VARIANTS["stretched"]], ids=["plain", "stretched"])
def test_documents_in_a_row_equal_transformers(changes, dtype, attention):
    lengths = [[11], [4, 7], [1, 1, 6, 3]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    check(changes, dtype, attention, positions)


def check(changes, dtype, attention, positions=None):
    """Logits, loss and every gradient."""
    reference = hf_model(changes, dtype, attention)
    config = tiny(**changes)
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
    # One normalised choice has weight 1 whatever the router says: its gradient is zero but for rounding.
    constant = config.num_experts_per_tok == 1 and config.norm_topk_prob
    largest = max(grad.norm().item() for grad in expected_grads.values())
    for name, grad in grads(model).items():
        floor = largest if constant and name.endswith("mlp.gate.weight") else 1e-30
        assert relative(grad, expected_grads[name], floor) < tolerance, name


def test_per_expert_state_dict_is_stacked():
    fused, config = hf_model({}, torch.float32, "eager").state_dict(), tiny()
    shapes = whole(config).state_dict()
    expected, actual = ours(config, shapes, fused), ours(config, shapes, split_experts(fused))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"mlp_only_layers": [1]}], ids=str)
def test_stages_in_sequence_are_the_whole_model(changes, num_stages):
    config = tiny(**changes)
    model = whole(config)
    stages = build_stages(config, num_stages)
    for stage in stages:
        stage.init_weights(0)
    logits, _ = train(model, config)
    staged_logits, _ = train(nn.Sequential(*stages), config)
    assert torch.equal(staged_logits, logits)
    staged = {name: grad for stage in stages for name, grad in grads(stage).items()}
    tied = {"lm_head.weight"} if config.tie_word_embeddings and num_stages > 1 else set()
    assert staged.keys() - tied == grads(model).keys()
    for name, grad in grads(model).items():
        assert torch.equal(staged[name], grad), name
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_deferred_gradients_are_bitwise_those_of_a_plain_backward(changes):
    config = tiny(**changes)
    plain, deferred, store = whole(config), whole(config), WeightGradStore()
    for micro_batch in range(2):
        train(plain, config)
        with store.activate(), store.defer(micro_batch):
            train(deferred, config)
        assert deferred.get_parameter("layers.1.self_attn.q_proj.weight").grad is None or micro_batch
        store.run(micro_batch)
    assert not store.pending()
    if config.tie_word_embeddings:  # embedding and head: added in another order
        grad = plain.embed_tokens.weight.grad
        torch.testing.assert_close(deferred.embed_tokens.weight.grad, grad)
        plain.embed_tokens.weight.grad = deferred.embed_tokens.weight.grad
    for name, grad in grads(plain).items():
        assert torch.equal(grads(deferred)[name], grad), name


def test_float64_stays_float64_everywhere():
    config = tiny()
    model, seen = whole(config, dtype=torch.float64), set()

    def record(module, inputs, outputs):
        for tensor in (*inputs, *(outputs if isinstance(outputs, tuple) else (outputs,))):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                seen.add((type(module).__name__, tensor.dtype))

    for module in model.modules():
        module.register_forward_hook(record)
    train(model, config)
    assert {dtype for _, dtype in seen} == {torch.float64}
    modules = {"RMSNorm", "Router", "Experts", "GroupedSwiGLU", "GroupedLinear", "GroupedQueryAttention"}
    assert modules <= {name for name, _ in seen}
    # A cast to float32 and back inside a module would escape the hooks, but not the difference quotient of the loss.
    few = {"layers.0.mlp.gate.weight", "layers.2.self_attn.k_norm.weight", "norm.weight"}
    tokens, labels = batch(config)
    for name in few:
        param = model.get_parameter(name)
        direction = torch.randn_like(param)
        slope = (param.grad * direction).sum().item()
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                param.add_(direction, alpha=step)
                losses.append(cross_entropy_loss(model(tokens), labels).item())
                param.sub_(direction, alpha=step)
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_bfloat16_runs_and_is_near_float32():
    config = tiny()
    _, expected = train(whole(config), config)
    model = whole(config, dtype=torch.bfloat16)
    logits, loss = train(model, config)
    assert logits.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.05)  # three layers, 8 bits each
    assert all(grad.dtype is torch.bfloat16 for grad in grads(model).values())


def test_same_bits_on_every_run():
    config = tiny()
    first, second = whole(config), whole(config)
    assert torch.equal(train(first, config)[0], train(second, config)[0])
    assert all(torch.equal(a, b) for a, b in zip(grads(first).values(), grads(second).values()))


def test_config_from_both_hub_forms(tmp_path):
    older = TINY | {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16", "model_type": "qwen3_moe",
                    "architectures": ["Qwen3MoeForCausalLM"], "sliding_window": None, "hidden_act": "silu"}
    newer = HFConfig(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    newer.save_pretrained(tmp_path)
    (tmp_path / "older.json").write_text(json.dumps(older))
    expected = dataclasses.replace(tiny(), rope_theta=5e5)
    assert read_config(tmp_path / "older.json") == expected
    assert read_config(tmp_path / "config.json") == expected
    assert Qwen3MoeConfig.from_dict(newer.to_dict()) == expected
    without = {key: value for key, value in TINY.items() if key != "head_dim"}
    assert Qwen3MoeConfig.from_dict(without).head_dim == 8


REFUSED = {
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "use_sliding_window=True": {"use_sliding_window": True},
    "attention_dropout=0.1": {"attention_dropout": 0.1},
    "num_expert=3 \\(unknown\\)": {"num_expert": 3},
    "rope_type 'yarn'": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "partial_rotary_factor": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "model_type must be 'qwen3_moe'": {"model_type": "qwen3"},
    "must be a multiple of num_key_value_heads \\(3\\)": {"num_key_value_heads": 3},
    "head_dim must be even": {"head_dim": 7},
    "num_experts_per_tok must be 1 to num_experts \\(6\\); got 7": {"num_experts_per_tok": 7},
    "decoder_sparse_step must be": {"decoder_sparse_step": 0},
    "intermediate_size must be at least 1": {"intermediate_size": 0, "mlp_only_layers": [1]},
    "lacks vocab_size": {"vocab_size": None},
    "wrong type or size: num_hidden_layers='4', num_key_value_heads=0, norm_topk_prob=1, mlp_only_layers=3$": {
        "num_hidden_layers": "4", "num_key_value_heads": 0, "norm_topk_prob": 1, "mlp_only_layers": 3,
    },
    "wrong type or size: num_experts=0$": {"num_experts": None, "num_local_experts": 0},
    "must be a JSON object; got 'yarn'": {"rope_parameters": "yarn"},
    "out of range: rope_theta='1', factor=0": {"rope_parameters": {"rope_theta": "1", "factor": 0}},
    "wrong type or size: yarn={}": {"yarn": {}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_options_are_named(message):
    with pytest.raises(ValueError, match=message):
        tiny(**REFUSED[message])


# -- the real models


# As published (arXiv:2505.09388), 30.5 and 3.3 (cut off), 235 and 22 billion. The active counts have the head and the
# embedding; without the embedding, of which a token reads one row, they are 3.04 and 21.57 billion.
@pytest.mark.parametrize(
    ("name", "total", "active", "published"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704, (30.5, 3.4)),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520, (235.1, 22.2)),
    ],
)
def test_real_models_have_the_published_sizes(name, total, active, published):
    config = read_config(EXAMPLES / name)
    with torch.device("meta"):
        (model,) = build_on_meta(lambda: build_stages(config, 1))
    sizes = {key: param.numel() for key, param in model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    assert sum(sizes.values()) == total
    assert total - experts + experts // config.num_experts * config.num_experts_per_tok == active
    assert (round(total / 1e9, 1), round(active / 1e9, 1)) == published
    assert parameter_counts(config)[:2] == (total, active)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_real_models_have_the_hub_s_names_and_shapes(name):
    config, hf_config = read_config(EXAMPLES / name), HFConfig.from_pretrained(EXAMPLES / name)
    with torch.device("meta"):
        (model,) = build_on_meta(lambda: build_stages(config, 1))
        expected = {key: tuple(tensor.shape) for key, tensor in Qwen3MoeForCausalLM(hf_config).state_dict().items()}
    apart, together = {}, {}  # each expert's own tensors, as on the hub, and all in one, as in transformers' memory
    for key, param in model.named_parameters():
        forms = config.hub_parts(key, param.shape)
        apart |= {part.name: part.shape for part in forms[0]}
        together |= {part.name: part.shape for part in forms[-1]}
    assert together == expected
    layers, hidden, inside = config.num_hidden_layers, config.hidden_size, config.moe_intermediate_size
    assert len(apart) == layers * (8 + 1 + 128 * 3) + 3
    for layer, e in ((0, 0), (layers - 1, 127)):
        prefix = f"model.layers.{layer}.mlp.experts.{e}"
        assert apart[f"{prefix}.gate_proj.weight"] == apart[f"{prefix}.up_proj.weight"] == (inside, hidden)
        assert apart[f"{prefix}.down_proj.weight"] == (hidden, inside)
