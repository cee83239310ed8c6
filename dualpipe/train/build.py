"""What a run is made of: the schedule, a rank's share of the model, its routers and its optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import hub_dtypes, load_hf
from dualpipe.checkpoint.hub.save_quantized import check_quantized
from dualpipe.kernels.formats import FORMATS
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.kernels.grouped_gemm_quantized import slower_in_fp8
from dualpipe.models import HubConfig, Stage, build_stages, read_config
from dualpipe.models.stages import Recompute, meta_stages
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.quantized_matmul import Products
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel import DTypePlan, DTypePolicy, Rule, resolve_dtypes, shard, shard_stages
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import ExpertParallel, shard_experts
from dualpipe.parallel.experts.shared_loads import share_loads
from dualpipe.parallel.fsdp.materialize import build_on_meta, materialize
from dualpipe.parallel.mesh import Mesh
from dualpipe.parallel.precision.plan import matches
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import dtype_of, short_name
from dualpipe.runtime.errors import nearest
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import Schedule, build
from dualpipe.schedule.by_name.build import search_with_progress
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.train.config.schema import ALGORITHMS, AUTO, Config
from dualpipe.train.optim.optimizer import Group, Optimizer, layer_groups, parameter_places


def build_schedule(config: Config, ranks: RankSync | None = None) -> Schedule:
    """The schedule that `config.parallel` and `train.num_chunks` say. Collective over `ranks`, where there are several.

    "auto" is searched for on rank 0 alone, however long that takes. The result is the same object on all, also where
    their machines find other ones.

    Raises ValueError, on all ranks, for costs or a memory that cannot be.
    """
    parallel, num_chunks = config.parallel, config.train.num_chunks
    if parallel.schedule != "auto":
        return build(parallel.schedule, parallel.pp, num_chunks)

    def find() -> Schedule:
        try:
            costs = parse_costs(parallel.schedule_costs)
        except (OSError, ValueError) as error:
            raise ValueError(f"parallel.schedule_costs = {parallel.schedule_costs!r}: {error}") from error
        return search_with_progress(parallel.pp, num_chunks, costs=costs, memory=parallel.schedule_memory or None)

    if ranks is None or ranks.size == 1:
        return find()
    return ranks.first_in_turns(find)


class Model(NamedTuple):
    """The stages that one rank holds, in ascending order."""

    config: HubConfig
    stages: tuple[Stage, ...]
    plan: DTypePlan
    has_first: bool
    has_last: bool
    masters: Mapping[nn.Parameter, Tensor]
    """float32 values, from a checkpoint, of parameters that are stored in less, for the optimizer to update"""


def check_positions(config: Config, model: HubConfig) -> str:
    """Return what to say of sequences that are longer than the model's config.json provides for, "" where none are."""
    path = Path(config.model_path)
    hub = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    positions = hub.get("max_position_embeddings")
    yarn = model.yarn
    if yarn is not None:  # some checkpoints give the positions before they are stretched
        positions = max(positions or 0, int(yarn.original_max_position_embeddings * yarn.factor))
    length = config.train.sequence_length
    if not isinstance(positions, int) or length <= positions:
        return ""
    return (f"train.sequence_length = {length} is beyond the {positions} positions that the model is made for "
            f"(max_position_embeddings); lower it, or stretch the rotary embedding by YaRN in {path}")


def plan_run(
    config: Config, model: HubConfig, recorded: Mapping[str, torch.dtype] | None, mesh: DeviceMesh | None = None
) -> DTypePlan:
    """The plan of a run whose parallel.dp is known: what `dualpipe train` does and `dualpipe dtypes` prints.

    recorded: what the checkpoint that is gone on from says, see `plan_model`; None where there is none.
    """
    def of(name: str | None) -> Any:
        return name if name is None or name in FORMATS else dtype_of(name)

    rules = [Rule(r.pattern, *map(of, (r.compute, r.output, r.storage, r.reduce, r.save, r.gather)))
             for r in config.dtypes.rules]
    return plan_model(
        model, dtype_of(config.train.dtype), replicas=config.parallel.replicas, rules=rules, recorded=recorded,
        from_hf=config.init.from_hf if recorded is None else "", mesh=mesh,
    )


