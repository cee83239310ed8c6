"""Cut a causal language model of transformers to the layers of a stage, and balance the stages' costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from dualpipe.hf.stand_ins import plain_attributes
from dualpipe.models.stages import split_layers
from dualpipe.parallel.experts.dispatcher import is_interface_experts

_NORMS = ("norm", "final_layernorm", "embedding_norm", "final_norm")  # names of the norm behind the layers
_TOP_K = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "top_k_experts")  # of configurations


class NumberedLayers(nn.ModuleList):
    """Layers under the numbers that they have in the whole model, so that their names are those of its checkpoints.

    attributes: plain attributes of the first layer, or of a layer of another stage where there is none here.
    """

    def __init__(self, layers: dict[int, nn.Module], attributes: SimpleNamespace) -> None:
        super().__init__()
        self.attributes = attributes
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, index: Any) -> Any:
        """Return the layer at a place of this list, or a list of those in a slice."""
        return list(self._modules.values())[index]

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield the layers with their numbers in the whole model."""
        for name, layer in self._modules.items():
            assert layer is not None, "a layer is a module"
            yield int(name), layer


def cut_model(causal_lm: Any, layers: Sequence[int], *, is_first: bool, is_last: bool) -> None:
    """Remove from a model the parts of other stages: layers, and the embedding, norm and head at other ends.

    layers: the numbers of the stage's layers. A last stage with a tied head keeps the embedding, which the head is
    loaded from, until `drop_embedding`. Raises ValueError as `base_of` does.
    """
    base = base_of(causal_lm)
    all_layers = base.layers
    attributes = plain_attributes(all_layers[layers[0] if layers else -1])
    base.layers = NumberedLayers({number: all_layers[number] for number in layers}, attributes)
    base.config = config_of_stage(base.config, layers, len(all_layers))
    has_head = is_last or getattr(causal_lm, "lm_head", None) is None
    if not is_last:
        setattr(base, norm_name(base), nn.Identity())
        causal_lm.lm_head = None
    if not (is_first or (is_last and is_tied(causal_lm.config))):
        base.embed_tokens = None
    if not (has_head and base.embed_tokens is not None):
        causal_lm.all_tied_weights_keys = {}


def drop_embedding(causal_lm: Any) -> None:
    """Take the embedding out of a last stage, whose head has its weight."""
    base_of(causal_lm).embed_tokens = None
    causal_lm.all_tied_weights_keys = {}


def is_tied(config: Any) -> bool:
    """Return True if the head has the weight of the embedding, by the rule of transformers.

    config: of the causal LM. Some have no such field, which says no.
    """
    return bool(getattr(config, "tie_word_embeddings", False))


def base_of(causal_lm: Any) -> Any:
    """Return the model inside of a causal LM; ValueError where it lacks parts that stages are made of."""
    base = getattr(causal_lm, causal_lm.base_model_prefix, None)
    missing = [name for name in ("embed_tokens", "layers") if not hasattr(base, name)]
    if not norm_name(base):
        missing.append("norm")
    if base is None or missing:
        raise ValueError(
            f"a {type(causal_lm).__name__} has no {', '.join(missing)} in {causal_lm.base_model_prefix!r}, of which "
            "stages are made; cut it yourself, as docs/your-loop.md shows")
    return base


def norm_name(base: Any) -> str:
    """Return the name of the norm behind the layers; "" where there is none of a known name."""
    return next((name for name in _NORMS if isinstance(getattr(base, name, None), nn.Module)), "")


def config_of_stage(config: Any, layers: Sequence[int], num_layers: int) -> Any:
    """Return the configuration that the forward of a stage's model reads: of the stage's layers alone.

    A forward looks up a layer's arguments, such as its mask, by the layer's place in lists of the configuration. A
    stage without layers keeps the place of the last layer, for the stand-in that passes on hidden states.

    num_layers: of the whole model. LongCat counts each twice in `num_hidden_layers`, for its two attentions.
    """
    stage_config = copy.copy(config)
    numbers = list(layers) or [num_layers - 1]
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == num_layers and name.endswith(("_types", "_layers")):
            setattr(stage_config, name, [value[number] for number in numbers])
    stage_config.num_hidden_layers = len(numbers) * config.num_hidden_layers // num_layers
    return stage_config


def stage_layers(causal_lm: Any, num_stages: int, layers_per_stage: Sequence[int] = ()) -> list[range]:
    """Return the numbers of the layers of each stage, so that all compute about as much.

    causal_lm: the whole model, on any device. A layer costs what its matrices cost for a token: experts K of E times.
    layers_per_stage: numbers to take instead. Raises ValueError as `models.stages.split_layers` does.
    """
    base = base_of(causal_lm)
    costs = [layer_cost(layer, causal_lm.config) for layer in base.layers]
    head = float(base.embed_tokens.weight.numel())
    return split_layers(costs, num_stages, tuple(layers_per_stage), head=head)


def top_k_of(config: Any) -> int:
    """Return the number of experts per token that a configuration describes; 1 where it has none."""
    text_config = config.get_text_config()
    values = [getattr(text_config, name, None) for name in _TOP_K]
    return next((value for value in values if value is not None), 1)


def layer_cost(layer: nn.Module, config: Any) -> float:
    """Return the number of multiplications of a layer for one token, without those of attention scores."""
    top_k = top_k_of(config)
    cost = 0.0
    for module in layer.modules():
        num_experts: Any = module.num_experts if is_interface_experts(module) else top_k
        numel = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        cost += min(1.0, top_k / num_experts) * numel
    return cost
