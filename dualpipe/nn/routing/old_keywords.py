"""Keyword arguments of routers under the names that they had before they were grouped; the next release drops them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

P = ParamSpec("P")


def old_keywords(
    groups: Mapping[str, Callable[..., object]], names: Mapping[str, tuple[str, str]]
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor take its old keyword arguments as well, with a DeprecationWarning.

    groups: what makes the value of a parameter that groups several. names: by an old name, the parameter that it
    belongs to and its name there, "" where it is that parameter.
    """

    def decorate(constructor: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(constructor)
        def construct(*args: Any, **given: Any) -> None:
            old = given.keys() & names.keys()
            if old:
                warnings.warn(f"{', '.join(sorted(old))}: give {', '.join(sorted({names[name][0] for name in old}))} "
                              "instead; the old names go with the next release", DeprecationWarning, stacklevel=2)
            fields: dict[str, dict[str, Any]] = {}
            for name in old:
                parameter, field = names[name]
                if parameter in given:
                    raise TypeError(f"{name} is part of {parameter}, which is given too; give {parameter} alone")
                fields.setdefault(parameter, {})[field] = given.pop(name)
            for parameter, values in fields.items():
                given[parameter] = groups[parameter](**values) if parameter in groups else values[""]
            constructor(*args, **given)

        return construct

    return decorate
