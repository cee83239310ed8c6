"""Operators of a layer between its communications, recorded on meta tensors.

The pipeline's own code runs the layer's segments, forward and backward, for two numbers of tokens. From these follow
the FLOPs and bytes of each operator per token, and its bytes that do not depend on the tokens. Attention, which on meta
is GEMMs that materialize the scores, counts as one fused operator in the forward and one in the backward; its FLOPs
depend on the layer and are added in `dualpipe.plan.stage_costs`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache, partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.hub import HubConfig
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.head import PART_BYTES, HeadRows, LinearHead
from dualpipe.pipeline.overlap import Task
from dualpipe.plan.meta_dispatch import ExpertChoice, MetaDispatcher, Transfer
from dualpipe.plan.meta_run import MICROBATCH, LayerKind, MetaRun, meta_hidden, stage_of_kinds, summed_loss
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig

Kind = Literal["gemm", "grouped", "fp8 gemm", "fp8 grouped", "attention", "attention backward", "memory"]
LENGTHS = 251, 509  # tokens of the two runs; primes, so that no other dimension of a tensor has the same size
# Number of kernels that an operator launches, if more than one. tests/models/test_launches.py checks it.
_LAUNCHES = {"dualpipe::sort_tokens": 4, "dualpipe::find_destinations": 2, "aten::topk": 2, "attention backward": 4}
FP8_BYTES = 1 + 1 / 32  # bytes per element with its share of the scale: one byte per 32 elements, or four per 128
_ACCUMULATE = torch.ops.aten.addmm.dtype_out  # adds a weight gradient to its accumulator
_NO_TRAFFIC = {"prim::device", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


class Operator(NamedTuple):
    """Operator of a layer.

    flops: FLOPs per token. token_bytes: bytes moved per token. bytes: other bytes moved, such as weights.
    launches: kernels that the host launches. is_triton: True if one of them is a kernel of `dualpipe.kernels`.
    """

    kind: Kind
    flops: float = 0.0
    token_bytes: float = 0.0
    bytes: float = 0.0
    launches: int = 1
    is_triton: bool = False


class ActionPart(NamedTuple):
    """Part of an action: its operators up to the next communication, and that communication.

    sent: bytes that the communication sends per token to all ranks of "ep"; 0 without one. deferred: operators of the
    weight gradients that can overlap it. by_node: True if it sends equal rows to all ranks with experts of a token, so
    that the first of two hops needs only one for each node.
    """

    operators: tuple[Operator, ...]
    sent: float = 0.0
    deferred: tuple[Operator, ...] = ()
    by_node: bool = False


class LayerParts(NamedTuple):
    """Parts of a layer's forward and of its backward. The last part of either ends without a communication."""

    forward: tuple[ActionPart, ...]
    backward: tuple[ActionPart, ...]


class FP8Usage(NamedTuple):
    """FP8 tensors of a model.

    weights: names of the weights with forward GEMMs in FP8. backward: names of those with input gradients in FP8.
    dispatch: True if rows are sent to experts in FP8.
    """

    weights: frozenset[str] = frozenset()
    backward: frozenset[str] = frozenset()
    dispatch: bool = False


NO_FP8 = FP8Usage()


@lru_cache(maxsize=1024)
def layer_parts(
    config: HubConfig, kind: LayerKind, ep: int, dtype: torch.dtype, fp8: FP8Usage = NO_FP8,
    lora: LoRAConfig = NO_ADAPTERS,
) -> LayerParts:
    """Return the operators of a layer on one of `ep` ranks that all have the same number of tokens."""
    short, long = (_run_layer(config, kind, ep, dtype, length, fp8, lora) for length in LENGTHS)
    forward, backward = _fit_parts(short, long)
    return LayerParts(forward, backward)


