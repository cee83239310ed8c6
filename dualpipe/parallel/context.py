"""Context parallelism: the ranks of a group share each sequence, and attention sees all of it.

Each rank has the tokens that `SequenceSplit` says and computes on them alone, but for attention. What that reads of
other ranks is brought by `Communicate` segments, which the pipeline hides behind its other micro-batch. By one of

    ring         Rows of keys and values go from rank to rank, size - 1 times. While the next ones travel, the queries
                 attend to those that are here (Liu et al., arXiv:2310.01889); a token's results are merged by the
                 log-sum-exp of its scores. Of latent attention the latent travels, which each rank expands itself.
    window       Of a layer with a sliding window only those rows travel that the window of one of the tokens reaches.
    all_to_all   A rank gets some of the heads of all tokens, and sends back what they found (DeepSpeed-Ulysses,
                 arXiv:2309.14509). The ranks must divide the heads, those of queries and those of keys and values.

Rows that have arrived are not kept for the backward of a ring or a window: they travel once more before, and their
gradients then go the same way back. What is kept of attention are the rank's own queries, rows and results, so that
activations fall as 1 / size. With C a token's numbers in keys and values, or the latent, a rank sends for a token of
its own 3 (size - 1) C numbers by the ring in all, and 2 (size - 1) / size times the numbers of its queries, keys,
values and results by heads. "auto" takes what is less.

torch's own `context_parallel` (torch.distributed.tensor.experimental, 2.13) does not serve: it replaces
`scaled_dot_product_attention` for the whole process, whose kernels on CUDA alone have a ring, exchanges and waits
within it, where a pipeline can hide nothing, and knows neither documents, windows and sinks nor lengths that do not
divide.

Dimension letters as in `dualpipe.nn.attention`; T tokens of a part, C numbers in the row of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import device
from dualpipe.nn.attention import Context, Ranges, SequenceSplit, apply_sinks, attend, attend_part, cut
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Compute, Pending, Segment
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, GroupAllToAll, PendingRows

METHODS = ("auto", "ring", "all_to_all")


class SharedAttention(Protocol):
    """What is asked of an attention layer: see `dualpipe.models.decoder.Attention`."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None
    scale: float
    sinks: nn.Parameter | None
    shared: tuple[tuple[int, int], ...]

    def project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, ...]: ...

    def expand(self, *shared: Tensor) -> tuple[Tensor, Tensor]: ...

    def output(self, y_BASV: Tensor) -> Tensor: ...


class Sizes(NamedTuple):
    """Of a micro-batch, which a rank must know that has failed, as others count on what it sends."""

    batch: int
    length: int  # of the whole sequence
    itemsize: int  # bytes of a number in a row


