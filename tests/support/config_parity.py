"""The errors of a configuration's pipeline, as `dualpipe parity` measures them."""

from __future__ import annotations

import torch

from dualpipe.train.config.fit import Resolved
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.compare import Comparison
from dualpipe.train.parity.errors import TOLERANCES, Error
from dualpipe.train.parity.models import ConfigModel


def step_errors(resolved: Resolved, job: Job, dtype: torch.dtype = torch.float64) -> list[Error]:
    """Return the errors of loss and gradients on all ranks. Collective."""
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    return Comparison(ConfigModel(resolved), job, dtype, tolerance).run().errors


def largest_error(resolved: Resolved, job: Job, dtype: torch.dtype = torch.float64) -> float:
    """Return the largest relative error of `step_errors`."""
    return max(error.relative for error in step_errors(resolved, job, dtype))
