"""`dualpipe memory`: memory of each pipeline rank, from the configuration alone. Nothing is allocated.

    parameters   stored parameters: this rank's shard
    optimizer    states of this rank's shard: two moments (one for Muon), and master weights if parameters are stored
                 narrower than float32. With optimizer.offload, the two buffers in place of the moments
    gathered     if parameters are sharded, their unsharded copies in the compute dtype or format, until the last action
                 of their stage; and transposed copies of weights in blocks of 128 x 128, for input gradients in FP8
    gradients    float32 accumulators, from a stage's first weight gradient on, or from its first forward on for modules
                 that are not of `dualpipe.nn`, such as the experts of transformers. After the stage's last action, its
                 gradients are reduced over the ranks that share its parameters. That adds this rank's shard of the
                 result and, during the reduction, a copy of the largest unit that is reduced at once
    activations  those of all live micro-batches, with logits (those that exist at once: `describe_head`), recomputed
                 tensors and messages in transit, also the rows between the two hops of a dispatch: counted by
                 `dualpipe.plan.activations`. With context parallelism on GPUs, for the tokens of one rank, with the
                 communication buffers of one layer by a formula: `approximations` says so. Layers of transformers that
                 cannot run on meta are left out: `dualpipe.plan.counted_stages.uncounted_layers` names them
    pending      tensors held for deferred weight gradients
    nccl         buffers to peers within a node, as NCCL's p2p.cc allocates them; between nodes it allocates fewer
    host         pinned host memory: the moments with optimizer.offload. Not in the total, which counts the device alone

All numbers are those of the step with the most memory; `step_memory` returns those of every step. Memory that the
allocator leaves unused and the CUDA context, a few GB, come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from dualpipe.models import HubConfig
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.head import rows_per_part
from dualpipe.parallel.experts.dispatcher import check_dispatch, experts_per_rank
from dualpipe.pipeline.lower import without_pairs
from dualpipe.pipeline.p2p import SENDS_IN_FLIGHT
from dualpipe.plan.activations import ActivationBytes, PairedAction, activation_bytes, head_in_parts, pair_bytes
from dualpipe.plan.communication import context_numbers, takes_two_hops
from dualpipe.plan.machines import GPUS_PER_NODE
from dualpipe.plan.parameter_memory import StageBytes, StageSizes, dtype_plan, muon_shapes, stage_bytes, stage_sizes
from dualpipe.quantized.quantize_model import check_sharding
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.nccl import CONTEXT, EXPERTS, LINK, SHARDS, TOTALS
from dualpipe.schedule import Costs, Schedule, Step, build, simulate
from dualpipe.train.config.fit import fit_world
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import Config, ParallelConfig
from dualpipe.train.optim.offload import buffer_bytes
from dualpipe.train.step import build_schedule, fp8_dispatch_block

__all__ = [
    "BINARY", "CHANNEL", "GB", "RankMemory", "StageBytes", "StageSizes", "Unit", "approximations", "cached_schedule",
    "dtype_plan", "estimate", "layers_of", "muon_shapes", "sent_bytes", "stage_sizes", "step_memory", "table",
    "tokens_of_rank", "unit_for",
]

GB = 10**9


class Unit(NamedTuple):
    """Unit in which sizes are printed."""

    name: str
    bytes: int


BINARY = Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10)
# Bytes that NCCL allocates for one channel (a block of a kernel) to a peer and back, in multiples of 2 MiB. On Hopper
# it takes 10 MiB to receive, for the buffers of three protocols (0.5, 4.69 and 4 MiB), and 2 MiB to send. An A100 reads
# from its peer and takes 6 MiB for each direction.
CHANNEL = 12 * 2**20


PairPeak = Callable[[Step], int]


class RankMemory(NamedTuple):
    """Bytes on a rank, by kind: see the table at the top of this file.

    moment_buffers: part of `optimizer`: the buffers on the device through which moments in host memory pass. frozen:
    part of `parameters`: those that are not trained.
    """

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    activations: int
    pending: int
    nccl: int
    host: int = 0
    moment_buffers: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds on the device together."""
        return sum(self) - self.host - self.moment_buffers - self.frozen


