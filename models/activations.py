"""What a stage keeps of one micro-batch from its forward to its backward, in bytes: counted, not guessed.

The stage's segments are run as the pipeline runs them, on tensors without memory, and what autograd and the pipeline
then hold is counted, each storage once. Attention's scores, which the CPU keeps and the fused kernels of GPUs do not,
are taken off.

Dimension letters: T tokens, H hidden, K experts per token, R rows that a rank's experts receive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import Recompute, Stage
from dualpipe.nn import Router
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.expert import Received
from dualpipe.pipeline.overlap import MicrobatchState, SegmentedStage, walk

_PROBE = 64  # tokens of the shorter run


def activation_bytes(
    config: HubConfig, layers: range, *, batch: int, sequence_length: int, first: bool = False,
    dtype: torch.dtype = torch.bfloat16, recompute: Iterable[str] = (), ep: int = 1,
) -> int:
    """The bytes that a stage keeps of a micro-batch of (batch, sequence_length) tokens computed in `dtype`.

    Without the head: the logits live for one micro-batch at a time. recompute: the rules of `Recompute`. ep: the number
    of expert-parallel ranks, over which tokens are taken to be spread evenly.
    """
    mode = FakeTensorMode()
    with mode, torch.device("cpu"):
        stage = Stage(config, layers, first=first, last=False)
        for module in stage.modules():  # Module.to(dtype) does not work on tensors without memory
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(param.detach().to(dtype)))
    stage.recompute = Recompute(recompute, config.num_hidden_layers)
    per_token = 0.0
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
    short, long = (_kept(stage, mode, batch, length, dtype) for batch, length in ((2, _PROBE), (1, 2 * _PROBE)))
    return round((per_token + (2 * short - long) / (2 * _PROBE)) * batch * sequence_length)


def _kept(stage: Stage, mode: FakeTensorMode, batch: int, length: int, dtype: torch.dtype) -> int:
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # which keeps the storage, so that its address stays its own
        return tensor

    with mode:
        hidden = (batch, length, stage.config.hidden_size)
        tokens = torch.zeros(batch, length, dtype=torch.int64, device="cpu")
        x = tokens if stage.first else torch.empty(hidden, dtype=dtype, device="cpu", requires_grad=True)
        segmented, state = SegmentedStage(stage.segments(), ("x",), ("x",), store=WeightGradStore()), MicrobatchState()
        state.begin({"x": x, "positions": None})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            walk([segmented.forward(state)])
    if state.error is not None:
        raise state.error
    for tensor in tree_leaves([(record.leaves, record.kept, record.context) for record in state.records]):
        if isinstance(tensor, Tensor):
            keep(tensor)
    for tensor in (*stage.parameters(), *stage.buffers()):
        kept.pop(tensor.untyped_storage()._cdata, None)
    # But for who sees whom, bool (S, S), which the CPU alone needs.
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values() if tensor.dtype is not torch.bool)


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

    def advance(self) -> None:
        """All of it is there."""

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        return self._results, self._results[1:]
