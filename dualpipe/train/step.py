"""The training step of one rank: its schedule, dtypes, stages and routers, and the runner that executes it.

The trainer, the guard that reruns a bad step, the replay of a recorded step and parity all use this file, so they run
the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import Pipeline
from dualpipe.checkpoint import hub_dtypes, load_hf
from dualpipe.checkpoint.state import derive_random
from dualpipe.kernels.formats import FORMATS
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.models import HubConfig, Stage, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.nn.accumulators import local, spoil
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.lora import initial_values
from dualpipe.nn.quantized_matmul import GemmPrecision
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel import DTypePlan, DTypePolicy, Rule, resolve_dtypes
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.fsdp.materialize import Sliceable, build_on_meta, materialize
from dualpipe.parallel.fsdp.shard_over_mesh import shard_over_mesh
from dualpipe.parallel.mesh import DENSE, Mesh
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Schedule, build
from dualpipe.schedule.by_name import search_with_progress
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.lora import adapter_plan
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import NO_ADAPTERS, Config, LoRAConfig, ParallelConfig, TrainConfig
from dualpipe.train.data.token_stream import NO_TARGET, TokenBatch
from dualpipe.train.launch.join import Job
from dualpipe.train.loss import MicroBatchLoss, token_weight, tokens_ahead
from dualpipe.train.optim.groups import find_trainable_parameters
from dualpipe.train.optim.optimizer import Optimizer, QKClip, build_optimizer

if TYPE_CHECKING:
    from dualpipe.hf import CausalLMStage
    from dualpipe.hf.model import TransformersModel


# -- schedule and dtypes


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


def resolve_run_dtypes(
    resolved: Resolved, recorded: Mapping[str, torch.dtype] | None, mesh: DeviceMesh | None = None
) -> DTypePlan:
    """Return the plan that `dualpipe train` uses and `dualpipe dtypes` prints. parallel.dp must be resolved.

    recorded: dtypes in the checkpoint to resume from, see `resolve_model_dtypes`; None without one.
    """
    config = resolved.config
    lora = config.lora
    if lora.is_enabled:
        recorded = None  # a checkpoint of adapters; the base is loaded from init.from_hf in any case
    return resolve_model_dtypes(
        resolved.model, resolved.dtypes.compute, replicas=config.parallel.replicas, rules=resolved.dtypes.rules,
        recorded=recorded, from_hf=config.init.from_hf if recorded is None else "", mesh=mesh, lora=lora,
    )


def resolve_model_dtypes(
    config: TrainedModel, dtype: torch.dtype, *, replicas: int, rules: Sequence[Rule] = (), from_hf: str = "",
    recorded: Mapping[str, torch.dtype] | None = None, mesh: DeviceMesh | None = None,
    lora: LoRAConfig = NO_ADAPTERS,
) -> DTypePlan:
    """Return the plan of the whole model, which computes in `dtype` and accumulates gradients in at least float32.

    With several replicas, parameters are sharded and stored in at least float32. With one they are stored in `dtype`,
    and the optimizer keeps float32 masters. Nothing is gathered then, so weights are stored in the `gather` format of
    their rule: the same bytes as after a gather.

    Args:
        recorded: dtypes in the checkpoint to load, by name.
        from_hf: directory with a Hugging Face checkpoint to load instead. Its dtypes count like recorded ones:
            parameters in float32 among narrower ones stay float32. A checkpoint that is float32 throughout does not
            change the plan; with one replica its values become the masters.
        lora: adapters of the model. Frozen weights are stored in their compute dtype.

    Collective over `mesh` with `from_hf`. Raises ValueError like `resolve_dtypes`, and with one replica for a rule
    whose storage differs from its compute dtype.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if replicas == 1:
        rules = [replace(rule, storage=rule.gather, gather=None) if rule.gather else rule for rule in rules]
    whole = _whole_on_meta(config, wide if replicas > 1 else dtype, lora)
    loaded = recorded
    if not isinstance(config, HubConfig):
        loaded = None  # transformers builds these stages and reads all weights in the dtype that it is given
    elif from_hf:
        loaded = RankSync.of_mesh(mesh).first(lambda: hub_dtypes(from_hf, config))
    if loaded and not any(name in loaded for name, _ in whole.named_parameters()):
        loaded = None  # a checkpoint of another model: loading it raises the error
    policy = DTypePolicy(dtype, wide, dtype, rules)
    plan = resolve_dtypes(whole, policy, loaded)
    return plan if replicas > 1 else _store_as_computed(whole, plan, loaded or {})


