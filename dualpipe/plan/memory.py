"""`dualpipe memory`: what a run needs on each rank, from its configuration alone; nothing is allocated.

    parameters   as they are stored: this rank's shard
    optimizer    two moments (one of Muon's) and, where parameters are narrower than float32, masters: of the shard
    gathered     parameters in the dtype or format that they compute in, whole, where they are sharded, until a stage is
                 through; and weights in blocks of 128 x 128 once more, transposed, for input gradients in FP8
    gradients    accumulators in float32, from a stage's first weight gradient; when it is through, of parameters that
                 several ranks share, the shard's as well, and of the largest unit what is copied to be reduced
    activations  of the micro-batches that the schedule has alive, with logits, what is computed again and messages on
                 their way: counted (`dualpipe.plan.activations`). Where ranks share sequences, for the tokens of one,
                 with what of a layer travels between them. Not those of layers of transformers that cannot run without
                 memory: `dualpipe.plan.on_meta.counted_models.uncounted_layers` names these
    pending      what weight gradients wait with
    nccl         buffers to peers within a node, as NCCL's p2p.cc makes them; between nodes it takes fewer

All of the worst step; `step_memory` has the others. What the allocator leaves unused and the CUDA context, a few GB,
come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from dualpipe.models import HubConfig, Stage
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.experts.dispatcher import parameter_sizes
from dualpipe.parallel.tied import tied_parameters
from dualpipe.pipeline.lower import one_at_a_time
from dualpipe.plan.activations import ActivationBytes, activation_bytes
from dualpipe.plan.communication import context_numbers
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.nccl import CONTEXT, EXPERTS, LINK, SHARDS, TOTALS
from dualpipe.schedule import Schedule, Step, build
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.resolve import Resolved, fit_world
from dualpipe.train.config.schema import Config, DTypesConfig, OptimizerConfig, ParallelConfig, TrainConfig
from dualpipe.train.optim.groups import algorithm_of, parameter_places
from dualpipe.train.step.dtype_plan import plan_run
from dualpipe.train.step.pipeline_schedule import build_schedule

GB = 10**9


class Unit(NamedTuple):
    """A unit that sizes are printed in."""

    name: str
    bytes: int


BINARY = Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10)
DECIMAL = Unit("GB", GB), Unit("MB", 10**6), Unit("kB", 10**3)
# Of one channel (a block of a kernel) to a peer and back: the buffers of three protocols, 0.5, 4.69 and 4 MiB, in
# pieces of 2 MiB. On Hopper 10 where it receives and 2 where it sends; 6 each on an A100, which reads from its peer.
CHANNEL = 12 * 2**20
_NODE = 8  # GPUs, as a rule


class RankMemory(NamedTuple):
    """Bytes on a rank, by what they are for."""

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    activations: int
    pending: int
    nccl: int

    @property
    def total(self) -> int:
        """Return the bytes of all of them."""
        return sum(self)


class StageBytes(NamedTuple):
    """What a rank has of a stage: at all times; gathered, until the stage is through; accumulators, from its first
    weight gradient; its shard of the reduced gradients, and the most that is copied at once to be reduced, from when
    the stage is through."""

    parameters: int
    optimizer: int
    gathered: int
    accumulators: int
    reduced: int
    copied: int


def estimate(config: Config, model: TrainedModel, *, activations: bool = True) -> list[RankMemory]:
    """The most that each pipeline rank needs at once, on its largest rank of the other dimensions; without activations,
    which take the longest to count, 0 for them. Collective over nobody.

    Raises ValueError for a model that cannot be cut so.
    """
    _, ranks = step_memory(config, model, activations=activations)
    return [max(rank, key=lambda memory: memory.total) for rank in ranks]


def step_memory(
    config: Config, model: TrainedModel, *, activations: bool = True
) -> tuple[Schedule, list[list[RankMemory]]]:
    """The schedule, with so many micro-batches as may be alive at once, and what each of its ranks needs while each of
    its steps runs: see `estimate`."""
    config = fit_world(config, config.parallel.world_size)
    p, train = config.parallel, config.train
    if model.num_experts % p.ep:
        raise ValueError(f"parallel.ep = {p.ep} does not divide the model's {model.num_experts} experts")
    # With more micro-batches no more of them are alive: the middle of a step repeats itself.
    schedule = _schedule(config, min(train.num_chunks, 4 * p.pp) if activations else 1)
    stages = stages_on_meta(model, schedule.num_stages, p.layers_per_stage)
    ends_meet = schedule.placement[0] == schedule.placement[-1]
    sizes = [_stage_bytes(config, model, stages, number, ends_meet) for number in range(len(stages))]
    taken = [ActivationBytes(0, 0, 0, 0, 0)] * len(stages)
    if activations:
        taken = [_activations(config, model, stage, is_last=stage is stages[-1]) for stage in stages]
    message = train.micro_batch_size * tokens_of_rank(config) * sent_bytes(model, dtype_of(train.dtype))
    ranks = []
    for rank, steps in enumerate(schedule.ranks):
        mine = {number: (sizes[number], taken[number]) for number in schedule.rank_stages(rank)}
        # To and from each neighbouring stage one is on its way: receives are posted ahead.
        ways = 2 * sum(a != b and rank in (a, b) for a, b in pairwise(schedule.placement)) if activations else 0
        ranks.append([*_rank_moments(steps, mine, ways * message, _nccl_buffers(p, schedule.placement, rank))])
    return schedule, ranks


def _rank_moments(
    steps: Sequence[Step], stages: Mapping[int, tuple[StageBytes, ActivationBytes]], messages: int, nccl: int
) -> Iterator[RankMemory]:
    """What a rank needs while each step runs: the most of at its beginning, at its end, and when gradients of a stage
    that is through are copied to be reduced. In between a backward's activations go while accumulators come, and the
    activations of a forward beside it."""
    parameters, optimizer, gathered = (sum(of[i] for of, _ in stages.values()) for i in range(3))
    last = {action.stage: number for number, step in enumerate(steps) for action in step}
    gradients, kept, pending = 0, messages, 0
    begun: set[int] = set()
    for number, step in enumerate(steps):
        before, waiting, first, begin, end = kept, pending, gradients, 0, 0  # the last two: of what runs
        inside: list[int] = []
        for action in step:
            of, taken = stages[action.stage]
            if action.kind in "BW" and action.stage not in begun:
                begun.add(action.stage)
                gradients += of.accumulators
            if action.kind == "W":
                pending -= taken.deferred
                continue
            inside.append(taken.inside_forward if action.kind == "F" else taken.inside_backward)
            if action.kind == "F":
                begin, end = (each + taken.forward - taken.kept for each in (begin, end))
                kept += taken.kept
            else:
                most, left = (taken.backward, 0) if action.kind == "B" else (taken.input_backward, taken.deferred)
                begin, end = begin + most - taken.kept, end + min(most, left + taken.backward - taken.kept)
                kept, pending = kept - taken.kept, pending + left
        once = sum(inside) - max(inside, default=0)  # of a pair's references one runs at a time
        found = [(first, before + begin - once, waiting), (gradients, kept + end - once, waiting)]
        for stage in {action.stage for action in step if last[action.stage] == number}:
            of, _ = stages[stage]
            gradients += of.reduced
            found.append((gradients + of.copied, kept, pending))
        yield RankMemory(parameters, optimizer, gathered, *max(found, key=sum), nccl)
        gathered -= sum(stages[stage][0].gathered for stage in stages if last[stage] == number)


def _stage_bytes(
    config: Config, model: TrainedModel, stages: Sequence[nn.Module], number: int, ends_meet: bool
) -> StageBytes:
    p, dtype, fp32 = config.parallel, dtype_of(config.train.dtype), 4
    sharing, shared = p.dp * p.cp, p.replicas > 1  # ranks with the same experts; whether any have the same parameters
    sizes = stage_sizes(model, len(stages), p.layers_per_stage, p.ep, ends_meet=ends_meet)[number]
    dense, experts = sizes.dense, sizes.experts
    dense_shard, expert_shard = -(-dense // p.dense_shards), -(-experts // p.expert_shards)
    shard, stored = dense_shard + expert_shard, fp32 if shared else dtype.itemsize
    stored_less, masters, gathered_less = (0, 0, 0)
    if config.dtypes.rules and isinstance(model, HubConfig):
        stored_less, masters, gathered_less = _quantized(
            cast(Stage, stages[number]), config.dtypes, config.train.dtype, model, sharing, p.ep, p.dp_replicate)
    moment = dtype_of(config.optimizer.moments).itemsize
    single = sum(map(math.prod, muon_shapes(config.optimizer, stages[number])))  # with one moment instead of two
    states = 2 * moment + (fp32 if stored < fp32 else 0)
    return StageBytes(
        parameters=stored * shard - stored_less,
        optimizer=states * shard - moment * (single // p.dense_shards) + masters,
        gathered=(dtype.itemsize * (dense + experts) if shared else 0) - gathered_less,
        accumulators=fp32 * (dense + experts),
        reduced=fp32 * (dense_shard + (expert_shard if sharing > 1 else 0)) if shared else 0,
        copied=fp32 * sizes.reduced_at_once(sharing) if shared else 0,
    )


@lru_cache(maxsize=4096)
def muon_shapes(optimizer: OptimizerConfig, stage: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of those parameters of a stage that Muon updates."""
    return [tuple(param.shape) for param, (name, owner) in parameter_places([stage]).items()
            if algorithm_of(optimizer.name, optimizer.groups, name, owner, param) == "muon"]


