"""What work costs in calls of functions, which is the same on every machine and beside any load."""

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable[..., Any], *args: Any, **options: Any) -> int:
    """How many functions, Python's and C's, this thread calls while `function` runs."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what others left behind may call functions when it is collected
    sys.setprofile(count)
    try:
        function(*args, **options)
    finally:
        sys.setprofile(before)
        gc.enable()
    return found
