"""Qwen3-MoE (Qwen3-30B-A3B, 235B-A22B; arXiv:2505.09388): grouped-query attention, experts in all or some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dualpipe.models.decoder import DenseMLP, Experts, GroupedQueryAttention, Layer, SparseMLP
from dualpipe.models.hub import GroupedQueryConfig
from dualpipe.nn import Router, Scoring


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(GroupedQueryConfig):
    """Sizes and options of Qwen3-MoE, named as in the hub's `config.json`."""

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    _ignored: ClassVar[frozenset[str]] = frozenset({"max_window_layers", "sliding_window"})  # unused: see _fixed
    _fixed: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0,
    }

    moe_intermediate_size: int
    intermediate_size: int = 0  # of the dense MLPs; 0: no layer has one
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()  # global indices of layers with a dense MLP
    decoder_sparse_step: int = 1  # every n-th of the other layers has experts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step must be at least 1; got {self.decoder_sparse_step}")
        if self.intermediate_size < 1 and not all(map(self.has_experts, range(self.num_hidden_layers))):
            raise ValueError(f"intermediate_size must be at least 1 for layers with a dense MLP; got "
                             f"{self.intermediate_size}: set it, or give all layers experts")

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "num_local_experts" in values:  # the name in newer files
            values["num_experts"] = values.pop("num_local_experts")
        if "head_dim" not in values and {"hidden_size", "num_attention_heads"} <= values.keys():
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        return values

    def has_experts(self, layer: int) -> bool:
        """Return True if the layer has experts instead of a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def layer(self, index: int) -> Layer:
        """Build the layer with this global index."""
        attention = GroupedQueryAttention(self, norms=True)
        if not self.has_experts(index):
            return Layer(self, attention, DenseMLP(self.hidden_size, self.intermediate_size))
        gate = Router(self.hidden_size, self.num_experts, self.num_experts_per_tok,
                      scoring=Scoring(norm_topk_prob=self.norm_topk_prob))
        experts = Experts(self.num_experts, self.hidden_size, self.moe_intermediate_size)
        return Layer(self, attention, SparseMLP(gate, experts))