def _activations(
    config: Config, model: TrainedModel, stage: nn.Module, *, is_last: bool = False
) -> ActivationBytes:
    """What a micro-batch takes in a stage, with what travels between ranks that share sequences."""
    p, train, length, layers = config.parallel, config.train, tokens_of_rank(config), layers_of(stage)
    dtype = dtype_of(train.dtype)
    taken = activation_bytes(
        model, layers, ep=p.ep, recompute=config.memory.recompute, dtype=dtype, batch=train.micro_batch_size,
        sequence_length=length, last=is_last, cpu=p.device == "cpu",
        has_documents=config.data.separate_documents,
    )
    if p.cp == 1 or not isinstance(model, HubConfig):
        return taken
    held = (context_numbers(model, i, train.sequence_length, p.cp, p.cp_method).held for i in layers)
    moving = round(max(held, default=0.0) * train.micro_batch_size * length * dtype.itemsize)  # of a layer at a time
    forward, backward, inputs = (size + moving for size in (taken.forward, taken.backward, taken.input_backward))
    return taken._replace(forward=forward, backward=backward, input_backward=inputs)


def sent_bytes(model: TrainedModel, dtype: torch.dtype) -> int:
    """What goes from a stage to the next for a token: its hidden values, and the tokens ahead that layers for
    multi-token prediction embed."""
    return model.hidden_size * dtype.itemsize + model.mtp_depth * torch.int64.itemsize


