"""LoRA by peft: its configuration read, its targets found by peft itself, its files read and written.

    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"],
                             target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    stages = load_stages("Qwen/Qwen3-30B-A3B", 2 * P, mine=(r, 2 * P - 1 - r), mesh=mesh, lora=config)
    ... train ...
    save_adapter(stages, "out/adapter", config, mesh=mesh)       peft.PeftModel.from_pretrained reads it

peft adapts the whole model on the meta device, so that names, patterns, ranks and scalings mean exactly what they mean
to it. Every layer that it has adapted there gets an adapter of `dualpipe.nn.lora` in the stage that has the layer.
Adapters of experts run as grouped GEMMs, where peft merges the weights of all experts in every forward.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.checkpoint.hub.save import new_directory
from dualpipe.models import HubConfig
from dualpipe.nn import GroupedLinear, Linear, defer_weight_grads
from dualpipe.nn.init import local_part
from dualpipe.nn.lora import (
    NAME,
    STACKED,
    Adapter,
    AdapterForm,
    GroupedAdapter,
    InitialValues,
    LinearAdapter,
    adapt_matrix,
    adapter_places,
    freeze_all_but_adapters,
    full_factors,
    unpack_factors,
)
from dualpipe.parallel.experts.dispatcher import is_interface_experts, stacked_parameters
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.files import sync
from dualpipe.runtime.ranks.rank_sync import RankSync

try:
    import peft
    from peft.tuners import lora as peft_lora
except ImportError as error:
    raise ValueError('LoRA needs the package peft: pip install "dualpipe[hf]"') from error

WEIGHTS = "adapter_model.safetensors"  # peft's name of the file with the factors
_PREFIX = "base_model.model."  # of names in that file
_INITIAL: dict[Any, InitialValues] = {True: "zero", "gaussian": "gaussian", False: "random"}
# Fields of a LoraConfig that mean here what they mean to peft; any other field must have its default.
_FIELDS = frozenset({
    "r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights", "task_type", "peft_type",
    "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "megatron_core",
    "runtime_config", "qalora_group_size",
})


class AdapterTarget(NamedTuple):
    """A layer of the whole model that peft adapts.

    Attributes:
        key: name of peft's layer, and of the factors in its files, such as "model.layers.0.mlp.experts.base_layer".
        module: name of the adapted module in the model without adapters.
        parameter: name of the adapted parameter there.
        form: settings of the adapter.
    """

    key: str
    module: str
    parameter: str
    form: AdapterForm


class AdapterPlan(NamedTuple):
    """The adapters of a whole model.

    Attributes:
        config: the configuration with the targets that peft has resolved; an adapter's files hold it.
        targets: the adapted layers.
    """

    config: peft.LoraConfig
    targets: tuple[AdapterTarget, ...]


def plan_adapters(config: peft.LoraConfig, whole: nn.Module) -> AdapterPlan:
    """Let peft adapt the whole model, on the meta device, and return what it has adapted. Changes `whole`.

    Raises ValueError for a configuration that peft refuses, or that this library does not run.
    """
    _check_config(config)
    config = copy.deepcopy(config)
    peft.inject_adapter_in_model(config, whole, low_cpu_mem_usage=True)
    targets: list[AdapterTarget] = []
    for key, layer in whole.named_modules():
        if isinstance(layer, peft_lora.LoraLayer):
            targets.append(_target_of(key, layer, config))
    return AdapterPlan(config, tuple(targets))


def _check_config(config: Any) -> None:
    """Raise ValueError for a configuration of another method than plain LoRA."""
    if not isinstance(config, peft.LoraConfig) or config.peft_type != peft.PeftType.LORA:
        raise ValueError(f"got a {type(config).__name__}, but adapters are LoRA alone; give a peft.LoraConfig")
    default = peft.LoraConfig()
    changed = [field.name for field in dataclasses.fields(config)
               if field.name not in _FIELDS and getattr(config, field.name) != getattr(default, field.name)]
    if changed:
        settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in changed)
        raise ValueError(f"LoraConfig has {settings}, which adapters in a pipeline do not have; leave it out")
    if config.init_lora_weights not in _INITIAL:
        raise ValueError(f"LoraConfig has init_lora_weights={config.init_lora_weights!r}, which reads or changes the "
                         "base's weights; give True, False or 'gaussian'")


def _target_of(key: str, layer: Any, config: peft.LoraConfig) -> AdapterTarget:
    """Return the target that a layer of peft stands for. Raises ValueError for a layer that is not linear."""
    kind = type(layer)
    if kind not in (peft_lora.Linear, peft_lora.ParamWrapper):
        base = type(layer.get_base_layer()).__name__
        raise ValueError(f"{key} is a {base}, and adapters are for linear layers, stacked experts and routers; leave "
                         "it out of target_modules, or name it in exclude_modules")
    (rank,) = layer.r.values()
    (scaling,) = layer.scaling.values()
    form = AdapterForm(rank, scaling, config.lora_dropout, _INITIAL[config.init_lora_weights])
    module = ".".join(part for part in key.split(".") if part != "base_layer")
    return AdapterTarget(key, module, getattr(layer, "parameter_name", None) or "weight", form)


def adapt_stages(stages: Sequence[nn.Module], plan: AdapterPlan) -> None:
    """Give the stages of this rank their adapters, and freeze everything else.

    Args:
        stages: from `load_stages` or `build_stages`, before they are sharded. Experts may be those of this rank alone.
            They may be on the meta device, and then need values for their adapters too.
        plan: the adapters of the whole model.

    Raises ValueError for a target that cannot be adapted.
    """
    for stage in stages:
        config = getattr(stage, "config", None)
        names = _native_names(stage, config) if isinstance(config, HubConfig) else None
        for target in plan.targets:
            if names is None:
                module = _find_module(stage, target.module)
                if module is not None:
                    _adapt(module, target.parameter, target)
            else:
                path = names.get(_hub_name(target))
                if path is not None:
                    _adapt(stage.get_submodule(path), "weight", target)
        freeze_all_but_adapters(stage)


def _hub_name(target: AdapterTarget) -> str:
    """Return the name of the adapted weight in the files of a checkpoint."""
    return f"{target.module}.{target.parameter}"


def check_targets(plan: AdapterPlan, stages: Sequence[nn.Module]) -> None:
    """Raise ValueError if a target is in none of the stages of this library's model, given as all of its stages."""
    known: set[str] = set()
    for stage in stages:
        known |= _native_names(stage, cast(HubConfig, stage.config)).keys()
    missing = [target for target in plan.targets if _hub_name(target) not in known]
    if missing:
        raise ValueError(f"{_hub_name(missing[0])} is no layer of this library's model; leave it out of the targets, "
                         'or set model.backend = "transformers"')


