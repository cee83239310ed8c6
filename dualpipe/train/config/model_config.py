"""The model that a run's configuration names."""

from __future__ import annotations

from dualpipe.models import HubConfig, HubFile, read_hub_file
from dualpipe.train.config.schema import Config


def read_model_config(config: Config) -> HubConfig:
    """Return the configuration of `read_model`. Raises ValueError as that does."""
    return read_model(config).config


def read_model(config: Config) -> HubFile:
    """The model that a configuration names, with its layers for multi-token prediction where these are trained;
    ValueError where that is no file, no JSON, or no model of this library, or has no such layers."""
    try:
        found = read_hub_file(config.model_path)
        if config.mtp.weight:
            found = found._replace(config=found.config.with_mtp())
    except ValueError as error:
        raise ValueError(f"{'model.config' if config.model.config else 'init.from_hf'}: {error}") from error
    depth, length = found.config.mtp_depth, config.train.sequence_length
    if length <= depth:
        raise ValueError(f"train.sequence_length = {length}: no token has one {depth + 1} places ahead to be "
                         f"predicted by layer {depth} for multi-token prediction; give more")
    return found