def tokens_of_rank(config: Config) -> int:
    """The most that a rank has of a sequence."""
    return max(SequenceSplit(0, config.parallel.cp).counts(config.train.sequence_length))


def _schedule(config: Config, chunks: int) -> Schedule:
    """The run's, with so many micro-batches where that is no other order of work."""
    p = config.parallel
    paired = (p.ep > 1 or p.cp > 1) and p.overlap
    if p.schedule == "auto":
        found = build_schedule(p, config.train.num_chunks)
        return found if paired else one_at_a_time(found)
    return (built if paired else _unpaired)(p.schedule, p.pp, chunks)


@lru_cache(maxsize=64)
def built(name: str, ranks: int, chunks: int) -> Schedule:
    """A schedule, the same one for all callers."""
    return build(name, ranks, chunks)


@lru_cache(maxsize=64)
def _unpaired(name: str, ranks: int, chunks: int) -> Schedule:
    """As the engine runs it where a pair has no communication to hide."""
    return one_at_a_time(built(name, ranks, chunks))


class StageSizes(NamedTuple):
    """Numbers of parameters of a stage: dense ones, those of a rank's experts, and the most of each that are reduced at
    once: those of a layer, or of what is around the layers."""

    dense: int
    experts: int
    dense_unit: int
    expert_unit: int

    def reduced_at_once(self, sharing: int) -> int:
        """Return the most that are reduced at once where `sharing` ranks have the same experts."""
        if sharing > 1:
            return max(self.dense_unit, self.expert_unit)
        return self.dense_unit  # the accumulators of experts that nobody else has become their gradients


@lru_cache(maxsize=256)
def stage_sizes(
    model: TrainedModel, num_stages: int, layers: tuple[int, ...], ep: int, *, ends_meet: bool
) -> list[StageSizes]:
    """Return the sizes of all stages on one of `ep` ranks; ends_meet: the first and the last are on one rank."""
    stages = stages_on_meta(model, num_stages, layers)
    return [_sizes_of(stage, ep, shares_embedding=ends_meet and stage is stages[-1]) for stage in stages]


def _sizes_of(stage: nn.Module, ep: int, *, shares_embedding: bool) -> StageSizes:
    dense, experts = parameter_sizes(stage, ep)
    if shares_embedding:  # the first stage's
        dense -= sum(param.numel() for param in tied_parameters(stage))
    layers = [parameter_sizes(layer, ep) for layer in cast(nn.Module, stage.layers).children()]
    around = dense - sum(of_layer for of_layer, _ in layers)
    dense_unit = max([around, *(of_layer for of_layer, _ in layers)])
    return StageSizes(dense, experts, dense_unit, max((of_layer for _, of_layer in layers), default=0))


