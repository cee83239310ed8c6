"""Load the stages of a causal language model of transformers: a rank's own, with their weights, sharded.

    pipe = DualPipeV(load_stages("Qwen/Qwen3-30B-A3B", 2 * P, mine=(r, 2 * P - 1 - r), mesh=mesh), ...)

Each stage is built without memory and cut; then transformers' own loader fills what is left, reads nothing else of the
checkpoint, and converts it as it does for a whole model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from dualpipe.hf.cut import cut_model, drop_embedding, is_tied, stage_layers
from dualpipe.hf.experts import NAME
from dualpipe.hf.layers import CannotSplit, LayerArguments, SplitLayer, check_split
from dualpipe.hf.quantized_source import is_quantized, read_dequantized
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.structure import check_structure
from dualpipe.nn import defer_weight_grads
from dualpipe.nn.init import name_seed
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard_stages
from dualpipe.parallel.experts.dispatcher import ExpertParallel, is_interface_experts, shard_experts
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.ranks.rank_sync import RankSync

log = logging.getLogger(__name__)
_CHECKED = 2, 4  # rows and tokens of a check


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
    dtype: of the parameters; by default that of the checkpoint, or of the configuration.
    policy: dtypes of a sharded stage (default: `dtype` to compute in and between stages, float32 for gradients, float64
        for those of a float64 model).
    experts: the implementation of the experts: "dualpipe", or one of transformers, such as "grouped_mm", whose weight
        gradients are not deferred, and which cannot be sharded over "ep".
    overlap: whether layers whose tokens travel are cut at their experts, so that the way is hidden.
    layers_per_stage: the numbers of layers, instead of stages that cost about the same.

    Returns the stages, in the order of `mine`. Collective over the mesh. Raises, on every rank, ValueError for a model
    without the usual parts, for a checkpoint that lacks some of a stage's weights, and for numbers that do not fit.
    """
    place = Mesh.of(mesh)

    def build() -> list[CausalLMStage]:
        _check(num_stages, mine, experts, place)
        stages = _build(source, num_stages, mine, dtype, experts, layers_per_stage, seed)
        _check_experts(stages, place.size("ep"))
        for stage in stages:
            arguments = _probe(stage)
            if overlap and experts == NAME:
                split_stage(stage, arguments)
            defer_weight_grads(stage)
        return stages

    ranks = RankSync.of_mesh(mesh)
    stages = ranks.agree(build)
    _split_alike(stages, mine, ranks)
    _place(stages, place, policy)
    return stages


def _check(num_stages: int, mine: Sequence[int], experts: str, place: Mesh) -> None:
    """Raise ValueError for numbers of stages, or an implementation of experts, that do not fit."""
    if experts != NAME and place.size("ep") > 1:
        raise ValueError(f"experts={experts!r} cannot be sharded over {place.size('ep')} expert-parallel ranks; use "
                         f"experts={NAME!r}, or a mesh with ep 1")
    outside = [number for number in mine if not 0 <= number < num_stages]
    if outside:
        raise ValueError(f"mine must name stages from 0 to {num_stages - 1}; got {outside}")
    if list(mine) != sorted(set(mine)) or not mine:
        raise ValueError(f"mine must be ascending, without repetition, and at least one stage; got {tuple(mine)}")
    if place.size("cp") > 1:
        raise ValueError(f"the mesh has {place.size('cp')} context-parallel ranks, which models of transformers cannot "
                         "share a sequence over; build the mesh with cp 1")