@lru_cache(maxsize=64)
def head_parts(
    config: HubConfig, dtype: torch.dtype, part_bytes: int = PART_BYTES, lora: LoRAConfig = NO_ADAPTERS
) -> LayerParts:
    """Return the operators of the last norm, the head and the loss.

    Head and loss run once more per layer for multi-token prediction, which has its own norm.

    part_bytes: limit of the logits that exist at once; with one, all gradients of the head are computed in the forward.
        0: logits of all tokens, with a deferred weight gradient, as always for a head with an adapter.
    """

    def run(length: int) -> tuple[list[ActionPart], list[ActionPart]]:
        stage = stage_of_kinds(config, (), 1, dtype, last=True, lora=lora)
        head = LinearHead(stage.lm_head)
        logits_or_rows = partial(HeadRows, head=head) if part_bytes and head.can_run_in_parts else stage.lm_head
        store = _accumulating_store(stage)
        recorder = _OperatorRecorder()
        x, *mtp_hidden = (meta_hidden(config.hidden_size, 1, length, dtype) for _ in range(1 + config.mtp_depth))
        labels = torch.empty(1, length, dtype=torch.int64, device="meta")
        with recorder, store.activate():
            loss = summed_loss(*map(logits_or_rows, (stage.norm(x), *mtp_hidden)), labels)
            forward = [ActionPart(recorder.take())]
            with store.defer(MICROBATCH):
                loss.backward()
            backward_operators = recorder.take()
            backward = [ActionPart(backward_operators, deferred=_record_deferred(store, recorder))]
        return forward, backward

    short, long = map(run, LENGTHS)
    return _fit_parts(short, long)


def _run_layer(
    config: HubConfig, kind: LayerKind, ep: int, dtype: torch.dtype, length: int, fp8: FP8Usage, lora: LoRAConfig
) -> tuple[list[ActionPart], list[ActionPart]]:
    """Run a layer on one sequence of `length` tokens; return the parts of its forward and backward for all tokens."""
    stage = stage_of_kinds(config, [kind], ep, dtype, lora=lora)
    # `fp8` has the names of the whole model, so the number of the stage's only layer, 0, is replaced by the model's.
    storages = {name.replace(".0.", f".{kind.first}.", 1): param.untyped_storage()._cdata
                for name, param in stage.named_parameters()}
    fp8_weights = {storages[name] for name in fp8.weights & storages.keys()}
    fp8_backward = {storages[name] for name in fp8.backward & storages.keys()}
    transfers: list[Transfer] = []
    sent_share = 1.0
    for _, layer in stage.numbered():
        if isinstance(layer.mlp, SparseMLP) and isinstance(layer.mlp.dispatcher, MetaDispatcher):
            choice = ExpertChoice.of(layer.mlp.gate)
            transfers = layer.mlp.dispatcher.transfers
            sent_share = choice.expected_places(ep) / min(choice.top_k, ep)
    recorder = _OperatorRecorder(fp8_weights, fp8_backward, sent_share)
    inputs: tuple[str, ...] = ("x",)
    result = "x"
    if kind.first in config.mtp_layers:
        inputs = ("hidden0", "embedded")
        result = "hidden1"
    run = MetaRun(stage.segments(), result, _accumulating_store(stage))
    with recorder, run.store.activate():
        carry = {name: meta_hidden(config.hidden_size, 1, length, dtype, requires_grad=not kind.is_start)
                 for name in inputs}
        run.begin({"x": carry[inputs[0]], "positions": None} | carry, inputs)
        forward = list(_record_parts(run.forward(), run.store, recorder, transfers, fp8.dispatch))
        run.begin_backward()
        backward = list(_record_parts(run.backward("I"), run.store, recorder, transfers, fp8.dispatch))
    return forward, backward


def _accumulating_store(module: nn.Module) -> WeightGradStore:
    """Give trained parameters float32 accumulators that already have gradients, and return a store for the module."""
    for param in module.parameters():
        if not param.requires_grad:
            continue
        param.grad_dtype = torch.float32  # type: ignore[attr-defined]
        param.grad = torch.empty(param.shape, dtype=torch.float32, device="meta")
    store = WeightGradStore()
    store.accumulating = True
    return store


