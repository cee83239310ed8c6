"""`dualpipe parity --model`: a model of one's own, or one of transformers, in a pipeline against the uncut model.

Imports `train.parity`, `train.anomaly.localize`, `train.launch`, `train.config.schema`, `hf`, `pipeline`, `parallel`,
`nn`, `schedule` and `runtime`.
"""

from dualpipe.train.model_parity.cut_model import CutModel

__all__ = ["CutModel"]
