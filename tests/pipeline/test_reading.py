"""Path of a batch through the code: few functions and files, in the order of docs/architecture.md."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dualpipe
from dualpipe import DualPipeV

ROOT = Path(dualpipe.__file__).parent.parent


def file_of(frame: FrameType) -> str | None:
    """Return the library's file of a frame, such as "pipeline/engine.py"; None for other files."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in ("dualpipe", "models", "kernels"):
        return None
    return str(path.relative_to(ROOT)).removeprefix("dualpipe/")


# Calls of the library's own functions for each micro-batch and stage of a step, of plain modules on one rank.
CALLS = 44


def test_a_step_calls_few_functions_of_the_library():
    """Count calls, as a test of time missed an increase of the host's time by a half."""
    num_microbatches = 8
    pipe = DualPipeV([nn.Linear(8, 8), nn.Linear(8, 8)])
    x = torch.ones(2 * num_microbatches, 8)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and file_of(frame) is not None:
            calls.append(frame.f_code.co_qualname)

    def step() -> None:
        pipe.step(x, num_chunks=num_microbatches, criterion=F.mse_loss, labels=(x,))

    step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    found = len(calls) / (2 * num_microbatches)
    assert found <= 1.05 * CALLS, (found, Counter(calls).most_common(20))


def test_the_document_names_the_files_in_their_order():
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"\]\(\.\./dualpipe/(pipeline/\w+\.py)\)", text[text.index("## Read the code"):])
    step = ("engine", "batch", "lower", "executor", "microbatch_state", "stage_runner", "overlap", "p2p")
    assert named[: len(step)] == [f"pipeline/{name}.py" for name in step]
    assert {f"pipeline/{path.name}" for path in (ROOT / "dualpipe/pipeline").glob("[a-z]*.py")} == set(named)