def _record_parts(
    task: Task, store: WeightGradStore, recorder: _OperatorRecorder, transfers: list[Transfer], fp8_rows: bool
) -> Iterator[ActionPart]:
    """Drive a task as `walk` does, and yield its parts: one per communication, and the rest.

    transfers: list to which a communication appends itself when it starts. fp8_rows: True if rows are sent to experts
    in FP8.
    """
    for in_flight in task:
        operators = recorder.take()
        assert in_flight is not None, "the forward and the backward of a layer yield communications alone"
        in_flight.start()
        in_flight.advance()
        operators += recorder.take()  # those that pack the rows
        transfer = transfers.pop()
        rows, *beside = transfer.exchanges
        row_bytes = rows * (FP8_BYTES / 2 if fp8_rows and transfer.is_dispatch else 1)
        sent = row_bytes + sum(beside)
        yield ActionPart(operators, sent, _record_deferred(store, recorder), transfer.by_node)
    yield ActionPart(recorder.take(), 0.0, _record_deferred(store, recorder))


def _record_deferred(store: WeightGradStore, recorder: _OperatorRecorder) -> tuple[Operator, ...]:
    """Compute the deferred weight gradients, and return their operators."""
    with torch.no_grad():
        for compute_gradient in store.take(MICROBATCH):
            compute_gradient()
    return recorder.take()


def _fit_parts(
    short: tuple[list[ActionPart], list[ActionPart]], long: tuple[list[ActionPart], list[ActionPart]]
) -> LayerParts:
    """Return parts for any number of tokens from those of runs with the two `LENGTHS`."""
    forward, backward = (tuple(map(_fit_part, *runs)) for runs in zip(short, long))
    return LayerParts(forward, backward)


def _fit_part(short: ActionPart, long: ActionPart) -> ActionPart:
    """Return a part for any number of tokens from that of the shorter and that of the longer run."""
    return ActionPart(
        operators=_fit_operators(short.operators, long.operators),
        sent=_fit_line(short.sent, long.sent)[0],
        deferred=_fit_operators(short.deferred, long.deferred),
        by_node=long.by_node,
    )


