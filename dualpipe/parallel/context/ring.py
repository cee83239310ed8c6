"""Attention to keys and values that travel from rank to rank: block after block, merged by log-sum-exp.

Dimension letters as in `dualpipe.nn.attention`; T tokens of a part, C numbers in the row of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.nn.attention import Context, apply_sinks, attend_part
from dualpipe.nn.attention.sequence_split import Ranges, cut
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Compute, Segment
from dualpipe.parallel.context.row_exchange import SequenceRanks, SequenceRows, SharedAttention


def row_width(attention: SharedAttention) -> int:
    """C, of a ring or a window."""
    return sum(heads * dim for heads, dim in attention.shared)


@dataclass
class _Merged:
    """What a rank's queries have found in all keys, once they have been through: what the backward needs of it. It is
    kept, so that attention is not computed again where only the rows are sent again."""

    y_BASV: Tensor | None = None
    lse_BAS: Tensor | None = None


class _AttendedRanges(NamedTuple):
    """Which queries attend to which keys, as parts of the sequence; `first` is the number of the first one here."""

    queries: Ranges
    keys: Ranges
    first: int = 0


class _Blocks:
    """Queries that attend to one block of rows after the other."""

    def __init__(self, ranks: SequenceRanks, attention: SharedAttention) -> None:
        self._ranks, self._attention, self._width = ranks, attention, row_width(attention)
        self._rank, self._size = ranks.split.rank, ranks.split.size
        # Whether anything of the layer is trained, though what comes before it may be frozen: nobody says what `expand`
        # has, which gets its gradients in the backward of a block.
        self._is_trained = any(p.requires_grad for p in cast(nn.Module, attention).parameters())

    def _project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, Tensor, _Merged]:
        """Queries, rows, and where their results will be."""
        q_BASD, *shared = self._attention.project(x_BSH, context)
        dtype = min((each.dtype for each in shared), key=lambda dtype: dtype.itemsize)  # norms may have widened others
        rows = torch.cat([each.to(dtype).transpose(1, 2).flatten(2) for each in shared], -1)
        return q_BASD, rows.flatten(0, 1), _Merged()

    def _ranges(self, number: int, length: int) -> _AttendedRanges:
        raise NotImplementedError

    def _block(self, number: int, blocks: int) -> Compute:
        """Attend to the rows "kv<number>" of so many."""
        before, last = ("y", "lse") if number else (), number == blocks - 1

        def run(
            q_BASD: Tensor, rows: Tensor, merged: _Merged, context: Context, *before: Tensor
        ) -> tuple[Tensor, Tensor]:
            ranges = self._ranges(number, context.length)
            if torch.is_grad_enabled() and not (q_BASD.requires_grad or rows.requires_grad) and self._is_trained:
                q_BASD = q_BASD.detach().requires_grad_()  # so that there is one
            attend_to = partial(self._attend, context, ranges)
            y, lse = before or (None, None)
            return _AttendBlock.apply(
                q_BASD, rows.view(context.batch, -1, self._width), y, lse, attend_to, ranges.first, merged, last
            )

        return Compute(run, ("q", f"kv{number}", "merged", "context", *before), ("y", "lse"), True)

    def _attend(
        self, context: Context, ranges: _AttendedRanges, q_BASD: Tensor, rows_BTC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the results of one block and their log-sum-exp, for the queries from `ranges.first` on."""
        layer, tokens = self._attention, sum(stop - start for start, stop in ranges.keys)
        each = rows_BTC[:, :tokens].split([heads * dim for heads, dim in layer.shared], -1)
        k_BGTD, v_BGTV = layer.expand_kv(*(
            rearrange(x, "B T (G D) -> B G T D", G=heads) for x, (heads, _) in zip(each, layer.shared)
        ))
        return attend_part(q_BASD[:, :, ranges.first :], k_BGTD, v_BGTV, context, ranges.queries, ranges.keys,
                           scale=layer.scale, window=layer.window, peaks_A=layer.max_logits_A)

    def _finish(self, y_BASV: Tensor, lse_BAS: Tensor) -> Tensor:
        if self._attention.sinks is not None:
            y_BASV = apply_sinks(y_BASV, lse_BAS, self._attention.sinks)
        return self._attention.output(y_BASV)

    def _around(self, middle: Sequence[Segment], recompute: bool) -> list[Segment]:
        return [
            Compute(self._project, ("normed", "context"), ("q", "kv0", "merged"), recompute), *middle,
            Compute(self._finish, ("y", "lse"), "y", recompute),
        ]


