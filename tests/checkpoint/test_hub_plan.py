"""Who reads what, without running it; and that the pure functions say what DTensors really hold."""

from collections import defaultdict
from math import prod

import pytest
import torch

from dualpipe.checkpoint.hf import stage_tensors
from dualpipe.checkpoint.hub_files import TensorInfo
from dualpipe.checkpoint.hub_plan import (
    Kind,
    Layout,
    OurTensor,
    blocks,
    check_header,
    find_origins,
    held,
    model_tensors,
    plan_reads,
    rank_tensors,
)
from dualpipe.models import DeepseekV3Config, Qwen3MoeConfig, config_from_dict
from dualpipe.models.hub import Part
from dualpipe.nn.init import local_part
from hub import FAMILIES, header_of, save_qwen, stages_on_meta
from ranks import run_ranks

BIG = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4,
    head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
)
V3 = DeepseekV3Config(
    vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8,
    topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5, norm_topk_prob=True,
)


def held_by_rank(rank, folder, shape):
    """What the DTensors of this rank hold, and what the planner says."""
    stages, _, _ = stages_on_meta(folder, shape)
    tensors = {name: tensor for stage in stages for name, tensor in stage_tensors(stage).items()}
    actual = {name: (tuple(tensor.shape), local_part(tensor)[1]) for name, tensor in tensors.items()}
    planned = rank_tensors(stages[0].config, Layout(*shape), rank)
    return [f"{name}: {actual[name]} {planned.get(name)}" for name in actual if not same(actual[name], planned[name])]


def same(actual, planned):
    """Empty parts are where they like."""
    if any(p.start == p.stop for p in actual[1]):
        return actual[0] == planned[0] and any(p.start == p.stop for p in planned[1])
    return actual == planned


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 3, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 3, 2)])
def test_planned_is_what_dtensors_hold(tmp_path, shape):
    # Over dp 3, intermediate 25 has no dimension that divides but hidden, and hidden 32 none but intermediate 24.
    save_qwen(tmp_path, moe_intermediate_size=25 if shape == (1, 2, 2) else 24)
    for wrong in run_ranks(held_by_rank, prod(shape), str(tmp_path), shape, reuse=True):
        assert not wrong


def test_experts_that_nothing_divides_are_cut_on_dimension_0_again():
    layout = Layout(1, 3, 2)
    parts = [held(OurTensor((10, 4, 4), Kind.EXPERTS), layout, rank)[0] for rank in range(6)]
    # ep 0 has experts 0 to 4, ep 1 has 5 to 9; over dp 3 those are 2, 2 and 1.
    assert parts == [slice(0, 2), slice(5, 7), slice(2, 4), slice(7, 9), slice(4, 5), slice(9, 10)]


def overlap(a, b):
    return all(max(p.start, q.start) < min(p.stop, q.stop) for p, q in zip(a, b))


@pytest.mark.parametrize("config", [pytest.param(BIG, marks=pytest.mark.slow), V3], ids=["qwen3-235b", "deepseek-v3"])
def test_the_ranks_of_a_stage_read_everything_once(config):
    layout, header = Layout(16, 8, 8), header_of(config)
    read = defaultdict(list)
    for rank in (r for r in range(layout.size) if layout.coordinates(r)[0] in (0, 15)):
        for name, at in plan_reads(header, config, layout, rank):
            read[name].append(at)
    stages = model_tensors(config, 32, (0, 15, 16, 31))
    expected = {part.name for name, tensor in stages.items() for part in config.hub_layouts(name, tensor.shape)[0]}
    assert read.keys() == expected
    for name, parts in read.items():
        if name.endswith("e_score_correction_bias"):  # a buffer: whole on all 64 ranks
            assert parts == [tuple(slice(0, size) for size in header[name].shape)] * 64
            continue
        assert sum(prod(p.stop - p.start for p in part) for part in parts) == prod(header[name].shape)
        assert not any(overlap(a, b) for i, a in enumerate(parts) for b in parts[:i]), name


def test_all_stages_are_read_by_some_rank():
    layout, header = Layout(16, 1, 1), header_of(BIG)
    names = [name for rank in range(16) for name, _ in plan_reads(header, BIG, layout, rank)]
    assert sorted(names) == sorted(header)
    assert names != [name for name, _ in plan_reads(header, BIG, layout, 0, num_stages=16)]


def test_half_of_the_experts_for_each_of_two_ranks():
    header = header_of(BIG)
    for ep in range(2):
        reads = plan_reads(header, BIG, Layout(47, 1, 2), ep)
        experts = {int(name.split(".")[5]) for name, _ in reads if ".experts." in name}
        assert experts == set(range(64 * ep, 64 * ep + 64))


def test_example_of_the_module():
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4,
        num_experts=4, num_experts_per_tok=1, moe_intermediate_size=6,
    )
    reads = plan_reads(header_of(config), config, Layout(1, 2, 2), 1)
    gate_up = [(name.split("experts.")[1], at) for name, at in reads if "experts" in name and "down" not in name]
    everything = (slice(0, 6), slice(0, 4))
    assert gate_up == [("2.gate_proj.weight", everything), ("3.gate_proj.weight", everything)]


def test_blocks_of_a_transposed_part():
    """Ours (2, 6, 4) is on the hub as (2, 4, 6); rows 1 to 3 of ours are its columns 1 to 3."""
    part = Part("w", (2, 4, 6), (slice(0, 2), slice(0, 6), slice(0, 4)), transposed=True)
    (block,) = blocks([part], (slice(1, 2), slice(1, 4), slice(0, 3)))
    assert block.at == (slice(1, 2), slice(0, 3), slice(1, 4))
    assert block.into == (slice(0, 1), slice(0, 3), slice(0, 3))


