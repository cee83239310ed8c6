"""Layers without memory, run as the pipeline runs a stage's, for those that count what they take and what they do.

A model's layers are of a few kinds, and one of each is run. Dispatch to experts on other ranks is stood in for: tokens
choose experts at random, and all ranks have as many.

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

MICROBATCH = 0  # the key of its weight gradients in the store


class MetaRun:
    """A forward and a backward of a micro-batch through the segments of a stage; tasks, for `walk` or a like.

    result: the name of what the segments end with. store: activate it around the calls.
    """

    def __init__(self, segments: Sequence[Segment], result: str, store: WeightGradStore) -> None:
        self.store = store
        self._result = result
        self._runner = StageRunner(compile_segments(segments, (result,)), store)
        self._state = MicrobatchState()

    def begin(self, carry: dict[str, Any], inputs: tuple[str, ...]) -> None:
        """Start with the values `carry`, of which `inputs` came from the stage before."""
        self._state.begin(carry, inputs)

    def forward(self) -> Task:
        """Return the forward, to be walked."""
        return self._runner.forward(self._state)

    def begin_backward(self) -> int:
        """Replace the result by its gradient, of as many bytes; return these."""
        gradient = torch.empty_like(self._state.carry.pop(self._result))
        self._state.gradients = {self._result: gradient}
        return gradient.untyped_storage().nbytes()

    def backward(self, kind: Literal["B", "I"]) -> Task:
        """Return a backward, whole or of the inputs alone, to be walked."""
        return self._runner.backward(self._state, kind, MICROBATCH)

    def drop_gradients(self) -> None:
        """Let go of the inputs' gradients, as when they have been sent."""
        self._state.gradients = {}


def meta_hidden(hidden_size: int, batch: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return hidden values without memory, which need a gradient."""
    return torch.empty((batch, length, hidden_size), dtype=dtype, device="meta", requires_grad=True)


class LayerKind(NamedTuple):
    """What layers that take the same have in common: the number of the first such layer in the model, and which parts
    are computed again."""

    first: int
    again: tuple[str, ...]


def kinds_of(config: HubConfig, layers: Iterable[int], recompute: Iterable[str] = ()) -> list[LayerKind]:
    """The kinds of some layers, in their order. recompute: the rules of `Recompute`."""
    rules = Recompute(recompute, len(config.all_layers))
    firsts = _first_alike(config)
    return [LayerKind(firsts[i], tuple(part for part in RECOMPUTE if rules(part, i))) for i in layers]


@lru_cache(maxsize=64)
def _first_alike(config: HubConfig) -> list[int]:
    firsts: dict[str, int] = {}
    return [firsts.setdefault(str(meta_layer(config, i)), i) for i in config.all_layers]


def stage_of_kinds(
    config: HubConfig, kinds: Iterable[LayerKind], ep: int, dtype: torch.dtype, last: bool = False
) -> Stage:
    """A stage of such layers without memory, on a rank of `ep` that get the same number of tokens, which has its part
    of the experts."""
    with torch.device("meta"):
        stage = Stage(replace(config, tie_word_embeddings=False), range(0), first=False, last=last)
        stage.layers = nn.ModuleDict({str(i): config.layer(kind.first) for i, kind in enumerate(kinds)})
    again = [kind.again for kind in kinds]
    stage.recompute = lambda part, layer: part in again[layer]  # type: ignore[assignment]
    for _, layer in stage.numbered():
        if isinstance(layer.mlp, SparseMLP) and ep > 1:
            layer.mlp.dispatcher = EvenDispatcher(layer.mlp.gate.out_features, ep)
            for module in layer.mlp.experts.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(param.detach()[: len(param) // ep].clone()))
    return stage.to(dtype)


def summed_loss(*logits_and_labels: Tensor) -> Tensor:
    """That of the next token, and of those behind it."""
    *logits, labels = logits_and_labels
    return torch.stack([cross_entropy_loss(each, labels) for each in logits]).sum()


class EvenDispatcher:
    """The dispatcher of a rank among `ep`, when tokens choose experts at random and all ranks get the same number."""

    def __init__(self, num_experts: int, ep: int) -> None:
        self._experts = num_experts // ep
        self._ranks = ep
        self.dispatch = self.combine = _Arriving()

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        top_k = experts_TK.shape[1]
        copies = self._ranks * (1 - (1 - 1 / self._ranks) ** top_k)  # distinct ranks that a token's experts are on
        rows = round(len(x_TH) * copies)
        token_R = torch.zeros(rows, dtype=torch.int64, device=x_TH.device)
        received = Received(experts_TK.index_select(0, token_R).int(), self._experts, experts_TK.numel(), None)
        return x_TH.index_select(0, token_R), weights_TK.index_select(0, token_R), received

    def finish(self, rows: Tensor, plan: Received) -> Tensor:
        tokens = plan.pairs // plan.ids.shape[1]
        token_R = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, token_R, rows)


class _Arriving:
    """A communication whose rows arrive at once, in a memory of their own, and what is pending of it: nothing.

    Weights and choices are kept also where the rows are not, to be there when these are sent again.
    """

    group = None

    def __init__(self, results: tuple[Any, ...] = ()) -> None:
        self._results = results

    def forward(self, inputs: tuple[Any, ...]) -> _Arriving:
        return _Arriving(tree_map_only(Tensor, torch.clone, inputs[: 3 if len(inputs) > 2 else 1]))

    def again(self, context: Any, inputs: tuple[Any, ...]) -> _Arriving:
        return self.forward(inputs)

    def backward(self, context: Any, gradients: tuple[Tensor | None, ...]) -> _Arriving:
        """What is sent beside tensors has no gradient."""
        return _Arriving((*tree_map_only(Tensor, torch.clone, gradients[:2]), None))

    def advance(self) -> None:
        """All of it is there."""

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        return self._results, self._results[1:]
