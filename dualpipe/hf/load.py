"""Load a rank's stages of a causal language model of transformers, with weights and sharding.

    pipe = DualPipeV(load_stages("Qwen/Qwen3-30B-A3B", 2 * P, mine=(r, 2 * P - 1 - r), mesh=mesh), ...)

`dualpipe.hf.structure` checks that a model can be cut; `dualpipe.hf.build` builds the stages and loads their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.configuration_utils import PreTrainedConfig

from dualpipe.hf.build import ModelSource, build_on_meta, build_stages, progress_bars_on_rank_0
from dualpipe.hf.experts import AUTO, NAME, choose_experts
from dualpipe.hf.layers import CannotSplit, LayerArguments, SplitLayer, check_split
from dualpipe.hf.stage import CausalLMStage
from dualpipe.nn import defer_weight_grads
from dualpipe.nn.lora import adapter_places, fill_adapters
from dualpipe.parallel import DTypePolicy, resolve_dtypes
from dualpipe.parallel.experts.dispatcher import (
    Dispatch,
    LocalDispatcher,
    check_dispatch_over,
    is_interface_experts,
    stacked_parameters,
)
from dualpipe.parallel.fsdp.shard_over_mesh import shard_over_mesh
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.ranks.rank_sync import RankSync

log = logging.getLogger(__name__)
_TRIAL_SHAPE = (2, 4)  # (B, S) of the tokens that a layer's split is checked with
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_stages(
    source: str | Path | PreTrainedConfig, num_stages: int, mine: Sequence[int], *, mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None, policy: DTypePolicy | None = None, experts: str = NAME, overlap: bool = True,
    layers_per_stage: Sequence[int] = (), seed: int = 0, dispatch: Dispatch = "auto", lora: Any = None,
) -> list[CausalLMStage]:
    """Build this rank's stages of a causal LM, load their weights, shard them, and defer their weight gradients.

    Collective over the mesh.

    Args:
        source: a checkpoint, as a path or a name on the hub; or a configuration, to initialize weights like
            transformers. Initial weights depend on `seed` and on module names, not on the cut.
        num_stages: number of stages of the pipeline.
        mine: numbers of this rank's stages, ascending.
        mesh: from `dualpipe.parallel.mesh.build_mesh`. Experts are divided among the ranks of "ep", and FSDP2 shards
            each rank's experts over "dp"; it shards all other parameters over "dp" and "ep". None, or a mesh whose
            ranks are all in "pp": nothing is sharded.
        dtype: floating-point dtype of the parameters; None: the dtype of the checkpoint, or of the configuration.
        policy: dtypes of a sharded stage; None: `dtype` for computation and between stages, float32 for gradients, or
            float64 for those of a float64 model.
        experts: implementation of the experts: "dualpipe", or one of transformers, such as "grouped_mm", which does not
            defer weight gradients and cannot be sharded over "ep". "auto" times all that run here at the model's
            shapes, and takes the fastest. The choice is logged.
        overlap: cut layers at their experts if tokens are sent to other ranks, so that computation hides the
            all-to-all.
        layers_per_stage: number of layers of every stage, instead of stages with balanced costs.
        seed: seed of initial weights.
        dispatch: way of tokens to experts on other ranks, see `dualpipe.parallel.ExpertParallel`.
        lora: a `peft.LoraConfig`, or the result of `dualpipe.hf.lora.plan_adapters`: the stages get its adapters, and
            everything else is frozen. Initial values depend on `seed` and on names. See `dualpipe.hf.lora`.

    Returns the stages, in the order of `mine`.

    Raises:
        ValueError: on every rank, if the model cannot be cut into stages, the checkpoint lacks weights of a stage, or
            arguments are invalid. Everything that can be checked without weights is checked before they are read.
    """
    layout = Mesh.of(mesh)
    expert_mesh = layout.part("ep") if layout.size("ep") > 1 else None

    def build() -> list[CausalLMStage]:
        _check_arguments(num_stages, mine, experts, dtype, layout)
        if expert_mesh is not None:
            check_dispatch_over(dispatch, expert_mesh, layout.ranks_per_node)
        model_source = ModelSource.of(source, dtype, seed)
        plan = None
        if lora is not None:
            from dualpipe.hf.lora import AdapterPlan, plan_adapters  # not at the top: it needs peft

            is_plan = isinstance(lora, AdapterPlan)
            plan = lora if is_plan else plan_adapters(lora, build_on_meta(model_source.config, NAME))
        stages = build_stages(
            model_source, num_stages, mine, experts=NAME if experts == AUTO else experts,
            layers_per_stage=layers_per_stage, expert_ranks=expert_mesh)
        if plan is not None:
            from dualpipe.hf.lora import adapt_stages, adapts_experts

            adapt_stages(stages, plan)
            if experts not in (NAME, AUTO) and adapts_experts(stages):
                raise ValueError(f"experts={experts!r} does not run adapters of experts; use experts={NAME!r}, or "
                                 "leave experts out of the targets")
        for stage in stages:
            # Without expert parallelism there is no all-to-all to hide. Whole layers defer weight gradients as well.
            if overlap and expert_mesh is not None:
                split_stage(stage, _trial_arguments(stage))
            defer_weight_grads(stage)
        return stages

    ranks = RankSync.of_mesh(mesh)
    with progress_bars_on_rank_0():
        stages = ranks.agree(build)
    _agree_on_splits(stages, mine, ranks)
    if layout.device_mesh is not None:
        for stage in stages:
            stage.to(layout.device_mesh.device_type)
    # Adapters of experts, which other ranks may have, run by this library alone.
    is_fixed = expert_mesh is not None or (lora is not None and experts == AUTO)
    choose_experts(stages, NAME if is_fixed else experts, ranks)
    if layout.replicas > 1:
        for place in (place for stage in stages for place in adapter_places(stage)):
            place.adapter.to(torch.promote_types(place.parameter.dtype, torch.float32))  # the masters, sharded
    _shard(stages, layout, policy, dispatch)
    for stage in stages:
        fill_adapters(stage, seed)
    return stages


def _check_arguments(
    num_stages: int, mine: Sequence[int], experts: str, dtype: torch.dtype | None, layout: Mesh
) -> None:
    """Raise ValueError if arguments are out of range or do not fit the mesh."""
    if experts not in (NAME, AUTO) and layout.size("ep") > 1:
        raise ValueError(f"experts={experts!r} cannot be sharded over {layout.size('ep')} expert-parallel ranks; use "
                         f"experts={NAME!r}, or a mesh with ep 1")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be trained; expected one of {', '.join(map(str, _DTYPES))}, or None "
                         "for the checkpoint's dtype")
    outside = [number for number in mine if not 0 <= number < num_stages]
    if outside:
        raise ValueError(f"mine contains {outside}; expected stages from 0 to {num_stages - 1}")
    if list(mine) != sorted(set(mine)) or not mine:
        raise ValueError(f"mine is {tuple(mine)}; expected at least one stage, ascending, without repetition")
    if layout.size("cp") > 1:
        raise ValueError(f"the mesh has {layout.size('cp')} context-parallel ranks, but models of transformers cannot "
                         "share a sequence between ranks; build the mesh with cp 1")


def _agree_on_splits(stages: Sequence[CausalLMStage], mine: Sequence[int], ranks: RankSync) -> None:
    """Keep the split of a layer only if all ranks with the same stages split it. Collective.

    The all-to-alls of these ranks must match.
    """
    splits_of_ranks = ranks.gather(lambda: (tuple(mine), [sorted(stage.splits) for stage in stages]))
    for position, stage in enumerate(stages):
        for stage_numbers, splits in splits_of_ranks:
            if stage_numbers == tuple(mine):
                common = set(splits[position])
                stage.splits = {number: split for number, split in stage.splits.items() if number in common}


def _trial_arguments(stage: CausalLMStage) -> list[LayerArguments]:
    """Return the arguments that a stage's layers are called with for a few tokens."""
    tokens = torch.zeros(_TRIAL_SHAPE, dtype=torch.long, device=next(stage.parameters()).device)
    with torch.no_grad():
        _, arguments = stage.layer_arguments(tokens if stage.is_first else _trial_hidden_states(stage))
    return arguments


