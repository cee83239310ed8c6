"""Transfer times between ranks of a machine, and the traffic of context parallelism."""

from __future__ import annotations

from typing import NamedTuple

from dualpipe.models.flops import meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.nn import Router
from dualpipe.parallel.context import method_for
from dualpipe.parallel.context.ring import row_width
from dualpipe.parallel.context.ulysses import heads_width
from dualpipe.plan.machines import Machine
from dualpipe.plan.meta_dispatch import ExpertChoice


def all_to_all_seconds(machine: Machine, sent: float, ranks: int) -> float:
    """Return the seconds of an all-to-all over `ranks` consecutive ranks. NVLink and the network send at once.

    Each rank sends `sent` bytes, the same number to every rank, itself included. The slowest rank sends
    `machine.imbalance` times that.
    """
    if ranks == 1:
        return 0.0
    ranks_in_node = min(ranks, machine.node)
    bytes_per_peer = sent * machine.imbalance / ranks
    nvlink_seconds = bytes_per_peer * (ranks_in_node - 1) / (machine.nvlink * machine.links * 1e9)
    network_seconds = bytes_per_peer * (ranks - ranks_in_node) / (machine.network * machine.networks * 1e9)
    return max(nvlink_seconds, network_seconds) + _latency(machine, between_nodes=ranks > ranks_in_node)


def two_hop_seconds(machine: Machine, sent: float, ranks: int, share: float) -> float:
    """Return the seconds of a dispatch over `ranks` consecutive ranks in two hops: between nodes, then within them.

    Args:
        machine: GPUs and their links.
        sent: bytes that a rank would send in one hop, a row to each rank with an expert of a token.
        ranks: number of expert-parallel ranks, a multiple of the GPUs of a node.
        share: result of `row_share`: rows of the first hop as a fraction of those of one hop.
    """
    nodes = ranks // machine.node
    slowest = sent * machine.imbalance
    first = slowest * share * (nodes - 1) / nodes / (machine.network * machine.networks * 1e9)
    second = slowest * (machine.node - 1) / machine.node / (machine.nvlink * machine.links * 1e9)
    return first + _latency(machine, between_nodes=True) + second + _latency(machine, between_nodes=False)


def takes_two_hops(per_node: int, ranks: int, dispatch: str) -> bool:
    """Return True if a dispatch over `ranks` consecutive ranks takes two hops.

    per_node: ranks that share a node. dispatch: value of parallel.dispatch. Two hops that these nodes do not allow
    count as one hop.
    """
    spans_nodes = ranks > per_node and ranks % per_node == 0
    return spans_nodes and (dispatch == "two_hop" or (dispatch == "auto" and per_node > 1))


def row_share(machine: Machine, ranks: int, gate: Router) -> float:
    """Return how many nodes hold experts of a token, divided by how many ranks do, for experts chosen at random.

    A dispatch sends a row to each of them: to nodes in the first of two hops, to ranks in one hop. Both are bounded by
    the router's groups.

    gate: router of the experts.
    """
    choice = ExpertChoice.of(gate)
    return choice.expected_places(ranks // machine.node) / choice.expected_places(ranks)


def ring_seconds(machine: Machine, size: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of an all-gather or reduce-scatter of `size` bytes over `ranks` ranks, `stride` apart.

    Between nodes, a ring has the combined bandwidth of the network cards of its ranks in one node.
    """
    if ranks <= 1:
        return 0.0
    ranks_in_node = max(1, min(ranks, machine.node // stride))
    rate = machine.nvlink * machine.links
    if ranks_in_node < ranks:
        rate = min(rate, ranks_in_node * machine.network * machine.networks)
    return size * (ranks - 1) / ranks / (rate * 1e9) + _latency(machine, between_nodes=ranks_in_node < ranks)


def send_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Return the seconds to send `size` bytes to the next of `ranks` ranks, `stride` apart.

    If any two neighbours are on different nodes, the network's rate and latency count for all of them.
    """
    if ranks == 1:
        return 0.0
    between_nodes = ranks * stride > machine.node
    rate = machine.network * machine.networks if between_nodes else machine.nvlink * machine.links
    return size / (rate * 1e9) + _latency(machine, between_nodes=between_nodes)


def _latency(machine: Machine, *, between_nodes: bool) -> float:
    """Return the latency of a communication in seconds."""
    return (machine.network_latency if between_nodes else machine.latency) * 1e-6


class ContextNumbers(NamedTuple):
    """Context-parallel traffic of a layer's attention, in elements per token of the rank.

    forward, backward: elements that the rank sends in each. held: the most elements in send and receive buffers at
    once.
    """

    forward: float
    backward: float
    held: float


def context_numbers(config: HubConfig, index: int, sequence_length: int, cp: int, method: str) -> ContextNumbers:
    """Return the traffic of layer `index` on `cp` ranks, by a `method` of `dualpipe.parallel.context.method_for`.

    A ring sends rows of keys and values in the forward, once more in the backward, and their gradients back. The
    all-to-all method sends queries, keys and values, and sends the results back; the backward sends as much.

    Raises:
        ValueError: where `method_for` raises it.
    """
    attention = meta_layer(config, index).self_attn
    if method_for(attention, cp, method) == "all_to_all":
        width = heads_width(attention)
        sent = width * (cp - 1) / cp
        return ContextNumbers(sent, sent, 2.0 * width)  # the send buffer and the receive buffer
    remote_ranks = float(cp - 1)  # ranks whose rows are needed, each with as many tokens as this one
    if attention.window is not None:  # a rank has two parts of a sequence; each needs the window - 1 tokens before it
        remote_ranks = min(remote_ranks, 2 * (attention.window - 1) * cp / sequence_length)
    width = row_width(attention)
    sent = remote_ranks * width
    return ContextNumbers(sent, 2 * sent, 4.0 * width)  # local rows, rows in transit, and the gradients of each
