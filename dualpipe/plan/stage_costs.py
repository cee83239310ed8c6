"""What the actions of a stage cost on a machine: a roofline by operator, and the engine's order of what overlaps.

An operator takes the longer of its operations and its bytes, each at the rate that its kind of kernel reaches; a part
of an action, from one communication to the next, the longer of its operators and of the host that launches them. What
two actions in turn take is played through in the order of `dualpipe.pipeline.overlap.walk`: one computes while the
other communicates, on fewer multiprocessors.
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

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.flops import attention_flops, meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.plan.communication import all_to_all_seconds, context_numbers, send_seconds
from dualpipe.plan.machines import Machine
from dualpipe.plan.on_meta.meta_run import LayerKind, kinds_of
from dualpipe.plan.operators import IN_BF16, ActionPart, InFP8, LayerParts, Operator, head_parts, layer_parts
from dualpipe.runtime.nccl import EXPERTS
from dualpipe.schedule import Costs

TILE = 128  # rows of a grouped product's tile, of which an expert's last one is half empty
ATTENTION_BACKWARD = 2.5  # times the operations of the forward: five products instead of two


@dataclass(frozen=True)
class Setting:
    """What a layer's costs depend on besides the layer. tokens: of a micro-batch on one rank; length: of a sequence."""

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
    fp8: InFP8 = IN_BF16


class Seconds(NamedTuple):
    """How long a `ActionPart` computes, sends, and computes what it has deferred."""

    compute: float
    sent: float = 0.0
    deferred: float = 0.0


Times = tuple[Seconds, ...]


class Spent(NamedTuple):
    """What one kind of operator takes: launches, operations, bytes, and time."""

    launches: float
    flops: float
    bytes: float
    seconds: float


class LayerCosts(NamedTuple):
    """Parts of a forward and a backward, and what both spend on each kind of operator; "host": beyond the device's."""

    forward: Times
    backward: Times
    spent: tuple[tuple[str, Spent], ...]


class StageCosts(NamedTuple):
    """What the schedule's actions cost, the computing of a micro-batch forward and backward by kind of operator, and
    how much of it is computed again."""

    costs: Costs
    spent: dict[str, Spent]
    again: float
    sent: float


@lru_cache(maxsize=4096)
def layer_costs(
    setting: Setting, kind: LayerKind, attention: float, shared: tuple[float, float] = (0.0, 0.0)
) -> LayerCosts:
    """Those of a layer of this kind. attention: its operations for each token, forward; shared: the seconds in which it
    sends what ranks that share sequences attend to, forward and backward."""
    sparse = isinstance(meta_layer(setting.model, kind.first).mlp, SparseMLP)
    parts = layer_parts(setting.model, kind, setting.ep if sparse else 1, setting.dtype, setting.fp8)
    return _timed(setting, parts, attention, shared)


@lru_cache(maxsize=1024)
def head_costs(setting: Setting) -> LayerCosts:
    """Those of the last norm, and of the head and the loss, as often as there are any."""
    return _timed(setting, head_parts(setting.model, setting.dtype), 0.0)


def _timed(
    setting: Setting, parts: LayerParts, attention: float, shared: tuple[float, float] = (0.0, 0.0)
) -> LayerCosts:
    machine, spent = setting.machine, defaultdict[tuple[str, int], float](float)

    def busy(operators: Iterable[Operator]) -> float:
        device = launches = 0.0
        for each in operators:
            flops, size, seconds = operator_seconds(each, setting, attention)
            device, launches = device + seconds, launches + each.launches
            for i, value in enumerate((each.launches, flops, size, seconds)):
                spent[each.kind, i] += value
        host = launches * machine.launch * 1e-6
        spent["host", 3] += (late := host if machine.host_waits else max(0.0, host - device))
        return device + late

    def timed(part: ActionPart, sharing: float) -> Iterator[Seconds]:
        operators, sent = part.operators, all_to_all_seconds(machine, part.sent * setting.tokens, setting.ep)
        attends = [i for i, each in enumerate(operators) if each.kind in ("attention", "attention backward")]
        if sharing and attends:  # as if none of it were attended to while the rest travels: the other action hides it
            yield Seconds(busy(operators[: attends[0]]), sharing)
            operators = operators[attends[0] :]
        yield Seconds(busy(operators), sent if part.sent else 0.0, busy(part.deferred))

    forward, backward = (
        tuple(chain.from_iterable(timed(part, sharing) for part in side)) for side, sharing in zip(parts, shared))
    kinds = dict.fromkeys(kind for kind, _ in spent)
    return LayerCosts(forward, backward, tuple((kind, Spent(*(spent[kind, i] for i in range(4)))) for kind in kinds))