def _native_names(stage: nn.Module, config: HubConfig) -> dict[str, str]:
    """Return the path in a stage of this library's models of every linear layer, by its weight's name on the hub."""
    paths: dict[str, str] = {}
    for path, module in stage.named_modules():
        if not isinstance(module, Linear | GroupedLinear):
            continue
        for parts in config.hub_parts(f"{path}.weight", tuple(module.weight.shape)):
            if len(parts) == 1:  # as transformers holds it in memory: experts are stacked
                paths[parts[0].name] = path
    if "lm_head" in stage._modules:
        paths["lm_head.weight"] = "lm_head"  # also if it is tied to the embedding
    return paths


def _find_module(stage: nn.Module, path: str) -> nn.Module | None:
    """Return a module of a stage by its path in the whole model; None if another stage has it."""
    module: Any = stage
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return cast("nn.Module | None", module)


def _adapt(module: nn.Module, parameter: str, target: AdapterTarget) -> None:
    """Give a module an adapter of one of its parameters."""
    weight = module._parameters.get(parameter)
    if weight is None:
        raise ValueError(f"{_hub_name(target)} cannot be adapted: a {type(module).__name__} computes it from others")
    form = target.form
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    adapter: Adapter
    if isinstance(module, GroupedLinear):
        adapter = GroupedAdapter(weight.shape[0], module.in_features, module.out_features, form, **options)
        module.add_module(NAME, adapter)
    elif parameter in stacked_parameters(module):
        inputs, outputs = (1, 2) if cast(Any, module).is_transposed else (2, 1)
        adapter = GroupedAdapter(weight.shape[0], weight.shape[inputs], weight.shape[outputs], form, **options)
        if STACKED not in module._modules:
            module.add_module(STACKED, nn.ModuleDict())
        cast(nn.ModuleDict, module._modules[STACKED])[parameter] = adapter
    elif isinstance(defer_weight_grads(module), Linear) and parameter == "weight":
        adapter = LinearAdapter(weight.shape[1], weight.shape[0], form, **options)
        module.add_module(NAME, adapter)
    elif weight.dim() == 2 and not isinstance(module, nn.Linear | nn.Embedding):
        adapt_matrix(module, parameter, form)
        adapter = cast(Adapter, module._modules[NAME])
    else:
        raise ValueError(f"{_hub_name(target)} cannot be adapted: a {type(module).__name__} with a parameter of shape "
                         f"{tuple(weight.shape)} is no linear layer, router or stack of experts; leave it out")
    adapter.key = target.key


