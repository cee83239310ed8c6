"""Garbage collection of Python's reference cycles after the same steps on all ranks.

By itself it runs whenever a process has made enough objects, on each rank at another moment, and a rank that pauses
holds up its pipeline.
"""

from __future__ import annotations

import gc
from typing import Self


class GarbageCollection:
    """Collects garbage after every `interval` steps and at no other time; 0: whenever Python does.

    For a `with` around all steps, after which Python's collector is as it was. What exists at the start of it is not
    looked at, which makes a collection short.
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
        """Collect, where it is time after `step`, counted from 1."""
        if self._interval and step % self._interval == 0:
            gc.collect()
