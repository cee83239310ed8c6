"""Models of transformers in the pipeline: cut into stages, with experts that run on this library's kernels.

Requires transformers, and registers the experts implementation "dualpipe" with it.
"""

from dualpipe.hf.experts import NAME, compute_experts
from dualpipe.hf.load import load_stages
from dualpipe.hf.save import save_stages
from dualpipe.hf.stage import CausalLMStage

__all__ = ["NAME", "CausalLMStage", "compute_experts", "load_stages", "save_stages"]