def _build(
    source: str | Path | PreTrainedConfig, num_stages: int, mine: Sequence[int], dtype: torch.dtype | None,
    experts: str, layers_per_stage: Sequence[int], seed: int,
) -> list[CausalLMStage]:
    """Return the stages with their weights, as transformers has them."""
    path: str | Path | None = None
    if isinstance(source, PreTrainedConfig):
        config = copy.deepcopy(source)
    else:
        path = source
        config = AutoConfig.from_pretrained(path)
    config._experts_implementation = experts
    log.info("experts run by %r", experts)
    whole = _on_meta(config)
    quantization = getattr(config, "quantization_config", None)
    config = whole.config  # of the language model alone, where the checkpoint has more
    config._experts_implementation = experts
    if quantization is not None:
        config.quantization_config = quantization
    cuts = stage_layers(whole, num_stages, layers_per_stage)
    model_class = type(whole)
    form = check_structure(whole, cuts)
    stages = []
    for number in mine:
        is_first = number == 0
        is_last = number == num_stages - 1
        cut = _cut_class(model_class, cuts[number], is_first=is_first, is_last=is_last)
        if path is None:
            causal_lm = _initialised(cut, config, dtype, seed)
        else:
            has_ends = is_first or is_last
            causal_lm = _read(cut, path, config, dtype, partial(
                read_dequantized, path, config, cuts[number], has_ends=has_ends, dtype=dtype or torch.bfloat16))
        if is_last and not is_first and is_tied(config):
            drop_embedding(causal_lm)
        stages.append(CausalLMStage(causal_lm, is_first=is_first, is_last=is_last, form=form).train())
    _tie_ends(stages)
    return stages


def _check_experts(stages: Sequence[CausalLMStage], ranks: int) -> None:
    """Raise ValueError for experts that cannot be divided among `ranks` expert-parallel ranks."""
    for stage in stages:
        modules: list[Any] = [module for module in stage.modules() if is_interface_experts(module)]
        for module in modules:
            if module.num_experts % ranks:
                raise ValueError(f"{module.num_experts} experts cannot be divided evenly among {ranks} expert-parallel "
                                 "ranks; build the mesh with an ep that divides them")


def _split_alike(stages: Sequence[CausalLMStage], mine: Sequence[int], ranks: RankSync) -> None:
    """Run a layer as a whole where a rank with the same stages does: their all-to-alls must match. Collective."""
    everywhere = ranks.gather(lambda: (tuple(mine), [sorted(stage.splits) for stage in stages]))
    for place, stage in enumerate(stages):
        for _, splits in (told for told in everywhere if told[0] == tuple(mine)):
            stage.splits = {number: split for number, split in stage.splits.items() if number in splits[place]}


def _probe(stage: CausalLMStage) -> list[LayerArguments]:
    """Return what the layers of a stage are called with, for a few tokens.

    Raises ValueError for a model that cannot be cut.
    """
    tokens = torch.zeros(_CHECKED, dtype=torch.long, device=next(stage.parameters()).device)
    try:
        with torch.no_grad():
            _, arguments = stage.layer_arguments(tokens if stage.is_first else _hidden_states(stage))
    except ValueError:
        raise
    except Exception as error:  # whatever a model raises whose layers pass on something else
        raise ValueError(
            f"a {type(stage.causal_lm).__name__} hands its layers more than hidden states ({error}); cut the model "
            "yourself, as docs/your-own-loop.md shows") from error
    return arguments


def _hidden_states(stage: CausalLMStage) -> torch.Tensor:
    """Return random hidden states of a few tokens, the same on all ranks."""
    hidden_size = stage.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*_CHECKED, hidden_size, generator=generator, device="cpu")
    return x.to(next(stage.parameters()).device, _compute_dtype(stage))


def split_stage(stage: CausalLMStage, arguments: Sequence[LayerArguments]) -> None:
    """Cut the layers of a stage at their experts, so that segments hide the all-to-all.

    arguments: what the layers are called with, for the tokens of `_hidden_states`. Of layers of one form the first is
    checked, by a forward and a backward of a few tokens; see `check_split`. A layer that cannot be cut runs as a whole:
    logged, with the reason.
    """
    if not any(is_interface_experts(module) for module in stage.modules()):
        return
    x = _hidden_states(stage)
    forms: dict[tuple[Any, ...], SplitLayer | str] = {}
    for (number, layer), given in zip(stage.layers.numbered(), arguments):
        if not any(is_interface_experts(module) for module in layer.modules()):
            continue
        form = tuple((name, type(module)) for name, module in layer.named_modules())
        if form not in forms:
            forms[form] = _checked(layer, x, given)
        found = forms[form]
        if isinstance(found, SplitLayer):
            stage.splits[number] = found if found.layer is layer else found.like(layer)
        else:
            log.warning("layer %d, a %s, runs as a whole, its all-to-all inside: it %s", number, type(layer).__name__,
                        found)


