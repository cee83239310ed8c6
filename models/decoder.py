"""Building blocks of all model families: attention, expert and dense MLPs, and the decoder layer around them.

A module describes its computation once, in `segments`; its `forward` runs the segments in order.

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
from dualpipe.parallel.forward_hooks import with_forward_hooks

ShouldRecompute = Callable[[str], bool]
"""Return True if a part of a layer is recomputed before its backward; see `dualpipe.models.stages.Recompute`."""


def _no_recompute(part: str) -> bool:
    """Recompute nothing: the choice of a plain forward."""
    return False


class Attention(nn.Module):
    """Base class of causal attention, called as `attention(x_BSH, context)`.

    The attributes describe its sizes; cost estimates and context parallelism read them.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int  # head dimension of queries and keys
    v_dim: int  # head dimension of values
    window: int | None  # positions that a token attends to, itself included; None: all positions up to its own
    scale: float  # multiplies the scores
    sinks: nn.Parameter | None  # (A,)
    shared: tuple[tuple[int, int], ...]  # (heads, head dimension) of each argument of `expand_kv`
    o_proj: Linear
    context_parallel: ContextParallel | None = None  # supplies the keys and values of other ranks' tokens
    max_logits_A: Tensor | None = None  # largest score of each head since the last reset; None: not recorded

    def project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return rotated queries (B, A, S, D), followed by the tensors that `expand_kv` takes."""
        return self.apply_rope(context, *self.qkv_proj(x_BSH))

    def qkv_proj(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the linear layers that read x, which `apply_rope` takes."""
        raise NotImplementedError

    def apply_rope(self, context: Context, *projections: Tensor) -> tuple[Tensor, ...]:
        """Split the outputs of `qkv_proj` into heads and rotate them; return the results of `project`."""
        raise NotImplementedError

    def expand_kv(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, G, S, D) and values (B, G, S, V).

        shared: the tensors that `project` returns after the queries, each (B, heads, S, head dimension).
        """
        raise NotImplementedError

    def logit_row_scales(self, factors_A: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the query and key parameters to scale for QK-clip, each with a factor for every row.

        factors_A: factor by which the attention scores of each head are to be multiplied, at most 1.

        Raises ValueError if a norm follows the projections: it bounds the scores, and undoes a scaled weight.
        """
        raise NotImplementedError

    def output(self, y_BASV: Tensor) -> Tensor:
        """Project the concatenated heads; returns (B, S, H)."""
        return self.o_proj(rearrange(y_BASV, "B A S V -> B S (A V)"))

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """Return attention over x (B, S, H), with the same shape."""
        # `project` is not called but repeated: the compiler cannot trace linear layers, so that the graph breaks at
        # them. A break inside a call of `project` would also break the graph after the rotation.
        q_BASD, *shared = self.apply_rope(context, *self.qkv_proj(x_BSH))
        k_BGSD, v_BGSV = self.expand_kv(*shared)
        return self.output(attend(
            q_BASD, k_BGSD, v_BGSV, context, scale=self.scale, window=self.window, sinks_A=self.sinks,
            max_logits_A=self.max_logits_A,
        ))

    def segments(self, should_recompute: ShouldRecompute) -> list[Segment]:
        """Return segments that read "normed" and "context" and write "y"."""
        recompute = should_recompute("attention")
        if self.context_parallel is None:
            return [Compute(self, ("normed", "context"), "y", recompute)]
        segments = self.context_parallel.segments(self, recompute)
        # `are_compiled`: the segments call `apply_rope`, which `Stage.compile_dense` compiles on its own.
        return with_forward_hooks(self, segments, ("normed", "context"), ("y",), are_compiled=True)


