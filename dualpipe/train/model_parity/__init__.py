"""`dualpipe parity --model`: compares a custom or transformers model in a pipeline with the unpipelined model."""

from dualpipe.train.model_parity.models.cut_model import CutModel

__all__ = ["CutModel"]
