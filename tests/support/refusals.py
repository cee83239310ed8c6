"""Errors of calls as texts, which ranks can return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualpipe.runtime.errors import PipelineError


def refusal(call: Callable[[], Any]) -> str:
    """Return the class and the text of the error that a call raises, or "" if it raises none."""
    try:
        call()
    except (ValueError, PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
