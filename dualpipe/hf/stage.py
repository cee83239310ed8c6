"""A stage of a pipeline: some layers of a causal language model of transformers, run by the model's own forward.

The model keeps its classes, its names and its state-dict keys; the parts of other stages are removed. Masks and
rotary tables are made on every stage, by the model itself, from the shape of the hidden states and `position_ids`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dualpipe.hf.cut import NumberedLayers, base_of, is_tied, norm_name
from dualpipe.hf.experts import dispatcher_of
from dualpipe.hf.layers import LayerArguments, SplitLayer, hidden_states_of
from dualpipe.hf.stand_ins import CallRecorder, FixedLayer, InputOverride, LayerForm, OutputRecorder, standing_in
from dualpipe.models.stages import Recompute
from dualpipe.nn.segments import Compute, Segment
from dualpipe.parallel.experts.dispatcher import ExpertParallel, is_interface_experts


class CausalLMStage(nn.Module):
    """Consecutive layers of a causal LM; the embedding where `is_first`, the norm and the head where `is_last`.

    causal_lm: a model that `cut_model` has cut to these. form: of the layers' results.
    """

    causal_lm: Any  # the model, without the parts of other stages

    def __init__(self, causal_lm: Any, *, is_first: bool, is_last: bool, form: LayerForm | None = None) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        self.splits: dict[int, SplitLayer] = {}  # by the number of the layer: those that run in parts
        self.recompute = Recompute()
        self.form = form or LayerForm()
        self._num_changes = 0
        self.config = causal_lm.config
        self.is_tied = is_tied(causal_lm.config)
        # The model's modules are this module's, under the same names, so that a state dict has the whole model's keys.
        for name, child in causal_lm.named_children():
            self.add_module(name, child)
        self.__dict__["causal_lm"] = causal_lm  # past `nn.Module.__setattr__`, which would make it a submodule

    @property
    def base(self) -> Any:
        """The model without its head."""
        return base_of(self.causal_lm)

    def train(self, mode: bool = True) -> CausalLMStage:
        """Set the mode of all modules, the model itself among them."""
        super().train(mode)
        self.causal_lm.train(mode)
        return self

    @property
    def layers(self) -> NumberedLayers:
        """The layers of this stage."""
        return self.base.layers

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V) on the last stage, hidden states (B, S, H) on others.

        x: tokens (B, S) on the first stage, hidden states (B, S, H) on others.
        position_ids: (B, S), of each token in its document, where a row holds several.
        """
        options = {"position_ids": position_ids, "use_cache": False}
        with standing_in(self.base, self._entry(x)):
            if self.is_last:
                return self.causal_lm(**self._inputs(x), **options).logits
            return self.base(**self._inputs(x), **options).last_hidden_state

    def segments(self) -> list[Segment]:
        """Return the forward in parts, for layers that send tokens to experts on other ranks, and for those that are
        computed again before their backward, as `recompute` says of "layer"; see docs/overlap.md."""
        parts: list[Segment] = [Compute(self.layer_arguments, ("x", "position_ids"), ("x", "arguments"))]
        for place, (number, layer) in enumerate(self.layers.numbered()):
            name = f"arguments{number}"
            parts.append(Compute(partial(_take, place), "arguments", name))
            split = self.splits.get(number)
            again = self.recompute("layer", number)
            if split is None or dispatcher_of(split.experts).dispatch is None:
                parts.append(Compute(partial(_call_layer, layer), ("x", name), "x", again))
            else:
                parts += [replace(part, recompute=again) if isinstance(part, Compute) else part
                          for part in split.hooked_segments(name)]
        parts.append(Compute(self._end, "x", "x"))
        return parts

    def segments_key(self) -> Hashable:
        """Return a key that changes with the segments: see docs/overlap.md."""
        return self._num_changes, self.recompute

    def use_expert_parallelism(self, experts: Mapping[int, ExpertParallel]) -> None:
        """Send tokens to experts on other ranks, by `experts` for the number of experts of a layer.

        `shard_experts` shards their parameters.
        """
        self._num_changes += 1
        modules: list[Any] = [module for module in self.modules() if is_interface_experts(module)]
        for module in modules:
            module.dispatcher = experts[module.num_experts].dispatcher()

    def tied_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the other end of the pipeline has, too: a tied embedding or head."""
        if not self.is_tied or self.is_first is self.is_last:
            return []
        owner = self.base.embed_tokens if self.is_first else self.causal_lm.lm_head
        return [owner.weight]

    def layer_arguments(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, list[LayerArguments]]:
        """Return the first layer's hidden states (B, S, H), and each layer's arguments behind the hidden states."""
        recorders = [CallRecorder(layer, self.form) for layer in self.layers]
        norm = OutputRecorder(nn.Identity())
        with standing_in(self.base, {"layers": nn.ModuleList(recorders), norm_name(self.base): norm}):
            hidden_states = self.base(**self._inputs(x), position_ids=position_ids, use_cache=False).last_hidden_state
        if len(norm.results) != 1:
            raise ValueError(
                f"a {type(self.causal_lm).__name__} calls its norm {len(norm.results)} times; stages need it once, "
                "behind the layers: cut the model yourself, as docs/your-loop.md shows")
        arguments = [LayerArguments(recorder.args, recorder.kwargs) for recorder in recorders]
        return hidden_states if self.is_first else x, arguments

    def _end(self, x: Tensor) -> Tensor:
        """Run the norm and the head, where the stage has them."""
        if not self.is_last:
            return x
        with standing_in(self.base, {"layers": self._fixed_layers(x)}):
            return self.causal_lm(inputs_embeds=x, use_cache=False).logits

    def _inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"input_ids" if self.is_first else "inputs_embeds": x}

    def _entry(self, x: Tensor) -> dict[str, nn.Module]:
        """Return the stand-in that gives the first layer of a later stage its hidden states.

        The model takes them for embeddings, which it may multiply by a factor on the way to the first layer.
        """
        if self.is_first:
            return {}
        for number, layer in self.layers.numbered():
            return {f"layers.{number}": InputOverride(x, layer)}
        return {"layers": self._fixed_layers(x)}

    def _fixed_layers(self, x: Tensor) -> nn.ModuleList:
        """Return one layer that returns `x`."""
        layer = self.layers[0] if len(self.layers) else self.layers.attributes
        return nn.ModuleList([FixedLayer(x, self.form, layer)])


def _take(place: int, arguments: list[LayerArguments]) -> LayerArguments:
    return arguments[place]


def _call_layer(layer: nn.Module, x: Tensor, arguments: LayerArguments) -> Tensor:
    return hidden_states_of(layer(x, *arguments.args, **arguments.kwargs))
