"""transformers' own models in the pipeline: their experts by this library's kernels, their layers cut into stages.

Imports `models`, `pipeline`, `parallel`, `nn` and `kernels`, and transformers, which the rest of the library does not
need. Importing this package registers the experts implementation "dualpipe" with transformers.
"""

from dualpipe.hf.experts import NAME, compute_experts
from dualpipe.hf.load import load_stages
from dualpipe.hf.save import save_stages
from dualpipe.hf.stage import CausalLMStage

__all__ = ["NAME", "CausalLMStage", "compute_experts", "load_stages", "save_stages"]
