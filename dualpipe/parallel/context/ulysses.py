"""Attention by heads: each rank gets some of them for all tokens of a sequence, and sends back what they found.

Dimension letters as in `dualpipe.nn.attention`; N ranks, X numbers of all heads together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from dualpipe.nn.attention import Context, attend
from dualpipe.nn.attention.sequence_split import cut
from dualpipe.nn.segments import Communicate, Compute, Segment
from dualpipe.parallel.context.row_exchange import SequenceRanks, SequenceRows, SharedAttention


def heads_width(attention: SharedAttention) -> int:
    """Numbers of a token in the queries, keys, values and results of all heads."""
    return (attention.num_heads + attention.num_kv_heads) * (attention.qk_dim + attention.v_dim)


class ByHeads:
    """Each rank has a part of the heads, one after the other, for all tokens."""

    def __init__(self, ranks: SequenceRanks, attention: SharedAttention) -> None:
        self._split, self._attention, self._size = ranks.split, attention, ranks.split.size
        self._heads, kv_heads = attention.num_heads // self._size, attention.num_kv_heads // self._size
        self._widths = [self._heads * attention.qk_dim, kv_heads * attention.qk_dim, kv_heads * attention.v_dim]
        self._kv_heads = kv_heads
        self._there = SequenceRows(ranks, sum(self._widths), self._tokens)
        self._back = SequenceRows(ranks, self._heads * attention.v_dim, lambda length: self._tokens(length)[::-1])

    def segments(self, recompute: bool) -> list[Segment]:
        """What arrives is no more than what was sent, so it is sent again only where all is computed again."""
        return [
            Compute(self._project, ("normed", "context"), "qkv", recompute),
            Communicate(self._there, ("qkv", "context"), "qkv", recompute, True),
            Compute(self._attend, ("qkv", "context"), "y", recompute),
            Communicate(self._back, ("y", "context"), "y", recompute, True),
            Compute(self._finish, ("y", "context"), "y", recompute),
        ]

    def _tokens(self, length: int) -> tuple[list[int], list[int]]:
        counts = self._split.counts(length)
        return [counts[self._split.rank]] * self._size, list(counts)

    def _project(self, x_BSH: Tensor, context: Context) -> Tensor:
        """Queries, keys and values of each rank's heads, for one rank after the other."""
        q_BASD, *shared = self._attention.project(x_BSH, context)
        k_BGSD, v_BGSV = self._attention.expand_kv(*shared)
        each = (x.to(v_BGSV.dtype) for x in (q_BASD, k_BGSD, v_BGSV))
        rows = [rearrange(x, "B (N A) S D -> (N B S) (A D)", N=self._size) for x in each]
        return torch.cat(rows, -1)

    def _attend(self, rows: Tensor, context: Context) -> Tensor:
        """Attention of the heads here, whose results go back to the rank of each token."""
        chunks = [replace(self._split, rank=rank).chunks(context.length) for rank in range(self._size)]
        received = rows.split([context.batch * tokens for tokens in self._tokens(context.length)[1]])
        early, late = zip(*(
            x.view(context.batch, -1, x.shape[-1]).split([stop - start for start, stop in parts], 1)
            for x, parts in zip(received, chunks)
        ))
        each = torch.cat((*early, *reversed(late)), 1).split(self._widths, -1)
        q_BASD, k_BGSD, v_BGSV = (
            rearrange(x, "B S (A D) -> B A S D", A=heads)
            for x, heads in zip(each, (self._heads, self._kv_heads, self._kv_heads))
        )
        layer, mine = self._attention, slice(self._split.rank * self._heads, (self._split.rank + 1) * self._heads)
        y_BASV = attend(q_BASD, k_BGSD, v_BGSV, context, scale=layer.scale, window=layer.window,
                        sinks_A=None if layer.sinks is None else layer.sinks[mine],
                        peaks_A=None if layer.max_logits_A is None else layer.max_logits_A[mine])
        y_BSX = rearrange(y_BASV, "B A S V -> B S (A V)")
        return torch.cat([cut(y_BSX, parts).flatten(0, 1) for parts in chunks])

    def _finish(self, rows: Tensor, context: Context) -> Tensor:
        y_BASV = rearrange(rows, "(N B S) (A V) -> B (N A) S V", N=self._size, B=context.batch, A=self._heads)
        return self._attention.output(y_BASV)
