"""Report of the share of a rank's weight-gradient work that can wait for a "W", and of parameters that cannot.

A probe observes the first training step; the autograd graphs of its forwards show the uses of every parameter.
Imports `nn` and `schedule`.
"""

from dualpipe.pipeline.deferral_report.probe import StepProbe
from dualpipe.pipeline.deferral_report.report import DeferralReport, StageWork, UndeferredParameter, shortfall

__all__ = ["DeferralReport", "StageWork", "StepProbe", "UndeferredParameter", "shortfall"]
