"""Attention by FlexAttention (Dong et al., arXiv:2412.05496), for windows, documents and sinks on CUDA.

Import this module inside the functions that use it: torch._dynamo adds half a second to every start. Dimension letters:
see `causal_attention`.
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

# Recompile limit of a compiled function. It has variants with and without gradients, documents, sinks and maximum
# logits, in two dtypes, and for the six pairs of query and key parts in ring attention. torch's default limit is 8.
VARIANTS = 128


def make_blocks(
    length: int, window: int | None, documents_BS: Tensor | None, device: torch.device,
    indices: tuple[Tensor, Tensor] | None = None,
) -> BlockMask:
    """Return the mask of the blocks of keys that each block of queries sees, fully or partly.

    indices: indices of the queries (S,) and the keys (T,) in the sequence of `length`; None: the whole sequence.
    """
    # A tensor: a Python number would be a constant of the compiled function, one variant for each window.
    reach = torch.full((), length if window is None else window, device=device)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if indices is not None:
            query_indices, key_indices = indices
            query = query_indices[query]
            key = key_indices[key]
        in_window = (key <= query) & (key > query - reach)
        if documents_BS is None:
            return in_window
        return in_window & (documents_BS[row, query] == documents_BS[row, key])

    make = create_block_mask if device.type == "cpu" else compiled(create_block_mask)
    num_queries, num_keys = (length, length) if indices is None else map(len, indices)
    num_rows = None if documents_BS is None else len(documents_BS)
    return make(sees, num_rows, None, num_queries, num_keys, device=device)


def attention_flex(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, blocks: BlockMask, scale: float, sinks_A: Tensor | None,
    with_max: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `attend`, and with `with_max` the maximum logit of each query (B, A, S), else None.

    Call it compiled: otherwise all (S, S) scores are written.
    """
    y_BASV, lse_BAS, max_logits_BAS = attention_part_flex(
        q_BASD, k_BGSD, v_BGSV, blocks, scale, with_max, lse=sinks_A is not None)
    return y_BASV if sinks_A is None else apply_sinks(y_BASV, lse_BAS, sinks_A), max_logits_BAS


def attention_part_flex(
    q_BASD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor, blocks: BlockMask, scale: float, with_max: bool = False, *,
    lse: bool = True,
) -> tuple[Tensor, Any, Tensor | None]:
    """Compute `attend_part`, and with `with_max` the maximum logit of each query, else None. Call it compiled."""
    common: dict[str, Any] = {"block_mask": blocks, "scale": scale, "enable_gqa": True}
    if not lse and not with_max:
        return flex_attention(q_BASD, k_BGTD, v_BGTV, **common), None, None
    y_BASV, aux = flex_attention(
        q_BASD, k_BGTD, v_BGTV, **common, return_aux=AuxRequest(lse=lse, max_scores=with_max))
    return y_BASV, aux.lse, aux.max_scores


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled `function`, one per process: all layers, stages and micro-batches of equal sizes share it.

    The call that needs one variant more than VARIANTS raises torch._dynamo.exc.FailOnRecompileLimitHit. Without
    `fullgraph`, torch would run that variant uncompiled, which writes all (S, S) scores, and only log it.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    return torch.compile(function, fullgraph=True)
