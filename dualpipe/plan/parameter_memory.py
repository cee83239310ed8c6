"""Memory of a stage on a rank, apart from activations: parameters, optimizer states, and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from dualpipe.models import HubConfig, Stage
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.experts.dispatcher import parameter_sizes, stacked_parameters
from dualpipe.parallel.fsdp.driver import parameters_without_accumulators
from dualpipe.parallel.tied import tied_parameters
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import (
    NO_ADAPTERS,
    Config,
    DTypesConfig,
    LoRAConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from dualpipe.train.optim.groups import choose_algorithm, find_trainable_parameters
from dualpipe.train.step import resolve_run_dtypes

_FP32_BYTES = 4


class StageBytes(NamedTuple):
    """Bytes of a stage on a rank, apart from activations.

    parameters, optimizer: at all times. gathered: until the stage's last action. accumulators: from its first weight
    gradient on. prepared: the part of these that is there from its first forward on. reduced: shard of the reduced
    gradients, after its last action. copied: largest copy of gradients that is reduced at once, after its last action.
    host: moments in host memory, at all times; 0 if they are on the device. largest_moments: the moments of the largest
    parameter; 0 if they are on the device. frozen: the part of `parameters` that is not trained.
    """

    parameters: int
    optimizer: int
    gathered: int
    accumulators: int
    reduced: int
    copied: int
    host: int = 0
    largest_moments: int = 0
    prepared: int = 0
    frozen: int = 0


def stage_bytes(
    config: Config, model: TrainedModel, stages: Sequence[nn.Module], number: int, ends_meet: bool
) -> StageBytes:
    """Return the bytes of stage `number`. ends_meet: the first and the last stage are on one rank."""
    p = config.parallel
    dtype = dtype_of(config.train.dtype)
    is_sharded = p.replicas > 1
    expert_replicas = p.dp * p.cp  # ranks with the same experts
    lora = config.lora
    sizes = stage_sizes(model, len(stages), p.layers_per_stage, p.ep, ends_meet=ends_meet, lora=lora)[number]
    dense_shard = -(-sizes.trained_dense // p.dense_shards)
    expert_shard = -(-sizes.trained_experts // p.expert_shards)
    shard = dense_shard + expert_shard  # of what is trained
    frozen_shard = -(-(sizes.dense - sizes.trained_dense) // p.dense_shards)
    frozen_shard += -(-(sizes.experts - sizes.trained_experts) // p.expert_shards)
    stored_itemsize = _FP32_BYTES if is_sharded else dtype.itemsize
    saving = _FormatSaving(0, 0, 0)
    if config.dtypes.rules and isinstance(model, HubConfig):
        stage = cast(Stage, stages[number])
        saving = _format_saving(
            stage, config.dtypes, config.train.dtype, model, expert_replicas, p.ep, p.dp_replicate, lora)
    moment_itemsize = dtype_of(config.optimizer.moments).itemsize
    num_muon = sum(map(math.prod, muon_shapes(config.optimizer, stages[number])))  # with one moment instead of two
    master_itemsize = _FP32_BYTES if stored_itemsize < _FP32_BYTES else 0
    moments = 2 * moment_itemsize * shard - moment_itemsize * (num_muon // p.dense_shards)
    offload = config.optimizer.offload
    shared_experts = expert_shard if expert_replicas > 1 else 0  # experts that no other rank has are not reduced
    trained = stored_itemsize * shard
    frozen = dtype.itemsize * frozen_shard
    if lora.is_enabled:  # adapters are not quantized
        frozen -= saving.stored
    else:
        trained -= saving.stored
    return StageBytes(
        parameters=trained + frozen,
        optimizer=(0 if offload else moments) + master_itemsize * shard + saving.masters,
        gathered=(dtype.itemsize * (sizes.dense + sizes.experts) if is_sharded else 0) - saving.gathered,
        accumulators=_FP32_BYTES * (sizes.trained_dense + sizes.trained_experts),
        reduced=_FP32_BYTES * (dense_shard + shared_experts) if is_sharded else 0,
        copied=_FP32_BYTES * sizes.reduced_at_once(expert_replicas) if is_sharded else 0,
        host=moments if offload else 0,
        largest_moments=2 * moment_itemsize * _largest_shard(stages[number], p) if offload else 0,
        prepared=_FP32_BYTES * sizes.prepared if dtype.itemsize < _FP32_BYTES else 0,
        frozen=frozen,
    )


def _largest_shard(stage: nn.Module, p: ParallelConfig) -> int:
    """Return the number of elements of a rank's shard of the largest parameter of a stage."""
    experts = _stacked_experts(stage)
    shards = (-(-param.numel() // (p.ep * p.expert_shards if param in experts else p.dense_shards))
              for param in stage.parameters() if param.requires_grad)
    return max(shards, default=0)


def _stacked_experts(stage: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a stage that hold one matrix for each expert."""
    return {param for module in stage.modules() for param in stacked_parameters(module).values()}


@lru_cache(maxsize=4096)
def muon_shapes(optimizer: OptimizerConfig, stage: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a stage that Muon updates."""
    return [tuple(param.shape) for param, (name, owner) in find_trainable_parameters([stage]).items()
            if choose_algorithm(name, owner, param, optimizer=optimizer.name, groups=optimizer.groups) == "muon"]


class StageSizes(NamedTuple):
    """Numbers of parameters of a stage.

    dense: dense parameters. experts: parameters of one rank's experts. trained_dense, trained_experts: those of each
    that are trained. dense_unit, expert_unit: trained parameters of each in the largest unit that is reduced at once. A
    layer is a unit, and all modules around the layers are one. prepared: trained parameters whose accumulators, if
    wider than they are, the pipeline creates before the stage's first forward: those of modules that are not of
    `dualpipe.nn`.
    """

    dense: int
    experts: int
    trained_dense: int
    trained_experts: int
    dense_unit: int
    expert_unit: int
    prepared: int

    def reduced_at_once(self, expert_replicas: int) -> int:
        """Return the most parameters reduced at once if `expert_replicas` ranks have the same experts."""
        if expert_replicas > 1:
            return max(self.dense_unit, self.expert_unit)
        return self.dense_unit  # experts on one rank only are not reduced: their accumulators are the gradients


@lru_cache(maxsize=256)
def stage_sizes(
    model: TrainedModel, num_stages: int, layers: tuple[int, ...], ep: int, *, ends_meet: bool,
    lora: LoRAConfig = NO_ADAPTERS,
) -> list[StageSizes]:
    """Return the sizes of all stages on one of `ep` ranks. ends_meet: the first and the last are on one rank."""
    stages = stages_on_meta(model, num_stages, layers, lora)
    return [_sizes_of(stage, ep, shares_embedding=ends_meet and stage is stages[-1]) for stage in stages]


def _sizes_of(stage: nn.Module, ep: int, *, shares_embedding: bool) -> StageSizes:
    """Return the sizes of a stage. shares_embedding: its tied embedding counts in the first stage."""
    dense, experts = parameter_sizes(stage, ep)
    trained_dense, trained_experts = parameter_sizes(stage, ep, trained=True)
    if shares_embedding:
        method = getattr(stage, "tied_parameters", None)
        dense -= sum(param.numel() for param in (method() if method is not None else ()))
        trained_dense -= sum(param.numel() for param in tied_parameters(stage))
    layers = list(cast(nn.Module, stage.layers).children())
    layer_sizes = [parameter_sizes(layer, ep, trained=True) for layer in layers]
    layer_dense = [dense_size for dense_size, _ in layer_sizes]
    layer_experts = [expert_size for _, expert_size in layer_sizes]
    around_layers = trained_dense - sum(layer_dense)
    stacked = _stacked_experts(stage)
    prepared = sum(param.numel() // (ep if param in stacked else 1)
                   for param in set(parameters_without_accumulators(stage)) if param.requires_grad)
    return StageSizes(
        dense=dense,
        experts=experts,
        trained_dense=trained_dense,
        trained_experts=trained_experts,
        dense_unit=max([around_layers, *layer_dense]),
        expert_unit=max(layer_experts, default=0),
        prepared=prepared,
    )


@lru_cache(maxsize=64)
def dtype_plan(
    dtypes: DTypesConfig, dtype: Literal["fp32", "bf16"], model: HubConfig, replicas: int,
    lora: LoRAConfig = NO_ADAPTERS,
) -> DTypePlan:
    """Return the dtype plan of a run with these settings, cached: it takes seconds for a large model."""
    config = Config(dtypes=dtypes, train=TrainConfig(dtype=dtype), parallel=ParallelConfig(dp=replicas), lora=lora)
    return resolve_run_dtypes(Resolved.of(config, model), {})


class _FormatSaving(NamedTuple):
    """Bytes that quantized formats save in a stage, and those that they add.

    stored: bytes saved in stored parameters. masters: bytes added for master weights, which parameters in float32 need
    only if they are quantized. gathered: bytes saved in gathered parameters, minus those of transposed copies.
    """

    stored: int
    masters: int
    gathered: int


@lru_cache(maxsize=4096)
def _format_saving(
    stage: Stage, dtypes: DTypesConfig, dtype: Literal["fp32", "bf16"], model: HubConfig, expert_replicas: int, ep: int,
    dp_replicate: int, lora: LoRAConfig,
) -> _FormatSaving:
    """Return the bytes that the formats of a stage save and add. expert_replicas: ranks with the same experts."""
    stored = 0
    masters = 0
    gathered = 0
    replicas = expert_replicas * ep
    plan = dtype_plan(dtypes, dtype, model, replicas, lora)
    for name, param in stage.named_parameters():
        planned = plan.of(name)
        format = planned.format
        if format is None:
            continue
        *experts, rows, columns = param.shape
        num_matrices = experts[0] // ep if experts else 1
        shards = (expert_replicas if experts else replicas) // dp_replicate
        elements = num_matrices * rows * columns
        itemsize = planned.storage.itemsize
        packed = num_matrices * format.block_rows(rows) * format.row_bytes(columns)
        if not planned.gathered:  # the shards are quantized too
            stored += (itemsize * elements - packed) // shards
            needs_masters = param.requires_grad and itemsize >= _FP32_BYTES
            masters += _FP32_BYTES * elements // shards if needs_masters else 0
        if replicas > 1:
            gathered += planned.compute.itemsize * elements - packed
        if format.block[0] == format.block[1] and planned.compute is torch.bfloat16:
            gathered -= num_matrices * format.block_rows(columns) * format.row_bytes(rows)
    return _FormatSaving(stored, masters, gathered)
