"""Reports how much of a rank's weight-gradient work can wait for a "W", and which parameters' cannot, and why.

A probe watches the first training step; the graphs that its forwards leave say what each parameter is used for.
Imports `nn` and `schedule`.
"""

from dualpipe.pipeline.deferral_report.probe import StepProbe
from dualpipe.pipeline.deferral_report.report import DeferralReport, StageWork, UndeferredParameter, shortfall

__all__ = ["DeferralReport", "StageWork", "StepProbe", "UndeferredParameter", "shortfall"]
