"""Names in the uncut model of the modules of its stages, which may call them otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from torch import nn


class _Key(NamedTuple):
    """Identity of a module. parameters: the uncut model's names of those inside it or, where it has none, inside the
    nearest module around it; path: from there to the module."""

    parameters: frozenset[str]
    path: str


class ModuleNames:
    """The names of an uncut model's modules, found for those of a stage by the parameters inside them.

    Of modules with the same parameters inside, such as one that wraps another, all have the outermost one's name.

    tied: for each name of a parameter, all names of it; see `tied_names`.
    """

    def __init__(self, whole: nn.Module, tied: Mapping[str, list[str]]) -> None:
        self._tied = tied
        self._names: dict[_Key, str] = {}
        for path, key in self._keys(whole, {name: name for name in tied}).items():
            self._names.setdefault(key, path)  # an outer one comes first

    def of_whole(self, whole: nn.Module) -> dict[nn.Module, str]:
        """Return the names of the modules of an uncut model."""
        return self.of(whole, {name: name for name in self._tied})

    def of(self, module: nn.Module, names: Mapping[str, str]) -> dict[nn.Module, str]:
        """Return the names of the modules inside `module`, those that the uncut model has.

        names: of its parameters, in the uncut model.
        """
        keys = self._keys(module, names)
        modules = dict(module.named_modules())
        return {modules[path]: self._names[key] for path, key in keys.items() if key in self._names}

    def _keys(self, module: nn.Module, names: Mapping[str, str]) -> dict[str, _Key]:
        """Return the keys of a module's modules, by their names in it, outer ones first."""
        parameters: dict[str, set[str]] = {}
        for own, name in names.items():
            for prefix in _prefixes(own):
                parameters.setdefault(prefix, set()).add(self._tied[name][0])
        keys: dict[str, _Key] = {}
        for path, _ in module.named_modules():
            anchor = next(prefix for prefix in reversed([*_prefixes(path), path]) if not prefix or prefix in parameters)
            rest = path[len(anchor):].lstrip(".")
            keys[path] = _Key(frozenset(parameters.get(anchor, ())), rest)
        return keys


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a module or parameter: "a.b.c" -> "", "a", "a.b"."""
    parts = name.split(".")[:-1]
    return ["", *accumulate(parts, lambda around, part: f"{around}.{part}")]
