"""Blockwise attention to keys and values of other ranks: one block of rows at a time, merged by log-sum-exp.

Dimension letters as in `dualpipe.nn.attention`; T tokens of a block, C elements in the row of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.nn.attention import Context, apply_sinks, attend_part
from dualpipe.nn.attention.sequence_split import Ranges, slice_sequence
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Compute, Segment
from dualpipe.parallel.context.row_exchange import SequenceRanks, SequenceRows, SharedAttention


def row_width(attention: SharedAttention) -> int:
    """Return the number of elements, C, that a ring or a window sends for a token."""
    return sum(heads * dim for heads, dim in attention.shared)


@dataclass
class _Merged:
    """Final output of a rank's queries over all blocks, with its log-sum-exp, for the backward of every block.

    It is saved, so that a repeated exchange of rows does not recompute attention. The fields are None until the last
    block.
    """

    y_BASV: Tensor | None = None
    lse_BAS: Tensor | None = None


class _AttendedRanges(NamedTuple):
    """Ranges of queries that attend to ranges of keys, as positions in the sequence."""

    queries: Ranges
    keys: Ranges
    first: int = 0  # index of the first of these queries on this rank


class _BlockwiseAttention:
    """Attention of one layer to one block of rows after the other; base class of ring and window."""

    def __init__(self, ranks: SequenceRanks, attention: SharedAttention) -> None:
        self._ranks = ranks
        self._attention = attention
        self._width = row_width(attention)
        self._rank = ranks.split.rank
        self._size = ranks.split.size
        # Parameters that `expand_kv` uses get their gradients in the backward of a block, which must run if the layer
        # is trained, even with frozen inputs. The layer does not say which parameters these are.
        self._is_trained = any(p.requires_grad for p in cast(nn.Module, attention).parameters())

    def _project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, Tensor, _Merged]:
        """Return queries, rows (B * T, C), and an empty `_Merged`."""
        q_BASD, *shared = self._attention.project(x_BSH, context)
        # A norm may return a tensor in a wider dtype than the others.
        narrowest = min((tensor.dtype for tensor in shared), key=lambda dtype: dtype.itemsize)
        rows = torch.cat([tensor.to(narrowest).transpose(1, 2).flatten(2) for tensor in shared], -1)
        return q_BASD, rows.flatten(0, 1), _Merged()

    def _ranges(self, block: int, length: int) -> _AttendedRanges:
        """Return the queries and keys of a block, for a sequence of `length` tokens."""
        raise NotImplementedError

    def _block(self, block: int, num_blocks: int) -> Compute:
        """Return the segment that attends to the rows "kv<block>" and merges the result with earlier blocks."""
        earlier = ("y", "lse") if block else ()
        is_last = block == num_blocks - 1

        def run(
            q_BASD: Tensor, rows: Tensor, merged: _Merged, context: Context, *earlier: Tensor
        ) -> tuple[Tensor, Tensor]:
            ranges = self._ranges(block, context.length)
            if torch.is_grad_enabled() and not (q_BASD.requires_grad or rows.requires_grad) and self._is_trained:
                q_BASD = q_BASD.detach().requires_grad_()  # makes autograd run the backward of the block
            attend_to = partial(self._attend, context, ranges)
            y, lse = earlier or (None, None)
            return _AttendBlock.apply(
                q_BASD, rows.view(context.batch, -1, self._width), y, lse, attend_to, ranges.first, merged, is_last
            )

        return Compute(run, ("q", f"kv{block}", "merged", "context", *earlier), ("y", "lse"), recompute=True)

    def _attend(
        self, context: Context, ranges: _AttendedRanges, q_BASD: Tensor, rows_BTC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output of one block and its log-sum-exp, for the queries from `ranges.first` on."""
        layer = self._attention
        num_tokens = _num_tokens(ranges.keys)
        widths = [heads * dim for heads, dim in layer.shared]
        shared = [rearrange(rows, "B T (G D) -> B G T D", G=heads)
                  for rows, (heads, _) in zip(rows_BTC[:, :num_tokens].split(widths, -1), layer.shared)]
        k_BGTD, v_BGTV = layer.expand_kv(*shared)
        return attend_part(q_BASD[:, :, ranges.first :], k_BGTD, v_BGTV, context, ranges.queries, ranges.keys,
                           scale=layer.scale, window=layer.window, max_logits_A=layer.max_logits_A)

    def _output(self, y_BASV: Tensor, lse_BAS: Tensor) -> Tensor:
        """Return the layer's output, with the share of the sinks."""
        if self._attention.sinks is not None:
            y_BASV = apply_sinks(y_BASV, lse_BAS, self._attention.sinks)
        return self._attention.output(y_BASV)

    def _with_ends(self, blocks: Sequence[Segment], recompute: bool) -> list[Segment]:
        """Return all segments of the layer: the projections, the blocks and the output."""
        return [
            Compute(self._project, ("normed", "context"), ("q", "kv0", "merged"), recompute), *blocks,
            Compute(self._output, ("y", "lse"), "y", recompute),
        ]


