"""Forward hooks of a module that runs as segments, without its `__call__`.

User hooks run in the order of `nn.Module.__call__`. Hooks of FSDP2 do not run, since the pipeline gathers and
reduces the parameters itself; only the casts of its `MixedPrecisionPolicy` are applied, at the same places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map_only

from dualpipe.nn.segments import Communicate, Compute, Names, Segment
from dualpipe.parallel.fsdp.private import private
from dualpipe.parallel.fsdp.unit_records import dtype_of_casts, is_own_hook


def with_forward_hooks(
    module: nn.Module, segments: Sequence[Segment], inputs: Names, outputs: Names, *, are_compiled: bool = False
) -> list[Segment]:
    """Return the segments of `module` between its forward pre-hooks and its forward hooks.

    inputs: the names in the carry of the module's arguments, in order. outputs: the names of its results.
    are_compiled: the segments themselves are compiled; without it, a compiled module is called as a whole.

    Hooks that are attached later run too. Forward hooks get the arguments only if the module has a forward hook now,
    since otherwise the arguments are not saved; they never get keyword arguments. Raises ValueError for backward hooks,
    which would see part of the gradients only, and for a compiled module with segments that communicate or are
    recomputed; RuntimeError for an FSDP2 unit whose hooks are not recognized.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(f"a {type(module).__name__} has backward hooks, but runs as segments, each with a backward of "
                         "its own; hook the tensors or the modules inside it instead")
    if is_compiled(module) and not are_compiled:
        if any(isinstance(segment, Communicate) or segment.recompute for segment in segments):
            raise ValueError(f"a {type(module).__name__} is compiled as a whole and has segments that communicate or "
                             "are recomputed, which run one by one; compile the modules inside it instead")
        return [Compute(module, inputs, outputs)]
    if isinstance(module, FSDPModule):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if not any(_fsdp_state(hook) is not None for hook in hooks.values()):
                raise RuntimeError(f"a {type(module).__name__} has no forward hook of an FSDPState by torch "
                                   f"{torch.__version__}, so that FSDP2 would gather it again within a step; use torch "
                                   "2.11 to 2.15")
    arguments: Names = ()
    if any(_fsdp_state(hook) is None for hook in module._forward_hooks.values()):
        # Not valid identifiers, so that they cannot collide with the names of segments.
        arguments = tuple(f"(argument {name} of {id(module):x})" for name in inputs)
    before = Compute(partial(_run_pre_hooks, module, bool(arguments)), inputs, (*inputs, *arguments),
                     segments[0].recompute)
    after = Compute(partial(_run_hooks, module, len(arguments)), (*arguments, *outputs), outputs,
                    segments[-1].recompute)
    return [before, *segments, after]


def is_compiled(module: nn.Module) -> bool:
    """Return True for a module compiled by `torch.compile` or `Module.compile`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_other_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks other than those of FSDP2 and those of `own_hook`."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    by_kind = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks, module._forward_pre_hooks,
               module._forward_hooks)
    return any(not is_own_hook(hook) and _fsdp_state(hook) is None
               for hooks in by_kind for hook in hooks.values())


def output_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that hooks of FSDP2 or of `shard_stages` cast a module's outputs to; None if they cast none."""
    dtype: torch.dtype | None = None
    for hook in module._forward_hooks.values():
        state = _fsdp_state(hook)
        cast = dtype_of_casts(hook) if state is None else private(state, "_mp_policy").output_dtype
        dtype = cast or dtype
    return dtype


def _run_pre_hooks(module: nn.Module, save_arguments: bool, *args: Any) -> tuple[Any, ...]:
    """Run the forward pre-hooks; return the arguments, as changed by the hooks, twice if forward hooks need them."""
    kwargs: dict[str, Any] = {}
    for key, hook in (*torch_module._global_forward_pre_hooks.items(), *module._forward_pre_hooks.items()):
        state = _fsdp_state(hook)
        if state is not None:
            policy = private(state, "_mp_policy")
            if policy.cast_forward_inputs and policy.param_dtype:
                args = _cast(args, policy.param_dtype)
        elif key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return (*args, *args) if save_arguments else args


def _run_hooks(module: nn.Module, num_arguments: int, *values: Any) -> Any:
    """Run the forward hooks; return the outputs, as changed by the hooks.

    values: the module's arguments, `num_arguments` of them, then its outputs.
    """
    arguments = values[:num_arguments]
    outputs = values[num_arguments:]
    result = outputs[0] if len(outputs) == 1 else outputs
    for key, hook in (*torch_module._global_forward_hooks.items(), *module._forward_hooks.items()):
        state = _fsdp_state(hook)
        if state is not None:
            policy = private(state, "_mp_policy")
            if policy.output_dtype is not None:
                result = _cast(result, policy.output_dtype)
            continue
        if key in module._forward_hooks_with_kwargs:
            changed = hook(module, arguments, {}, result)
        else:
            changed = hook(module, arguments, result)
        if changed is not None:
            result = changed
    return result


def _fsdp_state(hook: Callable[..., Any]) -> Any:
    """Return the FSDP2 state that a hook is a method of; None for other hooks.

    FSDP2 wraps its methods, and with several modules in a unit the bound methods too. Unwrapping stops at the bound
    method, which shows the attributes of its function: its `__wrapped__` is a plain function without an owner.
    """
    method = inspect.unwrap(hook, stop=lambda function: hasattr(function, "__self__"))
    owner = getattr(method, "__self__", None)
    return owner if type(owner).__name__ == "FSDPState" else None


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a tree of values."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)
