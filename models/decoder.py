"""What the families share: decoder layers behind norms, experts or a dense MLP in them, and the stages they make up.

A family is a configuration that says what its layers are (`layer`), attention, and whatever else is its own: see
`qwen3_moe`, the simplest. Parameters are named as in the unpipelined model, by the layer's global index, so that the
stages' state dicts together are that of the whole model, which is itself one stage with every layer.

Dimension letters: B batch, S sequence, T tokens (B * S), H hidden, E experts, K experts per token, M routed rows
(T * K), I expert intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe.kernels import SortedTokens
from dualpipe.models.hub import HubConfig
from dualpipe.models.sizes import head_flops, layer_flops
from dualpipe.models.stages import Recompute, split_layers
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear, RMSNorm, Router
from dualpipe.nn.attention import Context
from dualpipe.nn.init import seeded_normal_
from dualpipe.nn.segments import Communicate, Compute, Segment
from dualpipe.parallel.expert import Dispatcher, ExpertParallel, expert_parallel_mlp, run_experts

_TYPICAL_LENGTH = 4096  # of a sequence, where the costs of layers are weighed against that of the head


class Experts(nn.Module):
    """SwiGLU experts as stacked weights: gate_up (E, 2I, H), down (E, H, I)."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = GroupedSwiGLU(experts, hidden, intermediate)
        self.down_proj = GroupedLinear(experts, intermediate, hidden)

    def forward(self, x: Tensor, rows: SortedTokens | Tensor, weight_M: Tensor) -> Tensor:
        """Tokens (T, H) and where they go, or rows (M, H) sorted by expert and their ends (E,) -> (M, H).

        `weight_M` are the sorted rows' routing weights. Without a bias, weighting before the last product is weighting
        its result, which then need not be kept.
        """
        h_MI = self.gate_up_proj(x, rows, weight_M)
        return self.down_proj(h_MI, rows.offs if isinstance(rows, SortedTokens) else rows)


