"""The JSON files of a Hugging Face checkpoint that is written: config.json and the index of its shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from dualpipe.checkpoint.hub.files import CONFIG, INDEX, StrPath, read_json
from dualpipe.checkpoint.hub.save_quantized import quantization_config
from dualpipe.checkpoint.tensors import TensorHeader
from dualpipe.models import HubConfig, config_from_dict
from dualpipe.models.hub import MTP_LAYERS
from dualpipe.runtime.dtypes import long_name

# Keys of the source's config.json that describe its files and not the model.
_FILE_KEYS = {"quantization_config", "auto_map", "torch_dtype", "dtype"}


def json_documents(
    config: HubConfig, dtype: torch.dtype, source: StrPath | None, carried: Iterable[str],
    header: Mapping[str, TensorHeader],
) -> dict[str, dict[str, Any]]:
    """Return the contents of the JSON files by name.

    Args:
        config: the model.
        dtype: dtype of most parameters, which config.json states.
        source: a checkpoint of the same model, whose config.json is the basis. None: what this library knows.
        carried: names of the tensors that are copied from the source.
        header: all tensors that are written.

    Raises:
        ValueError: the source is of another model.
    """
    source_content = None if source is None else read_json(source, CONFIG)
    content = config.to_dict() if source_content is None else source_content
    source_config = replace(config_from_dict(content), mtp_depth=config.mtp_depth)
    if source is not None:
        _check_same_model(config, source, source_config)
    content = {key: value for key, value in content.items() if key not in _FILE_KEYS}
    if config.auto_map:
        content["auto_map"] = _auto_map(config, source)
    mtp_layers = config.mtp_depth + len({source_config.carried_layer(name) for name in carried})
    _set_mtp_layers(content, mtp_layers, source)
    source_quantization = (source_content or {}).get("quantization_config")
    quantization = quantization_config(config, header, source_quantization or {})
    if quantization:
        content["quantization_config"] = quantization
    documents = {CONFIG: content | {"dtype": long_name(dtype)}}
    if len({tensor.file for tensor in header.values()}) > 1:
        documents[INDEX] = {
            "metadata": {"total_parameters": sum(prod(tensor.shape) for tensor in header.values()),
                         "total_size": sum(tensor.nbytes for tensor in header.values())},
            "weight_map": {name: tensor.file for name, tensor in sorted(header.items())},
        }
    return documents


def _check_same_model(config: HubConfig, source: StrPath, source_config: HubConfig) -> None:
    """Raise ValueError if the source has another configuration than the model."""
    if source_config == config:
        return
    source_fields = asdict(source_config)
    differences = ", ".join(f"{key}: {source_fields.get(key)} there, {value} in the model"
                            for key, value in asdict(config).items() if source_fields.get(key) != value)
    raise ValueError(f"{source} is of another model ({differences or source_config.model_type}); give the checkpoint "
                     "that the model was made from, or none")


def _set_mtp_layers(content: dict[str, Any], layers: int, source: StrPath | None) -> None:
    """Set the number of layers for multi-token prediction in a config.json; warn if the source announces more."""
    keys = [key for key in MTP_LAYERS if key in content]
    if not keys and layers:
        keys = [*MTP_LAYERS[:1]]
    for key in keys:
        if (content.get(key) or 0) > layers:
            reason = "no source was given" if source is None else f"{source} has no tensors of more"
            warnings.warn(
                f"config.json says {key} = {layers} instead of {content[key]}: layers for multi-token prediction that "
                f"were not trained are only copied, and {reason}; give the checkpoint that the model was made from as "
                "source (init.from_hf, or `dualpipe hf export --source`)", stacklevel=3,
            )
        content[key] = layers


def _auto_map(config: HubConfig, source: StrPath | None) -> dict[str, Any]:
    """Return the "auto_map" of a family whose checkpoints include code.

    Return that of the source if the source, whose code is copied, has every module that it names. Otherwise return that
    of the published checkpoint.
    """
    source_map = {} if source is None else read_json(source, CONFIG).get("auto_map")
    if source is None or not isinstance(source_map, dict) or not source_map:
        return dict(config.auto_map)
    modules = {path.stem for path in Path(source).glob("*.py")}
    entries = (entry for value in source_map.values() for entry in (value if isinstance(value, list) else [value]))
    names = [str(entry) for entry in entries if entry is not None]  # "module.Class", or "owner/name--module.Class"
    is_complete = all("--" in name or name.partition(".")[0] in modules for name in names)
    return source_map if is_complete else dict(config.auto_map)
