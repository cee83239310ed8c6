"""gpt-oss (gpt-oss-20b, gpt-oss-120b; arXiv:2508.10925): attention with sinks, every second layer through a window.

Dimension letters: B batch, S sequence, H hidden, A attention heads, G key/value heads, D head dimension, T tokens,
E experts, M routed rows, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from einops import rearrange
from torch import Tensor, nn

from dualpipe.kernels import SortedTokens
from dualpipe.models.decoder import Layer, SparseMLP
from dualpipe.models.hub import HubConfig, Part, whole
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear, Router
from dualpipe.nn.attention import Context, attend
from dualpipe.nn.rotary import Yarn, apply_rotary

_KINDS = ("sliding_attention", "full_attention")
# What a config.json means that says nothing of these.
_ROPE = {
    "rope_theta": 150_000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}


@dataclass(frozen=True)
class GptOssConfig(HubConfig):
    """Sizes and options, named as in the hub's `config.json`, but `num_experts` for its `num_local_experts`."""

    model_type: ClassVar[str] = "gpt_oss"
    # How a checkpoint is quantized is seen from its tensors.
    _ignored: ClassVar[frozenset[str]] = frozenset({"initial_context_length", "quantization_config"})
    _fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu", "attention_dropout": 0.0, "output_router_logits": False,
    }

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of each expert
    layer_types: tuple[str, ...]  # "sliding_attention" or "full_attention", of every layer
    sliding_window: int = 0  # positions that a token sees with itself, where a layer is of the first kind
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    rope_theta: float = 150_000.0
    yarn: Yarn | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        self.check_heads_and_experts()
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(_KINDS):
            raise ValueError(f"layer_types must name {' or '.join(_KINDS)} for each of the {self.num_hidden_layers} "
                             f"layers; got {list(self.layer_types)}")
        if _KINDS[0] in self.layer_types and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 for layers of {_KINDS[0]}; got {self.sliding_window}")

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> Self:
        """See `HubConfig`; without rope parameters, the rotary embedding is gpt-oss's own."""
        return super().from_dict(_ROPE | {key: value for key, value in hub.items() if value is not None})

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        for theirs, ours in (("num_local_experts", "num_experts"), ("experts_per_token", "num_experts_per_tok")):
            if theirs in values and values.setdefault(ours, values[theirs]) != values[theirs]:
                raise ValueError(f"{theirs} ({values[theirs]}) and {ours} ({values[ours]}) are the same thing; "
                                 "give one of them")
            values.pop(theirs, None)
        alternating = [_KINDS[index % 2] for index in range(values.get("num_hidden_layers", 0))]
        values["layer_types"] = tuple(values.get("layer_types", alternating))
        return values

    def layer(self, index: int) -> Layer:
        """The layer of this global index."""
        attention = Attention(self, sliding=self.layer_types[index] == _KINDS[0])
        gate = Router(self.hidden_size, self.num_experts, self.num_experts_per_tok, score="softmax_topk", bias=True)
        return Layer(self, attention, SparseMLP(gate, Experts(self)))

    def hub_layouts(self, name: str, shape: Sequence[int]) -> list[list[Part]]:
        """See `HubConfig`. The experts' weights are on the hub with inputs before outputs: (E, H, 2I) and (E, I, H).

        OpenAI stores them in MXFP4 instead, as `..._blocks` and `..._scales` behind the same name. Dequantized, those
        are (E, 2I, H) and (E, H, I), in the order of ours: `transposed` does not apply to them.
        """
        prefix, found, rest = name.partition(".mlp.experts.")
        if not found:
            return super().hub_layouts(name.replace(".mlp.gate.", ".mlp.router."), shape)
        projection, _, kind = rest.partition(".")
        if kind == "bias":
            return [[whole(f"model.{prefix}{found}{projection}_bias", shape)]]
        experts, outputs, inputs = shape
        everything = tuple(slice(0, size) for size in shape)
        return [[Part(f"model.{prefix}{found}{projection}", (experts, inputs, outputs), everything, transposed=True)]]


class Attention(nn.Module):
    """Causal grouped-query attention with a sink in every head; `sliding`: through a window."""

    def __init__(self, config: GptOssConfig, *, sliding: bool) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head
        self.qk_dim = self.v_dim = head
        self.window = config.sliding_window if sliding else None
        self.q_proj = Linear(hidden, config.num_attention_heads * head, bias=bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * head, hidden, bias=bias)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        # One by one: a loop that calls them cannot be traced past the first, and nothing here would be compiled.
        projected = self.q_proj(x_BSH), self.k_proj(x_BSH), self.v_proj(x_BSH)
        q_BASD, k_BGSD, v_BGSD = (rearrange(x, "B S (A D) -> B A S D", D=self.head_dim) for x in projected)
        q_BASD, k_BGSD = (apply_rotary(x, *context.tables(x.dtype)) for x in (q_BASD, k_BGSD))
        y_BASD = attend(
            q_BASD, k_BGSD, v_BGSD, context, scale=self.head_dim**-0.5, window=self.window, sinks_A=self.sinks
        )
        return self.o_proj(rearrange(y_BASD, "B A S D -> B S (A D)"))


class Experts(nn.Module):
    """Clamped SwiGLU experts with biases, as stacked weights: gate_up (E, 2I, H), gate and up in turn, down (E, H, I).

    y = down(h) with h = (up + 1) * gate * sigmoid(alpha * gate), where gate <= limit and -limit <= up <= limit.
    """

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        sizes = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = GroupedSwiGLU(
            *sizes, bias=True, clamped=True, alpha=config.swiglu_alpha, limit=config.swiglu_limit
        )
        self.down_proj = GroupedLinear(config.num_experts, config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, rows: SortedTokens | Tensor, weight_M: Tensor) -> Tensor:
        """Tokens (T, H) and where they go, or rows (M, H) sorted by expert and their ends (E,) -> (M, H).

        `weight_M` are the sorted rows' routing weights. They multiply the result, for the last bias counts as well.
        """
        h_MI = self.gate_up_proj(x, rows)
        y_MH = self.down_proj(h_MI, rows.offs if isinstance(rows, SortedTokens) else rows)
        return (y_MH * weight_M.unsqueeze(1)).to(y_MH.dtype)  # a float32 router's weights do not widen the rows
