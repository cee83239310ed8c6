"""Head-parallel attention by all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509).

One all-to-all gives each rank some of the heads for all tokens, a second one returns their outputs.

Dimension letters as in `dualpipe.nn.attention`; N ranks, X elements of all heads together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from dualpipe.nn.attention import Context, attend
from dualpipe.nn.attention.sequence_split import slice_sequence
from dualpipe.nn.segments import Communicate, Compute, Segment
from dualpipe.parallel.context.row_exchange import SequenceRanks, SequenceRows, SharedAttention


def heads_width(attention: SharedAttention) -> int:
    """Return the number of elements of a token in queries, keys, values and outputs of all heads."""
    return (attention.num_heads + attention.num_kv_heads) * (attention.qk_dim + attention.v_dim)


class UlyssesAttention:
    """Attention of one layer, with a contiguous part of the heads on each rank, for all tokens."""

    def __init__(self, ranks: SequenceRanks, attention: SharedAttention) -> None:
        self._split = ranks.split
        self._attention = attention
        self._size = ranks.split.size
        self._heads = attention.num_heads // self._size
        self._kv_heads = attention.num_kv_heads // self._size
        self._qkv_widths = [
            self._heads * attention.qk_dim, self._kv_heads * attention.qk_dim, self._kv_heads * attention.v_dim]
        self._scatter = SequenceRows(ranks, sum(self._qkv_widths), self._scatter_counts)
        self._gather = SequenceRows(ranks, self._heads * attention.v_dim, self._gather_counts)

    def segments(self, recompute: bool) -> list[Segment]:
        """Return segments that read "normed" and "context" and write "y".

        A rank receives no more than it sends, so received rows are saved, and sent again only with `recompute`.
        """
        return [
            Compute(self._project, ("normed", "context"), "qkv", recompute),
            Communicate(self._scatter, ("qkv", "context"), "qkv", recompute, of_attention=True),
            Compute(self._attend, ("qkv", "context"), "y", recompute),
            Communicate(self._gather, ("y", "context"), "y", recompute, of_attention=True),
            Compute(self._output, ("y", "context"), "y", recompute),
        ]

    def _scatter_counts(self, length: int) -> tuple[list[int], list[int]]:
        """Return the tokens sent to each rank (all of this rank's) and received from each (all of its own)."""
        counts = self._split.counts(length)
        return [counts[self._split.rank]] * self._size, list(counts)

    def _gather_counts(self, length: int) -> tuple[list[int], list[int]]:
        """Return the tokens sent and received on the way back."""
        sent, received = self._scatter_counts(length)
        return received, sent

    def _project(self, x_BSH: Tensor, context: Context) -> Tensor:
        """Return queries, keys and values side by side, (N * B * S, C): rows of each rank's heads, in rank order."""
        q_BASD, *shared = self._attention.project(x_BSH, context)
        k_BGSD, v_BGSV = self._attention.expand_kv(*shared)
        rows = [rearrange(x.to(v_BGSV.dtype), "B (N A) S D -> (N B S) (A D)", N=self._size)
                for x in (q_BASD, k_BGSD, v_BGSV)]
        return torch.cat(rows, -1)

    def _attend(self, rows: Tensor, context: Context) -> Tensor:
        """Return attention of this rank's heads, as rows in the order of the ranks that hold their tokens."""
        chunks = [replace(self._split, rank=rank).chunks(context.length) for rank in range(self._size)]
        qkv_BSX = self._whole_sequence(rows, context, chunks)
        q, k, v = qkv_BSX.split(self._qkv_widths, -1)
        q_BASD = rearrange(q, "B S (A D) -> B A S D", A=self._heads)
        k_BGSD = rearrange(k, "B S (G D) -> B G S D", G=self._kv_heads)
        v_BGSV = rearrange(v, "B S (G V) -> B G S V", G=self._kv_heads)
        layer = self._attention
        local_heads = slice(self._split.rank * self._heads, (self._split.rank + 1) * self._heads)
        y_BASV = attend(q_BASD, k_BGSD, v_BGSV, context, scale=layer.scale, window=layer.window,
                        sinks_A=None if layer.sinks is None else layer.sinks[local_heads],
                        max_logits_A=None if layer.max_logits_A is None else layer.max_logits_A[local_heads])
        y_BSX = rearrange(y_BASV, "B A S V -> B S (A V)")
        return torch.cat([slice_sequence(y_BSX, rank_chunks).flatten(0, 1) for rank_chunks in chunks])

    def _whole_sequence(self, rows: Tensor, context: Context, chunks: list) -> Tensor:
        """Return received rows (B, S, C) in sequence order: early chunks by rank, late ones by descending rank."""
        counts = [context.batch * tokens for tokens in self._scatter_counts(context.length)[1]]
        early: list[Tensor] = []
        late: list[Tensor] = []
        for received, rank_chunks in zip(rows.split(counts), chunks):
            early_chunk, late_chunk = received.view(context.batch, -1, received.shape[-1]).split(
                [stop - start for start, stop in rank_chunks], 1)
            early.append(early_chunk)
            late.append(late_chunk)
        return torch.cat((*early, *reversed(late)), 1)

    def _output(self, rows: Tensor, context: Context) -> Tensor:
        """Return the layer's output from the outputs of all heads."""
        y_BASV = rearrange(rows, "(N B S) (A V) -> B (N A) S V", N=self._size, B=context.batch, A=self._heads)
        return self._attention.output(y_BASV)