def adapts_experts(stages: Sequence[nn.Module]) -> bool:
    """Return True if experts of transformers have adapters, which only this library's kernels run."""
    return any(is_interface_experts(module) and STACKED in module._modules
               for stage in stages for module in stage.modules())


def save_adapter(
    stages: Sequence[nn.Module], folder: str | Path, config: peft.LoraConfig, *, mesh: DeviceMesh | None = None,
    base: str | Path | None = None, metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the adapters of all ranks' stages as `peft.PeftModel.from_pretrained` reads them. Collective over the mesh.

    The folder appears when it is complete.

    Args:
        stages: stages of this rank.
        folder: the same on all ranks, new or empty.
        config: the configuration that the adapters were made from; `AdapterPlan.config` has the targets as peft
            resolved them.
        mesh: the mesh of the stages.
        base: path or name of the base model, for `base_model_name_or_path`; None: that of `config`.
        metadata: texts for the header of the file.

    Raises ValueError, on all ranks, if the folder exists and is not empty, or if there are no adapters.
    """
    layout = Mesh.of(mesh)
    ranks = RankSync.of_mesh(mesh)
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root stays unsharded after a forward
        for place in adapter_places(stage):
            a, b = full_factors(place.adapter)
            tensors[f"{_PREFIX}{place.adapter.key}.lora_A.weight"] = a
            tensors[f"{_PREFIX}{place.adapter.key}.lora_B.weight"] = b
    with new_directory(folder, ranks) as hidden:

        def write() -> None:
            if layout.replica == 0:
                save_file(tensors, hidden / f"part-{layout.rank('pp'):05}.safetensors")

        def join() -> None:
            parts = sorted(hidden.glob("part-*.safetensors"))
            if len(parts) != layout.size("pp"):
                raise ValueError(f"{str(folder)!r} has parts of {len(parts)} pipeline ranks, expected "
                                 f"{layout.size('pp')}; save to a folder that all ranks share")
            joined = {name: tensor for part in parts for name, tensor in load_file(part).items()}
            if not joined:
                raise ValueError("the stages have no adapters; give load_stages a LoraConfig")
            save_file(joined, hidden / WEIGHTS, {"format": "pt", **(metadata or {})})
            saved = copy.deepcopy(config)
            saved.inference_mode = True
            saved.base_model_name_or_path = saved.base_model_name_or_path if base is None else str(base)
            saved.save_pretrained(str(hidden))
            for part in parts:
                part.unlink()
            for file in hidden.iterdir():
                sync(file)

        ranks.agree(write)
        ranks.first(join)


def load_adapter(stages: Sequence[nn.Module], folder: str | Path) -> None:
    """Fill the adapters of stages, sharded or not, with those that peft or `save_adapter` wrote to a folder.

    Raises ValueError like `read_adapter`.
    """
    values = read_adapter(stages, folder)
    with torch.no_grad():
        for stage in stages:
            for name, param in stage.named_parameters():
                if name in values:
                    local, part = local_part(param)
                    local.copy_(values[name][part])


def read_adapter(stages: Sequence[nn.Module], folder: str | Path) -> dict[str, Tensor]:
    """Return the whole factors of the stages' adapters by name, from the folder that peft or `save_adapter` wrote.

    Raises ValueError if the file lacks an adapter of a stage, or has one of another shape.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; give the folder of an adapter that peft has written")
    tensors = load_file(path)
    values: dict[str, Tensor] = {}
    for stage in stages:
        for place in adapter_places(stage):
            name = f"{_PREFIX}{place.adapter.key}"
            factors = [tensors.get(f"{name}.{factor}.weight") for factor in ("lora_A", "lora_B")]
            a, b = factors
            if a is None or b is None:
                raise ValueError(f"{str(path)!r} lacks the adapter of {place.adapter.key}; give the adapter of this "
                                 "model, with the same targets")
            values |= unpack_factors(place, a, b)
    return values
