"""`dualpipe parity`: a step of a model in its pipeline, against the same step of the unpipelined model.

A model and its split into stages is a configuration of `dualpipe train`, a directory of transformers, or a `CutModel`.
"""

from dualpipe.train.parity.models import CutModel

__all__ = ["CutModel"]
