"""Tiny causal language models of transformers: one for each form of experts and of layers that stages are cut from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dualpipe.parallel.mesh import Mesh

VOCAB = 64
MICROBATCHES = 4
PP2, PP2_EP2, PP2_DP2 = (2, 1, 1), (2, 1, 2), (2, 2, 1)  # pp, dp, ep
_DENSE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}
_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_HYBRID = _QWEN | {
    "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}
_GROUPS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _DENSE | _QWEN,
    "deepseek_v3": _DENSE | _GROUPS | _LATENT,
    "gpt_oss": _DENSE | _LOCAL | {"sliding_window": 4},
    "glm4_moe": _DENSE | _GROUPS,
    "mixtral": _DENSE | _LOCAL,
    "olmoe": _DENSE | {"num_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": _DENSE | _LOCAL | {"rotary_dim": 4},
    "ernie4_5_moe": _DENSE | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16},
    "qwen3_next": _DENSE | _HYBRID,
    "qwen3_5_moe_text": _DENSE | _HYBRID,
    "llama": _DENSE,
    "qwen3": _DENSE,
}
MOE = [family for family in FAMILIES if family not in ("llama", "qwen3")]
# Of other forms: factors of embeddings, residuals and logits, a norm of another name, convolutions and Mamba.
OTHERS: dict[str, dict[str, Any]] = {
    "granite": _DENSE | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoe": _DENSE | _LOCAL | {"embedding_multiplier": 3.0},
    "gemma2": _DENSE | {"pad_token_id": 0},
    "cohere": _DENSE | {"pad_token_id": 0},
    "lfm2_moe": _DENSE | _QWEN | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": _DENSE | _LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "pad_token_id": 0},
    "jamba": _DENSE | {"num_experts": 4, "pad_token_id": 0},
}
# Their routers compute in float32 whatever the model does: a rounding of 1e-16 before it becomes one of 6e-8 behind it.
ROUNDING_ROUTERS = ("ernie4_5_moe",)


def config_of(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    return AutoConfig.for_model(family, **(FAMILIES | OTHERS)[family] | changes)


def tiny_model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a tiny model with weights so large that every part of it matters to the loss."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), experts_implementation="eager").to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def save_tiny(folder: Path, family: str, **changes: Any) -> None:
    """Write a tiny model in float64, as transformers does."""
    tiny_model(family, **changes).save_pretrained(folder)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_of(replica: int, rows: int = 8, length: int = 12) -> tuple[Tensor, Tensor]:
    """Return the tokens and the labels of a replica (rows, length)."""
    generator = torch.Generator().manual_seed(100 + replica)
    tokens, labels = torch.randint(0, VOCAB, (2, rows, length), generator=generator)
    return tokens, labels


def train_step(mesh: Any, pipe: Any) -> Any:
    """Run one step on this replica's batch; return the losses on the rank of the last stage of a V."""
    place = Mesh.of(mesh)
    tokens, labels = batch_of(place.replica)
    is_end = place.rank("pp") == 0
    losses, _ = pipe.step(
        *((tokens,) if is_end else ()), num_chunks=MICROBATCHES, criterion=loss_fn, labels=(labels,) if is_end else ())
    return losses


def whole_losses(model: nn.Module, replicas: int) -> list[list[float]]:
    """Train the whole model on the batches of all replicas; gradients are the mean over these. Returns the losses."""
    losses = []
    for replica in range(replicas):
        tokens, labels = batch_of(replica)
        of_replica = []
        for x, y in zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES)):
            loss = loss_fn(model(x, use_cache=False).logits, y)
            (loss / replicas).backward()
            of_replica.append(loss.item())
        losses.append(of_replica)
    return losses


def error_of(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, over the largest number; a gradient that is missing counts as zeros."""
    if found is None or expected is None:
        other = expected if found is None else found
        return 0.0 if other is None else other.abs().max().item()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