def estimate(
    config: Config, model: TrainedModel, *, activations: bool = True, ranks_per_node: int = 0
) -> list[RankMemory]:
    """Return the peak memory of each pipeline rank: of its replicas, that of the one with the most. Not a collective.

    Args:
        config: configuration of the run.
        model: its model.
        activations: False to take activations as 0: they take the longest to count.
        ranks_per_node: number of successive ranks that share a node; 0: parallel.ranks_per_node, or if that is 0 too,
            8 GPUs or all ranks of the CPU.

    Raises:
        ValueError: the model cannot be cut into these stages, or its experts cannot be divided over parallel.ep ranks.
    """
    _, ranks = step_memory(config, model, activations=activations, ranks_per_node=ranks_per_node)
    return [max(rank, key=lambda memory: memory.total) for rank in ranks]


def step_memory(
    config: Config, model: TrainedModel, *, activations: bool = True, ranks_per_node: int = 0
) -> tuple[Schedule, list[list[RankMemory]]]:
    """Return the schedule, and the memory of each of its ranks while each of its steps runs.

    The schedule has as few micro-batches as reach the peak of the run's, and one micro-batch without activations; the
    schedule "auto" has all those of the run. Arguments and errors are those of `estimate`.
    """
    config = fit_world(config, config.parallel.world_size)
    p = config.parallel
    train = config.train
    per_node = ranks_per_node or _configured_ranks_per_node(p)
    experts_per_rank("the model", model.num_experts or p.ep, p.ep)
    schedule = _schedule(config, _microbatches_at_peak(config) if activations else 1)
    stages = stages_on_meta(model, schedule.num_stages, p.layers_per_stage, config.lora)
    ends_meet = schedule.placement[0] == schedule.placement[-1]
    sizes = [stage_bytes(config, model, stages, number, ends_meet) for number in range(len(stages))]
    stage_activations = [ActivationBytes(0, 0, 0, 0, 0)] * len(stages)
    if activations:
        stage_activations = [
            _activations(config, model, stage, per_node, is_last=stage is stages[-1]) for stage in stages]

    def pair_peak(pair: Step) -> int:
        return _pair_peak(config, model, stages, pair, per_node) if activations else 0

    message = train.micro_batch_size * tokens_of_rank(config) * sent_bytes(model, dtype_of(train.dtype))
    if config.data.separate_documents or p.cp > 1:  # the positions of whole sequences travel with the hidden states
        message += train.micro_batch_size * train.sequence_length * torch.int64.itemsize
    ranks = []
    for rank, steps in enumerate(schedule.ranks):
        rank_stages = {number: (sizes[number], stage_activations[number]) for number in schedule.rank_stages(rank)}
        # From each neighbouring stage, one message is in transit, as receives are posted ahead; to it, several.
        num_neighbours = sum(a != b and rank in (a, b) for a, b in pairwise(schedule.placement))
        sends_in_flight = max(SENDS_IN_FLIGHT, schedule.messages_in_flight)
        messages = (1 + sends_in_flight) * num_neighbours * message if activations else 0
        nccl = _nccl_buffers(p, schedule.placement, rank, per_node)
        ranks.append([*_rank_moments(steps, rank_stages, messages, nccl, pair_peak)])
    return schedule, ranks


