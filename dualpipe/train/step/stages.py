"""The stages of a rank: its part of the model, sharded and with weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import load_hf
from dualpipe.kernels.formats import FORMATS
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.kernels.grouped_gemm_quantized import slower_in_fp8
from dualpipe.models import HubConfig, Stage, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.nn.quantized_matmul import GemmPrecision
from dualpipe.parallel import DTypePlan, shard, shard_stages
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import Dispatch, ExpertParallel, shard_experts
from dualpipe.parallel.fsdp.materialize import build_on_meta, materialize
from dualpipe.parallel.mesh import Mesh
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import Schedule, build
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config
from dualpipe.train.step.dtype_plan import plan_model
from dualpipe.train.step.transformers_stages import build_transformers_stages


@dataclass(frozen=True)
class StageOptions:
    """Options for building stages, besides the model and the dtypes.

    Attributes:
        seed: of the initial weights, which do not depend on how the model is split into stages.
        from_hf: directory with a Hugging Face checkpoint to load instead, or "".
        layers_per_stage: number of layers of each stage; by default stages cost about the same.
        recompute: rules of activation recomputation, see `dualpipe.models.stages.Recompute`.
        compiled: apply torch.compile to attention and dense MLPs.
        gemm_precision, fp8_weight_grad: precision of GEMMs with quantized weights, see `dualpipe.nn.quantized_matmul`.
        dispatch: way of rows to experts on other ranks, see `ExpertParallel`.
        fp8_dispatch: send rows to experts on other ranks in the FP8 format of their GEMMs, see `ExpertParallel`.
    """

    seed: int = 0
    from_hf: str = ""
    layers_per_stage: Sequence[int] = ()
    recompute: Sequence[str] = ()
    compiled: bool = False
    gemm_precision: GemmPrecision = "auto"
    fp8_weight_grad: bool = False
    fp8_dispatch: bool = False
    dispatch: Dispatch = "auto"

    @classmethod
    def of(cls, config: Config, from_hf: str = "") -> StageOptions:
        """Return the options of a run's configuration. from_hf: see the attribute."""
        return cls(
            seed=config.train.seed, from_hf=from_hf, layers_per_stage=config.parallel.layers_per_stage,
            recompute=config.memory.recompute, compiled=config.train.compile,
            gemm_precision=config.dtypes.gemm_precision, fp8_weight_grad=config.dtypes.fp8_weight_grad,
            fp8_dispatch=config.dtypes.fp8_dispatch, dispatch=config.parallel.dispatch)


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
    options: StageOptions = StageOptions(), mesh: DeviceMesh | None = None, context: ContextParallel | None = None,
) -> Model:
    """Build the stages of pipeline rank `rank`. Collective over `mesh` if they are loaded from a checkpoint.

    Args:
        dtypes: plan of the whole model, from `plan_model`; or the dtype to compute in, for a default plan.
        mesh: from `build_mesh`. With several pipelines, the parameters are sharded over them and stored in at least
            float32. With one or without a mesh, they are stored in their compute dtype.
        context: context parallelism over the ranks of "cp"; None for the defaults of `ContextParallel`.

    Raises ValueError if the model cannot be split into these stages, for `fp8_dispatch` if the GEMMs of the experts
    are not in FP8, and on all ranks of `mesh` if the checkpoint does not fit.
    """
    place = Mesh.of(mesh)
    context = context or ContextParallel(place.part("cp"))
    if isinstance(dtypes, torch.dtype):
        plan = plan_model(config, dtypes, replicas=place.replicas, from_hf=options.from_hf, mesh=mesh)
    else:
        plan = dtypes
    numbers = schedule.rank_stages(rank)
    has_first = 0 in numbers
    has_last = schedule.num_stages - 1 in numbers
    if not isinstance(config, HubConfig):
        built = build_transformers_stages(
            config, schedule.num_stages, numbers, plan=plan, device=device, mesh=mesh, seed=options.seed,
            from_hf=options.from_hf, layers_per_stage=options.layers_per_stage, recompute=options.recompute,
            dispatch=options.dispatch)
        return Model(config, built, plan, has_first, has_last, {})
    fp8_block = fp8_dispatch_block(plan, options.gemm_precision) if options.fp8_dispatch else None

    def build_numbers() -> list[Stage]:
        return build_stages(config, schedule.num_stages, numbers, options.layers_per_stage)

    try:
        stages = build_on_meta(build_numbers)
    except ValueError as error:
        raise ValueError(f"parallel.pp = {schedule.num_ranks} with schedule {schedule.name!r}: {error}") from error
    for stage in stages:
        _apply_options(stage, plan, options, context)
    if mesh is None or place.replicas == 1:
        for stage in stages:
            shard(stage, None, plan)
    else:
        _shard_over(mesh, stages, plan, fp8_block, options)
    masters = _fill(stages, plan, options, mesh, device)
    return Model(config, tuple(stages), plan, has_first, has_last, masters)


