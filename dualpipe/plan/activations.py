"""What a micro-batch takes in a stage, in bytes: counted, not guessed.

The stage's segments are run as the pipeline runs them, forward and backward, on tensors without memory, and what lives
meanwhile is counted, each storage once. For GPUs without attention's scores, which the CPU keeps and fused kernels do
not; for the CPU with what the references of our kernels take while they run (REFERENCES). What deferred weight
gradients take while they are computed is left out: on GPUs it does not grow with the micro-batch.

Of neighbours that are alike each one from the third on adds the same, so that of many two and three are counted.

Dimension letters: T tokens, H hidden, K experts per token, R rows that a rank's experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Compute, output_names
from dualpipe.pipeline.overlap import walk
from dualpipe.plan.on_meta.counted_models import CountedModel, CountedStage, Workload, counted_model
from dualpipe.plan.on_meta.meta_run import LayerKind, MetaRun, meta_hidden, summed_loss
from dualpipe.train.config.model_config import TrainedModel

# What the references on the CPU take inside of them at half precision, in float32 copies of their largest tensor: as
# torch's allocator counts it, which a test does again. Kernels take nothing, and other references little.
REFERENCES = {
    "rms_norm": 2.0, "rms_norm_backward": 6.0, "rotate_heads": 2.5, "rotate_heads_backward": 6.5,
    "grouped_gemm_swiglu": 2.25, "swiglu_backward": 4.0, "cross_entropy": 2.0, "cross_entropy_backward": 2.0,
}


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


def activation_bytes(
    model: TrainedModel, layers: range, *, batch: int, sequence_length: int, dtype: torch.dtype = torch.bfloat16,
    recompute: Iterable[str] = (), ep: int = 1, last: bool = False, cpu: bool = False, has_documents: bool = False,
) -> ActivationBytes:
    """What the layers take for a micro-batch of (batch, sequence_length) tokens computed in `dtype`; `last`: and the
    head and the loss, once for each layer for multi-token prediction among them and once more, with what these embed.
    Without the embedding of the first stage, which keeps the tokens alone.

    recompute: the rules of `Recompute`. ep: the number of expert-parallel ranks, over which tokens are taken to be
    spread evenly. cpu: as it is there, not on GPUs. has_documents: rows hold several, which the masks of a model of
    transformers keep apart; this library's need no masks.
    """
    counted = counted_model(model)
    probe = counted.probe(Workload(batch * sequence_length, (sequence_length,), dtype, ep, cpu, has_documents))
    runs = [list(run) for _, run in groupby(counted.kinds(layers, recompute))]
    short = [run[:2] if len(run) > 3 else run for run in runs]

    def per_token(*runs: list[LayerKind]) -> tuple[float, ...]:
        plain, fused, pairs = _per_token(counted, tuple(chain.from_iterable(runs)), probe, last)
        if fused is not None:
            return tuple(size + (fused if i not in (1, 5, 6) else 0) for i, size in enumerate(plain))
        return tuple(size + sequence_length * pair for size, pair in zip(plain, pairs))

    shortened = per_token(*short)
    total = shortened
    for i, run in enumerate(runs):
        num_left_out = len(run) - len(short[i])
        if num_left_out:
            longer = per_token(*short[:i], run[:3], *short[i + 1 :])
            total = tuple(size + num_left_out * (more - base) for size, more, base in zip(total, longer, shortened))
    return ActivationBytes(*(round(size * batch * sequence_length) for size in total))


@lru_cache(maxsize=4096)
def _per_token(
    model: CountedModel, kinds: tuple[LayerKind, ...], probe: Workload, last: bool
) -> tuple[tuple[float, ...], float | None, tuple[float, ...]]:
    """`ActivationBytes` for each token, without attention's scores; what fused kernels keep instead of them, None where
    nothing is instead of them; and the scores for each pair of tokens."""
    stage = model.stage(kinds, probe, last)
    sizes = [_activation_bytes(stage, probe, length) for length in probe.lengths]
    if len(sizes) == 1:
        return tuple(size / probe.tokens for size in sizes[0]), stage.fused, (0.0,) * len(sizes[0])
    # Scores grow with the square of the length, everything else with the tokens: two runs tell them apart.
    few, many = probe.lengths
    slopes = [(other - one) / (many - few) for one, other in zip(*sizes)]
    plain = tuple((one - few * slope) / probe.tokens for one, slope in zip(sizes[0], slopes))
    return plain, stage.fused, tuple(slope / probe.tokens for slope in slopes)


def _activation_bytes(stage: CountedStage, probe: Workload, length: int) -> ActivationBytes:
    whole = _counted(stage, "B", probe, length)
    split = _counted(stage, "I", probe, length)
    return ActivationBytes(
        kept=whole.kept, deferred=split.left, forward=whole.forward, backward=whole.backward,
        input_backward=split.backward, inside_forward=whole.inside_forward, inside_backward=whole.inside_backward,
    )


class _Counted(NamedTuple):
    """Bytes of a forward and one kind of backward: at most while each runs, of that inside of references, what there is
    between them, and what is left in the end."""

    forward: int
    inside_forward: int
    kept: int
    backward: int
    inside_backward: int
    left: int


def _counted(stage: CountedStage, kind: Literal["B", "I"], probe: Workload, length: int) -> _Counted:
    segments = stage.segments()
    result = "x"
    if stage.is_last:
        logits = output_names(segments)
        result = "loss"
        segments.append(Compute(summed_loss, (*logits, "labels"), result))
    run = MetaRun(segments, result, _NoWeightGradients())
    batch = probe.tokens // length
    labels = torch.empty((batch, length), dtype=torch.int64, device="meta")
    live = _Live([*stage.module.parameters(), *stage.module.buffers()], probe.cpu, stage.has_masks)
    with live, stage.attention(), run.store.activate():
        carry = {"x": meta_hidden(stage.hidden_size, batch, length, probe.dtype), "labels": labels}
        run.begin(carry | stage.side_inputs(batch, length), ("x",))
        walk([run.forward()])
        forward, inside_forward = live.take_peaks()
        gradient = run.begin_backward()
        kept = live.bytes - gradient
        walk([run.backward(kind)])
        run.drop_gradients()
        backward, inside_backward = live.take_peaks()
        return _Counted(forward, inside_forward, kept, backward, inside_backward, live.bytes)


class _NoWeightGradients(WeightGradStore):
    """A store whose weight gradients are dropped where they would be computed."""

    def run(self, key: Any) -> None:
        self.take(key)


class _Live(TorchDispatchMode):
    """The bytes of all storages that are made inside and alive, and the most that there were, with and without what
    references take on the `cpu`; but for `known` tensors, and unless there are `masks`, who sees whom, bool (S, S),
    which the CPU alone needs."""

    def __init__(self, known: Collection[Tensor], cpu: bool, masks: bool) -> None:
        super().__init__()
        self._cpu = cpu
        self._masks = masks
        self.bytes = self.peak = self.outside = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._given = frozenset(self._known)

    def take_peaks(self) -> tuple[int, int]:
        """Return the most bytes so far, and how many of them are inside of references; begin to count anew."""
        most, inside = self.peak, self.peak - self.outside
        self.peak = self.outside = 0
        return most, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and (self._masks or tensor.dtype is not torch.bool):
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
