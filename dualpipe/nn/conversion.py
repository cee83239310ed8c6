"""Turns layers of any module into ones that defer their weight gradients, by changing their classes alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import new_class
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from dualpipe.nn.linear import Linear, TransposedLinear

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# All that the `forward` of transformers' Conv1D uses: one with other names computes something else.
_CONV1D_NAMES = {"size", "nf", "torch", "addmm", "bias", "view", "weight"}


def defer_weight_grads(module: ModuleT) -> ModuleT:
    """Make the linear layers in `module`, itself included, defer their weight gradients, in place; returns `module`.

    These are `nn.Linear`; subclasses of it whose `forward` is its own; and `Conv1D` of transformers' GPT-2, known by
    its form. Only the class of these modules changes, to one that is still an instance of theirs: parameters,
    state-dict keys, hooks and names stay, and so do copies and pickles. Layers whose weight is computed from others
    (parametrized, pruned), quantized ones and those with a `forward` of their own are left alone, and so is what
    FSDP2 was given by itself, so call this before `fully_shard`; `Pipeline.deferral_report` names them. A weight that
    is used several times, or shared with another module, gets every contribution.
    """
    for child in module.modules():
        kind = deferring_class(child)
        if kind is not None:
            child.__class__ = kind
    return module


def deferring_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that makes `module` defer its weight gradient; None where there is none, or it does."""
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter) or is_lazy(weight):
        return None
    kind: Any = type(module)  # Any: to mypy no class of modules is hashable, as the caches below need
    if kind is nn.Linear:
        return Linear
    if is_sharded_alone(module) or is_parametrized(module):  # whose wrappers take the class to be theirs
        return None
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return _deferring_subclass(kind)
    if is_conv1d(module) and not isinstance(module, TransposedLinear):
        return _deferring_conv1d(kind)
    return None


def is_sharded_alone(module: nn.Module) -> bool:
    """Return True for what FSDP2's `fully_shard` was given by itself; by name, as its package is slow to import."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' `Conv1D`, y = x W + b with W (nx, nf), and for copies of it, also if deferring."""
    if type(module).__name__ != "Conv1D" or isinstance(module, nn.Conv1d):
        return False
    inputs, outputs = getattr(module, "nx", None), getattr(module, "nf", None)
    shapes = {name: tuple(param.shape) for name, param in module._parameters.items() if param is not None}
    if shapes != {"weight": (inputs, outputs), "bias": (outputs,)} or module._modules:
        return False
    if isinstance(module, TransposedLinear):
        return True
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "addmm" in code.co_names and set(code.co_names) <= _CONV1D_NAMES


@cache
def _deferring_subclass(original: Any) -> type[nn.Module] | None:
    """Return a class of the original's name that is one of its instances' too; attributes are its own first."""
    kind = _derived(original, (original, _OfSubclass))
    return kind if kind.forward is Linear.forward else None


@cache
def _deferring_conv1d(original: Any) -> type[nn.Module]:
    return _derived(original, (_OfConv1D, original))


def _derived(original: type[nn.Module], bases: tuple[type, ...]) -> type[nn.Module]:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "original_class": original}
    return new_class(original.__name__, bases, exec_body=lambda body: body.update(names))


class _Derived(nn.Module):
    """Pickles instances of a class that no module has under its name."""

    original_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (_, *arguments), *state = reduced
        make: Callable[..., nn.Module] = _new_conv1d if isinstance(self, TransposedLinear) else _new_subclass
        return make, (self.original_class, *arguments), *state


class _OfSubclass(_Derived, Linear):
    pass


class _OfConv1D(_Derived, TransposedLinear):
    pass


def _new_subclass(original: Any, *arguments: Any) -> nn.Module:
    kind = _deferring_subclass(original)
    assert kind is not None, "it was one when it was pickled"
    return kind.__new__(kind, *arguments)


def _new_conv1d(original: Any, *arguments: Any) -> nn.Module:
    kind = _deferring_conv1d(original)
    return kind.__new__(kind, *arguments)
