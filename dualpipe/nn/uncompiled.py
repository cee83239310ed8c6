"""Layers inside of regions that `torch.compile` or `torch.export` traces.

Import this module inside the functions that use it: torch._dynamo adds 0.5 s to every start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator

_REASON = ("layers of dualpipe with grouped GEMMs or quantized weights run uncompiled: compile without fullgraph=True; "
           "for torch.export, use experts that are nn.Linear, and weights that are not quantized")


@torch.compiler.disable(reason=_REASON)
def run_uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in eager mode; inside a compiled region, this breaks the graph.

    Pass the whole forward of a layer: the compiler would trace any part that is left out, and recompile it for every
    weight shape, up to its limit of eight.

    Raises ValueError in `torch.export`, which has no eager mode.
    """
    if torch.compiler.is_exporting():
        raise ValueError(_REASON)
    return function(*arguments)


def is_one_graph() -> bool:
    """Return True if the traced region must be one graph: in `torch.export` and `torch.compile(fullgraph=True)`."""
    return torch.compiler.is_exporting() or _is_traced_as_one_graph()


@torch.compiler.assume_constant_result  # called by the compiler while it traces
def _is_traced_as_one_graph() -> bool:
    translator = InstructionTranslator.current_tx()
    return bool(translator.one_graph or translator.error_on_graph_break)
