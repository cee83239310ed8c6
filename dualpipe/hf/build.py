"""Build stages of a causal LM of transformers without memory, cut them, and fill what is left with weights.

transformers' own loader fills a stage: it reads nothing else of the checkpoint, and converts it as it does for a whole
model. Of experts it reads those of this rank alone: their parameters are DTensors while it reads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading
from transformers.configuration_utils import PreTrainedConfig

from dualpipe.hf.cut import cut_model, drop_embedding, is_tied, stage_layers
from dualpipe.hf.quantized_source import is_quantized, read_dequantized
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.stand_ins import LayerForm
from dualpipe.hf.structure import check_structure
from dualpipe.nn.init import name_seed
from dualpipe.parallel.experts.dispatcher import is_interface_experts, shard_experts, stacked_parameters
from dualpipe.runtime.dtypes import dtype_of

READS_SHARDS = hasattr(core_model_loading, "DtensorShardOperation")  # older versions of transformers read all experts


@dataclass(frozen=True)
class ModelSource:
    """Origin of a model's weights: a checkpoint at `path`, or, without one, `config` and `seed`.

    dtype: of the parameters; None: that of the checkpoint or of the configuration.
    """

    config: PreTrainedConfig
    path: str | Path | None
    dtype: torch.dtype | None
    seed: int

    @classmethod
    def of(cls, source: str | Path | PreTrainedConfig, dtype: torch.dtype | None, seed: int) -> ModelSource:
        """Return the source that `source` names, with a configuration of its own."""
        if isinstance(source, PreTrainedConfig):
            return cls(copy.deepcopy(source), None, dtype, seed)
        return cls(AutoConfig.from_pretrained(source), source, dtype, seed)


def build_stages(
    source: ModelSource, num_stages: int, mine: Sequence[int], *, experts: str, layers_per_stage: Sequence[int],
    expert_ranks: DeviceMesh | None,
) -> list[CausalLMStage]:
    """Return stages with their weights, on the CPU; of stacked experts those of this rank of `expert_ranks`.

    experts: the implementation of the experts. Raises ValueError for a model that cannot be cut, for experts that
    cannot be divided among the ranks, and for a checkpoint that lacks some of a stage's weights.
    """
    whole = _on_meta(source.config, experts)
    model_class = type(whole)
    config = whole.config  # of the language model alone, where the checkpoint has more
    quantization = getattr(source.config, "quantization_config", None)
    if quantization is not None:
        config.quantization_config = quantization
    _check_division(whole, expert_ranks)
    cuts = stage_layers(whole, num_stages, layers_per_stage)
    form = check_structure(whole, cuts)
    stages = []
    for number in mine:
        is_first = number == 0
        is_last = number == num_stages - 1
        cut_class = _cut_class(
            model_class, cuts[number], is_first=is_first, is_last=is_last,
            expert_ranks=expert_ranks if source.path is not None and READS_SHARDS else None)
        if source.path is None:
            causal_lm = _initialise(cut_class, config, source)
        else:
            causal_lm = _read(cut_class, config, source, cuts[number], has_ends=is_first or is_last)
        _keep_local_experts(causal_lm, expert_ranks)
        stages.append(stage_of(causal_lm, is_first=is_first, is_last=is_last, form=form).train())
    _tie_ends(stages)
    return stages


def stage_of(causal_lm: Any, *, is_first: bool, is_last: bool, form: LayerForm) -> CausalLMStage:
    """Return the stage of a model that `cut_model` has cut and that has its weights, or is on the meta device."""
    if is_last and not is_first and is_tied(causal_lm.config):
        drop_embedding(causal_lm)
    return CausalLMStage(causal_lm, is_first=is_first, is_last=is_last, form=form)


def _on_meta(config: PreTrainedConfig, experts: str) -> Any:
    """Return the whole model, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, experts_implementation=experts)


