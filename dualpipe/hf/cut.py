"""Cut a causal language model of transformers to the layers of a stage, and balance the stages' costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from dualpipe.hf.stand_ins import plain_attributes
from dualpipe.models.stages import split_layers
from dualpipe.nn import GroupedLinear
from dualpipe.parallel.experts.dispatcher import is_interface_experts

_NORM_NAMES = ("norm", "final_layernorm", "embedding_norm", "final_norm")  # attributes with the norm after the layers
_TOP_K_NAMES = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "top_k_experts")  # fields of configurations


class NumberedLayers(nn.ModuleList):
    """Layers named by their numbers in the whole model, so that parameter names match its checkpoints.

    attributes: numbers and strings among the attributes of the first layer, which a model may look up. For a stage
        without layers, those of the model's last layer.
    """

    def __init__(self, layers: dict[int, nn.Module], attributes: SimpleNamespace) -> None:
        super().__init__()
        self.attributes = attributes
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, index: Any) -> Any:
        """Return the layer at a position in this stage, or a list of layers for a slice."""
        return list(self._modules.values())[index]

    def __setitem__(self, index: Any, layer: nn.Module) -> None:
        """Replace the layer at a position in this stage, which keeps its number."""
        setattr(self, list(self._modules)[index], layer)

    def _refuse(self, *args: Any) -> Any:
        """Raise ValueError: `nn.ModuleList` would give other layers new numbers, or overwrite one."""
        raise ValueError("layers of a stage have their numbers in the whole model, so none is added or removed; "
                         "replace one by layers[i] = layer, or change the configuration before load_stages")

    append = extend = insert = __delitem__ = __iadd__ = _refuse  # type: ignore[assignment]

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (number in the whole model, layer)."""
        for name, layer in self._modules.items():
            assert layer is not None, "a layer is a module"
            yield int(name), layer


def cut_model(causal_lm: Any, layers: Sequence[int], *, is_first: bool, is_last: bool) -> None:
    """Remove the parts of other stages from a model, in place: layers, embedding, norm and head.

    layers: numbers of the stage's layers.

    If head and embedding are tied, the first and the last stage keep both, so that transformers finds the weight
    wherever it is; `drop_ends` removes the other one once it is loaded. Raises ValueError like `base_of`.
    """
    base = base_of(causal_lm)
    all_layers = base.layers
    attributes = plain_attributes(all_layers[layers[0] if layers else -1])
    base.layers = NumberedLayers({number: all_layers[number] for number in layers}, attributes)
    base.config = config_of_stage(base.config, layers, len(all_layers))
    if not is_last:
        setattr(base, norm_name(base), nn.Identity())
    if not is_tied(causal_lm.config) or not (is_first or is_last):
        drop_ends(causal_lm, is_first=is_first, is_last=is_last)


def drop_ends(causal_lm: Any, *, is_first: bool, is_last: bool) -> None:
    """Remove the embedding from all stages but the first, and the head from all but the last."""
    if not is_first:
        base_of(causal_lm).embed_tokens = None
    if not is_last:
        causal_lm.lm_head = None
    if not (is_first and is_last):
        causal_lm.all_tied_weights_keys = {}


def is_tied(config: Any) -> bool:
    """Return True if the head shares the embedding's weight, by the rule of transformers.

    config: configuration of the causal LM. Without the field `tie_word_embeddings`, the head is not tied.
    """
    return bool(getattr(config, "tie_word_embeddings", False))


def base_of(causal_lm: Any) -> Any:
    """Return the base model of a causal LM, which has the embedding, the layers and the norm.

    Raises ValueError if one of these is missing.
    """
    base = getattr(causal_lm, base_name(causal_lm), None)
    missing = [name for name in ("embed_tokens", "layers") if not hasattr(base, name)]
    if not norm_name(base):
        missing.append("norm")
    if base is None or missing:
        raise ValueError(
            f"a {type(causal_lm).__name__} has no {', '.join(missing)} in {base_name(causal_lm)!r}, which "
            "stages are cut from; cut the model yourself, as docs/your-model.md#your-own-modules shows")
    return base


