"""Small Hugging Face checkpoints, the stages that they are loaded into, and headers without files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dualpipe.checkpoint import hub_dtypes
from dualpipe.checkpoint.hub.load import model_shapes
from dualpipe.checkpoint.hub.save import new_tensors
from dualpipe.checkpoint.tensors import Box, TensorHeader
from dualpipe.models import build_stages, read_config
from dualpipe.models.stages import meta_stages
from dualpipe.nn import GroupedLinear
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard
from dualpipe.parallel.experts.dispatcher import shard_experts
from dualpipe.parallel.fsdp.materialize import build_on_meta
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule.types import v_placement

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "initializer_range": 0.2, "mlp_only_layers": [0],
}


def save_qwen(folder, max_shard_size="40KB", dtype=torch.float32, **changes):
    """Save a random Qwen3-MoE with transformers; return its model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY | changes)).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


FAMILIES = {
    "gpt_oss": {
        "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
        "sliding_window": 8,
    },
    "deepseek_v2": {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": None,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 40,
        "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1, "norm_topk_prob": False, "num_key_value_heads": 4, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "deepseek_v3": {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "q_lora_rank": 12,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 40,
        "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
}


def save_family(folder, model_type, max_shard_size="1GB", **sizes):
    """Save a random model of a family with transformers; return it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **FAMILIES[model_type] | sizes))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def read_all(folder):
    """Return all tensors of a checkpoint, by the hub's names."""
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder, tensors, **config):
    """Replace a checkpoint's tensors by these, in one file, and change its configuration."""
    for file in Path(folder).glob("model*"):
        file.unlink()
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def add_mtp(folder, depth=1):
    """Add layers for multi-token prediction to a DeepSeek-V3, in the published form; return all its tensors."""
    tensors, config = read_all(folder), json.loads((Path(folder) / "config.json").read_text())
    last, hidden = config["num_hidden_layers"], config["hidden_size"]
    embedding, head, norm = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head", "model.norm"))
    for layer in range(last, last + depth):
        prefix, generator = f"model.layers.{layer}.", torch.Generator().manual_seed(layer)
        for name, tensor in list(tensors.items()):
            if name.startswith(f"model.layers.{last - 1}."):  # its expert 0 is the last one here
                plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                tensors[prefix + name.split(".", 3)[3]] = plain.roll(1, 0).contiguous().view(tensor.dtype)
        for name, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("eh_proj", (hidden, 2 * hidden)),
                            ("shared_head.norm", (hidden,))):
            tensors[f"{prefix}{name}.weight"] = torch.rand(shape, generator=generator).to(norm.dtype)
        tensors |= {f"{prefix}embed_tokens.weight": embedding.clone(), f"{prefix}shared_head.head.weight": head.clone()}
    rewrite(folder, tensors, num_nextn_predict_layers=depth)
    return tensors