def layers_of(stage: nn.Module) -> range:
    """The global numbers of a stage's layers."""
    numbers = [int(name) for name, _ in cast(nn.Module, stage.layers).named_children()]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


@lru_cache(maxsize=64)
def dtype_plan(dtypes: DTypesConfig, dtype: Literal["fp32", "bf16"], model: HubConfig, replicas: int) -> DTypePlan:
    """That of a run with these settings, which takes seconds for a large model; the same one for all callers."""
    config = Config(dtypes=dtypes, train=TrainConfig(dtype=dtype), parallel=ParallelConfig(dp=replicas))
    return plan_run(Resolved.of(config, model), {})


@lru_cache(maxsize=4096)
def _quantized(
    stage: Stage, dtypes: DTypesConfig, dtype: Literal["fp32", "bf16"], model: HubConfig, sharing: int, ep: int,
    dp_replicate: int,
) -> tuple[int, int, int]:
    """What formats change of a stage's bytes: how many fewer are stored, masters that other weights have no need of,
    and how many fewer are gathered, less those that are transposed."""
    stored = masters = gathered = 0
    plan = dtype_plan(dtypes, dtype, model, sharing * ep)
    for name, param in stage.named_parameters():
        planned = plan.of(name)
        if (format := planned.format) is None:
            continue
        *experts, rows, columns = param.shape
        matrices, ranks = (experts[0] // ep, sharing) if experts else (1, sharing * ep)
        shards = ranks // dp_replicate
        elements, width = matrices * rows * columns, planned.storage.itemsize
        packed = matrices * format.block_rows(rows) * format.row_bytes(columns)
        if not planned.gathered:
            stored += (width * elements - packed) // shards
            masters += 4 * elements // shards if width >= 4 else 0
        if sharing * ep > 1:
            gathered += planned.compute.itemsize * elements - packed
        if format.block[0] == format.block[1] and planned.compute is torch.bfloat16:
            gathered -= matrices * format.block_rows(columns) * format.row_bytes(rows)
    return stored, masters, gathered


def _nccl_buffers(p: ParallelConfig, placement: Sequence[int], rank: int) -> int:
    """Bytes of a rank: to each peer that experts are on, around the ring of each group, and half of CHANNEL a link."""
    if p.device == "cpu":
        return 0
    neighbours = {a + b - rank for a, b in pairwise(placement) if a != b and rank in (a, b)}
    links, sharing = 4 * len(neighbours), max(1, p.dp) * p.cp
    rings = [(p.pp, LINK), (p.ep, EXPERTS), (max(1, p.dp), SHARDS), (sharing * p.ep, SHARDS),
             (p.pp * sharing * p.ep, TOTALS)]
    if p.dp_replicate > 1:
        rings += [(p.dp_replicate, SHARDS), (p.dense_shards, SHARDS), (p.expert_shards, SHARDS)]
    if p.cp > 1:
        rings += [(p.cp, CONTEXT), (sharing, SHARDS)]
    channels = sum(traffic.ctas for ranks, traffic in rings if ranks > 1)
    channels += (min(p.ep, _NODE) - 1) * EXPERTS.ctas + (min(p.cp, _NODE) - 1) * CONTEXT.ctas
    return CHANNEL * channels + CHANNEL // 2 * links * LINK.ctas


def unit_for(most: int, units: Sequence[Unit] = BINARY) -> Unit:
    """The largest of `units` that `most` bytes are at least one of, else the smallest."""
    return next((unit for unit in units if most >= unit.bytes), units[-1])


def table(ranks: Sequence[RankMemory], capacity: float = 0.0, units: Sequence[Unit] = BINARY) -> Iterator[str]:
    """The estimate as lines of text, in the unit that suits the largest rank; and what it leaves of the `capacity` of a
    device, in GB, where one is given."""
    columns = [memory._asdict() | {"total": memory.total} for memory in ranks]
    most = max(memory.total for memory in ranks)
    unit = unit_for(most, units)
    yield " ".join(f"{name:>11}" for name in (f"{unit.name} of rank", *columns[0]))
    for rank, values in enumerate(columns):
        yield f"{rank:>11} " + " ".join(f"{value / unit.bytes:>11.2f}" for value in values.values())
    yield f"at most {most / unit.bytes:.1f} {unit.name}, besides what torch and CUDA take"
    if capacity:
        spare = capacity - most / GB
        yield f"of {capacity:g} GB: {spare:.1f} to spare" if spare > 0 else f"{-spare:.1f} GB more than {capacity:g}"