def base_name(causal_lm: Any) -> str:
    """Return the attribute name of the base model. Llama 4's class names another attribute, which it does not have."""
    prefix: str = causal_lm.base_model_prefix
    return prefix if hasattr(causal_lm, prefix) else "model"


def norm_name(base: Any) -> str:
    """Return the attribute name of the norm after the layers, or "" if no attribute has a known name."""
    for name in _NORM_NAMES:
        if isinstance(getattr(base, name, None), nn.Module):
            return name
    return ""


def config_of_stage(config: Any, layers: Sequence[int], num_layers: int) -> Any:
    """Return the configuration for the forward of a stage's model: a copy reduced to the stage's layers.

    A forward looks up a layer's arguments, such as its mask, by the layer's position in lists of the configuration. For
    a stage without layers, the lists keep the entry of the last layer, for the stand-in that returns hidden states.

    num_layers: number of layers of the whole model. It can differ from `config.num_hidden_layers`: LongCat counts every
        layer twice there, for its two attentions.
    """
    stage_config = copy.copy(config)
    numbers = list(layers) or [num_layers - 1]
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == num_layers and name.endswith(("_types", "_layers")):
            setattr(stage_config, name, [value[number] for number in numbers])
    stage_config.num_hidden_layers = len(numbers) * config.num_hidden_layers // num_layers
    return stage_config


def stage_layers(causal_lm: Any, num_stages: int, layers_per_stage: Sequence[int] = ()) -> list[range]:
    """Divide the layers into stages with balanced costs -> the range of layer numbers of every stage.

    The cost of a layer is its number of multiplications for one token: see `layer_cost`.

    causal_lm: the whole model, on any device.
    layers_per_stage: number of layers of every stage, instead of balanced ones.

    Raises ValueError like `models.stages.split_layers`.
    """
    base = base_of(causal_lm)
    costs = [layer_cost(layer, causal_lm.config) for layer in base.layers]
    head = float(base.embed_tokens.weight.numel())
    return split_layers(costs, num_stages, tuple(layers_per_stage), head=head)


def top_k_of(config: Any) -> int:
    """Return the number of experts per token in a configuration; 1 for a dense model."""
    text_config = config.get_text_config()
    for name in _TOP_K_NAMES:
        value = getattr(text_config, name, None)
        if value is not None:
            return value
    return 1


def check_expert_division(causal_lm: nn.Module, num_ranks: int) -> None:
    """Raise ValueError unless the experts of every layer can be divided evenly among `num_ranks` ranks."""
    modules: list[Any] = [module for module in causal_lm.modules() if is_interface_experts(module)]
    if num_ranks > 1 and not modules:
        raise ValueError(f"a {type(causal_lm).__name__} has no experts that transformers calls through its experts "
                         f"interface, and only those can be divided among {num_ranks} expert-parallel ranks; set ep to "
                         "1, and raise dp")
    for module in modules:
        if module.num_experts % num_ranks:
            raise ValueError(f"{module.num_experts} experts cannot be divided evenly among {num_ranks} expert-parallel "
                             "ranks; set ep to a divisor")


def layer_cost(layer: nn.Module, config: Any, *, trained: bool = False) -> float:
    """Return the number of multiplications of a layer for one token, excluding attention scores.

    The matrices of E experts count K / E times, for K experts per token. trained: count trained matrices alone.
    """
    top_k = top_k_of(config)
    cost = 0.0
    for module in layer.modules():
        num_experts: Any = top_k
        if is_interface_experts(module):
            num_experts = module.num_experts
        elif isinstance(module, GroupedLinear):  # of an adapter of experts
            num_experts = module.num_groups
        numel = sum(p.numel() for p in module.parameters(recurse=False)
                    if p.dim() > 1 and (p.requires_grad or not trained))
        cost += min(1.0, top_k / num_experts) * numel
    return cost
