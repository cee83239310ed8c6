"""Calls that `torch.compile` must not trace. Imported where it is used: torch._dynamo takes 0.5 s of every start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` as it is, from within a compiled region, which breaks there.

    The compiler is kept out from the first line on, since it would look at each size of weight anew, up to its limit of
    eight.
    """
    return function(*arguments)
