"""What a layer gives to a device: its operators, between its communications, counted on tensors without memory.

A layer's segments are run as the pipeline runs them, forward and backward, for two numbers of tokens; each operator's
operations and bytes are then so many for each token and so many besides. Attention, which is written down here as
products of whole scores, counts as one fused operator forward and one backward; its operations depend on the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualpipe.models.hub import HubConfig
from dualpipe.nn import Linear, RMSNorm
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.pipeline.overlap import Task
from dualpipe.plan.on_meta.meta_run import MICROBATCH, LayerKind, MetaRun, meta_hidden, stage_of_kinds, summed_loss

Kind = Literal["gemm", "grouped", "fp8 gemm", "fp8 grouped", "attention", "attention backward", "memory"]
LENGTHS = 251, 509  # tokens of the two runs; primes, so that no other size of a tensor is the length of a sequence
# Launches of operators that are several there, and of making and packing a plan for other ranks, which is not run here:
# tests/models/test_launches.py counts them.
_LAUNCHES = {"dualpipe::sort_tokens": 4, "aten::topk": 2, "attention backward": 4}
_PLANNING = 36
FP8_BYTES = 1 + 1 / 32  # of a number: with its part of a scale, a byte for 32 or four for 128
_ACCUMULATE = torch.ops.aten.addmm.dtype_out  # a weight gradient to its accumulator
_NOTHING = {"prim::device", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


class Operator(NamedTuple):
    """Operations for each token, bytes moved for each token and besides, and what the host launches for it."""

    kind: Kind
    flops: float = 0.0
    token_bytes: float = 0.0
    bytes: float = 0.0
    launches: int = 1


class ActionPart(NamedTuple):
    """What an action computes until its next communication, the bytes that each token then sends to all ranks of "ep",
    and the weight gradients that can be computed beside it."""

    operators: tuple[Operator, ...]
    sent: float = 0.0
    deferred: tuple[Operator, ...] = ()


class LayerParts(NamedTuple):
    """The parts of a forward and of a backward; the last one of each ends without a communication."""

    forward: tuple[ActionPart, ...]
    backward: tuple[ActionPart, ...]


class InFP8(NamedTuple):
    """What is in FP8: products with weights of these names, forward; their input gradients; and rows to experts."""

    weights: frozenset[str] = frozenset()
    backward: frozenset[str] = frozenset()
    dispatch: bool = False


IN_BF16 = InFP8()


@lru_cache(maxsize=1024)
def layer_parts(
    config: HubConfig, kind: LayerKind, ep: int, dtype: torch.dtype, fp8: InFP8 = IN_BF16
) -> LayerParts:
    """The operators of a layer on one of `ep` ranks with as many tokens."""
    short, long = (_run_layer(config, kind, ep, dtype, length, fp8) for length in LENGTHS)
    forward, backward = (tuple(map(_per_token, *pair)) for pair in zip(short, long))
    if ep > 1 and len(forward) > 1:
        planning = Operator("memory", launches=_PLANNING)
        forward = (forward[0]._replace(operators=(*forward[0].operators, planning)), *forward[1:])
    return LayerParts(forward, backward)


@lru_cache(maxsize=64)
def head_parts(config: HubConfig, dtype: torch.dtype) -> LayerParts:
    """The operators of the last norm, the head and the loss; the last two once more for each layer for multi-token
    prediction, which has its own norm."""

    def run(length: int) -> tuple[list[ActionPart], list[ActionPart]]:
        head = Linear(config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps).to(head.weight)
        store, recorded = _prepared(nn.Sequential(norm, head)), _Recorded()
        x, *more = (meta_hidden(config.hidden_size, 1, length, dtype) for _ in range(1 + config.mtp_depth))
        labels = torch.empty(1, length, dtype=torch.int64, device="meta")
        with recorded, store.activate():
            loss = summed_loss(*map(head, (norm(x), *more)), labels)
            forward = [ActionPart(recorded.take())]
            with store.defer(MICROBATCH):
                loss.backward()
            return forward, [ActionPart(recorded.take(), deferred=_deferred(store, recorded))]

    short, long = map(run, LENGTHS)
    return LayerParts(*(tuple(map(_per_token, *pair)) for pair in zip(short, long)))


def _run_layer(
    config: HubConfig, kind: LayerKind, ep: int, dtype: torch.dtype, length: int, fp8: InFP8
) -> tuple[list[ActionPart], list[ActionPart]]:
    stage = stage_of_kinds(config, [kind], ep, dtype)
    storages = {name.replace(".0.", f".{kind.first}.", 1): param.untyped_storage()._cdata
                for name, param in stage.named_parameters()}
    weights, turned = ({storages[name] for name in names & storages.keys()} for names in fp8[:2])
    recorded = _Recorded(weights, turned, fp8.dispatch)
    predicts = kind.first in config.mtp_layers
    inputs, result = (("hidden0", "embedded"), "hidden1") if predicts else (("x",), "x")
    run = MetaRun(stage.segments(), result, _prepared(stage))
    with recorded, run.store.activate():
        carry = {name: meta_hidden(config.hidden_size, 1, length, dtype) for name in inputs}
        run.begin({"x": carry[inputs[0]], "positions": None} | carry, inputs)
        forward = list(_parts(run.forward(), run.store, recorded))
        run.begin_backward()
        backward = list(_parts(run.backward("I"), run.store, recorded))
    return forward, backward


def _prepared(module: nn.Module) -> WeightGradStore:
    """A store for the module, which has accumulators in float32 already."""
    for param in module.parameters():
        param.grad_dtype = torch.float32  # type: ignore[attr-defined]
        param.grad = torch.empty(param.shape, dtype=torch.float32, device="meta")
    store = WeightGradStore()
    store.accumulating = True
    return store


def _parts(task: Task, store: WeightGradStore, recorded: _Recorded) -> Iterator[ActionPart]:
    """What an action does, up to each of its communications and after the last; as `walk` drives it."""
    for in_flight in task:
        operators = recorded.take()
        if in_flight is not None:
            in_flight.start()
        yield ActionPart(operators, recorded.sent(), _deferred(store, recorded))
    yield ActionPart(recorded.take(), 0.0, _deferred(store, recorded))


def _deferred(store: WeightGradStore, recorded: _Recorded) -> tuple[Operator, ...]:
    with torch.no_grad():
        for piece in store.take(MICROBATCH):
            piece()
    return recorded.take()


def _per_token(short: ActionPart, long: ActionPart) -> ActionPart:
    """A part for any number of tokens, from those of two numbers."""
    few, many = LENGTHS

    def line(one: float, other: float) -> tuple[float, float]:
        slope = (other - one) / (many - few)
        return slope, max(0.0, one - slope * few)

    def fitted(operators: tuple[Operator, ...], others: tuple[Operator, ...]) -> tuple[Operator, ...]:
        assert [each.kind for each in operators] == [each.kind for each in others], "the operators depend on the length"
        return tuple(Operator(one.kind, line(one.flops, other.flops)[0], *line(one.bytes, other.bytes), one.launches)
                     for one, other in zip(operators, others))

    return ActionPart(fitted(short[0], long[0]), line(short.sent, long.sent)[0], fitted(short[2], long[2]))


class _Recorded(TorchDispatchMode):
    """The operators that are called inside, in order, from the first of our own on: what is before a stage's layers is
    once for all of them. Those that move nothing do not count. fp8, fp8_backward: storages of weights whose products
    are; fp8_rows: what goes to experts is."""

    def __init__(
        self, fp8: Collection[int] = (), fp8_backward: Collection[int] = (), fp8_rows: bool = False
    ) -> None:
        super().__init__()
        self._fp8, self._fp8_rows = (fp8, fp8_backward), fp8_rows
        self._found: list[Operator] = []
        self._begun = False

    def take(self) -> tuple[Operator, ...]:
        """Those since the last call."""
        found, self._found = tuple(self._found), []
        return found

    def sent(self) -> float:
        """The bytes of a communication that has just been started, whose stand-in copies what it sends."""
        sizes = [each.bytes / 2 for each in self.take()]
        if self._fp8_rows and len(sizes) == 3:  # a dispatch: rows, weights, choices
            sizes[0] *= FP8_BYTES / 2
        return sum(sizes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Not called: torch 2.11 fails to add on the meta device, where there is nothing to add.
        results = kwargs["out"] if func is _ACCUMULATE else func(*args, **kwargs)
        name = func._schema.name
        self._begun = self._begun or name.startswith("dualpipe::")
        aliases = [argument.alias_info for argument in func._schema.arguments]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if is_view or name in _NOTHING or not self._begun:
            return results
        given, made = _tensors((args, kwargs)), _tensors(results)
        if any(_is_scores(t) or t.dim() > 4 for t in (*given, *made)):  # attention as it is written down
            if name == "aten::bmm" and any(map(_is_scores, made)):
                backward = torch._C._current_autograd_node() is not None
                kind: Kind = "attention backward" if backward else "attention"
                self._found.append(Operator(kind, launches=_LAUNCHES.get(kind, 1)))
            return results
        moved: float = sum(t.numel() * t.itemsize for t in (*given, *made))
        kind, flops = _flops(name, given, made)
        fp8 = self._fp8[torch._C._current_autograd_node() is not None]
        rows = [t.numel() for t in given if t.is_floating_point() and t.untyped_storage()._cdata not in fp8]
        if kind in ("gemm", "grouped") and any(t.untyped_storage()._cdata in fp8 for t in given):
            moved -= (2 - FP8_BYTES) * sum(t.numel() for t in given if t.itemsize == 2)
            self._found.append(Operator("memory", 0.0, 0.0, (2 + FP8_BYTES) * max(rows)))  # quantizes them
            kind = "fp8 gemm" if kind == "gemm" else "fp8 grouped"
        self._found.append(Operator(kind, flops, 0.0, moved, _LAUNCHES.get(name, 1)))
        return results


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_scores(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-2:] in ((LENGTHS[0],) * 2, (LENGTHS[1],) * 2)


def _flops(name: str, given: list[Tensor], made: list[Tensor]) -> tuple[Kind, float]:
    """What a product computes: two operations for each row, column and step of the sum."""
    if name in ("aten::mm", "aten::bmm", "aten::addmm"):
        a, b = given[1:3] if name == "aten::addmm" else given[:2]
        return "gemm", 2.0 * prod(a.shape) * b.shape[-1]
    if name.startswith("dualpipe::grouped_gemm"):
        weight = next(t for t in given if t.dim() == 3)
        rows = made[0].shape[0] if made else given[0].shape[0]
        return "grouped", 2.0 * rows * weight.shape[1] * weight.shape[2]
    return "memory", 0.0