class Ring(_Blocks):
    """In block i the rows are those of the i-th rank before this one."""

    def segments(self, recompute: bool) -> list[Segment]:
        """Return the blocks in turn, each after the first behind the hop that brings its keys and values."""
        middle: list[Segment] = []
        for number in range(self._size):
            if number + 1 < self._size:
                hop = SequenceRows(self._ranks, self._width, partial(self._hop, number))
                middle.append(Communicate(hop, (f"kv{number}", "context"), f"kv{number + 1}", True, True))
            middle.append(self._block(number, self._size))
        return self._around(middle, recompute)

    def _hop(self, number: int, length: int) -> tuple[list[int], list[int]]:
        counts, sent, received = self._ranks.split.counts(length), [0] * self._size, [0] * self._size
        sent[(self._rank + 1) % self._size] = counts[self._rank - number]
        received[self._rank - 1] = counts[self._rank - number - 1]
        return sent, received

    def _ranges(self, number: int, length: int) -> _AttendedRanges:
        """Chunks are numbered from both ends: an earlier rank's early chunk is before both chunks here, and its late
        one behind both; both chunks of a later rank are between those here."""
        source = (self._rank - number) % self._size
        queries, keys = (tuple(replace(self._ranks.split, rank=r).chunks(length)) for r in (self._rank, source))
        if source < self._rank:
            return _AttendedRanges(queries, keys[:1])
        if number == 0:
            return _AttendedRanges(queries, keys)
        return _AttendedRanges(queries[1:], keys, queries[0][1] - queries[0][0])


class Window(_Blocks):
    """The rows that one of the windows here reaches are in block 1, the own ones in block 0. No more than by a ring:
    at most those of all tokens, each once."""

    def segments(self, recompute: bool) -> list[Segment]:
        """Return the block of the own rows, that of the rows of others, and the exchange that brings these."""
        if self._attention.window == 1:  # a token sees itself
            return self._around([self._block(0, 1)], recompute)
        exchange = SequenceRows(self._ranks, self._width, self._tokens)
        return self._around([
            Compute(self._pack, ("kv0", "context"), "sent", True),
            Communicate(exchange, ("sent", "context"), "received", True, True),
            self._block(0, 2),
            Compute(self._unpack, ("received", "context"), "kv1", True),
            self._block(1, 2),
        ], recompute)

    def _wanted(self, length: int, source: int, destination: int) -> list[tuple[int, int]]:
        """What a rank needs of another one's tokens."""
        split, reach = self._ranks.split, (self._attention.window or length) - 1
        (early, until), (late, _) = replace(split, rank=destination).chunks(length)
        needed = (max(0, early - reach), early), (max(until, late - reach), late)
        found = ((max(a, c), min(b, d)) for a, b in needed for c, d in replace(split, rank=source).chunks(length))
        return [(start, stop) for start, stop in found if start < stop and source != destination]

    def _tokens(self, length: int) -> tuple[list[int], list[int]]:
        ranks, count = range(self._size), lambda parts: sum(stop - start for start, stop in parts)
        return ([count(self._wanted(length, self._rank, other)) for other in ranks],
                [count(self._wanted(length, other, self._rank)) for other in ranks])

    def _pack(self, rows: Tensor, context: Context) -> Tensor:
        """The own rows that other ranks need, (B * T, C) for one rank after the other."""
        rows_BSC, (early, late) = rows.view(context.batch, -1, self._width), context.split.chunks(context.length)
        gap = late[0] - early[1]

        def here(place: int) -> int:
            return place - early[0] - (gap if place >= late[0] else 0)

        wanted = [self._wanted(context.length, self._rank, other) for other in range(self._size)]
        each = [cut(rows_BSC, [(here(a), here(b - 1) + 1) for a, b in parts]) for parts in wanted if parts]
        return torch.cat([x.flatten(0, 1) for x in each] or [rows[:0]])

    def _unpack(self, rows: Tensor, context: Context) -> Tensor:
        counts = [tokens * context.batch for tokens in self._tokens(context.length)[1]]
        each = [x.view(context.batch, -1, self._width) for x in rows.split(counts) if len(x)]
        return torch.cat(each, 1).flatten(0, 1)

    def _ranges(self, number: int, length: int) -> _AttendedRanges:
        own = tuple(self._ranks.split.chunks(length))
        if number == 0:
            return _AttendedRanges(own, own)
        wanted = (part for other in range(self._size) for part in self._wanted(length, other, self._rank))
        return _AttendedRanges(own, tuple(wanted))


