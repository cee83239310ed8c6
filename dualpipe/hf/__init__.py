"""Models of transformers in the pipeline: their layers cut into stages, their experts run by this library's kernels.

Requires transformers, and registers the experts implementation "dualpipe" with it.
Imports `checkpoint.hub`, `checkpoint.tensors`, `models.stages`, `parallel`, `nn`, `kernels`, `runtime` and
`schedule.types`.
"""

from dualpipe.hf.experts import NAME, compute_experts
from dualpipe.hf.load import load_stages
from dualpipe.hf.save import save_stages
from dualpipe.hf.stage import CausalLMStage

__all__ = ["NAME", "CausalLMStage", "compute_experts", "load_stages", "save_stages"]
