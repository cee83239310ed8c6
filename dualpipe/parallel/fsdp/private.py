"""What FSDP2 keeps private, and what is said where a torch release has moved it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def state_of(unit: FSDPModule) -> Any:
    """Return the state that FSDP2 keeps of a unit."""
    return private(unit, "_get_fsdp_state")()


def groups_of(unit: FSDPModule) -> list[Any]:
    """A unit's groups of parameters; until torch 2.12 it has one."""
    state = state_of(unit)
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [private(state, "_fsdp_param_group")] if several is None else several
    return [group for group in groups if group is not None]


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of torch's; RuntimeError, with the releases that have it, where there is none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which dualpipe needs to run FSDP2 under "
            "a pipeline; use torch 2.11 to 2.15"
        ) from None
