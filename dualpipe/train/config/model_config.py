"""The model that a run's configuration names."""

from __future__ import annotations

from dualpipe.models import HubConfig, read_config
from dualpipe.train.config.schema import Config


def read_model_config(config: Config) -> HubConfig:
    """The model that a configuration names, with its layers for multi-token prediction where these are trained;
    ValueError where that is no file, no JSON, or no model of this library, or has no such layers."""
    try:
        found = read_config(config.model_path)
        found = found.with_mtp() if config.mtp.weight else found
    except ValueError as error:
        raise ValueError(f"{'model.config' if config.model.config else 'init.from_hf'}: {error}") from error
    if (length := config.train.sequence_length) <= found.mtp_depth:
        raise ValueError(f"train.sequence_length = {length}: no token has one {found.mtp_depth + 1} places ahead to be "
                         f"predicted by layer {found.mtp_depth} for multi-token prediction; give more")
    return found