def _check_division(causal_lm: nn.Module, expert_ranks: DeviceMesh | None) -> None:
    """Raise ValueError for experts that cannot be divided among the expert-parallel ranks."""
    num_ranks = 1 if expert_ranks is None else expert_ranks.size()
    modules: list[Any] = [module for module in causal_lm.modules() if is_interface_experts(module)]
    for module in modules:
        if module.num_experts % num_ranks:
            raise ValueError(f"{module.num_experts} experts cannot be divided evenly among {num_ranks} expert-parallel "
                             "ranks; build the mesh with an ep that divides them")


def _cut_class(
    model_class: type[Any], layers: range, *, is_first: bool, is_last: bool, expert_ranks: DeviceMesh | None
) -> type[Any]:
    """Return the class of a model that is cut as soon as it is built, so that a loader sees nothing else of it.

    expert_ranks: the ranks that the experts are sharded over, before a loader reads them; None: it reads all.
    """

    def build(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        cut_model(self, layers, is_first=is_first, is_last=is_last)
        if expert_ranks is not None:
            shard_experts(self, _reading_mesh(expert_ranks))

    members = {
        "__init__": build,
        "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # the weights of other stages
        "should_save_on_this_rank": _saves_on_any_rank,
    }
    return type(model_class.__name__, (model_class,), members)


def _saves_on_any_rank(causal_lm: Any, is_main_process: bool) -> bool:
    """Stand for the method of transformers that saves on the first rank alone: every rank has a part of the model."""
    return is_main_process


def _reading_mesh(expert_ranks: DeviceMesh) -> DeviceMesh:
    """Return the same ranks as a mesh of CPUs, where checkpoints are read; nothing is sent over it."""
    return DeviceMesh.from_group(expert_ranks.get_group(), "cpu", mesh_dim_names=("ep",))


def _keep_local_experts(causal_lm: nn.Module, expert_ranks: DeviceMesh | None) -> None:
    """Make the stacked parameters of experts plain tensors of this rank's experts."""
    if expert_ranks is None or expert_ranks.size() == 1:
        return
    for module in causal_lm.modules():
        for name, parameter in stacked_parameters(module).items():
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach()
            else:
                local = parameter.detach().chunk(expert_ranks.size())[expert_ranks.get_local_rank()].clone()
            setattr(module, name, nn.Parameter(local, requires_grad=parameter.requires_grad))


def _read(cut_class: type[Any], config: PreTrainedConfig, source: ModelSource, layers: range, *, has_ends: bool) -> Any:
    """Return a cut model with its weights of a checkpoint; ValueError where it lacks some."""
    options: dict[str, Any] = {"dtype": source.dtype or "auto"}
    path = source.path
    assert path is not None, "the source is a checkpoint"
    checkpoint: str | Path | None = path
    if is_quantized(config):
        dtype = source.dtype or torch.bfloat16
        options["dtype"] = dtype
        options["state_dict"] = read_dequantized(path, config, layers, has_ends=has_ends, dtype=dtype)
        checkpoint = None
        config = copy.deepcopy(config)
        del config.quantization_config
    causal_lm, report = cut_class.from_pretrained(
        checkpoint, config=config, output_loading_info=True, experts_implementation=config._experts_implementation,
        **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"the checkpoint {str(path)!r} lacks {len(missing)} of a stage's weights, such as "
                         f"{missing[0]!r}")
    return causal_lm


def _initialise(cut_class: type[Any], config: PreTrainedConfig, source: ModelSource) -> Any:
    """Return a cut model with weights as transformers initialises them, each module by the seed and its name."""
    config_dtype = config.get_text_config().dtype
    if isinstance(config_dtype, str):
        config_dtype = dtype_of(config_dtype)
    dtype = source.dtype or config_dtype or torch.get_default_dtype()
    with torch.device("meta"):
        causal_lm = cut_class(config)
    causal_lm.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, module in causal_lm.named_modules():
            torch.manual_seed(name_seed(source.seed, name))
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
