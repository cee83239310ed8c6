"""Stand-ins: modules that take the place of a model's own for one call of its forward.

A model of transformers is one function that calls its parts. Run with stand-ins it tells what a part would get
(`Recorder`), ends where a part is reached (`Reached`), or goes on from a part's result that is known (`Known`). So a
layer is cut at its experts without its source being touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def standing_in(root: nn.Module, stand_ins: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put modules into the places of others, by their names in `root`, while the `with` lasts."""
    replaced: list[tuple[nn.Module, str, nn.Module | None]] = []
    try:
        for path, stand_in in stand_ins.items():
            parent_path, _, name = path.rpartition(".")
            parent = root.get_submodule(parent_path)
            replaced.append((parent, name, parent._modules[name]))
            parent._modules[name] = stand_in
        yield
    finally:
        for parent, name, module in reversed(replaced):
            parent._modules[name] = module


class PartReached(Exception):
    """Ends a forward where a part is reached; `inputs` are the arguments of the part."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__("a part of the model is reached")
        self.inputs = inputs


class Reached(nn.Module):
    """Raises `PartReached` when it is called."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raise the exception; what is given by name comes behind the rest, in its order."""
        raise PartReached((*inputs, *named.values()))


class Noted(nn.Module):
    """Calls a module, and notes what it returns in `results`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._noted = [module]  # in a list: the module stays where it is, and is no part of this one
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        (module,) = self._noted
        result = module(*args, **kwargs)
        self.results.append(result)
        return result


class Known(nn.Module):
    """Returns `results`, one in each call; beyond them it calls the module that it stands for."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self._stands_for = [module]
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next result."""
        if self.results:
            return self.results.pop(0)
        (module,) = self._stands_for
        assert module is not None, "called once more than before"
        return module(*args, **kwargs)


class Entry(nn.Module):
    """Stands for a layer: gives it hidden states that are known, whatever it is called with; without a layer, these."""

    def __init__(self, hidden_states: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self._hidden_states = hidden_states
        self._stands_for = [layer]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer makes of the known hidden states."""
        (layer,) = self._stands_for
        return self._hidden_states if layer is None else layer(self._hidden_states, *args, **kwargs)


class Recorder(nn.Module):
    """Stands for a layer: keeps what it is called with, and returns its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states as they are."""
        self.args = args
        self.kwargs = kwargs
        return hidden_states
