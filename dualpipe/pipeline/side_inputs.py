"""Side inputs of a step: tensors without a gradient, such as position ids, that every stage may read.

They go through all stages together with the activations, after them in a message, sorted by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.nn.segments import is_reserved


class SideSpec(NamedTuple):
    """Side inputs that one stage takes, or several stages together."""

    names: tuple[str, ...]
    takes_all: bool  # a `forward` has **kwargs
    is_hooked: bool = False  # DeepSeek's `overlapped_forward_backward`, which takes no side inputs, runs the stages

    @staticmethod
    def of(module: nn.Module) -> SideSpec:
        """Return the parameters of the module's `forward` after the first, which is the activation."""
        module = getattr(module, "_orig_mod", module)  # a compiled module has (*args, **kwargs)
        try:
            parameters = list(signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # Python cannot see the signature
            return SideSpec((), False)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters[1:] if p.kind in by_name and not is_reserved(p.name))
        takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        return SideSpec(names, takes_all)

    def takes(self, name: str) -> bool:
        """Return True if the stage takes a side input of this name."""
        return self.takes_all or name in self.names


def validate_side_inputs(side: Any) -> dict[str, Tensor]:
    """Return the non-None side inputs, sorted by name. Raises ValueError for invalid ones."""
    if side is None:
        return {}
    if not isinstance(side, Mapping) or not all(isinstance(name, str) for name in side):
        keys = [type(key).__name__ for key in side] if isinstance(side, Mapping) else type(side).__name__
        raise ValueError(f"side must be a mapping from names to tensors, got {keys}")
    reserved = sorted(filter(is_reserved, side))
    if reserved:
        raise ValueError(f"side inputs are called {reserved}, names that the pipeline uses; choose other names")
    tensors = {name: side[name] for name in sorted(side) if side[name] is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"side input {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"side input {name!r} must be dense, got {tensor.layout}")
        if tensor.requires_grad:
            raise ValueError(f"side input {name!r} requires grad, but side inputs get no gradient; detach it, or pass "
                             "it as an input that the stages return")
    return tensors
