"""What a micro-batch takes in a stage, in bytes: counted, not guessed.

The stage's segments are run as the pipeline runs them, forward and backward, on tensors without memory, and what lives
meanwhile is counted, each storage once. For GPUs without attention's scores, which the CPU keeps and fused kernels do
not; for the CPU with what the references of our kernels take while they run (REFERENCES). What weight gradients take
while they are computed is left out: on GPUs it does not grow with the micro-batch.

Of neighbours that are alike each one from the third on adds the same, so that of many two and three are counted.

Dimension letters: T tokens, H hidden, K experts per token, R rows that a rank's experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.flops import meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import RECOMPUTE, Recompute, Stage
from dualpipe.nn import Router, cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Compute, output_names
from dualpipe.parallel.experts.dispatcher import Received
from dualpipe.pipeline.microbatch import MicrobatchState
from dualpipe.pipeline.overlap import walk
from dualpipe.pipeline.stage_program import compile_segments
from dualpipe.pipeline.stage_runner import StageRunner

# What the references on the CPU take inside of them at half precision, in float32 copies of their largest tensor: as
# torch's allocator counts it, which a test does again. Kernels take nothing, and other references little.
REFERENCES = {
    "rms_norm": 2.0, "rms_norm_backward": 6.0, "rotate_heads": 2.5, "rotate_heads_backward": 6.5,
    "grouped_gemm_swiglu": 2.25, "swiglu_backward": 4.0, "cross_entropy": 2.0, "cross_entropy_backward": 2.0,
}
_PROBE = 8, 16  # sequences of the two runs, and tokens of each: few, so that scores do not decide where the peak is


class ActivationBytes(NamedTuple):
    """Bytes of a micro-batch in a stage: what it keeps between its forward and its backward, what an "I" leaves for its
    "W", and the most that there is at once, all of it, while a forward, a "B" and an "I" run; inside: how much of a
    forward's and of a backward's references on the CPU take, of which one runs at a time."""

    kept: int
    deferred: int
    forward: int
    backward: int
    input_backward: int
    inside_forward: int = 0
    inside_backward: int = 0


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


def activation_bytes(
    config: HubConfig, layers: range, *, batch: int, sequence_length: int, dtype: torch.dtype = torch.bfloat16,
    recompute: Iterable[str] = (), ep: int = 1, last: bool = False, cpu: bool = False,
) -> ActivationBytes:
    """What the layers take for a micro-batch of (batch, sequence_length) tokens computed in `dtype`; `last`: and the
    head and the loss, once for each layer for multi-token prediction among them and once more, with what these embed.
    Without the embedding of the first stage, which keeps the tokens alone.

    recompute: the rules of `Recompute`. ep: the number of expert-parallel ranks, over which tokens are taken to be
    spread evenly. cpu: as it is there, not on GPUs.
    """
    runs = [list(run) for _, run in groupby(kinds_of(config, layers, recompute))]
    short = [run[:2] if len(run) > 3 else run for run in runs]

    def per_token(*runs: list[LayerKind]) -> tuple[float, ...]:
        plain, fused, pairs = _per_token(config, tuple(chain.from_iterable(runs)), ep, dtype, last, cpu)
        if not cpu:
            return tuple(size + (fused if i not in (1, 5, 6) else 0) for i, size in enumerate(plain))
        return tuple(size + sequence_length * pair for size, pair in zip(plain, pairs))

    found = per_token(*short)
    for i, run in enumerate(runs):
        if more := len(run) - len(short[i]):
            longer = per_token(*short[:i], run[:3], *short[i + 1 :])
            found = tuple(one + more * (other - one) for one, other in zip(found, longer))
    return ActivationBytes(*(round(size * batch * sequence_length) for size in found))


def meta_stage(
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
            layer.mlp.dispatcher = EvenDispatcher(layer.mlp.gate, ep)
            for module in layer.mlp.experts.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(param.detach()[: len(param) // ep].clone()))
    return stage.to(dtype)


@lru_cache(maxsize=4096)
def _per_token(
    config: HubConfig, kinds: tuple[LayerKind, ...], ep: int, dtype: torch.dtype, last: bool, cpu: bool
) -> tuple[tuple[float, ...], float, tuple[float, ...]]:
    """`ActivationBytes` for each token, without attention's scores; what fused kernels keep instead of them; and the
    scores for each pair of tokens."""
    stage, fused = meta_stage(config, kinds, ep, dtype, last), 0
    for index, layer in stage.numbered():
        if "attention" not in kinds[index].again:
            # What fused kernels keep beyond the CPU's without its scores: a float32 for each head's row of them, and
            # less, since keys and values need not be repeated for the heads that share them.
            attention = layer.self_attn
            repeated = attention.num_heads - attention.num_kv_heads
            fused += 4 * attention.num_heads - repeated * (attention.qk_dim + attention.v_dim) * dtype.itemsize
    # Scores grow with the square of the length, everything else with the tokens: two runs tell them apart.
    few, many = _PROBE
    short, long = (_run(stage, *shape, dtype, cpu) for shape in ((many, few), (few, many)))
    plain = tuple((2 * one - other) / (few * many) for one, other in zip(short, long))
    return plain, fused, tuple((other - one) / (few * many * (many - few)) for one, other in zip(short, long))


def _run(stage: Stage, batch: int, length: int, dtype: torch.dtype, cpu: bool) -> ActivationBytes:
    found, segments, result, depth = {}, stage.segments(), "x", 0
    if stage.last:
        result, logits = "loss", output_names(segments)
        segments.append(Compute(summed_loss, (*logits, "labels"), result))
        depth = len(logits) - 1
    for kind in "BI":
        labels = torch.empty((batch, length), dtype=torch.int64, device="meta")
        store, live = _NoWeightGradients(), _Live([*stage.parameters(), *stage.buffers()], cpu)
        runner = StageRunner(compile_segments(segments, (result,)), store)
        state = MicrobatchState()
        with live, store.activate():
            x = torch.empty((batch, length, stage.config.hidden_size), dtype=dtype, device="meta", requires_grad=True)
            ahead = torch.empty((batch, length, depth), dtype=torch.int64, device="meta") if depth else None
            state.begin({"x": x, "positions": None, "ahead": ahead, "labels": labels}, ("x",))
            del x, ahead
            walk([runner.forward(state)])
            forward, inside, live.peak, live.outside = live.peak, live.peak - live.outside, 0, 0
            state.gradients = {result: torch.empty_like(state.carry.pop(result))}
            kept = live.bytes - state.gradients[result].untyped_storage().nbytes()
            walk([runner.backward(state, kind, kind)])
            state.gradients = {}
            found[kind] = kept, live.bytes, forward, live.peak, inside, live.peak - live.outside
    (kept, _, forward, backward, *both), (_, deferred, _, input_backward, *_) = found["B"], found["I"]
    return ActivationBytes(kept, deferred, forward, backward, input_backward, *both)


def summed_loss(*logits_and_labels: Tensor) -> Tensor:
    """That of the next token, and of those behind it."""
    *logits, labels = logits_and_labels
    return torch.stack([cross_entropy_loss(each, labels) for each in logits]).sum()


class _NoWeightGradients(WeightGradStore):
    """A store whose weight gradients are dropped where they would be computed."""

    def run(self, key: Any) -> None:
        self.take(key)


class _Live(TorchDispatchMode):
    """The bytes of all storages that are made inside and alive, and the most that there were, with and without what
    references take on the `cpu`; but for `known` tensors, and who sees whom, bool (S, S), which the CPU alone needs."""

    def __init__(self, known: Collection[Tensor], cpu: bool) -> None:
        super().__init__()
        self._cpu = cpu
        self.bytes = self.peak = self.outside = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._given = frozenset(self._known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.dtype is not torch.bool:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.bytes += size
                    self.peak, self.outside = max(self.peak, self.bytes), max(self.outside, self.bytes)
                    weakref.finalize(storage, self._freed, key, size)
        if func.namespace == "dualpipe" and self._cpu:
            largest = max((tensor.numel() for tensor in tree_leaves((args, results)) if isinstance(tensor, Tensor)
                           and tensor.untyped_storage()._cdata not in self._given), default=0)
            copied = REFERENCES.get(func._opname, 0.0) * largest
            if func._opname == "combine_tokens":  # rows twice, and once with places of choices that are elsewhere
                y, _, inverse, *_ = args
                copied = 2 * y.numel() + inverse.numel() * y.shape[1]
            self.peak = max(self.peak, self.bytes + round(4 * copied))
        return results

    def _freed(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.bytes -= size


class EvenDispatcher:
    """The dispatcher of a rank among `ep`, when tokens choose experts at random and all ranks get the same number."""

    def __init__(self, gate: Router, ep: int) -> None:
        self._experts = gate.out_features // ep
        self._copies = ep * (1 - (1 - 1 / ep) ** gate.top_k)  # distinct ranks that a token's experts are on
        self.dispatch = self.combine = _Arriving()

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows = round(len(x_TH) * self._copies)
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
