"""The report of a run: metrics, remarks, and pictures at the end. One rank reports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dualpipe.nn.routing.losses import LOSSES
from dualpipe.schedule import Schedule
from dualpipe.train.metrics import MetricsWriter, StepMetrics, Throughput, draw


class RunReport:
    """The metrics and remarks of a run. Does nothing on ranks without a writer.

    throughput: computes the speed of a step.
    """

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.writer: MetricsWriter | None = None
        self.unigram: float | None = None  # validation loss of a unigram model
        self._remarks: list[str] = []

    def remark(self, text: str) -> None:
        """Print `text`, unless it is empty, with the next step that is written."""
        if self.writer is not None and text:
            self._remarks.append(text)

    def write(self, metrics: dict[str, Any], warnings: Iterable[str]) -> None:
        """Write the metrics of a step and print remarks and warnings.

        warnings: read only if there is a writer.
        """
        if self.writer is None:
            return
        router_losses = {name: value for name, value in metrics.items() if name in LOSSES}
        others = {name: value for name, value in metrics.items() if name not in LOSSES}
        self.writer.write(StepMetrics(**others, router_losses=router_losses))
        for text in (*self._remarks, *warnings):
            self.writer.say(text)
        self._remarks.clear()

    def go_back(self, step: int) -> None:
        """Continue after `step`; metrics of later steps move to another file."""
        if self.writer is not None:
            self.writer.go_back(step)

    def say(self, text: str) -> None:
        """Print `text` at once."""
        if self.writer is not None:
            self.writer.say(text)

    def draw(self, folder: Path, schedule: Schedule) -> None:
        """Draw the loss and the schedule into `folder`."""
        draw(folder, schedule, unigram=self.unigram)
