"""Stand-ins: modules that take the place of a model's own for one call of its forward.

A model of transformers is one function that calls its parts. Run with stand-ins it tells what a part is called with
(`CallRecorder`), ends at a part (`ForwardStop`), or goes on from results of an earlier run (`OutputReplay`). So a layer
is cut at its experts without its source being touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn


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


class StandIn(nn.Module):
    """Base of the stand-ins: has the attributes of the module that it replaces, which is not a part of it."""

    def __init__(self, module: nn.Module | SimpleNamespace | None = None) -> None:
        super().__init__()
        self.__dict__["replaced_module"] = module  # past `nn.Module.__setattr__`, which would make it a submodule

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced module, such as a layer's type, which a model may look up."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("replaced_module")
            if module is None:
                raise
            return getattr(module, name)


def plain_attributes(module: nn.Module) -> SimpleNamespace:
    """Return the numbers and strings among a module's attributes, such as a layer's type, without the module."""
    if isinstance(module, StandIn):
        module = module.replaced_module
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return SimpleNamespace(**{name: value for name, value in public.items() if isinstance(value, int | float | str)})


class LayerForm:
    """Form of what a model's layers return: hidden states alone, or first in a tuple of `num_results`.

    num_results: 0 for hidden states alone. The rest of the tuple, such as attention weights, is not used by the model.
    """

    def __init__(self, num_results: int = 0) -> None:
        self.num_results = num_results

    def pack(self, hidden_states: Tensor, rest: Any = None) -> Any:
        """Return hidden states in this form, with `rest` in all other places of the tuple."""
        if not self.num_results:
            return hidden_states
        return (hidden_states, *[rest] * (self.num_results - 1))


class ForwardStopped(Exception):
    """Ends a forward at a part of the model; `inputs` are the arguments of the part."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__("the forward has ended at a part of the model")
        self.inputs = inputs


class ForwardStop(nn.Module):
    """Raises `ForwardStopped` when it is called."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raise the exception; keyword arguments come behind the others, in their order."""
        raise ForwardStopped((*inputs, *named.values()))


class OutputRecorder(StandIn):
    """Calls the module that it replaces, and keeps the results in `results`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        result = self.replaced_module(*args, **kwargs)
        self.results.append(result)
        return result


class OutputReplay(StandIn):
    """Returns `results`, one in each call; beyond them it calls the module that it replaces."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next result."""
        if self.results:
            return self.results.pop(0)
        assert self.replaced_module is not None, "called more often than results were recorded"
        return self.replaced_module(*args, **kwargs)


class InputOverride(StandIn):
    """Calls a layer with other hidden states than it is given."""

    def __init__(self, hidden_states: Tensor, layer: nn.Module) -> None:
        super().__init__(layer)
        self._hidden_states = hidden_states

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer makes of the other hidden states."""
        return self.replaced_module(self._hidden_states, *args, **kwargs)


class FixedLayer(StandIn):
    """Returns the same hidden states in each call, in the form of a layer's results.

    layer: has the attributes that a model may look up, as `StandIn` says.
    """

    def __init__(self, hidden_states: Tensor, form: LayerForm, layer: nn.Module | SimpleNamespace) -> None:
        super().__init__(layer)
        self._hidden_states = hidden_states
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states."""
        return self._form.pack(self._hidden_states)


class CallRecorder(StandIn):
    """Keeps the arguments of a layer's call, and returns its first, in the form of a layer's results."""

    def __init__(self, layer: nn.Module | None = None, form: LayerForm | None = None) -> None:
        super().__init__(layer)
        self._form = form or LayerForm()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states as they are."""
        self.args = args
        self.kwargs = kwargs
        return self._form.pack(hidden_states)
