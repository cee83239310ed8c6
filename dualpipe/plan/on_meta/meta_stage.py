"""Stage of a model of transformers on the meta device, to count the memory of its layers.

Layers, norm and head are on meta. The model's code around them runs on the CPU with real numbers, because it reads
values: for example, it makes a mask only if positions restart within a sequence. The arguments that it passes to layers
are moved to meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dualpipe.hf.cut import base_of, cut_model, drop_embedding, is_tied, norm_name
from dualpipe.hf.experts import swiglu_form_of
from dualpipe.hf.layers import CannotSplit, LayerArguments, SplitLayer
from dualpipe.hf.model import TransformersModel, build_on_meta
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.stand_ins import InputOverride, StandIn, plain_attributes, swap_modules
from dualpipe.hf.structure import fill_on_cpu
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel.experts.dispatcher import is_interface_experts

_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number")  # attributes that hold the number of a layer


class MetaStage(CausalLMStage):
    """Stage after the first one, with layers, norm and head on meta, and the rest of its model on the CPU."""

    def layer_arguments(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, list[LayerArguments]]:
        """Return `x`, and the other arguments of each layer, on meta.

        Args:
            x: hidden states (batch, length, hidden size), on meta.
            position_ids: (batch, length), on the CPU.
        """
        _, arguments = super().layer_arguments(_on_cpu(x), position_ids)
        copies: dict[int, Tensor] = {}  # by id: layers share tensors

        def on_meta(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), tensor.to("meta"))

        return x, pytree.tree_map_only(Tensor, on_meta, arguments)

    def apply_head(self, x: Tensor) -> Tensor:
        """Return the logits on the last stage, else the hidden states `x`."""
        if not self.is_last:
            return x
        # The model runs on the placeholder up to its norm, whose stand-in continues with `x`, on meta.
        placeholder = _on_cpu(x)
        norm = norm_name(self.base)
        stand_ins = {"layers": self._fixed_layers(placeholder), norm: InputOverride(x, getattr(self.base, norm))}
        with swap_modules(self.base, stand_ins):
            return self.causal_lm(inputs_embeds=placeholder, use_cache=False).logits


def _on_cpu(x: Tensor) -> Tensor:
    """Return zeros of the same shape and dtype on the CPU, with the memory of one element."""
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


class SkippedLayer(StandIn):
    """Stand-in for a layer that cannot run on meta: the identity."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden_states


def build_meta_stage(
    model: TransformersModel, layers: Sequence[int], *, is_last: bool, dtype: torch.dtype
) -> MetaStage:
    """Build a stage with the layers of a model that have the numbers `layers`, which need not be consecutive."""
    causal_lm = build_on_meta(model)
    cut_model(causal_lm, layers, is_first=False, is_last=is_last)
    if is_last and is_tied(causal_lm.config):
        drop_embedding(causal_lm)
    base = base_of(causal_lm)
    on_meta = {module for part in (base.layers, getattr(base, norm_name(base)), getattr(causal_lm, "lm_head", None))
               if part is not None for module in part.modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        fill_on_cpu(causal_lm, [module for module in causal_lm.modules() if module not in on_meta])
    for parameter in causal_lm.parameters():  # buffers, such as rotary frequencies, keep their dtype
        parameter.data = parameter.data.to(dtype)
    for module in causal_lm.modules():
        if is_interface_experts(module):
            swiglu_form_of(module)  # cached now: it runs a computation, which must not count as the layer's
    form = model.meta_stages()[0].form
    stage = MetaStage(causal_lm, is_first=False, is_last=is_last, form=form)
    stage.train()
    return defer_weight_grads(stage)


def split_on_meta(stage: MetaStage, x: Tensor) -> None:
    """Split the layers of a stage at their experts, as `load_stages` does, but without comparing results.

    Args:
        stage: stage whose `splits` are set.
        x: hidden states of a few tokens, on meta.
    """
    with torch.no_grad():
        _, arguments = stage.layer_arguments(x)
        for (number, layer), layer_arguments in zip(stage.layers.numbered(), arguments):
            try:
                split = SplitLayer(layer)
                split.run_before_experts(x, layer_arguments)
            except CannotSplit:
                continue
            stage.splits[number] = split


def layer_forms(model: TransformersModel) -> list[tuple[Any, ...]]:
    """Return a key for each layer, its form: layers with equal forms take the same memory.

    It has the layer's entry of every per-layer list in the config, such as `layer_types`, and a key for each of its
    modules.
    """
    base = base_of(model.causal_lm)
    layers = list(base.layers)
    per_layer_lists = [value for _, value in sorted(vars(base.config).items())
                       if isinstance(value, list | tuple) and len(value) == len(layers)]
    return [(*(str(values[number]) for values in per_layer_lists), *map(_module_form, layer.named_modules()))
            for number, layer in enumerate(layers)]


def _module_form(named_module: tuple[str, nn.Module]) -> tuple[Any, ...]:
    """Return the name, class, attributes and parameter shapes of a module."""
    name, module = named_module
    attributes = {key: value for key, value in vars(plain_attributes(module)).items() if key not in _LAYER_NUMBERS}
    shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
    return name, type(module).__name__, str(sorted(attributes.items())), str(shapes)
