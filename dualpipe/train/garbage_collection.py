"""Garbage collection of Python's reference cycles after the same steps on all ranks.

Python collects whenever a process has allocated enough objects, which is at a different time on every rank. A rank that
pauses for it holds up its pipeline.
"""

from __future__ import annotations

import gc
from typing import Self


class GarbageCollection:
    """Collects garbage after every `interval` steps and at no other time; with 0, whenever Python does.

    Use it as a context manager around all steps; at the end it restores Python's collector. Objects that exist at the
    start are frozen, that is exempt from collection, which makes a collection short.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = False

    def __enter__(self) -> Self:
        if self._interval:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after(self, step: int) -> None:
        """Collect garbage if it is due after `step`, counted from 1."""
        if self._interval and step % self._interval == 0:
            gc.collect()
