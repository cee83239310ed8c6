"""The stages of a rank: its share of the model, cut, sharded and filled with weights."""

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
from dualpipe.nn.quantized_matmul import Products
from dualpipe.parallel import DTypePlan, shard, shard_stages
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import ExpertParallel, shard_experts
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
    """Options of how stages are built, besides the model and the dtypes.

    seed: what initial weights are drawn by, not by how the model is cut. from_hf: a directory with a Hugging Face
    checkpoint, whose weights are taken instead.
    layers_per_stage: instead of stages that cost about the same.
    recompute: what is computed again instead of kept, see `dualpipe.models.stages.Recompute`.
    compiled: attention and dense MLPs go through torch.compile.
    products, fp8_weight_grad: of layers with weights in a format, see `dualpipe.nn.quantized_matmul`.
    fp8_dispatch: rows go to experts on other ranks as their products take them, see `ExpertParallel`.
    """

    seed: int = 0
    from_hf: str = ""
    layers_per_stage: Sequence[int] = ()
    recompute: Sequence[str] = ()
    compiled: bool = False
    products: Products = "auto"
    fp8_weight_grad: bool = False
    fp8_dispatch: bool = False

    @classmethod
    def of(cls, config: Config, from_hf: str = "") -> StageOptions:
        """Return the options that a run's configuration says. from_hf: see above."""
        return cls(
            seed=config.train.seed, from_hf=from_hf, layers_per_stage=config.parallel.layers_per_stage,
            recompute=config.memory.recompute, compiled=config.train.compile, products=config.dtypes.products,
            fp8_weight_grad=config.dtypes.fp8_weight_grad, fp8_dispatch=config.dtypes.fp8_dispatch,
        )


class Model(NamedTuple):
    """The stages that one rank holds, in ascending order."""

    config: TrainedModel
    stages: tuple[nn.Module, ...]
    plan: DTypePlan
    has_first: bool
    has_last: bool
    masters: Mapping[nn.Parameter, Tensor]
    """float32 values, from a checkpoint, of parameters that are stored in less, for the optimizer to update"""


