"""Qwen3-MoE (Qwen3-30B-A3B, 235B-A22B; arXiv:2505.09388), cut into stages of a pipeline.

Read from top to bottom: configuration, attention, router and experts, layer, stage, how stages are made. Parameters
are named as in the unpipelined model, by the layer's global index, so that the stages' state dicts together are that of
the whole model, which is itself one stage with every layer.

Dimension letters: B batch, S sequence, T tokens (B * S), H hidden, A attention heads, G key/value heads, D head
dimension, E experts, K experts per token, M routed rows (T * K), I expert intermediate, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe.models.stages import Recompute, split_layers
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear, RMSNorm, Router
from dualpipe.nn.init import seeded_normal_
from dualpipe.nn.rotary import apply_rotary, rotary_tables
from dualpipe.nn.routing import SortedTokens
from dualpipe.parallel.expert import Dispatcher, ExpertParallel, expert_parallel_mlp, run_experts
from dualpipe.pipeline.segments import Communicate, Compute, Segment

# Hub keys that say nothing about the mathematics of the model.
_IGNORED = {
    "_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "is_encoder_decoder", "label2id",
    "max_position_embeddings", "max_window_layers", "model_type", "name_or_path", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "rope_parameters", "rope_scaling",
    "router_aux_loss_coef", "sliding_window", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# Hub keys of which one value is supported.
_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0, "output_router_logits": False}


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """Sizes and options, named as in the hub's `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int = 0  # of the layers with a dense MLP, where there are any
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()  # global indices of layers with a dense MLP
    decoder_sparse_step: int = 1  # of the others, every n-th has experts
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                             f"num_key_value_heads ({self.num_key_value_heads})")  # fmt: skip
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding; got {self.head_dim}")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok must be 1 to num_experts ({self.num_experts}); "
                             f"got {self.num_experts_per_tok}")  # fmt: skip
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step must be at least 1; got {self.decoder_sparse_step}")
        if self.intermediate_size < 1 and not all(map(self.has_experts, range(self.num_hidden_layers))):
            raise ValueError("intermediate_size must be given for layers with a dense MLP")

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Qwen3MoeConfig:
        """Read a hub `config.json`; raises `ValueError` for what is not supported."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> Qwen3MoeConfig:
        """From the content of a hub `config.json`, older (`rope_theta`) or newer (`rope_parameters`) form.

        Raises `ValueError` naming every option that is unknown or not supported, or every missing size.
        """
        hub = {key: value for key, value in hub.items() if value is not None}
        hub["rope_theta"] = _rope_theta(hub)
        if "num_local_experts" in hub:  # the newer name
            hub["num_experts"] = hub.pop("num_local_experts")
        if "head_dim" not in hub and {"hidden_size", "num_attention_heads"} <= hub.keys():
            hub["head_dim"] = hub["hidden_size"] // hub["num_attention_heads"]
        hub["mlp_only_layers"] = tuple(hub.get("mlp_only_layers") or ())
        _check_keys(hub, {field.name: field for field in fields(cls)})
        return cls(**{field.name: hub[field.name] for field in fields(cls) if field.name in hub})

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has experts instead of a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def _rope_theta(hub: Mapping[str, Any]) -> float:
    scaling = hub.get("rope_parameters") or hub.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    extra = sorted(scaling.keys() - {"rope_type", "type", "rope_theta"})
    if kind != "default" or extra:
        raise ValueError(f"rope_type {kind!r} with {extra} is not supported; only 'default' with rope_theta is")
    return float(scaling.get("rope_theta", hub.get("rope_theta", 10_000.0)))


def _check_keys(hub: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    if hub.get("model_type", "qwen3_moe") != "qwen3_moe":
        raise ValueError(f"model_type must be 'qwen3_moe'; got {hub['model_type']!r}")
    wrong = [f"{key}={hub[key]!r} (only {value!r})" for key, value in _FIXED.items() if hub.get(key, value) != value]
    wrong += [f"{key}={hub[key]!r} (unknown)" for key in sorted(hub.keys() - known.keys() - _IGNORED - _FIXED.keys())]
    if wrong:
        raise ValueError(f"options that Qwen3-MoE does not support here: {', '.join(wrong)}")
    required = list(known)[: list(known).index("intermediate_size")]
    if missing := [key for key in required if key not in hub]:
        raise ValueError(f"the configuration lacks {', '.join(missing)}")


class Attention(nn.Module):
    """Causal grouped-query attention with RMSNorm on the queries and keys of every head."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head
        self.q_proj = Linear(hidden, config.num_attention_heads * head, bias=bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * head, hidden, bias=bias)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        heads = (-1, self.head_dim)
        q_BASD = self.q_norm(self.q_proj(x_BSH).unflatten(-1, heads)).transpose(1, 2)
        k_BGSD = self.k_norm(self.k_proj(x_BSH).unflatten(-1, heads)).transpose(1, 2)
        v_BGSD = self.v_proj(x_BSH).unflatten(-1, heads).transpose(1, 2)
        q_BASD, k_BGSD = apply_rotary(q_BASD, cos_SD, sin_SD), apply_rotary(k_BGSD, cos_SD, sin_SD)
        y_BASD = F.scaled_dot_product_attention(q_BASD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)
        return self.o_proj(y_BASD.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """SwiGLU experts as stacked weights: gate_up (E, 2I, H), down (E, H, I)."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        experts, hidden, intermediate = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = GroupedSwiGLU(experts, hidden, intermediate)
        self.down_proj = GroupedLinear(experts, intermediate, hidden)

    def forward(self, x: Tensor, rows: SortedTokens | Tensor, weight_M: Tensor) -> Tensor:
        """Tokens (T, H) and where they go, or rows (M, H) sorted by expert and their ends (E,) -> (M, H).

        `weight_M` are the sorted rows' routing weights. Without a bias, weighting before the last product is weighting
        its result, which then need not be kept.
        """
        h_MI = self.gate_up_proj(x, rows, weight_M)
        return self.down_proj(h_MI, rows.offs if isinstance(rows, SortedTokens) else rows)


class SparseMLP(nn.Module):
    """Every token goes to its K best experts, here or on another expert-parallel rank; none is dropped."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.gate = Router(
            config.hidden_size, config.num_experts, config.num_experts_per_tok, norm_topk_prob=config.norm_topk_prob
        )
        self.experts = Experts(config)
        self.dispatcher: Dispatcher = ExpertParallel(config.num_experts).dispatcher()

    def forward(self, x_BSH: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H). Collective over the expert-parallel ranks."""
        weights_TK, experts_TK = self.gate(x_BSH)
        y_TH = expert_parallel_mlp(self.dispatcher, self.experts, x_BSH.flatten(0, 1), weights_TK, experts_TK)
        return y_TH.view_as(x_BSH)

    def segments(self, recompute: Callable[[str], bool]) -> list[Segment]:
        """From "x" and "normed" to "x"."""
        if not self.dispatcher.communicates:
            return [Compute(self, "normed", "y", recompute("experts")), _residual(recompute)]
        run = partial(run_experts, self.experts)
        return [
            Compute(self._route, "normed", ("rows", "weights", "plan"), recompute("layer")),
            Communicate(self.dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
            Compute(run, ("rows", "weights", "received"), "rows", recompute("experts")),
            Communicate(self.dispatcher.combine, ("rows", "received"), "rows"),
            Compute(self._add, ("x", "rows", "plan"), "x", recompute("layer")),
        ]

    def _route(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.dispatcher.plan(x_BSH.flatten(0, 1), *self.gate(x_BSH))

    def _add(self, x_BSH: Tensor, rows: Tensor, plan: Any) -> Tensor:
        return x_BSH + self.dispatcher.finish(rows, plan).view_as(x_BSH)


class DenseMLP(nn.Module):
    """SwiGLU without experts, for the layers that have none."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self.down_proj(F.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH))

    def segments(self, recompute: Callable[[str], bool]) -> list[Segment]:
        """From "x" and "normed" to "x"."""
        return [Compute(self, "normed", "y", recompute("experts")), _residual(recompute)]


