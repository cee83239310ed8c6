"""The model that a run's configuration names: one of this library's own, or one of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch import nn

from dualpipe.kernels.formats import FORMATS
from dualpipe.models import FAMILIES, HubConfig, UnsupportedModel, config_from_dict, flops, read_hub_file, read_hub_json
from dualpipe.models.stages import meta_stages
from dualpipe.train.config.schema import Config

if TYPE_CHECKING:
    from dualpipe.hf.model import TransformersModel

Backend = Literal["auto", "dualpipe", "transformers"]
TrainedModel: TypeAlias = "HubConfig | TransformersModel"


class ModelFile(NamedTuple):
    """The model that a config.json describes, and the positions that it is made for, if known."""

    config: TrainedModel
    positions: int | None


def read_model_config(config: Config) -> TrainedModel:
    """Return the model of `read_model`. Raises ValueError as that does."""
    return read_model(config).config


def read_own_model_config(config: Config, what: str) -> HubConfig:
    """Return the model of `read_model`; ValueError also where it is one of transformers, which `what` does not take."""
    model = read_model_config(config)
    if not isinstance(model, HubConfig):
        raise ValueError(f"{what} is for this library's own models ({', '.join(FAMILIES)}); {model.model_type} is "
                         "trained by transformers' implementation")
    return model


def read_model(config: Config) -> ModelFile:
    """Return the model that a configuration names, with its layers for multi-token prediction where these are trained.

    Raises ValueError for a file that is missing or no JSON, a model that neither this library nor transformers has, one
    without such layers, and for settings that a model of transformers cannot be trained with.
    """
    try:
        found = read_model_file(config.model_path, config.model.backend)
        if config.mtp.weight and isinstance(found.config, HubConfig):
            found = found._replace(config=found.config.with_mtp())
    except ValueError as error:
        raise ValueError(f"{'model.config' if config.model.config else 'init.from_hf'}: {error}") from error
    depth, length = found.config.mtp_depth, config.train.sequence_length
    if length <= depth:
        raise ValueError(f"train.sequence_length = {length}: no token has one {depth + 1} places ahead to be "
                         f"predicted by layer {depth} for multi-token prediction; give more")
    if not isinstance(found.config, HubConfig):
        check_settings(config, found.config)
    return found


def read_model_file(path: str, backend: Backend) -> ModelFile:
    """Return the model of a config.json, or of the directory that has one, by the implementation that `backend` names.

    Raises ValueError where that implementation, or with "auto" both, do not have it.
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
    if unsupported and _is_own_family(hub):
        raise ValueError(f'{unsupported}; model.backend = "transformers" trains the implementation of transformers')
    try:
        model = _of_transformers(hub)
    except ValueError as error:
        raise ValueError(f"{unsupported}; {error}" if unsupported else f"{file}: {error}") from error
    return ModelFile(model, model.positions)


def model_from_dict(hub: Mapping[str, Any], backend: Backend) -> TrainedModel:
    """Return the model that the content of a config.json describes. Raises ValueError where there is none."""
    if backend != "transformers":
        try:
            return config_from_dict(hub)
        except UnsupportedModel:
            if backend == "dualpipe" or _is_own_family(hub):
                raise
    return _of_transformers(hub)


def _is_own_family(hub: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes a family of this library."""
    return hub.get("model_type") in list(FAMILIES)  # a list: it may be anything


def _of_transformers(hub: Mapping[str, Any]) -> TransformersModel:
    if find_spec("transformers") is None:
        raise ValueError('transformers, whose implementation would be trained, is not installed; '
                         '`pip install "dualpipe[hf]"`')
    from dualpipe.hf.model import TransformersModel

    return TransformersModel.from_dict(hub)


def check_settings(config: Config, model: TransformersModel) -> None:
    """Raise ValueError for settings that a model of transformers cannot be trained with, in one line."""
    parallel = config.parallel
    router = config.router
    dtypes = config.dtypes
    parts = [rule for rule in config.memory.recompute if rule.partition(":")[0] not in ("layer", "none")]
    formats = [str(rule) for rule in dtypes.rules if rule.gather or rule.storage in FORMATS]
    refused = {
        "parallel.cp": (parallel.cp, 1, "its attention does not share sequences between ranks"),
        "mtp.weight": (config.mtp.weight, 0, "transformers has no layers for multi-token prediction"),
        "optimizer.qk_clip": (config.optimizer.qk_clip, 0, "it needs this library's attention"),
        "router.balance": (router.balance, 0, "it needs this library's routers"),
        "router.z_loss": (router.z_loss, 0, "it needs this library's routers"),
        "router.bias_update_rate": (router.bias_update_rate, 0, "it needs this library's routers"),
        "model.expert_gemm": (config.model.expert_gemm, "dualpipe", "its experts run by its experts implementation"),
        "memory.recompute": (parts, [], "its layers are computed again as a whole, by layer, or layer:0-7 of some"),
        "train.compile": (config.train.compile, False, "its layers are not compiled"),
        "dtypes.rules": (formats, [], "its weights are not quantized"),
        "dtypes.products": (dtypes.products, "auto", "its weights are not quantized"),
        "dtypes.fp8_weight_grad": (dtypes.fp8_weight_grad, False, "its weights are not quantized"),
        "dtypes.fp8_dispatch": (dtypes.fp8_dispatch, False, "its weights are not quantized"),
        "export.quantized": (config.export.quantized, False, "its weights are not quantized"),
    }
    trained_by = f"{model.model_type} is trained by transformers' implementation"
    for name, (value, only, why) in refused.items():
        if value != only:
            raise ValueError(f"{name} = {value!r}: {trained_by}, and {why}; set it to {only!r}, or leave it out")
    if parallel.ep > 1 and not model.num_experts:
        raise ValueError(f"parallel.ep = {parallel.ep}: {model.model_type} has no experts; set it to 1, and "
                         "parallel.dp to more")
    if parallel.ep > 1 and model.num_experts % parallel.ep:
        raise ValueError(f"parallel.ep = {parallel.ep} does not divide the {model.num_experts} experts of a layer; "
                         "give a divisor")
    if config.data.separate_documents and model.mixes_documents:
        raise ValueError(f"data.separate_documents = True: {trained_by}, and some of its layers see from one "
                         "document into the next; set it to False")
    if config.model.config and config.init.from_hf:
        _, source = read_hub_json(config.init.from_hf)
        if dict(source) != model.to_dict():
            raise ValueError(f"model.config = {config.model.config!r} describes another model than the config.json in "
                             f"init.from_hf = {config.init.from_hf!r}, which is taken; leave out model.config")


def stages_on_meta(
    model: TrainedModel, num_stages: int = 1, layers_per_stage: tuple[int, ...] = ()
) -> tuple[nn.Module, ...]:
    """Return all stages of a model without memory, to be looked at alone: the same ones for all callers."""
    if isinstance(model, HubConfig):
        is_whole = num_stages == 1 and not layers_per_stage  # called without options, as by all who look at the whole
        return meta_stages(model) if is_whole else meta_stages(model, num_stages, layers_per_stage=layers_per_stage)
    return model.meta_stages(num_stages, layers_per_stage)


def flops_per_token(model: TrainedModel, sequence_length: int) -> float:
    """Return the floating-point operations for a token, forward and backward."""
    if isinstance(model, HubConfig):
        return flops.flops_per_token(model, sequence_length).both
    return model.flops_per_token(sequence_length)