def check_run(config: Config, model: TrainedModel, ranks_per_node: int = 0) -> None:
    """Raise the ValueError with which a run would refuse its layout, dispatch or formats.

    These are the run's own checks, without ranks or devices. ranks_per_node: as in `estimate`.
    """
    config = fit_world(config, config.parallel.world_size)
    p = config.parallel
    per_node = ranks_per_node or _configured_ranks_per_node(p)
    experts_per_rank("the model", model.num_experts or p.ep, p.ep)
    for first in range(0, p.world_size if p.ep > 1 else 0, p.ep):
        check_dispatch(p.dispatch, range(first, first + p.ep), per_node)
    if not isinstance(model, HubConfig):
        return
    replicas = min(p.replicas, 2)  # the same for 2 and more
    plan = dtype_plan(config.dtypes, config.train.dtype, model, replicas, config.lora)
    if config.dtypes.fp8_dispatch:
        fp8_dispatch_block(plan, config.dtypes.gemm_precision)
    (whole,) = stages_on_meta(model, lora=config.lora)
    for name, param in whole.named_parameters():
        format = plan.of(name).format
        if format is not None:
            check_sharding(name, param, format, p.dense_shards)


def _configured_ranks_per_node(p: ParallelConfig) -> int:
    """Return the number of successive ranks that share a node: as configured, or 8 GPUs, or all ranks of the CPU."""
    if p.ranks_per_node:
        return p.ranks_per_node
    return p.world_size if p.device == "cpu" else GPUS_PER_NODE


class _LiveMemory:
    """Bytes of gradients, activations and pending tensors on a rank, updated action by action.

    messages: bytes of the messages in transit, which count as activations. pair_peak: bytes of two overlapping actions
    beyond those before or after them, whichever are more.
    """

    def __init__(
        self, stages: Mapping[int, tuple[StageBytes, ActivationBytes]], messages: int, pair_peak: PairPeak
    ) -> None:
        self._stages = stages
        self._pair_peak = pair_peak
        self._prepared: set[int] = set()  # stages with the accumulators that their first forward finds
        self._begun: set[int] = set()  # stages with all accumulators
        self.gradients = 0
        self.saved = messages
        self.pending = 0

    def run_step(self, step: Step) -> list[tuple[int, int, int]]:
        """Run the actions of a step; return (gradients, activations, pending) at its beginning and at its end.

        The peak is taken to be at one of the two ends: during the step, a backward's activations are freed, while
        accumulators and the activations of a forward beside it are allocated.
        """
        for stage in {action.stage for action in step} - self._prepared:
            self._prepared.add(stage)
            self.gradients += self._stages[stage][0].prepared
        gradients_before = self.gradients
        saved_before = self.saved
        pending_before = self.pending
        # Bytes above the saved activations at each end.
        at_start = 0
        at_end = 0
        for action in step:
            sizes, activations = self._stages[action.stage]
            if action.kind in "BW" and action.stage not in self._begun:
                self._begun.add(action.stage)
                self.gradients += sizes.accumulators - sizes.prepared
            if action.kind == "W":
                self.pending -= activations.deferred
            elif action.kind == "F":
                at_start += activations.forward - activations.saved
                at_end += activations.forward - activations.saved
                self.saved += activations.saved
            else:
                is_full = action.kind == "B"
                peak = activations.backward if is_full else activations.input_backward
                deferred = 0 if is_full else activations.deferred
                at_start += peak - activations.saved
                # At the end, the saved activations are freed, but not the temporaries. Tensors that this step defers
                # are counted here, not as pending: the second tuple below has `pending_before`.
                at_end += min(peak, deferred + activations.backward - activations.saved)
                self.saved -= activations.saved
                self.pending += deferred
        pair = tuple(action for action in step if action.kind != "W")
        if len(pair) == 2:
            deferred = sum(self._stages[action.stage][1].deferred for action in pair if action.kind == "I")
            most = max(saved_before, self.saved + deferred) + self._pair_peak(pair)
            return [(self.gradients, most, pending_before)]
        return [
            (gradients_before, saved_before + at_start, pending_before),
            (self.gradients, self.saved + at_end, pending_before),
        ]

    def end_stage(self, stage: int) -> tuple[int, int, int]:
        """End a stage; return (gradients, activations, pending) while copies of its gradients are reduced."""
        sizes, _ = self._stages[stage]
        self.gradients += sizes.reduced
        return self.gradients + sizes.copied, self.saved, self.pending


