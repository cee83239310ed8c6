"""Which errors are said in a line, without a traceback, and the exit status of each."""

from __future__ import annotations

PLAIN = (ValueError, FloatingPointError, OSError)
USER_ERROR = 2  # exit status of what the user can put right: a ValueError


def exit_status(error: BaseException) -> int:
    """Of a process that ends with `error`."""
    return USER_ERROR if isinstance(error, ValueError) else 1


def error_line(error: BaseException) -> str:
    """What is said of it, with a line more for each of its notes."""
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
