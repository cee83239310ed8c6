"""Seconds that bytes take from rank to rank on a machine, and what ranks that share sequences send."""

from __future__ import annotations

from typing import NamedTuple

from dualpipe.models.flops import meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.parallel.context import method_for
from dualpipe.parallel.context.ring import row_width
from dualpipe.parallel.context.ulysses import heads_width
from dualpipe.plan.machines import Machine


def all_to_all_seconds(machine: Machine, sent: float, ranks: int) -> float:
    """Return the seconds in which each of `ranks` neighbours sends `sent` bytes to all of them, evenly but for the
    imbalance: within a node and to other nodes at once."""
    inside = min(ranks, machine.node)
    if ranks == 1:
        return 0.0
    there = sent * machine.imbalance / ranks
    near = there * (inside - 1) / (machine.nvlink * machine.links * 1e9)
    far = there * (ranks - inside) / (machine.network * machine.networks * 1e9)
    return max(near, far) + _latency(machine, between_nodes=ranks > inside)


def ring_seconds(machine: Machine, size: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds to gather `size` bytes, or to reduce and scatter them, over ranks `stride` apart.

    Around a ring through several nodes goes what the network cards of all its ranks in a node carry together.
    """
    if ranks <= 1:
        return 0.0
    of_a_node = max(1, min(ranks, machine.node // stride))
    rate = machine.nvlink * machine.links
    if of_a_node < ranks:
        rate = min(rate, of_a_node * machine.network * machine.networks)
    return size * (ranks - 1) / ranks / (rate * 1e9) + _latency(machine, between_nodes=of_a_node < ranks)


def send_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Return the seconds for `size` bytes to the next of `ranks` ranks, `stride` apart; between nodes where any pair
    is."""
    if ranks == 1:
        return 0.0
    between_nodes = ranks * stride > machine.node
    rate = machine.network * machine.networks if between_nodes else machine.nvlink * machine.links
    return size / (rate * 1e9) + _latency(machine, between_nodes=between_nodes)


def _latency(machine: Machine, *, between_nodes: bool) -> float:
    return (machine.network_latency if between_nodes else machine.latency) * 1e-6


class ContextNumbers(NamedTuple):
    """Numbers, for each of its own tokens, that a rank sends in a layer's attention where ranks share sequences, and
    the most that are there at once of what is sent and what arrives."""

    forward: float
    backward: float
    held: float


def context_numbers(config: HubConfig, index: int, sequence_length: int, cp: int, method: str) -> ContextNumbers:
    """Return the numbers of a layer on `cp` ranks, by a `method` of `dualpipe.parallel.context.method_for`.

    In a ring, rows of keys and values are sent in the forward, again in the backward, and their gradients back. By
    all-to-all, heads and their results are sent once each way. Raises ValueError where `method_for` does.
    """
    attention = meta_layer(config, index).self_attn
    if method_for(attention, cp, method) == "all_to_all":
        width = heads_width(attention)
        sent = width * (cp - 1) / cp
        return ContextNumbers(sent, sent, 2.0 * width)  # what is sent and what arrives
    others = float(cp - 1)  # whose rows are needed, each with as many tokens as there are here
    if attention.window is not None:  # before each of two chunks, so many tokens
        others = min(others, 2 * (attention.window - 1) * cp / sequence_length)
    sent = others * row_width(attention)
    return ContextNumbers(sent, 2 * sent, 4.0 * row_width(attention))  # rows here, rows on their way, their gradients
