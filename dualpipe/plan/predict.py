"""What a step of a run takes, and on what: the costs of its stages, played through in its schedule.

    step = gather + optimizer + the schedule with its sends and its reductions

What a rank does on average is its kernels, what of them is computed again, and what of the all-to-all is not hidden
(with what multiprocessors that communicate take from computing); what is left of the schedule is the bubble, stages
that differ included, and what sends and reductions add to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.models import HubConfig
from dualpipe.models.flops import flops_per_token
from dualpipe.models.stages import meta_stages, stage_layers
from dualpipe.plan.communication import ring_seconds, send_seconds
from dualpipe.plan.machines import Machine
from dualpipe.plan.memory import (
    RankMemory,
    built,
    dtype_plan,
    estimate,
    muon_shapes,
    sent_bytes,
    stage_sizes,
    tokens_of_rank,
)
from dualpipe.plan.operators import IN_BF16, InFP8
from dualpipe.plan.stage_costs import Setting, Spent, StageCosts, stage_costs, total
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.schedule import Costs, Schedule, Timeline, simulate
from dualpipe.train.config.schema import Config, DTypesConfig
from dualpipe.train.optim.muon import operations

PRODUCTS = ("gemm", "grouped", "fp8 gemm", "fp8 grouped", "attention", "attention backward")
PARTS = ("products", "memory traffic", "host", "recomputation", "all-to-all", "sends", "gather", "reduce", "optimizer",
         "bubble")
STEADY = 1e-4  # relative change of a period's time below which the middle of a step is taken to repeat itself


class Played(NamedTuple):
    """Seconds of a schedule, and those that an average rank computes and communicates in it."""

    makespan: float
    busy: float


@dataclass(frozen=True)
class Prediction:
    """A run with its layout, parallel.dp included, on a machine: `config` as `fit_world` makes it."""

    config: Config
    model: HubConfig
    machine: Machine

    @cached_property
    def setting(self) -> Setting:
        """What the costs of its layers depend on."""
        p, t, rules = self.config.parallel, self.config.train, self.config.memory.recompute
        return Setting(
            self.model, self.machine, dtype_of(t.dtype), p.ep, t.micro_batch_size * tokens_of_rank(self.config),
            t.sequence_length, tuple(rule for rule in rules if rule != "none"), p.overlap, p.cp, p.cp_method,
            _in_fp8(self.config.dtypes, t.dtype, self.model) if self.machine.fp8 else IN_BF16,
        )

    @cached_property
    def shape(self) -> Schedule:
        """Its schedule, for one micro-batch: the placement of its stages."""
        return built(self.config.parallel.schedule, self.config.parallel.pp, 1)

    @cached_property
    def stages(self) -> list[StageCosts]:
        """The costs of its stages."""
        number = self.shape.num_stages
        cuts = stage_layers(self.model, number, self.config.parallel.layers_per_stage)
        return [stage_costs(self.setting, cut, last=i == number - 1) for i, cut in enumerate(cuts)]

    @property
    def tokens(self) -> int:
        """Those of a step, on all ranks."""
        t = self.config.train
        return t.micro_batch_size * t.num_chunks * t.sequence_length * self.config.parallel.batch_shards

    @property
    def bound(self) -> float:
        """Seconds that no schedule of these stages can do without: the busiest rank's work."""
        ranks = [0.0] * self.shape.num_ranks
        for rank, stage in zip(self.shape.placement, self.stages):
            c = stage.costs
            ranks[rank] += min(c.F + c.B, c.F + (c.I or 0.0) + c.W, c.FB or 0.0)
        return max(ranks) * self.config.train.num_chunks

    @cached_property
    def memory(self) -> list[RankMemory]:
        """As `dualpipe memory` counts it, of the largest rank of each pipeline rank."""
        return estimate(self.config, self.model)

    @cached_property
    def peak(self) -> int:
        """Bytes of the worst rank."""
        return max(rank.total for rank in self.memory)

    @cached_property
    def send(self) -> float:
        """Seconds of a micro-batch's way from a stage to the next."""
        p, s = self.config.parallel, self.setting
        return send_seconds(self.machine, s.tokens * sent_bytes(self.model, s.dtype), p.pp, p.replicas)

    @cached_property
    def shards(self) -> list[tuple[float, float]]:
        """For each stage, seconds to gather its parameters and to reduce its gradients, which are in float32; where
        several parts of dp have all parameters, to sum these over them too."""
        p = self.config.parallel
        ends_meet = self.shape.placement[0] == self.shape.placement[-1]
        found = []
        for sizes in stage_sizes(self.model, self.shape.num_stages, p.layers_per_stage, p.ep, ends_meet=ends_meet):
            gathered_as = self.setting.dtype.itemsize
            gather = self._around(gathered_as * sizes.dense, gathered_as * sizes.experts)
            of_rank = 4 * (sizes.dense / p.dense_shards + sizes.experts / p.expert_shards)
            reduced_and_gathered = 2 * ring_seconds(self.machine, of_rank, p.dp_replicate, p.dense_shards)
            found.append((gather, self._around(4 * sizes.dense, 4 * sizes.experts) + reduced_and_gathered))
        return found

    def _around(self, dense: float, experts: float) -> float:
        """Seconds for so many bytes of dense parameters and of experts to go around the rings of those that share
        them."""
        p = self.config.parallel
        return (ring_seconds(self.machine, dense, p.dense_shards)
                + ring_seconds(self.machine, experts, p.expert_shards, p.ep))

    @cached_property
    def gather(self) -> float:
        """Seconds until the first stage of every rank has been gathered; others are while these compute."""
        firsts = [self.shape.rank_stages(rank)[0] for rank in range(self.shape.num_ranks)]
        return max(self.shards[stage][0] for stage in firsts)

    def timeline(self) -> Timeline:
        """The schedule of a step, in seconds."""
        p, chunks = self.config.parallel, self.config.train.num_chunks
        return simulate(built(p.schedule, p.pp, chunks), self.costs())

    @cached_property
    def optimizer(self) -> float:
        """Seconds to read and write what is stored, and to read and clear the gradients, and of Muon's products, which
        hide what it sends; on the worst rank."""
        moved = max(2 * (rank.parameters + rank.optimizer + rank.gradients) for rank in self.memory)
        return moved / (self.machine.hbm * self.machine.bandwidth * 1e9) + (
            self.muon_flops / (self.machine.tflops * self.machine.gemm * 1e12))

    @cached_property
    def muon_flops(self) -> float:
        """Operations of Muon's products on the worst rank: ranks that have the same stages share them."""
        p = self.config.parallel
        stages = meta_stages(self.model, self.shape.num_stages, layers_per_stage=p.layers_per_stage)
        each = [sum(map(operations, muon_shapes(self.config.optimizer, stage))) for stage in stages]
        return max(sum(each[i] for i in self.shape.rank_stages(rank)) for rank in range(p.pp)) / p.dense_shards

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.gather + self.optimizer + self._played().makespan

    @cached_property
    def spent(self) -> dict[str, Spent]:
        """A micro-batch's computing by kind of operator, of all stages; computed again included."""
        return total(stage.spent.items() for stage in self.stages)

    @cached_property
    def parts(self) -> dict[str, float]:
        """What the seconds of a step are spent on, on an average rank, by the names in PARTS; they add up to it."""
        chunks = self.config.train.num_chunks / self.shape.num_ranks
        kernels = {kind: one.seconds * chunks for kind, one in self.spent.items()}
        again = sum(stage.again for stage in self.stages) * chunks
        products, everything = sum(kernels.get(kind, 0.0) for kind in PRODUCTS), sum(kernels.values())
        once = 1 - again / everything  # what is computed again has about the mix of the rest
        full, busy = self._played()
        unreduced = self._played(reduce=False).makespan
        plain = self._played(reduce=False, send=False).makespan
        return {
            "products": products * once, "memory traffic": kernels["memory"] * once, "host": kernels["host"] * once,
            "recomputation": again, "all-to-all": busy - everything, "sends": unreduced - plain, "gather": self.gather,
            "reduce": full - unreduced, "optimizer": self.optimizer, "bubble": plain - busy,
        }

    @property
    def limit(self) -> str:
        """The part that takes the most of a step besides products, or these where all others take less than a third."""
        others = {name: seconds for name, seconds in self.parts.items() if name != "products"}
        if sum(others.values()) < self.step_seconds / 3:
            return "products"
        return max(others, key=lambda name: others[name])

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU trains on in a second."""
        return self.tokens / self.step_seconds / self.config.parallel.world_size

    @property
    def mfu(self) -> float:
        """The part of the peak that the model's operations take, those of all pairs of positions counted."""
        flops = flops_per_token(self.model, self.setting.length).both
        return flops * self.tokens_per_second / (self.machine.tflops * 1e12)

    def costs(self, *, reduce: bool = True, send: bool = True) -> Costs:
        """What the schedule is timed with, in seconds."""
        stages = [replace(stage.costs, R=shards[1] if reduce else 0.0)
                  for stage, shards in zip(self.stages, self.shards)]
        return Costs(p2p=self.send if send else 0.0, per_stage=stages)

    def _played(self, *, reduce: bool = True, send: bool = True) -> Played:
        p = self.config.parallel
        return play(p.schedule, p.pp, self.config.train.num_chunks, self.costs(reduce=reduce, send=send))


