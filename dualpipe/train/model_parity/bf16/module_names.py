"""Names in the unpipelined model of the modules of stages, which may have other names there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from torch import nn


class _Key(NamedTuple):
    """Identity of a module.

    parameters: names in the unpipelined model of the parameters inside the module or, if it has none, inside the
    nearest module around it that has some. path: from that module to this one.
    """

    parameters: frozenset[str]
    path: str


class ModuleNames:
    """Maps modules of a stage to names in the unpipelined model, by the parameters inside them.

    Modules with the same parameters inside, such as a module and its wrapper, all get the name of the outermost one.

    tied: see `tied_names`.
    """

    def __init__(self, whole: nn.Module, tied: Mapping[str, list[str]]) -> None:
        self._tied = tied
        self._names: dict[_Key, str] = {}
        for path, key in self._keys(whole, {name: name for name in tied}).items():
            self._names.setdefault(key, path)  # outer modules come first

    def of_whole(self, whole: nn.Module) -> dict[nn.Module, str]:
        """Return the names of the modules of the unpipelined model."""
        return self.of(whole, {name: name for name in self._tied})

    def of(self, module: nn.Module, names: Mapping[str, str]) -> dict[nn.Module, str]:
        """Return the names of the modules inside `module` that the unpipelined model has too.

        names: names in the unpipelined model, by the names of the parameters in `module`.
        """
        keys = self._keys(module, names)
        modules = dict(module.named_modules())
        return {modules[path]: self._names[key] for path, key in keys.items() if key in self._names}

    def _keys(self, module: nn.Module, names: Mapping[str, str]) -> dict[str, _Key]:
        """Return the keys of the modules inside `module`, by their names in it, outer modules first."""
        parameters: dict[str, set[str]] = {}
        for parameter_name, name in names.items():
            for prefix in _prefixes(parameter_name):
                parameters.setdefault(prefix, set()).add(self._tied[name][0])
        keys: dict[str, _Key] = {}
        for path, _ in module.named_modules():
            anchor = next(prefix for prefix in reversed([*_prefixes(path), path]) if not prefix or prefix in parameters)
            path_from_anchor = path[len(anchor):].lstrip(".")
            keys[path] = _Key(frozenset(parameters.get(anchor, ())), path_from_anchor)
        return keys


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a module or parameter: "a.b.c" -> "", "a", "a.b"."""
    parts = name.split(".")[:-1]
    return ["", *accumulate(parts, lambda prefix, part: f"{prefix}.{part}")]
