"""Reasons why the weight gradient of a parameter is not deferred."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from dualpipe.nn.conversion import deferring_class, is_fsdp_module
from dualpipe.nn.grouped_linear import GroupedLinear
from dualpipe.nn.linear import Linear, TransposedLinear

NOT_OBSERVED = ("in no graph of a forward, as inside a reentrant checkpoint; counted over the rows of the stage's "
                "other layers")
HOOK = "hook on the parameter"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_computed_from(owner: nn.Module, name: str) -> bool:
    """Return True if a weight is computed from a parameter. name: of the parameter in its module `owner`."""
    return isinstance(owner, ParametrizationList) or name in ("weight_orig", "weight_g", "weight_v")


def uncounted_reason(owner: nn.Module, operators: Collection[str]) -> str:
    """Return the reason why a parameter is not counted. operators: those that use it."""
    if isinstance(owner, nn.Embedding):
        return "embedding: its gradient is no GEMM, not counted"
    return f"used by {', '.join(sorted(operators))}: no GEMM, not counted"


def undeferred_reason(owner: nn.Module, name: str, dim: int, functions: Collection[str]) -> str:
    """Return the reason why autograd computes the gradient of a weight.

    Args:
        owner: module of the weight.
        name: its name in the module.
        dim: its number of dimensions.
        functions: `autograd.Function`s that take it, whose content is unknown.
    """
    reason = _reason_by_owner(owner, name, dim)
    if not functions:
        return reason
    titles = ["torch.compile" if function == "CompiledFunction" else function for function in functions]
    return f"{reason}; inside {', '.join(sorted(titles))}, counted as one GEMM"


def _reason_by_owner(owner: nn.Module, name: str, dim: int) -> str:
    """Return the reason that follows from the module of a weight."""
    kind = type(owner).__name__
    if is_computed_from(owner, name):
        how = "parametrized" if isinstance(owner, ParametrizationList) else "pruned, or by a norm"
        return f"weight computed from others ({how})"
    if isinstance(owner, Linear | TransposedLinear | GroupedLinear):
        return f"{kind} defers, but its weight is used outside its forward"
    if type(owner) is nn.Linear:
        return "nn.Linear, not passed to defer_weight_grads"
    if deferring_class(owner) is not None:
        return f"{kind}, not passed to defer_weight_grads"
    if isinstance(owner, nn.Linear) and is_fsdp_module(owner):
        return f"{kind}: call defer_weight_grads before fully_shard"
    if isinstance(owner, nn.Linear):
        return f"subclass {kind} of nn.Linear with its own forward"
    if type(owner) in _CONVOLUTIONS:
        return f"nn.{kind}"
    if isinstance(owner, nn.Embedding):
        return "weight of an embedding, used in a GEMM outside a deferring layer"
    stacked = f"{dim}-D parameter" if dim > 2 else "parameter"
    return f"{stacked} of {kind}, used outside a deferring layer"
