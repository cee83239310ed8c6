"""Convert linear layers of any module to layers that defer weight gradients, by changing their classes only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import new_class
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from dualpipe.nn.linear import Linear, TransposedLinear
from dualpipe.quantized import QuantizedTensor

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# All names in the bytecode (`co_names`) of `Conv1D.forward` in transformers. A `forward` that uses any other name
# computes something else, and its class is not recognized.
_CONV1D_NAMES = {"size", "nf", "torch", "addmm", "bias", "view", "weight"}


def defer_weight_grads(module: ModuleT) -> ModuleT:
    """Convert the linear layers in `module`, including itself, to defer their weight gradients; in place.

    Converts `nn.Linear`, subclasses of it that inherit its `forward`, and `Conv1D` of transformers' GPT-2, recognized
    by its structure. Only the class of these modules changes, to a subclass of their class: parameters, state-dict
    keys, hooks and names stay, and copies and pickles work.

    Does not convert layers with a computed weight (parametrized, pruned), quantized layers, layers with another
    `forward`, and layers that `fully_shard` of FSDP2 was called on: call this function before `fully_shard`.
    `Pipeline.deferral_report` lists the layers that are not converted.

    `undo_defer_weight_grads` is the way back.

    If a weight is used several times, or shared with another module, the gradients of all uses are added.

    Returns `module`.
    """
    for child in module.modules():
        deferring = deferring_class(child)
        if deferring is not None:
            child.__class__ = deferring
    return module


def undo_defer_weight_grads(module: ModuleT) -> ModuleT:
    """Undo `defer_weight_grads` in `module`, including itself, in place: give all layers their original classes.

    For code that needs plain layers after training. A `dualpipe.nn.Linear` becomes an `nn.Linear`, also if it was built
    as one, unless its weight is quantized.

    Returns `module`. Raises ValueError for a layer that FSDP2 or a parametrization has given another class since.
    """
    for name, child in module.named_modules():
        is_deferring = isinstance(child, Linear | TransposedLinear)
        if is_deferring and (is_fsdp_module(child) or is_parametrized(child)):
            raise ValueError(f"layer {name!r} is a {type(child).__name__} since fully_shard or a parametrization; call "
                             "undo_defer_weight_grads before fully_shard, or after remove_parametrizations")
    for child in module.modules():
        original = _original_class(child)
        if original is not None:
            child.__class__ = original
    return module


def _original_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that `module` had before `defer_weight_grads`; None if it has it still."""
    if isinstance(module, _Derived):
        return module.original_class
    if type(module) is Linear and not isinstance(module.weight, QuantizedTensor):
        return nn.Linear
    return None


def deferring_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that makes `module` defer its weight gradient; None if there is none, or it defers already."""
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter) or is_lazy(weight):
        return None
    original: Any = type(module)  # Any: mypy considers module classes unhashable, and @cache needs hashable arguments
    if original is nn.Linear:
        return Linear
    # FSDP2 or parametrize has replaced the class of the module already, and relies on the new class.
    if is_fsdp_module(module) or is_parametrized(module):
        return None
    if isinstance(module, nn.Linear) and original.forward is nn.Linear.forward:
        return _deferring_subclass(original)
    if is_conv1d(module) and not isinstance(module, TransposedLinear):
        return _deferring_conv1d(original)
    return None


def is_fsdp_module(module: nn.Module) -> bool:
    """Return True if `module` itself was passed to FSDP2's `fully_shard`.

    Compares class names, because the package of FSDP2 is slow to import.
    """
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_conv1d(module: nn.Module) -> bool:
    """Return True for an instance of transformers' `Conv1D`: y = x W + b with W (nx, nf).

    Also for a copy of that class in another package, and for a subclass that `defer_weight_grads` created.
    """
    if type(module).__name__ != "Conv1D" or isinstance(module, nn.Conv1d):
        return False
    in_features = getattr(module, "nx", None)
    out_features = getattr(module, "nf", None)
    shapes = {name: tuple(param.shape) for name, param in module._parameters.items() if param is not None}
    if shapes != {"weight": (in_features, out_features), "bias": (out_features,)} or module._modules:
        return False
    if isinstance(module, TransposedLinear):
        return True
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "addmm" in code.co_names and set(code.co_names) <= _CONV1D_NAMES


@cache
def _deferring_subclass(original: Any) -> type[nn.Module] | None:
    """Create a deferring subclass of `original`, with its name.

    Attributes of `original` take precedence over those of `Linear`; only attributes that it inherits from `nn.Linear`,
    such as `forward`, are replaced. Returns None if `forward` is not replaced, because `original` itself assigns
    `forward = nn.Linear.forward`.
    """
    deferring = _derive(original, (original, _DeferringSubclass))
    return deferring if deferring.forward is Linear.forward else None


@cache
def _deferring_conv1d(original: Any) -> type[nn.Module]:
    return _derive(original, (_DeferringConv1D, original))


def _derive(original: type[nn.Module], bases: tuple[type, ...]) -> type[nn.Module]:
    """Create a class with the module and name of `original`."""
    attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__, "original_class": original}
    return new_class(original.__name__, bases, exec_body=lambda body: body.update(attributes))


class _Derived(nn.Module):
    """Base of the created classes. Instances are pickled with their original class, and converted when loaded.

    pickle cannot import a created class by its name.
    """

    original_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (_, *arguments), *state = reduced
        make: Callable[..., nn.Module] = _new_conv1d if isinstance(self, TransposedLinear) else _new_subclass
        return make, (self.original_class, *arguments), *state


class _DeferringSubclass(_Derived, Linear):
    pass


class _DeferringConv1D(_Derived, TransposedLinear):
    pass


def _new_subclass(original: Any, *arguments: Any) -> nn.Module:
    deferring = _deferring_subclass(original)
    assert deferring is not None, "a module of a deferring class was pickled, so its class can be created"
    return deferring.__new__(deferring, *arguments)


def _new_conv1d(original: Any, *arguments: Any) -> nn.Module:
    deferring = _deferring_conv1d(original)
    return deferring.__new__(deferring, *arguments)
