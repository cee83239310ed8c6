"""The stages that a model's layers make up: how they are cut, what of them is computed again, and what they compute.

Parameters are named as in the unpipelined model, by the layer's global index, so that the stages' state dicts together
are that of the whole model, which is itself one stage with every layer.

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
from dualpipe.nn.init import seeded_normal_
from dualpipe.nn.segments import Compute, Segment, input_names, run_segments
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.fsdp.forward_hooks import with_forward_hooks

RECOMPUTE = ("attention", "experts", "norms", "layer", "dispatch")
_TYPICAL_LENGTH = 4096  # of a sequence, where the costs of layers are weighed against that of the head


class Recompute:
    """Which parts of which layers keep their inputs only, and run their forward again before their backward.

    Rules are "attention", "experts" (or the dense MLP), "norms" or "layer" (all of these), of all layers or, as
    "experts:0-7", of some. What other ranks sent to the experts is kept, unless the rule is "dispatch": routing and
    experts again, and the tokens sent again in between. Keys and values that travel in a ring are sent again by any
    rule. "none" stands for no rule.

    num_layers: of the model, where it is known. Raises ValueError for rules that there are not, or of no such layers.
    """

    def __init__(self, rules: Iterable[str] = (), num_layers: int | None = None) -> None:
        self._rules: list[tuple[str, range]] = []
        for rule in rules:
            if rule == "none":
                continue
            found = re.fullmatch(r"(\w+)(?::(\d+)(?:-(\d+))?)?", rule)
            if found is None or found[1] not in RECOMPUTE:
                raise ValueError(f"cannot recompute {rule!r}; say none, or any of {', '.join(RECOMPUTE)}, with layers "
                                 "where it is not for all of them, such as experts:0-7")
            first, last = int(found[2] or 0), int(found[3] or found[2] or 10**6)
            if found[2] and (last < first or (num_layers is not None and last >= num_layers)):
                known = f"the model has layers 0 to {num_layers - 1}" if num_layers else "layers are counted from 0"
                raise ValueError(f"cannot recompute {rule!r}: {known}; name the first and the last, such as "
                                 "experts:0-7")
            self._rules.append((found[1], range(first, last + 1)))

    def __call__(self, part: str, layer: int) -> bool:
        """Return True if a part of a layer is computed again."""
        kinds = (part,) if part == "dispatch" else (part, "layer")
        return any(kind in kinds and layer in layers for kind, layers in self._rules)


class Stage(nn.Module):
    """Consecutive layers; the embedding where `first`, the final norm, the head and layers for multi-token prediction
    where `last`.

    The unpipelined model is `Stage(config, range(config.num_hidden_layers), first=True, last=True)`. A last stage that
    needs the embedding as well, for a tied head or for multi-token prediction, and is not also the first, shares the
    weight of `embedding`, the first stage's `embed_tokens`; without, as on another rank than that, it has a copy.
    """

    def __init__(
        self, config: HubConfig, layers: range, *, first: bool, last: bool, embedding: nn.Embedding | None = None
    ) -> None:
        super().__init__()
        self.config, self.first, self.last, self.recompute = config, first, last, Recompute()
        self._num_changes = 0  # of the ranks that segments communicate with
        self.split = SequenceSplit()
        tied = last and config.tie_word_embeddings
        if first or (last and config.mtp_depth) or (tied and embedding is None):
            own = self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            if not first and embedding is not None:
                own.weight = embedding.weight
            embedding = own
        inside = (*layers, *config.mtp_layers) if last else layers
        self.layers = nn.ModuleDict({str(index): config.layer(index) for index in inside})
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied and embedding is not None:
            self.lm_head.weight = embedding.weight

    def numbered(self) -> Iterator[tuple[int, Layer]]:
        """The layers with their global indices."""
        return ((int(index), cast(Layer, layer)) for index, layer in self.layers.items())

    def use_expert_parallelism(self, experts: ExpertParallel) -> None:
        """Have the layers' experts on all ranks of `experts`; for parameters see `shard_experts`."""
        self._num_changes += 1
        for module in self.modules():
            if isinstance(module, SparseMLP):
                module.dispatcher = experts.dispatcher()

    def use_context_parallelism(self, context: ContextParallel) -> None:
        """Have the tokens of a sequence on all ranks of `context`, as its `split` says: this stage then gets its own
        ones, and the positions of all. Raises ValueError where the layers' heads do not go with its method."""
        self._num_changes += 1
        self.split = context.split
        for _, layer in self.numbered():
            context.method_of(layer.self_attn)
            layer.self_attn.context_parallel = context if context.split.size > 1 else None

    def tied_parameters(self) -> list[nn.Parameter]:
        """What the other end of a pipeline has as well, the same or a copy: the embedding, as it is the head too, or is
        needed for multi-token prediction."""
        if self.first is self.last or not (self.config.tie_word_embeddings or self.config.mtp_depth):
            return []
        owner = self.embed_tokens if hasattr(self, "embed_tokens") else self.lm_head
        return [cast(nn.Parameter, owner.weight)]

    def compile_dense(self, **options: Any) -> None:
        """Have attention and dense MLPs go through `torch.compile(**options)`: what is between linear layers, which
        hand out weight gradients that no compiler sees. Experts and norms have their own kernels: the host takes 60 us
        for a norm forward and backward, and 120 for a compiled one."""
        for _, layer in self.numbered():
            for part in (layer.self_attn, *(module for module in layer.mlp.modules() if isinstance(module, DenseMLP))):
                part.compile(**options)
            # Where ranks share sequences attention is not called as a whole: what is up to the rows that travel.
            layer.self_attn.turned = torch.compile(layer.self_attn.turned, **options)  # type: ignore[method-assign]

    def segments(self) -> list[Segment]:
        """The forward in parts, for the pipeline to overlap and, as `recompute` says, to compute again."""
        layers: list[Segment] = []
        predictions: list[Sequence[Segment]] = []
        for index, layer in self.numbered():
            recompute = partial(self.recompute, layer=index)
            if isinstance(layer, PredictionLayer):
                depth = len(predictions)
                names = (f"hidden{depth}", "embedded", "context")
                segments = with_forward_hooks(layer, layer.segments(recompute, depth), names, (f"hidden{depth + 1}",))
                if self.last:
                    predictions.append(segments)
                else:  # it is alone, to be looked at
                    layers += segments
            else:
                layers += with_forward_hooks(layer, layer.segments(recompute), ("x", "context"), ("x",))
        return self._around(layers, predictions)

    def segments_key(self) -> Hashable:
        """Return what the segments depend on and may be changed between steps: see `docs/overlap.md`."""
        return self._num_changes, self.recompute

    def forward(
        self, x: Tensor, positions: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Tokens (B, S) on the first stage, else hidden (B, S, H) -> logits (B, S, V) on the last, else hidden.

        positions: of each token in its document (B, S), where a row holds several; attention does not cross
        documents. Where ranks share a sequence, those of all its tokens, of which the tokens are this rank's.
        ahead: the tokens behind each, nearest first (B, S, depth), any number below 0 where there is none: the last
        stage of a model with layers for multi-token prediction then returns the logits of these as well, behind its
        own.
        """
        plain: list[Segment] = []
        predictions: list[Sequence[Segment]] = []
        for layer in self.layers.values():
            if not isinstance(layer, PredictionLayer):
                plain.append(Compute(layer, ("x", "context"), "x"))
            elif ahead is not None:
                known, found = (f"hidden{len(predictions) + more}" for more in (0, 1))
                predictions.append([Compute(layer, (known, "embedded", "context"), found)])
        segments = self._around(plain, predictions)
        carry = run_segments(segments, {"x": x, "positions": positions, "ahead": ahead})
        outputs = tuple(carry[name] for name in segments[-1].writes)
        return outputs if len(outputs) > 1 else outputs[0]

    def _around(self, layers: Iterable[Segment], predictions: Sequence[Iterable[Segment]]) -> list[Segment]:
        """What is before and after the layers with them: from "x", "positions" and "ahead" to the outputs."""
        found: list[Segment] = [Compute(self.embed_tokens, "x", "x")] if self.first else []
        if self.layers:
            context = partial(Context, self.config.rotary, split=self.split)
            found += [Compute(context, ("x", "positions"), "context"), *layers]
        if predictions:
            found.append(Compute(self.norm, "x", "hidden0"))
            for depth, prediction in enumerate(predictions):
                found += [Compute(partial(self._embedded_ahead, depth), "ahead", "embedded"), *prediction]
            hidden = tuple(f"hidden{depth}" for depth in range(len(predictions) + 1))
            found.append(Compute(lambda *each: tuple(map(self.lm_head, each)), hidden, input_names(len(hidden))))
        elif self.last:
            found.append(Compute(lambda x_BSH: self.lm_head(self.norm(x_BSH)), "x", "x"))
        return found or [Compute(lambda x_BSH: x_BSH, "x", "x")]

    def _embedded_ahead(self, depth: int, ahead_BSD: Tensor | None) -> Tensor:
        if ahead_BSD is None:
            raise ValueError("a model with layers for multi-token prediction needs the tokens behind each: give the "
                             'step side={"ahead": tokens (B, S, depth)}')
        return self.embed_tokens(ahead_BSD[..., depth].clamp(min=0))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Weights from N(0, initializer_range^2), norms one, biases zero, by the seed and a parameter's name alone: not
        by how the model is cut or sharded."""
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                param.fill_(1.0)
            elif name.endswith(".bias"):
                param.zero_()
            else:
                if name == "lm_head.weight" and self.config.tie_word_embeddings:
                    name = "embed_tokens.weight"
                seeded_normal_(param, std=self.config.initializer_range, seed=seed, name=name)


@lru_cache(maxsize=64)  # the ranks of one pipeline place have the same, and cutting many layers takes a second
def meta_stages(
    config: HubConfig, num_stages: int = 1, only: tuple[int, ...] | None = None, layers_per_stage: tuple[int, ...] = ()
) -> tuple[Stage, ...]:
    """Build stages without memory, to be looked at alone: the same ones for all callers."""
    with torch.device("meta"):
        return tuple(build_stages(config, num_stages, only, layers_per_stage))


def build_stages(
    config: HubConfig, num_stages: int, only: Sequence[int] | None = None, layers_per_stage: Sequence[int] | None = None
) -> list[Stage]:
    """The stages of a pipeline, layers split so that all compute about as much, or as `layers_per_stage` says. `only`
    names those to build, such as a rank's, in this order. Raises `ValueError` for more stages than layers allow."""
    cuts = stage_layers(config, num_stages, tuple(layers_per_stage or ()))
    wanted = list(range(num_stages)) if only is None else list(only)
    if outside := [stage for stage in wanted if not 0 <= stage < num_stages]:
        raise ValueError(f"only must name stages from 0 to {num_stages - 1}; got {outside}")
    built: dict[int, Stage] = {}
    for stage in sorted(wanted):  # the first before the last, which may share its embedding
        embedding = built[0].embed_tokens if 0 in built else None
        last = stage == num_stages - 1
        built[stage] = Stage(config, cuts[stage], first=stage == 0, last=last, embedding=embedding)
    return [built[stage] for stage in wanted]


@lru_cache(maxsize=256)
def stage_layers(config: HubConfig, num_stages: int, layers_per_stage: tuple[int, ...] = ()) -> list[range]:
    """Global indices of the layers of each stage that `build_stages` makes."""
    costs = [layer_flops(config, index, _TYPICAL_LENGTH) for index in range(config.num_hidden_layers)]
    return split_layers(costs, num_stages, layers_per_stage, head=last_flops(config, _TYPICAL_LENGTH))


def split_layers(
    layers: int | Sequence[float], num_stages: int, layers_per_stage: Sequence[int] | None = None, *, head: float = 0.0
) -> list[range]:
    """Global layer indices of each stage: consecutive, as even as costs say, lighter at the ends. layers: how many, or
    what each costs; head: what the last stage has to do besides; layers_per_stage: numbers to take instead.

    The costliest stage costs as little as it can, the rest is as even as it can be, and what is still undecided goes to
    the middle: the first stage also has the embedding. The ends may have no layer at all. Raises `ValueError` where a
    middle stage would have nothing to do. Example: 6 layers in 4 stages are 1, 2, 2, 1.
    """
    costs = [1.0] * layers if isinstance(layers, int) else list(layers)
    if num_stages < 1 or len(costs) < max(0, num_stages - 2):
        raise ValueError(f"cannot cut {len(costs)} layers into {num_stages} stages; use 1 to {len(costs) + 2}")
    until = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        if start == stop and 0 < stage < num_stages - 1:
            return inf
        return until[stop] - until[start] + (head if stage == num_stages - 1 else 0.0)

    def unevenness(stage: int, start: int, stop: int) -> float:
        found, from_middle = cost(stage, start, stop), abs(2 * stage - num_stages + 1.1)  # of two alike, the earlier
        return inf if found > limit else found**2 / unit + 1e-9 * from_middle * (stop - start)

    counts = list(layers_per_stage or ())
    if not counts:
        costliest, _ = _best_cuts(len(costs), num_stages, cost, max)
        limit, unit = costliest * (1 + 1e-9), (until[-1] + head) ** 2 or 1.0
        _, counts = _best_cuts(len(costs), num_stages, unevenness, add)
    if len(counts) != num_stages or sum(counts) != len(costs) or min(counts) < 0 or 0 in counts[1:-1]:
        raise ValueError(f"layers_per_stage must be {num_stages} numbers that add up to {len(costs)}, only the first "
                         f"and the last may be 0; got {counts}")
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _best_cuts(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least of what `join` makes of `cost(stage, start, stop)` of all stages, and how many layers each has."""
    # By layers, of the stages so far.
    best: list[tuple[float, list[int]]] = [(inf if stop else 0.0, []) for stop in range(num_layers + 1)]
    for stage in range(num_stages):
        best = [
            min((join(best[start][0], cost(stage, start, stop)), [*best[start][1], stop - start])
                for start in range(stop + 1))
            for stop in range(num_layers + 1)
        ]
    return best[-1]
