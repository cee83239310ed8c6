"""Runs schedules: the engine, its messages, and deferred weight gradients."""

from dualpipe.pipeline.engine import DualPipeV, Pipeline
from dualpipe.pipeline.errors import PipelineError
from dualpipe.pipeline.segments import Communicate, Communication, Compute, Pending
from dualpipe.pipeline.weight_grad_store import WeightGradStore

__all__ = [
    "Communicate",
    "Communication",
    "Compute",
    "DualPipeV",
    "Pending",
    "Pipeline",
    "PipelineError",
    "WeightGradStore",
]
