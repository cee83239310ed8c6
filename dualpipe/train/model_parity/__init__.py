"""`dualpipe parity --model`: compares a custom or transformers model in a pipeline with the unpipelined model.

Imports `train.parity_errors`, `train.launch`, `train.config.schema`, `parallel.mesh`, `schedule` and `runtime`.
"""

from dualpipe.train.model_parity.models.cut_model import CutModel

__all__ = ["CutModel"]