class GroupedQueryAttention(Attention):
    """Causal grouped-query attention.

    norms: apply an RMSNorm to the queries and keys of every head. sinks: give every head a sink. window: positions that
    a token attends to; None: all up to its own.
    """

    def __init__(
        self, config: GroupedQueryConfig, *, norms: bool = False, sinks: bool = False, window: int | None = None
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        bias = config.attention_bias
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        head_dim = config.head_dim
        self.num_heads = heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.qk_dim = head_dim
        self.v_dim = head_dim
        self.shared = ((kv_heads, head_dim), (kv_heads, head_dim))
        self.scale = head_dim**-0.5
        self.window = window
        self.norms = norms
        self.q_proj = Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(heads * head_dim, hidden, bias=bias)
        if norms:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(heads)) if sinks else None)

    def qkv_proj(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, S, heads * D), before norms and rotation."""
        return self.q_proj(x_BSH), self.k_proj(x_BSH), self.v_proj(x_BSH)

    def apply_rope(self, context: Context, *projections: Tensor) -> tuple[Tensor, ...]:
        """Return rotated queries (B, A, S, D) and keys (B, G, S, D), and values (B, G, S, D)."""
        q, k, v = (rearrange(x, "B S (A D) -> B S A D", D=self.head_dim) for x in projections)
        norms = (self.q_norm, self.k_norm) if self.norms else ()
        q_BASD, k_BGSD = apply_rope(q, k, *context.tables(q.dtype), norms)
        return q_BASD, k_BGSD, v.transpose(1, 2)

    def logit_row_scales(self, factors_A: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters of the queries alone, because several query heads share each key head."""
        if self.norms:
            raise ValueError("queries and keys have norms, which bound their scores: leave out optimizer.qk_clip")
        rows = factors_A.repeat_interleave(self.head_dim)
        return [(parameter, rows) for parameter in self.q_proj.parameters()]

    def expand_kv(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged."""
        k_BGSD, v_BGSD = shared
        return k_BGSD, v_BGSD


class Experts(nn.Module):
    """SwiGLU experts as stacked weights: gate_up (E, 2I, H), down (E, H, I), with biases if `bias`.

    form: the form of the activation, as keyword arguments of `GroupedSwiGLU`.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, *, bias: bool = False, **form: Any) -> None:
        super().__init__()
        self.gate_up_proj = GroupedSwiGLU(experts, hidden, intermediate, bias, **form)
        self.down_proj = GroupedLinear(experts, intermediate, hidden, bias)
        self.biased = bias

    def forward(
        self, x: Tensor, rows: SortedTokens | Tensor, weight_M: Tensor, quantized: QuantizedRows | None = None
    ) -> Tensor:
        """Return the experts' outputs (M, H), multiplied by the routing weights `weight_M` of the sorted rows.

        x: tokens (T, H), if `rows` is the order in which they are sorted by expert; or else the sorted rows (M, H), and
        `rows` is the end of each expert's rows (E,). quantized: see `GroupedLinear`.
        """
        offs_E = rows.offs if isinstance(rows, SortedTokens) else rows
        # Without a bias of down_proj, weighting before its GEMM is equivalent, and its output need not be saved.
        scale_M = None if self.biased else weight_M
        h_MI, h_rows = self.gate_up_proj(x, rows, scale_M, quantized=quantized, next_layer=self.down_proj)
        y_MH = self.down_proj(h_MI, offs_E, quantized=h_rows)
        if not self.biased:
            return y_MH
        return (y_MH * weight_M.unsqueeze(1)).to(y_MH.dtype)  # float32 weights of a router do not widen the rows