class _AttendBlock(torch.autograd.Function):
    """Attention to one more block, (q, rows, y, lse) -> (y, lse), merged with what was found before: y in float32 at
    least, but for the last block, which leaves the results in `merged`.

    Where they are there already, nothing is computed, and it is for the backward alone. What flows back along y and lse
    are in every block the gradients of the final ones: with w = e^(lse_i - lse) the share of block i, those of its own
    are w dy, and w (dy (y_i - y) + dlse). Its scores are computed again there.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, y: Tensor | None, lse: Tensor | None,
        attend_to: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], first: int, merged: _Merged, last: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, rows)
        ctx.attend_to, ctx.first, ctx.merged = attend_to, first, merged
        kind = q.device.type
        ctx.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind),
                        "enabled": torch.is_autocast_enabled(kind)}
        if merged.y_BASV is not None and merged.lse_BAS is not None:
            return merged.y_BASV.detach(), merged.lse_BAS.detach()
        y_i, lse_i = attend_to(q, rows)
        dtype, lse_i = y_i.dtype, lse_i.to(torch.promote_types(lse_i.dtype, torch.float32))
        y_i = y_i.to(lse_i.dtype)
        if y is not None and lse is not None:
            y_i, lse_i = merge(y, lse, y_i, lse_i, first)
        if last:  # with heads beside each other, as `output` takes them: of one memory with what that keeps
            y_i = y_i.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
            merged.y_BASV, merged.lse_BAS = y_i.detach(), lse_i.detach()  # without what holds this node, and so itself
        return y_i, lse_i

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        first, merged = ctx.first, ctx.merged
        q, rows = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            y_i, lse_i = ctx.attend_to(q, rows)
        share, dy_i = (lse_i.detach() - merged.lse_BAS[..., first:]).exp(), dy[:, :, first:].to(lse_i.dtype)
        dlse_i = (dy_i * (y_i.detach().to(lse_i.dtype) - merged.y_BASV[:, :, first:])).sum(-1)
        if dlse is not None:
            dlse_i = dlse_i + dlse[..., first:]
        # At once: what a layer that expands rows would keep of them is for all tokens, not for those of this rank.
        with WeightGradStore.current().at_once():
            torch.autograd.backward((y_i, lse_i), ((dy_i * share.unsqueeze(-1)).to(y_i.dtype), dlse_i * share))
        before = (grad if needed else None for grad, needed in zip((dy, dlse), ctx.needs_input_grad[2:4]))
        return q.grad, rows.grad, *before, None, None, None, None


def merge(y: Tensor, lse: Tensor, y_i: Tensor, lse_i: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Attention to some keys (B, A, S, V) with its log-sum-exp (B, A, S), and to further ones by the queries from
    `first` on, as attention to both. Example: e^0 of the softmax's denominator here and e^0 there make a half of each.
    """
    both = torch.logaddexp(lse[..., first:], lse_i)
    old, new = ((each - both).exp().unsqueeze(-1) for each in (lse[..., first:], lse_i))
    y_new = y[:, :, first:] * old + y_i * new
    if first == 0:
        return y_new, both
    return torch.cat((y[:, :, :first], y_new), 2), torch.cat((lse[..., :first], both), 2)