def operator_seconds(operator: Operator, setting: Setting, attention: float) -> tuple[float, float, float]:
    """Operations, bytes, and seconds on the rank with the most rows. attention: operations for each token, forward."""
    machine, kind = setting.machine, operator.kind
    flops, size = operator.flops * setting.tokens, operator.token_bytes * setting.tokens
    rate, peak = machine.gemm, machine.fp8 if kind.startswith("fp8") else machine.tflops
    if kind in ("attention", "attention backward"):
        flops = attention * setting.tokens * (1.0 if kind == "attention" else ATTENTION_BACKWARD)
        rate = machine.attention if kind == "attention" else machine.attention_backward
    elif kind.endswith("grouped"):
        model = setting.model
        uneven = machine.imbalance if setting.ep > 1 else 1.0
        rows = setting.tokens * setting.ep * model.num_experts_per_tok / model.num_experts
        flops, size = flops * uneven * (1 + (TILE / 2 / rows if not machine.host_waits else 0.0)), size * uneven
        rate = machine.grouped
    size += operator.bytes
    return flops, size, max(flops / (peak * rate * 1e12), size / (machine.hbm * machine.bandwidth * 1e9))


@lru_cache(maxsize=16384)
def stage_costs(setting: Setting, layers: range, *, last: bool) -> StageCosts:
    """Those of a stage of these layers; `last`: with the head, and the layers for multi-token prediction. Embeddings,
    which read a row for each token, are left out."""
    found = _costs_of(setting, layers, last)
    forward = _joined(each.forward for each in found)
    backward = _joined(each.backward for each in reversed(found))
    only_inputs = tuple(part._replace(deferred=0.0) for part in backward)
    machine = setting.machine
    slower = EXPERTS.ctas / machine.multiprocessors if machine.multiprocessors else 0.0
    slower = 1 - machine.beside if machine.beside else slower
    f, b, i = (walk_seconds([parts], slower) for parts in (forward, backward, only_inputs))
    fb, fi = (walk_seconds([forward, other], slower) if setting.overlap else f + alone
              for other, alone in ((backward, b), (only_inputs, i)))
    spent = total(each.spent for each in found)
    again = 0.0
    if setting.recompute:
        once = total(each.spent for each in _costs_of(replace(setting, recompute=()), layers, last))
        again = sum(spent[kind].seconds - once[kind].seconds for kind in once)
    costs = Costs(F=f, B=b, W=sum(part.deferred for part in backward), I=i, FB=fb, pairs={("F", "I"): fi})
    return StageCosts(costs, spent, again, sum(part.sent for part in (*forward, *backward)))


def _costs_of(setting: Setting, layers: range, last: bool) -> list[LayerCosts]:
    model = setting.model
    inside = (*layers, *model.mtp_layers) if last else layers
    found = [
        layer_costs(setting, kind, attention_flops(model, i, setting.length, causal=not setting.machine.host_waits),
                    context_seconds(setting, i))
        for kind, i in zip(kinds_of(model, inside, setting.recompute), inside)
    ]
    return found + ([head_costs(setting)] if last else [])


def context_seconds(setting: Setting, index: int) -> tuple[float, float]:
    """In which a layer sends what ranks that share sequences attend to, forward and backward."""
    if setting.cp == 1:
        return 0.0, 0.0
    numbers = context_numbers(setting.model, index, setting.length, setting.cp, setting.cp_method)
    forward, backward = (send_seconds(setting.machine, each * setting.tokens * setting.dtype.itemsize, setting.cp,
                                      setting.ep) for each in (numbers.forward, numbers.backward))
    return forward, backward


def total(spent: Iterable[Iterable[tuple[str, Spent]]]) -> dict[str, Spent]:
    """What is spent on each kind of operator together."""
    found: dict[str, Spent] = {}
    for kind, one in chain.from_iterable(spent):
        found[kind] = Spent(*map(add, found.get(kind, Spent(0, 0, 0, 0)), one))
    return found


def _joined(layers: Iterable[Times]) -> Times:
    """The parts of layers one after the other: the last of one and the first of the next are one."""
    parts = [Seconds(0.0)]
    for layer in layers:
        first, *rest = layer
        parts[-1] = Seconds(parts[-1].compute + first.compute, first.sent, parts[-1].deferred + first.deferred)
        parts += rest
    return tuple(parts)


def walk_seconds(actions: Iterable[Sequence[Seconds]], slower: float) -> float:
    """Seconds that actions take in turn, each until its next communication, as `dualpipe.pipeline.overlap.walk` runs
    them. One communicates at a time; what computes beside it is slower by the part `slower`."""
    clock = link = 0.0  # when the computing and the communicating stream are through

    def compute(seconds: float) -> float:
        beside = max(0.0, link - clock)
        done = min(seconds, beside * (1 - slower))  # beside the communication
        return clock + seconds + (done / (1 - slower) - done if done else 0.0)

    running = deque((iter(parts), 0.0) for parts in actions)
    while running:
        parts, arrived = running.popleft()
        clock = max(clock, arrived)
        if (part := next(parts, None)) is None:
            continue
        clock = compute(part.compute)
        if part.sent:
            arrived = link = max(link, clock) + part.sent
        clock = compute(part.deferred)
        running.append((parts, arrived))
    return max(clock, link)
