"""DeepSeek-V2 (V2-Lite, V2; arXiv:2405.04434) and DeepSeek-V3 (arXiv:2412.19437): latent attention, shared experts.
Kimi K2 (arXiv:2507.20534) is DeepSeek-V3 with other sizes.

A head's queries and keys have N dimensions that do not know their position, then P rotated ones. Keys and values are
made from a narrow latent, to which the rotated part of the key, one for all heads, comes besides.

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

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(HubConfig):
    """Sizes and options of both versions, named as in the hub's `config.json`."""

    _ignored: ClassVar[frozenset[str]] = frozenset({
        "aux_loss_alpha", "seq_aux",  # losses of the training, which a router's `step` says
        "ep_size", "pretraining_tp",  # how DeepSeek's code spreads the same mathematics
        "head_dim", "qk_head_dim",  # P and D, which transformers writes besides
    })
    _fixed: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False, "moe_layer_freq": 1,
        "output_router_logits": False,
    }
    _nullable: ClassVar[frozenset[str]] = frozenset({"q_lora_rank", "n_shared_experts", "n_group", "topk_group"})
    _has_correction_bias: ClassVar[bool] = False

    q_lora_rank: int | None  # of the queries' latent; None: queries are made from x itself
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int  # of a dense MLP
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int | None  # together one MLP of so many times moe_intermediate_size
    num_experts_per_tok: int
    n_group: int | None = None  # None: one group
    topk_group: int | None = None
    first_k_dense_replace: int = 0  # so many layers at the start have a dense MLP
    routed_scaling_factor: float = 1.0
    rope_interleave: bool = True  # which dimensions are rotated together: neighbours, or those of the two halves

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim < 2 or self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even and at least 2; got {self.qk_rope_head_dim}")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError("q_lora_rank must be at least 1, or null for queries without a latent; got "
                             f"{self.q_lora_rank}")
        if self.first_k_dense_replace < self.num_hidden_layers:
            self.gate("meta")  # raises ValueError for sizes that do not fit together

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        heads = values.get("num_attention_heads")
        if heads is not None and (given := values.pop("num_key_value_heads", heads)) != heads:
            raise ValueError(f"num_key_value_heads must be num_attention_heads ({heads}), all heads' keys and values "
                             f"being made from one latent; got {given}")
        return values

    @property
    def num_experts(self) -> int:
        """`n_routed_experts`, as the other families call it."""
        return self.n_routed_experts

    @property
    def rotary_dim(self) -> int:
        """P."""
        return self.qk_rope_head_dim

    def gate(self, device: str | None = None) -> Router:
        """The router of a layer."""
        return Router(
            self.hidden_size, self.n_routed_experts, self.num_experts_per_tok, scoring=self._scoring(),
            groups=self._groups(), correction_bias=self._has_correction_bias, wide_logits=True, device=device,
        )

    def _scoring(self) -> Scoring:
        return Scoring(routed_scaling_factor=self.routed_scaling_factor)

    def _groups(self) -> ExpertGroups:
        return ExpertGroups(self.n_group or 1, self.topk_group or 1)

    def layer(self, index: int) -> Layer:
        """The layer of this global index."""
        attention, kind = LatentAttention(self), Layer if index < self.num_hidden_layers else PredictionLayer
        if index < self.first_k_dense_replace:
            return kind(self, attention, DenseMLP(self.hidden_size, self.intermediate_size))
        experts = Experts(self.n_routed_experts, self.hidden_size, self.moe_intermediate_size)
        width = (self.n_shared_experts or 0) * self.moe_intermediate_size
        shared = DenseMLP(self.hidden_size, width) if width else None
        return kind(self, attention, SparseMLP(self.gate(), experts, shared))


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """DeepSeek-V2: a softmax over all experts, of which the best are taken, from few groups or from all.

    norm_topk_prob: only false, as all published models have it; transformers takes no notice of it, and DeepSeek's own
    code leaves out routed_scaling_factor where it is true.
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
    """DeepSeek-V3: each expert's own sigmoid, and a bias on the choice that evens out the loads."""

    model_type: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    _fixed: ClassVar[dict[str, Any]] = DeepseekConfig._fixed | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    _has_correction_bias: ClassVar[bool] = True

    n_group: int | None = 8
    topk_group: int | None = 4
    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = field(default=1, compare=False)  # here with `with_mtp` only

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        name, newer = MTP_LAYERS
        if newer in values:
            values[name] = values.pop(newer)
        return super()._translated(values)

    @property
    def carried_layers(self) -> range:
        """See `HubConfig`."""
        trained = self.num_hidden_layers + self.mtp_depth
        return range(trained, max(trained, self.num_hidden_layers + self.num_nextn_predict_layers))

    def _scoring(self) -> Scoring:
        return replace(super()._scoring(), score="sigmoid", norm_topk_prob=self.norm_topk_prob)

    def _groups(self) -> ExpertGroups:
        return replace(super()._groups(), group_best=2)


