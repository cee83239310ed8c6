"""A Qwen3-MoE of three layers."""

from dualpipe.models import Qwen3MoeConfig

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "initializer_range": 0.2,
}


def tiny(**changes):
    return Qwen3MoeConfig.from_dict(TINY | changes)
