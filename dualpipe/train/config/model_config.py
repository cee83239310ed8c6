"""Read the model that a configuration names: one of this library's families, or one of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch import nn

from dualpipe.kernels.formats import FORMATS
from dualpipe.models import FAMILIES, HubConfig, UnsupportedModel, config_from_dict, flops, read_hub_file, read_hub_json
from dualpipe.models.stages import meta_stages
from dualpipe.train.config.lora import adapted, check_lora
from dualpipe.train.config.schema import NO_ADAPTERS, Config, LoRAConfig

if TYPE_CHECKING:
    from dualpipe.hf.model import TransformersModel

Backend = Literal["auto", "dualpipe", "transformers"]
TrainedModel: TypeAlias = "HubConfig | TransformersModel"


class ModelFile(NamedTuple):
    """The model that a config.json describes.

    positions: maximum sequence length of the model, None if unknown.
    """

    config: TrainedModel
    positions: int | None


def read_own_model_config(config: Config, command: str) -> HubConfig:
    """Return the model of `read_model`, which must be one of this library's families.

    Args:
        command: the name of the caller in the error message, such as "dualpipe plan".

    Raises:
        ValueError: as `read_model` does, or for a model that transformers implements.
    """
    model = read_model(config).config
    if not isinstance(model, HubConfig):
        raise ValueError(f"{command} is for this library's own models ({', '.join(FAMILIES)}); {model.model_type} is "
                         "trained by transformers' implementation")
    return model


def read_model(config: Config) -> ModelFile:
    """Return the model that a configuration names, with MTP layers if mtp.weight is not 0.

    Raises:
        ValueError: the file is missing or not JSON, neither this library nor transformers has the model, the model has
            no MTP layers to train, or a setting is not supported for a model of transformers.
    """
    try:
        model = read_model_file(config.model_path, config.model.backend)
        if config.mtp.weight and isinstance(model.config, HubConfig):
            model = model._replace(config=model.config.with_mtp())
    except ValueError as error:
        raise ValueError(f"{'model.config' if config.model.config else 'init.from_hf'}: {error}") from error
    depth = model.config.mtp_depth
    length = config.train.sequence_length
    if length <= depth:
        raise ValueError(f"train.sequence_length = {length}: multi-token prediction layer {depth} predicts the token "
                         f"{depth + 1} positions ahead, which no token has; give at least {depth + 1}")
    if not isinstance(model.config, HubConfig):
        check_settings(config, model.config)
    check_lora(config)
    return model


def read_model_file(path: str, backend: Backend) -> ModelFile:
    """Return the model of a config.json, or of the directory that holds one.

    Args:
        path: the file or directory.
        backend: the implementation. "auto": this library's if it has the family, else transformers'.

    Raises:
        ValueError: the chosen implementation does not support the model, or with "auto" neither of the two does.
    """
    unsupported = ""
    if backend != "transformers":
        try:
            return ModelFile(*read_hub_file(path))
        except UnsupportedModel as error:
            if backend == "dualpipe":
                raise
            unsupported = str(error)
    file, hub = read_hub_json(path)
    if unsupported and _is_library_family(hub):
        raise ValueError(f'{unsupported}; model.backend = "transformers" trains the implementation of transformers')
    try:
        model = _transformers_model(hub)
    except ValueError as error:
        raise ValueError(f"{unsupported}; {error}" if unsupported else f"{file}: {error}") from error
    return ModelFile(model, model.positions)


def model_from_dict(hub: Mapping[str, Any], backend: Backend) -> TrainedModel:
    """Return the model that the content of a config.json describes.

    Raises:
        ValueError: as `read_model_file` does.
    """
    if backend != "transformers":
        try:
            return config_from_dict(hub)
        except UnsupportedModel:
            if backend == "dualpipe" or _is_library_family(hub):
                raise
    return _transformers_model(hub)


def _is_library_family(hub: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes a family of this library."""
    return hub.get("model_type") in list(FAMILIES)  # a list, as the value may be unhashable


def _transformers_model(hub: Mapping[str, Any]) -> TransformersModel:
    """Return transformers' model for a config.json. Raises ValueError if it is unknown or not installed."""
    if find_spec("transformers") is None:
        raise ValueError('the implementation of transformers would be trained, but transformers is not installed; '
                         '`pip install "dualpipe[hf]"`')
    from dualpipe.hf.model import TransformersModel

    return TransformersModel.from_dict(hub)


