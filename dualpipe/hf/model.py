"""A causal LM of transformers as a trainer asks of it: sizes, stages without memory, operations for a token.

Everything is read from the model's config.json and from modules on the meta device; nothing is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from dualpipe.hf.build import stage_of
from dualpipe.hf.cut import base_of, cut_model, is_tied, layer_cost, stage_layers, top_k_of
from dualpipe.hf.experts import NAME
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.structure import check_structure
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel.experts.dispatcher import is_interface_experts

_STATEFUL = ("linear_attention", "conv", "mamba", "recurrent")  # kinds of layers without attention scores


@dataclass(frozen=True)
class TransformersModel:
    """A causal LM of transformers, by the text of its config.json, which is what two models are compared by."""

    text: str

    mtp_depth = 0  # layers for multi-token prediction that are trained: transformers has none

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> TransformersModel:
        """Return the model that the content of a config.json describes.

        Raises ValueError for a family that transformers does not have, and for one that cannot be cut into stages.
        """
        model_type = hub.get("model_type")
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
            raise ValueError(f"model_type {model_type!r} is not one of those of transformers "
                             f"{transformers.__version__}; give a family that it has, or install a version that has it")
        model = cls(json.dumps(hub, sort_keys=True))
        try:
            causal_lm = model.causal_lm
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"transformers cannot build a {model_type} of this config.json: {error}") from error
        base_of(causal_lm)
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the config.json."""
        content: dict[str, Any] = json.loads(self.text)
        return content

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of transformers, a new one each time."""
        content = self.to_dict()
        config: PreTrainedConfig = CONFIG_MAPPING[content["model_type"]].from_dict(content)
        return config

    @property
    def causal_lm(self) -> Any:
        """The whole model without memory, the same one for all callers."""
        return _whole_on_meta(self.text)

    @property
    def model_type(self) -> str:
        """The family, as transformers calls it."""
        return str(self.to_dict()["model_type"])

    @property
    def _text_config(self) -> Any:
        return self.causal_lm.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """The number of tokens that there are."""
        return int(self._text_config.vocab_size)

    @property
    def hidden_size(self) -> int:
        """The size of a hidden state."""
        return int(self._text_config.hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""
        return len(base_of(self.causal_lm).layers)

    def layer(self, number: int) -> nn.Module:
        """Return a layer of `causal_lm`."""
        layer: nn.Module = base_of(self.causal_lm).layers[number]
        return layer

    @property
    def num_experts(self) -> int:
        """The experts of a layer, the most that one has; 0 in a dense model."""
        modules: list[Any] = [module for module in self.causal_lm.modules() if is_interface_experts(module)]
        return max((int(module.num_experts) for module in modules), default=0)

    @property
    def num_experts_per_tok(self) -> int:
        """The experts that a token goes to; 1 in a dense model."""
        return top_k_of(self.causal_lm.config)

    @property
    def positions(self) -> int | None:
        """The number of positions that the model is made for, if known."""
        return getattr(self._text_config, "max_position_embeddings", None)

    @property
    def name_prefix(self) -> str:
        """The beginning of the names of the embedding and of the layers, such as "model."."""
        return f"{self.causal_lm.base_model_prefix}."

    @property
    def is_tied(self) -> bool:
        """Return True if the head has the weight of the embedding."""
        return is_tied(self.causal_lm.config)

    @property
    def mixes_documents(self) -> bool:
        """Return True if some layers see from one document of a row into the next, whatever `position_ids` say.

        Those are layers with a state or a convolution along the sequence, and the attention of gpt-oss.
        """
        kinds = getattr(self._text_config, "layer_types", None) or ()
        has_convolutions = any(isinstance(module, nn.Conv1d) for module in self.causal_lm.modules())
        has_states = any(kind in name for name in kinds for kind in _STATEFUL)
        return has_convolutions or has_states or self.model_type == "gpt_oss"

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the floating-point operations of matrix products for a token, forward and backward.

        Matrices count with the experts that a token goes to; scores of attention, where a layer has them, as those of
        all pairs of positions.
        """
        config = self._text_config
        layers = base_of(self.causal_lm).layers
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        qk_dim = head_dim
        if getattr(config, "qk_nope_head_dim", None):  # of latent attention, where head_dim is the rotated part
            qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        v_dim = getattr(config, "v_head_dim", None) or head_dim
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        with_scores = sum(not any(kind in name for kind in _STATEFUL) for name in kinds)
        products = sum(layer_cost(layer, self.causal_lm.config) for layer in layers)
        products += config.hidden_size * config.vocab_size
        scores = with_scores * heads * (qk_dim + v_dim) * sequence_length
        return 3 * 2.0 * (products + scores)  # the backward takes twice the forward

    def meta_stages(self, num_stages: int = 1, layers_per_stage: tuple[int, ...] = ()) -> tuple[CausalLMStage, ...]:
        """Return all stages without memory, to be looked at alone: the same ones for all callers.

        Raises ValueError for a model that cannot be cut so.
        """
        return _meta_stages(self.text, num_stages, layers_per_stage)


def build_on_meta(model: TransformersModel) -> Any:
    """Return a new whole model without memory, in float32."""
    config = model.config
    config._experts_implementation = NAME
    config.dtype = torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@lru_cache(maxsize=8)
def _whole_on_meta(text: str) -> Any:
    return build_on_meta(TransformersModel(text))


@lru_cache(maxsize=64)
def _meta_stages(text: str, num_stages: int, layers_per_stage: tuple[int, ...]) -> tuple[CausalLMStage, ...]:
    cuts = stage_layers(_whole_on_meta(text), num_stages, layers_per_stage)
    form = check_structure(build_on_meta(TransformersModel(text)), cuts)  # which takes its model apart
    stages = []
    for number, layers in enumerate(cuts):
        is_first = number == 0
        is_last = number == num_stages - 1
        causal_lm = build_on_meta(TransformersModel(text))
        cut_model(causal_lm, layers, is_first=is_first, is_last=is_last)
        stages.append(defer_weight_grads(stage_of(causal_lm, is_first=is_first, is_last=is_last, form=form)))
    return tuple(stages)
