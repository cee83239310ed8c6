"""DeepSeek-V2 (V2-Lite, V2; arXiv:2405.04434) and DeepSeek-V3 (arXiv:2412.19437): latent attention, shared experts.
Kimi K2 (arXiv:2507.20534) is DeepSeek-V3 with other sizes.

The queries and keys of a head have N dimensions without a position, then P rotated dimensions. Keys and values are
projected from a narrow latent, except the rotated part of the key, which all heads share.

Dimension letters: B batch, S sequence, H hidden, A attention heads, C key/value latent, D = N + P head dimension of
queries and keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from dualpipe.models.decoder import Attention, DenseMLP, Experts, Layer, PredictionLayer, SparseMLP
from dualpipe.models.hub import MTP_LAYERS, HubConfig
from dualpipe.nn import ExpertGroups, Linear, RMSNorm, Router, Scoring
from dualpipe.nn.attention import Context, apply_rope, yarn_mscale

LATENT_EPS = 1e-6  # eps of the norms of latents, independent of rms_norm_eps


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(HubConfig):
    """Sizes and options of DeepSeek-V2 and DeepSeek-V3, named as in the hub's `config.json`."""

    _ignored: ClassVar[frozenset[str]] = frozenset({
        "aux_loss_alpha", "seq_aux",  # router losses, which the training config sets instead
        "ep_size", "pretraining_tp",  # the parallel layout of DeepSeek's code
        "head_dim", "qk_head_dim",  # P and D, which transformers writes redundantly
    })
    _fixed: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False, "moe_layer_freq": 1,
    }
    _nullable: ClassVar[frozenset[str]] = frozenset({"q_lora_rank", "n_shared_experts", "n_group", "topk_group"})
    _has_correction_bias: ClassVar[bool] = False

    q_lora_rank: int | None  # width of the queries' latent; None: queries are projected from x
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int  # of a dense MLP
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int | None  # one MLP of n_shared_experts * moe_intermediate_size
    num_experts_per_tok: int
    n_group: int | None = None  # None: one group
    topk_group: int | None = None
    first_k_dense_replace: int = 0  # number of layers at the start that have a dense MLP
    routed_scaling_factor: float = 1.0
    rope_interleave: bool = True  # rotate pairs of neighbouring dimensions; False: pairs from the two halves

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim < 2 or self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even and at least 2; got {self.qk_rope_head_dim}")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError("q_lora_rank must be at least 1, or null for queries without a latent; got "
                             f"{self.q_lora_rank}")
        if self.first_k_dense_replace < self.num_hidden_layers:
            self.gate("meta")  # raises ValueError for router sizes that do not fit together

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        heads = values.get("num_attention_heads")
        if heads is None:
            return values
        kv_heads = values.pop("num_key_value_heads", heads)
        if kv_heads != heads:
            raise ValueError(f"num_key_value_heads must be num_attention_heads ({heads}), since the keys and values of "
                             f"all heads are projected from one latent; got {kv_heads}")
        return values

    @property
    def num_experts(self) -> int:
        """Number of routed experts, under the name of the other families."""
        return self.n_routed_experts

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head, P."""
        return self.qk_rope_head_dim

    def gate(self, device: str | None = None) -> Router:
        """Build the router of a layer."""
        return Router(
            self.hidden_size, self.n_routed_experts, self.num_experts_per_tok, scoring=self._scoring(),
            groups=self._groups(), correction_bias=self._has_correction_bias, wide_logits=True, device=device,
        )

    def _scoring(self) -> Scoring:
        return Scoring(routed_scaling_factor=self.routed_scaling_factor)

    def _groups(self) -> ExpertGroups:
        return ExpertGroups(self.n_group or 1, self.topk_group or 1)

    def layer(self, index: int) -> Layer:
        """Build the layer with this global index; indices from num_hidden_layers on are MTP layers."""
        attention = LatentAttention(self)
        layer_class = Layer if index < self.num_hidden_layers else PredictionLayer
        if index < self.first_k_dense_replace:
            return layer_class(self, attention, DenseMLP(self.hidden_size, self.intermediate_size))
        experts = Experts(self.n_routed_experts, self.hidden_size, self.moe_intermediate_size)
        shared_size = (self.n_shared_experts or 0) * self.moe_intermediate_size
        shared_experts = DenseMLP(self.hidden_size, shared_size) if shared_size else None
        return layer_class(self, attention, SparseMLP(self.gate(), experts, shared_experts))


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """DeepSeek-V2: a softmax over all experts and the best K of them, from the best groups or from all.

    norm_topk_prob: only false is supported, the value of all published models. transformers ignores the key; DeepSeek's
    code omits routed_scaling_factor if it is true.
    """

    model_type: ClassVar[str] = "deepseek_v2"
    architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    _fixed: ClassVar[dict[str, Any]] = DeepseekConfig._fixed | {
        "scoring_func": "softmax", "norm_topk_prob": False, "rope_interleave": True,
    }

    topk_method: str = "greedy"

    def __post_init__(self) -> None:
        if self.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method must be 'greedy' or 'group_limited_greedy'; got {self.topk_method!r}")
        super().__post_init__()

    def _groups(self) -> ExpertGroups:
        return ExpertGroups() if self.topk_method == "greedy" else super()._groups()


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekConfig):
    """DeepSeek-V3: a sigmoid for each expert, and a correction bias that balances loads; it affects only the choice."""

    model_type: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    _fixed: ClassVar[dict[str, Any]] = DeepseekConfig._fixed | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    _has_correction_bias: ClassVar[bool] = True

    n_group: int | None = 8
    topk_group: int | None = 4
    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = field(default=1, compare=False)  # built by `with_mtp` only

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        name, newer_name = MTP_LAYERS
        if newer_name in values:
            values[name] = values.pop(newer_name)
        return super()._translated(values)

    @property
    def carried_layers(self) -> range:
        """Global indices of MTP layers that are on the hub and not trained; see `HubConfig`."""
        num_trained = self.num_hidden_layers + self.mtp_depth
        return range(num_trained, max(num_trained, self.num_hidden_layers + self.num_nextn_predict_layers))

    def _scoring(self) -> Scoring:
        return replace(super()._scoring(), score="sigmoid", norm_topk_prob=self.norm_topk_prob)

    def _groups(self) -> ExpertGroups:
        return replace(super()._groups(), group_best=2)


@dataclass(frozen=True, kw_only=True)
class KimiK2Config(DeepseekV3Config):
    """Kimi K2: DeepSeek-V3's mathematics and class, under another `model_type`."""

    model_type: ClassVar[str] = "kimi_k2"
    auto_map: ClassVar[dict[str, str]] = {  # a written checkpoint has no code; it refers to the published code
        name: f"moonshotai/Kimi-K2-Instruct--{place}" for name, place in (
            ("AutoConfig", "configuration_deepseek.DeepseekV3Config"),
            ("AutoModel", "modeling_deepseek.DeepseekV3Model"),
            ("AutoModelForCausalLM", "modeling_deepseek.DeepseekV3ForCausalLM"),
        )
    }


