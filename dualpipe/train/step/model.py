"""The schedule of a run, and the model that a rank holds: its stages, sharded and with weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import load_hf
from dualpipe.kernels.formats import FORMATS
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.models import HubConfig, Stage, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.nn.quantized_matmul import GemmPrecision
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.fsdp.materialize import build_on_meta, materialize
from dualpipe.parallel.fsdp.shard_over_mesh import shard_over_mesh
from dualpipe.parallel.mesh import Mesh
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import Schedule, build
from dualpipe.schedule.by_name import search_with_progress
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config, ParallelConfig, TrainConfig
from dualpipe.train.step.dtype_plan import resolve_model_dtypes

if TYPE_CHECKING:
    from dualpipe.hf import CausalLMStage
    from dualpipe.hf.model import TransformersModel


def build_schedule(parallel: ParallelConfig, num_microbatches: int, ranks: RankSync | None = None) -> Schedule:
    """Return the schedule that [parallel] selects. Collective over `ranks`, unless None.

    "auto" is searched for on rank 0 alone, without a timeout, and sent to the others: all ranks have the same schedule
    even if their own searches would differ.

    Raises ValueError, on all ranks, for invalid costs or an insufficient memory limit.
    """
    if parallel.schedule == "auto":
        return _search(parallel, num_microbatches, ranks)
    return build(parallel.schedule, parallel.pp, num_microbatches)


def _search(parallel: ParallelConfig, num_microbatches: int, ranks: RankSync | None) -> Schedule:
    """Search on one rank for the fastest schedule under the costs in [parallel]."""

    def find() -> Schedule:
        try:
            costs = parse_costs(parallel.schedule_costs)
        except ValueError as error:
            raise ValueError(f"parallel.schedule_costs = {parallel.schedule_costs!r}: {error}") from error
        return search_with_progress(parallel.pp, num_microbatches, costs=costs, memory=parallel.schedule_memory or None)

    if ranks is None or ranks.size == 1:
        return find()
    return ranks.first_in_turns(find)


class Model(NamedTuple):
    """The stages that one rank holds, in ascending order."""

    config: TrainedModel
    stages: tuple[nn.Module, ...]
    plan: DTypePlan
    has_first: bool
    has_last: bool
    masters: Mapping[nn.Parameter, Tensor]
    """float32 values from a checkpoint, for the optimizer, of parameters that are stored with less precision"""


def build_model(
    config: TrainedModel, schedule: Schedule, rank: int, *, dtypes: DTypePlan | torch.dtype, device: torch.device,
    settings: Config | None = None, from_hf: str = "", mesh: DeviceMesh | None = None,
    context: ContextParallel | None = None,
) -> Model:
    """Build the stages of pipeline rank `rank`. Collective over `mesh` if they are loaded from a checkpoint.

    Args:
        config: the model.
        settings: seed, compilation, layers of a stage, recomputation, GEMM precision and dispatch; None: the defaults.
        from_hf: directory with a Hugging Face checkpoint to load instead of new weights, or "".
        dtypes: plan of the whole model, from `resolve_model_dtypes`; or the dtype to compute in, for a default plan.
        mesh: from `build_mesh`. With several pipelines, the parameters are sharded over them and stored in at least
            float32. With one or without a mesh, they are stored in their compute dtype.
        context: context parallelism over the ranks of "cp"; None for the defaults of `ContextParallel`.

    Raises ValueError if the model cannot be split into these stages, for `fp8_dispatch` if the GEMMs of the experts
    are not in FP8, and on all ranks of `mesh` if the checkpoint does not fit.
    """
    settings = settings or Config()
    place = Mesh.of(mesh)
    context = context or ContextParallel(place.part("cp"))
    if isinstance(dtypes, torch.dtype):
        plan = resolve_model_dtypes(config, dtypes, replicas=place.replicas, from_hf=from_hf, mesh=mesh)
    else:
        plan = dtypes
    numbers = schedule.rank_stages(rank)
    has_first = 0 in numbers
    has_last = schedule.num_stages - 1 in numbers
    if not isinstance(config, HubConfig):
        built = _build_transformers_stages(
            config, schedule.num_stages, numbers, plan=plan, device=device, settings=settings, from_hf=from_hf,
            mesh=mesh)
        return Model(config, built, plan, has_first, has_last, {})
    fp8_rows = fp8_dispatch_block(plan, settings.dtypes.gemm_precision) if settings.dtypes.fp8_dispatch else None

    def build_numbers() -> list[Stage]:
        return build_stages(config, schedule.num_stages, numbers, settings.parallel.layers_per_stage)

    try:
        stages = build_on_meta(build_numbers)
    except ValueError as error:
        raise ValueError(f"parallel.pp = {schedule.num_ranks} with schedule {schedule.name!r}: {error}") from error
    for stage in stages:
        _apply_settings(stage, plan, settings, context)
    shard_over_mesh(
        stages, place, plan, num_experts={config.num_experts}, dispatch=settings.parallel.dispatch, fp8_rows=fp8_rows)
    masters = _fill(stages, plan, settings.train.seed, from_hf, mesh, device)
    return Model(config, tuple(stages), plan, has_first, has_last, masters)


def _build_transformers_stages(
    model: TransformersModel, num_stages: int, numbers: Sequence[int], *, plan: DTypePlan, device: torch.device,
    settings: Config, from_hf: str, mesh: DeviceMesh | None,
) -> tuple[nn.Module, ...]:
    """Build the stages of a transformers model with these numbers, sharded and with weights. Collective over `mesh`.

    Arguments as in `build_model`. Raises ValueError, on all ranks, like `load_stages`.
    """
    from dualpipe.hf import load_stages

    recompute = Recompute(settings.memory.recompute, model.num_hidden_layers)
    compute = plan.policy.param_dtype
    is_sharded = Mesh.of(mesh).replicas > 1
    stages = load_stages(
        from_hf or model.config, num_stages, numbers, mesh=mesh, policy=plan.policy, seed=settings.train.seed,
        dtype=torch.promote_types(compute, torch.float32) if is_sharded else compute,
        layers_per_stage=settings.parallel.layers_per_stage, dispatch=settings.parallel.dispatch)
    RankSync.of_mesh(mesh).agree(lambda: _check_ties(stages, model, from_hf))
    for stage in stages:
        stage.recompute = recompute
        if mesh is None:
            stage.to(device)
    return tuple(stages)


def _check_ties(stages: Sequence[CausalLMStage], model: TransformersModel, from_hf: str) -> None:
    """Raise ValueError if a head is tied by config.json alone: the files have another one than the embedding."""
    if any(stage.is_tied != model.is_tied for stage in stages if stage.is_first or stage.is_last):
        raise ValueError(f"init.from_hf = {from_hf!r} has a head that differs from the embedding, but the model ties "
                         'the two; write "tie_word_embeddings": false into its config.json')


def _fill(
    stages: Sequence[Stage], plan: DTypePlan, seed: int, from_hf: str, mesh: DeviceMesh | None, device: torch.device
) -> Mapping[nn.Parameter, Tensor]:
    """Initialize or load the weights of the stages on `device`; return `Model.masters`."""
    if not from_hf:
        for stage in stages:
            materialize(stage, device, plan, seed=seed)
        return {}
    if Mesh.of(mesh).replicas == 1:
        return _load_with_masters(stages, from_hf, mesh, plan, device)
    load_hf(stages, from_hf, mesh, plan, device=device)
    return {}


def _apply_settings(stage: Stage, plan: DTypePlan, settings: Config, context: ContextParallel) -> None:
    """Apply settings, storage dtypes and context parallelism to a stage on meta that is not yet sharded."""
    stage.recompute = Recompute(settings.memory.recompute, len(stage.config.all_layers))
    if settings.train.compile:
        stage.compile_dense()
    for module in stage.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.gemm_precision = settings.dtypes.gemm_precision
            module.fp8_weight_grad = settings.dtypes.fp8_weight_grad
    for name, parameter in stage.named_parameters():
        parameter.data = parameter.data.to(plan.of(name).storage)
    stage.use_context_parallelism(context)


def _load_with_masters(
    stages: Sequence[nn.Module], from_hf: str, mesh: DeviceMesh | None, plan: DTypePlan, device: torch.device
) -> dict[nn.Parameter, Tensor]:
    """Load like `load_hf`; return the values of half-precision parameters before rounding, by parameter."""
    names = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
    loaded_in_float32 = {
        name: replace(dtypes, storage=torch.float32) for name, dtypes in plan.tensors.items()
        if name in names and dtypes.storage in HALF
    }
    load_hf(stages, from_hf, mesh, DTypePlan(plan.policy, {**plan.tensors, **loaded_in_float32}), device=device)
    masters: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            # A quantized parameter has its own master. A tied parameter was rounded with the first stage that has it.
            if name in loaded_in_float32 and quantized_part(parameter) is None and parameter not in masters:
                masters[parameter] = parameter.detach()
                parameter.data = parameter.data.to(plan.of(name).storage)
                parameter.grad_dtype = plan.reduce_dtype(name)
    return masters


def fp8_dispatch_block(plan: DTypePlan, precision: GemmPrecision) -> int:
    """Return the number of elements per scale in the rows that expert GEMMs read in FP8.

    Raises ValueError if the expert GEMMs are not in FP8.
    """
    expert_dtypes = [dtypes for name, dtypes in plan.tensors.items() if name.endswith(".experts.gate_up_proj.weight")]
    blocks: set[int | None] = set()
    for dtypes in expert_dtypes:
        is_fp8 = dtypes.format and dtypes.format.computes and dtypes.compute in HALF
        blocks.add(dtypes.format.block[1] if dtypes.format and is_fp8 else None)
    if len(blocks) != 1 or None in blocks or precision == "weight-only":
        names = ", ".join(name for name, format in FORMATS.items() if format.computes)
        formats = sorted({f"{dtypes.format} in {short_name(dtypes.compute)}" for dtypes in expert_dtypes})
        received = f"experts with {', '.join(formats)}" if formats else "no experts"
        raise ValueError(f"dtypes.fp8_dispatch: got {received} and gemm_precision {precision!r}, but it needs expert "
                         f"GEMMs in FP8; give *.experts.gate_up_proj a format by a rule ({names}), train.dtype bf16 "
                         "and dtypes.gemm_precision 'auto'")
    return cast(int, blocks.pop())


def build_whole(
    config: HubConfig, *, dtypes: DTypePlan | torch.dtype, device: torch.device, seed: int = 0
) -> Stage:
    """Build the unpipelined model with the same weights as the pipelined one. dtypes: see `build_model`."""
    settings = Config(train=TrainConfig(seed=seed))
    model = build_model(config, build("1f1b", 1, 1), 0, dtypes=dtypes, device=device, settings=settings)
    (stage,) = model.stages
    return cast(Stage, stage)
