"""A stage of a model of transformers that runs on the meta device, to count what its layers take.

Layers, norm and head are on meta. The model's code around them runs on the CPU with real numbers, because it looks at
values: whether positions start anew in a row decides if there is a mask. What it gives to layers is moved to meta.
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
from dualpipe.hf.stand_ins import InputOverride, StandIn, plain_attributes, standing_in
from dualpipe.hf.structure import fill_on_cpu
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel.experts.dispatcher import is_interface_experts

_NUMBERS = ("layer_idx", "layer_id", "layer_number")  # attributes that are a layer's number


class MetaStage(CausalLMStage):
    """A stage behind the first one, whose layers, norm and head are on meta, and the rest of its model on the CPU."""

    def layer_arguments(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, list[LayerArguments]]:
        """Return `x`, and each layer's arguments behind the hidden states, on meta. position_ids: on the CPU."""
        _, arguments = super().layer_arguments(_on_cpu(x), position_ids)
        copies: dict[int, Tensor] = {}  # layers share tensors

        def on_meta(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), tensor.to("meta"))

        return x, pytree.tree_map_only(Tensor, on_meta, arguments)

    def _end(self, x: Tensor) -> Tensor:
        if not self.is_last:
            return x
        placeholder = _on_cpu(x)
        norm = norm_name(self.base)
        stand_ins = {"layers": self._fixed_layers(placeholder), norm: InputOverride(x, getattr(self.base, norm))}
        with standing_in(self.base, stand_ins):
            return self.causal_lm(inputs_embeds=placeholder, use_cache=False).logits


def _on_cpu(x: Tensor) -> Tensor:
    """Return zeros of the same shape and dtype on the CPU, which have the memory of one number."""
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


class SkippedLayer(StandIn):
    """Stands for a layer that cannot run on meta: hands on its hidden states."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states."""
        return hidden_states


def build_meta_stage(
    model: TransformersModel, layers: Sequence[int], *, is_last: bool, dtype: torch.dtype
) -> MetaStage:
    """Build a stage of some layers of a model, by their numbers, which need not be neighbours."""
    causal_lm = build_on_meta(model)
    cut_model(causal_lm, layers, is_first=False, is_last=is_last)
    if is_last and is_tied(causal_lm.config):
        drop_embedding(causal_lm)
    base = base_of(causal_lm)
    on_meta = {module for part in (base.layers, getattr(base, norm_name(base)), getattr(causal_lm, "lm_head", None))
               if part is not None for module in part.modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        fill_on_cpu(causal_lm, [module for module in causal_lm.modules() if module not in on_meta])
    for parameter in causal_lm.parameters():  # not buffers, such as frequencies, which stay as wide as they are
        parameter.data = parameter.data.to(dtype)
    for module in causal_lm.modules():
        if is_interface_experts(module):
            swiglu_form_of(module)  # found by a computation, which is none of the layer's
    form = model.meta_stages()[0].form
    stage = MetaStage(causal_lm, is_first=False, is_last=is_last, form=form)
    stage.train()
    return defer_weight_grads(stage)


def split_on_meta(stage: MetaStage, x: Tensor) -> None:
    """Cut the layers of a stage at their experts, as `load_stages` does, but for the comparison of results.

    x: hidden states of a few tokens, on meta.
    """
    with torch.no_grad():
        _, arguments = stage.layer_arguments(x)
        for (number, layer), layer_arguments in zip(stage.layers.numbered(), arguments):
            try:
                split = SplitLayer(layer)
                split.first(x, layer_arguments)
            except CannotSplit:
                continue
            stage.splits[number] = split


def layer_forms(model: TransformersModel) -> list[tuple[Any, ...]]:
    """Return for each layer a form: layers of equal forms take the same memory."""
    layers = list(base_of(model.causal_lm).layers)
    config = base_of(model.causal_lm).config
    lists = [value for _, value in sorted(vars(config).items())
             if isinstance(value, list | tuple) and len(value) == len(layers)]
    return [(*(str(values[number]) for values in lists), *map(_module_form, layer.named_modules()))
            for number, layer in enumerate(layers)]


def _module_form(named: tuple[str, nn.Module]) -> tuple[Any, ...]:
    name, module = named
    attributes = {key: value for key, value in vars(plain_attributes(module)).items() if key not in _NUMBERS}
    shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
    return name, type(module).__name__, str(sorted(attributes.items())), str(shapes)