class ContextParallel:
    """The ranks that share sequences; attention layers take their segments from it.

    mesh: the mesh's "cp" dimension, or an `AsyncAllToAll`; None or one rank: sequences are whole. method: one of
    `METHODS`; layers with a window exchange what that needs, by any. Raises ValueError for another one.
    """

    def __init__(self, mesh: DeviceMesh | AsyncAllToAll | None, *, method: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        self._method, self.split = method, SequenceSplit()
        self._latest, self._agreed = Sizes(0, 0, 0), False
        if mesh is not None and (mesh.size() if isinstance(mesh, DeviceMesh) else mesh.size) > 1:
            ranks = GroupAllToAll(mesh) if isinstance(mesh, DeviceMesh) else mesh
            self.stream, self.split = CommStream(ranks, "keys and values"), SequenceSplit(ranks.rank, ranks.size)

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others."""
        return 0 if self.split.size == 1 else self.stream.sent_bytes

    def expect(self, batch: int, length: int, dtype: torch.dtype) -> None:
        """Say on all ranks what micro-batches come: rows, tokens of a whole one, dtype of keys and values. Otherwise
        the ranks tell each other once, in the first step, for which the host waits; a rank that fails goes by that."""
        self._latest, self._agreed = Sizes(batch, length, dtype.itemsize), True

    def sizes(self, found: Sizes | None) -> Sizes:
        """Those of a micro-batch, or where it has failed here (None) of the latest one; collective until one is known,
        and all zero if none is anywhere."""
        if not self._agreed:
            told, each = torch.tensor([found or (0, 0, 0)] * self.split.size, device="cpu"), [1] * self.split.size
            sent = told.to(self.stream.device)
            received = torch.empty_like(sent)
            with self.stream.beside(device.record(self.stream.device), sent, received):
                exchange = self.stream.start(received, sent, each, each)
            self.stream.wait(exchange)
            self._latest = Sizes(*max(received.tolist()))
            self._agreed = self._latest.batch > 0
        self._latest = found or self._latest
        return self._latest

    def method_of(self, attention: SharedAttention) -> str:
        """"window", "ring" or "all_to_all". Raises ValueError where heads do not go with what was asked for."""
        ranks, heads, kv_heads = self.split.size, attention.num_heads, attention.num_kv_heads
        fits = heads % ranks == 0 and kv_heads % ranks == 0
        if self._method == "all_to_all" and not fits:
            raise ValueError(f"{heads} heads of queries and {kv_heads} of keys and values cannot be divided evenly "
                             f"among {ranks} context-parallel ranks; use the method ring, or a number of ranks that "
                             "divides both")
        if attention.window is not None:
            return "window"
        by_heads = heads * (attention.qk_dim + attention.v_dim) + kv_heads * (attention.qk_dim + attention.v_dim)
        less = 2 * by_heads <= 3 * ranks * row_width(attention)
        return "all_to_all" if fits and (self._method == "all_to_all" or (self._method == "auto" and less)) else "ring"

    def segments(self, attention: SharedAttention, recompute: bool) -> list[Segment]:
        """From "normed" and "context" to "y". recompute: whether all of it is computed again before the backward, not
        only what has travelled."""
        if self.method_of(attention) == "all_to_all":
            return _ByHeads(self, attention).segments(recompute)
        return (_Ring if attention.window is None else _Window)(self, attention).segments(recompute)


def row_width(attention: SharedAttention) -> int:
    """C, of a ring or a window."""
    return sum(heads * dim for heads, dim in attention.shared)


class _Rows:
    """Communication of rows (B * T, C) with the micro-batch's `Context`, in the order of the ranks. tokens: how many go
    to each rank and come from each, for a length. Context for the backward: `Sizes`, and the dtype."""

    def __init__(
        self, parallel: ContextParallel, width: int, tokens: Callable[[int], tuple[list[int], list[int]]]
    ) -> None:
        self._parallel, self._width, self._tokens = parallel, width, tokens
        self.group = parallel.stream.group

    def forward(self, inputs: tuple[Any, ...] | None) -> Pending:
        found = dtype = None
        if inputs is not None:
            rows, context = inputs
            found, dtype = Sizes(context.batch, context.length, rows.itemsize), rows.dtype
        return self._send((self._parallel.sizes(found), dtype), inputs)

    def backward(self, context: tuple[Sizes, torch.dtype | None], gradients: tuple[Any, ...] | None) -> Pending:
        return self._send(context, gradients, back=True)

    def again(self, context: tuple[Sizes, torch.dtype | None], inputs: tuple[Any, ...] | None) -> Pending:
        return self._send(context, inputs)

    def _send(
        self, context: tuple[Sizes, torch.dtype | None], given: tuple[Any, ...] | None, *, back: bool = False
    ) -> Pending:
        """Rows there, or gradients back: where there is none here (None), other ranks may have one."""
        sizes, dtype = context
        each = self._tokens(sizes.length) if sizes.length else ([0] * self._parallel.split.size,) * 2
        received, sent = ([tokens * sizes.batch for tokens in counts] for counts in (each if back else each[::-1]))
        pending = PendingRows(self._parallel.stream, besides=(None,) * back, context=context)
        rows, dtype = (None, None) if given is None else (given[0], dtype)
        return pending.send(rows, self._width * sizes.itemsize, sent, received, dtype)


# -- keys and values that travel


@dataclass
class _Merged:
    """What a rank's queries have found in all keys, once they have been through: what the backward needs of it. It is
    kept, so that attention is not computed again where only the rows are sent again."""

    y_BASV: Tensor | None = None
    lse_BAS: Tensor | None = None


class _Part(NamedTuple):
    """Which queries attend to which keys, as parts of the sequence; `first` is the number of the first one here."""

    queries: Ranges
    keys: Ranges
    first: int = 0


class _Blocks:
    """Queries that attend to one block of rows after the other."""

    def __init__(self, parallel: ContextParallel, attention: SharedAttention) -> None:
        self._parallel, self._attention, self._width = parallel, attention, row_width(attention)
        self._rank, self._size = parallel.split.rank, parallel.split.size

    def _project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, Tensor, _Merged]:
        """Queries, rows, and where their results will be."""
        q_BASD, *shared = self._attention.project(x_BSH, context)
        dtype = min((each.dtype for each in shared), key=lambda dtype: dtype.itemsize)  # norms may have widened others
        rows = torch.cat([each.to(dtype).transpose(1, 2).flatten(2) for each in shared], -1)
        return q_BASD, rows.flatten(0, 1), _Merged()

    def _part(self, number: int, length: int) -> _Part:
        raise NotImplementedError

    def _block(self, number: int, blocks: int) -> Compute:
        """Attend to the rows "kv<number>" of so many."""
        before, last = ("y", "lse") if number else (), number == blocks - 1

        def run(
            q_BASD: Tensor, rows: Tensor, merged: _Merged, context: Context, *before: Tensor
        ) -> tuple[Tensor, Tensor]:
            part = self._part(number, context.length)
            attend_to = partial(self._attend, context, part)
            y, lse = before or (None, None)
            return _AttendBlock.apply(
                q_BASD, rows.view(context.batch, -1, self._width), y, lse, attend_to, part.first, merged, last
            )

        return Compute(run, ("q", f"kv{number}", "merged", "context", *before), ("y", "lse"), True)

    def _attend(self, context: Context, part: _Part, q_BASD: Tensor, rows_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """The results of one block and their log-sum-exp, for the queries from `part.first` on."""
        layer, tokens = self._attention, sum(stop - start for start, stop in part.keys)
        each = rows_BTC[:, :tokens].split([heads * dim for heads, dim in layer.shared], -1)
        k_BGTD, v_BGTV = layer.expand(*(
            rearrange(x, "B T (G D) -> B G T D", G=heads) for x, (heads, _) in zip(each, layer.shared)
        ))
        return attend_part(q_BASD[:, :, part.first :], k_BGTD, v_BGTV, context, part.queries, part.keys,
                           scale=layer.scale, window=layer.window)

    def _finish(self, y_BASV: Tensor, lse_BAS: Tensor) -> Tensor:
        if self._attention.sinks is not None:
            y_BASV = apply_sinks(y_BASV, lse_BAS, self._attention.sinks)
        return self._attention.output(y_BASV)

    def _around(self, middle: Sequence[Segment], recompute: bool) -> list[Segment]:
        return [
            Compute(self._project, ("normed", "context"), ("q", "kv0", "merged"), recompute), *middle,
            Compute(self._finish, ("y", "lse"), "y", recompute),
        ]


class _Ring(_Blocks):
    """In block i the rows are those of the i-th rank before this one."""

    def segments(self, recompute: bool) -> list[Segment]:
        middle: list[Segment] = []
        for number in range(self._size):
            if number + 1 < self._size:
                hop = _Rows(self._parallel, self._width, partial(self._hop, number))
                middle.append(Communicate(hop, (f"kv{number}", "context"), f"kv{number + 1}", True, True))
            middle.append(self._block(number, self._size))
        return self._around(middle, recompute)

    def _hop(self, number: int, length: int) -> tuple[list[int], list[int]]:
        counts, sent, received = self._parallel.split.counts(length), [0] * self._size, [0] * self._size
        sent[(self._rank + 1) % self._size] = counts[self._rank - number]
        received[self._rank - 1] = counts[self._rank - number - 1]
        return sent, received

    def _part(self, number: int, length: int) -> _Part:
        """Chunks are numbered from both ends: an earlier rank's early chunk is before both chunks here, and its late
        one behind both; both chunks of a later rank are between those here."""
        source = (self._rank - number) % self._size
        queries, keys = (tuple(replace(self._parallel.split, rank=r).chunks(length)) for r in (self._rank, source))
        if source < self._rank:
            return _Part(queries, keys[:1])
        return _Part(queries[1:], keys, queries[0][1] - queries[0][0]) if number else _Part(queries, keys)


class _Window(_Blocks):
    """The rows that one of the windows here reaches are in block 1, the own ones in block 0. No more than by a ring:
    at most those of all tokens, each once."""

    def segments(self, recompute: bool) -> list[Segment]:
        if self._attention.window == 1:  # a token sees itself
            return self._around([self._block(0, 1)], recompute)
        exchange = _Rows(self._parallel, self._width, self._tokens)
        return self._around([
            Compute(self._pack, ("kv0", "context"), "sent", True),
            Communicate(exchange, ("sent", "context"), "received", True, True),
            self._block(0, 2),
            Compute(self._unpack, ("received", "context"), "kv1", True),
            self._block(1, 2),
        ], recompute)

    def _wanted(self, length: int, source: int, destination: int) -> list[tuple[int, int]]:
        """What a rank needs of another one's tokens."""
        split, reach = self._parallel.split, (self._attention.window or length) - 1
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

    def _part(self, number: int, length: int) -> _Part:
        own = tuple(self._parallel.split.chunks(length))
        if number == 0:
            return _Part(own, own)
        wanted = (part for other in range(self._size) for part in self._wanted(length, other, self._rank))
        return _Part(own, tuple(wanted))


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
        wide = lse_i.dtype
        share = (lse_i.detach() - merged.lse_BAS[..., first:]).exp()
        dy_i = dy[:, :, first:].to(wide)
        dlse_i = (dy_i * (y_i.detach() - merged.y_BASV[:, :, first:])).sum(-1)
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


# -- heads that travel


class _ByHeads:
    """Each rank has a part of the heads, one after the other, for all tokens."""

    def __init__(self, parallel: ContextParallel, attention: SharedAttention) -> None:
        self._split, self._attention, self._size = parallel.split, attention, parallel.split.size
        self._heads, kv_heads = attention.num_heads // self._size, attention.num_kv_heads // self._size
        self._widths = [self._heads * attention.qk_dim, kv_heads * attention.qk_dim, kv_heads * attention.v_dim]
        self._kv_heads = kv_heads
        self._there = _Rows(parallel, sum(self._widths), self._tokens)
        self._back = _Rows(parallel, self._heads * attention.v_dim, lambda length: self._tokens(length)[::-1])

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
        k_BGSD, v_BGSV = self._attention.expand(*shared)
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
                        sinks_A=None if layer.sinks is None else layer.sinks[mine])
        y_BSX = rearrange(y_BASV, "B A S V -> B S (A V)")
        return torch.cat([cut(y_BSX, parts).flatten(0, 1) for parts in chunks])

    def _finish(self, rows: Tensor, context: Context) -> Tensor:
        y_BASV = rearrange(rows, "(N B S) (A V) -> B (N A) S V", N=self._size, B=context.batch, A=self._heads)
        return self._attention.output(y_BASV)
