"""Costs of a stage's actions on a machine: a roofline per operator, and the engine's order of overlapped actions.

An operator takes the time of its FLOPs or of its memory traffic, whichever is longer, each at the rate that its kind of
kernel reaches. A part of an action, from one communication to the next, takes the time of its operators on the device
or of their launches on the host, whichever is longer. Two overlapped actions are simulated in the order of
`dualpipe.pipeline.overlap.walk`: one computes while the other communicates, on fewer multiprocessors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import add
from typing import NamedTuple

import torch

from dualpipe.kernels.grouped_gemm_tiles import merged_sizes, most_merged
from dualpipe.models.decoder import SparseMLP
from dualpipe.models.flops import attention_flops, meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.nn.head import PART_BYTES, rows_per_part
from dualpipe.plan.communication import (
    all_to_all_seconds,
    context_numbers,
    row_share,
    send_seconds,
    takes_two_hops,
    two_hop_seconds,
)
from dualpipe.plan.machines import Machine
from dualpipe.plan.meta_run import LayerKind, kinds_of
from dualpipe.plan.operators import NO_FP8, ActionPart, FP8Usage, LayerParts, Operator, head_parts, layer_parts
from dualpipe.runtime.nccl import EXPERTS
from dualpipe.schedule import Costs
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig

TILE = 128  # rows of a grouped GEMM's tile; on average, half of each expert's last tile is empty
MERGED = range(2, 9)  # numbers of merged "W" for which the cost of each is computed; with more, it is taken as with 8
ATTENTION_BACKWARD = 2.5  # times the FLOPs of the forward: five GEMMs instead of two


@dataclass(frozen=True)
class Setting:
    """Inputs of a layer's costs, apart from the layer itself.

    tokens: tokens per micro-batch on one rank. length: tokens per sequence. recompute: rules of `Recompute`. overlap:
    True if the actions of a pair overlap. dispatch: how rows get to experts, as parallel.dispatch says. part_bytes:
    limit of the logits that exist at once; 0: none. lora: adapters of the model.
    """

    model: HubConfig
    machine: Machine
    dtype: torch.dtype
    ep: int
    tokens: int
    length: int
    recompute: tuple[str, ...] = ()
    overlap: bool = True
    cp: int = 1
    cp_method: str = "auto"
    fp8: FP8Usage = NO_FP8
    dispatch: str = "auto"
    part_bytes: int = PART_BYTES
    lora: LoRAConfig = NO_ADAPTERS


class Seconds(NamedTuple):
    """Times of an `ActionPart` in seconds: its compute, its communication, and its deferred weight gradients."""

    compute: float
    sent: float = 0.0
    deferred: float = 0.0


Times = tuple[Seconds, ...]


class OperatorTotal(NamedTuple):
    """Totals of one kind of operator: launches, FLOPs, bytes moved, and seconds."""

    launches: float
    flops: float
    bytes: float
    seconds: float


class LayerCosts(NamedTuple):
    """Times of a layer's forward and backward parts, and the totals of both by kind of operator.

    The kind "host" is the time by which launches on the host exceed compute on the device. merged: seconds of the
    weight gradients per micro-batch if those of several micro-batches are merged, one value for each number in
    `MERGED`; empty if they never are.
    """

    forward: Times
    backward: Times
    spent: tuple[tuple[str, OperatorTotal], ...]
    merged: tuple[float, ...] = ()


class StageCosts(NamedTuple):
    """Costs of a stage for one micro-batch.

    costs: seconds of its actions. spent: totals of forward and backward by kind of operator, recompute included.
    recomputed: seconds of recompute. sent: seconds of communication, hidden or not. merged_w: seconds of a "W" that is
    merged with others, one value for each number in `MERGED`; empty if they never are.
    """

    costs: Costs
    spent: dict[str, OperatorTotal]
    recomputed: float
    sent: float
    merged_w: tuple[float, ...] = ()


@lru_cache(maxsize=4096)
def layer_costs(
    setting: Setting, kind: LayerKind, attention: float, cp_seconds: tuple[float, float] = (0.0, 0.0)
) -> LayerCosts:
    """Return the costs of a layer of this kind.

    Args:
        setting: model, machine and layout.
        kind: kind of the layer.
        attention: FLOPs of its attention per token, forward.
        cp_seconds: seconds of context-parallel communication in the forward and in the backward.
    """
    mlp = meta_layer(setting.model, kind.first).mlp
    is_sparse = isinstance(mlp, SparseMLP)
    ep = setting.ep if is_sparse else 1
    parts = layer_parts(setting.model, kind, ep, setting.dtype, setting.fp8, setting.lora)
    share = 1.0
    if is_sparse and takes_two_hops(setting.machine.node, setting.ep, setting.dispatch):
        share = row_share(setting.machine, setting.ep, mlp.gate)
    return _time_parts(setting, parts, attention, cp_seconds, share)


@lru_cache(maxsize=1024)
def head_costs(setting: Setting) -> LayerCosts:
    """Return the costs of the last norm, and of all heads and losses, those of multi-token prediction included."""
    limit = setting.part_bytes
    fits = limit and setting.tokens <= rows_per_part(setting.model.vocab_size, setting.dtype, limit)
    return _time_parts(setting, head_parts(setting.model, setting.dtype, 0 if fits else limit, setting.lora), 0.0)


def _time_parts(
    setting: Setting, parts: LayerParts, attention: float, cp_seconds: tuple[float, float] = (0.0, 0.0),
    share: float = 1.0,
) -> LayerCosts:
    """Return the times of the parts. attention, cp_seconds: as in `layer_costs`. share: as in `two_hop_seconds`."""
    timer = _PartTimer(setting, attention, share)
    cp_forward, cp_backward = cp_seconds
    forward = tuple(chain.from_iterable(timer.part_seconds(part, cp_forward) for part in parts.forward))
    backward = tuple(chain.from_iterable(timer.part_seconds(part, cp_backward) for part in parts.backward))
    deferred = [operator for part in parts.backward for operator in part.deferred]
    return LayerCosts(forward, backward, timer.totals(), _merged_seconds(deferred, setting))


def _merged_seconds(deferred: Sequence[Operator], setting: Setting) -> tuple[float, ...]:
    """Return the seconds of deferred weight gradients per micro-batch, if those of several are merged.

    One grouped GEMM then has the FLOPs and rows of all of them, but reads and writes the accumulators once. The
    reference on the CPU adds one micro-batch after the other, so that merging saves nothing there.
    """
    machine = setting.machine
    if machine.host_waits:
        return ()
    arch = 90 if machine.fp8 else 80  # compute capability: GPUs without FP8 are taken to be older than Hopper
    most = most_merged(arch)
    seconds_by_size = {size: _seconds_if_merged(deferred, setting, size) for size in range(1, most + 1)}
    return tuple(sum(size * seconds_by_size[size] for size in merged_sizes(count, most)) / count for count in MERGED)


def _seconds_if_merged(deferred: Iterable[Operator], setting: Setting, size: int) -> float:
    """Return the seconds per micro-batch with grouped GEMMs for `size` micro-batches."""
    device = 0.0
    host = 0.0
    for operator in deferred:
        count = 1
        if operator.kind == "grouped":
            count = size
            operator = operator._replace(flops=size * operator.flops, token_bytes=size * operator.token_bytes)
        device += operator_seconds(operator, setting, 0.0)[2] / count
        host += host_seconds(operator, setting.machine) / count
    return max(device, host)


class _PartTimer:
    """Timer of action parts. It also sums launches, FLOPs, bytes and seconds by kind of operator."""

    def __init__(self, setting: Setting, attention: float, share: float) -> None:
        self._setting = setting
        self._attention = attention
        self._share = share
        self._totals = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0, 0.0])

    def totals(self) -> tuple[tuple[str, OperatorTotal], ...]:
        """Return the totals by kind of operator."""
        return tuple((kind, OperatorTotal(*values)) for kind, values in self._totals.items())

    def part_seconds(self, part: ActionPart, cp_seconds: float) -> Iterator[Seconds]:
        """Yield the times of a part: two if context-parallel communication of `cp_seconds` splits it.

        The communication comes before attention, which is assumed to wait for all of it. So only the other action of a
        pair can hide it, although a ring also attends to some rows while it receives the next ones.
        """
        setting = self._setting
        operators = part.operators
        sent_bytes = part.sent * setting.tokens
        if part.by_node and takes_two_hops(setting.machine.node, setting.ep, setting.dispatch):
            sent = two_hop_seconds(setting.machine, sent_bytes, setting.ep, self._share)
        else:
            sent = all_to_all_seconds(setting.machine, sent_bytes, setting.ep)
        attention_at = [i for i, operator in enumerate(operators)
                        if operator.kind in ("attention", "attention backward")]
        if cp_seconds and attention_at:
            yield Seconds(self._compute_seconds(operators[: attention_at[0]]), cp_seconds)
            operators = operators[attention_at[0] :]
        compute = self._compute_seconds(operators)
        deferred = self._compute_seconds(part.deferred)
        yield Seconds(compute, sent if part.sent else 0.0, deferred)

    def _compute_seconds(self, operators: Iterable[Operator]) -> float:
        """Return the seconds of operators on the device, with the host time that exceeds them."""
        machine = self._setting.machine
        device = 0.0
        host = 0.0
        for operator in operators:
            flops, size, seconds = operator_seconds(operator, self._setting, self._attention)
            device += seconds
            host += host_seconds(operator, machine)
            values = self._totals[operator.kind]
            for i, value in enumerate((operator.launches, flops, size, seconds)):
                values[i] += value
        host_excess = host if machine.host_waits else max(0.0, host - device)
        self._totals["host"][3] += host_excess
        return device + host_excess


def host_seconds(operator: Operator, machine: Machine) -> float:
    """Return the seconds that the host takes to launch an operator."""
    first = machine.launch
    if operator.kind.endswith("grouped"):
        first = machine.launch_grouped or first
    elif operator.is_triton:
        first = machine.launch_kernel or first
    return (first + (operator.launches - 1) * machine.launch) * 1e-6


def operator_seconds(operator: Operator, setting: Setting, attention: float) -> tuple[float, float, float]:
    """Return FLOPs, bytes and seconds of an operator, on the rank with the most rows.

    Args:
        operator: operator with FLOPs and bytes per token.
        setting: model, machine and layout.
        attention: FLOPs of attention per token, forward.
    """
    machine = setting.machine
    kind = operator.kind
    flops = operator.flops * setting.tokens
    size = operator.token_bytes * setting.tokens
    peak = machine.fp8 if kind.startswith("fp8") else machine.tflops
    efficiency = machine.gemm
    if kind == "attention":
        flops = attention * setting.tokens
        efficiency = machine.attention
    elif kind == "attention backward":
        flops = attention * setting.tokens * ATTENTION_BACKWARD
        efficiency = machine.attention_backward
    elif kind.endswith("grouped"):
        model = setting.model
        imbalance = machine.imbalance if setting.ep > 1 else 1.0
        rows_per_expert = setting.tokens * setting.ep * model.num_experts_per_tok / model.num_experts
        empty_rows = 0.0 if machine.host_waits else TILE / 2 / rows_per_expert  # as a fraction of an expert's rows
        flops = flops * imbalance * (1 + empty_rows)
        size *= imbalance
        efficiency = machine.grouped
    size += operator.bytes
    compute_seconds = flops / (peak * efficiency * 1e12)
    memory_seconds = size / (machine.hbm * machine.bandwidth * 1e9)
    return flops, size, max(compute_seconds, memory_seconds)


@lru_cache(maxsize=16384)
def stage_costs(setting: Setting, layers: range, *, last: bool) -> StageCosts:
    """Return the costs of a stage of these layers.

    Embeddings, which read one row per token, are left out.

    Args:
        setting: model, machine and layout.
        layers: indices of the stage's layers.
        last: True for the last stage, which also has the layers for multi-token prediction, and the head.
    """
    all_costs = _costs_by_layer(setting, layers, last)
    forward = _join(costs.forward for costs in all_costs)
    backward = _join(costs.backward for costs in reversed(all_costs))
    input_backward = tuple(part._replace(deferred=0.0) for part in backward)
    slowdown = _slowdown(setting.machine)
    f = walk_seconds([forward], slowdown)
    b = walk_seconds([backward], slowdown)
    i = walk_seconds([input_backward], slowdown)
    fb = walk_seconds([forward, backward], slowdown) if setting.overlap else f + b
    fi = walk_seconds([forward, input_backward], slowdown) if setting.overlap else f + i
    w = sum(part.deferred for part in backward)
    spent = total(costs.spent for costs in all_costs)
    recomputed = 0.0
    if setting.recompute:
        plain_costs = _costs_by_layer(replace(setting, recompute=()), layers, last)
        plain = total(costs.spent for costs in plain_costs)
        recomputed = sum(spent[kind].seconds - plain[kind].seconds for kind in plain)
    costs = Costs(F=f, B=b, W=w, I=i, FB=fb, pairs={("F", "I"): fi})
    sent = sum(part.sent for part in (*forward, *backward))
    merged_w = tuple(map(sum, zip(*(costs.merged for costs in all_costs))))
    return StageCosts(costs, spent, recomputed, sent, merged_w)


def _slowdown(machine: Machine) -> float:
    """Return the fraction of its speed that compute loses beside a communication."""
    if machine.beside:
        return 1 - machine.beside
    return EXPERTS.ctas / machine.multiprocessors if machine.multiprocessors else 0.0


def _costs_by_layer(setting: Setting, layers: range, last: bool) -> list[LayerCosts]:
    """Return the costs of each layer of a stage, and of the head on the last one."""
    model = setting.model
    is_causal = not setting.machine.host_waits  # attention on the CPU computes the scores of all pairs
    indices = (*layers, *model.mtp_layers) if last else tuple(layers)
    all_costs = []
    for kind, index in zip(kinds_of(model, indices, setting.recompute, lora=setting.lora, cp=setting.cp), indices):
        attention = attention_flops(model, index, setting.length, causal=is_causal)
        all_costs.append(layer_costs(setting, kind, attention, context_seconds(setting, index)))
    if last:
        all_costs.append(head_costs(setting))
    return all_costs


def context_seconds(setting: Setting, index: int) -> tuple[float, float]:
    """Return the seconds of context-parallel communication of layer `index`, in the forward and in the backward."""
    if setting.cp == 1:
        return 0.0, 0.0
    numbers = context_numbers(setting.model, index, setting.length, setting.cp, setting.cp_method)
    bytes_per_number = setting.tokens * setting.dtype.itemsize
    forward = send_seconds(setting.machine, numbers.forward * bytes_per_number, setting.cp, setting.ep)
    backward = send_seconds(setting.machine, numbers.backward * bytes_per_number, setting.cp, setting.ep)
    return forward, backward


def total(spent: Iterable[Iterable[tuple[str, OperatorTotal]]]) -> dict[str, OperatorTotal]:
    """Sum totals by kind of operator."""
    sums: dict[str, OperatorTotal] = {}
    for kind, values in chain.from_iterable(spent):
        sums[kind] = OperatorTotal(*map(add, sums.get(kind, OperatorTotal(0, 0, 0, 0)), values))
    return sums


def _join(layers: Iterable[Times]) -> Times:
    """Return the parts of consecutive layers. The last part of a layer and the first of the next become one."""
    parts = [Seconds(0.0)]
    for first, *others in layers:
        last = parts[-1]
        parts[-1] = Seconds(last.compute + first.compute, first.sent, last.deferred + first.deferred)
        parts += others
    return tuple(parts)


def walk_seconds(actions: Iterable[Sequence[Seconds]], slower: float) -> float:
    """Return the seconds of actions that take turns at communications, as `dualpipe.pipeline.overlap.walk` runs them.

    One action communicates at a time. Compute beside a communication loses the fraction `slower` of its speed.
    """
    compute_end = 0.0  # time at which the compute stream is done
    communication_end = 0.0  # time at which the communication stream is done

    def end_of_compute(seconds: float) -> float:
        overlapped = max(0.0, communication_end - compute_end)
        done = min(seconds, overlapped * (1 - slower))  # work done beside the communication, in seconds at full speed
        delay = done / (1 - slower) - done if done else 0.0
        return compute_end + seconds + delay

    running = deque((iter(parts), 0.0) for parts in actions)
    while running:
        parts, arrival = running.popleft()
        compute_end = max(compute_end, arrival)
        part = next(parts, None)
        if part is None:
            continue
        compute_end = end_of_compute(part.compute)
        if part.sent:
            communication_end = max(communication_end, compute_end) + part.sent
            arrival = communication_end
        compute_end = end_of_compute(part.deferred)
        running.append((parts, arrival))
    return max(compute_end, communication_end)
