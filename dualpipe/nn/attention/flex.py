"""Attention by FlexAttention (Dong et al., arXiv:2412.05496), for windows, documents and sinks on CUDA.

Imported where it is used, because torch._dynamo takes half a second of every start. Dimension letters as in
`causal_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from dualpipe.nn.attention.sinks import apply_sinks

# Of a compiled function: with and without gradients, documents, sinks and largest scores, in two dtypes and for the six
# pairs of parts of a ring. By default torch stops compiling a function at its eighth variant.
VARIANTS = 128


def make_blocks(
    length: int, window: int | None, documents_BS: Tensor | None, device: torch.device,
    places: tuple[Tensor, Tensor] | None = None,
) -> BlockMask:
    """Which blocks of keys a block of queries sees, in full or in part. places: where in the sequence of `length` the
    queries are (S,), and the keys (T,); None: from its start to its end."""
    # A tensor: a number would be compiled in, once for each window.
    reach = torch.full((), length if window is None else window, device=device)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if places is not None:
            query, key = places[0][query], places[1][key]
        near = (key <= query) & (key > query - reach)
        return near if documents_BS is None else near & (documents_BS[row, query] == documents_BS[row, key])

    make = create_block_mask if device.type == "cpu" else compiled(create_block_mask)
    queries, keys = (length, length) if places is None else map(len, places)
    return make(sees, None if documents_BS is None else len(documents_BS), None, queries, keys, device=device)


def attention_flex(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, blocks: BlockMask, scale: float, sinks_A: Tensor | None,
    peaks: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`attend`, and with `peaks` the largest score of each query (B, A, S); to be compiled, so that the scores are not
    written."""
    y_BASV, lse_BAS, largest_BAS = attention_part_flex(
        q_BASD, k_BGSD, v_BGSV, blocks, scale, peaks, lse=sinks_A is not None)
    return y_BASV if sinks_A is None else apply_sinks(y_BASV, lse_BAS, sinks_A), largest_BAS


def attention_part_flex(
    q_BASD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor, blocks: BlockMask, scale: float, peaks: bool = False, *,
    lse: bool = True,
) -> tuple[Tensor, Any, Tensor | None]:
    """`attend_part`, and the same; to be compiled likewise."""
    common: dict[str, Any] = {"block_mask": blocks, "scale": scale, "enable_gqa": True}
    if not lse and not peaks:
        return flex_attention(q_BASD, k_BGTD, v_BGTV, **common), None, None
    y_BASV, aux = flex_attention(
        q_BASD, k_BGTD, v_BGTV, **common, return_aux=AuxRequest(lse=lse, max_scores=peaks))
    return y_BASV, aux.lse, aux.max_scores


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled, one for the process: it serves all layers, stages and micro-batches of like sizes.

    Raises torch._dynamo.exc.FailOnRecompileLimitHit at the call that needs one variant more than VARIANTS. Without
    `fullgraph`, torch would run that variant uncompiled, which writes all (S, S) scores, and only log it.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    return torch.compile(function, fullgraph=True)
