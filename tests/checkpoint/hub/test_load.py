"""The reads of each rank, planned without running them; and the planned shards against real DTensors."""

from collections import defaultdict
from math import prod

import pytest
import torch

from dualpipe.checkpoint.hub.files import Reader
from dualpipe.checkpoint.hub.load import find_tensors, intersect_parts, stage_tensors
from dualpipe.checkpoint.tensors import Box, TensorHeader
from dualpipe.models import DeepseekV3Config, config_from_dict
from dualpipe.models.hub import HubTensorPart
from dualpipe.models.stages import meta_stages
from dualpipe.nn.init import local_part
from hub import FAMILIES, TINY, header_of, held_boxes, reads_of, save_qwen, stages_on_meta
from ranks import run_ranks

SMALL = {
    "model_type": "qwen3_moe", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 6,
}
V3 = DeepseekV3Config(
    vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8,
    topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5, norm_topk_prob=True,
)


def find(config, header, block=None):
    return find_tensors(config, Reader("", header, block))


def held_by_rank(rank, folder, shape):
    """Return the tensors whose DTensor on this rank differs from the shard that the other tests assume."""
    stages, _, _ = stages_on_meta(folder, shape)
    tensors = {name: tensor for stage in stages for name, tensor in stage_tensors(stage).items()}
    actual = {name: Box.from_slices(local_part(tensor)[1]) for name, tensor in tensors.items()}
    planned = held_boxes(stages[0].config, shape, rank)
    return [f"{name}: {actual[name]} {planned[name]}" for name in actual
            if actual[name] != planned[name] and (actual[name].numel or planned[name].numel)]  # empty: anywhere


@pytest.mark.parametrize("shape", [
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in (
        (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1), (1, 3, 2))),
    (2, 1, 2),
])
def test_planned_is_what_dtensors_hold(tmp_path, shape):
    # Over dp 3, intermediate 25 has no dimension that divides but hidden, and hidden 32 none but intermediate 24.
    save_qwen(tmp_path, moe_intermediate_size=25 if shape == (1, 2, 2) else 24)
    for wrong in run_ranks(held_by_rank, prod(shape), str(tmp_path), shape):
        assert not wrong


def test_experts_that_nothing_divides_are_cut_on_dimension_0_again():
    config = config_from_dict(TINY | {"model_type": "qwen3_moe", "num_experts": 10, "hidden_size": 4,
                                      "moe_intermediate_size": 4})
    parts = [held_boxes(config, (1, 3, 2), rank)["layers.1.mlp.experts.down_proj.weight"] for rank in range(6)]
    # ep 0 has experts 0 to 4, ep 1 has 5 to 9; over dp 3 those are 2, 2 and 1.
    assert [box.slices[0] for box in parts] == [
        slice(0, 2), slice(5, 7), slice(2, 4), slice(7, 9), slice(4, 5), slice(9, 10)]


def test_the_ranks_of_a_stage_read_everything_once():
    config = V3
    header, read = header_of(config), defaultdict(list)
    tensors = find(config, header)
    for rank in (*range(64), *range(15 * 64, 16 * 64)):  # of the first and the last of 16 pipeline ranks
        for name, box in reads_of(tensors, config, (16, 8, 8), rank):
            read[name].append(box)
    stages = meta_stages(config, 32, (0, 15, 16, 31))
    expected = {part.name for stage in stages for name, tensor in stage.state_dict().items()
                for part in config.hub_parts(name, tensor.shape)[0]}
    assert read.keys() == expected
    for name, boxes in read.items():
        if name.endswith("e_score_correction_bias"):  # a buffer: whole on all 64 ranks
            assert boxes == [Box.whole(header[name].shape)] * 64
            continue
        assert sum(box.numel for box in boxes) == prod(header[name].shape)
        assert not any(a.intersection(b) for i, a in enumerate(boxes) for b in boxes[:i]), name


def test_example_of_the_module():
    config = config_from_dict(SMALL)
    reads = reads_of(find(config, header_of(config)), config, (1, 2, 2), 1)
    gate_up = [(name.split("experts.")[1], box) for name, box in reads if "experts" in name and "down" not in name]
    assert gate_up == [("2.gate_proj.weight", Box.whole((6, 4))), ("3.gate_proj.weight", Box.whole((6, 4)))]


def test_blocks_of_a_transposed_part():
    """Ours (2, 6, 4) is (2, 4, 6) on the hub; our rows 1 to 3 are its columns 1 to 3."""
    part = HubTensorPart("w", (2, 4, 6), (slice(0, 2), slice(0, 6), slice(0, 4)), transposed=True)
    ((found, at, into),) = intersect_parts([part], Box((1, 1, 0), (1, 3, 3)))
    assert found is part
    assert at == Box((1, 0, 1), (1, 3, 3))
    assert into == Box((0, 0, 0), (1, 3, 3))


def test_what_is_wrong_is_said_in_one_line_with_the_nearest_name():
    config = config_from_dict(SMALL | {"num_experts": 128})
    header = dict(header_of(config))
    norm, o_proj = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.o_proj.weight"
    header["model.layers.0.input_layer_norm.weight"] = header.pop(norm)
    header[o_proj] = header[o_proj]._replace(shape=(4, 5))
    header["model.norm.weight"] = header["model.norm.weight"]._replace(dtype=torch.int8)
    for expert in range(100):
        del header[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
    header["model.layers.0.rotary_emb.inv_freq"] = TensorHeader(torch.float32, (64,), "f", 0)
    with pytest.raises(ValueError) as raised:
        find(config, header)
    for said in (f"{norm}: missing, the nearest is model.layers.0.input_layer_norm.weight",
                 f"{o_proj}: (4, 5) in the checkpoint, (4, 4) in the model",
                 "model.norm.weight: torch.int8", "model.layers.0.input_layer_norm.weight: unexpected", "and 98 more"):
        assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_deepseeks_fp8_with_a_layer_that_predicts_more_tokens():
    """Scales count as used. Those of the extra layer are skipped together with it, as the model lacks it."""
    sizes = FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    config, header = config_from_dict(sizes), {}
    for name, info in header_of(config).items():
        for full in (name, name.replace("layers.3.", "layers.4.")):
            header[full] = info
            if "_proj" in name:
                header[full] = info._replace(dtype=torch.float8_e4m3fn)
                scales = tuple(-(-size // 16) for size in info.shape)
                header[f"{full}_scale_inv"] = TensorHeader(torch.float32, scales, "f", 0)
    tensors = find(config, header, (16, 16))
    reads = dict(reads_of(tensors, config, (1, 2, 2), 0))
    assert not any("layers.4." in name for name in reads)
    # 8 experts over ep 2; 48 rows of gate and up over dp 2: the first rank has all 24 of gate, in two rows of blocks.
    gate = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert reads[gate] == Box.whole((24, 32))
    assert reads[f"{gate}_scale_inv"] == Box.whole((2, 2))
    with pytest.raises(ValueError, match=r"config.json does not say how"):
        find(config, header)