# Rows and columns that end within a block, as 576 of DeepSeek-V3's latents do and 10944 of V2-Lite's dense MLP.
FP8_SIZES = {
    "hidden_size": 192, "moe_intermediate_size": 128, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 128, "qk_rope_head_dim": 8, "intermediate_size": 136,
    "num_nextn_predict_layers": 0,
}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def save_fp8(folder, **changes):
    """Save a DeepSeek-V3 with random FP8 blocks, of scales that no format of ours would choose; return its tensors."""
    save_family(folder, "deepseek_v3", **FP8_SIZES | changes)
    tensors = read_all(folder)
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight") or "_proj_with_mqa" in name:
            grid = [-(-size // 128) for size in weight.shape]
            tensors[name] = (weight * 1000).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(grid) / 1000
        else:
            tensors[name] = weight.bfloat16() if "e_score" not in name else weight
    rewrite(folder, tensors, quantization_config=FP8_CONFIG)
    return tensors


def save_mxfp4(folder, **changes):
    """Save a gpt-oss with random MXFP4 blocks, some with small numbers under large scales; return its tensors."""
    save_family(folder, "gpt_oss", **{"hidden_size": 64, "intermediate_size": 96} | changes)
    tensors = read_all(folder)
    for name, weight in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"][1] &= 0xBB  # of an expert none above 1.5, of which ours would be 6
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        else:
            tensors[name] = weight.bfloat16()
    rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4"})
    return tensors


def stages_on_meta(folder, shape=None, dtype=torch.float32, stages_per_rank=2, rules=(), *, mtp=False):
    """Return this rank's (stages, mesh, plan), sharded, without values.

    Without a shape the whole model is one stage. mtp: include its layers for multi-token prediction.
    """
    config = read_config(folder).with_mtp() if mtp else read_config(folder)
    policy = DTypePolicy(dtype, torch.float32, dtype, rules)
    sources = hub_dtypes(folder, config)
    if shape is None:
        stages = build_on_meta(lambda: build_stages(config, stages_per_rank))
        return stages, None, resolve_dtypes(stages, policy, sources)
    mesh = build_mesh(*shape, torch.device("cpu"))
    placement = v_placement(shape[0])
    only = [stage for stage, rank in enumerate(placement) if rank == mesh["pp"].get_local_rank()]
    plan = resolve_dtypes(build_on_meta(lambda: build_stages(config, 1)), policy, sources)
    stages = build_on_meta(lambda: build_stages(config, 2 * shape[0], only=only))
    for stage in stages:
        if Mesh.of(mesh).dense.size() > 1:
            shard_experts(stage, mesh["ep"])
            shard(stage, Mesh.of(mesh).dense, plan, expert_mesh=mesh["dp"])
        elif rules:
            shard(stage, None, plan)
    return stages, mesh, plan


def header_of(config, dtype=torch.bfloat16):
    """Return the header of a checkpoint of a model of any size, in the form that `save_hf` writes."""
    tensors = new_tensors(config, dict.fromkeys(model_shapes(config), dtype))
    return {name: TensorHeader(dtype, shape, "model.safetensors", 0) for name, (dtype, shape) in tensors.items()}


def held_boxes(config, layout, rank):
    """Return the part of every tensor that a rank of a mesh (pp, dp, ep) holds; a V has two stages a rank."""
    pp, dp, ep = layout
    place, at_dp, at_ep = rank // (dp * ep), rank // ep % dp, rank % ep
    numbers = tuple(number for number, on in enumerate(v_placement(pp)) if on == place)
    found = {}
    for stage in meta_stages(config, 2 * pp, numbers):
        experts = {id(param) for module in stage.modules() if isinstance(module, GroupedLinear)
                   for param in module.parameters()}
        for name, tensor in stage.state_dict(keep_vars=True).items():
            box = Box.whole(tensor.shape)
            if id(tensor) in experts and ep > 1:
                dim = next((dim for dim in range(1, tensor.ndim) if tensor.shape[dim] % dp == 0), 0)
                box = chunk(chunk(box, 0, ep, at_ep), dim, dp, at_dp)
            elif isinstance(tensor, torch.nn.Parameter):
                box = chunk(box, 0, dp * ep, at_dp * ep + at_ep)
            found[name] = box
    return found


def chunk(box, dim, ranks, rank):
    """Return a rank's chunk of a box, cut like `torch.chunk`: the last ones may be smaller, or empty."""
    each = -(-box.shape[dim] // ranks)
    slices = list(box.slices)
    start, stop = slices[dim].start, slices[dim].stop
    slices[dim] = slice(min(start + each * rank, stop), min(start + each * (rank + 1), stop))
    return Box.from_slices(slices)


def reads_of(tensors, config, layout, rank):
    """Return the names and boxes that a rank of a mesh (pp, dp, ep) reads from `tensors` of `find_tensors`."""
    return [read for name, box in held_boxes(config, layout, rank).items() for read in tensors[name].reads(box)]