class RingAttention(_BlockwiseAttention):
    """Attention with rows that move around a ring: the rows of block i are those of the i-th rank before this one."""

    def segments(self, recompute: bool) -> list[Segment]:
        """Return the blocks in order, each after the start of the hop that brings the rows of the next block."""
        segments: list[Segment] = []
        for block in range(self._size):
            if block + 1 < self._size:
                hop = SequenceRows(self._ranks, self._width, partial(self._hop_counts, block))
                segments.append(Communicate(hop, (f"kv{block}", "context"), f"kv{block + 1}", recompute=True,
                                            of_attention=True))
            segments.append(self._block(block, self._size))
        return self._with_ends(segments, recompute)

    def _hop_counts(self, block: int, length: int) -> tuple[list[int], list[int]]:
        """Return the tokens sent to each rank and received from each, in the hop from a block to the next."""
        counts = self._ranks.split.counts(length)  # by rank; negative indices go around the ring
        sent = [0] * self._size
        received = [0] * self._size
        sent[(self._rank + 1) % self._size] = counts[self._rank - block]
        received[self._rank - 1] = counts[self._rank - block - 1]
        return sent, received

    def _ranges(self, block: int, length: int) -> _AttendedRanges:
        """Return the queries and keys that are not fully masked in a block.

        Each rank has an early and a late chunk, counted from both ends of the sequence. The early chunk of an earlier
        rank precedes both chunks of this rank, and its late chunk follows both; both chunks of a later rank lie between
        those of this rank.
        """
        source = (self._rank - block) % self._size
        queries = tuple(self._ranks.split.chunks(length))
        keys = tuple(replace(self._ranks.split, rank=source).chunks(length))
        if source < self._rank:
            return _AttendedRanges(queries, keys[:1])
        if block == 0:
            return _AttendedRanges(queries, keys)
        early_length = queries[0][1] - queries[0][0]
        return _AttendedRanges(queries[1:], keys, early_length)


class WindowAttention(_BlockwiseAttention):
    """Attention with a sliding window: block 0 has this rank's rows, block 1 the rows of others within the window.

    A rank receives the rows of all other tokens at most, each once: no more than in a ring.
    """

    def segments(self, recompute: bool) -> list[Segment]:
        """Return the exchange of rows, overlapped with the block of this rank's rows, then the block of the others'."""
        if self._attention.window == 1:  # a token attends to itself only
            return self._with_ends([self._block(0, 1)], recompute)
        exchange = SequenceRows(self._ranks, self._width, self._token_counts)
        return self._with_ends([
            Compute(self._pack, ("kv0", "context"), "sent", recompute=True),
            Communicate(exchange, ("sent", "context"), "received", recompute=True, of_attention=True),
            self._block(0, 2),
            Compute(self._unpack, ("received", "context"), "kv1", recompute=True),
            self._block(1, 2),
        ], recompute)

    def _ranges_to_send(self, length: int, source: int, destination: int) -> list[tuple[int, int]]:
        """Return the ranges of the source rank's tokens that are in a window of the destination rank's tokens."""
        if source == destination:
            return []
        split = self._ranks.split
        reach = (self._attention.window or length) - 1
        (early_start, early_stop), (late_start, _) = replace(split, rank=destination).chunks(length)
        before_early = (max(0, early_start - reach), early_start)
        before_late = (max(early_stop, late_start - reach), late_start)
        ranges: list[tuple[int, int]] = []
        for needed_start, needed_stop in (before_early, before_late):
            for chunk_start, chunk_stop in replace(split, rank=source).chunks(length):
                start = max(needed_start, chunk_start)
                stop = min(needed_stop, chunk_stop)
                if start < stop:
                    ranges.append((start, stop))
        return ranges

    def _token_counts(self, length: int) -> tuple[list[int], list[int]]:
        """Return the numbers of tokens sent to each rank and received from each."""
        sent = [_num_tokens(self._ranges_to_send(length, self._rank, other)) for other in range(self._size)]
        received = [_num_tokens(self._ranges_to_send(length, other, self._rank)) for other in range(self._size)]
        return sent, received

    def _pack(self, rows: Tensor, context: Context) -> Tensor:
        """Return this rank's rows that others need, (B * T, C) for each rank in order."""
        rows_BSC = rows.view(context.batch, -1, self._width)
        early, late = context.split.chunks(context.length)
        gap = late[0] - early[1]

        def local_index(position: int) -> int:
            return position - early[0] - (gap if position >= late[0] else 0)

        packed: list[Tensor] = []
        for other in range(self._size):
            ranges = self._ranges_to_send(context.length, self._rank, other)
            if ranges:
                local_ranges = [(local_index(start), local_index(stop - 1) + 1) for start, stop in ranges]
                packed.append(slice_sequence(rows_BSC, local_ranges).flatten(0, 1))
        return torch.cat(packed) if packed else rows[:0]

    def _unpack(self, rows: Tensor, context: Context) -> Tensor:
        """Return received rows of all ranks, joined along the sequence, (B * T, C)."""
        counts = [tokens * context.batch for tokens in self._token_counts(context.length)[1]]
        received = [part.view(context.batch, -1, self._width) for part in rows.split(counts) if len(part)]
        return torch.cat(received, 1).flatten(0, 1)

    def _ranges(self, block: int, length: int) -> _AttendedRanges:
        local = tuple(self._ranks.split.chunks(length))
        if block == 0:
            return _AttendedRanges(local, local)
        received: list[tuple[int, int]] = []
        for other in range(self._size):
            received += self._ranges_to_send(length, other, self._rank)
        return _AttendedRanges(local, tuple(received))


