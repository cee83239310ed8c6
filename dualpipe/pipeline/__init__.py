"""Engine that runs schedules: stages as segments, messages between ranks, overlap, and the deferral report."""

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Communication, Compute, Pending
from dualpipe.pipeline.deferral_report import DeferralReport
from dualpipe.pipeline.engine import DualPipeV, Pipeline
from dualpipe.runtime.errors import PipelineError

__all__ = [
    "Communicate",
    "Communication",
    "Compute",
    "DeferralReport",
    "DualPipeV",
    "Pending",
    "Pipeline",
    "PipelineError",
    "WeightGradStore",
]
