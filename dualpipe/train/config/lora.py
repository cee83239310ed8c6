"""The adapters of a run: the table [lora] as a configuration of peft, and the adapted model on the meta device."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dualpipe.models import HubConfig
from dualpipe.models.stages import meta_stages
from dualpipe.train.config.schema import NO_ADAPTERS, Config, LoRAConfig

if TYPE_CHECKING:
    from dualpipe.hf.lora import AdapterPlan
    from dualpipe.hf.model import TransformersModel

ADAPTER_CONFIG = "adapter_config.json"  # peft's name of the file with a LoraConfig


def check_lora(config: Config) -> None:
    """Raise ValueError for settings that adapters do not run with, and if a package is missing."""
    if not config.lora.is_enabled:
        if config.lora != NO_ADAPTERS:
            raise ValueError("lora.rank = 0, but other fields of [lora] are set; give a rank and targets, or none")
        if config.export.merged:
            raise ValueError("export.merged = True, but the run trains no adapters; set lora.rank, or leave it out")
        return
    if find_spec("peft") is None or find_spec("transformers") is None:
        raise ValueError('[lora] needs the packages peft and transformers; `pip install "dualpipe[hf]"`')
    frozen = "the base is frozen"
    unsupported = {  # by field: the value, and the reason
        "optimizer.qk_clip": (config.optimizer.qk_clip, f"it scales weights, and {frozen}"),
        "router.bias_update_rate": (config.router.bias_update_rate, f"it changes a buffer, and {frozen}"),
        "mtp.weight": (config.mtp.weight, "peft has no layers for multi-token prediction"),
        "dtypes.fp8_dispatch": (config.dtypes.fp8_dispatch, "adapters read tokens that are not quantized"),
        "optimizer.layer_decay": (config.optimizer.layer_decay != 1, "adapters have one learning rate"),
        "export.quantized": (config.export.quantized and config.export.merged,
                             "merged weights are not written in blocks with scales"),
    }
    for name, (value, reason) in unsupported.items():
        if value:
            raise ValueError(f"{name} = {value!r} with [lora]: {reason}; leave it out")


@lru_cache(maxsize=16)
def adapter_plan(model: HubConfig | TransformersModel, lora: LoRAConfig) -> AdapterPlan:
    """Return the adapters of a model, which peft finds.

    Raises ValueError for settings that peft or `dualpipe.hf.lora` refuses, or a layer that the model does not have.
    """
    from dualpipe.hf.lora import check_targets, plan_adapters
    from dualpipe.hf.model import TransformersModel, build_on_meta

    try:
        whole = build_on_meta(TransformersModel.from_dict(model.to_dict()) if isinstance(model, HubConfig) else model)
        plan = plan_adapters(_peft_config(lora, whole), whole)
        if isinstance(model, HubConfig):
            check_targets(plan, meta_stages(model))
    except ValueError as error:
        raise ValueError(f"[lora]: {str(error).splitlines()[0]}") from error
    return plan


def _peft_config(lora: LoRAConfig, whole: nn.Module) -> Any:
    """Return the configuration of peft that the table describes, for a model."""
    import peft

    if lora.config or lora.adapter:
        return _read_peft_config(Path(lora.config or lora.adapter))
    names = [name for text in lora.targets for name in text.replace(" ", "").split(",") if name]
    if names == ["all-linear"]:
        modules: Any = "all-linear"
        parameters = []
    else:
        module_names = [name for name, _ in whole.named_modules()]
        is_module = {name: any(f".{full}".endswith(f".{name}") for full in module_names) for name in names}
        parameter_names = [name for name, _ in whole.named_parameters()]
        parameters = [name for name in names if not is_module[name]
                      and any(f".{full}".endswith(f".{name}") for full in parameter_names)]
        modules = [name for name in names if name not in parameters]
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha or 2 * lora.rank,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=lora.dropout, use_rslora=lora.rslora, target_modules=modules,
        target_parameters=parameters or None, task_type="CAUSAL_LM")


def _read_peft_config(path: Path) -> Any:
    """Return the configuration in a file of peft, or in the directory of an adapter."""
    import peft

    file = path / ADAPTER_CONFIG if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}; give what peft has written") from error
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{str(file)!r} has peft_type {kind!r}, expected 'LORA'; give the adapter of that method")
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    unknown = sorted(name for name, value in content.items() if name not in known and value)
    if unknown:
        raise ValueError(f"{str(file)!r} has {', '.join(unknown)}, which peft {peft.__version__} does not know; leave "
                         "them out, or install the version that wrote it")
    settings = {name: value for name, value in content.items() if name in known and name != "peft_type"}
    return peft.LoraConfig(**settings | {"inference_mode": False, "runtime_config": peft.LoraConfig().runtime_config})


def adapted(
    stages: tuple[nn.Module, ...], model: HubConfig | TransformersModel, lora: LoRAConfig
) -> tuple[nn.Module, ...]:
    """Return copies of stages on the meta device, with the adapters of [lora]."""
    from dualpipe.hf.lora import adapt_stages

    copies = deepcopy(stages)
    adapt_stages(copies, adapter_plan(model, lora))
    return copies
