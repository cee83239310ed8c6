"""Load the stages of a causal language model of transformers: a rank's own, with their weights, sharded.

    pipe = DualPipeV(load_stages("Qwen/Qwen3-30B-A3B", 2 * P, mine=(r, 2 * P - 1 - r), mesh=mesh), ...)

Stages are checked and filled by `dualpipe.hf.structure` and `dualpipe.hf.build`.
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

from dualpipe.hf.build import ModelSource, build_stages
from dualpipe.hf.experts import NAME
from dualpipe.hf.experts_choice import AUTO, choose_experts
from dualpipe.hf.layers import CannotSplit, LayerArguments, SplitLayer, check_split
from dualpipe.hf.stage import CausalLMStage
from dualpipe.nn import defer_weight_grads
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard_stages
from dualpipe.parallel.experts.dispatcher import (
    ExpertParallel,
    LocalDispatcher,
    is_interface_experts,
    shard_experts,
    stacked_parameters,
)
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.ranks.rank_sync import RankSync

log = logging.getLogger(__name__)
_TRIAL_SHAPE = 2, 4  # rows and tokens of a trial of a layer
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_stages(
    source: str | Path | PreTrainedConfig, num_stages: int, mine: Sequence[int], *, mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None, policy: DTypePolicy | None = None, experts: str = NAME, overlap: bool = True,
    layers_per_stage: Sequence[int] = (), seed: int = 0,
) -> list[CausalLMStage]:
    """Build some stages of a causal LM, fill them, shard them over `mesh`, and have them defer weight gradients.

    source: a checkpoint, as a path or as a name on the hub; or a configuration, for weights as transformers
        initialises them, by `seed` and the names of modules, so that they do not depend on the cut.
    num_stages, mine: the number of stages, and those of this rank, ascending.
    mesh: from `dualpipe.parallel.mesh.build_mesh`. Experts are sharded over its "ep", everything over "dp" and "ep" by
        FSDP2. None, or ranks that are all of "pp": nothing is sharded.
    dtype: of the parameters, a floating one; by default that of the checkpoint, or of the configuration.
    policy: dtypes of a sharded stage (default: `dtype` to compute in and between stages, float32 for gradients, float64
        for those of a float64 model).
    experts: the implementation of the experts: "dualpipe", or one of transformers, such as "grouped_mm", whose weight
        gradients are not deferred, and which cannot be sharded over "ep"; "auto" times all that run here at the
        model's shapes and takes the fastest. The choice is logged.
    overlap: cut layers at their experts where tokens travel to other ranks, so that computing hides the all-to-all.
    layers_per_stage: the numbers of layers, instead of stages that cost about the same.

    Returns the stages, in the order of `mine`. Collective over the mesh. Raises, on every rank, ValueError for a model
    that cannot be cut into stages, for a checkpoint that lacks some of a stage's weights, and for arguments that do not
    fit; before weights are read where that can be known.
    """
    layout = Mesh.of(mesh)
    expert_ranks = layout.part("ep") if layout.size("ep") > 1 else None

    def build() -> list[CausalLMStage]:
        _check_arguments(num_stages, mine, experts, dtype, layout)
        stages = build_stages(
            ModelSource.of(source, dtype, seed), num_stages, mine, experts=NAME if experts == AUTO else experts,
            layers_per_stage=layers_per_stage, expert_ranks=expert_ranks)
        for stage in stages:
            # Without other ranks of experts there is no all-to-all to hide: layers run whole, and defer all the same.
            if overlap and expert_ranks is not None:
                split_stage(stage, _trial_arguments(stage))
            defer_weight_grads(stage)
        return stages

    ranks = RankSync.of_mesh(mesh)
    stages = ranks.agree(build)
    _split_alike(stages, mine, ranks)
    if layout.device_mesh is not None:
        for stage in stages:
            stage.to(layout.device_mesh.device_type)
    choose_experts(stages, NAME if expert_ranks is not None else experts, ranks)
    _shard(stages, layout, policy)
    return stages


def _check_arguments(
    num_stages: int, mine: Sequence[int], experts: str, dtype: torch.dtype | None, layout: Mesh
) -> None:
    """Raise ValueError for arguments that do not fit the mesh or each other."""
    if experts not in (NAME, AUTO) and layout.size("ep") > 1:
        raise ValueError(f"experts={experts!r} cannot be sharded over {layout.size('ep')} expert-parallel ranks; use "
                         f"experts={NAME!r}, or a mesh with ep 1")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be that of parameters that are trained; expected one of "
                         f"{', '.join(map(str, _DTYPES))}, or None for the checkpoint's")
    outside = [number for number in mine if not 0 <= number < num_stages]
    if outside:
        raise ValueError(f"mine must name stages from 0 to {num_stages - 1}; got {outside}")
    if list(mine) != sorted(set(mine)) or not mine:
        raise ValueError(f"mine must be ascending, without repetition, and at least one stage; got {tuple(mine)}")
    if layout.size("cp") > 1:
        raise ValueError(f"the mesh has {layout.size('cp')} context-parallel ranks, which models of transformers "
                         "cannot share a sequence over; build the mesh with cp 1")


def _split_alike(stages: Sequence[CausalLMStage], mine: Sequence[int], ranks: RankSync) -> None:
    """Run a layer as a whole where a rank with the same stages does: their all-to-alls must match. Collective."""
    splits_of_ranks = ranks.gather(lambda: (tuple(mine), [sorted(stage.splits) for stage in stages]))
    for place, stage in enumerate(stages):
        for numbers, splits in splits_of_ranks:
            if numbers == tuple(mine):
                stage.splits = {number: split for number, split in stage.splits.items() if number in splits[place]}


def _trial_arguments(stage: CausalLMStage) -> list[LayerArguments]:
    """Return the arguments of the layers of a stage for a few tokens."""
    tokens = torch.zeros(_TRIAL_SHAPE, dtype=torch.long, device=next(stage.parameters()).device)
    with torch.no_grad():
        _, arguments = stage.layer_arguments(tokens if stage.is_first else _trial_hidden_states(stage))
    return arguments


def _trial_hidden_states(stage: CausalLMStage) -> torch.Tensor:
    """Return random hidden states of a few tokens, the same on all ranks."""
    hidden_size = stage.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*_TRIAL_SHAPE, hidden_size, generator=generator, device="cpu")
    return x.to(next(stage.parameters()).device, _compute_dtype(stage))


def split_stage(stage: CausalLMStage, arguments: Sequence[LayerArguments]) -> None:
    """Cut the layers of a stage at their experts, so that segments hide the all-to-all.

    arguments: those of the layers, for the tokens of `_trial_hidden_states`. Of layers of one form the first is
    checked, by a forward and a backward of a few tokens; see `check_split`. A layer that cannot be cut runs as a whole:
    logged, with the reason.
    """
    x = _trial_hidden_states(stage)
    results: dict[tuple[Any, ...], SplitLayer | str] = {}  # by a layer's form: its first layer, cut, or the reason
    for (number, layer), layer_arguments in zip(stage.layers.numbered(), arguments):
        if not any(is_interface_experts(module) for module in layer.modules()):
            continue
        form = tuple((name, type(module)) for name, module in layer.named_modules())
        if form not in results:
            results[form] = _try_split(layer, x, layer_arguments)
        result = results[form]
        if isinstance(result, SplitLayer):
            stage.splits[number] = result if result.layer is layer else result.like(layer)
        else:
            log.warning("layer %d, a %s, runs as a whole, its all-to-all inside: it %s", number, type(layer).__name__,
                        result)


def _try_split(layer: nn.Module, x: torch.Tensor, arguments: LayerArguments) -> SplitLayer | str:
    """Return a layer cut at its experts, or the reason that it cannot be cut. The experts here stand for all."""
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
    """Return the dtype of most numbers of a stage."""
    counts: dict[torch.dtype, int] = {}
    for parameter in stage.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])


def _shard(stages: Sequence[CausalLMStage], layout: Mesh, policy: DTypePolicy | None) -> None:
    """Shard the stages over the mesh. Collective over the pipeline's ranks."""
    if layout.replicas == 1 and policy is None:
        return
    dtype = _compute_dtype(stages[0])
    wide = torch.promote_types(dtype, torch.float32)
    policy = policy or DTypePolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=dtype)
    plan = resolve_dtypes(stages, policy, group=layout.group("pp"))
    ranks = layout.part("ep")
    if ranks is not None and ranks.size() > 1:
        modules: list[Any] = [module for stage in stages for module in stage.modules() if is_interface_experts(module)]
        by_count = {count: ExpertParallel(count, ranks) for count in {module.num_experts for module in modules}}
        for stage in stages:
            shard_experts(stage, ranks, are_local=True)
            stage.use_expert_parallelism(by_count)
    shard_stages(stages, None if layout.replicas == 1 else layout.dense, plan, expert_mesh=layout.experts)
