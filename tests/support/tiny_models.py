"""Models of three layers of every family, as in a config.json."""

from typing import Any

from dualpipe.models import config_from_dict

_DEEPSEEK = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 5, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
}
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "initializer_range": 0.2,
    },
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": _DEEPSEEK | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
    "gpt_oss": {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": 4, "initializer_range": 0.2, "rope_parameters": GPT_OSS_YARN | {"rope_theta": 150_000.0},
    },
}


def tiny(family: str = "qwen3_moe", **changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    return config_from_dict(TINY[family] | {"model_type": family} | changes)
