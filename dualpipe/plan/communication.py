"""Sizes of what context parallelism sends and holds, from a model's configuration alone."""

from __future__ import annotations

from typing import NamedTuple

from dualpipe.models.flops import meta_layer
from dualpipe.models.hub import HubConfig
from dualpipe.parallel.context import method_for
from dualpipe.parallel.context.ring import row_width
from dualpipe.parallel.context.ulysses import heads_width


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