def _rank_moments(
    steps: Sequence[Step], stages: Mapping[int, tuple[StageBytes, ActivationBytes]], messages: int, nccl: int,
    pair_peak: PairPeak,
) -> Iterator[RankMemory]:
    """Yield the memory of a rank while each step runs: the peak of its beginning, its end, and reductions after it."""
    parameters = sum(sizes.parameters for sizes, _ in stages.values())
    frozen = sum(sizes.frozen for sizes, _ in stages.values())
    host = sum(sizes.host for sizes, _ in stages.values())
    buffers = buffer_bytes(host, max((sizes.largest_moments for sizes, _ in stages.values()), default=0))
    optimizer = sum(sizes.optimizer for sizes, _ in stages.values()) + buffers
    gathered = sum(sizes.gathered for sizes, _ in stages.values())
    last_step = {action.stage: number for number, step in enumerate(steps) for action in step}
    live = _LiveMemory(stages, messages, pair_peak)
    for number, step in enumerate(steps):
        moments = live.run_step(step)
        moments += [live.end_stage(stage) for stage in {action.stage for action in step} if last_step[stage] == number]
        yield RankMemory(parameters, optimizer, gathered, *max(moments, key=sum), nccl, host, buffers, frozen)
        gathered -= sum(stages[stage][0].gathered for stage in stages if last_step[stage] == number)


def _activations(
    config: Config, model: TrainedModel, stage: nn.Module, per_node: int, *, is_last: bool = False
) -> ActivationBytes:
    """Return the bytes of a micro-batch in a stage, with the buffers of context-parallel communication.

    per_node: ranks that share a node.
    """
    layers = layers_of(stage)
    sizes = activation_bytes(model, layers, last=is_last, **_workload(config, model, per_node))
    buffers = _context_buffers(config, model, layers)
    return sizes._replace(
        forward=sizes.forward + buffers,
        backward=sizes.backward + buffers,
        input_backward=sizes.input_backward + buffers,
    )


def _pair_peak(
    config: Config, model: TrainedModel, stages: Sequence[nn.Module], pair: Step, per_node: int
) -> int:
    """Return the bytes of two overlapping actions beyond those before or after them, whichever are more."""
    first, second = (
        PairedAction(action.kind, layers_of(stages[action.stage]), action.stage == len(stages) - 1) for action in pair)
    buffers = sum(_context_buffers(config, model, action.layers) for action in (first, second))
    return pair_bytes(model, (first, second), **_workload(config, model, per_node)) + buffers


def _workload(config: Config, model: TrainedModel, per_node: int) -> dict[str, Any]:
    """Return the micro-batch of a rank and its layout, as `activation_bytes` and `pair_bytes` take them.

    On the CPU, ranks that share a sequence are counted as they run. On GPUs their attention would materialize scores
    which fused kernels do not have: a rank's tokens are counted as a short sequence, without communication.
    """
    p = config.parallel
    train = config.train
    is_cpu = p.device == "cpu"
    has_two_hops = takes_two_hops(per_node, p.ep, p.dispatch)
    return {
        "batch": train.micro_batch_size,
        "sequence_length": train.sequence_length if is_cpu else tokens_of_rank(config),
        "dtype": dtype_of(train.dtype),
        "recompute": config.memory.recompute,
        "ep": p.ep,
        "nodes": p.ep // per_node if has_two_hops else 1,
        "cpu": is_cpu,
        "has_documents": config.data.separate_documents,
        "cp": p.cp if is_cpu else 1,
        "cp_method": p.cp_method,
        "part_bytes": part_bytes(config, model),
        "lora": config.lora,
    }


def _context_buffers(config: Config, model: TrainedModel, layers: range) -> int:
    """Return the bytes of a GPU's buffers for context-parallel communication of one layer at a time."""
    p = config.parallel
    if p.device == "cpu" or p.cp == 1 or not isinstance(model, HubConfig):
        return 0
    train = config.train
    held = (context_numbers(model, i, train.sequence_length, p.cp, p.cp_method).held for i in layers)
    tokens = train.micro_batch_size * tokens_of_rank(config)
    return round(max(held, default=0.0) * tokens * dtype_of(train.dtype).itemsize)


