"""Causal attention over documents, with windows and sinks.

    context = Context(rotary, x_BSH, positions_BS)     once for a micro-batch and stage
    q_BASD, k_BGSD = apply_rope(q_BSAD, k_BSGD, *context.tables(q_BSAD.dtype))
    attend(q_BASD, k_BGSD, v_BGSV, context, scale=D**-0.5, window=None, sinks_A=None)

On CPU, and in float64, attention is a plain matmul-softmax-matmul, with the softmax in at least float32. On CUDA a
fused kernel avoids writing the (S, S) scores. For a plain causal mask it is torch's `scaled_dot_product_attention`,
which has no fused kernel for float32 if heads share keys. For all other masks it is FlexAttention, which skips blocks
that a window or a document hides.

Dimension letters: B batch, S sequence, A query heads, G key/value heads (a divisor of A), R = A / G, D head dimension
of queries and keys, V of values; T keys of a part of the sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dualpipe.nn.attention.context import Context
from dualpipe.nn.attention.sequence_split import Ranges


def attend(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, context: Context, *, scale: float, window: int | None = None,
    sinks_A: Tensor | None = None, max_logits_A: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the keys that a query sees -> (B, A, S, V), in the dtype of v.

    Args:
        context: masks of the micro-batch.
        window: number of tokens that a query sees, itself included; None: all before it in its document.
        sinks_A: one logit per head that only adds to the denominator of the softmax (gpt-oss).
        max_logits_A: maximum logit of each head so far, updated in place if gradients are enabled.
    """
    causal = context.documents_BS is None and (window is None or window >= context.length)
    plain = causal and sinks_A is None and max_logits_A is None
    if not _has_kernel(q_BASD, v_BGSV, plain):
        return attention_reference(
            q_BASD, k_BGSD, v_BGSV, context, scale=scale, window=window, sinks_A=sinks_A, max_logits_A=max_logits_A)
    q_BASD = q_BASD.to(v_BGSV.dtype)  # a norm in float32 may have widened queries and keys
    k_BGSD = k_BGSD.to(v_BGSV.dtype)
    if plain:
        grouped = q_BASD.shape[1] != k_BGSD.shape[1]  # fewer of torch's kernels support it
        return F.scaled_dot_product_attention(q_BASD, k_BGSD, v_BGSV, is_causal=True, enable_gqa=grouped, scale=scale)
    from dualpipe.nn.attention import flex  # not at the top: it imports the compiler, 0.5 s of every start

    y_BASV, max_logits_BAS = flex.compiled(flex.attention_flex)(
        q_BASD, k_BGSD, v_BGSV, context.blocks(window), scale, sinks_A, max_logits_A is not None)
    _update_max_logits(max_logits_A, max_logits_BAS)
    return y_BASV


def _has_kernel(q: Tensor, v: Tensor, plain: bool) -> bool:
    """Return True if a fused kernel exists: FlexAttention needs at least 16 dimensions, and none supports float64."""
    wide_enough = plain or min(q.shape[-1], v.shape[-1]) >= 16
    return q.device.type == "cuda" and v.dtype is not torch.float64 and wide_enough


def attention_reference(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, context: Context, *, scale: float, window: int | None = None,
    sinks_A: Tensor | None = None, max_logits_A: Tensor | None = None,
) -> Tensor:
    """Reference of `attend`: scores in the dtype of q, the softmax in at least float32."""
    scores = _scores(q_BASD, k_BGSD, context.visible(window), scale, -torch.inf)
    _update_max_logits(max_logits_A, None if max_logits_A is None else scores.detach().amax(-1).flatten(1, 2))
    if sinks_A is not None:
        sinks = rearrange(sinks_A.to(scores.dtype), "(G R) -> 1 G R 1 1", G=k_BGSD.shape[1])
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    probs = scores.softmax(-1)[..., : k_BGSD.shape[2]].to(v_BGSV.dtype)
    return rearrange(probs @ v_BGSV.unsqueeze(2), "B G R S V -> B (G R) S V")


def attend_part(
    q_BASD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor, context: Context, queries: Ranges, keys: Ranges, *, scale: float,
    window: int | None = None, max_logits_A: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of some queries over some keys, without sinks, and the log-sum-exp of their scores.

    The log-sum-exp serves to combine the result with that over other keys. For a query that sees none of the keys it is
    -inf or close to it, and its attention is an arbitrary finite number. On CUDA uses FlexAttention; this has not been
    tested on a GPU.

    queries, keys: parts of the sequence, (start, stop) each; other arguments: see `attend`.

    Returns (B, A, S, V), and (B, A, S) in at least float32.
    """
    if _has_kernel(q_BASD, v_BGTV, False):
        from dualpipe.nn.attention import flex

        q_BASD = q_BASD.to(v_BGTV.dtype)
        k_BGTD = k_BGTD.to(v_BGTV.dtype)
        blocks = context.blocks(window, queries, keys)
        y_BASV, lse_BAS, max_logits_BAS = flex.compiled(flex.attention_part_flex)(
            q_BASD, k_BGTD, v_BGTV, blocks, scale, max_logits_A is not None)
        _update_max_logits(max_logits_A, max_logits_BAS)
        return y_BASV, lse_BAS
    # Not -inf: a row of only -inf has no softmax, and no gradient.
    hidden_score = torch.finfo(torch.promote_types(q_BASD.dtype, torch.float32)).min / 2
    k_BGTD = k_BGTD.to(q_BASD.dtype)  # a norm in float32 may have widened the keys
    scores = _scores(q_BASD, k_BGTD, context.visible(window, queries, keys), scale, hidden_score)
    _update_max_logits(max_logits_A, None if max_logits_A is None else scores.detach().amax(-1).flatten(1, 2))
    lse_BGRS1 = scores.logsumexp(-1, keepdim=True)
    y_BGRSV = (scores - lse_BGRS1).exp().to(v_BGTV.dtype) @ v_BGTV.unsqueeze(2)
    return y_BGRSV.flatten(1, 2), lse_BGRS1.flatten(1, 2).squeeze(-1)


def _update_max_logits(max_logits_A: Tensor | None, max_logits_BAS: Tensor | None) -> None:
    """Update the maximum logits if gradients are enabled.

    Gradients are disabled in validation, and in the first forward of a recomputed layer.
    """
    if max_logits_A is not None and max_logits_BAS is not None and torch.is_grad_enabled():
        max_logits_A.copy_(torch.maximum(max_logits_A, max_logits_BAS.amax((0, 2)).to(max_logits_A.dtype)))


def _scores(q_BASD: Tensor, k_BGTD: Tensor, seen: Tensor, scale: float, hidden: float) -> Tensor:
    """Compute the scores (B, G, R, S, T) in at least float32, `hidden` where a query does not see a key."""
    q_BGRSD = rearrange(q_BASD, "B (G R) S D -> B G R S D", G=k_BGTD.shape[1])
    scores = q_BGRSD @ k_BGTD.unsqueeze(2).mT * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), hidden)
