"""Predicted step time of a run, and its parts: a simulation of its schedule with the costs of its stages.

    step = gather + optimizer + the schedule with its sends and its reductions

In the schedule, an average rank computes its operators, recomputes some of them, and waits for the part of the
all-to-all that is not hidden; that wait includes the slowdown of compute beside communication. The rest is the time
that sends and reductions add, and the bubble. Part of the bubble comes from unequal stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.models import HubConfig
from dualpipe.models.stages import stage_layers
from dualpipe.plan.communication import ring_seconds, send_seconds
from dualpipe.plan.machines import Machine
from dualpipe.plan.memory import RankMemory, cached_schedule, estimate, part_bytes, sent_bytes, tokens_of_rank
from dualpipe.plan.operators import NO_FP8, FP8Usage
from dualpipe.plan.parameter_memory import dtype_plan, muon_shapes, stage_sizes
from dualpipe.plan.stage_costs import OperatorTotal, Setting, StageCosts, stage_costs, total
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.schedule import Costs, Schedule, simulate
from dualpipe.train.config.model_config import flops_per_token, stages_on_meta
from dualpipe.train.config.schema import Config, DTypesConfig, LoRAConfig
from dualpipe.train.optim.muon import count_flops

# Kinds of operators that count as "GEMMs": these, and attention.
PRODUCTS = ("gemm", "grouped", "fp8 gemm", "fp8 grouped", "attention", "attention backward")
PARTS = ("GEMMs", "memory traffic", "host", "recomputation", "all-to-all", "sends", "gather", "reduce", "optimizer",
         "bubble")
STEADY = 1e-4  # relative change of a period's time below which `simulate_long` takes all later periods to be equal


class SimulatedTime(NamedTuple):
    """Seconds of a schedule, and the busy seconds of an average rank: compute, and communication that is not hidden."""

    makespan: float
    busy: float


@dataclass(frozen=True)
class Prediction:
    """Prediction for a run on a machine.

    config: configuration as `fit_world` returns it, with all sizes of the mesh, parallel.dp included.
    """

    config: Config
    model: HubConfig
    machine: Machine

    @cached_property
    def setting(self) -> Setting:
        """Inputs of the costs of the run's layers."""
        p = self.config.parallel
        t = self.config.train
        return Setting(
            model=self.model,
            machine=self.machine,
            dtype=dtype_of(t.dtype),
            ep=p.ep,
            tokens=t.micro_batch_size * tokens_of_rank(self.config),
            length=t.sequence_length,
            recompute=tuple(rule for rule in self.config.memory.recompute if rule != "none"),
            overlap=p.overlap,
            cp=p.cp,
            cp_method=p.cp_method,
            dispatch=p.dispatch,
            part_bytes=part_bytes(self.config, self.model),
            fp8=_fp8_usage(self.config.dtypes, t.dtype, self.model, self.config.lora) if self.machine.fp8 else NO_FP8,
            lora=self.config.lora,
        )

    @cached_property
    def shape(self) -> Schedule:
        """Schedule with one micro-batch, to read the number of stages and their placement from."""
        return cached_schedule(self.config.parallel.schedule, self.config.parallel.pp, 1)

    @cached_property
    def stages(self) -> list[StageCosts]:
        """Costs of the stages."""
        num_stages = self.shape.num_stages
        layers_by_stage = stage_layers(self.model, num_stages, self.config.parallel.layers_per_stage)
        return [stage_costs(self.setting, layers, last=stage == num_stages - 1)
                for stage, layers in enumerate(layers_by_stage)]

    @property
    def tokens(self) -> int:
        """Number of tokens per step, on all ranks."""
        t = self.config.train
        return t.micro_batch_size * t.num_chunks * t.sequence_length * self.config.parallel.batch_shards

    @property
    def bound(self) -> float:
        """Lower bound on the time of any schedule of these stages, in seconds: the work of the busiest rank."""
        ranks = [0.0] * self.shape.num_ranks
        for rank, stage in zip(self.shape.placement, self.stages):
            costs = stage.costs
            weights = min((costs.W, *stage.merged_w))
            split = costs.F + (costs.I or 0.0) + weights  # `stage_costs` always sets I and FB
            ranks[rank] += min(costs.F + costs.B, split, costs.FB or 0.0)
        return max(ranks) * self.config.train.num_chunks

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Memory of each pipeline rank, as `dualpipe memory` estimates it."""
        return estimate(self.config, self.model, ranks_per_node=self.machine.node)

    @cached_property
    def peak(self) -> int:
        """Bytes of the rank with the most memory."""
        return max(rank.total for rank in self.memory)

    @cached_property
    def send(self) -> float:
        """Seconds to send a micro-batch from a stage to the next."""
        p = self.config.parallel
        size = self.setting.tokens * sent_bytes(self.model, self.setting.dtype)
        return send_seconds(self.machine, size, p.pp, p.replicas)

    @cached_property
    def shards(self) -> list[tuple[float, float]]:
        """Times (gather, reduce) of each stage: seconds to gather its parameters, and to reduce its float32 gradients.

        Frozen parameters are gathered too; they have no gradients.
        With parallel.dp_replicate, "dp" consists of that many parts with all parameters each, and the reduction
        includes the all-reduce of each shard over these parts.
        """
        p = self.config.parallel
        # True if the first and the last stage are on one rank: it then stores a tied embedding once, not twice.
        ends_meet = self.shape.placement[0] == self.shape.placement[-1]
        itemsize = self.setting.dtype.itemsize
        seconds = []
        all_sizes = stage_sizes(
            self.model, self.shape.num_stages, p.layers_per_stage, p.ep, ends_meet=ends_meet, lora=self.config.lora)
        for sizes in all_sizes:
            gather = self._shard_ring_seconds(itemsize * sizes.dense, itemsize * sizes.experts)
            reduce_scatter = self._shard_ring_seconds(4 * sizes.trained_dense, 4 * sizes.trained_experts)
            shard_bytes = 4 * (sizes.trained_dense / p.dense_shards + sizes.trained_experts / p.expert_shards)
            all_reduce = 2 * ring_seconds(self.machine, shard_bytes, p.dp_replicate, p.dense_shards)
            seconds.append((gather, reduce_scatter + all_reduce))
        return seconds

    def _shard_ring_seconds(self, dense: float, experts: float) -> float:
        """Return the seconds to gather or reduce this many bytes in the rings of the ranks that shard them."""
        p = self.config.parallel
        dense_seconds = ring_seconds(self.machine, dense, p.dense_shards)
        return dense_seconds + ring_seconds(self.machine, experts, p.expert_shards, p.ep)

    @cached_property
    def gather(self) -> float:
        """Seconds to gather the first stage of every rank. The other stages are gathered while these compute."""
        firsts = [self.shape.rank_stages(rank)[0] for rank in range(self.shape.num_ranks)]
        return max(self.shards[stage][0] for stage in firsts)

    @cached_property
    def optimizer(self) -> float:
        """Seconds of the optimizer on the slowest rank.

        It reads and writes trained parameters and states, reads and clears gradients, and computes Muon's GEMMs, which
        hide Muon's communication. Moments in host memory are copied to the device and back beside that, in both
        directions at once.
        """
        # Of moments in host memory, the device writes each byte to a buffer, reads and writes it in the update, and
        # reads it to copy it back: 4 times. This is all traffic of the buffers.
        moved = max(
            2 * (rank.parameters - rank.frozen + rank.optimizer - rank.moment_buffers + rank.gradients) + 4 * rank.host
            for rank in self.memory)
        memory_seconds = moved / (self.machine.hbm * self.machine.bandwidth * 1e9)
        muon_seconds = self.muon_flops / (self.machine.tflops * self.machine.gemm * 1e12)
        return max(memory_seconds, self.host_link_seconds) + muon_seconds

    @property
    def host_moments(self) -> int:
        """Bytes of the moments in host memory, of the rank with the most; 0 without optimizer.offload."""
        return max(rank.host for rank in self.memory)

    @property
    def host_link_seconds(self) -> float:
        """Seconds of the moments on the link to the host: each crosses it once in each direction, both at once."""
        return self.host_moments / (self.machine.host_link * 1e9)

    @cached_property
    def muon_flops(self) -> float:
        """FLOPs of Muon's GEMMs on the slowest rank. Ranks with the same stages divide these GEMMs among them."""
        p = self.config.parallel
        stages = stages_on_meta(self.model, self.shape.num_stages, p.layers_per_stage, self.config.lora)
        stage_flops = [sum(map(count_flops, muon_shapes(self.config.optimizer, stage))) for stage in stages]
        rank_flops = [sum(stage_flops[stage] for stage in self.shape.rank_stages(rank)) for rank in range(p.pp)]
        return max(rank_flops) / p.dense_shards

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.gather + self.optimizer + self._simulate().makespan

    @cached_property
    def spent(self) -> dict[str, OperatorTotal]:
        """Launches, FLOPs, bytes and seconds of a micro-batch by kind of operator: all stages, with recompute."""
        return total(stage.spent.items() for stage in self.stages)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step on an average rank by the names in `PARTS`. Their sum is `step_seconds`."""
        microbatches_per_rank = self.config.train.num_chunks / self.shape.num_ranks
        operators = {kind: totals.seconds * microbatches_per_rank for kind, totals in self.spent.items()}
        recomputed = sum(stage.recomputed for stage in self.stages) * microbatches_per_rank
        gemms = sum(operators.get(kind, 0.0) for kind in PRODUCTS)
        all_operators = sum(operators.values())
        not_recomputed = 1 - recomputed / all_operators  # fraction, taken to be equal for all kinds of operators
        # busy = all operators - savings by merged weight gradients + communication that is not hidden
        makespan, busy = self._simulate()
        merged = self.merged_seconds
        unreduced = self._simulate(reduce=False).makespan
        plain = self._simulate(reduce=False, send=False).makespan
        return {
            "GEMMs": gemms * not_recomputed - merged,
            "memory traffic": operators["memory"] * not_recomputed,
            "host": operators["host"] * not_recomputed,
            "recomputation": recomputed,
            "all-to-all": busy + merged - all_operators,
            "sends": unreduced - plain,
            "gather": self.gather,
            "reduce": makespan - unreduced,
            "optimizer": self.optimizer,
            "bubble": plain - busy,
        }

    @property
    def limit(self) -> str:
        """Name of the largest part besides "GEMMs", or "GEMMs" if all others take less than a third of a step."""
        others = {name: seconds for name, seconds in self.parts.items() if name != "GEMMs"}
        if sum(others.values()) < self.step_seconds / 3:
            return "GEMMs"
        return max(others, key=lambda name: others[name])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.step_seconds / self.config.parallel.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, as a fraction. For attention it counts all pairs of positions, causal or not."""
        flops = flops_per_token(self.model, self.setting.length, self.config.lora)
        return flops * self.tokens_per_second / (self.machine.tflops * 1e12)

    def costs(self, *, reduce: bool = True, send: bool = True) -> Costs:
        """Return the costs for the simulation, in seconds. reduce, send: False to leave out reductions or sends."""
        stages = [replace(stage.costs, R=shards[1] if reduce else 0.0)
                  for stage, shards in zip(self.stages, self.shards)]
        return Costs(p2p=self.send if send else 0.0, per_stage=stages)

    @cached_property
    def merged_w(self) -> dict[int, tuple[float, ...]]:
        """Seconds of merged "W" by stage, as `simulate` takes them; empty if none are merged.

        In consecutive steps that are each a single "W", those of one stage are merged: one grouped GEMM computes the
        weight gradients of several micro-batches. With fp8_weight_grad none are merged, as the saved rows are
        dequantized one micro-batch at a time.
        """
        if not self.config.parallel.merge_weight_grads or self.config.dtypes.fp8_weight_grad:
            return {}
        return {number: stage.merged_w for number, stage in enumerate(self.stages) if stage.merged_w}

    @cached_property
    def merged_seconds(self) -> float:
        """Seconds per step that merged weight gradients save on an average rank."""
        return self._simulate(merge=False).busy - self._simulate().busy if self.merged_w else 0.0

    def _simulate(self, *, reduce: bool = True, send: bool = True, merge: bool = True) -> SimulatedTime:
        """Return the times of the schedule, without reductions, sends or merging if they are False."""
        p = self.config.parallel
        costs = self.costs(reduce=reduce, send=send)
        merged_w = self.merged_w if merge else {}
        return simulate_long(p.schedule, p.pp, self.config.train.num_chunks, costs, merged_w)