def sent_bytes(model: TrainedModel, dtype: torch.dtype) -> int:
    """Return the bytes of a message between stages per token.

    It has the hidden states, and the tokens ahead that layers for multi-token prediction embed.
    """
    return model.hidden_size * dtype.itemsize + model.mtp_depth * torch.int64.itemsize


def tokens_of_rank(config: Config) -> int:
    """Return the tokens per sequence of the context-parallel rank that has the most."""
    return max(SequenceSplit(0, config.parallel.cp).counts(config.train.sequence_length))


def _schedule(config: Config, chunks: int) -> Schedule:
    """Return the run's schedule with `chunks` micro-batches; the schedule "auto" always with all those of the run."""
    p = config.parallel
    has_pairs = (p.ep > 1 or p.cp > 1) and p.overlap
    if p.schedule == "auto":
        schedule = build_schedule(p, config.train.num_chunks)
        return schedule if has_pairs else without_pairs(schedule)
    if has_pairs:
        return cached_schedule(p.schedule, p.pp, chunks)
    return _unpaired_schedule(p.schedule, p.pp, chunks)


def _microbatches_at_peak(config: Config) -> int:
    """Return a number of micro-batches with which as many are alive at once as with all those of the run.

    The middle of most schedules repeats itself, so that with four micro-batches per rank as many are alive as with any
    more. Where all forwards precede all backwards, the number alive still grows from three to four: all are needed.
    """
    p = config.parallel
    of_run = config.train.num_chunks
    few = 4 * p.pp
    if of_run <= few or p.schedule == "auto":
        return of_run
    return few if _peak_activations(p.schedule, p.pp, 3 * p.pp) == _peak_activations(p.schedule, p.pp, few) else of_run


