"""`dualpipe memory`: what a run needs on each rank, from its configuration alone; nothing is allocated.

    parameters   as they are stored: this rank's shard
    optimizer    two moments and, where parameters are narrower than float32, masters: of the shard
    gathered     the stages' parameters in the dtype that they compute in, whole, where they are sharded
    gradients    accumulators in float32: of the whole stages during a step, and of the shard at its end
    activations  of as many micro-batches as the schedule has alive, counted (`dualpipe.models.activations`)
    logits       of one micro-batch: themselves and their gradient

What the allocator leaves unused, buffers of communication libraries and the CUDA context, a few GB, come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import torch
from torch import nn

from dualpipe.models import HubConfig, Stage, build_stages
from dualpipe.models.activations import activation_bytes
from dualpipe.models.stages import RECOMPUTE, Recompute
from dualpipe.nn import GroupedLinear
from dualpipe.schedule import Costs, build, simulate
from dualpipe.train.config import Config
from dualpipe.train.model import DTYPES, check_tied

MOMENTS = 2 * 4  # bytes of AdamW's for a parameter


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rank, by what they are for."""

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate(config: Config, model: HubConfig) -> list[RankMemory]:
    """For each pipeline rank, what its largest rank of "dp" and "ep" needs. Collective over nobody.

    Raises ValueError for a model that cannot be cut so.
    """
    p = config.parallel
    if model.num_experts % p.ep:
        raise ValueError(f"parallel.ep = {p.ep} does not divide the model's {model.num_experts} experts")
    check_tied(model, max(1, p.dp) * p.ep)
    schedule = build(p.schedule, p.pp, config.train.num_chunks)
    with torch.device("meta"):
        stages = build_stages(model, schedule.num_stages, layers_per_stage=p.layers_per_stage)
    peaks, known = simulate(schedule, Costs()).peak_activations, dict[object, int]()
    train, dp, ep = config.train, max(1, p.dp), p.ep
    narrow, tokens = DTYPES[train.dtype].itemsize, train.micro_batch_size * train.sequence_length
    sharded = dp * ep > 1
    stored = 4 if sharded else narrow
    ranks = []
    for rank, peak in enumerate(peaks):
        mine = [stages[number] for number in schedule.rank_stages(rank)]
        dense, experts = _parameters(nn.ModuleList(mine))  # together: a tied one counts once
        whole, shard = dense + experts // ep, -(-dense // (dp * ep)) + -(-experts // (ep * dp))
        ranks.append(RankMemory(
            parameters=stored * shard,
            optimizer=(MOMENTS + (4 if stored < 4 else 0)) * shard,
            gathered=narrow * whole if sharded else 0,
            gradients=4 * whole + (4 * shard if sharded else 0),
            activations=peak * max(_activations(config, model, stage, known) for stage in mine),
            logits=2 * narrow * tokens * model.vocab_size if any(stage.last for stage in mine) else 0,
        ))
    return ranks


def _parameters(stages: nn.Module) -> tuple[int, int]:
    """The number of parameters of dense layers, and of all experts."""
    grouped = (module.parameters() for module in stages.modules() if isinstance(module, GroupedLinear))
    experts = sum(param.numel() for param in chain.from_iterable(grouped))
    return sum(param.numel() for param in stages.parameters()) - experts, experts


def _activations(config: Config, model: HubConfig, stage: Stage, known: dict[object, int]) -> int:
    """`known`: those of stages with the same kinds of layers, so that each is counted once."""
    layers = list(map(int, stage.layers))
    recompute = Recompute(config.memory.recompute, model.num_hidden_layers)
    kinds = [(str(layer), layer.self_attn.window, *(recompute(part, int(index)) for part in RECOMPUTE))
             for index, layer in stage.layers.items()]
    key = stage.first, tuple(kinds)
    if key not in known:
        known[key] = activation_bytes(
            model, range(layers[0], layers[-1] + 1) if layers else range(0), first=stage.first,
            batch=config.train.micro_batch_size, sequence_length=config.train.sequence_length,
            dtype=DTYPES[config.train.dtype], recompute=config.memory.recompute, ep=config.parallel.ep,
        )
    return known[key]


def table(ranks: Sequence[RankMemory]) -> Iterator[str]:
    """The estimate as lines of text, in GiB."""
    names = [field.name for field in fields(RankMemory)]
    yield " ".join(f"{name:>11}" for name in ("rank", *names, "total"))
    for rank, memory in enumerate(ranks):
        values = [getattr(memory, name) for name in (*names, "total")]
        yield f"{rank:>11} " + " ".join(f"{value / 2**30:>11.2f}" for value in values)
    most = max(memory.total for memory in ranks) / 2**30
    yield f"at most {most:.1f} GiB, besides what torch and the communication libraries take"
