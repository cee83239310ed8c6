"""Build the stages of a causal LM of transformers: on the meta device first, then cut, then filled with weights.

transformers' own loader fills a stage. It reads only the stage's weights from the checkpoint, and converts them as for
the whole model. It reads only the experts of this rank, because their parameters are DTensors during loading.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from dualpipe.checkpoint.hub.files import INDEX, SINGLE, read_headers
from dualpipe.hf.cut import check_expert_division, cut_model, drop_ends, stage_layers
from dualpipe.hf.quantized_source import is_quantized, read_dequantized
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.stand_ins import LayerForm
from dualpipe.hf.structure import check_structure
from dualpipe.nn.init import name_seed
from dualpipe.parallel.experts.dispatcher import shard_experts, stacked_parameters
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.ranks.process_groups import is_first_rank

# Older versions of transformers read all experts on every rank.
READS_SHARDS = hasattr(core_model_loading, "DtensorShardOperation")


@contextmanager
def progress_bars_on_rank_0() -> Iterator[None]:
    """Turn the progress bars of transformers off on all ranks but the first, which would show one for every stage."""
    if is_first_rank() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class ModelSource:
    """Source of a model's weights: the checkpoint at `path`, or random initialization by `config` and `seed`.

    path: None: initialize the weights.
    dtype: dtype of the parameters; None: the dtype of the checkpoint, or of the configuration.
    """

    config: PreTrainedConfig
    path: str | Path | None
    dtype: torch.dtype | None
    seed: int

    @classmethod
    def of(cls, source: str | Path | PreTrainedConfig, dtype: torch.dtype | None, seed: int) -> ModelSource:
        """Create a source from a path, a name on the hub, or a configuration, which is copied."""
        if isinstance(source, PreTrainedConfig):
            return cls(for_stages(copy.deepcopy(source)), None, dtype, seed)
        return cls(for_stages(AutoConfig.from_pretrained(source)), source, dtype, seed)


def for_stages(config: PreTrainedConfig) -> PreTrainedConfig:
    """Reset options of a configuration that add results to a forward or recompute layers, in place; return it.

    Training tools leave them in config.json. The losses and `recompute` of this library take their place.
    """
    for part in (config, config.get_text_config()):
        part.return_dict = True
        for name in ("output_attentions", "output_hidden_states", "output_router_logits", "gradient_checkpointing"):
            if getattr(part, name, False):
                setattr(part, name, False)
    return config


def build_stages(
    source: ModelSource, num_stages: int, mine: Sequence[int], *, experts: str, layers_per_stage: Sequence[int],
    expert_ranks: DeviceMesh | None,
) -> list[CausalLMStage]:
    """Build the stages `mine` with their weights, on the CPU.

    experts: implementation of the experts.
    expert_ranks: expert-parallel ranks; stacked expert parameters hold only the experts of this rank.

    Raises ValueError if the model cannot be cut, if the experts cannot be divided evenly among the ranks, or if the
    checkpoint lacks weights of a stage or has a damaged file.
    """
    if source.path is not None and any(os.path.lexists(Path(source.path, name)) for name in (SINGLE, INDEX)):
        read_headers(source.path)  # names a file that is missing or damaged; transformers raises errors of many kinds
    whole_model = build_on_meta(source.config, experts)
    model_class = type(whole_model)
    config = whole_model.config  # only the language model's part, if the source has more
    quantization = getattr(source.config, "quantization_config", None)
    if quantization is not None:
        config.quantization_config = quantization
    check_expert_division(whole_model, 1 if expert_ranks is None else expert_ranks.size())
    cuts = stage_layers(whole_model, num_stages, layers_per_stage)
    form = check_structure(whole_model, cuts)
    loading_ranks = expert_ranks if source.path is not None and READS_SHARDS else None
    stages = []
    for number in mine:
        is_first = number == 0
        is_last = number == num_stages - 1
        cut_class = _make_cut_class(
            model_class, cuts[number], is_first=is_first, is_last=is_last, expert_ranks=loading_ranks)
        if source.path is None:
            causal_lm = _initialize(cut_class, config, source)
        else:
            causal_lm = _load(cut_class, config, source, cuts[number], has_ends=is_first or is_last)
        _localize_experts(causal_lm, expert_ranks)
        stages.append(stage_of(causal_lm, is_first=is_first, is_last=is_last, form=form).train())
    _tie_ends(stages)
    return stages


def stage_of(causal_lm: Any, *, is_first: bool, is_last: bool, form: LayerForm) -> CausalLMStage:
    """Wrap a model that `cut_model` has cut in a stage. The model has its weights already, or is on the meta device."""
    drop_ends(causal_lm, is_first=is_first, is_last=is_last)
    return CausalLMStage(causal_lm, is_first=is_first, is_last=is_last, form=form)


def build_on_meta(config: PreTrainedConfig, experts: str) -> Any:
    """Build the whole model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, experts_implementation=experts)


