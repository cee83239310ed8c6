"""What a micro-batch takes in a stage, in bytes: counted, not guessed.

The stage's segments are run as the pipeline runs them, forward and backward, on tensors without memory, and what lives
meanwhile is counted, each storage once. Attention's scores, which the CPU keeps and the fused kernels of GPUs do not,
are taken off. So is what weight gradients take while they are computed: it does not grow with the micro-batch.

Dimension letters: T tokens, H hidden, K experts per token, R rows that a rank's experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import Recompute, Stage
from dualpipe.nn import Router
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.expert import Received
from dualpipe.pipeline.overlap import MicrobatchState, SegmentedStage, walk

_PROBE = 8, 16  # sequences of the two runs, and tokens of each: few, so that scores do not decide where the peak is


class ActivationBytes(NamedTuple):
    """Bytes of a micro-batch in a stage: what it keeps between its forward and its backward, what an "I" leaves for its
    "W", and the most that there is at once, all of it, while a forward, a "B" and an "I" run."""

    kept: int
    deferred: int
    forward: int
    backward: int
    input_backward: int


def activation_bytes(
    config: HubConfig, layers: range, *, batch: int, sequence_length: int, dtype: torch.dtype = torch.bfloat16,
    recompute: Iterable[str] = (), ep: int = 1,
) -> ActivationBytes:
    """What the layers take for a micro-batch of (batch, sequence_length) tokens computed in `dtype`.

    Without the embedding, which keeps the tokens alone, and the head: the logits live for one micro-batch at a time.
    recompute: the rules of `Recompute`. ep: the number of expert-parallel ranks, over which tokens are taken to be
    spread evenly.
    """
    mode = FakeTensorMode()
    with mode, torch.device("cpu"):
        stage = Stage(config, layers, first=False, last=False)
        for module in stage.modules():  # Module.to(dtype) does not work on tensors without memory
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(param.detach().to(dtype)))
    stage.recompute = Recompute(recompute, config.num_hidden_layers)
    per_token = 0
    for index, layer in stage.numbered():
        if isinstance(layer.mlp, SparseMLP) and ep > 1:
            layer.mlp.dispatcher = _Even(layer.mlp.gate, ep)
        if not stage.recompute("attention", index):
            # What fused kernels keep beyond the CPU's without its scores: a float32 for each head's row of them, and
            # less, since keys and values need not be repeated for the heads that share them.
            attention = layer.self_attn
            repeated = attention.num_heads - attention.num_kv_heads
            per_token += 4 * attention.num_heads - repeated * (attention.qk_dim + attention.v_dim) * dtype.itemsize
    # Scores grow with the square of the length, everything else with the tokens: two runs tell them apart.
    few, many = _PROBE
    short, long = (_run(stage, mode, *shape, dtype) for shape in ((many, few), (few, many)))
    tokens = batch * sequence_length
    found = [round((2 * one - other) / (few * many) * tokens) for one, other in zip(short, long)]
    return ActivationBytes(*(size + (per_token * tokens if i != 1 else 0) for i, size in enumerate(found)))


def _run(stage: Stage, mode: FakeTensorMode, batch: int, length: int, dtype: torch.dtype) -> ActivationBytes:
    found = {}
    for kind in "BI":
        store, live = _NoWeightGradients(), _Live([*stage.parameters(), *stage.buffers()])
        segmented, state = SegmentedStage(stage.segments(), ("x",), ("x",), store=store), MicrobatchState()
        with mode, live, store.activate():
            x = torch.empty((batch, length, stage.config.hidden_size), dtype=dtype, device="cpu", requires_grad=True)
            state.begin({"x": x, "positions": None}, ("x",))
            del x
            walk([segmented.forward(state)])
            forward, live.peak = live.peak, 0
            state.gradients = {"x": torch.empty_like(state.carry.pop("x"))}
            kept = live.bytes - state.gradients["x"].untyped_storage().nbytes()
            walk([segmented.backward(state, kind, kind)])
            if state.error is not None:
                raise state.error
            state.gradients = {}
            found[kind] = kept, live.bytes, forward, live.peak
    (kept, _, forward, backward), (_, deferred, _, input_backward) = found["B"], found["I"]
    return ActivationBytes(kept, deferred, forward, backward, input_backward)


class _NoWeightGradients(WeightGradStore):
    """A store whose weight gradients are dropped where they would be computed."""

    def run(self, key: Any) -> None:
        self.take(key)


class _Live(TorchDispatchMode):
    """The bytes of all storages that are made inside and alive, and the most that there were; without `known` tensors,
    and without who sees whom, bool (S, S), which the CPU alone needs."""

    def __init__(self, known: Collection[Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.dtype is not torch.bool:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.bytes += size
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._freed, key, size)
        return results

    def _freed(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.bytes -= size


class _Even:
    """The dispatcher of a rank among `ep`, when tokens choose experts at random and all ranks get the same number."""

    def __init__(self, gate: Router, ep: int) -> None:
        self._experts = gate.out_features
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