def plan_model(
    config: HubConfig, dtype: torch.dtype, *, replicas: int, rules: Sequence[Rule] = (), from_hf: str = "",
    recorded: Mapping[str, torch.dtype] | None = None, mesh: DeviceMesh | None = None,
) -> DTypePlan:
    """The plan of the whole model, of which each rank has a part: it computes in `dtype` and accumulates gradients in
    at least float32. Collective over `mesh` where `from_hf` is given.

    Parameters that several replicas share are stored in at least float32; others in `dtype`, and the optimizer keeps
    float32 masters. There, where nothing is gathered, what a rule gathers in a format is stored in it: the same bytes.

    recorded, from_hf: the dtypes in the checkpoint that will be loaded, by name, or a directory with a Hugging Face
    checkpoint: what is float32 among narrower ones stays so. One in float32 throughout says nothing; without replicas
    its values become the masters.

    Raises ValueError as `resolve_dtypes` does, and without replicas for a rule that stores what it does not compute in.
    """
    wide, known = torch.promote_types(dtype, torch.float32), recorded
    if replicas == 1:
        rules = [replace(rule, storage=rule.gather, gather=None) if rule.gather else rule for rule in rules]
    (whole,) = build_on_meta(lambda: build_stages(config, 1))
    whole.to(dtype=wide if replicas > 1 else dtype)
    if from_hf:
        known = RankSync.of_mesh(mesh).first(lambda: hub_dtypes(from_hf, config))
    if known and not any(name in known for name, _ in whole.named_parameters()):
        known = None  # of another model, which is said when it is loaded
    policy = DTypePolicy(dtype, wide, dtype, rules)
    plan = resolve_dtypes(whole, policy, known)
    return plan if replicas > 1 else _stored_as_computed(whole, plan, known or {})


def _stored_as_computed(whole: nn.Module, plan: DTypePlan, known: Mapping[str, torch.dtype]) -> DTypePlan:
    """The plan of ranks that share no storage: a checkpoint's wider values are kept as the optimizer's masters."""
    rounded = {name: plan.of(name).compute for name, dtype in known.items() if name in plan.tensors
               and torch.promote_types(dtype, plan.of(name).compute) is not plan.of(name).compute}
    if rounded:
        plan = resolve_dtypes(whole, plan.policy, {**known, **rounded})
    for name, dtypes in plan.tensors.items():
        if dtypes.storage is not dtypes.compute and not dtypes.format and not dtypes.unsharded:
            raise ValueError(f"{name} is stored in {short_name(dtypes.storage)} and computes in "
                             f"{short_name(dtypes.compute)}, which only a sharded module can: use parallel.dp or "
                             "ep > 1, or leave out storage, as the optimizer keeps float32 masters")
    return plan


def build_model(
    config: HubConfig, schedule: Schedule, rank: int, *, seed: int, dtype: torch.dtype, device: torch.device,
    mesh: DeviceMesh | None = None, recompute: Sequence[str] = (), layers_per_stage: Sequence[int] = (),
    compiled: bool = False, from_hf: str = "", plan: DTypePlan | None = None, products: Products = "auto",
    fp8_weight_grad: bool = False, fp8_dispatch: bool = False, context: ContextParallel | None = None,
) -> Model:
    """Build the stages of pipeline rank `rank`. The weights depend on `seed` only, not on how the model is cut.

    Raises ValueError for a model that cannot be cut so, and on all ranks of `mesh` for a checkpoint that does not fit.

    recompute: what is computed again instead of kept, see `dualpipe.models.stages.Recompute`.
    layers_per_stage: instead of stages that cost about the same.
    compiled: attention and dense MLPs go through torch.compile.
    from_hf: a directory with a Hugging Face checkpoint, whose weights are taken instead. Collective over `mesh`.
    plan: of the whole model, from `plan_model`; without, the one that it makes for these arguments.
    products, fp8_weight_grad: of layers with weights in a format, see `dualpipe.nn.quantized_matmul`.
    fp8_dispatch: rows go to experts on other ranks as their products take them, see `ExpertParallel`; ValueError where
    these are not in FP8.
    mesh: from `build_mesh`. Where it has several pipelines, they share the parameters' storage: those are stored in at
    least float32 and computed with in `dtype`. Without, they are stored in `dtype`.
    context: of the ranks of its "cp", which share sequences; None: as `ContextParallel` makes it.
    """
    place, numbers = Mesh.of(mesh), schedule.rank_stages(rank)
    first, last = 0 in numbers, schedule.num_stages - 1 in numbers
    context = context or ContextParallel(place.part("cp"))
    plan = plan or plan_model(config, dtype, replicas=place.replicas, from_hf=from_hf, mesh=mesh)
    fp8_rows = _rows_of_experts(plan, products) if fp8_dispatch else None
    try:
        stages = build_on_meta(lambda: build_stages(config, schedule.num_stages, numbers, layers_per_stage))
    except ValueError as error:
        raise ValueError(f"parallel.pp = {schedule.num_ranks} with schedule {schedule.name!r}: {error}") from error
    for stage in stages:
        stage.recompute = Recompute(recompute, len(config.all_layers))
        if compiled:
            stage.compile_dense()
        for module in stage.modules():
            if isinstance(module, Linear | GroupedLinear):
                module.products, module.fp8_weight_grad = products, fp8_weight_grad
        for name, parameter in stage.named_parameters():  # still on meta
            parameter.data = parameter.data.to(plan.of(name).storage)
        stage.use_context_parallelism(context)
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
    if from_hf and place.replicas == 1:
        masters = _load_with_masters(stages, from_hf, mesh, plan, device)
    elif from_hf:
        load_hf(stages, from_hf, mesh, plan, device=device)
    else:
        for stage in stages:
            materialize(stage, device, plan, seed=seed)
    return Model(config, tuple(stages), plan, first, last, masters)


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
    top_k, found = model.config.num_experts_per_tok, []
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
    config: HubConfig, *, seed: int, dtype: torch.dtype, device: torch.device, plan: DTypePlan | None = None
) -> Stage:
    """The unpipelined model, with the same weights."""
    (stage,) = build_model(config, build("1f1b", 1, 1), 0, seed=seed, dtype=dtype, device=device, plan=plan).stages
    return stage


