"""Model families as pipeline stages, in plain PyTorch over `dualpipe.nn`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualpipe.models.deepseek import DeepseekV2Config, DeepseekV3Config, KimiK2Config
from dualpipe.models.gpt_oss import GptOssConfig
from dualpipe.models.hub import HubConfig, UnsupportedModel
from dualpipe.models.qwen3_moe import Qwen3MoeConfig
from dualpipe.models.stages import Stage, build_stages, split_layers
from dualpipe.runtime.ranks.process_groups import is_first_rank

__all__ = [
    "DeepseekV2Config", "DeepseekV3Config", "GptOssConfig", "HubConfig", "KimiK2Config", "Qwen3MoeConfig", "Stage",
    "UnsupportedModel", "build_stages", "config_from_dict", "read_config", "read_hub_file", "read_hub_json",
    "split_layers",
]

FAMILIES = {
    family.model_type: family
    for family in (Qwen3MoeConfig, DeepseekV2Config, DeepseekV3Config, KimiK2Config, GptOssConfig)
}


_ROWS = 4096  # of a matrix that are compared at once


class HubFile(NamedTuple):
    """Content of a `config.json`: the model's configuration and its longest sequence."""

    config: HubConfig
    positions: int | None  # max_position_embeddings, in tokens; None: unknown


def read_config(path: str | PathLike[str]) -> HubConfig:
    """Read a model's configuration from a `config.json`, or from the directory that contains one.

    Raises `ValueError` if there is none, it is no JSON object, or the model or an option is not supported.
    """
    return read_hub_file(path).config


def read_hub_file(path: str | PathLike[str]) -> HubFile:
    """Read a model's configuration and longest sequence from a `config.json`, or from the directory that contains one.

    Raises `ValueError` like `read_config`. For a model that another library may implement, it is the subclass
    `UnsupportedModel`.
    """
    path, hub = read_hub_json(path)
    try:
        config = config_from_dict(hub)
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from error
    positions = hub.get("max_position_embeddings")
    positions = positions if isinstance(positions, int) else None
    if config.yarn is not None:  # some checkpoints give the number of positions before YaRN stretches them
        positions = max(positions or 0, int(config.yarn.original_max_position_embeddings * config.yarn.factor))
    return HubFile(config, positions)


def read_hub_json(path: str | PathLike[str]) -> tuple[Path, Mapping[str, Any]]:
    """Return the path of a `config.json` and its content; `path` is the file or its directory.

    If the checkpoint beside it has a head that differs from the embedding, `tie_word_embeddings` is false in the
    result whatever the file says, as transformers loads such a checkpoint.

    Raises `ValueError` if there is none, or it is no JSON object.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the directory {path} has no config.json; give one that has it, or the path of a "
                             "config.json in the form of the Hugging Face hub")
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"there is no file or directory {path}; give the path of a config.json in the form of the "
                         "Hugging Face hub, or of a directory that has one. A name on the hub is not looked up: "
                         "download that model first")
    try:
        hub = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(hub, Mapping):
        raise ValueError(f"{path}: got JSON of type {type(hub).__name__}, expected an object; give a config.json")
    if hub.get("tie_word_embeddings") and _has_distinct_head(path.parent):
        if is_first_rank():
            warnings.warn(f"{path} says tie_word_embeddings = true, but the lm_head.weight beside it differs from the "
                          "embedding: the two are not tied, as in transformers", stacklevel=2)
        hub = {**hub, "tie_word_embeddings": False}
    return path, hub


def _has_distinct_head(folder: Path) -> bool:
    """Return True if a checkpoint has a head and an embedding with other values. Damaged files are reported later."""
    single = folder / "model.safetensors"
    weights: list[Tensor] = []
    try:
        files = {} if single.is_file() else json.loads((folder / f"{single.name}.index.json").read_text())["weight_map"]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            with safe_open(folder / Path(files.get(name, single.name)).name, framework="pt") as file:
                weights.append(file.get_tensor(name))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return False
    return not same_values(*weights)


def same_values(left: Tensor, right: Tensor) -> bool:
    """Return True if two matrices have equal values, in whatever dtypes."""
    rows = zip(left.split(_ROWS), right.split(_ROWS))
    return left.shape == right.shape and all(torch.equal(a.double(), b.double()) for a, b in rows)


def config_from_dict(hub: Mapping[str, Any]) -> HubConfig:
    """Return the configuration of the family that the content of a `config.json` names; see `HubConfig.from_dict`.

    Raises `UnsupportedModel`, a `ValueError`, for a family that this library does not have.
    """
    if not isinstance(hub, Mapping):
        raise ValueError(f"got a configuration of type {type(hub).__name__}, expected a mapping; give the content of a "
                         "config.json")
    model_type = hub.get("model_type")
    if model_type not in list(FAMILIES):  # a list: model_type may be unhashable
        raise UnsupportedModel(f"model_type {brief(model_type)} is not one of those supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type].from_dict(hub)
