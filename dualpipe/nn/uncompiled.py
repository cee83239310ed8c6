"""Graph break for calls that `torch.compile` must not trace.

Import this module inside the functions that use it: torch._dynamo adds 0.5 s to every start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in eager mode; inside a compiled region, this breaks the graph.

    Pass the whole forward of a layer: the compiler would trace any part that is left out, and recompile it for every
    weight shape, up to its limit of eight.
    """
    return function(*arguments)
