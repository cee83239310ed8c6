"""Registry of the operators that work on the bytes of quantized tensors, and the switch that forbids all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

is_strict: ContextVar[bool] = ContextVar("dualpipe_quantized_strict", default=False)

_operators: dict[Any, Callable[..., Any]] = {}  # implementation by torch's operator


@contextmanager
def strict() -> Iterator[None]:
    """Context manager in which operators that would dequantize a `QuantizedTensor` raise ValueError instead."""
    token = is_strict.set(True)
    try:
        yield
    finally:
        is_strict.reset(token)


def operator(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the implementation of operators for quantized tensors.

    The function returns NotImplemented if the operator needs the values, which are then dequantized.
    """

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        _operators.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


def implementation_of(function: Any) -> Callable[..., Any] | None:
    """Return the registered implementation of one of torch's operators; None if there is none."""
    return _operators.get(function)
