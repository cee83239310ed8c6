"""Qwen3-MoE (Qwen3-30B-A3B, 235B-A22B; arXiv:2505.09388): grouped-query attention, all or some layers with experts.

Dimension letters: B batch, S sequence, H hidden, A attention heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from einops import rearrange
from torch import Tensor, nn

from dualpipe.models.decoder import DenseMLP, Experts, Layer, SparseMLP
from dualpipe.models.hub import HubConfig, Part, swiglu_expert_layouts
from dualpipe.nn import Linear, RMSNorm, Router
from dualpipe.nn.attention import Context, attend
from dualpipe.nn.rotary import Yarn, apply_rotary


@dataclass(frozen=True)
class Qwen3MoeConfig(HubConfig):
    """Sizes and options, named as in the hub's `config.json`."""

    model_type: ClassVar[str] = "qwen3_moe"
    _ignored: ClassVar[frozenset[str]] = frozenset({"max_window_layers", "sliding_window"})  # of one that is off
    _fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0, "output_router_logits": False,
    }

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
    yarn: Yarn | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        self.check_heads_and_experts()
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step must be at least 1; got {self.decoder_sparse_step}")
        if self.intermediate_size < 1 and not all(map(self.has_experts, range(self.num_hidden_layers))):
            raise ValueError("intermediate_size must be given for layers with a dense MLP")

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "num_local_experts" in values:  # the newer name
            values["num_experts"] = values.pop("num_local_experts")
        if "head_dim" not in values and {"hidden_size", "num_attention_heads"} <= values.keys():
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        return values

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has experts instead of a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def layer(self, index: int) -> Layer:
        """The layer of this global index."""
        if not self.has_experts(index):
            return Layer(self, Attention(self), DenseMLP(self.hidden_size, self.intermediate_size))
        gate = Router(self.hidden_size, self.num_experts, self.num_experts_per_tok, norm_topk_prob=self.norm_topk_prob)
        experts = Experts(self.num_experts, self.hidden_size, self.moe_intermediate_size)
        return Layer(self, Attention(self), SparseMLP(gate, experts))

    def hub_layouts(self, name: str, shape: Sequence[int]) -> list[list[Part]]:
        """See `HubConfig`."""
        return swiglu_expert_layouts(name, shape) or super().hub_layouts(name, shape)


class Attention(nn.Module):
    """Causal grouped-query attention with RMSNorm on the queries and keys of every head."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head
        self.qk_dim = self.v_dim = head
        self.window = None
        self.q_proj = Linear(hidden, config.num_attention_heads * head, bias=bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * head, hidden, bias=bias)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        # One by one: a loop that calls them cannot be traced past the first, and nothing here would be compiled.
        projected = self.q_proj(x_BSH), self.k_proj(x_BSH), self.v_proj(x_BSH)
        q_BSAD, k_BSGD, v_BSGD = (rearrange(x, "B S (A D) -> B S A D", D=self.head_dim) for x in projected)
        q_BASD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (self.q_norm(q_BSAD), self.k_norm(k_BSGD), v_BSGD))
        q_BASD, k_BGSD = (apply_rotary(x, *context.tables(x.dtype)) for x in (q_BASD, k_BGSD))
        y_BASD = attend(q_BASD, k_BGSD, v_BGSD, context, scale=self.head_dim**-0.5)
        return self.o_proj(rearrange(y_BASD, "B A S D -> B S (A D)"))
