"""Model description of a causal LM of transformers for the trainer: sizes, stages on the meta device, FLOPs per token.

All values come from the model's config.json and from modules on the meta device. No memory is allocated.
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

from dualpipe.hf.build import for_stages, stage_of
from dualpipe.hf.cut import (
    base_name,
    base_of,
    check_expert_division,
    cut_model,
    is_tied,
    layer_cost,
    stage_layers,
    top_k_of,
)
from dualpipe.hf.experts import NAME
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.structure import check_structure
from dualpipe.models.flops import PartFlops, trained_flops
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel.experts.dispatcher import is_interface_experts

_STATEFUL_KINDS = ("linear_attention", "conv", "mamba", "recurrent")  # kinds of layers without attention scores


@dataclass(frozen=True)
class TransformersModel:
    """Causal LM of transformers, defined by the text of its config.json. Models with equal texts are equal."""

    text: str

    mtp_depth = 0  # transformers trains no layers for multi-token prediction

    @classmethod
    def from_dict(cls, hub: Mapping[str, Any]) -> TransformersModel:
        """Create a model from the content of a config.json.

        Raises ValueError if transformers does not have the family, cannot build the model, or if the model cannot be
        cut into stages.
        """
        model_type = hub.get("model_type")
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
            raise ValueError(f"model_type {model_type!r} is unknown to transformers {transformers.__version__}; give a "
                             "family that it has, or install a version that has this one")
        model = cls(json.dumps(hub, sort_keys=True))
        try:
            causal_lm = model.causal_lm
        except (AttributeError, ImportError, KeyError, TypeError) as error:
            raise ValueError(f"transformers cannot build a {model_type} from this config.json: {error}; give the "
                             "config.json of a causal language model") from error
        base_of(causal_lm)
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the config.json."""
        content: dict[str, Any] = json.loads(self.text)
        return content

    @property
    def config(self) -> PreTrainedConfig:
        """A new configuration of transformers."""
        content = self.to_dict()
        config: PreTrainedConfig = CONFIG_MAPPING[content["model_type"]].from_dict(content)
        return config

    @property
    def causal_lm(self) -> Any:
        """The whole model on the meta device, shared by all callers."""
        return _whole_on_meta(self.text)

    @property
    def model_type(self) -> str:
        """Name of the family in transformers."""
        return str(self.to_dict()["model_type"])

    @property
    def _text_config(self) -> Any:
        """Configuration of the language model."""
        return self.causal_lm.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self._text_config.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state."""
        return int(self._text_config.hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(base_of(self.causal_lm).layers)

    def layer(self, number: int) -> nn.Module:
        """Return layer `number` of `causal_lm`."""
        layer: nn.Module = base_of(self.causal_lm).layers[number]
        return layer

    @property
    def num_experts(self) -> int:
        """Largest number of experts of a layer; 0 in a dense model."""
        modules: list[Any] = [module for module in self.causal_lm.modules() if is_interface_experts(module)]
        return max((int(module.num_experts) for module in modules), default=0)

    def check_expert_division(self, num_ranks: int) -> None:
        """Raise ValueError unless the experts of every layer can be divided evenly among `num_ranks` ranks."""
        check_expert_division(self.causal_lm, num_ranks)

    @property
    def num_experts_per_tok(self) -> int:
        """Number of experts per token; 1 in a dense model."""
        return top_k_of(self.causal_lm.config)

    @property
    def positions(self) -> int | None:
        """Maximum number of positions; None if the configuration does not say."""
        return getattr(self._text_config, "max_position_embeddings", None)

    @property
    def name_prefix(self) -> str:
        """Prefix of the parameter names of the embedding and the layers, such as "model."."""
        return f"{base_name(self.causal_lm)}."

    @property
    def is_tied(self) -> bool:
        """True if the head shares the embedding's weight."""
        return is_tied(self.causal_lm.config)

    @property
    def mixes_documents(self) -> bool:
        """True if a layer passes values between the documents of a row, even if `position_ids` separate them.

        Layers with a state or a convolution along the sequence do, and so does the attention of gpt-oss.
        """
        kinds = getattr(self._text_config, "layer_types", None) or ()
        has_convolutions = any(isinstance(module, nn.Conv1d) for module in self.causal_lm.modules())
        has_states = any(_is_stateful(kind) for kind in kinds)
        return has_convolutions or has_states or self.model_type == "gpt_oss"

    def flops_per_token(self, sequence_length: int, adapted: CausalLMStage | None = None) -> float:
        """Return the FLOPs of GEMMs and attention scores for one token, forward and backward.

        Counts the matrices of the K experts of a token. Attention scores, if a layer has them, are counted for all
        pairs of positions, as without a causal mask.

        adapted: the whole model with adapters, whose frozen weights have no weight gradient; None: all are trained.
        """
        config = self._text_config
        model = self.causal_lm if adapted is None else adapted.causal_lm
        layers = list(base_of(model).layers)
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        qk_dim = head_dim
        if getattr(config, "qk_nope_head_dim", None):  # latent attention, whose head_dim is the rotated part only
            qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        v_dim = getattr(config, "v_head_dim", None) or head_dim
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        parts = []
        for layer, kind in zip(layers, kinds):
            scores = 0 if _is_stateful(kind) else num_heads * (qk_dim + v_dim) * sequence_length
            matrices, trained = (layer_cost(layer, model.config, trained=trained) for trained in (False, True))
            parts.append(PartFlops(2.0 * matrices, 2.0 * trained, 2.0 * scores))
        head = model.get_output_embeddings()
        matrices, trained = (layer_cost(head, model.config, trained=trained) for trained in (False, True))
        parts.append(PartFlops(2.0 * matrices, 2.0 * trained))
        return trained_flops(parts).total

    def meta_stages(self, num_stages: int = 1, layers_per_stage: tuple[int, ...] = ()) -> tuple[CausalLMStage, ...]:
        """Return all stages on the meta device, shared by all callers: do not change them.

        Raises ValueError if the model cannot be cut into these stages.
        """
        return _meta_stages(self.text, num_stages, layers_per_stage)


def _is_stateful(kind: str) -> bool:
    """Return True for a kind of layer that has a state or a convolution instead of attention scores."""
    return any(name in kind for name in _STATEFUL_KINDS)


def build_on_meta(model: TransformersModel) -> Any:
    """Build the whole model on the meta device, in float32; every call builds a new one."""
    config = for_stages(model.config)
    config._experts_implementation = NAME
    config.dtype = torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@lru_cache(maxsize=8)
def _whole_on_meta(text: str) -> Any:
    """Return the whole model on the meta device, cached by the text of its config.json."""
    return build_on_meta(TransformersModel(text))


@lru_cache(maxsize=64)
def _meta_stages(text: str, num_stages: int, layers_per_stage: tuple[int, ...]) -> tuple[CausalLMStage, ...]:
    """Build all stages on the meta device, cached by the text of the model's config.json."""
    cuts = stage_layers(_whole_on_meta(text), num_stages, layers_per_stage)
    form = check_structure(build_on_meta(TransformersModel(text)), cuts)  # consumes the model it gets
    stages = []
    for number, layers in enumerate(cuts):
        is_first = number == 0
        is_last = number == num_stages - 1
        causal_lm = build_on_meta(TransformersModel(text))
        cut_model(causal_lm, layers, is_first=is_first, is_last=is_last)
        stages.append(defer_weight_grads(stage_of(causal_lm, is_first=is_first, is_last=is_last, form=form)))
    return tuple(stages)