def check_settings(config: Config, model: TransformersModel) -> None:
    """Check that a configuration has only settings that are supported for a model of transformers.

    Raises:
        ValueError: a setting is not supported; the message has one line and names the first such setting.
    """
    _check_unsupported_fields(config, model)
    try:
        model.check_expert_division(config.parallel.ep)
    except ValueError as error:
        raise ValueError(f"parallel.ep = {config.parallel.ep}: {error}") from error
    if config.data.separate_documents and model.mixes_documents:
        raise ValueError(f"data.separate_documents = True: {_trained_by(model)}, and some of its layers see from one "
                         "document into the next; set it to False")
    if config.model.config and config.init.from_hf:
        _, checkpoint_config = read_hub_json(config.init.from_hf)
        if dict(checkpoint_config) != model.to_dict():
            raise ValueError(f"model.config = {config.model.config!r} differs from the config.json in init.from_hf = "
                             f"{config.init.from_hf!r}, which describes the weights; leave out model.config")


def _trained_by(model: TransformersModel) -> str:
    """Return the part of an error message that names the implementation."""
    return f"{model.model_type} is trained by transformers' implementation"


def _check_unsupported_fields(config: Config, model: TransformersModel) -> None:
    """Raise ValueError if a field that models of transformers do not support is not at its neutral value."""
    dtypes = config.dtypes
    layer_parts = [rule for rule in config.memory.recompute if rule.partition(":")[0] not in ("layer", "none")]
    formats = [str(rule) for rule in dtypes.rules if rule.gather or rule.storage in FORMATS]
    no_routers = "it needs this library's routers"
    no_formats = "its weights are not quantized"
    supported = {  # by field: the value, the only supported value, the reason
        "parallel.cp": (config.parallel.cp, 1, "its attention does not support sharded sequences"),
        "mtp.weight": (config.mtp.weight, 0, "transformers has no layers for multi-token prediction"),
        "optimizer.qk_clip": (config.optimizer.qk_clip, 0, "it needs this library's attention"),
        "model.expert_gemm": (config.model.expert_gemm, "dualpipe", "its experts_implementation chooses the GEMMs"),
        "memory.recompute": (layer_parts, [], "its layers are recomputed as a whole: layer, or layer:0-7 for some"),
        "train.compile": (config.train.compile, False, "its layers are not compiled"),
        "dtypes.rules": (formats, [], no_formats),
        "dtypes.gemm_precision": (dtypes.gemm_precision, "auto", no_formats),
        "dtypes.fp8_weight_grad": (dtypes.fp8_weight_grad, False, no_formats),
        "dtypes.fp8_dispatch": (dtypes.fp8_dispatch, False, no_formats),
        "export.quantized": (config.export.quantized, False, no_formats),
    }
    for setting in fields(config.router):
        if setting.default == 0:  # a coefficient or a rate
            supported[f"router.{setting.name}"] = (getattr(config.router, setting.name), 0, no_routers)
    for name, (value, only, reason) in supported.items():
        if value != only:
            raise ValueError(f"{name} = {value!r}: {_trained_by(model)}, and {reason}; set it to {only!r}, or leave it "
                             "out")


def stages_on_meta(
    model: TrainedModel, num_stages: int = 1, layers_per_stage: tuple[int, ...] = (), lora: LoRAConfig = NO_ADAPTERS
) -> tuple[nn.Module, ...]:
    """Return all stages of a model on the meta device, with the adapters of [lora].

    Callers share the cached result: it is for inspection only.
    """
    if lora.is_enabled:
        return _adapted_stages(model, num_stages, layers_per_stage, lora)
    if not isinstance(model, HubConfig):
        return model.meta_stages(num_stages, layers_per_stage)
    if num_stages == 1 and not layers_per_stage:
        return meta_stages(model)  # no options: shares its cache entry with all callers that inspect a whole model
    return meta_stages(model, num_stages, layers_per_stage=layers_per_stage)


@lru_cache(maxsize=16)
def _adapted_stages(
    model: TrainedModel, num_stages: int, layers_per_stage: tuple[int, ...], lora: LoRAConfig
) -> tuple[nn.Module, ...]:
    """Return `stages_on_meta` with adapters, cached."""
    return adapted(stages_on_meta(model, num_stages, layers_per_stage), model, lora)


def flops_per_token(model: TrainedModel, sequence_length: int, lora: LoRAConfig = NO_ADAPTERS) -> float:
    """Return the FLOPs of a token, forward and backward.

    With adapters, frozen weights have no weight gradient, and layers before the first adapter no backward.
    """
    adapted_model: Any = stages_on_meta(model, lora=lora)[0] if lora.is_enabled else None
    if not isinstance(model, HubConfig):
        return model.flops_per_token(sequence_length, adapted_model)
    if adapted_model is None:
        return flops.flops_per_token(model, sequence_length).total
    return flops.adapted_flops_per_token(model, adapted_model, sequence_length).total
