"""Access to private attributes of FSDP2, with an error that names the supported torch releases."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def state_of(unit: FSDPModule) -> Any:
    """Return the FSDP2 state of a unit."""
    return private(unit, "_get_fsdp_state")()


def groups_of(unit: FSDPModule) -> list[Any]:
    """Return the parameter groups of a unit; until torch 2.12 a unit has at most one."""
    state = state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [private(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of torch; RuntimeError with the supported releases if it does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which dualpipe needs to run FSDP2 under "
            "a pipeline; use torch 2.11 to 2.15"
        ) from None
