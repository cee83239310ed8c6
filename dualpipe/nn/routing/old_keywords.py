"""Deprecated keyword arguments of routers, from before they were grouped; the next release removes them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

P = ParamSpec("P")


def old_keywords(
    groups: Mapping[str, Callable[..., object]], names: Mapping[str, tuple[str, str]]
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a constructor to also accept its old keyword arguments, with a DeprecationWarning.

    Args:
        groups: constructors of the values that group several old keywords, by new parameter: {"scoring": Scoring}.
        names: (new parameter, field) by old keyword; the field is "" if the keyword was only renamed.
    """

    def decorate(constructor: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(constructor)
        def construct(*args: Any, **keywords: Any) -> None:
            old = keywords.keys() & names.keys()
            if old:
                warnings.warn(f"{', '.join(sorted(old))}: give {', '.join(sorted({names[name][0] for name in old}))} "
                              "instead; the next release removes the old names", DeprecationWarning, stacklevel=2)
            fields: dict[str, dict[str, Any]] = {}
            for name in old:
                parameter, field = names[name]
                if parameter in keywords:
                    raise TypeError(f"{name} is part of {parameter}, which is given too; give {parameter} alone")
                fields.setdefault(parameter, {})[field] = keywords.pop(name)
            for parameter, values in fields.items():
                keywords[parameter] = groups[parameter](**values) if parameter in groups else values[""]
            constructor(*args, **keywords)

        return construct

    return decorate