def _shard_over(
    mesh: DeviceMesh, stages: Sequence[Stage], plan: DTypePlan, fp8_block: int | None, options: StageOptions
) -> None:
    """Shard the stages over the pipelines of `mesh`.

    fp8_block: elements per scale of rows that are dispatched in FP8; None for a dispatch in the compute dtype. Raises
    ValueError, on all ranks, for quantized weights whose blocks cannot be split over the ranks, and for a dispatch that
    does not fit their nodes.
    """
    place = Mesh.of(mesh)

    def expert_parallels() -> list[ExpertParallel]:
        return [
            ExpertParallel(stage.config.num_experts, mesh["ep"], fp8_rows=fp8_block, dispatch=options.dispatch,
                           ranks_per_node=place.ranks_per_node)
            for stage in stages
        ]

    # "auto" fits any nodes, anything else may fit those of some ranks only: the ranks agree on an error.
    experts = RankSync.of_mesh(None if options.dispatch == "auto" else mesh).agree(expert_parallels)
    for stage, of_stage in zip(stages, experts, strict=True):
        shard_experts(stage, place.part("ep") or mesh["ep"])
        stage.use_expert_parallelism(of_stage)
    # The blocks may fit on some ranks and not on others, so the ranks agree on an error.
    is_quantized = any(dtypes.format for dtypes in plan.tensors.values())
    RankSync.of_mesh(mesh if is_quantized else None).agree(
        lambda: shard_stages(stages, place.dense, plan, expert_mesh=place.experts))


def _fill(
    stages: Sequence[Stage], plan: DTypePlan, options: StageOptions, mesh: DeviceMesh | None, device: torch.device
) -> Mapping[nn.Parameter, Tensor]:
    """Initialize or load the weights of the stages on `device`; return `Model.masters`."""
    if not options.from_hf:
        for stage in stages:
            materialize(stage, device, plan, seed=options.seed)
        return {}
    if Mesh.of(mesh).replicas == 1:
        return _load_with_masters(stages, options.from_hf, mesh, plan, device)
    load_hf(stages, options.from_hf, mesh, plan, device=device)
    return {}


def _apply_options(stage: Stage, plan: DTypePlan, options: StageOptions, context: ContextParallel) -> None:
    """Apply options, storage dtypes and context parallelism to a stage on meta that is not yet sharded."""
    stage.recompute = Recompute(options.recompute, len(stage.config.all_layers))
    if options.compiled:
        stage.compile_dense()
    for module in stage.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.gemm_precision = options.gemm_precision
            module.fp8_weight_grad = options.fp8_weight_grad
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


def slow_fp8_weights(model: Model, tokens: int, device: torch.device) -> list[str]:
    """Return the quantized weights whose GEMMs are slower in FP8 than in bfloat16, with the reason; empty on CPU.

    tokens: number of tokens of a micro-batch on all expert-parallel ranks.
    """
    slow: list[str] = []
    if not any(dtypes.format for dtypes in model.plan.tensors.values()):
        return slow
    top_k = model.config.num_experts_per_tok
    for stage in model.stages:
        for name, module in stage.named_modules():
            if not isinstance(module, Linear | GroupedLinear) or module.gemm_precision == "weight-only":
                continue
            dtypes = model.plan.of(f"{name}.weight")
            if not (dtypes.format and dtypes.format.computes and dtypes.compute in HALF):
                continue
            num_experts = 1
            rows: float = tokens
            if isinstance(module, GroupedLinear):
                num_experts = module.num_groups
                rows = tokens * top_k / num_experts
            shape = (num_experts, module.out_features, module.in_features)
            reason = slower_in_fp8(dtypes.format, shape, rows, device)
            if reason:
                slow.append(f"{name.rpartition('.')[2]}: {reason}")
    return list(dict.fromkeys(slow))  # once for all layers


def build_whole(
    config: HubConfig, *, dtypes: DTypePlan | torch.dtype, device: torch.device, seed: int = 0
) -> Stage:
    """Build the unpipelined model with the same weights as the pipelined one. dtypes: see `build_model`."""
    model = build_model(config, build("1f1b", 1, 1), 0, dtypes=dtypes, device=device, options=StageOptions(seed=seed))
    (stage,) = model.stages
    return cast(Stage, stage)
