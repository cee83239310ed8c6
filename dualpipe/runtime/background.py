"""Work on daemon threads, which never delay the end of the process. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def run_in_background(work: Callable[[], T], name: str = "") -> Future[T]:
    """Run `work` on a daemon thread called `name`; return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by `future.result()`
            future.set_exception(error)

    Thread(target=run, daemon=True, name=name).start()
    return future


def run_with_timeout(work: Callable[[], T], seconds: float, name: str = "") -> T | None:
    """Return the result of `work`, or None if it has not ended after `seconds`. Raises the error of `work`."""
    future = run_in_background(work, name)
    wait([future], seconds)
    return future.result() if future.done() else None