def _make_cut_class(
    model_class: type[Any], layers: range, *, is_first: bool, is_last: bool, expert_ranks: DeviceMesh | None
) -> type[Any]:
    """Make a subclass of `model_class` whose constructor cuts the model, so that a loader sees only the stage.

    expert_ranks: the constructor shards the experts over these ranks, so that a loader reads only those of this rank;
        None: the loader reads all experts.
    """

    def init_and_cut(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        cut_model(self, layers, is_first=is_first, is_last=is_last)
        if expert_ranks is not None:
            shard_experts(self, _cpu_mesh(expert_ranks))

    members = {
        "__init__": init_and_cut,
        "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # the weights of other stages
        "should_save_on_this_rank": _should_save_on_any_rank,
    }
    if not (is_first and is_last):
        members["resize_token_embeddings"] = _refuse_to_resize
    return type(model_class.__name__, (model_class,), members)


def _should_save_on_any_rank(causal_lm: Any, is_main_process: bool) -> bool:
    """Override the method of transformers that saves on the first rank only: every rank has a part of the model."""
    return is_main_process


def _refuse_to_resize(causal_lm: Any, *args: Any, **kwargs: Any) -> None:
    """Override the method of transformers that resizes the embedding and the head, which are in two stages."""
    raise ValueError("a stage has the embedding or the head of its model, not both: resize the whole model "
                     "(AutoModelForCausalLM), save it, and load the stages from there")


def _cpu_mesh(expert_ranks: DeviceMesh) -> DeviceMesh:
    """Return a CPU mesh of the same ranks, because checkpoints are read on the CPU. No message is sent over it."""
    return DeviceMesh.from_group(expert_ranks.get_group(), "cpu", mesh_dim_names=("ep",))


def _localize_experts(causal_lm: nn.Module, expert_ranks: DeviceMesh | None) -> None:
    """Replace the stacked expert parameters by plain tensors of this rank's experts."""
    if expert_ranks is None or expert_ranks.size() == 1:
        return
    for module in causal_lm.modules():
        for name, parameter in stacked_parameters(module).items():
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach()
            else:
                local = parameter.detach().chunk(expert_ranks.size())[expert_ranks.get_local_rank()].clone()
            setattr(module, name, nn.Parameter(local, requires_grad=parameter.requires_grad))


def _load(cut_class: type[Any], config: PreTrainedConfig, source: ModelSource, layers: range, *, has_ends: bool) -> Any:
    """Build a cut model with weights from the checkpoint of `source`.

    has_ends: the stage has tensors outside of layers, that is, an embedding or a head.

    Raises ValueError if the checkpoint lacks weights of the stage.
    """
    options: dict[str, Any] = {"dtype": source.dtype or "auto"}
    path = source.path
    assert path is not None, "the source must be a checkpoint"
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
                         f"{missing[0]!r}; give a complete checkpoint of a {cut_class.__name__}")
    if has_ends and not causal_lm.all_tied_weights_keys:
        causal_lm.config.tie_word_embeddings = False  # the files have a head that differs from the embedding
    return causal_lm


def _initialize(cut_class: type[Any], config: PreTrainedConfig, source: ModelSource) -> Any:
    """Build a cut model with weights initialized by transformers.

    Each module is seeded by the source's seed and the module's name, so weights do not depend on the cut.
    """
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
        for parameter in causal_lm.parameters():  # buffers, such as rotary frequencies, keep their dtype
            parameter.data = parameter.data.to(dtype)
    causal_lm.tie_weights(recompute_mapping=False)
    return causal_lm


def _tie_ends(stages: Sequence[CausalLMStage]) -> None:
    """Tie the head's weight to the embedding's if this rank has the first and the last stage."""
    first = next((stage for stage in stages if stage.is_first), None)
    last = next((stage for stage in stages if stage.is_last), None)
    if first is not None and last is not None and first is not last and first.is_tied:
        last.causal_lm.lm_head.weight = first.base.embed_tokens.weight