def _residual(recompute: Callable[[str], bool]) -> Segment:
    return Compute(torch.add, ("x", "y"), "x", recompute("layer"))


class Layer(nn.Module):
    """Attention, then experts or a dense MLP, each behind a norm and added to what came in."""

    def __init__(self, config: Qwen3MoeConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMLP(config) if config.has_experts(index) else DenseMLP(config)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        x_BSH = self._attend(x_BSH, self.input_layernorm(x_BSH), cos_SD, sin_SD)
        return x_BSH + self.mlp(self._normed(x_BSH))

    def segments(self, recompute: Callable[[str], bool]) -> list[Segment]:
        """The same over a carry with "x", "cos" and "sin"; `recompute` says which parts are computed again."""
        return [
            Compute(self.input_layernorm, "x", "normed", recompute("norms")),
            Compute(self._attend, ("x", "normed", "cos", "sin"), "x", recompute("attention")),
            Compute(self._normed, "x", "normed", recompute("norms")),
            *self.mlp.segments(recompute),
        ]

    def _attend(self, x_BSH: Tensor, normed_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        return x_BSH + self.self_attn(normed_BSH.to(x_BSH.dtype), cos_SD, sin_SD)

    def _normed(self, x_BSH: Tensor) -> Tensor:
        return self.post_attention_layernorm(x_BSH).to(x_BSH.dtype)  # which a dtype plan may keep in float32


class Qwen3MoeStage(nn.Module):
    """Consecutive layers; the embedding where `first`, the final norm and the head where `last`.

    The unpipelined model is `Qwen3MoeStage(config, range(config.num_hidden_layers), first=True, last=True)`. With tied
    embeddings the head of a stage that is not also the first shares `embedding`, the first stage's `embed_tokens`.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        layers: range,
        *,
        first: bool,
        last: bool,
        embedding: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if first:
            embedding = self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): Layer(config, index) for index in layers})
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = _tied_weight(embedding)
        self.first, self.last = first, last
        self.recompute = Recompute()

    def use_expert_parallelism(self, experts: ExpertParallel) -> None:
        """Have the layers' experts on all ranks of `experts`; for parameters see `shard_experts`."""
        for layer in self.layers.values():
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.dispatcher = experts.dispatcher()

    def segments(self) -> list[Segment]:
        """The forward in parts, for the pipeline to overlap and, as `recompute` says, to compute again."""
        found: list[Segment] = [Compute(self.embed_tokens, "x", "x")] if self.first else []
        if self.layers:
            found.append(Compute(self._rotary_tables, "x", ("cos", "sin")))
        for index, layer in self.layers.items():
            found += layer.segments(partial(self.recompute, layer=int(index)))
        if self.last:
            found.append(Compute(lambda x_BSH: self.lm_head(self.norm(x_BSH)), "x", "x"))
        return found or [Compute(lambda x_BSH: x_BSH, "x", "x")]

    def _rotary_tables(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(x_BSH.shape[1], self.config.head_dim, self.config.rope_theta, like=x_BSH)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, S) on the first stage, else hidden (B, S, H) -> logits (B, S, V) on the last, else hidden."""
        x_BSH = self.embed_tokens(x) if self.first else x
        if self.layers:
            cos_SD, sin_SD = self._rotary_tables(x_BSH)
            for layer in self.layers.values():
                x_BSH = layer(x_BSH, cos_SD, sin_SD)
        return self.lm_head(self.norm(x_BSH)) if self.last else x_BSH

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Weights from N(0, initializer_range^2), norms one, biases zero.

        The values depend on the seed and on a parameter's name alone, not on how the model is cut or sharded.
        """
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                param.fill_(1.0)
            elif name.endswith(".bias"):
                param.zero_()
            else:
                tied = name == "lm_head.weight" and self.config.tie_word_embeddings
                unique = "embed_tokens.weight" if tied else name
                seeded_normal_(param, std=self.config.initializer_range, seed=seed, name=unique)


def _tied_weight(embedding: nn.Embedding | None) -> nn.Parameter:
    if embedding is None:
        raise ValueError("tie_word_embeddings: the last stage shares the weight of the first; build both in one call "
                         "of build_stages, or pass the first stage's embed_tokens as embedding")  # fmt: skip
    return embedding.weight


def build_stages(config: Qwen3MoeConfig, num_stages: int, only: Sequence[int] | None = None) -> list[Qwen3MoeStage]:
    """The stages of a pipeline, layers split as evenly as possible, lighter at the ends.

    `only` names the stages to build, such as those of one rank; the result is in its order. Raises `ValueError` for
    more stages than layers allow, and for tied embeddings whose two ends are not built together.
    """
    cuts = split_layers(config.num_hidden_layers, num_stages)
    wanted = list(range(num_stages)) if only is None else list(only)
    if outside := [stage for stage in wanted if not 0 <= stage < num_stages]:
        raise ValueError(f"only must name stages from 0 to {num_stages - 1}; got {outside}")
    built: dict[int, Qwen3MoeStage] = {}
    for stage in sorted(wanted):  # the first before the last, which may share its embedding
        embedding = built[0].embed_tokens if 0 in built else None
        last = stage == num_stages - 1
        built[stage] = Qwen3MoeStage(config, cuts[stage], first=stage == 0, last=last, embedding=embedding)
    return [built[stage] for stage in wanted]


def from_hf_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for a state dict of transformers' Qwen3MoeForCausalLM, experts fused (in memory) or not (on disk).

    Example: `model.layers.0.mlp.experts.gate_up_proj` (E, 2I, H) becomes `layers.0.mlp.experts.gate_up_proj.weight`;
    `model.layers.0.mlp.experts.7.up_proj.weight` (I, H) becomes half of row 7 of it.
    """
    ours: dict[str, Tensor] = {}
    single: dict[str, dict[tuple[int, str], Tensor]] = {}  # layer's experts -> (expert, projection) -> weight
    for name, tensor in state.items():
        name = name.removeprefix("model.")
        experts, found, rest = name.partition(".mlp.experts.")
        if not found:
            ours[name] = tensor
        elif rest in ("gate_up_proj", "down_proj"):
            ours[f"{name}.weight"] = tensor
        else:
            expert, projection, _ = rest.split(".")
            single.setdefault(experts + found, {})[int(expert), projection] = tensor
    for prefix, weights in single.items():
        each = range(1 + max(expert for expert, _ in weights))
        gate_up = [torch.cat((weights[e, "gate_proj"], weights[e, "up_proj"])) for e in each]
        ours[f"{prefix}gate_up_proj.weight"] = torch.stack(gate_up)
        ours[f"{prefix}down_proj.weight"] = torch.stack([weights[e, "down_proj"] for e in each])
    return ours
