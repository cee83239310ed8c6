"""Side inputs of a step: tensors without a gradient, such as position ids, that every stage may read.

They go through all stages behind the activations, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.nn.segments import is_reserved


class SideSpec(NamedTuple):
    """The side inputs that a stage takes, or several stages together."""

    names: tuple[str, ...]
    every: bool  # a `forward` has **kwargs
    hooked: bool = False  # DeepSeek's `overlapped_forward_backward` runs the stages, which has no argument for any

    @staticmethod
    def of(module: nn.Module) -> SideSpec:
        """Return the parameters of the module's `forward` behind the first, which is the activation."""
        module = getattr(module, "_orig_mod", module)  # what torch.compile returns has (*args, **kwargs)
        try:
            parameters = list(signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # code without a signature that Python can see
            return SideSpec((), False)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters[1:] if p.kind in by_name and not is_reserved(p.name))
        return SideSpec(names, any(p.kind is Parameter.VAR_KEYWORD for p in parameters))

    def takes(self, name: str) -> bool:
        """Return True if the stage takes a side input of this name."""
        return self.every or name in self.names


def validate_side_inputs(side: Any) -> dict[str, Tensor]:
    """Validate side inputs and return the non-None ones, sorted by name; ValueError for what cannot be one."""
    if side is None:
        return {}
    if not isinstance(side, Mapping) or not all(isinstance(name, str) for name in side):
        keys = [type(key).__name__ for key in side] if isinstance(side, Mapping) else type(side).__name__
        raise ValueError(f"side must be a mapping from names to tensors, got {keys}")
    reserved = sorted(filter(is_reserved, side))
    if reserved:
        raise ValueError(f"side inputs are called {reserved}, names that the pipeline uses; choose others")
    tensors = {name: side[name] for name in sorted(side) if side[name] is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"side input {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"side input {name!r} must be dense, got {tensor.layout}")
        if tensor.requires_grad:
            raise ValueError(f"side input {name!r} requires grad, but none flows back to it; detach it or make it an "
                             "input, which the stages hand on")
    return tensors
