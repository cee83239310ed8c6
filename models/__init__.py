"""Models cut into stages, as plain PyTorch over `dualpipe.nn`."""

from dualpipe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeStage, build_stages, from_hf_state_dict
from dualpipe.models.stages import split_layers

__all__ = ["Qwen3MoeConfig", "Qwen3MoeStage", "build_stages", "from_hf_state_dict", "split_layers"]
