"""Work on a thread that no end of this process waits for. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str = "") -> Future[T]:
    """What `work` will have given, on a thread that no end of this process waits for."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            found.set_exception(error)

    Thread(target=run, daemon=True, name=name).start()
    return found
