"""What the families' layers are made of: attention, experts or a dense MLP behind norms, and the layer around them.

What a layer computes is said once, by its `segments`; its `forward` runs them one after the other.

Dimension letters: B batch, S sequence, T tokens (B * S), H hidden, A attention heads, G key/value heads, D head
dimension, E experts, K experts per token, M routed rows (T * K), I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dualpipe.kernels import SortedTokens
from dualpipe.kernels.formats import QuantizedRows
from dualpipe.models.hub import GroupedQueryConfig, HubConfig
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear, RMSNorm, Router
from dualpipe.nn.attention import Context, apply_rope, attend
from dualpipe.nn.segments import Communicate, Compute, Segment, run_segments
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import Dispatcher, ExpertParallel, run_experts
from dualpipe.parallel.fsdp.forward_hooks import with_forward_hooks

Parts = Callable[[str], bool]
"""Whether a part of a layer is computed again: see `dualpipe.models.stages.Recompute`"""


class Attention(nn.Module):
    """Causal attention, called as `attention(x_BSH, context)`, and what its costs are counted from."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int  # head dimension of queries and keys
    v_dim: int  # of values
    window: int | None  # positions that a token sees with itself; None: all before it
    scale: float  # of the scores
    sinks: nn.Parameter | None  # (A,)
    shared: tuple[tuple[int, int], ...]  # heads and dimensions of each tensor that `expand` takes
    o_proj: Linear
    context_parallel: ContextParallel | None = None  # which brings what the tokens of other ranks share
    peaks_A: Tensor | None = None  # the largest score of each head since it was last looked at, where that is wanted

    def project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Rotated queries (B, A, S, D), and what `expand` takes."""
        return self.turned(context, *self.products(x_BSH))

    def products(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """What the first linear layers make of x."""
        raise NotImplementedError

    def turned(self, context: Context, *products: Tensor) -> tuple[Tensor, ...]:
        """What `project` returns, of the `products`."""
        raise NotImplementedError

    def expand(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, D) and values (B, G, S, V), of what `project` returns behind the queries (B, heads, S,
        dimensions)."""
        raise NotImplementedError

    def scaled(self, share_A: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """What multiplies each head's scores by its share: parameters, and what to multiply their rows by. Raises
        ValueError where a norm follows them, which bounds scores by itself."""
        raise NotImplementedError

    def output(self, y_BASV: Tensor) -> Tensor:
        """What the heads have found -> (B, S, H)."""
        return self.o_proj(rearrange(y_BASV, "B A S V -> B S (A V)"))

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        # Not by `project`: a compiler would not see past the linear layers in a call, and cut behind the rotation.
        q_BASD, *shared = self.turned(context, *self.products(x_BSH))
        k_BGSD, v_BGSV = self.expand(*shared)
        return self.output(attend(
            q_BASD, k_BGSD, v_BGSV, context, scale=self.scale, window=self.window, sinks_A=self.sinks,
            peaks_A=self.peaks_A,
        ))

    def segments(self, recompute: Parts) -> list[Segment]:
        """From "normed" and "context" to "y"."""
        again = recompute("attention")
        if self.context_parallel is None:
            return [Compute(self, ("normed", "context"), "y", again)]
        segments = self.context_parallel.segments(self, again)
        # `Stage.compile_dense` compiles `turned`, which the segments call.
        return with_forward_hooks(self, segments, ("normed", "context"), ("y",), are_compiled=True)


class GroupedQueryAttention(Attention):
    """Causal grouped-query attention; `norms`: with an RMSNorm on the queries and keys of every head; `sinks`: with a
    sink in every head."""

    def __init__(
        self, config: GroupedQueryConfig, *, norms: bool = False, sinks: bool = False, window: int | None = None
    ) -> None:
        super().__init__()
        hidden, bias, head_dim = config.hidden_size, config.attention_bias, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qk_dim = self.v_dim = head_dim
        self.shared, self.scale = ((kv_heads, head_dim),) * 2, head_dim**-0.5
        self.window, self.norms = window, norms
        self.q_proj = Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(heads * head_dim, hidden, bias=bias)
        if norms:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(heads)) if sinks else None)

    def products(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """What becomes queries, keys and values."""
        return self.q_proj(x_BSH), self.k_proj(x_BSH), self.v_proj(x_BSH)

    def turned(self, context: Context, *products: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values."""
        q, k, v = (rearrange(x, "B S (A D) -> B S A D", D=self.head_dim) for x in products)
        norms = (self.q_norm, self.k_norm) if self.norms else ()
        q_BASD, k_BGSD = apply_rope(q, k, *context.tables(q.dtype), norms)
        return q_BASD, k_BGSD, v.transpose(1, 2)

    def scaled(self, share_A: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Queries alone: several of their heads share keys."""
        if self.norms:
            raise ValueError("queries and keys have norms, which bound their scores: leave out optimizer.qk_clip")
        rows = share_A.repeat_interleave(self.head_dim)
        return [(parameter, rows) for parameter in self.q_proj.parameters()]

    def expand(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are."""
        k_BGSD, v_BGSD = shared
        return k_BGSD, v_BGSD


class Experts(nn.Module):
    """SwiGLU experts as stacked weights: gate_up (E, 2I, H), down (E, H, I), with biases where `bias` says so. form:
    the activation's, as `GroupedSwiGLU` takes it."""

    def __init__(self, experts: int, hidden: int, intermediate: int, *, bias: bool = False, **form: Any) -> None:
        super().__init__()
        self.gate_up_proj = GroupedSwiGLU(experts, hidden, intermediate, bias, **form)
        self.down_proj = GroupedLinear(experts, intermediate, hidden, bias)
        self.biased = bias

    def forward(
        self, x: Tensor, rows: SortedTokens | Tensor, weight_M: Tensor, quantized: QuantizedRows | None = None
    ) -> Tensor:
        """Tokens (T, H) and where they go, or rows (M, H) sorted by expert and their ends (E,) -> (M, H), times the
        sorted rows' routing weights `weight_M`. quantized: see `GroupedLinear`."""
        # Without a last bias, weighting before the last product is the same, and its result need not be kept.
        scale_M, ends = None if self.biased else weight_M, rows.offs if isinstance(rows, SortedTokens) else rows
        h_MI, h_rows = self.gate_up_proj(x, rows, scale_M, quantized=quantized, then=self.down_proj)
        y_MH = self.down_proj(h_MI, ends, quantized=h_rows)
        if not self.biased:
            return y_MH
        return (y_MH * weight_M.unsqueeze(1)).to(y_MH.dtype)  # a float32 router's weights do not widen the rows


class SparseMLP(nn.Module):
    """Every token goes to its K best experts, here or on another expert-parallel rank; none is dropped. shared_experts:
    an MLP that all tokens go through besides."""

    def __init__(self, gate: Router, experts: nn.Module, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts
        self.dispatcher: Dispatcher = ExpertParallel(gate.out_features).dispatcher()

    def forward(self, x_BSH: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H). Collective over the expert-parallel ranks."""
        return run_segments(self._routed(lambda part: False), {"x": x_BSH, "normed": x_BSH})["y"]

    def segments(self, recompute: Parts) -> list[Segment]:
        """From "x" and "normed" to "y"."""
        if self.dispatcher.dispatch is None:  # nothing to overlap: routing and experts are kept, or not, together
            return [Compute(self, "normed", "y", recompute("experts") or recompute("dispatch"))]
        return with_forward_hooks(self, self._routed(recompute), ("normed",), ("y",))

    def _routed(self, recompute: Parts) -> list[Segment]:
        ways, there, back = self.dispatcher, self.dispatcher.dispatch, self.dispatcher.combine
        again, layer, sent = recompute("dispatch"), recompute("layer"), ("rows", "weights", "plan")
        run, computed = partial(run_experts, self.experts), recompute("experts") or again
        found: list[Segment] = [
            Compute(lambda x_BSH: ways.plan(x_BSH.flatten(0, 1), *self.gate(x_BSH)), "normed", sent, layer or again)
        ]
        if there is None or back is None:  # the rows are the tokens themselves
            found.append(Compute(run, ("normed", "weights", "plan"), "rows", computed))
        else:
            received = ("rows", "weights", "received")
            found += [
                Communicate(there, sent, received, again),
                Compute(run, received, "rows", computed),
                Communicate(back, ("rows", "received"), "rows"),
            ]
        found += [Compute(lambda x, rows, plan: ways.finish(rows, plan).view_as(x), ("x", "rows", "plan"), "y", layer)]
        if self.shared_experts is not None:
            found += [Compute(self.shared_experts, "normed", "shared", recompute("experts")),
                      Compute(torch.add, ("y", "shared"), "y", layer)]
        return found


class DenseMLP(nn.Module):
    """SwiGLU without experts."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=False)
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self.down_proj(F.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH))

    def segments(self, recompute: Parts) -> list[Segment]:
        """From "x" and "normed" to "y"."""
        return [Compute(self, "normed", "y", recompute("experts"))]


class Layer(nn.Module):
    """Attention, then experts or a dense MLP, each behind a norm and added to what came in."""

    def __init__(self, config: HubConfig, attention: Attention, mlp: SparseMLP | DenseMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        return run_segments(self.segments(lambda part: False), {"x": x_BSH, "context": context})["x"]

    def segments(self, recompute: Parts) -> list[Segment]:
        """From "x" and "context" to "x"; `recompute` says which parts are computed again."""

        def normed(norm: RMSNorm, *added: Tensor) -> tuple[Tensor, Tensor]:
            normed_BSH, x_BSH = norm(*added, keep=True)
            return x_BSH, normed_BSH.to(x_BSH.dtype)  # which a dtype plan may keep in float32

        return [
            Compute(partial(normed, self.input_layernorm), "x", ("x", "normed"), recompute("norms")),
            *self.self_attn.segments(recompute),
            Compute(partial(normed, self.post_attention_layernorm), ("x", "y"), ("x", "normed"), recompute("norms")),
            *self.mlp.segments(recompute),
            Compute(torch.add, ("x", "y"), "x", recompute("layer")),
        ]


class PredictionLayer(Layer):
    """A layer for multi-token prediction: from what the model, or the prediction before, knows of a token and the
    embedding of the one that was predicted to what the head makes the next prediction of (DeepSeek-V3,
    arXiv:2412.19437, section 2.2).

    The projection takes the embedding first, as in the published weights, not in the paper; what goes from one
    prediction to the next is behind its norm, as Megatron and vLLM have it.
    """

    def __init__(self, config: HubConfig, attention: Attention, mlp: SparseMLP | DenseMLP) -> None:
        super().__init__(config, attention, mlp)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.eh_proj.quantizable = False  # bfloat16 among the published FP8 weights, and their readers take no scales
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def forward(  # type: ignore[override]
        self, hidden_BSH: Tensor, embedded_BSH: Tensor, context: Context
    ) -> Tensor:
        """Known of each token (B, S, H), and the embeddings of the tokens predicted -> (B, S, H)."""
        carry = {"hidden0": hidden_BSH, "embedded": embedded_BSH, "context": context}
        return run_segments(self.segments(lambda part: False), carry)["hidden1"]

    def segments(self, recompute: Parts, depth: int = 0) -> list[Segment]:
        """From "hidden0" (of another `depth` that), "embedded" and "context" to "hidden1"."""

        def joined(hidden_BSH: Tensor, embedded_BSH: Tensor) -> Tensor:
            both = self.enorm(embedded_BSH), self.hnorm(hidden_BSH)
            return self.eh_proj(torch.cat(both, dim=-1).to(hidden_BSH.dtype))

        return [
            Compute(joined, (f"hidden{depth}", "embedded"), "x", recompute("layer")),
            *super().segments(recompute),
            Compute(self.shared_head["norm"], "x", f"hidden{depth + 1}", recompute("norms")),
        ]
