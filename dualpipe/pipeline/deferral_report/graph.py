"""Reads the autograd graph that a forward leaves: which operators take which parameters, and the FLOPs of their GEMMs.

The graph knows what modules do not: parameters that are used outside of a layer's `forward`, in slices, or by experts
in a loop, each with the rows that it really had. Nothing is patched, and the forward runs as always. Only shapes are
read, never saved tensors: what activation checkpointing has packed would be computed again for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

# Of each GEMM, its operands that can be weights, by their place among its inputs, and the dimension of an operand that
# the forward sums over. Its weight gradient has as many FLOPs as the forward: 2 * elements of the result * that size.
_GEMMS = {
    "Mm": {0: -1, 1: -2},
    "Addmm": {1: -1, 2: -2},
    "Bmm": {0: -1, 1: -2},
    "Baddbmm": {1: -1, 2: -2},
    "GroupedMm": {0: -1, 1: -2},
    "Mv": {0: -1},
    "Addmv": {1: -1},
    "Linear": {1: -1},
}
_CONVOLUTION = "Convolution"
_VIEWS = frozenset((
    "T", "Transpose", "Permute", "NumpyT", "MT", "Adjoint", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided",
    "Select", "Slice", "Narrow", "Split", "SplitWithSizes", "Unbind", "Expand", "Squeeze", "Unsqueeze", "Unfold",
    "Clone", "ToCopy", "Contiguous", "Index", "IndexSelect", "_ToTorchTensor", "_FromTorchTensor",
))  # a result is made of the elements of one operand
_JOINS = frozenset(("Cat", "Stack"))  # or of several
_MOST_COMPUTED = 64  # operators between a parameter and the weight that is computed from it


class Use(NamedTuple):
    """One operator that takes `parameter`, itself or a view; `flops` are those of the weight gradient, 0 unless a GEMM.

    kind: "function" for an `autograd.Function`, or a compiled region: what is inside is not known, and `flops` are
    those of one GEMM over the rows of the result; "computed": a GEMM takes what is computed from the parameter.
    """

    parameter: nn.Parameter
    operator: str
    kind: Literal["gemm", "computed", "function", "other"]
    flops: int


def parameter_uses(roots: Iterable[GradientEdge], computing: Collection[nn.Parameter] = ()) -> Iterator[Use]:
    """Yield the uses of matrices and stacks of matrices, not of vectors, in the graph behind `roots`.

    computing: parameters from which weights are computed.
    """
    pending = [root.node for root in roots]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        yield from _uses_by(node, computing)
        pending.extend(source for source, _ in node.next_functions if source is not None)


def _uses_by(node: Node, computing: Collection[nn.Parameter]) -> Iterator[Use]:
    """Yield the uses by one operator."""
    operator = operator_of(node)
    if operator in _VIEWS or operator in _JOINS:
        return  # seen from the operators that take their results
    for place, (source, number) in enumerate(node.next_functions):
        if source is None:
            continue
        parameters = [parameter for parameter in _origins(source) if parameter.dim() > 1]
        summed_size = _summed_size(operator, place, source, number)
        if summed_size is not None:
            flops = 2 * _shape(node, 0).numel() * summed_size
            if parameters:
                yield from _shared(parameters, operator, flops)
            elif computing:
                yield from _computed(source, computing, operator, flops)
        elif isinstance(node, BackwardCFunction):
            rows = _shape(node, 0)[:-1].numel()
            for parameter in parameters:
                yield Use(parameter, operator, "function", gemm_flops(parameter.shape, rows))
        else:
            for parameter in parameters:
                yield Use(parameter, operator, "other", 0)


def gemm_flops(shape: torch.Size, rows: int) -> int:
    """Return the FLOPs of the weight gradient of a matrix, or of a stack of matrices that share the rows."""
    matrix = shape if len(shape) == 2 else shape[1:]
    return 2 * rows * prod(matrix)


def operator_of(node: Node) -> str:
    """Return the operator of a backward node, such as "Addmm" of AddmmBackward0."""
    return node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _summed_size(operator: str, place: int, source: Node, number: int) -> int | None:
    """Return the size that a GEMM sums over; None where the operator is none, or the operand no weight."""
    if operator == _CONVOLUTION:
        return prod(_shape(source, number)[1:]) if place == 1 else None
    dimension = _GEMMS.get(operator, {}).get(place)
    return None if dimension is None else _shape(source, number)[dimension]


def _shape(node: Node, number: int) -> torch.Size:
    """Return the shape of a result of the forward operator whose backward is `node`."""
    return torch.Size(node._input_metadata[number].shape)


def _origins(source: Node) -> list[nn.Parameter]:
    """Return the parameters of which an operand is made by views and joins alone."""
    parameters: list[nn.Parameter] = []
    pending = [source]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            parameters.append(variable)
        elif operator_of(node) in _VIEWS or operator_of(node) in _JOINS:
            pending.extend(behind for behind, _ in node.next_functions if behind is not None)
        else:
            return []
    return parameters


def _shared(parameters: list[nn.Parameter], operator: str, flops: int) -> Iterator[Use]:
    """Yield a GEMM's FLOPs by the parameters that its weight is joined from: as many as they have of its elements."""
    elements = sum(parameter.numel() for parameter in parameters)
    for parameter in parameters:
        yield Use(parameter, operator, "gemm", flops * parameter.numel() // max(1, elements))


def _computed(source: Node, computing: Collection[nn.Parameter], operator: str, flops: int) -> Iterator[Use]:
    """Yield the use of the largest parameter that a GEMM's weight is computed from, if it is."""
    found: list[nn.Parameter] = []
    pending = [source]
    visited: set[Node] = set()
    while pending and len(visited) < _MOST_COMPUTED:
        node = pending.pop()
        if node in visited or operator_of(node) in _GEMMS:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and variable in computing:
            found.append(variable)
        pending.extend(behind for behind, _ in node.next_functions if behind is not None)
    if found:
        yield Use(max(found, key=torch.numel), operator, "computed", flops)