def _whole_on_meta(config: TrainedModel, dtype: torch.dtype, lora: LoRAConfig) -> nn.Module:
    """Return the whole model on meta, stored in `dtype`. It must not be changed."""
    (whole,) = stages_on_meta(config, lora=lora)  # cached: building a large model takes seconds
    if all(parameter.dtype is dtype for parameter in whole.parameters()):
        return whole
    return deepcopy(whole).to(dtype=dtype)


def _store_as_computed(whole: nn.Module, plan: DTypePlan, loaded: Mapping[str, torch.dtype]) -> DTypePlan:
    """Return the plan of a model that is not sharded: parameters are stored in their compute dtype.

    Values of a checkpoint in a wider dtype become the optimizer's masters.

    loaded: dtypes in the checkpoint, by name.
    """
    rounded = {}
    for name, dtype in loaded.items():
        if name not in plan.tensors:
            continue
        compute = plan.of(name).compute
        if torch.promote_types(dtype, compute) is not compute:
            rounded[name] = compute
    if rounded:
        plan = resolve_dtypes(whole, plan.policy, {**loaded, **rounded})
    for name, dtypes in plan.tensors.items():
        if dtypes.storage is not dtypes.compute and not dtypes.format and not dtypes.unsharded:
            raise ValueError(f"{name} is stored in {short_name(dtypes.storage)} and computes in "
                             f"{short_name(dtypes.compute)}, which only a sharded module can: use parallel.dp or "
                             "ep > 1, or leave out storage, as the optimizer keeps float32 masters")
    return plan


# -- the stages of a rank


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
        plan = resolve_model_dtypes(
            config, dtypes, replicas=place.replicas, from_hf=from_hf, mesh=mesh, lora=settings.lora)
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
    if settings.lora.is_enabled:
        from dualpipe.hf.lora import adapt_stages  # not at the top: it needs peft

        adapt_stages(stages, adapter_plan(config, settings.lora))
    for stage in stages:
        _apply_settings(stage, plan, settings, context)
    shard_over_mesh(
        stages, place, plan, num_experts={config.num_experts}, dispatch=settings.parallel.dispatch, fp8_rows=fp8_rows)
    masters = _fill(stages, plan, settings, from_hf, mesh, device)
    return Model(config, tuple(stages), plan, has_first, has_last, masters)


