"""gpt-oss (gpt-oss-20b, gpt-oss-120b; arXiv:2508.10925): attention with sinks, a window in every second layer.

Its experts are clamped SwiGLU MLPs with biases: y = down(h) with h = (up + 1) * gate * sigmoid(alpha * gate), where
gate <= limit and -limit <= up <= limit. Rows of gate and up alternate.

Dimension letters: H hidden, E experts, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from dualpipe.models.decoder import Experts, GroupedQueryAttention, Layer, SparseMLP
from dualpipe.models.hub import GroupedQueryConfig, HubTensorPart, whole
from dualpipe.nn import Router, Scoring

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_LAYER_TYPES = (_SLIDING, _FULL)
# Rotary embedding of a config.json that describes none.
_DEFAULT_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                 "original_max_position_embeddings": 4096}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(GroupedQueryConfig):
    """Sizes and options of gpt-oss, named as in the hub's `config.json`; `num_experts` is its `num_local_experts`."""

    model_type: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"
    # The tensors of a checkpoint show its quantization, so its "quantization_config" is not read.
    _ignored: ClassVar[frozenset[str]] = frozenset({"initial_context_length", "quantization_config"})
    _fixed: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_dropout": 0.0}
    quantized_as: ClassVar[str] = "mxfp4"  # the experts alone

    intermediate_size: int  # of each expert
    layer_types: tuple[str, ...]  # "sliding_attention" or "full_attention" for every layer
    sliding_window: int = 0  # positions that a token attends to in a sliding layer, itself included
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    rope_theta: float = 150_000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(_LAYER_TYPES):
            raise ValueError(f"layer_types must name {' or '.join(_LAYER_TYPES)} for each of the "
                             f"{self.num_hidden_layers} layers; got {list(self.layer_types)}")
        if _SLIDING in self.layer_types and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 for layers of {_SLIDING}; got {self.sliding_window}")

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> Self:
        """Read a `config.json`. Rope parameters default to those of the published models. See `HubConfig`."""
        values = {"rope_theta": 150_000.0} | {key: value for key, value in hub.items() if value is not None}
        if not values.get("rope_scaling"):
            values.setdefault("rope_parameters", _DEFAULT_YARN)
        return super().from_dict(values)

    @classmethod
    def _translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        for hub_name, name in (("num_local_experts", "num_experts"), ("experts_per_token", "num_experts_per_tok")):
            if hub_name in values and values.setdefault(name, values[hub_name]) != values[hub_name]:
                raise ValueError(f"{hub_name} ({values[hub_name]}) and {name} ({values[name]}) are the same thing; "
                                 "give one of them")
            values.pop(hub_name, None)
        alternating = [_LAYER_TYPES[index % 2] for index in range(values.get("num_hidden_layers", 0))]
        values["layer_types"] = tuple(values.get("layer_types", alternating))
        return values

    def layer(self, index: int) -> Layer:
        """Build the layer with this global index."""
        window = self.sliding_window if self.layer_types[index] == _SLIDING else None
        attention = GroupedQueryAttention(self, sinks=True, window=window)
        gate = Router(self.hidden_size, self.num_experts, self.num_experts_per_tok,
                      scoring=Scoring("softmax_topk"), bias=True)
        experts = Experts(self.num_experts, self.hidden_size, self.intermediate_size, bias=True, clamped=True,
                          alpha=self.swiglu_alpha, limit=self.swiglu_limit)
        return Layer(self, attention, SparseMLP(gate, experts))

    def hub_parts(self, name: str, shape: Sequence[int]) -> list[list[HubTensorPart]]:
        """Return the location of a parameter or buffer on the hub; see `HubConfig`.

        The hub stores the experts' weights with inputs before outputs: (E, H, 2I) and (E, I, H). OpenAI stores them in
        MXFP4 instead, as tensors with `_blocks` and `_scales` appended to the same name. Dequantized, those are (E, 2I,
        H) and (E, H, I), as in this model: `transposed` does not apply to them.
        """
        prefix, experts_infix, suffix = name.partition(".mlp.experts.")
        if not experts_infix:
            return super().hub_parts(name.replace(".mlp.gate.", ".mlp.router."), shape)
        projection, _, kind = suffix.partition(".")
        if kind == "bias":
            return [[whole(f"model.{prefix}{experts_infix}{projection}_bias", shape)]]
        experts, outputs, inputs = shape
        all_elements = tuple(slice(0, size) for size in shape)
        hub_name = f"model.{prefix}{experts_infix}{projection}"
        return [[HubTensorPart(hub_name, (experts, inputs, outputs), all_elements, transposed=True)]]
