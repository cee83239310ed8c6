"""Part 2: the tests that need a GPU, kernel tests first, a few cases of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu.session import Output

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/kernels", "tests/nn", "tests/pipeline")
CASES = 4  # per test, because the compiler takes longer than the kernels


class Reporter:
    """Pytest plugin that sends the outcome of every test as it ends."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._ran = 0
        self._failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Book the call of a test, or a setup that skipped or failed and so has no call."""
        if report.when == "call" or report.outcome != "passed":
            self._book(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed += 1
            self._output.failure(test=report.nodeid, error=str(report.longrepr))

    def say(self) -> None:
        """Send the verdict on all tests so far."""
        self._output.goal("every test that needs a GPU passes", self._ran, self._failed)

    def _book(self, report: pytest.TestReport) -> None:
        if report.outcome == "skipped":
            self._output.skip(test=report.nodeid, why=str(report.longrepr)[-160:])
            return
        self._ran += 1
        if report.outcome == "failed":
            self._failed += 1
            self._output.failure(test=report.nodeid, error=str(report.longrepr))
        else:
            self._output.row(test=report.nodeid, seconds=round(report.duration, 3))
        self.say()


def measure(output: Output) -> None:
    """Run the tests marked gpu in this process; in a dry session, a few tests on the CPU."""
    if output.dry:
        chosen = ["tests/kernels/test_swiglu.py", "-m", "not slow and not gpu", "-k", "worked_example or values"]
    else:
        chosen = [*FOLDERS, "-m", "gpu"]
    reporter = Reporter(output)
    os.chdir(ROOT)  # pyproject.toml has pytest's settings
    pytest.main([*chosen, "--gpu-cases", str(CASES), "--numprocesses", "0"], plugins=[reporter])
    reporter.say()