def _checked(layer: nn.Module, x: torch.Tensor, arguments: Any) -> SplitLayer | str:
    """Return a layer cut at its experts, or why it cannot be."""
    try:
        return check_split(layer, x, arguments)
    except CannotSplit as error:
        return str(error)


def _compute_dtype(stage: CausalLMStage) -> torch.dtype:
    """Return the dtype of most numbers of a stage."""
    counts: dict[torch.dtype, int] = {}
    for parameter in stage.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])


def _on_meta(config: PreTrainedConfig) -> Any:
    """Return the whole model, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _cut_class(model_class: type[Any], layers: range, *, is_first: bool, is_last: bool) -> type[Any]:
    """Return the class of a model that is cut as soon as it is built, so that a loader sees nothing else of it."""

    def build(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        cut_model(self, layers, is_first=is_first, is_last=is_last)

    members = {
        "__init__": build,
        "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # what other stages have
        "should_save_on_this_rank": _saves_where_it_is_told,
    }
    return type(model_class.__name__, (model_class,), members)


def _saves_where_it_is_told(causal_lm: Any, is_main_process: bool) -> bool:
    """Stand for the method of transformers that saves on the first rank alone: every rank has a part of the model."""
    return is_main_process


def _read(
    cut: type[Any], source: str | Path, config: PreTrainedConfig, dtype: torch.dtype | None,
    dequantize: Callable[[], dict[str, torch.Tensor]],
) -> Any:
    """Return a cut model with its weights of a checkpoint; ValueError where it lacks some."""
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    path: str | Path | None = source
    if is_quantized(config):
        options["dtype"] = dtype or torch.bfloat16
        options["state_dict"] = dequantize()
        path = None
        config = copy.deepcopy(config)
        del config.quantization_config
    causal_lm, report = cut.from_pretrained(
        path, config=config, output_loading_info=True, experts_implementation=config._experts_implementation, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"the checkpoint {str(source)!r} lacks {len(missing)} of a stage's weights, such as "
                         f"{missing[0]!r}")
    return causal_lm


def _initialised(cut: type[Any], config: PreTrainedConfig, dtype: torch.dtype | None, seed: int) -> Any:
    """Return a cut model with weights as transformers initialises them, each module by the seed and its name."""
    described = config.get_text_config().dtype
    dtype = dtype or (dtype_of(described) if isinstance(described, str) else described) or torch.get_default_dtype()
    with torch.device("meta"):
        causal_lm = cut(config)
    causal_lm.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, module in causal_lm.named_modules():
            torch.manual_seed(name_seed(seed, name))
            causal_lm._init_weights(module)
        for parameter in causal_lm.parameters():  # not buffers, such as frequencies, which stay as wide as they are
            parameter.data = parameter.data.to(dtype)
    causal_lm.tie_weights(recompute_mapping=False)
    return causal_lm


def _tie_ends(stages: Sequence[CausalLMStage]) -> None:
    """Have the head share the embedding's weight where one rank has both ends of a V."""
    first = next((stage for stage in stages if stage.is_first), None)
    last = next((stage for stage in stages if stage.is_last), None)
    if first is not None and last is not None and first is not last and first.is_tied:
        last.causal_lm.lm_head.weight = first.base.embed_tokens.weight


def _place(stages: Sequence[CausalLMStage], place: Mesh, policy: DTypePolicy | None) -> None:
    """Bring the stages to the device of the mesh, and shard them over it. Collective over the pipeline's ranks."""
    if place.device_mesh is not None:
        for stage in stages:
            stage.to(place.device_mesh.device_type)
    if place.replicas == 1 and policy is None:
        return
    dtype = _compute_dtype(stages[0])
    wide = torch.promote_types(dtype, torch.float32)
    policy = policy or DTypePolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=dtype)
    plan = resolve_dtypes(stages, policy, group=place.group("pp"))
    ranks = place.part("ep")
    if ranks is not None and ranks.size() > 1:
        modules: list[Any] = [module for stage in stages for module in stage.modules() if is_interface_experts(module)]
        by_count = {count: ExpertParallel(count, ranks) for count in {module.num_experts for module in modules}}
        for stage in stages:
            shard_experts(stage, ranks)
            stage.use_expert_parallelism(by_count)
    shard_stages(stages, None if place.replicas == 1 else place.dense, plan, expert_mesh=place.experts)