@lru_cache(maxsize=16)
def _fp8_usage(
    dtypes: DTypesConfig, dtype: Literal["fp32", "bf16"], model: HubConfig, lora: LoRAConfig
) -> FP8Usage:
    """Return the weights that are used in FP8, by the rules of `dualpipe.nn.quantized_matmul`.

    Only weights in square blocks can be transposed for input gradients. Rows may be sent to experts in FP8 even if the
    experts compute in another dtype.
    """
    can_compute = dtype_of(dtype) in HALF and dtypes.gemm_precision == "auto"
    plan = dtype_plan(dtypes, dtype, model, 2, lora)  # 2 replicas: the formats do not depend on their number
    (whole,) = stages_on_meta(model, lora=lora)
    weights = set()
    square = set()
    for name, _ in whole.named_parameters():
        format = plan.of(name).format
        if format and format.computes and can_compute:
            weights.add(name)
            if format.block[0] == format.block[1]:
                square.add(name)
    return FP8Usage(frozenset(weights), frozenset(square), dtypes.fp8_dispatch)


def simulate_long(
    name: str, ranks: int, chunks: int, costs: Costs, merged_w: Mapping[int, Sequence[float]] | None = None
) -> SimulatedTime:
    """Simulate a schedule, and extrapolate the middle of a long step.

    The middle repeats itself every 2P micro-batches on P ranks. The number of simulated periods is doubled until a
    period takes as long as those before it; the remaining periods are then taken to be equal.

    Args:
        name: name of the schedule.
        ranks: number of pipeline ranks, P.
        chunks: number of micro-batches.
        costs: costs of the stages, in seconds.
        merged_w: costs of merged "W", as `simulate` takes them.
    """
    period = 2 * ranks
    periods, rest = divmod(chunks, period)
    times: list[SimulatedTime] = []
    count = 1  # periods simulated next: 1, 2, 4 and so on
    while count < periods:
        times.append(_simulate(name, ranks, count * period + rest, costs, merged_w))
        if len(times) >= 3:
            first, second, third = times[-3:]  # of count / 4, count / 2 and count periods
            previous_period_time = (second.makespan - first.makespan) / (count // 4)
            period_time = (third.makespan - second.makespan) / (count // 2)
            if abs(period_time - previous_period_time) <= STEADY * period_time:
                remaining = (periods - count) / (count // 2)  # in units of the difference between the last two runs
                return SimulatedTime(*(long + remaining * (long - short) for short, long in zip(second, third)))
        count *= 2
    return _simulate(name, ranks, chunks, costs, merged_w)


def _simulate(
    name: str, ranks: int, chunks: int, costs: Costs, merged_w: Mapping[int, Sequence[float]] | None
) -> SimulatedTime:
    """Simulate all of a schedule."""
    timeline = simulate(cached_schedule(name, ranks, chunks), costs, merged_w=merged_w)
    busy = sum(span.end - span.start for span in chain.from_iterable(timeline.spans))
    return SimulatedTime(timeline.makespan, busy / ranks)
