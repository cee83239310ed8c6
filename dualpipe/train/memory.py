"""`dualpipe memory`: what a run needs on each rank, from its configuration alone; nothing is allocated.

    parameters   as they are stored: this rank's shard
    optimizer    two moments (one of Muon's) and, where parameters are narrower than float32, masters: of the shard
    gathered     the stages' parameters in the dtype or format that they compute in, whole, where they are sharded: what
                 is sent; and weights in blocks of 128 x 128 once more, transposed, for input gradients in FP8
    gradients    accumulators in float32, of the whole stages; of parameters that several ranks share, the shard's as
                 well, and of the largest unit what is on its way there
    activations  of the micro-batches that the schedule has alive, with what its weight gradients wait for and what is
                 computed again, at the worst step: counted (`dualpipe.models.activations`)
    logits       of one micro-batch: themselves and their gradient
    nccl         buffers to peers within a node, as NCCL's p2p.cc makes them; between nodes it takes fewer

What the allocator leaves unused and the CUDA context, a few GB, come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import nn

from dualpipe.device import EXPERTS, LINK, SHARDS, TOTALS
from dualpipe.dtypes import dtype_of
from dualpipe.models import HubConfig, Stage, build_stages
from dualpipe.models.activations import ActivationBytes, activation_bytes
from dualpipe.nn import GroupedLinear
from dualpipe.parallel import DTypePlan
from dualpipe.schedule import Schedule, Step, build
from dualpipe.train.config import Config, fit_world
from dualpipe.train.model import check_tied, plan_run
from dualpipe.train.optimizer import takes_muon
from dualpipe.train.schedule import build_schedule
from dualpipe.train.tables import ParallelConfig

GB = 10**9
# Of one channel (a block of a kernel) to a peer and back: the buffers of three protocols, 0.5, 4.69 and 4 MiB, in
# pieces of 2 MiB. On Hopper 10 where it receives and 2 where it sends; 6 each on an A100, which reads from its peer.
CHANNEL = 12 * 2**20
_NODE = 8  # GPUs, as a rule


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rank, by what they are for."""

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    activations: int
    logits: int
    nccl: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def estimate(config: Config, model: HubConfig, *, activations: bool = True) -> list[RankMemory]:
    """For each pipeline rank, what its largest rank of "dp" and "ep" needs; without activations, which take the longest
    to count, 0 for them. Collective over nobody.

    Raises ValueError for a model that cannot be cut so.
    """
    config = fit_world(config, config.parallel.world_size)
    p, train = config.parallel, config.train
    if model.num_experts % p.ep:
        raise ValueError(f"parallel.ep = {p.ep} does not divide the model's {model.num_experts} experts")
    dp, ep = p.dp, p.ep
    check_tied(model, dp * ep)
    schedule, taken = stage_activations(config, model) if activations else (_schedule(config, 1), [])
    stages = meta_stages(model, schedule.num_stages, p.layers_per_stage)
    dtype, sharded = dtype_of(train.dtype), dp * ep > 1
    stored, tokens = 4 if sharded else dtype.itemsize, train.micro_batch_size * train.sequence_length
    moments, fp32 = 2 * dtype_of(config.optimizer.moments).itemsize, 4

    plan = plan_run(config, model, {}) if config.dtypes.rules else None
    ranks = []
    for rank, steps in enumerate(schedule.ranks):
        mine = {number: stages[number] for number in schedule.rank_stages(rank)}
        dense, experts, reduced = _rank_sizes(
            model, schedule.num_stages, p.layers_per_stage, schedule.rank_stages(rank), ep, dp)
        whole, dense_shard, expert_shard = dense + experts, -(-dense // (dp * ep)), -(-experts // dp)
        shard, copied = dense_shard + expert_shard, 0
        stored_less, masters, gathered_less = _quantized(mine.values(), plan, dp, ep) if plan else (0, 0, 0)
        single = 0  # parameters with one moment instead of two
        if config.optimizer.name == "muon":
            matrices = [param for stage in mine.values() for place, owner in stage.named_modules()
                        for name, param in owner.named_parameters(recurse=False)
                        if takes_muon(f"{place}.{name}", owner, param)]
            single = sum(param.numel() // (ep * dp) for param in matrices)
        if sharded:
            copied = dense_shard + (expert_shard if dp > 1 else 0) + reduced
        ranks.append(RankMemory(
            parameters=stored * shard - stored_less,
            optimizer=(moments + (fp32 if stored < fp32 else 0)) * shard - moments // 2 * single + masters,
            gathered=(dtype.itemsize * whole if sharded else 0) - gathered_less,
            gradients=fp32 * (whole + copied),
            activations=max(map(sum, alive(steps, taken)), default=0) if activations else 0,
            logits=2 * dtype.itemsize * tokens * model.vocab_size if any(stage.last for stage in mine.values()) else 0,
            nccl=_nccl_buffers(p, schedule.placement, rank),
        ))
    return ranks


def stage_activations(config: Config, model: HubConfig) -> tuple[Schedule, list[ActivationBytes]]:
    """The schedule, with so many micro-batches as may be alive at once, and what one takes in each of its stages."""
    p, train = config.parallel, config.train
    # With more micro-batches no more of them are alive: the middle of a step repeats itself.
    schedule = _schedule(config, min(train.num_chunks, 4 * p.pp))
    return schedule, [
        activation_bytes(
            model, layers_of(stage), ep=p.ep, recompute=config.memory.recompute, dtype=dtype_of(train.dtype),
            batch=train.micro_batch_size, sequence_length=train.sequence_length, scores=p.device == "cpu",
        )
        for stage in meta_stages(model, schedule.num_stages, p.layers_per_stage)
    ]


def _schedule(config: Config, chunks: int) -> Schedule:
    """The run's, with so many micro-batches where that is no other order of work."""
    p = config.parallel
    return build_schedule(config) if p.schedule == "auto" else built(p.schedule, p.pp, chunks)


@lru_cache(maxsize=64)
def built(name: str, ranks: int, chunks: int) -> Schedule:
    """A schedule, the same one for all callers."""
    return build(name, ranks, chunks)


@lru_cache(maxsize=64)
def meta_stages(model: HubConfig, num_stages: int, layers_per_stage: tuple[int, ...]) -> list[Stage]:
    """All stages of the model, without memory; the same ones for all callers."""
    with torch.device("meta"):
        return build_stages(model, num_stages, layers_per_stage=layers_per_stage)


@lru_cache(maxsize=4096)
def _rank_sizes(
    model: HubConfig, num_stages: int, layers: tuple[int, ...], mine: tuple[int, ...], ep: int, dp: int
) -> tuple[int, int, int]:
    """Dense parameters of the stages `mine`, those of their experts, and the most that are reduced at once."""
    stages = meta_stages(model, num_stages, layers)
    together = nn.ModuleList(stages[number] for number in mine)  # so that a tied parameter counts once
    reduced = [0]
    for stage in (stages[number] for number in mine):
        inside = [parameter_sizes(layer, ep) for layer in stage.layers.values()]
        reduced += [parameter_sizes(stage, ep)[0] - sum(dense for dense, _ in inside), *(dense for dense, _ in inside)]
        if dp > 1:  # else experts are nobody else's, and their accumulators become their gradients
            reduced += [experts for _, experts in inside]
    return *parameter_sizes(together, ep), max(reduced)


def layers_of(stage: Stage) -> range:
    """The global numbers of a stage's layers."""
    numbers = [index for index, _ in stage.numbered()]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def _quantized(stages: Iterable[Stage], plan: DTypePlan, dp: int, ep: int) -> tuple[int, int, int]:
    """What formats change of a rank's bytes: how many fewer are stored, masters that other weights have no need of, and
    how many fewer are gathered, less those that are transposed."""
    stored = masters = gathered = 0
    for name, param in (pair for stage in stages for pair in stage.named_parameters()):
        planned = plan.of(name)
        if (format := planned.format) is None:
            continue
        *experts, rows, columns = param.shape
        matrices, shards = (experts[0] // ep, dp) if experts else (1, dp * ep)
        elements, width = matrices * rows * columns, planned.storage.itemsize
        packed = matrices * format.block_rows(rows) * format.row_bytes(columns)
        if not planned.gathered:
            stored += (width * elements - packed) // shards
            masters += 4 * elements // shards if width >= 4 else 0
        if dp * ep > 1:
            gathered += planned.compute.itemsize * elements - packed
        if format.block[0] == format.block[1] and planned.compute is torch.bfloat16:
            gathered -= matrices * format.block_rows(columns) * format.row_bytes(rows)
    return stored, masters, gathered


def _nccl_buffers(p: ParallelConfig, placement: Sequence[int], rank: int) -> int:
    """Bytes of a rank: to each peer that experts are on, around the ring of each group, and half of CHANNEL a link."""
    if p.device == "cpu":
        return 0
    neighbours = {a + b - rank for a, b in pairwise(placement) if a != b and rank in (a, b)}
    links, peers, replicas = 4 * len(neighbours), min(p.ep, _NODE) - 1, max(1, p.dp) * p.ep
    rings = ((p.pp, LINK), (p.ep, EXPERTS), (p.dp, SHARDS), (replicas, SHARDS), (p.pp * replicas, TOTALS))
    channels = sum(traffic.ctas for ranks, traffic in rings if ranks > 1) + peers * EXPERTS.ctas
    return CHANNEL * channels + CHANNEL // 2 * links * LINK.ctas


def parameter_sizes(module: nn.Module, ep: int) -> tuple[int, int]:
    """Dense parameters, and those of the experts of one of `ep` ranks."""
    grouped = (inner for inner in module.modules() if isinstance(inner, GroupedLinear))
    experts = sum(param.numel() for inner in grouped for param in inner.parameters())
    return sum(param.numel() for param in module.parameters()) - experts, experts // ep


def alive(steps: Iterable[Step], stages: Sequence[ActivationBytes]) -> Iterator[tuple[int, int]]:
    """Bytes of activations, and of what waits for weight gradients, while each step of a rank runs."""
    kept = pending = 0
    for step in steps:
        during = [kept, pending]
        for action in step:
            of = stages[action.stage]
            if action.kind == "F":
                during[0], kept = during[0] + of.forward, kept + of.kept
            elif action.kind == "W":
                pending -= of.deferred
            else:
                whole = action.kind == "B"
                during[0] += (of.backward if whole else of.input_backward) - of.kept
                kept, pending = kept - of.kept, pending + (0 if whole else of.deferred)
        yield during[0], during[1]


def table(ranks: Sequence[RankMemory], capacity: float = 0.0) -> Iterator[str]:
    """The estimate as lines of text, in GiB; and what it leaves of the `capacity` of a device, in GB, where one is
    given."""
    columns = [asdict(memory) | {"total": memory.total} for memory in ranks]
    yield " ".join(f"{name:>11}" for name in ("rank", *columns[0]))
    for rank, values in enumerate(columns):
        yield f"{rank:>11} " + " ".join(f"{value / 2**30:>11.2f}" for value in values.values())
    most = max(memory.total for memory in ranks)
    yield f"at most {most / 2**30:.1f} GiB, besides what torch and CUDA take"
    if capacity:
        spare = capacity - most / GB
        yield f"of {capacity:g} GB: {spare:.1f} to spare" if spare > 0 else f"{-spare:.1f} GB more than {capacity:g}"