@lru_cache(maxsize=64)
def _peak_activations(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the largest number of live stage activations of every rank."""
    return simulate(cached_schedule(name, ranks, chunks), Costs()).peak_activations


@lru_cache(maxsize=64)
def cached_schedule(name: str, ranks: int, chunks: int) -> Schedule:
    """Build a schedule once, and return the same object to all callers."""
    return build(name, ranks, chunks)


@lru_cache(maxsize=64)
def _unpaired_schedule(name: str, ranks: int, chunks: int) -> Schedule:
    """Return a schedule with its pairs split, as the engine runs it if pairs have no communication to hide."""
    return without_pairs(cached_schedule(name, ranks, chunks))


def layers_of(stage: nn.Module) -> range:
    """Return the indices of a stage's layers in the model."""
    numbers = [int(name) for name, _ in cast(nn.Module, stage.layers).named_children()]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def _nccl_buffers(p: ParallelConfig, placement: Sequence[int], rank: int, per_node: int) -> int:
    """Return the bytes of a rank's NCCL buffers.

    Each communicator has a ring, whose channels take CHANNEL bytes each. An all-to-all has channels to each peer in the
    node besides: neighbours share the experts, and ranks that share a sequence are as far apart as there are ranks of
    experts. A link between stages sends in one direction only: its channels take half as much.
    """
    if p.device == "cpu":
        return 0
    # Of a pair of neighbours (a, b) that includes this rank, a + b - rank is the other one.
    neighbours = {a + b - rank for a, b in pairwise(placement) if a != b and rank in (a, b)}
    num_links = 4 * len(neighbours)  # activations and gradients, in both directions
    dp = max(1, p.dp)
    expert_replicas = dp * p.cp
    rings = [
        (p.pp, LINK),
        (p.ep, EXPERTS),
        (dp, SHARDS),
        (expert_replicas * p.ep, SHARDS),
        (p.pp * expert_replicas * p.ep, TOTALS),
    ]
    if p.dp_replicate > 1:
        rings += [(p.dp_replicate, SHARDS), (p.dense_shards, SHARDS), (p.expert_shards, SHARDS)]
    if p.cp > 1:
        rings += [(p.cp, CONTEXT), (expert_replicas, SHARDS)]
    channels = sum(traffic.ctas for ranks, traffic in rings if ranks > 1)
    channels += (min(p.ep, per_node) - 1) * EXPERTS.ctas
    channels += (min(p.cp, max(1, per_node // p.ep)) - 1) * CONTEXT.ctas
    return CHANNEL * channels + CHANNEL // 2 * num_links * LINK.ctas


def part_bytes(config: Config, model: TrainedModel) -> int:
    """Return `memory.logits` in bytes; 0 if the dtypes of the head need all logits at once, as in a run.

    See `dualpipe.pipeline.compiled_stage.plain_head`.
    """
    p = config.parallel
    plan = dtype_plan(config.dtypes, config.train.dtype, model, min(p.replicas, 2), config.lora)
    head = plan.tensors.get("lm_head.weight")  # None: tied, in the dtype of the embedding
    if head is None:
        return config.memory.part_bytes
    is_cast = {head.compute, head.output or head.compute, plan.policy.output_dtype} != {head.compute}
    return 0 if is_cast or head.format is not None else config.memory.part_bytes


def describe_head(config: Config, model: TrainedModel) -> list[str]:
    """Return a line for logits that are more than `memory.logits`: on how many tokens at a time the head runs."""
    limit = config.memory.part_bytes
    if not limit:
        return []
    tokens = config.train.micro_batch_size * tokens_of_rank(config)
    dtype = dtype_of(config.train.dtype)
    rows = rows_per_part(model.vocab_size, dtype, limit)
    if tokens <= rows:
        return []
    allowed = f"memory.logits = {config.memory.logits:g} GB"
    reason = ""
    if head_in_parts(model, dtype, config.lora) is None:
        reason = "the head is not a plain linear layer"
    elif not part_bytes(config, model):
        reason = "the head is quantized, or its logits are cast to another dtype"
    if reason:
        return [f"head and loss: on all {tokens} tokens of a micro-batch at once, and not {rows} ({allowed}), as "
                f"{reason}"]
    return [f"head and loss: on {rows} of {tokens} tokens at a time ({allowed})"]


def approximations(config: Config) -> list[str]:
    """Return a line for each part of the estimate that is a formula, not compared with a run."""
    if config.parallel.device == "cpu" or config.parallel.cp == 1:
        return []
    return ["approximate: what attention holds of the tokens of other ranks (parallel.cp) is a formula for GPUs, not "
            "compared with a run; leave memory to spare"]


def unit_for(most: int) -> Unit:
    """Return the largest unit that is at most `most` bytes, or else the smallest."""
    return next((unit for unit in BINARY if most >= unit.bytes), BINARY[-1])


def table(ranks: Sequence[RankMemory], capacity: float = 0.0) -> Iterator[str]:
    """Yield the lines of a table of the ranks, in the unit that suits the largest.

    Args:
        ranks: memory of each pipeline rank.
        capacity: memory of a device in GB, to be compared with the largest rank; 0 for none.
    """
    columns = [memory._asdict() | {"total": memory.total} for memory in ranks]
    for values in columns:
        del values["host"], values["moment_buffers"], values["frozen"]
    host = max(memory.host for memory in ranks)
    peak = max(memory.total for memory in ranks)
    unit = unit_for(peak)
    yield " ".join(f"{name:>11}" for name in (f"{unit.name} of rank", *columns[0]))
    for rank, values in enumerate(columns):
        yield f"{rank:>11} " + " ".join(f"{value / unit.bytes:>11.2f}" for value in values.values())
    yield f"at most {peak / unit.bytes:.1f} {unit.name}, besides what torch and CUDA take"
    if host:
        yield f"at most {host / unit.bytes:.1f} {unit.name} of pinned host memory for each rank (optimizer.offload)"
    if capacity:
        spare = capacity - peak / GB
        yield f"of {capacity:g} GB: {spare:.1f} to spare" if spare > 0 else f"{-spare:.1f} GB more than {capacity:g}"
