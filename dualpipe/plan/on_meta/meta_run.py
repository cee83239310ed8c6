"""Layers on the meta device, run as the pipeline runs a stage, to count their memory and operators.

A model has a few kinds of layers; one layer of each kind is run. A stand-in replaces the dispatch to experts on other
ranks: tokens choose experts at random, and all ranks have the same number of tokens.

Dimension letters: T tokens, H hidden, K experts per token, R rows that a rank's experts receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.flops import meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import RECOMPUTE, Recompute, Stage
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Segment
from dualpipe.parallel.experts.dispatcher import Received
from dualpipe.pipeline.microbatch import MicrobatchState
from dualpipe.pipeline.overlap import Task
from dualpipe.pipeline.stage_program import compile_segments
from dualpipe.pipeline.stage_runner import StageRunner

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
        """Replace the result by a gradient of the same size, and return its bytes."""
        gradient = torch.empty_like(self._state.carry.pop(self._result))
        self._state.gradients = {self._result: gradient}
        return gradient.untyped_storage().nbytes()

    def backward(self, kind: Literal["B", "I"]) -> Task:
        """Return a backward as a task: full ("B"), or for the input gradient only ("I")."""
        return self._runner.backward(self._state, kind, MICROBATCH)

    def drop_gradients(self) -> None:
        """Release the input gradients, as the pipeline does after sending them."""
        self._state.gradients = {}


def meta_hidden(hidden_size: int, batch: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return hidden states of shape (batch, length, hidden_size) on the meta device, which require a gradient."""
    return torch.empty((batch, length, hidden_size), dtype=dtype, device="meta", requires_grad=True)


class LayerKind(NamedTuple):
    """Kind of layers with equal costs: the index of its first layer in the model, and the parts that are recomputed."""

    first: int
    recomputed: tuple[str, ...]

    @property
    def again(self) -> tuple[str, ...]:
        """Earlier name of `recomputed`."""
        return self.recomputed


def kinds_of(config: HubConfig, layers: Iterable[int], recompute: Iterable[str] = ()) -> list[LayerKind]:
    """Return the kind of each of the layers. recompute: rules of `Recompute`."""
    rules = Recompute(recompute, len(config.all_layers))
    firsts = _first_equal_layers(config)
    return [LayerKind(firsts[i], tuple(part for part in RECOMPUTE if rules(part, i))) for i in layers]


@lru_cache(maxsize=64)
def _first_equal_layers(config: HubConfig) -> list[int]:
    """Return for each layer the index of the first layer with the same modules."""
    firsts: dict[str, int] = {}
    return [firsts.setdefault(str(meta_layer(config, i)), i) for i in config.all_layers]


def stage_of_kinds(
    config: HubConfig, kinds: Iterable[LayerKind], ep: int, dtype: torch.dtype, last: bool = False
) -> Stage:
    """Build a stage on the meta device, with one layer per kind.

    The rank is one of `ep` expert-parallel ranks with the same number of tokens, and holds 1/ep of the experts.
    """
    with torch.device("meta"):
        stage = Stage(replace(config, tie_word_embeddings=False), range(0), first=False, last=last)
        stage.layers = nn.ModuleDict({str(i): config.layer(kind.first) for i, kind in enumerate(kinds)})
    recomputed = [kind.recomputed for kind in kinds]
    stage.recompute = lambda part, layer: part in recomputed[layer]  # type: ignore[assignment]
    for _, layer in stage.numbered():
        if isinstance(layer.mlp, SparseMLP) and ep > 1:
            layer.mlp.dispatcher = EvenDispatcher(layer.mlp.gate.out_features, ep)
            for module in layer.mlp.experts.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(param.detach()[: len(param) // ep].clone()))
    return stage.to(dtype)


def summed_loss(*logits_and_labels: Tensor) -> Tensor:
    """Return the sum of the losses of the next token and of the tokens that multi-token prediction predicts.

    Args:
        logits_and_labels: logits of each prediction, then the labels.
    """
    *all_logits, labels = logits_and_labels
    return torch.stack([cross_entropy_loss(logits, labels) for logits in all_logits]).sum()


def expected_places(places: float, top_k: int) -> float:
    """Return the expected number of places, ranks or nodes, that hold the `top_k` experts of a token."""
    return places * (1 - (1 - 1 / places) ** top_k)


class EvenDispatcher:
    """Dispatcher of one of `ep` ranks for tokens that choose experts at random; all ranks get the same number."""

    def __init__(self, num_experts: int, ep: int) -> None:
        self._experts_per_rank = num_experts // ep
        self._ranks = ep
        self.dispatch = _InstantTransfer()
        self.combine = self.dispatch

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the rows, weights and plan of the tokens that this rank sends.

        Args:
            x_TH: hidden states.
            weights_TK: weights of the chosen experts.
            experts_TK: indices of the chosen experts.
        """
        top_k = experts_TK.shape[1]
        rows = round(len(x_TH) * expected_places(self._ranks, top_k))
        token_R = torch.zeros(rows, dtype=torch.int64, device=x_TH.device)
        received = Received(experts_TK.index_select(0, token_R).int(), self._experts_per_rank, experts_TK.numel(), None)
        return x_TH.index_select(0, token_R), weights_TK.index_select(0, token_R), received

    def finish(self, rows: Tensor, plan: Received) -> Tensor:
        """Return the hidden states (T, H): the sum of the combined rows (R, H) of each token."""
        tokens = plan.pairs // plan.ids.shape[1]
        token_R = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, token_R, rows)


class _InstantTransfer:
    """Communication that completes at once: received tensors are copies of the sent ones.

    An instance with results is also the pending communication that returns them. The context that a dispatch saves for
    its backward holds the received weights and choices, as in the real dispatcher. A recompute transfers all three
    again, whereas that of the real dispatcher sends only the rows.
    """

    group = None

    def __init__(self, results: tuple[Any, ...] = ()) -> None:
        self._results = results

    def forward(self, inputs: tuple[Any, ...]) -> _InstantTransfer:
        """Transfer the first three inputs, or the only one of a combine."""
        num_sent = 3 if len(inputs) > 2 else 1
        return _InstantTransfer(tree_map_only(Tensor, torch.clone, inputs[:num_sent]))

    def recompute(self, context: Any, inputs: tuple[Any, ...]) -> _InstantTransfer:
        """Repeat a forward for a recompute."""
        return self.forward(inputs)

    def backward(self, context: Any, gradients: tuple[Tensor | None, ...]) -> _InstantTransfer:
        """Transfer the gradients of rows and weights. Inputs that are not tensors have no gradient."""
        return _InstantTransfer((*tree_map_only(Tensor, torch.clone, gradients[:2]), None))

    def advance(self) -> None:
        """Do nothing: the transfer is complete."""

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return the received values, and the context of the backward."""
        return self._results, self._results[1:]