class SparseMLP(nn.Module):
    """Every token goes to its K best experts, here or on another expert-parallel rank; none is dropped.

    shared_experts: an MLP that all tokens go through besides.
    """

    def __init__(self, gate: Router, experts: nn.Module, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        if shared_experts is not None:
            self.shared_experts = shared_experts
        self.dispatcher: Dispatcher = ExpertParallel(gate.out_features).dispatcher()

    def forward(self, x_BSH: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H). Collective over the expert-parallel ranks."""
        weights_TK, experts_TK = self.gate(x_BSH)
        y_TH = expert_parallel_mlp(self.dispatcher, self.experts, x_BSH.flatten(0, 1), weights_TK, experts_TK)
        y_BSH = y_TH.view_as(x_BSH)
        return y_BSH + self.shared_experts(x_BSH) if hasattr(self, "shared_experts") else y_BSH

    def segments(self, recompute: Callable[[str], bool]) -> list[Segment]:
        """From "x" and "normed" to "x"."""
        again = recompute("dispatch")
        if not self.dispatcher.communicates:
            return [Compute(self, "normed", "y", recompute("experts") or again), _residual(recompute)]
        run = partial(run_experts, self.experts)
        found = [
            Compute(self._route, "normed", ("rows", "weights", "plan"), recompute("layer") or again),
            Communicate(self.dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received"), again),
            Compute(run, ("rows", "weights", "received"), "rows", recompute("experts") or again),
            Communicate(self.dispatcher.combine, ("rows", "received"), "rows"),
            Compute(self._finish, ("x", "rows", "plan"), "y", recompute("layer")),
        ]
        if hasattr(self, "shared_experts"):
            found += [Compute(self.shared_experts, "normed", "shared", recompute("experts")),
                      Compute(torch.add, ("y", "shared"), "y", recompute("layer"))]
        return [*found, _residual(recompute)]

    def _route(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.dispatcher.plan(x_BSH.flatten(0, 1), *self.gate(x_BSH))

    def _finish(self, x_BSH: Tensor, rows: Tensor, plan: Any) -> Tensor:
        return self.dispatcher.finish(rows, plan).view_as(x_BSH)


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

    def segments(self, recompute: Callable[[str], bool]) -> list[Segment]:
        """From "x" and "normed" to "x"."""
        return [Compute(self, "normed", "y", recompute("experts")), _residual(recompute)]


def _residual(recompute: Callable[[str], bool]) -> Segment:
    return Compute(torch.add, ("x", "y"), "x", recompute("layer"))


class Layer(nn.Module):
    """Attention, then experts or a dense MLP, each behind a norm and added to what came in.

    attention: called as `attention(x_BSH, context)`.
    """

    def __init__(self, config: HubConfig, attention: nn.Module, mlp: SparseMLP | DenseMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        x_BSH = self._attend(x_BSH, self.input_layernorm(x_BSH), context)
        return x_BSH + self.mlp(self._normed(x_BSH))

    def segments(self, recompute: Callable[[str], bool]) -> list[Segment]:
        """The same over a carry with "x" and "context"; `recompute` says which parts are computed again."""
        return [
            Compute(self.input_layernorm, "x", "normed", recompute("norms")),
            Compute(self._attend, ("x", "normed", "context"), "x", recompute("attention")),
            Compute(self._normed, "x", "normed", recompute("norms")),
            *self.mlp.segments(recompute),
        ]

    def _attend(self, x_BSH: Tensor, normed_BSH: Tensor, context: Context) -> Tensor:
        return x_BSH + self.self_attn(normed_BSH.to(x_BSH.dtype), context)

    def _normed(self, x_BSH: Tensor) -> Tensor:
        return self.post_attention_layernorm(x_BSH).to(x_BSH.dtype)  # which a dtype plan may keep in float32


class Stage(nn.Module):
    """Consecutive layers; the embedding where `first`, the final norm and the head where `last`.

    The unpipelined model is `Stage(config, range(config.num_hidden_layers), first=True, last=True)`. With tied
    embeddings the head of a stage that is not also the first shares `embedding`, the first stage's `embed_tokens`.
    """

    def __init__(
        self,
        config: HubConfig,
        layers: range,
        *,
        first: bool,
        last: bool,
        embedding: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if first:
            embedding = self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): config.layer(index) for index in layers})
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = _tied_weight(embedding)
        self.first, self.last = first, last
        self.recompute = Recompute()

    def use_expert_parallelism(self, experts: ExpertParallel) -> None:
        """Have the layers' experts on all ranks of `experts`; for parameters see `shard_experts`."""
        for layer in self.layers.values():
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.dispatcher = experts.dispatcher()

    def compile_dense(self, **options: Any) -> None:
        """Have norms, attention and dense MLPs go through `torch.compile(**options)`; experts have their own kernels.

        What is between linear layers is compiled: those themselves hand out weight gradients, which no compiler sees.
        """
        for layer in self.layers.values():
            parts = [layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm]
            for part in (*parts, *(module for module in layer.mlp.modules() if isinstance(module, DenseMLP))):
                part.compile(**options)

    def segments(self) -> list[Segment]:
        """The forward in parts, for the pipeline to overlap and, as `recompute` says, to compute again."""
        found: list[Segment] = [Compute(self.embed_tokens, "x", "x")] if self.first else []
        if self.layers:
            found.append(Compute(self._context, ("x", "positions"), "context"))
        for index, layer in self.layers.items():
            found += layer.segments(partial(self.recompute, layer=int(index)))
        if self.last:
            found.append(Compute(lambda x_BSH: self.lm_head(self.norm(x_BSH)), "x", "x"))
        return found or [Compute(lambda x_BSH: x_BSH, "x", "x")]

    def _context(self, x_BSH: Tensor, positions_BS: Tensor | None) -> Context:
        return Context(self.config.rotary, x_BSH, positions_BS)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens (B, S) on the first stage, else hidden (B, S, H) -> logits (B, S, V) on the last, else hidden.

        positions: of each token in its document (B, S), where a row holds several; attention does not cross documents.
        """
        x_BSH = self.embed_tokens(x) if self.first else x
        if self.layers:
            context = self._context(x_BSH, positions)
            for layer in self.layers.values():
                x_BSH = layer(x_BSH, context)
        return self.lm_head(self.norm(x_BSH)) if self.last else x_BSH

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Weights from N(0, initializer_range^2), norms one, biases zero.

        The values depend on the seed and on a parameter's name alone, not on how the model is cut or sharded.
        """
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                param.fill_(1.0)
            elif name.endswith(".bias"):
                param.zero_()
            else:
                tied = name == "lm_head.weight" and self.config.tie_word_embeddings
                unique = "embed_tokens.weight" if tied else name
                seeded_normal_(param, std=self.config.initializer_range, seed=seed, name=unique)


def _tied_weight(embedding: nn.Embedding | None) -> nn.Parameter:
    if embedding is None:
        raise ValueError("tie_word_embeddings: the last stage shares the weight of the first; build both in one call "
                         "of build_stages, or pass the first stage's embed_tokens as embedding")
    return embedding.weight


def build_stages(
    config: HubConfig,
    num_stages: int,
    only: Sequence[int] | None = None,
    layers_per_stage: Sequence[int] | None = None,
) -> list[Stage]:
    """The stages of a pipeline, layers split so that all compute about as much, or as `layers_per_stage` says.

    `only` names the stages to build, such as those of one rank; the result is in its order. Raises `ValueError` for
    more stages than layers allow, and for tied embeddings whose two ends are not built together.
    """
    costs = [layer_flops(config, index, _TYPICAL_LENGTH) for index in range(config.num_hidden_layers)]
    cuts = split_layers(costs, num_stages, layers_per_stage, head=head_flops(config))
    wanted = list(range(num_stages)) if only is None else list(only)
    if outside := [stage for stage in wanted if not 0 <= stage < num_stages]:
        raise ValueError(f"only must name stages from 0 to {num_stages - 1}; got {outside}")
    built: dict[int, Stage] = {}
    for stage in sorted(wanted):  # the first before the last, which may share its embedding
        embedding = built[0].embed_tokens if 0 in built else None
        last = stage == num_stages - 1
        built[stage] = Stage(config, cuts[stage], first=stage == 0, last=last, embedding=embedding)
    return [built[stage] for stage in wanted]
