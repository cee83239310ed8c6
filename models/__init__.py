"""Models cut into stages, as plain PyTorch over `dualpipe.nn`."""

from dualpipe.models.decoder import Stage, build_stages
from dualpipe.models.qwen3_moe import Qwen3MoeConfig
from dualpipe.models.stages import split_layers

__all__ = ["Qwen3MoeConfig", "Stage", "build_stages", "split_layers"]