def _build_transformers_stages(
    model: TransformersModel, num_stages: int, numbers: Sequence[int], *, plan: DTypePlan, device: torch.device,
    settings: Config, from_hf: str, mesh: DeviceMesh | None,
) -> tuple[nn.Module, ...]:
    """Build the stages of a transformers model with these numbers, sharded and with weights. Collective over `mesh`.

    Arguments as in `build_model`. Raises ValueError, on all ranks, like `load_stages`.
    """
    from dualpipe.hf import load_stages

    lora = settings.lora
    recompute = Recompute(settings.memory.recompute, model.num_hidden_layers)
    compute = plan.policy.param_dtype
    is_sharded = Mesh.of(mesh).replicas > 1
    stages = load_stages(
        from_hf or model.config, num_stages, numbers, mesh=mesh, policy=plan.policy, seed=settings.train.seed,
        dtype=torch.promote_types(compute, torch.float32) if is_sharded and not lora.is_enabled else compute,
        layers_per_stage=settings.parallel.layers_per_stage, dispatch=settings.parallel.dispatch,
        lora=adapter_plan(model, lora) if lora.is_enabled else None)
    if lora.adapter:
        from dualpipe.hf.lora import load_adapter

        RankSync.of_mesh(mesh).agree(lambda: load_adapter(stages, lora.adapter))
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
    stages: Sequence[Stage], plan: DTypePlan, settings: Config, from_hf: str, mesh: DeviceMesh | None,
    device: torch.device,
) -> Mapping[nn.Parameter, Tensor]:
    """Initialize or load the weights of the stages on `device`; return `Model.masters`."""
    seed = settings.train.seed
    adapter = settings.lora.adapter
    if not from_hf:
        for stage in stages:
            materialize(stage, device, plan, seed=seed)
        if adapter:
            from dualpipe.hf.lora import load_adapter

            RankSync.of_mesh(mesh).agree(lambda: load_adapter(stages, adapter))
        return {}
    fresh: dict[str, Sliceable] = {}
    for stage in stages:
        fresh |= initial_values(stage, seed)
    if adapter:
        from dualpipe.hf.lora import read_adapter

        fresh = RankSync.of_mesh(mesh).agree(lambda: dict(read_adapter(stages, adapter)))
    if Mesh.of(mesh).replicas == 1:
        return _load_with_masters(stages, from_hf, mesh, plan, device, fresh)
    load_hf(stages, from_hf, mesh, plan, device=device, fresh=fresh)
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
    stages: Sequence[nn.Module], from_hf: str, mesh: DeviceMesh | None, plan: DTypePlan, device: torch.device,
    fresh: Mapping[str, Sliceable],
) -> dict[nn.Parameter, Tensor]:
    """Load like `load_hf`; return the values of trained half-precision parameters before rounding, by parameter."""
    names = {name for stage in stages for name, param in stage.named_parameters(remove_duplicate=False)
             if param.requires_grad}
    loaded_in_float32 = {
        name: replace(dtypes, storage=torch.float32) for name, dtypes in plan.tensors.items()
        if name in names and dtypes.storage in HALF
    }
    load_hf(stages, from_hf, mesh, DTypePlan(plan.policy, {**plan.tensors, **loaded_in_float32}), device=device,
            fresh=fresh)
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


def build_routers(
    config: Config, stages: Sequence[nn.Module], *, group: dist.ProcessGroup | None, device: torch.device,
    context: ContextParallel | None = None, whole: bool = False,
) -> RouterSet:
    """Configure the routers in `stages` as `config.router` says and return them as a set. Collective over `group`.

    Call it before the stages are put into a pipeline. Raises ValueError for options that the model's routers lack.

    Args:
        context: context parallelism of the stages; None without it.
        whole: `stages` are the unpipelined model, and this rank runs the micro-batches of all pipelines.
    """
    router = config.router
    train = config.train
    parallel = config.parallel
    return RouterSet(
        stages, num_microbatches=train.num_chunks * (parallel.batch_shards if whole else 1), balance=router.balance,
        level=router.balance_level, z=router.z_loss, bias_update_rate=router.bias_update_rate,
        weight=token_weight(SequenceSplit() if context is None else context.split, train.sequence_length),
        sequence_group=context.stream.group if context is not None and context.split.size > 1 else None,
        group=group, replicas=1 if whole else parallel.replicas, device=device,
    )


# -- the step


