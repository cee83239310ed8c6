"""Causal attention over documents: where a token is, which others it sees, and what it makes of them.

    context = Context(rotary, x_BSH, positions_BS)     once for a micro-batch and stage
    q_BASD, k_BGSD = rotate(q_BSAD, k_BSGD, context)
    attend(q_BASD, k_BGSD, v_BGSV, context, scale=D**-0.5, window=None, sinks_A=None)

Rotary position embedding (Su et al., arXiv:2104.09864), also stretched by YaRN (Peng et al., arXiv:2309.00071), is
computed where it is used: a buffer would have to survive meta devices, `.to(dtype)` and checkpoints. A token sees
itself and what came before it in its document, at most `window` positions with itself. Documents in a row follow each
other; one starts wherever the position ids do not go on by one.

On CPU, and in float64, attention is computed as it is written down, in at least float32 where it matters. On CUDA a
fused kernel does not write the (S, S) scores: torch's own where only the future is hidden (but in float32 that writes
them where heads share keys), and FlexAttention for all else, which skips blocks that a window or a document hides.

Dimension letters: B batch, S sequence, H hidden, A query heads, G key/value heads (a divisor of A), R = A / G, D head
dimension of queries and keys, V of values; d pairs of its dimensions, D / 2; T keys of a part of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe.kernels.rotary import rotate_heads, rotate_heads_backward, rotate_reference
from dualpipe.nn.deferral import weight_grads
from dualpipe.nn.layers import RMSNorm, norm_weight_grad

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


Ranges = tuple[tuple[int, int], ...]  # parts of a sequence, each from one token to before another


@dataclass(frozen=True)
class Yarn:
    """How a model is stretched to `factor` times the positions that it was trained on; named as in `config.json`.

    Dimensions that turn more than `beta_fast` times within the original length keep their frequency, those that turn
    less than `beta_slow` times have it divided by `factor`, and a ramp lies between. `attention_factor` multiplies cos
    and sin; None: 0.1 ln(factor) + 1 (or, with `mscale` and `mscale_all_dim`, DeepSeek's quotient of two such).
    truncate: whether the ramp's ends are rounded to whole dimensions (gpt-oss does not).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def stretch(self, frequency_d: Tensor, head_dim: int, theta: float) -> Tensor:
        """Those of the frequencies (D/2,) that are slow divided by `factor`, and some between in part."""
        low, high = (
            head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        each_d = torch.arange(head_dim // 2, dtype=frequency_d.dtype, device=frequency_d.device)
        slow_d = ((each_d - low) / (high - low if high != low else 0.001)).clamp(0, 1)  # 0: fast, 1: slow
        return frequency_d / self.factor * slow_d + frequency_d * (1 - slow_d)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 mscale ln(factor) + 1, and 1 for what is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """The angles of a head: position * theta^(-2i/D) for pair i."""

    head_dim: int
    theta: float
    yarn: Yarn | None = None

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions (...,) -> cos and sin, each (..., D) with both halves alike, in `dtype`: float64 exactly, float32
        as transformers does."""
        exponent_d = torch.arange(0, self.head_dim, 2, dtype=dtype, device=positions.device) / self.head_dim
        frequency_d = 1.0 / self.theta**exponent_d
        if self.yarn is not None:
            frequency_d = self.yarn.stretch(frequency_d, self.head_dim, self.theta)
        angles = (positions.to(dtype).unsqueeze(-1) * frequency_d).repeat(*[1] * positions.dim(), 2)
        scale = 1.0 if self.yarn is None else self.yarn.scale()
        return angles.cos() * scale, angles.sin() * scale


def rotate(
    q_BSAD: Tensor, k_BSGD: Tensor, context: Context, norms: Sequence[RMSNorm] = (), *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries and keys behind their norms, of which there are two or none, turned by their positions' angles ->
    (B, A, S, D) and (B, G, S, D). interleaved: each pair (x[2i], x[2i + 1]), as DeepSeek stores them, instead of
    (x[i], x[i + D/2]); the result has the pairs' halves."""
    q_weight, k_weight = (norm.weight for norm in norms) if norms else (None, None)
    eps = norms[0].eps if norms else 0.0
    cos, sin = context.tables(torch.promote_types(q_BSAD.dtype, torch.float32))
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if plain or not all(weight is None or weight.is_leaf for weight in (q_weight, k_weight)):
        q, k = (rotate_reference(x, cos, sin, weight, eps, interleaved)[0]
                for x, weight in ((q_BSAD, q_weight), (k_BSGD, k_weight)))
    else:
        q, k = _Rotate.apply(q_BSAD, q_weight, k_weight, k_BSGD, cos, sin, eps, interleaved)
    return q.transpose(1, 2), k.transpose(1, 2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, k: Tensor, cos: Tensor, sin: Tensor,
        eps: float, interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out, *scales = rotate_heads(q, k, cos, sin, q_weight, k_weight, eps, interleaved)
        # The two weights, as `weight_grads` has them; the parameters themselves: saved tensors may come back as copies.
        ctx.weight, ctx.bias, ctx.interleaved = q_weight, k_weight, interleaved
        ctx.save_for_backward(*((None, None) if q_weight is None else (q, k)), cos, sin, q_weight, k_weight, *scales)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, *parts = rotate_heads_backward(dq, dk, *ctx.saved_tensors, ctx.interleaved)
        dq_weight, dk_weight = weight_grads(
            ctx, parts[0], None, *(partial(norm_weight_grad, parts=each) for each in parts)
        )
        return dq, dq_weight, dk_weight, dk, None, None, None, None


@dataclass(frozen=True)
class SequenceSplit:
    """Which tokens of a sequence are those of rank `rank` among the `size` ranks that share it.

    The sequence is cut into 2 * size consecutive chunks, as even as can be, longer ones first, and rank r has chunks r
    and 2 * size - 1 - r: an early one, whose tokens see little, and a late one, so that all ranks attend about as much.
    Example: 9 tokens on 2 ranks are chunks of 3, 2, 2, 2; rank 0 has tokens 0 1 2 7 8, rank 1 tokens 3 4 5 6.
    """

    rank: int = 0
    size: int = 1

    def own(self, length: int) -> Tensor:
        """Indices of the rank's tokens in a sequence of `length`, ascending, int64 (S_own,)."""
        return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in self.chunks(length)])

    def counts(self, length: int) -> tuple[int, ...]:
        """How many tokens each rank has."""
        ranks = (replace(self, rank=rank).chunks(length) for rank in range(self.size))
        return tuple(sum(stop - start for start, stop in chunks) for chunks in ranks)

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """(start, stop) of the rank's chunks, ascending; ValueError for a sequence with fewer tokens than chunks."""
        if self.size == 1:
            return [(0, length)]
        if length < 2 * self.size:
            raise ValueError(f"a sequence of {length} tokens cannot be shared by {self.size} ranks, each of which has "
                             f"two chunks of it; give at least {2 * self.size} tokens, or use fewer ranks")
        each, longer = divmod(length, 2 * self.size)
        starts = [number * each + min(number, longer) for number in range(2 * self.size + 1)]
        return [(starts[number], starts[number + 1]) for number in (self.rank, 2 * self.size - 1 - self.rank)]


class Context:
    """What all attention layers of a stage have in common for one micro-batch: rotary tables and who sees whom."""

    def __init__(
        self, rotary: Rotary, x_BSH: Tensor, positions_BS: Tensor | None = None, split: SequenceSplit = SequenceSplit()
    ) -> None:
        """x_BSH: the tokens here, of which the length alone counts. positions_BS: of all tokens of the sequence, also
        where ranks share it by `split`, which then need them; ValueError for others, or none."""
        batch, here = x_BSH.shape[:2]
        self.batch, self.length, self.split, self.device = batch, here, split, x_BSH.device
        if split.size > 1:
            if positions_BS is None:
                raise ValueError(f"positions must be given where {split.size} ranks share a sequence: those of all its "
                                 "tokens (B, S), on each of them")
            self.length = positions_BS.shape[-1]
            if (own := split.counts(self.length)[split.rank]) != here:
                raise ValueError(f"positions are given of {self.length} tokens, of which rank {split.rank} of "
                                 f"{split.size} has {own}; got {here} tokens: cut them by SequenceSplit")
        if positions_BS is not None and positions_BS.shape != (batch, self.length):
            raise ValueError(f"positions must be {(batch, self.length)}, as the tokens are; got "
                             f"{tuple(positions_BS.shape)}")
        self.documents_BS = None if positions_BS is None else document_numbers(positions_BS)
        positions = torch.arange(here, device=x_BSH.device) if positions_BS is None else positions_BS
        if split.size > 1:
            positions = cut(positions, split.chunks(self.length))
        cos, sin = rotary.tables(positions, torch.promote_types(x_BSH.dtype, torch.float32))
        if positions_BS is not None:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, S, D): the same for all heads
        self._tables = {cos.dtype: (cos, sin)}
        self._visible: dict[Any, Tensor] = {}  # by window and parts, as the next
        self._blocks: dict[Any, BlockMask] = {}

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (S, D) or (B, 1, S, D)."""
        if dtype not in self._tables:
            cos, sin = next(iter(self._tables.values()))
            self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]

    def visible(self, window: int | None = None, queries: Ranges = (), keys: Ranges = ()) -> Tensor:
        """Which keys a query sees: bool (S, S), or (B, S, S) where there are documents. queries, keys: parts of the
        sequence that they are, instead of all of it."""
        if (window, queries, keys) not in self._visible:
            key_T, query_S1 = self._places(keys), self._places(queries).unsqueeze(1)
            seen = key_T <= query_S1
            if window is not None:
                seen = seen & (key_T > query_S1 - window)
            if (documents := self.documents_BS) is not None:
                seen = seen & (cut(documents, keys).unsqueeze(1) == cut(documents, queries).unsqueeze(2))
            self._visible[window, queries, keys] = seen
        return self._visible[window, queries, keys]

    def blocks(self, window: int | None = None, queries: Ranges = (), keys: Ranges = ()) -> BlockMask:
        """The same for FlexAttention: which blocks of keys a block of queries sees, in full or in part."""
        if (window, queries, keys) not in self._blocks:
            from dualpipe.nn import compiled

            places = (self._places(queries), self._places(keys)) if queries or keys else None
            made = compiled.make_blocks(self.length, window, self.documents_BS, self.device, places)
            self._blocks[window, queries, keys] = made
        return self._blocks[window, queries, keys]

    def _places(self, parts: Ranges) -> Tensor:
        """The indices in the sequence of the tokens of some parts; of all, where none are named."""
        each = [torch.arange(*part, device=self.device) for part in parts or ((0, self.length),)]
        return torch.cat(each) if len(each) > 1 else each[0]


def cut(x_BS: Tensor, parts: Iterable[tuple[int, int]]) -> Tensor:
    """Parts of a sequence, each from one token to before another, behind one another; all of it, where there are none.
    Further dimensions stay."""
    each = [x_BS[:, start:stop] for start, stop in parts] or [x_BS]
    return torch.cat(each, 1) if len(each) > 1 else each[0]


def packed_positions(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Position ids (B, S) of documents laid end to end in B rows of S tokens.

    cu_seqlens: where each document begins and the last one ends, counted over all rows (N + 1,): 0 at first, B * S at
    last. A document that goes on in the next row goes on counting. Example: [0, 3, 8], rows of 4: 0 1 2 0 | 1 2 3 4.
    Raises ValueError for anything else.
    """
    numbers = torch.arange(batch * length, device=cu_seqlens.device)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or (cu_seqlens.diff() < 0).any() or (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != batch * length):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {batch * length}; "
                         f"got {cu_seqlens.tolist()}")
    first = torch.searchsorted(cu_seqlens.to(numbers.dtype), numbers, right=True) - 1
    return (numbers - cu_seqlens[first]).view(batch, length)


