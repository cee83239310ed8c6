"""What `torch.compile` leaves as it is. Imported where something is compiled, since it brings the compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from dualpipe.nn.linear import Linear


@torch.compiler.disable
def linear(layer: Linear, x: Tensor) -> Tensor:
    """A compiler must not trace the backward: whether to defer is asked each time.

    It is kept out from the first line on, since it would look at each size of weight anew, up to its limit of eight.
    """
    return Linear.forward(layer, x)  # not that of a subclass, which has called this one