def build_routers(
    config: Config, stages: Sequence[nn.Module], *, group: dist.ProcessGroup | None, device: torch.device,
    context: ContextParallel | None = None, whole: bool = False,
) -> RouterSet:
    """The routers in `stages`, set to what `config.router` says, before a pipeline has them. Collective over `group`.

    context: of the stages, where ranks share sequences. whole: `stages` are the whole model, alone on this rank, which
    runs the micro-batches of all pipelines.

    Raises ValueError for what the model's routers cannot do.
    """
    r, train, parallel = config.router, config.train, config.parallel
    split = SequenceSplit() if context is None else context.split
    if context is not None and split.size > 1 and r.balance and r.balance_level != "global":
        parts = train.micro_batch_size if r.balance_level == "sequence" else 1
        share_loads(stages, context.stream.all_to_all, parts)
    return RouterSet(
        stages, num_chunks=train.num_chunks * (parallel.batch_shards if whole else 1), balance=r.balance,
        level=r.balance_level, z=r.z_loss, bias_update_rate=r.bias_update_rate,
        weight=token_weight(split, train.sequence_length), group=group, replicas=1 if whole else parallel.replicas,
        device=device,
    )


def build_optimizer(config: Config, model: Model) -> Optimizer:
    """What updates a rank's share of the model; ValueError for a group of optimizer.groups that the whole model has no
    parameter for."""
    o = config.optimizer
    whole = meta_stages(model.config) if o.groups else ()
    names = [name for name, _ in parameter_places(whole).values()]
    for group in o.groups:
        if not any(matches(group.pattern, name) for name in names):
            near = ", ".join(nearest(group.pattern, names, 3, cutoff=0.0))
            raise ValueError(f"optimizer.groups: no trained parameter matches {group.pattern!r}; nearest: {near}")
    options = json.loads(o.options) if o.options else {}
    if o.name in ALGORITHMS:  # Muon's: a group may take it beside either
        options = {"momentum": o.momentum, "nesterov": o.nesterov, "coefficients": o.coefficients}
    layers = layer_groups(o.lr, o.layer_decay, model.config.num_hidden_layers) if o.layer_decay < 1 else []
    return Optimizer(
        model.stages, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, moments=dtype_of(o.moments),
        name=o.name, options=options, masters=model.masters,
        groups=[*layers, *(Group(each.pattern, each.lr, each.weight_decay, each.algorithm) for each in o.groups)],
    )


def token_weight(split: SequenceSplit, length: int) -> float:
    """What a mean over this rank's tokens counts in the mean over ranks, for that to be the mean over all tokens: ranks
    that share sequences of `length` tokens may have one or two of each more than others."""
    if split.size == 1:
        return 1.0
    return split.counts(length)[split.rank] * split.size / length


def check_export(config: Config, model: Model) -> None:
    """Refuse what `save_hf` would refuse at the end."""
    target, source = cast(Path, config.export_directory), config.init.from_hf
    is_free = not target.is_symlink() and (not target.exists() or (target.is_dir() and not any(target.iterdir())))
    if config.export.to_hf != AUTO and not is_free:
        raise ValueError(f"export.to_hf = {str(target)!r} exists and is not empty; give a directory to make")
    if source and Path(source).resolve() == target.resolve():
        raise ValueError(f"export.to_hf would take the place of init.from_hf = {source!r}, which it is made from; give "
                         "another output.dir or export.to_hf")
    if config.export.quantized:
        check_quantized(model.config, model.plan)
    if source and replace(read_config(source), mtp_depth=model.config.mtp_depth) != model.config:
        raise ValueError(f"export.to_hf takes config.json from init.from_hf = {source!r}, but model.config says "
                         "another model; change the config.json there and leave out model.config")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"export.to_hf = {str(target)!r} cannot be made: {error.strerror}") from error
