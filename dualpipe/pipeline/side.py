"""Side inputs of a step: tensors without a gradient, such as position ids, that any stage may read.

They go through all stages behind the activations, in the same messages, and a stage is given those that its `forward`
names. Between stages they are a tuple in the order of their names, which the ranks have agreed on:

    (x, mask, positions) arrive, forward(self, x, positions) -> y is called as (x, positions=...), (y, mask, positions)
    go on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.nn.segments import is_reserved

Slot = tuple[int, int]  # (stage, micro-batch)


class Takes(NamedTuple):
    """The side inputs that a stage can be given, or several stages together."""

    names: tuple[str, ...]
    every: bool  # whether a `forward` has **kwargs
    hooked: bool = False  # whether DeepSeek's `overlapped_forward_backward` runs them, which has no room for any

    @staticmethod
    def of(module: nn.Module) -> Takes:
        """By the parameters of its `forward`, of which the first is the activation."""
        module = getattr(module, "_orig_mod", module)  # what torch.compile returns has (*args, **kwargs)
        try:
            parameters = list(signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # code without a signature that Python can see
            return Takes((), False)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters[1:] if p.kind in by_name and not is_reserved(p.name))
        return Takes(names, any(p.kind is Parameter.VAR_KEYWORD for p in parameters))

    @staticmethod
    def union(parts: Iterable[Takes]) -> Takes:
        parts = list(parts)
        names = set().union(*(part.names for part in parts))
        return Takes(tuple(sorted(names)), any(p.every for p in parts), any(p.hooked for p in parts))

    def check(self, given: Sequence[str]) -> None:
        """ValueError where the stages cannot be given these."""
        if given and self.hooked:
            raise ValueError(
                f"side inputs {given} do not go with overlapped_forward_backward, which has no argument for them; "
                "return them from the first stage as tensors that all hand on, or give the stages segments()"
            )
        if unused := [name for name in given if name not in self.names and not self.every]:
            raise ValueError(
                f"no stage takes the side inputs {unused}; the stages' forwards name {list(self.names)} when the "
                "pipeline is built. Name them there as parameters behind the first"
            )


def checked_side(side: Any) -> dict[str, Tensor]:
    """Those that are not None, in the order of their names; ValueError where one cannot be a side input."""
    if side is None:
        return {}
    if not isinstance(side, Mapping) or not all(isinstance(name, str) for name in side):
        keys = [type(key).__name__ for key in side] if isinstance(side, Mapping) else type(side).__name__
        raise ValueError(f"side must be a mapping from names to tensors, got {keys}")
    if reserved := sorted(filter(is_reserved, side)):
        raise ValueError(f"side inputs are called {reserved}, names that the pipeline uses; choose others")
    found = {name: side[name] for name in sorted(side) if side[name] is not None}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"side input {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"side input {name!r} must be dense, got {tensor.layout}")
        if tensor.requires_grad:
            raise ValueError(f"side input {name!r} requires grad, but none flows back to it; detach it or make it an "
                             "input, which the stages hand on")
    return found


class SideInputs:
    """The side inputs that are with this rank's stages, during one step; they are named by (stage, micro-batch).

    names: what the ranks agreed on; microbatches: the values, on the rank of the first stage; takes: by stage.
    """

    def __init__(
        self, names: Sequence[str], microbatches: Sequence[tuple[Tensor, ...]], takes: Mapping[int, Takes]
    ) -> None:
        self.names, self._takes = names, takes
        self._at: dict[Slot, tuple[Tensor, ...]] = {(0, i): tensors for i, tensors in enumerate(microbatches)}

    def arrive(self, slot: Slot, message: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep those at the end of a message to a stage; return the activation before them."""
        if not self.names:
            return message
        end = len(message) - len(self.names)
        self._at[slot] = message[end:]
        return message[:end]

    def taken(self, slot: Slot) -> dict[str, Tensor]:
        """Those for the stage's forward. What it asks of them, such as a gradient, is not asked of those sent on."""
        if not self.names:
            return {}
        takes = self._takes[slot[0]]
        found = zip(self.names, self._at.get(slot, ()))  # none after a failure
        return {name: tensor.detach() for name, tensor in found if takes.every or name in takes.names}

    def carried(self, slot: Slot) -> dict[str, Tensor | None]:
        """The same for a carry, which has all that the forward names."""
        return dict.fromkeys(self._takes[slot[0]].names) | self.taken(slot)

    def leave(self, slot: Slot) -> tuple[Tensor, ...]:
        """Let go of those of a stage whose forward is done; they belong behind its result."""
        return self._at.pop(slot, ())
