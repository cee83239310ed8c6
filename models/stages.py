"""Pipeline stages of a model: the split of its layers, the parts to recompute, and the forward of each stage.

Parameters have the names of the unpipelined model, with the layer's global index: the union of the stages' state dicts
is the state dict of the whole model. The whole model is one stage that has every layer.

Dimension letters: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from math import inf
from operator import add
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualpipe.models.decoder import DenseMLP, Layer, PredictionLayer, SparseMLP
from dualpipe.models.flops import last_flops, layer_flops
from dualpipe.models.hub import HubConfig
from dualpipe.nn import Embedding, Linear, RMSNorm
from dualpipe.nn.attention import Context
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.head import HeadedStage, LinearHead
from dualpipe.nn.init import local_part, seeded_normal_
from dualpipe.nn.lora import initial_values
from dualpipe.nn.segments import Compute, Segment, input_names, run_segments
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.forward_hooks import with_forward_hooks

RECOMPUTE = ("attention", "experts", "norms", "layer", "dispatch")
_RULE = re.compile(r"(\w+)(?::(\d+)(?:-(\d+))?)?")  # a part, and its first and last layer
_NO_LAST_LAYER = 10**6  # the last layer of a rule for all layers
_TYPICAL_LENGTH = 4096  # sequence length at which the costs of layers and of the head are compared


class Recompute:
    """Choice of the parts of layers that save their inputs only, and recompute their forward before their backward.

    Rules are "attention", "experts" (or the dense MLP), "norms" or "layer" (all of these), for all layers or, as
    "experts:0-7", for a range of layers. Rows that the experts received from other ranks stay saved, except with the
    rule "dispatch", which recomputes routing and experts and repeats the dispatch between them. Keys and values that
    ring attention receives from other ranks are never saved but sent again, whatever the rules. "none" alone is no
    rule.

    num_layers: the number of layers of the model, if known. Raises ValueError for an unknown rule, for "none" beside
    others, and for layers that the model does not have.
    """

    def __init__(self, rules: Iterable[str] = (), num_layers: int | None = None) -> None:
        rules = tuple(rules)
        if rules == ("none",):
            rules = ()
        if "none" in rules:
            raise ValueError(f"cannot recompute {', '.join(rules)}: none is not one of several; leave out none, or all "
                             "the others")
        self._rules = [_parse_rule(rule, num_layers) for rule in rules]

    def __call__(self, part: str, layer: int) -> bool:
        """Return True if a part of a layer is recomputed."""
        parts = (part,) if part == "dispatch" else (part, "layer")
        return any(rule_part in parts and layer in layers for rule_part, layers in self._rules)


def _parse_rule(rule: str, num_layers: int | None) -> tuple[str, range]:
    """Return the part and the layers of a rule such as "experts:0-7"."""
    match = _RULE.fullmatch(rule)
    if match is None or match[1] not in RECOMPUTE:
        raise ValueError(f"cannot recompute {rule!r}; say none, or any of {', '.join(RECOMPUTE)}, with layers "
                         "if it is not for all of them, such as experts:0-7")
    part, first, last = match.groups()
    if first is None:
        return part, range(_NO_LAST_LAYER + 1)
    layers = range(int(first), int(last or first) + 1)
    is_outside = num_layers is not None and layers.stop > num_layers
    if not layers or is_outside:
        limits = f"the model has layers 0 to {num_layers - 1}" if num_layers else "layers are counted from 0"
        raise ValueError(f"cannot recompute {rule!r}: {limits}; name the first and the last, such as experts:0-7")
    return part, layers


class Stage(HeadedStage):
    """Pipeline stage: consecutive layers, with the embedding if `first`, with norm, head and MTP layers if `last`.

    The unpipelined model is `Stage(config, range(config.num_hidden_layers), first=True, last=True)`.

    embedding: `embed_tokens` of the first stage, if that is on the same rank. A last stage that needs the embedding
    too, for a tied head or for multi-token prediction (MTP), shares its weight; with None, it has a copy.
    """

    def __init__(
        self, config: HubConfig, layers: range, *, first: bool, last: bool, embedding: nn.Embedding | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.first = first
        self.last = last
        self.recompute = Recompute()
        self.split = SequenceSplit()
        self._num_group_changes = 0  # changes of the groups that segments communicate over
        is_tied = last and config.tie_word_embeddings
        if first or (last and config.mtp_depth) or (is_tied and embedding is None):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            if not first and embedding is not None:
                self.embed_tokens.weight = embedding.weight
            embedding = self.embed_tokens
        indices = (*layers, *config.mtp_layers) if last else layers
        self.layers = nn.ModuleDict({str(index): config.layer(index) for index in indices})
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if is_tied and embedding is not None:
            self.lm_head.weight = embedding.weight

    def numbered(self) -> Iterator[tuple[int, Layer]]:
        """Return the layers with their global indices."""
        return ((int(index), cast(Layer, layer)) for index, layer in self.layers.items())

    def use_expert_parallelism(self, experts: ExpertParallel) -> None:
        """Dispatch tokens to the experts of all ranks of `experts`; `shard_experts` shards the parameters."""
        self._num_group_changes += 1
        for module in self.modules():
            if isinstance(module, SparseMLP):
                module.dispatcher = experts.dispatcher()

    def use_context_parallelism(self, context: ContextParallel) -> None:
        """Share sequences with all ranks of `context`.

        The forward then takes the tokens that `context.split` assigns to this rank, and the positions of all tokens.
        Raises ValueError if the layers' heads do not fit the method of `context`.
        """
        self._num_group_changes += 1
        self.split = context.split
        for _, layer in self.numbered():
            context.method_of(layer.self_attn)
            layer.self_attn.context_parallel = context if context.split.size > 1 else None

    def tied_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the other end of the pipeline has too, shared or as a copy.

        This is the embedding, where the head is tied to it or MTP layers read it.
        """
        is_an_end = self.first is not self.last
        if not is_an_end or not (self.config.tie_word_embeddings or self.config.mtp_depth):
            return []
        owner = self.embed_tokens if hasattr(self, "embed_tokens") else self.lm_head
        return [cast(nn.Parameter, owner.weight)]

    def linear_head(self) -> LinearHead | None:
        """Return the head, for a pipeline that runs it in parts with the loss; None without a linear layer."""
        head = getattr(self, "lm_head", None)
        return LinearHead(head) if isinstance(head, nn.Linear) else None

    def compile_dense(self, **options: Any) -> None:
        """Compile attention and dense MLPs with `torch.compile(**options)`.

        Graphs break at linear layers, because the compiler cannot trace deferred weight gradients. Experts and norms
        are not compiled, since they have Triton kernels: the host takes 60 us for the forward and backward of a norm,
        and 120 us for a compiled norm.
        """
        for _, layer in self.numbered():
            dense_mlps = [module for module in layer.mlp.modules() if isinstance(module, DenseMLP)]
            for module in (layer.self_attn, *dense_mlps):
                module.compile(**options)
            # With context parallelism attention is not called as a whole: compile its part before the communication.
            layer.self_attn.apply_rope = torch.compile(  # type: ignore[method-assign]
                layer.self_attn.apply_rope, **options)

    def segments(self) -> list[Segment]:
        """Return the forward as segments for the pipeline to overlap; `recompute` chooses those to recompute."""
        layers: list[Segment] = []
        predictions: list[Sequence[Segment]] = []
        for index, layer in self.numbered():
            should_recompute = partial(self.recompute, layer=index)
            if not isinstance(layer, PredictionLayer):
                layers += with_forward_hooks(layer, layer.segments(should_recompute), ("x", "context"), ("x",))
                continue
            depth = len(predictions)
            inputs = (f"hidden{depth}", "embedded", "context")
            segments = with_forward_hooks(
                layer, layer.segments(should_recompute, depth), inputs, (f"hidden{depth + 1}",))
            if self.last:
                predictions.append(segments)
            else:  # a stage of this layer alone, built to be measured
                layers += segments
        return self._with_ends(layers, predictions)

    def segments_key(self) -> Hashable:
        """Return the state that the segments depend on and that may change between steps: see `docs/overlap.md`."""
        return self._num_group_changes, self.recompute, tuple(self.children()), tuple(self.layers.values())

    def forward(
        self, x: Tensor, positions: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return logits (B, S, V) on the last stage, hidden states (B, S, H) on the others.

        x: tokens (B, S) on the first stage, hidden states (B, S, H) on the others. positions: the position of each
        token in its document (B, S), for rows that hold several documents; attention does not cross documents. With
        context parallelism, x has this rank's tokens and `positions` those of the whole sequence. ahead: the tokens
        that follow each token, nearest first (B, S, depth), negative where there is none; the last stage of a model
        with MTP layers then returns a tuple: its logits, and those of the tokens ahead.
        """
        layers: list[Segment] = []
        predictions: list[Sequence[Segment]] = []
        for layer in self.layers.values():
            if not isinstance(layer, PredictionLayer):
                layers.append(Compute(layer, ("x", "context"), "x"))
            elif ahead is not None:
                depth = len(predictions)
                predictions.append([Compute(layer, (f"hidden{depth}", "embedded", "context"), f"hidden{depth + 1}")])
        segments = self._with_ends(layers, predictions)
        carry = run_segments(segments, {"x": x, "positions": positions, "ahead": ahead})
        outputs = tuple(carry[name] for name in segments[-1].writes)
        return outputs if len(outputs) > 1 else outputs[0]

    def _with_ends(self, layers: Iterable[Segment], predictions: Sequence[Iterable[Segment]]) -> list[Segment]:
        """Return all segments of the stage: read "x", "positions" and "ahead", write the outputs.

        layers, predictions: the segments of the layers, and those of each MTP layer.
        """
        segments: list[Segment] = []
        if self.first:
            segments.append(Compute(self.embed_tokens, "x", "x"))
        if self.layers:
            context = partial(Context, self.config.rotary, split=self.split)
            segments.append(Compute(context, ("x", "positions"), "context"))
            segments.extend(layers)
        if predictions:
            segments.append(Compute(self.norm, "x", "hidden0"))
            for depth, prediction in enumerate(predictions):
                segments.append(Compute(partial(self._embed_ahead, depth), "ahead", "embedded"))
                segments.extend(prediction)
            hidden = tuple(f"hidden{depth}" for depth in range(len(predictions) + 1))
            segments.append(Compute(self._heads, hidden, input_names(len(hidden))))
        elif self.last:
            segments.append(Compute(lambda x_BSH: self._head(self.norm(x_BSH)), "x", "x"))
        return segments or [Compute(lambda x_BSH: x_BSH, "x", "x")]

    def _heads(self, *hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of every prediction."""
        return tuple(map(self._head, hidden))

    def _head(self, x_BSH: Tensor) -> Tensor:
        """Return logits (B, S, V); inside of `without_head` the hidden states."""
        logits_or_x: Tensor = self.lm_head(x_BSH) if self._applies_head else x_BSH
        return logits_or_x

    def _embed_ahead(self, depth: int, ahead_BSD: Tensor | None) -> Tensor:
        """Return the embeddings of the tokens `depth` + 1 places ahead."""
        if ahead_BSD is None:
            raise ValueError("the input `ahead` is missing, which layers for multi-token prediction read: give the "
                             'step side={"ahead": tokens (B, S, depth)}')
        return self.embed_tokens(ahead_BSD[..., depth].clamp(min=0))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize weights from N(0, initializer_range^2), norms to one, biases to zero, and adapters like peft.

        The values depend on the seed and on the name of a parameter alone, not on how the model is split or sharded.
        """
        factors = initial_values(self, seed)
        for name, param in self.named_parameters():
            if name in factors:
                local, part = local_part(param)
                local.copy_(factors[name][part])
            elif name.endswith("norm.weight"):
                param.fill_(1.0)
            elif name.endswith(".bias"):
                param.zero_()
            else:
                if name == "lm_head.weight" and self.config.tie_word_embeddings:
                    name = "embed_tokens.weight"
                seeded_normal_(param, std=self.config.initializer_range, seed=seed, name=name)


@lru_cache(maxsize=64)  # callers ask for the same stages many times, and building many layers takes a second
def meta_stages(
    config: HubConfig, num_stages: int = 1, only: tuple[int, ...] | None = None, layers_per_stage: tuple[int, ...] = ()
) -> tuple[Stage, ...]:
    """Build stages on the meta device, for inspection only: all callers get the same objects."""
    with torch.device("meta"):
        return tuple(build_stages(config, num_stages, only, layers_per_stage))


def build_stages(
    config: HubConfig, num_stages: int, only: Sequence[int] | None = None, layers_per_stage: Sequence[int] | None = None
) -> list[Stage]:
    """Build the stages of a pipeline, with layers split to equal compute or as `layers_per_stage` says.

    only: the stages to build, such as those of one rank, returned in this order (default: all). Raises `ValueError` for
    more stages than the layers allow, and if `only` has numbers of stages that do not exist.
    """
    cuts = stage_layers(config, num_stages, tuple(layers_per_stage or ()))
    requested = list(range(num_stages)) if only is None else list(only)
    outside = [stage for stage in requested if not 0 <= stage < num_stages]
    if outside:
        raise ValueError(f"only must name stages from 0 to {num_stages - 1}; got {outside}")
    built: dict[int, Stage] = {}
    for stage in sorted(requested):  # the first stage before the last, which may share its embedding
        embedding = built[0].embed_tokens if 0 in built else None
        is_last = stage == num_stages - 1
        built[stage] = Stage(config, cuts[stage], first=stage == 0, last=is_last, embedding=embedding)
    return [built[stage] for stage in requested]


@lru_cache(maxsize=256)
def stage_layers(config: HubConfig, num_stages: int, layers_per_stage: tuple[int, ...] = ()) -> list[range]:
    """Return the global layer indices of each stage, as `build_stages` splits them."""
    costs = [layer_flops(config, index, _TYPICAL_LENGTH) for index in range(config.num_hidden_layers)]
    return split_layers(costs, num_stages, layers_per_stage, head=last_flops(config, _TYPICAL_LENGTH))


def split_layers(
    layers: int | Sequence[float], num_stages: int, layers_per_stage: Sequence[int] | None = None, *, head: float = 0.0
) -> list[range]:
    """Split layers into stages of consecutive layers with costs as equal as possible; returns their global indices.

    layers: the number of layers, or the cost of each. head: the cost of the rest of the last stage, in the same unit.
    layers_per_stage: the split to use instead.

    The split minimizes the cost of the costliest stage, then the sum of squared costs. If several splits are equal, the
    one with more layers in the middle is taken, since the first stage also has the embedding. The first and the last
    stage may have no layer. Raises `ValueError` if a middle stage would have none. Example: 6 layers in 4 stages are 1,
    2, 2, 1.
    """
    costs = [1.0] * layers if isinstance(layers, int) else list(layers)
    if num_stages < 1 or len(costs) < max(0, num_stages - 2):
        most = len(costs) + 2
        raise ValueError(f"cannot cut {len(costs)} layers into {num_stages} stages; use 1 to {most}: pp at most "
                         f"{most // 2} with two stages on a rank, as in dualpipev, or {most} with one, as in 1f1b")
    counts = list(layers_per_stage) if layers_per_stage else _equal_cost_counts(costs, num_stages, head)
    if len(counts) != num_stages or sum(counts) != len(costs) or min(counts) < 0 or 0 in counts[1:-1]:
        raise ValueError(f"layers_per_stage must be {num_stages} numbers that add up to {len(costs)}, only the first "
                         f"and the last may be 0; got {counts}")
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _equal_cost_counts(costs: Sequence[float], num_stages: int, head: float) -> list[int]:
    """Return the number of layers of each stage; see `split_layers`."""
    cost_before = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        if start == stop and 0 < stage < num_stages - 1:
            return inf
        return cost_before[stop] - cost_before[start] + (head if stage == num_stages - 1 else 0.0)

    largest, _ = _best_cuts(len(costs), num_stages, cost, max)
    limit = largest * (1 + 1e-9)
    unit = (cost_before[-1] + head) ** 2 or 1.0

    def unevenness(stage: int, start: int, stop: int) -> float:
        stage_cost = cost(stage, start, stop)
        if stage_cost > limit:
            return inf
        from_middle = abs(2 * stage - num_stages + 1.1)  # 1.1, not 1: the earlier of two stages is nearer
        return stage_cost**2 / unit + 1e-9 * from_middle * (stop - start)

    _, counts = _best_cuts(len(costs), num_stages, unevenness, add)
    return counts


def _best_cuts(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Minimize the `join` of `cost(stage, start, stop)` over all stages; return it and the stages' numbers of layers.

    Dynamic programming: after each stage, the best split of the first n layers for every n.
    """
    best: list[tuple[float, list[int]]] = [(inf if stop else 0.0, []) for stop in range(num_layers + 1)]
    for stage in range(num_stages):
        best = [
            min((join(best[start][0], cost(stage, start, stop)), [*best[start][1], stop - start])
                for start in range(stop + 1))
            for stop in range(num_layers + 1)
        ]
    return best[-1]
