"""Stage of a model of transformers on the meta device, to count the memory of its layers.

Layers, norm and head are on meta. The model's code around them runs on the CPU with real numbers, because it reads
values: for example, it makes a mask only if positions restart within a sequence. The arguments that it passes to layers
are moved to meta.

`F.scaled_dot_product_attention` saves for the backward what a device's kernels save. On the meta device, torch
decomposes it into GEMMs that materialize the scores. Fused kernels save the output and one number per row of scores
instead. GPUs always have a fused kernel; the CPU has one for some operands.

Dimension letters: B batch, N heads, S sequence, D head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dualpipe.hf.cut import base_of, cut_model, drop_ends, norm_name
from dualpipe.hf.experts import swiglu_form_of
from dualpipe.hf.layers import CannotSplit, LayerArguments, SplitLayer
from dualpipe.hf.model import TransformersModel, build_on_meta
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.stand_ins import InputOverride, StandIn, plain_attributes, swap_modules
from dualpipe.hf.structure import fill_on_cpu
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel.experts.dispatcher import is_interface_experts
from dualpipe.train.config.lora import adapted
from dualpipe.train.config.model_config import stages_on_meta
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig

_MATH = 0  # torch.nn.attention.SDPBackend.MATH
_aten = torch.ops.aten
# Attributes that hold the number of a layer; `key` of an adapter is its layer's name.
_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number", "key")


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
            return self._logits_or_rows(inputs_embeds=placeholder, use_cache=False)


def _on_cpu(x: Tensor) -> Tensor:
    """Return zeros of the same shape and dtype on the CPU, with the memory of one element."""
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


class SkippedLayer(StandIn):
    """Stand-in for a layer that cannot run on meta: the identity."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden_states


def build_meta_stage(
    model: TransformersModel, layers: Sequence[int], *, is_last: bool, dtype: torch.dtype,
    lora: LoRAConfig = NO_ADAPTERS,
) -> MetaStage:
    """Build a stage with the layers of a model that have the numbers `layers`, which need not be consecutive.

    lora: adapters of the model.
    """
    causal_lm = build_on_meta(model)
    cut_model(causal_lm, layers, is_first=False, is_last=is_last)
    drop_ends(causal_lm, is_first=False, is_last=is_last)
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
    if lora.is_enabled:
        (stage,) = cast(tuple[MetaStage], adapted((stage,), model, lora))
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


def layer_forms(model: TransformersModel, lora: LoRAConfig = NO_ADAPTERS) -> list[tuple[Any, ...]]:
    """Return a key for each layer, its form: layers with equal forms take the same memory.

    It has the layer's entry of every per-layer list in the config, such as `layer_types`, and a key for each of its
    modules.
    """
    (whole,) = stages_on_meta(model, lora=lora)
    base = cast(CausalLMStage, whole).base
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


# -- attention


class DeviceAttention(TorchFunctionMode):
    """Context that runs attention on meta tensors with the fused kernels of GPUs, or of the CPU if `cpu` is True."""

    def __init__(self, cpu: bool) -> None:
        super().__init__()
        self._cpu = cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or the fused kernel of the device if `func` is attention."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(self._cpu, *args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    cpu: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """Return the output (B, N, S, D) of the kernel that the device would choose."""
    has_kernel = dropout_p == 0.0
    if cpu and has_kernel:
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in (query, key, value))
        has_kernel = _has_cpu_kernel(shapes, query.dtype, attn_mask is not None, is_causal, enable_gqa)
    if not has_kernel:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # kernels add the mask to the scores, as 0 and -inf
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    if cpu:
        output, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    elif attn_mask is None and query.shape[-1] == value.shape[-1]:
        output, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    else:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        output, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)
    return output


@lru_cache(maxsize=256)
def _has_cpu_kernel(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, has_mask: bool, is_causal: bool, enable_gqa: bool
) -> bool:
    """Return True if torch has a fused CPU kernel for operands of these shapes. shapes: without the batch dimension."""
    query, key, value = (torch.empty(1, *shape, dtype=dtype, device="cpu", requires_grad=True) for shape in shapes)
    mask = torch.empty(1, 1, shapes[0][1], shapes[1][1], dtype=dtype, device="cpu") if has_mask else None
    return torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, enable_gqa=enable_gqa) != _MATH
