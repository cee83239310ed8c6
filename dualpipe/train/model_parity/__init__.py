"""`dualpipe parity --model`: a custom model, or one of transformers, in a pipeline against the uncut model.

Imports `train.parity_errors`, `train.launch`, `train.config.schema`, `parallel.mesh`, `schedule` and `runtime`.
"""

from dualpipe.train.model_parity.models.cut_model import CutModel

__all__ = ["CutModel"]
