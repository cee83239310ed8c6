"""Says why the weight gradient of a parameter is not deferred."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from dualpipe.nn.conversion import deferring_class, is_fsdp_module
from dualpipe.nn.grouped_linear import GroupedLinear
from dualpipe.nn.linear import Linear, TransposedLinear

NOT_SEEN = ("in no graph that a forward has left, as inside a reentrant checkpoint; counted over the rows of the "
            "stage's other layers")
HOOK = "hook on the parameter"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_computed_from(owner: nn.Module, name: str) -> bool:
    """Return True for a parameter, `name` in its module, from which the weight that is used is computed."""
    return isinstance(owner, ParametrizationList) or name in ("weight_orig", "weight_g", "weight_v")


def why_no_gemm(owner: nn.Module, operators: Collection[str]) -> str:
    """Return why a parameter is not counted."""
    if isinstance(owner, nn.Embedding):
        return "embedding: its gradient is no GEMM, not counted"
    return f"used by {', '.join(sorted(operators))}: no GEMM, not counted"


def why_not_deferred(owner: nn.Module, name: str, dim: int, functions: Collection[str]) -> str:
    """Return why autograd makes the gradient of a weight: a parameter, `name` in `owner`, of `dim` dimensions.

    functions: the `autograd.Function`s that take it, whose insides are not known.
    """
    reason = _by_owner(owner, name, dim)
    inside = ["torch.compile" if function == "CompiledFunction" else function for function in functions]
    return f"{reason}; inside {', '.join(sorted(inside))}, counted as one GEMM" if inside else reason


def _by_owner(owner: nn.Module, name: str, dim: int) -> str:
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
