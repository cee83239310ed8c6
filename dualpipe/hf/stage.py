"""Pipeline stage with some layers of a causal language model of transformers, run by the model's own forward.

The model keeps its classes, parameter names and state-dict keys; the parts of other stages are removed. On every stage,
the model itself makes masks and rotary tables from the shape of the hidden states and from `position_ids`.

Dimension letters: B rows of the batch, S positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe.hf.cut import NumberedLayers, base_of, is_tied, norm_name
from dualpipe.hf.experts import dispatcher_of
from dualpipe.hf.layers import LayerArguments, SplitLayer, hidden_states_of
from dualpipe.hf.stand_ins import (
    CallRecorder,
    FixedLayer,
    FixedOutput,
    InputOverride,
    InputRecorder,
    LayerForm,
    OutputRecorder,
    swap_modules,
)
from dualpipe.models.stages import Recompute
from dualpipe.nn.head import HeadedStage, LinearHead
from dualpipe.nn.segments import Compute, Segment
from dualpipe.parallel.experts.dispatcher import ExpertParallel, is_interface_experts


class CausalLMStage(HeadedStage):
    """Consecutive layers of a causal LM, with the embedding if `is_first`, and the norm and the head if `is_last`.

    causal_lm: a model that `cut_model` has cut to this stage.
    form: form in which the model's layers return hidden states: alone (None), or first in a tuple.
    """

    causal_lm: Any  # the model, without the parts of other stages

    def __init__(self, causal_lm: Any, *, is_first: bool, is_last: bool, form: LayerForm | None = None) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        self.splits: dict[int, SplitLayer] = {}  # by layer number; other layers run as a whole
        self.recompute = Recompute()
        self.form = form or LayerForm()
        self._segments_version = 0  # part of `segments_key`
        self._heads: dict[nn.Module, LinearHead | None] = {}  # by the module, which can be replaced
        self.config = causal_lm.config
        self.__dict__["causal_lm"] = causal_lm  # past `nn.Module.__setattr__`, which would make it a submodule
        # The stage and the model share their tables of modules, parameters and buffers: a state dict has the whole
        # model's keys, and a module that is set on one of them, such as an adapter or a new head, is set on both.
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = causal_lm.__dict__[table]

    @property
    def is_tied(self) -> bool:
        """Return True if the model's head shares the embedding's weight, by its configuration."""
        return is_tied(self.config)

    @property
    def base_model_prefix(self) -> str:
        """Name of `base`; PEFT reads it from a model that has a configuration."""
        prefix: str = self.causal_lm.base_model_prefix
        return prefix

    @property
    def base(self) -> Any:
        """Model without its head."""
        return base_of(self.causal_lm)

    def train(self, mode: bool = True) -> CausalLMStage:
        """Set the training mode of all modules, including the model itself."""
        super().train(mode)
        self.causal_lm.train(mode)
        return self

    @property
    def layers(self) -> NumberedLayers:
        """Layers of this stage."""
        return self.base.layers

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Run the stage -> logits (B, S, V) on the last stage, hidden states (B, S, H) on other stages.

        x: tokens (B, S) on the first stage, hidden states (B, S, H) on other stages.
        position_ids: (B, S), position of every token in its document; None: every row is one document.
        """
        options = {"position_ids": position_ids, "use_cache": False}
        with swap_modules(self.base, self._input_override(x)):
            if self.is_last:
                return self._logits_or_rows(**self._inputs(x), **options)
            return self.base(**self._inputs(x), **options).last_hidden_state

    def segments(self) -> list[Segment]:
        """Return the segments of the forward; see docs/overlap.md.

        A layer that dispatches tokens to other ranks is cut at its experts if `splits` has it. Compute segments of a
        layer are marked for recomputation if `recompute` selects "layer" for its number.
        """
        segments: list[Segment] = [Compute(self.layer_arguments, ("x", "position_ids"), ("x", "arguments"))]
        for position, (number, layer) in enumerate(self.layers.numbered()):
            name = f"arguments{number}"
            segments.append(Compute(partial(_select_arguments, position), "arguments", name))
            segments += self._layer_segments(number, layer, name)
        segments.append(Compute(self.apply_head, "x", "x"))
        return segments

    def _layer_segments(self, number: int, layer: nn.Module, arguments: str) -> list[Segment]:
        """Return the segments of a layer, which read "x" and the value named `arguments`, and write "x"."""
        recompute = self.recompute("layer", number)
        split = self._split_of(number, layer)
        if split is None or dispatcher_of(split.experts).dispatch is None:
            return [Compute(partial(_call_layer, layer), ("x", arguments), "x", recompute)]
        return [
            replace(segment, recompute=recompute) if isinstance(segment, Compute) else segment
            for segment in split.hooked_segments(arguments)
        ]

    def _split_of(self, number: int, layer: nn.Module) -> SplitLayer | None:
        """Return the split of a layer; None if it runs as a whole, as it does once its experts are replaced."""
        split = self.splits.get(number)
        return split if split is not None and split.fits(layer) else None

    def segments_key(self) -> Hashable:
        """Return a key that changes when the segments change; see docs/overlap.md."""
        layers = tuple((layer, self._split_of(number, layer)) for number, layer in self.layers.numbered())
        return self._segments_version, self.recompute, layers

    def use_expert_parallelism(self, experts: ExpertParallel) -> None:
        """Dispatch tokens to experts on other ranks, in layers with as many experts as `experts` has.

        Does not shard the parameters: see `shard_experts`.
        """
        self._segments_version += 1
        modules: list[Any] = [module for module in self.modules() if is_interface_experts(module)]
        for module in modules:
            if module.num_experts == experts.num_experts:
                module.dispatcher = experts.dispatcher()

    def tied_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that another stage also has: a tied embedding or head, unless this stage has both."""
        if not self.is_tied or self.is_first is self.is_last:
            return []
        owner = self.base.embed_tokens if self.is_first else self.causal_lm.lm_head
        return [owner.weight]

    def layer_arguments(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, list[LayerArguments]]:
        """Return the first layer's hidden states (B, S, H), and every layer's arguments after the hidden states.

        Raises ValueError if the model does not call its norm exactly once.
        """
        recorders = [CallRecorder(layer, self.form) for layer in self.layers]
        norm = OutputRecorder(nn.Identity())
        with swap_modules(self.base, {"layers": nn.ModuleList(recorders), norm_name(self.base): norm}):
            hidden_states = self.base(**self._inputs(x), position_ids=position_ids, use_cache=False).last_hidden_state
        if len(norm.results) != 1:
            raise ValueError(
                f"a {type(self.causal_lm).__name__} calls its norm {len(norm.results)} times; stages need one call, "
                "after the layers: cut the model yourself, as docs/your-model.md#your-own-modules shows")
        arguments = [LayerArguments(recorder.args, recorder.kwargs) for recorder in recorders]
        return hidden_states if self.is_first else x, arguments

    def apply_head(self, x: Tensor) -> Tensor:
        """Apply the norm and the head -> logits (B, S, V); return `x` unchanged on other stages than the last."""
        if not self.is_last:
            return x
        with swap_modules(self.base, {"layers": self._fixed_layers(x)}):
            return self._logits_or_rows(inputs_embeds=x, use_cache=False)

    def linear_head(self) -> LinearHead | None:
        """Return the head, for a pipeline that runs it in parts with the loss; None if it is not a plain one.

        A plain head is a linear layer, and at most a scale and a soft cap of the model's configuration. The model's
        forward shows whether it does nothing else.
        """
        layer = getattr(self.causal_lm, "lm_head", None) if self.is_last else None
        if not isinstance(layer, nn.Linear):
            return None
        if layer not in self._heads:
            self._heads = {layer: self._find_head(layer)}
        return self._heads[layer]

    def _find_head(self, layer: nn.Linear) -> LinearHead | None:
        """Return the head whose logits the model's forward makes of the outputs of `layer`; None for another form."""
        device = layer.weight.device if layer.weight.device.type != "meta" else torch.device("cpu")
        outputs = torch.linspace(-40, 40, 81, dtype=torch.float64, device=device).expand(1, 2, 81)
        x = torch.zeros(1, 2, layer.in_features, device=device)
        recorder = FixedOutput(outputs, layer)
        norm = norm_name(self.base)
        stand_ins = {"layers": self._fixed_layers(x), norm: FixedOutput(x, getattr(self.base, norm))}
        with torch.no_grad(), swap_modules(self.base, stand_ins), swap_modules(self.causal_lm, {"lm_head": recorder}):
            logits = self.causal_lm(inputs_embeds=x, use_cache=False).logits
        head = LinearHead(layer, *_scale_and_cap(self.config))
        is_equal = recorder.num_calls == 1 and logits.shape == outputs.shape and torch.allclose(
            logits.double(), head.finish(outputs), rtol=1e-5)
        return head if is_equal else None

    def _logits_or_rows(self, **arguments: Any) -> Tensor:
        """Run the model and return its logits (B, S, V); inside of `without_head` the input of its head (B, S, H)."""
        if self._applies_head:
            return self.causal_lm(**arguments).logits
        recorder = InputRecorder(self.causal_lm.lm_head)
        with swap_modules(self.causal_lm, {"lm_head": recorder}):
            self.causal_lm(**arguments)
        (rows,) = recorder.inputs
        return rows

    def _inputs(self, x: Tensor) -> dict[str, Tensor]:
        """Return the keyword argument that passes tokens or hidden states to the model."""
        return {"input_ids" if self.is_first else "inputs_embeds": x}

    def _input_override(self, x: Tensor) -> dict[str, nn.Module]:
        """Return the stand-in that passes hidden states to the first layer of a later stage, by its path.

        The model treats the hidden states as embeddings, and may scale them before the first layer.
        """
        if self.is_first:
            return {}
        for number, layer in self.layers.numbered():
            return {f"layers.{number}": InputOverride(x, layer)}
        return {"layers": self._fixed_layers(x)}

    def _fixed_layers(self, x: Tensor) -> nn.ModuleList:
        """Return a list of one layer, which returns `x`."""
        layer = self.layers[0] if len(self.layers) else self.layers.attributes
        return nn.ModuleList([FixedLayer(x, self.form, layer)])


def _scale_and_cap(config: Any) -> tuple[float, float | None]:
    """Return the factor of the logits of a configuration, and their soft cap; None without one."""
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    return scale / divisor, getattr(config, "final_logit_softcapping", None)  # Gemma


def _select_arguments(position: int, arguments: list[LayerArguments]) -> LayerArguments:
    """Return the arguments of the layer at a position in the stage."""
    return arguments[position]


def _call_layer(layer: nn.Module, x: Tensor, arguments: LayerArguments) -> Tensor:
    """Run a whole layer, and return its hidden states."""
    return hidden_states_of(layer(x, *arguments.args, **arguments.kwargs))