def _num_tokens(ranges: Sequence[tuple[int, int]]) -> int:
    """Return the number of tokens in ranges of positions."""
    return sum(stop - start for start, stop in ranges)


class _AttendBlock(torch.autograd.Function):
    """Attend to one more block and merge with the earlier ones: (q, rows, y, lse) -> (y, lse).

    y is float32 or wider, except after the last block, which also leaves the results in `merged`. If they are there
    already, the forward computes nothing and only records the node for the backward.

    The backward of a block passes dy and dlse on to the earlier blocks unchanged, so that every block gets the
    gradients of the final results. With the share of block i, w = e^(lse_i - lse), the gradients of its own results are
    w dy and w (dy (y_i - y) + dlse). The backward recomputes the scores of the block.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, y: Tensor | None, lse: Tensor | None,
        attend_to: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], first: int, merged: _Merged, is_last: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, rows)
        ctx.attend_to = attend_to
        ctx.first = first
        ctx.merged = merged
        device_type = q.device.type
        ctx.autocast = None
        if torch.amp.is_autocast_available(device_type):  # not for the meta device
            ctx.autocast = {"device_type": device_type, "dtype": torch.get_autocast_dtype(device_type),
                            "enabled": torch.is_autocast_enabled(device_type)}
        if merged.y_BASV is not None and merged.lse_BAS is not None:
            return merged.y_BASV.detach(), merged.lse_BAS.detach()
        y_i, lse_i = attend_to(q, rows)
        dtype = y_i.dtype
        lse_i = lse_i.to(torch.promote_types(lse_i.dtype, torch.float32))
        y_i = y_i.to(lse_i.dtype)
        if y is not None and lse is not None:
            y_i, lse_i = merge(y, lse, y_i, lse_i, first)
        if is_last:
            # In memory as (B, S, A, V), the layout that `output` reads: it then saves the same memory, not a copy.
            y_i = y_i.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
            merged.y_BASV = y_i.detach()  # detached: a reference to this node from its own context would be a cycle
            merged.lse_BAS = lse_i.detach()
        return y_i, lse_i

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise ValueError("ring attention was differentiated by autograd.grad or backward(inputs=...), but its "
                             "backward accumulates the gradients of all its weights; use backward() without inputs, or "
                             "the method \"all_to_all\"")
        first = ctx.first
        merged = ctx.merged
        q, rows = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        autocast = nullcontext() if ctx.autocast is None else torch.autocast(**ctx.autocast)
        with torch.enable_grad(), autocast:
            y_i, lse_i = ctx.attend_to(q, rows)
        share = (lse_i.detach() - merged.lse_BAS[..., first:]).exp()
        dy_i = dy[:, :, first:].to(lse_i.dtype)
        dlse_i = (dy_i * (y_i.detach().to(lse_i.dtype) - merged.y_BASV[:, :, first:])).sum(-1)
        if dlse is not None:
            dlse_i = dlse_i + dlse[..., first:]
        # Weight gradients run now: if deferred, those of `expand_kv` would keep the rows of all tokens.
        with WeightGradStore.current().run_immediately():
            torch.autograd.backward((y_i, lse_i), ((dy_i * share.unsqueeze(-1)).to(y_i.dtype), dlse_i * share))
        earlier = (grad if needed else None for grad, needed in zip((dy, dlse), ctx.needs_input_grad[2:4]))
        return q.grad, rows.grad, *earlier, None, None, None, None


def merge(y: Tensor, lse: Tensor, y_i: Tensor, lse_i: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Merge attention outputs over two disjoint sets of keys into the output over both, with its log-sum-exp.

    y (B, A, S, V), lse (B, A, S): over the first set. y_i, lse_i: over the second set, for the queries from `first` on.
    Example: equal log-sum-exps, 0 and 0, weight both outputs with one half.
    """
    merged_lse = torch.logaddexp(lse[..., first:], lse_i)
    old_share = (lse[..., first:] - merged_lse).exp().unsqueeze(-1)
    new_share = (lse_i - merged_lse).exp().unsqueeze(-1)
    merged_y = y[:, :, first:] * old_share + y_i * new_share
    if first == 0:
        return merged_y, merged_lse
    return torch.cat((y[:, :, :first], merged_y), 2), torch.cat((lse[..., :first], merged_lse), 2)