class SparseMLP(nn.Module):
    """Mixture of experts: sends every token to its K best experts, on any expert-parallel rank; drops none.

    shared_experts: an MLP that processes all tokens; its output is added to that of the experts.
    """

    def __init__(self, gate: Router, experts: nn.Module, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.dispatcher: Dispatcher = ExpertParallel(gate.out_features).dispatcher()

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts (B, S, H). Collective over the expert-parallel ranks."""
        return run_segments(self._expert_segments(_no_recompute), {"x": x_BSH, "normed": x_BSH})["y"]

    def segments(self, should_recompute: ShouldRecompute) -> list[Segment]:
        """Return segments that read "x" and "normed" and write "y"."""
        if self.dispatcher.dispatch is None:  # no communication to overlap: routing and experts are one segment
            recompute = should_recompute("experts") or should_recompute("dispatch")
            return [Compute(self, "normed", "y", recompute)]
        return with_forward_hooks(self, self._expert_segments(should_recompute), ("normed",), ("y",))

    def _expert_segments(self, should_recompute: ShouldRecompute) -> list[Segment]:
        """Return routing, dispatch, experts, combine and sum as segments, then the shared experts."""
        dispatcher = self.dispatcher
        recompute_layer = should_recompute("layer")
        recompute_dispatch = should_recompute("dispatch")
        recompute_experts = should_recompute("experts")
        run = partial(run_experts, self.experts)

        def route(x_BSH: Tensor) -> tuple[Tensor, Tensor, Any]:
            return dispatcher.plan(x_BSH.flatten(0, 1), *self.gate(x_BSH))

        def finish(x_BSH: Tensor, rows: Tensor, plan: Any) -> Tensor:
            return dispatcher.finish(rows, plan).view_as(x_BSH)

        planned = ("rows", "weights", "plan")
        segments: list[Segment] = [Compute(route, "normed", planned, recompute_layer or recompute_dispatch)]
        if dispatcher.dispatch is None or dispatcher.combine is None:  # all experts are local: rows are the tokens
            segments.append(
                Compute(run, ("normed", "weights", "plan"), "rows", recompute_experts or recompute_dispatch))
        else:
            received = ("rows", "weights", "received")
            segments += [
                Communicate(dispatcher.dispatch, planned, received, recompute_dispatch),
                Compute(run, received, "rows", recompute_experts or recompute_dispatch),
                Communicate(dispatcher.combine, ("rows", "received"), "rows"),
            ]
        segments.append(Compute(finish, ("x", "rows", "plan"), "y", recompute_layer))
        if self.shared_experts is not None:
            segments.append(Compute(self.shared_experts, "normed", "shared", recompute_experts))
            segments.append(Compute(torch.add, ("y", "shared"), "y", recompute_layer))
        return segments


class DenseMLP(nn.Module):
    """SwiGLU MLP without experts."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=False)
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), (B, S, H)."""
        return self.down_proj(F.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH))

    def segments(self, should_recompute: ShouldRecompute) -> list[Segment]:
        """Return one segment, which reads "normed" and writes "y"."""
        return [Compute(self, "normed", "y", should_recompute("experts"))]


class Layer(nn.Module):
    """Pre-norm decoder layer: attention, then experts or a dense MLP, each with a norm before and a residual around."""

    def __init__(self, config: HubConfig, attention: Attention, mlp: SparseMLP | DenseMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """Return the layer's output (B, S, H)."""
        return run_segments(self.segments(_no_recompute), {"x": x_BSH, "context": context})["x"]

    def segments(self, should_recompute: ShouldRecompute) -> list[Segment]:
        """Return segments that read "x" and "context" and write "x"."""

        def normalize(norm: RMSNorm, *summands: Tensor) -> tuple[Tensor, Tensor]:
            """Return the sum and its norm, cast to the dtype of the sum: a dtype plan may keep norms in float32."""
            normed_BSH, x_BSH = norm(*summands, return_sum=True)
            return x_BSH, normed_BSH.to(x_BSH.dtype)

        normalized = ("x", "normed")
        recompute_norms = should_recompute("norms")
        return [
            Compute(partial(normalize, self.input_layernorm), "x", normalized, recompute_norms),
            *self.self_attn.segments(should_recompute),
            Compute(partial(normalize, self.post_attention_layernorm), ("x", "y"), normalized, recompute_norms),
            *self.mlp.segments(should_recompute),
            Compute(torch.add, ("x", "y"), "x", should_recompute("layer")),
        ]


class PredictionLayer(Layer):
    """Multi-token prediction (MTP) layer (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    It reads the hidden states of the model or of the previous MTP layer, and the embeddings of the tokens that are
    predicted from those states. From its output, the head predicts the tokens one place further ahead.

    The projection takes the embedding first, as in the published weights, not as in the paper. The next MTP layer
    reads the output after its norm, as in Megatron and vLLM.
    """

    def __init__(self, config: HubConfig, attention: Attention, mlp: SparseMLP | DenseMLP) -> None:
        super().__init__(config, attention, mlp)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.eh_proj.quantizable = False  # published FP8 checkpoints store it in bfloat16, without scales
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def forward(  # type: ignore[override]
        self, hidden_BSH: Tensor, embedded_BSH: Tensor, context: Context
    ) -> Tensor:
        """Return hidden states (B, S, H) for the head, from the previous ones and the predicted tokens' embeddings."""
        carry = {"hidden0": hidden_BSH, "embedded": embedded_BSH, "context": context}
        return run_segments(self.segments(_no_recompute), carry)["hidden1"]

    def segments(self, should_recompute: ShouldRecompute, depth: int = 0) -> list[Segment]:
        """Return segments that read "hidden<depth>", "embedded" and "context" and write "hidden<depth + 1>"."""

        def join(hidden_BSH: Tensor, embedded_BSH: Tensor) -> Tensor:
            joined_BSH = torch.cat((self.enorm(embedded_BSH), self.hnorm(hidden_BSH)), dim=-1)
            return self.eh_proj(joined_BSH.to(hidden_BSH.dtype))

        return [
            Compute(join, (f"hidden{depth}", "embedded"), "x", should_recompute("layer")),
            *super().segments(should_recompute),
            Compute(self.shared_head["norm"], "x", f"hidden{depth + 1}", should_recompute("norms")),
        ]