def document_numbers(positions_BS: Tensor) -> Tensor:
    """The number of each token's document in its row (B, S). Example: positions 0 1 2 0 1 are documents 0 0 0 1 1."""
    return (positions_BS.diff(dim=1, prepend=positions_BS[:, :1] - 1) != 1).cumsum(1)


def attend(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, context: Context, *, scale: float, window: int | None = None,
    sinks_A: Tensor | None = None, peaks_A: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over what a query sees -> (B, A, S, V), in the dtype of v.

    sinks_A: a logit for each head that takes its share of the softmax and has no value (gpt-oss). peaks_A: raised to
    the largest score of each head, where gradients are wanted.
    """
    causal = context.documents_BS is None and (window is None or window >= context.length)
    plain = causal and sinks_A is None and peaks_A is None
    if not _has_kernel(q_BASD, v_BGSV, plain):
        return attention_reference(
            q_BASD, k_BGSD, v_BGSV, context, scale=scale, window=window, sinks_A=sinks_A, peaks_A=peaks_A)
    q_BASD, k_BGSD = q_BASD.to(v_BGSV.dtype), k_BGSD.to(v_BGSV.dtype)  # which a norm kept in float32 may have widened
    if plain:
        grouped = q_BASD.shape[1] != k_BGSD.shape[1]  # fewer of torch's kernels do it
        return F.scaled_dot_product_attention(q_BASD, k_BGSD, v_BGSV, is_causal=True, enable_gqa=grouped, scale=scale)
    from dualpipe.nn import compiled  # not at the top: it brings the compiler, half a second of every start

    y_BASV, largest_BAS = compiled.compiled(compiled.attention_flex)(
        q_BASD, k_BGSD, v_BGSV, context.blocks(window), scale, sinks_A, peaks_A is not None)
    _raise(peaks_A, largest_BAS)
    return y_BASV


def _has_kernel(q: Tensor, v: Tensor, plain: bool) -> bool:
    """FlexAttention multiplies tiles of at least 16 dimensions, and nothing fused has float64."""
    wide_enough = plain or min(q.shape[-1], v.shape[-1]) >= 16
    return q.device.type == "cuda" and v.dtype is not torch.float64 and wide_enough


def attention_reference(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, context: Context, *, scale: float, window: int | None = None,
    sinks_A: Tensor | None = None, peaks_A: Tensor | None = None,
) -> Tensor:
    """`attend` as it is written down: scores of the dtype of q, the softmax in at least float32."""
    wide = _scores(q_BASD, k_BGSD, context.visible(window), scale, -torch.inf)
    _raise(peaks_A, None if peaks_A is None else wide.detach().amax(-1).flatten(1, 2))
    if sinks_A is not None:
        sinks = rearrange(sinks_A.to(wide.dtype), "(G R) -> 1 G R 1 1", G=k_BGSD.shape[1])
        wide = torch.cat((wide, sinks.expand(*wide.shape[:-1], 1)), -1)
    probs = wide.softmax(-1)[..., : k_BGSD.shape[2]].to(v_BGSV.dtype)
    return rearrange(probs @ v_BGSV.unsqueeze(2), "B G R S V -> B (G R) S V")


def attend_part(
    q_BASD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor, context: Context, queries: Ranges, keys: Ranges, *, scale: float,
    window: int | None = None, peaks_A: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What some queries make of some keys: attention as by `attend` without sinks (B, A, S, V), and the log-sum-exp of
    their scores (B, A, S) in at least float32, by which it is added to what they make of other keys; that is -inf, or
    next to it, for a query that sees none of them, and its attention any finite number.

    On CUDA by FlexAttention, of which nothing here is proven on a GPU.
    """
    if _has_kernel(q_BASD, v_BGTV, False):
        from dualpipe.nn import compiled

        q_BASD, k_BGTD = q_BASD.to(v_BGTV.dtype), k_BGTD.to(v_BGTV.dtype)
        blocks = context.blocks(window, queries, keys)
        y_BASV, lse_BAS, largest_BAS = compiled.compiled(compiled.attention_part_flex)(
            q_BASD, k_BGTD, v_BGTV, blocks, scale, peaks_A is not None)
        _raise(peaks_A, largest_BAS)
        return y_BASV, lse_BAS
    # Not -inf: a row of it alone has no softmax, and no gradient.
    least = torch.finfo(torch.promote_types(q_BASD.dtype, torch.float32)).min / 2
    k_BGTD = k_BGTD.to(q_BASD.dtype)  # which a norm kept in float32 may have widened
    wide = _scores(q_BASD, k_BGTD, context.visible(window, queries, keys), scale, least)
    _raise(peaks_A, None if peaks_A is None else wide.detach().amax(-1).flatten(1, 2))
    lse_BGRS1 = wide.logsumexp(-1, keepdim=True)
    y_BGRSV = (wide - lse_BGRS1).exp().to(v_BGTV.dtype) @ v_BGTV.unsqueeze(2)
    return y_BGRSV.flatten(1, 2), lse_BGRS1.flatten(1, 2).squeeze(-1)


def _raise(peaks_A: Tensor | None, largest_BAS: Tensor | None) -> None:
    """Note the largest scores. Not in evaluations; of what is computed again, when it is."""
    if peaks_A is not None and largest_BAS is not None and torch.is_grad_enabled():
        peaks_A.copy_(torch.maximum(peaks_A, largest_BAS.amax((0, 2)).to(peaks_A.dtype)))


def _scores(q_BASD: Tensor, k_BGTD: Tensor, seen: Tensor, scale: float, hidden: float) -> Tensor:
    """Scores (B, G, R, S, T) in at least float32, `hidden` where a query does not see a key."""
    q_BGRSD = rearrange(q_BASD, "B (G R) S D -> B G R S D", G=k_BGTD.shape[1])
    scores = q_BGRSD @ k_BGTD.unsqueeze(2).mT * scale
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return wide.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), hidden)


def apply_sinks(y_BASV: Tensor, lse_BAS: Tensor, sinks_A: Tensor) -> Tensor:
    """What attention without sinks and its log-sum-exp become with them, in the dtype of the former: a sink s adds e^s
    to the softmax's denominator Z = e^lse, so it scales the result by Z / (Z + e^s), which is sigmoid(lse - s)."""
    share_BAS = torch.sigmoid(lse_BAS - sinks_A.to(lse_BAS.dtype).unsqueeze(-1))
    return (y_BASV * share_BAS.unsqueeze(-1)).to(y_BASV.dtype)