class StepRunner:
    """The stages of this rank in their pipeline, with routers: forward, loss and backward of a batch. Collective.

    Args:
        dtypes: see `build_model`.
        from_hf: directory with a Hugging Face checkpoint to load the weights from, or "".

    Raises ValueError, on all ranks, for an invalid model, schedule or router configuration.
    """

    def __init__(
        self, resolved: Resolved, job: Job, *, dtypes: DTypePlan | torch.dtype, from_hf: str = ""
    ) -> None:
        config = resolved.config
        self.resolved = resolved
        self.config = config
        self.job = job
        self.recorder = Recorder.current()
        self.schedule = build_schedule(config.parallel, config.train.num_chunks, job.ranks)
        context = ContextParallel(job.place.part("cp"), method=config.parallel.cp_method)
        self.split = context.split
        # True if batches have different numbers of targets: there is none across the end of a separate document, and
        # none at a token that a loss mask leaves out.
        self.counts_targets = config.data.separate_documents
        # Number of targets in the latest global batch. None unless they are counted, and on ranks without the last
        # stage.
        self.num_targets: Tensor | None = None
        self.model = build_model(
            resolved.model, self.schedule, job.place.rank("pp"), dtypes=dtypes, device=job.device,
            settings=config, from_hf=from_hf, mesh=job.mesh, context=context,
        )
        self.routers = build_routers(config, self.model.stages, group=job.group, device=job.device, context=context)
        self.pipeline = Pipeline(
            self.model.stages, process_group=job.place.group("pp"), schedule=self.schedule,
            overlap=config.parallel.overlap, merge_weight_grads=config.parallel.merge_weight_grads,
        )
        self.parameters = list(find_trainable_parameters(self.model.stages))  # a tied one appears once
        self.qk_clip: QKClip | None = None
        if config.optimizer.qk_clip:
            self.qk_clip = QKClip(
                self.model.stages, config.optimizer.qk_clip, group=job.place.group(*DENSE), device=job.device)

    @property
    def reports(self) -> bool:
        """True on the one rank that writes the metrics: the rank of pipeline 0 with the last stage, and so the loss."""
        return self.model.has_last and not self.job.place.replica

    def criterion(self, step: int, batch: TokenBatch | None = None) -> MicroBatchLoss:
        """Return the criterion of a step, counted from 1, for one call of `forward_backward`.

        That call may run fewer micro-batches than the step has; each is weighted as one of the whole step.

        Args:
            batch: of the whole step. With `counts_targets`, its targets are counted over all pipelines, which is
                collective, and the loss is the mean over them. None: the loss is divided by the number of all tokens.
        """
        train = self.config.train
        mtp_weight = self.config.mtp.weight_of(step, train.steps)
        part_bytes = self.config.memory.part_bytes
        if self.counts_targets and batch is not None and self.model.has_last:
            self.num_targets = self._count_targets(batch)
            # Gradients are averaged over the replicas: dividing by the number of targets per replica gives the gradient
            # of the mean over the global batch.
            denominator = self.num_targets.clamp(min=1) / self.config.parallel.replicas
            return MicroBatchLoss(train.num_chunks, mtp_weight, denominator=denominator, part_bytes=part_bytes)
        num_microbatches = train.num_chunks / token_weight(self.split, train.sequence_length)
        return MicroBatchLoss(num_microbatches, mtp_weight, part_bytes=part_bytes)

    def _count_targets(self, batch: TokenBatch) -> Tensor:
        """Count the targets of the global batch, a float32 scalar. Collective over the ranks of the last stage.

        Counts the next tokens, also with multi-token prediction.
        """
        targets = batch.targets if batch.targets.dim() == 2 else batch.targets[..., 0]
        count = (targets != NO_TARGET).sum()
        self.all_reduce("targets", "the number of targets", count, self.job.place.group(*DENSE))
        return count.float()

    def forward_backward(
        self, batch: TokenBatch, criterion: MicroBatchLoss, num_microbatches: int | None = None
    ) -> Tensor | None:
        """Run the pipeline once and return the loss of each micro-batch (N,); see `mean_losses`.

        The result is None on ranks without the last stage.

        Args:
            criterion: of the step, made for this call: it collects results.
            num_microbatches: of the batch; by default those of a step.
        """
        model = self.model
        inputs = (batch.tokens,) if model.has_first else ()
        labels = (batch.targets,) if model.has_last else ()
        losses, _ = self.pipeline.step(
            *inputs, num_chunks=num_microbatches or self.config.train.num_chunks,
            criterion=criterion if model.has_last else None, labels=labels,
            side=self._side_inputs(batch) if model.has_first else None,
        )
        return losses

    def _side_inputs(self, batch: TokenBatch) -> dict[str, Tensor | None]:
        """Return the inputs of the stages besides the tokens, by the keywords of their `forward`."""
        positions = batch.positions if self.config.data.separate_documents else None
        if positions is None and self.split.size > 1:  # context-parallel stages select their tokens by position
            positions = torch.arange(batch.positions.shape[1], device=self.job.device).expand_as(batch.positions)
        if not isinstance(self.model.config, HubConfig):
            return {"position_ids": positions}
        return {"positions": positions, "ahead": tokens_ahead(batch.targets)}

    def mean_losses(self, losses: Tensor | None, criterion: MicroBatchLoss) -> Tensor | None:
        """Return the mean loss over all pipelines: (1,), or (1 + D,) for multi-token prediction of depth D. Collective.

        The result is None on ranks without the last stage. losses: returned by `forward_backward` for `criterion`.
        """
        if losses is None:
            return None
        if criterion.depth_losses:
            loss = torch.stack(criterion.depth_losses).sum(0).float()
        else:
            loss = losses.sum().float().unsqueeze(0)
        self.all_reduce("loss", "the loss of all pipelines", loss, self.job.place.group(*DENSE))
        return loss / self.config.parallel.replicas

    def broadcast_loss(self, loss: Tensor | None) -> Tensor:
        """Return the loss of the rank that reports it, on every rank: a float64 scalar. Collective."""
        shared = torch.zeros(1, dtype=torch.float64, device=self.job.device)
        if self.reports and loss is not None:
            shared[0] = loss
        self.all_reduce("loss", "the loss", shared, self.job.group)
        return shared[0]

    def all_reduce(self, kind: str, title: str, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Sum `tensor` over the ranks of `group` in place; do nothing without a group, or for one rank.

        kind, title: names of the collective in the recorder.
        """
        if group is not None and group.size() > 1:
            with self.recorder.collective(kind, title, self.recorder.members(group)):
                dist.all_reduce(tensor, group=group)

    def run_step(self, batch: TokenBatch, step: int) -> Tensor | None:
        """Run forward and backward of a step, counted from 1, with the losses and counts of the routers.

        Returns the `mean_losses`. If the loss is not finite, a gradient becomes NaN, so that every rank learns of it
        from the gradient norm.
        """
        criterion = self.criterion(step, batch)
        with self.routers.step():
            losses = self.mean_losses(self.forward_backward(batch, criterion), criterion)
        if losses is not None:
            self._spoil_gradient(losses)
        return losses

    def _spoil_gradient(self, losses: Tensor) -> None:
        """Add NaN to one element of a gradient if a loss is not finite, else 0.

        The gradient is not one of a copied parameter, which the norm leaves out.
        """
        loss = losses.sum()
        copies = set(self.pipeline.copied_parameters)
        owned = (p for p in self.parameters if p not in copies)
        param = next((p for p in owned if p.grad is not None and local(p.grad).numel()), None)
        if param is not None:
            spoil(param, loss - loss)

    def update(self, optimizer: Optimizer, lr: float, norm: Tensor) -> None:
        """Update the parameters unless the gradient norm, a scalar tensor, is not finite; then drop the gradients."""
        with self.recorder.doing("optimizer"):
            optimizer.step(lr, norm)
            if self.qk_clip is not None:
                self.qk_clip(optimizer, norm)
        optimizer.zero_grad()

    def drop_scores(self) -> None:
        """Drop the attention scores that QK-clip has recorded, after a step without an update."""
        if self.qk_clip is not None:
            self.qk_clip.reset()


def build_training(
    resolved: Resolved, job: Job, recorded: Mapping[str, torch.dtype] | None
) -> tuple[StepRunner, Optimizer]:
    """Return the runner of a run's steps and its optimizer. Collective.

    recorded: dtypes in the checkpoint that the run resumes from, by name; None for a new run.
    """
    config = resolved.config
    derive_random(config.train.seed, 0, job.rank)
    plan = resolve_run_dtypes(resolved, recorded, job.mesh)
    loads_base = recorded is None or config.lora.is_enabled  # checkpoints of adapters lack the base
    runner = StepRunner(resolved, job, dtypes=plan, from_hf=config.init.from_hf if loads_base else "")
    optimizer = build_optimizer(
        config.optimizer, resolved.model, runner.model.stages, moments=resolved.dtypes.moments,
        masters=runner.model.masters, lora=config.lora,
    )
    runner.recorder.made("parameters", *optimizer.parameters)
    return runner, optimizer
