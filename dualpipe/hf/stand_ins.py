"""Stand-ins: modules that replace modules of a model for one call of its forward.

The forward of a transformers model is one function that calls its modules. With stand-ins, a call can record the
arguments of a module (`CallRecorder`), stop at a module (`ForwardStop`), or reuse the results of an earlier call
(`OutputReplay`). This is how a layer is cut at its experts without a change of its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn


@contextmanager
def swap_modules(root: nn.Module, stand_ins: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules of `root`, by their paths, for the duration of the `with` block."""
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
    """Base class of stand-ins: forwards attribute look-ups to the module that it replaces.

    The replaced module is not a submodule.
    """

    def __init__(self, module: nn.Module | SimpleNamespace | None = None) -> None:
        super().__init__()
        self.stand_for(module)

    def stand_for(self, module: nn.Module | SimpleNamespace | None) -> None:
        """Set the module that this one replaces."""
        self.__dict__["replaced_module"] = module  # past `nn.Module.__setattr__`, which would make it a submodule

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute in the replaced module, such as a layer's type, which a model may read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("replaced_module")
            if module is None:
                raise
            return getattr(module, name)


def plain_attributes(module: nn.Module) -> SimpleNamespace:
    """Copy the public numbers and strings among a module's attributes, such as a layer's type."""
    if isinstance(module, StandIn):
        module = module.replaced_module
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return SimpleNamespace(**{name: value for name, value in public.items() if isinstance(value, int | float | str)})


class LayerForm:
    """Form of the results of a model's layers: hidden states alone, or a tuple that starts with hidden states.

    num_results: length of the tuple; 0 for hidden states alone. The model does not use the rest of the tuple, such as
        attention weights.
    """

    def __init__(self, num_results: int = 0) -> None:
        self.num_results = num_results

    def pack(self, hidden_states: Tensor, rest: Any = None) -> Any:
        """Return hidden states in this form, with `rest` as every other element of the tuple."""
        if not self.num_results:
            return hidden_states
        return (hidden_states, *[rest] * (self.num_results - 1))


class ForwardStopped(Exception):
    """Raised by `ForwardStop`; `inputs` are the arguments of the module where the forward stopped."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__("the forward has been stopped at a module")
        self.inputs = inputs


class ForwardStop(nn.Module):
    """Stand-in that stops the forward by raising `ForwardStopped`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `ForwardStopped` with all arguments: the positional ones, then the keyword arguments in their order."""
        raise ForwardStopped((*args, *kwargs.values()))


class OutputRecorder(StandIn):
    """Stand-in that calls the module that it replaces, and appends the result to `results`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replaced module, and record its result."""
        result = self.replaced_module(*args, **kwargs)
        self.results.append(result)
        return result


class InputRecorder(StandIn):
    """Stand-in that returns its first argument unchanged, and appends it to `inputs`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record and return `x`."""
        self.inputs.append(x)
        return x


class FixedOutput(StandIn):
    """Stand-in that returns the same tensor in every call, and counts the calls."""

    def __init__(self, output: Tensor, module: nn.Module) -> None:
        super().__init__(module)
        self._output = output
        self.num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor."""
        self.num_calls += 1
        return self._output


class OutputReplay(StandIn):
    """Stand-in that returns the next element of `results`; if none is left, it calls the module that it replaces."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self.results: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next recorded result, or the result of the replaced module."""
        if self.results:
            return self.results.pop(0)
        assert self.replaced_module is not None, "a replay without a module was called more often than recorded"
        return self.replaced_module(*args, **kwargs)


class InputOverride(StandIn):
    """Stand-in that calls a layer with fixed hidden states, whatever the model passes."""

    def __init__(self, hidden_states: Tensor, layer: nn.Module) -> None:
        super().__init__(layer)
        self._hidden_states = hidden_states

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with the fixed hidden states and the model's other arguments."""
        return self.replaced_module(self._hidden_states, *args, **kwargs)


class FixedLayer(StandIn):
    """Stand-in for a layer that returns fixed hidden states, in the form of a layer's results.

    layer: the replaced layer, or its attributes, which a model may look up.
    """

    def __init__(self, hidden_states: Tensor, form: LayerForm, layer: nn.Module | SimpleNamespace) -> None:
        super().__init__(layer)
        self._hidden_states = hidden_states
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the fixed hidden states."""
        return self._form.pack(self._hidden_states)


class CallRecorder(StandIn):
    """Stand-in for a layer that records its arguments after the hidden states, and returns the hidden states."""

    def __init__(self, layer: nn.Module | None = None, form: LayerForm | None = None) -> None:
        super().__init__(layer)
        self._form = form or LayerForm()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments, and return the hidden states unchanged, in the form of a layer's results."""
        self.args = args
        self.kwargs = kwargs
        return self._form.pack(hidden_states)