class LatentAttention(Attention):
    """Causal multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        bias = config.attention_bias
        self.num_heads = heads
        self.num_kv_heads = heads
        self.latent_dim = config.kv_lora_rank
        self.window = None
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.v_dim = config.v_head_dim
        self.qk_dim = self.nope_dim + self.rope_dim
        # With YaRN, the scale includes the square of its temperature for all dimensions of queries and keys. The rotary
        # tables include the rest of the temperature: see `Yarn.scale`.
        temperature = 1.0 if config.yarn is None else yarn_mscale(config.yarn.factor, config.yarn.mscale_all_dim)
        self.scale = self.qk_dim**-0.5 * temperature**2
        self.interleaved = config.rope_interleave
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * self.qk_dim, bias=False)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, heads * self.qk_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent_dim + self.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LATENT_EPS)
        self.kv_b_proj = Linear(self.latent_dim, heads * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = Linear(heads * self.v_dim, hidden, bias=bias)
        self.shared = ((1, self.latent_dim), (1, self.rope_dim))
        self.register_parameter("sinks", None)

    def qkv_proj(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """Return the queries (B, S, A * D), and the latent with the shared part of the key (B, S, C + P)."""
        kv = self.kv_a_proj_with_mqa(x_BSH)
        if hasattr(self, "q_proj"):
            return self.q_proj(x_BSH), kv
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSH))), kv

    def apply_rope(self, context: Context, *projections: Tensor) -> tuple[Tensor, ...]:
        """Return queries (B, A, S, D), the normalized latent (B, 1, S, C) and the key's rotated part (B, 1, S, P)."""
        q, kv = projections
        latent_BSC, k_BSP = kv.split((self.latent_dim, self.rope_dim), dim=-1)
        q_BSAD = rearrange(q, "B S (A D) -> B S A D", A=self.num_heads)
        q_BSAN, q_BSAP = q_BSAD.split((self.nope_dim, self.rope_dim), dim=-1)
        q_BASP, k_B1SP = apply_rope(
            q_BSAP, k_BSP.unsqueeze(2), *context.tables(q_BSAP.dtype), interleaved=self.interleaved)
        q_BASD = torch.cat((q_BSAN.transpose(1, 2), q_BASP), dim=-1)
        return q_BASD, self.kv_a_layernorm(latent_BSC).unsqueeze(1), k_B1SP

    def logit_row_scales(self, factors_A: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Scale queries and keys by the square root of the factor each (Kimi K2, arXiv:2507.20534, section 2.1).

        All heads share the rotated part of the key. For these dimensions the queries alone are scaled, by the factor.
        """
        factors_A1 = factors_A.unsqueeze(1)
        root_A1 = factors_A1.sqrt()
        queries = torch.cat((root_A1.expand(-1, self.nope_dim), factors_A1.expand(-1, self.rope_dim)), 1)
        keys = torch.cat((root_A1.expand(-1, self.nope_dim), torch.ones_like(root_A1).expand(-1, self.v_dim)), 1)
        q_proj = self.q_proj if hasattr(self, "q_proj") else self.q_b_proj
        return [(parameter, rows.flatten()) for linear, rows in ((q_proj, queries), (self.kv_b_proj, keys))
                for parameter in linear.parameters()]

    def expand_kv(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Project every head's keys and values from the latent; the rotated part of the key is the same for all."""
        latent_B1SC, k_B1SP = shared
        kv_BASX = rearrange(self.kv_b_proj(latent_B1SC.squeeze(1)), "B S (A X) -> B A S X", A=self.num_heads)
        k_BASN, v_BASV = kv_BASX.split((self.nope_dim, self.v_dim), dim=-1)
        return torch.cat((k_BASN, k_B1SP.expand(-1, self.num_heads, -1, -1)), dim=-1), v_BASV
