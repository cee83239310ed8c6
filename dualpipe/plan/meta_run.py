"""Layers on the meta device, run as the pipeline runs a stage, to count their memory and operators.

A model has a few kinds of layers; one layer of each kind is run. Experts on other ranks are pretended, see
`dualpipe.plan.meta_dispatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import RECOMPUTE, Recompute, Stage
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.head import HeadRows
from dualpipe.nn.segments import Segment
from dualpipe.pipeline.compiled_stage import compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import Task
from dualpipe.pipeline.stage_runner import StageRunner
from dualpipe.plan.meta_dispatch import MetaDispatcher
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig

MICROBATCH = 0  # key of the micro-batch's weight gradients in the store


class MetaRun:
    """Forward and backward of one micro-batch through the segments of a stage, as tasks for `walk`.

    Args:
        segments: segments of the stage.
        result: name of the last segment's output.
        store: weight gradient store, to be activated around the calls.
    """

    def __init__(self, segments: Sequence[Segment], result: str, store: WeightGradStore) -> None:
        self.store = store
        self._result = result
        self._runner = StageRunner(compile_segments(segments, (result,)), store)
        self._state = MicrobatchState()

    def begin(self, carry: dict[str, Any], inputs: tuple[str, ...]) -> None:
        """Start a micro-batch with the values `carry`, of which `inputs` come from the previous stage."""
        self._state.begin(carry, inputs)

    def forward(self) -> Task:
        """Return the forward as a task."""
        return self._runner.forward(self._state)

    def begin_backward(self) -> int:
        """Replace the result by a gradient of the same size, and return its bytes; 0 if the result needs none."""
        result = self._state.carry.pop(self._result)
        if not result.requires_grad:
            self._state.gradients = {}
            return 0
        gradient = torch.empty_like(result)
        self._state.gradients = {self._result: gradient}
        return gradient.untyped_storage().nbytes()

    def backward(self, kind: str) -> Task:
        """Return a backward as a task: full ("B"), or for the input gradient only ("I")."""
        return self._runner.backward(self._state, kind, MICROBATCH)

    def drop_gradients(self) -> None:
        """Release the input gradients, as the pipeline does after sending them."""
        self._state.gradients = {}


def meta_hidden(
    hidden_size: int, batch: int, length: int, dtype: torch.dtype, *, requires_grad: bool = True
) -> Tensor:
    """Return hidden states of shape (batch, length, hidden_size) on the meta device."""
    return torch.empty((batch, length, hidden_size), dtype=dtype, device="meta", requires_grad=requires_grad)


class LayerKind(NamedTuple):
    """Kind of layers with equal costs.

    first: index of its first layer in the model. recomputed: parts that are recomputed. is_start: True if the input
    needs no gradient, because nothing before it is trained.
    """

    first: int
    recomputed: tuple[str, ...]
    is_start: bool = False


def kinds_of(
    config: HubConfig, layers: Iterable[int], recompute: Iterable[str] = (), *, by_window: bool = False,
    lora: LoRAConfig = NO_ADAPTERS, cp: int = 1,
) -> list[LayerKind]:
    """Return the kind of each of the layers.

    recompute: rules of `Recompute`. by_window: True if layers that differ in their window alone are of different kinds,
    as they are where ranks share sequences. lora: adapters of the model. cp: ranks that share a sequence.
    """
    rules = Recompute(recompute, len(config.all_layers))
    firsts = _first_equal_layers(config, by_window, lora)
    start = start_layers(config, rules, lora, cp)
    return [LayerKind(firsts[i], tuple(part for part in RECOMPUTE if rules(part, i)), i in start) for i in layers]


def start_layers(model: TrainedModel, rules: Recompute, lora: LoRAConfig, cp: int = 1) -> range:
    """Return the layers whose input needs no gradient, because nothing before it is trained.

    What follows a recomputed part needs one: before its second forward, nobody knows whether it depends on a trained
    parameter. So it is with attention over ranks that share a sequence; by all-to-all it need not be, and counts alike.
    """
    last = _first_trained_layer(model, lora)
    last = next((i for i in range(last) if cp > 1 or any(rules(part, i) for part in RECOMPUTE)), last)
    return range(last + 1)


@lru_cache(maxsize=64)
def _first_trained_layer(model: TrainedModel, lora: LoRAConfig) -> int:
    """Return the number of the first layer with adapters, or of the last layer; -1 if the embedding is trained too."""
    if not lora.is_enabled:
        return -1
    (whole,) = stages_on_meta(model, lora=lora)
    layers = list(cast(nn.Module, whole.layers).children())
    trained = (i for i, layer in enumerate(layers) if any(param.requires_grad for param in layer.parameters()))
    return next(trained, len(layers) - 1)


@lru_cache(maxsize=64)
def _first_equal_layers(config: HubConfig, by_window: bool, lora: LoRAConfig) -> list[int]:
    """Return for each layer the index of the first one with the same modules, and with `by_window` the same window."""
    firsts: dict[tuple[str, int | None], int] = {}
    equal_layers = []
    for index, layer in _whole_model(config, lora).numbered():
        key = str(layer), layer.self_attn.window if by_window else None
        equal_layers.append(firsts.setdefault(key, index))
    return equal_layers


def _whole_model(config: HubConfig, lora: LoRAConfig) -> Stage:
    """Return the whole model on the meta device, the same object for all callers."""
    (whole,) = stages_on_meta(config, lora=lora)
    return cast(Stage, whole)


def stage_of_kinds(
    config: HubConfig, kinds: Iterable[LayerKind], ep: int, dtype: torch.dtype, last: bool = False, nodes: int = 1,
    lora: LoRAConfig = NO_ADAPTERS,
) -> Stage:
    """Build a stage on the meta device, with one layer per kind.

    The rank is one of `ep` expert-parallel ranks with the same number of tokens, and holds 1/ep of the experts. nodes:
    number of nodes that these are on, if rows are dispatched in two hops. lora: adapters of the model.
    """
    whole = _whole_model(config, lora)
    with torch.device("meta"):
        stage = Stage(replace(config, tie_word_embeddings=False), range(0), first=False, last=last)
    stage.layers = nn.ModuleDict({str(i): deepcopy(whole.layers[str(kind.first)]) for i, kind in enumerate(kinds)})
    if last:
        stage.norm = deepcopy(whole.norm)
        stage.lm_head = deepcopy(whole.lm_head)
    recomputed = [kind.recomputed for kind in kinds]
    stage.recompute = lambda part, layer: part in recomputed[layer]  # type: ignore[assignment]
    for _, layer in stage.numbered():
        if isinstance(layer.mlp, SparseMLP) and ep > 1:
            gate = layer.mlp.gate
            layer.mlp.dispatcher = MetaDispatcher(
                gate.out_features, ep, nodes=nodes, n_group=gate.n_group, topk_group=gate.topk_group)
            for module in layer.mlp.experts.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    local = param.detach()[: len(param) // ep].clone()
                    setattr(module, name, nn.Parameter(local, param.requires_grad))
    return stage.to(dtype)


def summed_loss(*logits_and_labels: Tensor | HeadRows) -> Tensor:
    """Return the sum of the losses of the next token and of the tokens that multi-token prediction predicts.

    Args:
        logits_and_labels: logits of each prediction, or the rows of their head, then the labels.
    """
    *all_logits, labels = logits_and_labels
    assert isinstance(labels, Tensor), "the last argument is the labels"
    return torch.stack([cross_entropy_loss(logits, labels) for logits in all_logits]).sum()