def test_fused_experts_are_read_too():
    config = BIG
    shapes = {"layers.0.mlp.experts.gate_up_proj.weight": (128, 3072, 4096)}
    header = {"model.layers.0.mlp.experts.gate_up_proj": TensorInfo("f", torch.bfloat16, (128, 3072, 4096))}
    origin = find_origins(config, shapes, header, None).found["layers.0.mlp.experts.gate_up_proj.weight"]
    (((block, _, reads)),) = origin.reads((slice(64, 128), slice(0, 3072), slice(0, 4096)))
    assert reads == [("model.layers.0.mlp.experts.gate_up_proj", (slice(64, 128), slice(0, 3072), slice(0, 4096)))]
    assert block.into == (slice(0, 64), slice(0, 3072), slice(0, 4096))


def test_what_is_wrong_is_said_in_one_line_with_the_nearest_name():
    header = dict(header_of(BIG))
    norm, o_proj = "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.o_proj.weight"
    header["model.layers.0.input_layer_norm.weight"] = header.pop(norm)
    header[o_proj] = header[o_proj]._replace(shape=(4096, 4096))
    header["model.norm.weight"] = header["model.norm.weight"]._replace(dtype=torch.int8)
    for expert in range(100):
        del header[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"]
    header["model.layers.0.rotary_emb.inv_freq"] = TensorInfo("f", torch.float32, (64,))
    with pytest.raises(ValueError) as raised:
        check_header(BIG, header, None)
    assert str(raised.value) == (
        f"the checkpoint does not fit the model (qwen3_moe): {norm}: missing, the nearest is "
        "model.layers.0.input_layer_norm.weight; model.layers.3.mlp.experts.0.up_proj.weight: missing, the nearest is "
        "model.layers.0.input_layer_norm.weight; model.layers.3.mlp.experts.1.up_proj.weight: missing, the nearest is "
        f"model.layers.0.input_layer_norm.weight; {o_proj}: (4096, 4096) in the checkpoint, (4096, 8192) in the model; "
        "model.norm.weight: torch.int8, which parameters in floating point would round; "
        "model.layers.0.input_layer_norm.weight: unexpected, the model has no such tensor; and 98 more "
        "(is this checkpoint complete, and its config.json the one that it was written with?)"
    )


def test_a_layout_that_does_not_fit():
    with pytest.raises(ValueError, match="128 experts cannot be divided evenly among 3"):
        plan_reads(header_of(BIG), BIG, Layout(1, 1, 3), 0)
    with pytest.raises(ValueError, match=r"ranks of .* are 0 to 1"):
        plan_reads({}, BIG, Layout(2), 2)
    with pytest.raises(ValueError, match="num_stages must be"):
        plan_reads({}, BIG, Layout(2), 0, num_stages=3)


def test_deepseeks_fp8_with_a_layer_that_predicts_more_tokens():
    """Scales count as used, and those of the layer that the model does not have are passed over with it."""
    sizes = FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    config, header = config_from_dict(sizes), {}
    for name, info in header_of(config).items():
        for full in (name, name.replace("layers.3.", "layers.4.")):
            header[full] = info
            if "_proj" in name:
                header[full] = info._replace(dtype=torch.float8_e4m3fn)
                scales = tuple(-(-size // 16) for size in info.shape)
                header[f"{full}_scale_inv"] = TensorInfo("f", torch.float32, scales)
    check_header(config, header, (16, 16))
    reads = dict(plan_reads(header, config, Layout(1, 2, 2), 0, block=(16, 16)))
    assert not any("layers.4." in name for name in reads)
    # 8 experts over ep 2; 48 rows of gate and up over dp 2: the first rank has all 24 of gate, in two rows of blocks.
    gate = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert reads[gate] == (slice(0, 24), slice(0, 32))
    assert reads[f"{gate}_scale_inv"] == (slice(0, 2), slice(0, 2))
    with pytest.raises(ValueError, match=r"config.json does not say how"):
        check_header(config, header, None)


GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 32, "sliding_window": 8,
}


def test_mxfp4_is_not_transposed_though_the_bfloat16_tensor_is():
    config = config_from_dict(GPT_OSS)
    plain = header_of(config)
    name, fused = "layers.0.mlp.experts.gate_up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
    assert plain[fused].shape == (4, 64, 64)
    shapes = {name: (4, 64, 64)}
    (((block, _, reads)),) = find_origins(config, shapes, plain, None).found[name].reads(
        (slice(2, 4), slice(0, 16), slice(0, 64)))
    assert block.part.transposed
    assert reads == [(fused, (slice(2, 4), slice(0, 64), slice(0, 16)))]
    packed = {f"{fused}_blocks": TensorInfo("f", torch.uint8, (4, 64, 2, 16)),
              f"{fused}_scales": TensorInfo("f", torch.uint8, (4, 64, 2))}
    (((block, _, reads)),) = find_origins(config, shapes, packed, None).found[name].reads(
        (slice(2, 4), slice(0, 16), slice(0, 64)))
    assert not block.part.transposed
    assert reads == [(f"{fused}_blocks", (slice(2, 4), slice(0, 16), slice(0, 2), slice(0, 16))),
                     (f"{fused}_scales", (slice(2, 4), slice(0, 16), slice(0, 2)))]


def test_nothing_is_allocated_for_a_model_of_671_billion():
    tensors = model_tensors(V3)
    assert 670e9 < sum(prod(tensor.shape) for tensor in tensors.values()) < 672e9
    assert {tensor.kind for tensor in tensors.values()} == set(Kind)