def _trial_hidden_states(stage: CausalLMStage) -> torch.Tensor:
    """Return random hidden states of a few tokens, equal on all ranks."""
    hidden_size = stage.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*_TRIAL_SHAPE, hidden_size, generator=generator, device="cpu")
    return x.to(next(stage.parameters()).device, _compute_dtype(stage))


def split_stage(stage: CausalLMStage, arguments: Sequence[LayerArguments]) -> None:
    """Cut the layers of a stage at their experts, so that computation hides the all-to-all.

    arguments: arguments of every layer for the tokens of `_trial_hidden_states`.

    `check_split` checks the first layer of every structure with a forward and a backward of a few tokens. A layer that
    cannot be cut runs as a whole, and a warning in the log gives the reason.
    """
    x = _trial_hidden_states(stage)
    results: dict[tuple[Any, ...], SplitLayer | str] = {}  # by structure: the first layer, cut, or a reason
    for (number, layer), layer_arguments in zip(stage.layers.numbered(), arguments):
        if not any(is_interface_experts(module) for module in layer.modules()):
            continue
        structure = tuple((name, type(module)) for name, module in layer.named_modules())
        if structure not in results:
            results[structure] = _try_split(layer, x, layer_arguments)
        result = results[structure]
        if isinstance(result, SplitLayer):
            stage.splits[number] = result if result.layer is layer else result.split_same(layer)
        else:
            log.warning("layer %d, a %s, runs as a whole, its all-to-all inside: it %s", number, type(layer).__name__,
                        result)


def _try_split(layer: nn.Module, x: torch.Tensor, arguments: LayerArguments) -> SplitLayer | str:
    """Cut a layer at its experts, or return the reason why it cannot be cut.

    The check runs on this rank alone, with its local experts in place of all experts.
    """
    modules: list[Any] = [module for module in layer.modules() if is_interface_experts(module)]
    for module in modules:
        num_local = next(iter(stacked_parameters(module).values())).shape[0]
        module.dispatcher = LocalDispatcher(num_local)
    try:
        return check_split(layer, x, arguments)
    except CannotSplit as error:
        return str(error)
    finally:
        for module in modules:
            del module.dispatcher


def _compute_dtype(stage: CausalLMStage) -> torch.dtype:
    """Return the dtype that most parameter elements of a stage have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in stage.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])


def _shard(
    stages: Sequence[CausalLMStage], layout: Mesh, policy: DTypePolicy | None, dispatch: Dispatch
) -> None:
    """Shard the stages over the mesh. Collective over all of its ranks. Raises ValueError as `shard_over_mesh` does."""
    if layout.replicas == 1 and policy is None:
        return
    dtype = _compute_dtype(stages[0])
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    policy = policy or DTypePolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, output_dtype=dtype)
    plan = resolve_dtypes(stages, policy, group=layout.group("pp"))
    modules: list[Any] = [module for stage in stages for module in stage.modules() if is_interface_experts(module)]
    shard_over_mesh(
        stages, layout, plan, num_experts={module.num_experts for module in modules}, dispatch=dispatch,
        experts_are_local=True)