def _fit_operators(short: tuple[Operator, ...], long: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return the operators with FLOPs and bytes per token, and with the bytes that do not depend on the tokens."""
    short_kinds = [operator.kind for operator in short]
    long_kinds = [operator.kind for operator in long]
    assert short_kinds == long_kinds, f"operators depend on the length: {short_kinds} and {long_kinds}"
    fitted = []
    for few, many in zip(short, long):
        flops, _ = _fit_line(few.flops, many.flops)
        token_bytes, other_bytes = _fit_line(few.bytes, many.bytes)
        fitted.append(Operator(few.kind, flops, token_bytes, other_bytes, few.launches, few.is_triton))
    return tuple(fitted)


def _fit_line(short: float, long: float) -> tuple[float, float]:
    """Return slope and intercept, at least 0, of the line through the values at the two `LENGTHS`."""
    few, many = LENGTHS
    slope = (long - short) / (many - few)
    return slope, max(0.0, short - slope * few)


class _OperatorRecorder(TorchDispatchMode):
    """Mode that records the operators called inside it, in order, except those that move no data.

    Recording starts at the first operator of the `dualpipe` namespace. Those before it, such as the computation of
    rotary tables, run once per stage, not once per layer.

    Args:
        fp8: storages of the weights with forward GEMMs in FP8.
        fp8_backward: storages of the weights with input gradients in FP8.
        sent_share: part of the rows of a dispatch plan that are sent. The others are neither written nor read.
    """

    def __init__(
        self, fp8: Collection[int] = (), fp8_backward: Collection[int] = (), sent_share: float = 1.0
    ) -> None:
        super().__init__()
        self._sent_share = sent_share
        self._fp8_forward = fp8
        self._fp8_backward = fp8_backward
        self._operators: list[Operator] = []
        self._has_begun = False

    def take(self) -> tuple[Operator, ...]:
        """Return the operators recorded since the last call."""
        operators = tuple(self._operators)
        self._operators = []
        return operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and record it unless it moves no data."""
        kwargs = kwargs or {}
        # Accumulation is not called: torch 2.11 fails to add on the meta device, where there is nothing to add.
        results = kwargs["out"] if func is _ACCUMULATE else func(*args, **kwargs)
        name = func._schema.name
        self._has_begun = self._has_begun or name.startswith("dualpipe::")
        aliases = [argument.alias_info for argument in func._schema.arguments]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if self._has_begun and not is_view and name not in _NO_TRAFFIC:
            self._record(name, _tensors((args, kwargs)), _tensors(results), _plan_rows(name, args))
        return results

    def _record(self, name: str, inputs: list[Tensor], outputs: list[Tensor], plan_rows: int) -> None:
        """Record an operator by its name and tensors. plan_rows: see `_plan_rows`."""
        is_backward = torch._C._current_autograd_node() is not None
        # Decomposed attention: it has scores, or operands with five dimensions, grouped by key/value head. The one GEMM
        # in each direction whose result has the shape of the scores stands for the fused operator; the rest is skipped.
        if any(_is_scores(tensor) or tensor.dim() > 4 for tensor in (*inputs, *outputs)):
            if name == "aten::bmm" and any(map(_is_scores, outputs)):
                attention: Kind = "attention backward" if is_backward else "attention"
                self._operators.append(Operator(attention, launches=_LAUNCHES.get(attention, 1)))
            return
        moved = 0.0
        for tensor in (*inputs, *outputs):
            share = self._sent_share if tensor.dim() == 2 and len(tensor) == plan_rows else 1.0
            moved += share * tensor.numel() * tensor.itemsize
        kind, flops = _flops(name, inputs, outputs)
        fp8_weights = self._fp8_backward if is_backward else self._fp8_forward
        has_fp8_weight = any(tensor.untyped_storage()._cdata in fp8_weights for tensor in inputs)
        if kind in ("gemm", "grouped") and has_fp8_weight:
            moved -= (2 - FP8_BYTES) * sum(tensor.numel() for tensor in inputs if tensor.itemsize == 2)
            rows = max(tensor.numel() for tensor in inputs
                       if tensor.is_floating_point() and tensor.untyped_storage()._cdata not in fp8_weights)
            quantized_bytes = (2 + FP8_BYTES) * rows  # read in bf16, written in FP8
            self._operators.append(Operator("memory", 0.0, 0.0, quantized_bytes, is_triton=True))
            kind = "fp8 gemm" if kind == "gemm" else "fp8 grouped"
        is_triton = name.startswith("dualpipe::")
        self._operators.append(Operator(kind, flops, 0.0, moved, _LAUNCHES.get(name, 1), is_triton))


def _plan_rows(name: str, arguments: tuple[Any, ...]) -> int:
    """Return the number of rows of a dispatch plan if an operator spreads tokens over them, or sums them; else 0."""
    if name == "dualpipe::dispatch_tokens":
        _, inverse, _, _, rows = arguments
    elif name == "dualpipe::combine_tokens":
        y, _, inverse, _, _ = arguments
        rows = len(y)
    else:
        return 0
    return rows if rows == len(inverse) else 0  # experts have their rows cut to those that are assigned


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_scores(tensor: Tensor) -> bool:
    """Return True if the tensor is (..., S, S) with a sequence length S of `LENGTHS`: attention scores."""
    return tensor.dim() > 1 and tensor.shape[-2:] in ((LENGTHS[0],) * 2, (LENGTHS[1],) * 2)


def _flops(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[Kind, float]:
    """Return the kind and the FLOPs of an operator: for a GEMM, two per multiply-add."""
    if name in ("aten::mm", "aten::bmm", "aten::addmm"):
        a, b = inputs[1:3] if name == "aten::addmm" else inputs[:2]
        return "gemm", 2.0 * prod(a.shape) * b.shape[-1]
    if name.startswith("dualpipe::grouped_gemm"):
        weight = next(tensor for tensor in inputs if tensor.dim() == 3)
        rows = outputs[0].shape[0] if outputs else inputs[0].shape[0]
        return "grouped", 2.0 * rows * weight.shape[1] * weight.shape[2]
    return "memory", 0.0