def build_model(
    config: TrainedModel, schedule: Schedule, rank: int, *, dtypes: DTypePlan | torch.dtype, device: torch.device,
    options: StageOptions = StageOptions(), mesh: DeviceMesh | None = None, context: ContextParallel | None = None,
) -> Model:
    """Build the stages of pipeline rank `rank`. Collective over `mesh` where they are loaded from a checkpoint.

    Raises ValueError for a model that cannot be cut so, for `fp8_dispatch` where experts' products are not in FP8, and
    on all ranks of `mesh` for a checkpoint that does not fit.

    dtypes: the plan of the whole model, from `plan_model`; or a dtype, of which one is made.
    mesh: from `build_mesh`. Where it has several pipelines, they share the parameters' storage: those are stored in at
    least float32. Without, they are stored as they are computed with.
    context: of the ranks of its "cp", which share sequences; None: as `ContextParallel` makes it.
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
            from_hf=options.from_hf, layers_per_stage=options.layers_per_stage, recompute=options.recompute)
        return Model(config, built, plan, has_first, has_last, {})
    fp8_rows = _rows_of_experts(plan, options.products) if options.fp8_dispatch else None

    def cut() -> list[Stage]:
        return build_stages(config, schedule.num_stages, numbers, options.layers_per_stage)

    try:
        stages = build_on_meta(cut)
    except ValueError as error:
        raise ValueError(f"parallel.pp = {schedule.num_ranks} with schedule {schedule.name!r}: {error}") from error
    for stage in stages:
        _prepare(stage, plan, options, context)
        if mesh is None or place.replicas == 1:
            shard(stage, None, plan)
        else:
            shard_experts(stage, place.part("ep") or mesh["ep"])
            stage.use_expert_parallelism(ExpertParallel(config.num_experts, mesh["ep"], fp8_rows=fp8_rows))
    if mesh is not None and place.replicas > 1:  # blocks of one stage's weights alone may not be cut so
        quantized = any(dtypes.format for dtypes in plan.tensors.values())
        RankSync.of_mesh(mesh if quantized else None).agree(
            lambda: shard_stages(stages, place.dense, plan, expert_mesh=place.experts))
    masters: dict[nn.Parameter, Tensor] = {}
    if options.from_hf and place.replicas == 1:
        masters = _load_with_masters(stages, options.from_hf, mesh, plan, device)
    elif options.from_hf:
        load_hf(stages, options.from_hf, mesh, plan, device=device)
    else:
        for stage in stages:
            materialize(stage, device, plan, seed=options.seed)
    return Model(config, tuple(stages), plan, has_first, has_last, masters)


def _prepare(stage: Stage, plan: DTypePlan, options: StageOptions, context: ContextParallel) -> None:
    """Set what `options`, the plan and `context` say in a stage that is still on meta, and not sharded."""
    stage.recompute = Recompute(options.recompute, len(stage.config.all_layers))
    if options.compiled:
        stage.compile_dense()
    for module in stage.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.products = options.products
            module.fp8_weight_grad = options.fp8_weight_grad
    for name, parameter in stage.named_parameters():
        parameter.data = parameter.data.to(plan.of(name).storage)
    stage.use_context_parallelism(context)


def _load_with_masters(
    stages: Sequence[nn.Module], from_hf: str, mesh: DeviceMesh | None, plan: DTypePlan, device: torch.device
) -> dict[nn.Parameter, Tensor]:
    """Load as `load_hf` does what is stored in half precision, and return its values before they were rounded."""
    names = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
    in_half = {name: replace(dtypes, storage=torch.float32) for name, dtypes in plan.tensors.items()
               if name in names and dtypes.storage in HALF}
    load_hf(stages, from_hf, mesh, DTypePlan(plan.policy, {**plan.tensors, **in_half}), device=device)
    masters: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            # Not what has its own master, nor what another stage shares, which is rounded already.
            if name in in_half and quantized_part(parameter) is None and parameter not in masters:
                masters[parameter] = parameter.detach()
                parameter.data = parameter.data.to(plan.of(name).storage)
                parameter.grad_dtype = plan.reduce_dtype(name)
    return masters


def _rows_of_experts(plan: DTypePlan, products: Products) -> int:
    """The numbers under a scale in the rows that the experts' products take."""
    found = [each for name, each in plan.tensors.items() if name.endswith(".experts.gate_up_proj.weight")]
    blocks = {each.format.block[1] if each.format and each.format.computes and each.compute in HALF else None
              for each in found}
    if len(blocks) != 1 or None in blocks or products == "weight-only":
        names = ", ".join(name for name, format in FORMATS.items() if format.computes)
        formats = sorted({f"{each.format} in {short_name(each.compute)}" for each in found})
        raise ValueError("dtypes.fp8_dispatch is for experts whose products are in FP8; give *.experts.gate_up_proj a "
                         f"format by a rule ({names}), train.dtype bf16 and dtypes.products 'auto'; got "
                         f"{', '.join(formats) or 'no experts'}, products {products!r}")
    return cast(int, blocks.pop())


def slow_products(model: Model, tokens: int, device: torch.device) -> list[str]:
    """Which products of the stages' weights in formats are slower in FP8 than in bfloat16, and why; nothing on CPU.

    tokens: of a micro-batch, on all expert-parallel ranks.
    """
    found: list[str] = []
    if not any(dtypes.format for dtypes in model.plan.tensors.values()):
        return found
    top_k = model.config.num_experts_per_tok
    for stage in model.stages:
        for name, module in stage.named_modules():
            if not isinstance(module, Linear | GroupedLinear) or module.products == "weight-only":
                continue
            item, experts = model.plan.of(f"{name}.weight"), 1
            rows: float = tokens
            if isinstance(module, GroupedLinear):
                experts, rows = module.num_groups, tokens * top_k / module.num_groups
            if item.format and item.format.computes and item.compute in HALF:
                shape = (experts, module.out_features, module.in_features)
                if why := slower_in_fp8(item.format, shape, rows, device):
                    found.append(f"{name.rpartition('.')[2]}: {why}")
    return list(dict.fromkeys(found))  # once for all layers


def build_whole(
    config: HubConfig, *, dtypes: DTypePlan | torch.dtype, device: torch.device, seed: int = 0
) -> Stage:
    """Build the unpipelined model, with the same weights. dtypes: see `build_model`."""
    model = build_model(config, build("1f1b", 1, 1), 0, dtypes=dtypes, device=device, options=StageOptions(seed=seed))
    (stage,) = model.stages
    return cast(Stage, stage)