@lru_cache(maxsize=16)
def _in_fp8(dtypes: DTypesConfig, dtype: Literal["fp32", "bf16"], model: HubConfig) -> InFP8:
    """As `dualpipe.nn.quantized_matmul` decides: square blocks can be transposed for input gradients. Rows alone may be
    sent so for products in another dtype."""
    plan, (whole,) = dtype_plan(dtypes, dtype, model, 2), meta_stages(model)
    formats = {name: format for name, _ in whole.named_parameters() if (format := plan.of(name).format)
               and format.computes and dtype_of(dtype) in HALF and dtypes.products == "auto"}
    square = frozenset(name for name, format in formats.items() if format.block[0] == format.block[1])
    return InFP8(frozenset(formats), square, dtypes.fp8_dispatch)


def play(name: str, ranks: int, chunks: int, costs: Costs) -> Played:
    """Simulate a schedule. The middle of a long step repeats itself every 2P micro-batches: it is played until a period
    adds as much as the periods before it, and the rest is multiplied."""
    period = 2 * ranks
    periods, rest = divmod(chunks, period)
    played: list[Played] = []
    count = 1
    while count < periods:
        played.append(_simulated(name, ranks, count * period + rest, costs))
        if len(played) >= 3:
            first, second, third = played[-3:]
            before = (second.makespan - first.makespan) / (count // 4)
            period_time = (third.makespan - second.makespan) / (count // 2)
            if abs(period_time - before) <= STEADY * period_time:
                left = (periods - count) / (count // 2)
                return Played(*(long + left * (long - short) for short, long in zip(second, third)))
        count *= 2
    return _simulated(name, ranks, chunks, costs)


def _simulated(name: str, ranks: int, chunks: int, costs: Costs) -> Played:
    timeline = simulate(built(name, ranks, chunks), costs)
    busy = sum(span.end - span.start for span in chain.from_iterable(timeline.spans))
    return Played(timeline.makespan, busy / ranks)
