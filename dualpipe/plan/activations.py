"""Activation bytes of a micro-batch in a stage, counted rather than derived from formulas.

The stage's segments run as the pipeline runs them, forward and backward, on meta tensors, and the live storages are
counted, each once. For GPUs the count leaves out attention's scores, which the CPU saves and fused kernels do not. For
the CPU it includes the temporaries of the kernels' PyTorch references (REFERENCES), and with context parallelism what
one of the ranks that share a sequence holds of the others' rows. Deferred weight gradients are not
computed, so that their temporaries do not count: on GPUs these do not grow with the micro-batch.

In a run of equal neighbouring layers, each layer from the third on adds the same number of bytes, so that long runs are
extrapolated from two and three layers.

Dimension letters: S sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualpipe.models.hub import HubConfig
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.head import PART_BYTES, LinearHead, part_peak_bytes
from dualpipe.nn.segments import Compute, output_names
from dualpipe.pipeline.overlap import walk
from dualpipe.plan.counted_stages import CountedStage, Workload, counted_stage, layer_kinds, workload_to_run
from dualpipe.plan.meta_run import LayerKind, MetaRun, meta_hidden, summed_loss
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig

# Temporaries of the CPU references at half precision, by operator: how many float32 copies of its largest tensor are
# alive at the peak. A test measures them with torch's allocator. References that are not listed have few temporaries;
# the kernels of GPUs have none.
REFERENCES = {
    "rms_norm": 2.0, "rms_norm_backward": 6.0, "rotate_heads": 2.5, "rotate_heads_backward": 6.5,
    "grouped_gemm_swiglu": 2.25, "swiglu_backward": 4.0, "swiglu_backward, clamped": 5.25,
    "cross_entropy": 2.0, "cross_entropy_backward": 2.0,
}

_HEAD_TOKENS = 16  # tokens of a workload that only names a stage


class ActivationBytes(NamedTuple):
    """Bytes of a micro-batch in a stage.

    saved: between its forward and its backward. deferred: left by an "I" for its "W". forward, backward,
    input_backward: peaks while a forward, a "B" and an "I" run, all of the micro-batch's tensors included.
    """

    saved: int
    deferred: int
    forward: int
    backward: int
    input_backward: int


class PairedAction(NamedTuple):
    """Action of a pair: its kind, "F", "B" or "I", and its stage; see `activation_bytes`."""

    kind: str
    layers: range
    last: bool


# Entries of `ActivationBytes` that include the tensors which attention saves.
_WITH_ATTENTION = frozenset({"saved", "forward", "backward", "input_backward"})


def activation_bytes(
    model: TrainedModel, layers: range, *, batch: int, sequence_length: int, dtype: torch.dtype = torch.bfloat16,
    recompute: Iterable[str] = (), ep: int = 1, nodes: int = 1, last: bool = False, cpu: bool = False,
    has_documents: bool = False, cp: int = 1, cp_method: str = "auto", part_bytes: int = PART_BYTES,
    lora: LoRAConfig = NO_ADAPTERS,
) -> ActivationBytes:
    """Return the bytes that layers take for a micro-batch of (batch, sequence_length) tokens.

    The embedding of the first stage is left out: it saves nothing but the tokens.

    Args:
        model: model of the layers.
        layers: indices of the stage's layers.
        batch: sequences per micro-batch.
        sequence_length: tokens per sequence.
        dtype: compute dtype.
        recompute: rules of `Recompute`.
        ep: number of expert-parallel ranks, over which tokens are taken to be spread evenly.
        nodes: number of nodes that these are on, if rows are dispatched in two hops; 1: in one hop.
        last: True for the last stage, which also has the head and the loss. Each layer for multi-token prediction in
            `layers` adds a head, a loss and the tokens that it embeds.
        cpu: count for a CPU, not for GPUs.
        has_documents: sequences hold several documents. The masks that separate them count on the CPU, and for models
            of transformers; native models need no masks on GPUs.
        cp: number of ranks that share a sequence, for a native model on the CPU. The bytes are those of the rank with
            the most.
        cp_method: value of parallel.cp_method.
        part_bytes: limit of the logits that exist at once, counted in float32, if the head can run in parts; 0: those
            of all tokens do.
        lora: adapters of the model. Nothing is kept for the weight gradients of frozen layers, nor for the backward of
            the layers before the first adapter.
    """
    work = Workload(batch * sequence_length, (sequence_length,), dtype, ep, nodes, cpu, has_documents, cp,
                    cp_method=cp_method, head_in_parts=False, lora=lora)
    work = work._replace(head_in_parts=_needs_parts(model, work, part_bytes))
    runs = _runs_of_layers(model, layers, recompute, cp, lora)
    by_rank = [_bytes_of_runs(model, runs, probe, last, sequence_length) for probe in _probes(model, work)]
    sizes = ActivationBytes(*(round(max(sizes) * work.tokens) for sizes in zip(*by_rank)))
    part = _part_bytes(model, work, part_bytes) if last else 0
    return sizes._replace(forward=max(sizes.forward, sizes.saved + part))


def pair_bytes(
    model: TrainedModel, pair: tuple[PairedAction, PairedAction], *, batch: int, sequence_length: int,
    dtype: torch.dtype = torch.bfloat16, recompute: Iterable[str] = (), ep: int = 1, nodes: int = 1, cpu: bool = False,
    has_documents: bool = False, cp: int = 1, cp_method: str = "auto", part_bytes: int = PART_BYTES,
    lora: LoRAConfig = NO_ADAPTERS,
) -> int:
    """Return the peak bytes of two overlapping actions, beyond those before or after them, whichever are more.

    Before a pair, the micro-batches of its backwards are saved; after it, those of its forwards, and what an "I"
    defers. In between, a forward has saved its first layer before the backward has released its last. Long runs of
    equal layers are shortened: at most two layers are in use at once. Arguments: see `activation_bytes`.
    """
    work = Workload(batch * sequence_length, (sequence_length,), dtype, ep, nodes, cpu, has_documents, cp,
                    cp_method=cp_method, head_in_parts=False, lora=lora)
    work = work._replace(head_in_parts=_needs_parts(model, work, part_bytes))
    actions = tuple(
        (kind, tuple(chain.from_iterable(_shortened(_runs_of_layers(model, layers, recompute, cp, lora)))), last)
        for kind, layers, last in pair)
    most = max(_pair_bytes_per_token(model, actions, probe, sequence_length) for probe in _probes(model, work))
    # A part of the logits comes last in its forward, when the other action has released about what it will.
    has_loss = any(action.kind == "F" and action.last for action in pair)
    return max(round(most * work.tokens), _part_bytes(model, work, part_bytes) if has_loss else 0)


def _part_bytes(model: TrainedModel, work: Workload, part_bytes: int) -> int:
    """Return the bytes of a part of the logits with its temporaries; 0 for a head that does not run in parts."""
    head = head_in_parts(model, work.dtype, work.lora) if work.head_in_parts else None
    return 0 if head is None else part_peak_bytes(head, _most_tokens(work), work.dtype, part_bytes, cpu=work.cpu)


def _needs_parts(model: TrainedModel, work: Workload, part_bytes: int) -> bool:
    """Return True if the logits of a micro-batch are more than a part of them, and the head can run in parts."""
    head = head_in_parts(model, work.dtype, work.lora) if part_bytes else None
    return head is not None and head.needs_parts(_most_tokens(work), work.dtype, part_bytes)


def _most_tokens(work: Workload) -> int:
    """Return the tokens of a micro-batch on the rank that has the most of those that share a sequence."""
    (length,) = work.lengths
    return max(SequenceSplit(0, work.cp).counts(length)) * (work.tokens // length)


@lru_cache(maxsize=64)
def head_in_parts(model: TrainedModel, dtype: torch.dtype, lora: LoRAConfig) -> LinearHead | None:
    """Return the head of a model on the meta device; None if it cannot run in parts with the loss."""
    probe = Workload(_HEAD_TOKENS, (_HEAD_TOKENS,), dtype, lora=lora)
    return counted_stage(model, layer_kinds(model, range(1), (), lora=lora), probe, is_last=True).head()


def _probes(model: TrainedModel, work: Workload) -> list[Workload]:
    """Return the workloads to run, for the ranks that may have the most memory of those that share a sequence.

    The first one has the most tokens; those in the middle receive rows from before each of their two chunks.
    """
    probe = workload_to_run(model, work)
    return [probe._replace(cp_rank=rank) for rank in sorted({0, probe.cp // 2})]


def _runs_of_layers(
    model: TrainedModel, layers: range, recompute: Iterable[str], cp: int, lora: LoRAConfig
) -> list[list[LayerKind]]:
    """Return the kinds of layers by run of equal neighbouring layers."""
    return [list(run) for _, run in groupby(layer_kinds(model, layers, recompute, cp=cp, lora=lora))]


def _shortened(runs: Iterable[list[LayerKind]]) -> list[list[LayerKind]]:
    """Return the runs, those of more than three layers shortened to two."""
    return [run[:2] if len(run) > 3 else run for run in runs]


def _bytes_of_runs(
    model: TrainedModel, runs: list[list[LayerKind]], probe: Workload, last: bool, sequence_length: int
) -> tuple[float, ...]:
    """Return `ActivationBytes` per token of a stage with runs of equal layers. probe: see `workload_to_run`."""
    short_runs = _shortened(runs)

    def token_bytes(*runs: list[LayerKind]) -> tuple[float, ...]:
        sizes = _token_bytes(model, tuple(chain.from_iterable(runs)), probe, last)
        return sizes.with_attention(sequence_length)

    shortened = token_bytes(*short_runs)
    total = shortened
    for i, run in enumerate(runs):
        num_left_out = len(run) - len(short_runs[i])
        if num_left_out:
            one_more = token_bytes(*short_runs[:i], run[:3], *short_runs[i + 1 :])
            total = tuple(size + num_left_out * (more - base) for size, more, base in zip(total, one_more, shortened))
    return total


class _TokenBytes(NamedTuple):
    """`ActivationBytes` per token.

    plain: without attention's scores and masks, unless the stage was run at one length only: then all bytes are here.
    fused: bytes that fused attention kernels save in place of the scores; None if the stage was run with the device's
    attention, so that what it saved counts. scores: bytes of scores and masks per pair of tokens, in the order of
    `plain`.
    """

    plain: tuple[float, ...]
    fused: float | None
    scores: tuple[float, ...]

    def with_attention(self, sequence_length: int) -> tuple[float, ...]:
        """Return the bytes per token, attention included, in sequences of this length."""
        if self.fused is None:
            return tuple(size + sequence_length * scores for size, scores in zip(self.plain, self.scores))
        return tuple(size + self.fused if name in _WITH_ATTENTION else size
                     for name, size in zip(ActivationBytes._fields, self.plain))


@lru_cache(maxsize=4096)
def _token_bytes(model: TrainedModel, kinds: tuple[LayerKind, ...], probe: Workload, last: bool) -> _TokenBytes:
    """Count a stage with one layer per kind. probe: workload to run, see `workload_to_run`."""
    stage = counted_stage(model, kinds, probe, last)
    counts = [_count_stage(stage, probe, length) for length in probe.lengths]
    if len(counts) == 1:
        plain = tuple(size / probe.tokens for size in counts[0])
        return _TokenBytes(plain, stage.fused, (0.0,) * len(plain))
    # At a fixed number of tokens, only scores and masks grow with the length: two runs separate them from the rest.
    short, long = probe.lengths
    slopes = [(long_size - short_size) / (long - short) for short_size, long_size in zip(*counts)]
    plain = tuple((size - short * slope) / probe.tokens for size, slope in zip(counts[0], slopes))
    return _TokenBytes(plain, stage.fused, tuple(slope / probe.tokens for slope in slopes))


def _count_stage(stage: CountedStage, probe: Workload, length: int) -> ActivationBytes:
    """Count the bytes of a micro-batch in sequences of `length` tokens."""
    full = _count_pass(stage, "B", probe, length)
    split = _count_pass(stage, "I", probe, length)
    return ActivationBytes(
        saved=full.saved,
        deferred=split.remaining,
        forward=full.forward,
        backward=full.backward,
        input_backward=split.backward,
    )


class _PassBytes(NamedTuple):
    """Bytes of a forward and one kind of backward.

    forward, backward: their peaks. saved: between forward and backward. remaining: after the backward.
    """

    forward: int
    saved: int
    backward: int
    remaining: int


def _count_pass(stage: CountedStage, kind: Literal["B", "I"], probe: Workload, length: int) -> _PassBytes:
    """Run a forward and a backward of one kind, and count their bytes."""
    run = _run_of(stage, probe, _DroppingStore())
    live = _LiveBytes(_existing([stage]), probe.cpu, stage.has_masks)
    with live, stage.attention(), run.store.activate(), _without_heads([stage], probe):
        _begin(run, stage, probe, length)
        walk([run.forward()])
        forward = live.take_peak()
        gradient = run.begin_backward()
        saved = live.bytes - gradient
        walk([run.backward(kind)])
        run.drop_gradients()
        return _PassBytes(forward, saved, live.take_peak(), remaining=live.bytes)


def _existing(stages: Iterable[CountedStage]) -> list[Tensor]:
    """Return the parameters and buffers of stages."""
    return [tensor for stage in stages for tensor in (*stage.module.parameters(), *stage.module.buffers())]


@contextmanager
def _without_heads(stages: Iterable[CountedStage], probe: Workload) -> Iterator[None]:
    """Leave out the heads of stages that run in parts: what a part takes does not grow with the tokens."""
    with ExitStack() as stack:
        for stage in stages:
            if probe.head_in_parts and stage.head() is not None:
                stack.enter_context(stage.module.without_head())
        yield


def _run_of(stage: CountedStage, probe: Workload, store: WeightGradStore) -> MetaRun:
    """Return a run of the segments of a stage, with the loss on the last one.

    A loss in parts only holds the gradients of its rows: see `_part_bytes`.
    """
    segments = stage.module.segments()
    result = "x"
    if stage.is_last:
        outputs = output_names(segments)
        result = "loss"
        if probe.head_in_parts and stage.head() is not None:
            segments.append(Compute(_LossOfRows.apply, outputs, result))
        else:
            segments.append(Compute(summed_loss, (*outputs, "labels"), result))
    return MetaRun(segments, result, store)


class _LossOfRows(torch.autograd.Function):
    """Loss of a head in parts, without the head: keeps the gradients of the rows."""

    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(*map(torch.empty_like, rows))
        return rows[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = ctx.saved_tensors
        return gradients


def _begin(run: MetaRun, stage: CountedStage, probe: Workload, length: int) -> None:
    """Start a micro-batch in sequences of `length` tokens."""
    batch = probe.tokens // length
    local_length = stage.split.counts(length)[probe.cp_rank]
    x = meta_hidden(stage.hidden_size, batch, local_length, probe.dtype, requires_grad=not stage.is_start)
    labels = torch.empty((batch, local_length), dtype=torch.int64, device="meta")
    run.begin({"x": x, "labels": labels} | stage.side_inputs(batch, length), ("x",))


_StageAction = tuple[str, tuple[LayerKind, ...], bool]  # kind of the action, the stage's kinds of layers, is it last


@lru_cache(maxsize=4096)
def _pair_bytes_per_token(
    model: TrainedModel, actions: tuple[_StageAction, ...], probe: Workload, sequence_length: int
) -> float:
    """Return `pair_bytes` per token of `probe`."""
    counts = [_count_pair(model, actions, probe, length) for length in probe.lengths]
    if len(counts) == 1:
        return counts[0] / probe.tokens
    # As in `_token_bytes`.
    short, long = probe.lengths
    slope = (counts[1] - counts[0]) / (long - short)
    is_fused = isinstance(model, HubConfig)  # on the device, attention has no scores
    return (counts[0] + slope * ((0 if is_fused else sequence_length) - short)) / probe.tokens


def _count_pair(model: TrainedModel, actions: Sequence[_StageAction], probe: Workload, length: int) -> int:
    """Run two actions in turn, as the pipeline runs a pair, and count the bytes of `pair_bytes`."""
    stages = [counted_stage(model, kinds, probe, last) for _, kinds, last in actions]
    store = _DroppingStore()
    runs = [_run_of(stage, probe, store) for stage in stages]
    live = _LiveBytes(_existing(stages), probe.cpu, stages[0].has_masks)
    with live, stages[0].attention(), store.activate(), _without_heads(stages, probe):
        gradients = 0
        for (kind, _, _), stage, run in zip(actions, stages, runs):
            if kind != "F":
                _begin(run, stage, probe, length)
                walk([run.forward()])
                gradients += run.begin_backward()
        before = live.bytes - gradients
        live.take_peak()
        backwards = [run.backward(kind) for (kind, _, _), run in zip(actions, runs) if kind != "F"]
        forwards = []
        for (kind, _, _), stage, run in zip(actions, stages, runs):
            if kind == "F":
                _begin(run, stage, probe, length)
                forwards.append(run.forward())
        walk([*backwards, *forwards])
        peak = live.take_peak()
        for run in runs:
            run.drop_gradients()
        return peak - max(before, live.bytes)


class _DroppingStore(WeightGradStore):
    """Store that drops weight gradients instead of computing them."""

    def run(self, key: Any) -> None:
        """Drop the weight gradients of `key`."""
        self.take(key)


class _LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of the live storages created inside it, and their peak.

    Args:
        existing: tensors that exist before, such as parameters, which do not count.
        cpu: count temporaries of references too.
        masks: count bool tensors too. On GPUs, native models need none of the masks (S, S) that they make on meta.
    """

    def __init__(self, existing: Collection[Tensor], cpu: bool, masks: bool) -> None:
        super().__init__()
        self._cpu = cpu
        self._masks = masks
        self.bytes = 0
        self._peak = 0
        self._existing = frozenset(tensor.untyped_storage()._cdata for tensor in existing)
        self._known = set(self._existing)

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak = max(self._peak, self.bytes)
        self._peak = 0
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count the storages of its results."""
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and (self._masks or tensor.dtype is not torch.bool):
                self._add(tensor)
        if func.namespace == "dualpipe" and self._cpu:
            temporaries = self._temporary_bytes(func._opname, args, results)
            self._peak = max(self._peak, self.bytes + temporaries)
        return results

    def _add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed, unless it counts already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.bytes += size
        self._peak = max(self._peak, self.bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        """Stop counting a storage that was freed."""
        self._known.remove(key)
        self.bytes -= size

    def _temporary_bytes(self, name: str, args: Any, results: Any) -> int:
        """Return the bytes of the float32 temporaries of a reference, by its name and tensors."""
        if name == "combine_tokens":
            # Two copies of the rows, and a row per token and chosen expert, even if the expert is on another rank.
            y, _, inverse, *_ = args
            return round(4 * (2 * y.numel() + inverse.numel() * y.shape[1]))
        if name == "swiglu_backward" and args[3]:
            name += ", clamped"
        sizes = [tensor.numel() for tensor in tree_leaves((args, results))
                 if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._existing]
        return round(4 * REFERENCES.get(name, 0.0) * max(sizes, default=0))
