"""Work on a thread that no end of this process waits for. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str = "") -> Future[T]:
    """Run `work` on a thread that the end of this process does not wait for; return its future."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            found.set_exception(error)

    Thread(target=run, daemon=True, name=name).start()
    return found


def limited(work: Callable[[], T], seconds: float, name: str = "") -> T | None:
    """Return the result of `work`, which may hang; None where it has not come after so many seconds."""
    found = in_background(work, name)
    wait([found], seconds)
    return found.result() if found.done() else None