@dataclass(frozen=True, kw_only=True)
class KimiK2Config(DeepseekV3Config):
    """Kimi K2: DeepSeek-V3's mathematics and class, by another `model_type`."""

    model_type: ClassVar[str] = "kimi_k2"
    auto_map: ClassVar[dict[str, str]] = {  # the code of the published checkpoint, for one that brings none
        name: f"moonshotai/Kimi-K2-Instruct--{place}" for name, place in (
            ("AutoConfig", "configuration_deepseek.DeepseekV3Config"),
            ("AutoModel", "modeling_deepseek.DeepseekV3Model"),
            ("AutoModelForCausalLM", "modeling_deepseek.DeepseekV3ForCausalLM"),
        )
    }


class LatentAttention(Attention):
    """Causal multi-head latent attention."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.num_heads = self.num_kv_heads = heads
        self.latent_dim, self.window = config.kv_lora_rank, None
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.qk_dim = self.nope_dim + self.rope_dim
        # Where YaRN stretches, with the square of its temperature for all dimensions of queries and keys; the rotary
        # tables have the rest of the temperature: see `Yarn.scale`.
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
        self.shared = (1, self.latent_dim), (1, self.rope_dim)
        self.register_parameter("sinks", None)

    def products(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """What becomes queries, and the latent with the part of the key beside it."""
        kv, narrow = self.kv_a_proj_with_mqa(x_BSH), not hasattr(self, "q_proj")
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSH))) if narrow else self.q_proj(x_BSH), kv

    def turned(self, context: Context, *products: Tensor) -> tuple[Tensor, ...]:
        """Queries, the latent behind its norm (B, 1, S, C) and the rotated part of the key (B, 1, S, P)."""
        q, kv = products
        latent_BSC, k_BSP = kv.split((self.latent_dim, self.rope_dim), dim=-1)
        q_BSAD = rearrange(q, "B S (A D) -> B S A D", A=self.num_heads)
        q_BSAN, q_BSAP = q_BSAD.split((self.nope_dim, self.rope_dim), dim=-1)
        q_BASP, k_B1SP = apply_rope(
            q_BSAP, k_BSP.unsqueeze(2), *context.tables(q_BSAP.dtype), interleaved=self.interleaved)
        q_BASD = torch.cat((q_BSAN.transpose(1, 2), q_BASP), dim=-1)
        return q_BASD, self.kv_a_layernorm(latent_BSC).unsqueeze(1), k_B1SP

    def scaled(self, share_A: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Queries and keys alike, but for the rotated part of the key, which all heads share: there the queries alone
        (Kimi K2, arXiv:2507.20534, section 2.1)."""
        half, share = share_A.sqrt().unsqueeze(1), share_A.unsqueeze(1)
        queries = torch.cat((half.expand(-1, self.nope_dim), share.expand(-1, self.rope_dim)), 1)
        keys = torch.cat((half.expand(-1, self.nope_dim), torch.ones_like(half).expand(-1, self.v_dim)), 1)
        q_proj = self.q_proj if hasattr(self, "q_proj") else self.q_b_proj
        return [(parameter, rows.flatten()) for linear, rows in ((q_proj, queries), (self.kv_b_proj, keys))
                for parameter in linear.parameters()]

    def expand(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's keys and values, made of the latent; the rotated part of the key is the same for all."""
        latent_B1SC, k_B1SP = shared
        kv_BASX = rearrange(self.kv_b_proj(latent_B1SC.squeeze(1)), "B S (A X) -> B A S X", A=self.num_heads)
        k_BASN, v_BASV = kv_BASX.split((self.nope_dim, self.v_dim), dim=-1)
        return torch.cat((k_BASN, k_B1SP.expand(-1, self.num_heads, -1, -1)), dim=-1), v_BASV
