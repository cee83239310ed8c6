"""Access to private attributes of FSDP2, and the differences between torch 2.11 and 2.15, which no other file knows.

An attribute that a torch release has moved is an error that names it and the supported releases. Public calls are used
if the installed torch has them. torch 2.11 stays supported, for GPU images that come with it.

| | until 2.12 | 2.13, 2.14 | from 2.15 |
| --- | --- | --- | --- |
| parameter groups of a unit | one | several | several |
| reduce-scatter buffers | one | chosen | chosen |
| `reset_iter_state` | none | public | public |
| end of a backward | private callback | private callback | `finalize_backward` in manual mode |
| second accumulator beside `.grad` | yes | yes | none |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of torch; RuntimeError with the supported releases if it does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which dualpipe needs to run FSDP2 under "
            "a pipeline; use torch 2.11 to 2.15"
        ) from None


# --- units


def state_of(unit: FSDPModule) -> Any:
    """Return the FSDP2 state of a unit."""
    return private(unit, "_get_fsdp_state")()


def groups_of(unit: FSDPModule) -> list[Any]:
    """Return the parameter groups of a unit."""
    state = state_of(unit)
    groups = state._fsdp_param_groups if allows_several_groups(unit) else [private(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def allows_several_groups(unit: FSDPModule) -> bool:
    """Return True if a unit may have more than one parameter group."""
    return hasattr(state_of(unit), "_fsdp_param_groups")


def set_idle(state_or_group: Any) -> None:
    """Reset the training state of a unit's state, or of a parameter group, to what it is between steps."""
    state_or_group._training_state = type(private(state_or_group, "_training_state")).IDLE


def set_reduce_buffers(root: Any, number: int) -> None:
    """Let `number` reduce-scatters have buffers at a time, where torch lets one choose."""
    if hasattr(root, "set_reduce_scatter_max_input_buffers"):
        root.set_reduce_scatter_max_input_buffers(number)


# --- the end of a backward


def set_final_callback(root: Any, runs: bool) -> None:
    """Choose whether autograd runs FSDP2's final callback after each backward, which takes 200 us."""
    context = private(state_of(root), "_state_ctx")
    private(context, "post_backward_final_callback_queued")  # raises if a torch release has moved it
    context.post_backward_final_callback_queued = not runs  # marked as queued, it is not queued


def set_manual_mode(root: Any, is_manual: bool) -> None:
    """Choose whether `finalize_backward` ends a backward, where torch has that mode."""
    if hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(is_manual)


def start_reduce_scatter(group: Any) -> None:
    """Start the reduce-scatter of a parameter group, of each gathered parameter's `.grad`."""
    private(group, "post_backward")()


def finalize_backward(root: Any) -> None:
    """Make later work on the device wait for the reductions of the units of `root`; call it in manual mode."""
    if hasattr(root, "finalize_backward"):
        root.finalize_backward()
    else:
        private(state_of(root), "_root_post_backward_final_callback")()


def forget_gathers(root: Any, groups: list[Any]) -> None:
    """Forget gathers of a failed step, which FSDP2 would wait for in the next step, and use there."""
    for group in groups:
        group._all_gather_result = None
        set_idle(group)  # in other states FSDP2 may refuse to reshard
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()


# --- records of parameters


def gathered(fsdp_param: Any) -> Tensor | None:
    """Return the gathered parameter; None before the first gather."""
    param: Tensor | None = getattr(fsdp_param, "_unsharded_param", None)
    return param


def forget_gathered(fsdp_param: Any) -> None:
    """Let FSDP2 make the gathered parameter anew."""
    del fsdp_param._unsharded_param
    private(fsdp_param, "all_gather_outputs").clear()


def accumulator_dtype(fsdp_param: Any) -> torch.dtype:
    """Return the dtype in which gradients of a gathered parameter are accumulated and reduced."""
    param = private(fsdp_param, "_unsharded_param")
    in_record: torch.dtype | None = getattr(fsdp_param, "unsharded_grad_dtype", None)  # from torch 2.15
    dtype: torch.dtype = in_record or private(fsdp_param, "mp_policy").reduce_dtype or param.dtype
    return dtype


def second_accumulator(fsdp_param: Any) -> Tensor | None:
    """Return the gradient that FSDP2 keeps beside `.grad`, from backwards outside of steps, and adds itself."""
    grad: Tensor | None = fsdp_param.unsharded_accumulated_grad if _has_second_accumulator(fsdp_param) else None
    return grad


def drop_second_accumulator(fsdp_param: Any) -> None:
    """Drop the gradient that FSDP2 keeps beside `.grad`."""
    if _has_second_accumulator(fsdp_param):
        fsdp_param.unsharded_accumulated_grad = None


def _has_second_accumulator(fsdp_param: Any) -> bool:
    return hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed")
