"""Uses of parameters in the autograd graph of a forward: the operators that take them, and the FLOPs of their GEMMs.

The graph shows uses that modules do not: parameters outside of a layer's `forward`, in slices, or of experts in a loop,
all with their actual rows. Nothing is patched, and the forward is unchanged. Only shapes are read, never saved tensors:
those of activation checkpointing would be recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

# For each GEMM, its operands that can be weights, by index of the input, and the dimension of the operand over which
# the forward sums. The weight gradient has as many FLOPs as the forward: 2 * elements of the result * size of that.
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
))  # operators whose result consists of the elements of one operand
_JOINS = frozenset(("Cat", "Stack"))  # operators whose result consists of the elements of several operands
_MAX_OPERATORS = 64  # maximum number of operators between a parameter and the weight that is computed from it


class Use(NamedTuple):
    """Use of a parameter, or of a view of it, by one operator.

    Attributes:
        parameter: the parameter.
        operator: name of the operator.
        kind: "gemm"; "computed" for a GEMM with a weight that is computed from the parameter; "function" for an
            `autograd.Function` or a compiled region, whose content is unknown; "other".
        flops: FLOPs of the weight gradient; for a "function", those of one GEMM over the rows of the result; 0 for
            "other".
    """

    parameter: nn.Parameter
    operator: str
    kind: Literal["gemm", "computed", "function", "other"]
    flops: int


def parameter_uses(roots: Iterable[GradientEdge], computing: Collection[nn.Parameter] = ()) -> Iterator[Use]:
    """Yield the uses of matrices and stacks of matrices, not of vectors, in the graph of `roots`.

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
    """Yield the uses by the operator of a backward node."""
    operator = operator_of(node)
    if operator in _VIEWS or operator in _JOINS:
        return  # counted for the operators that take their results
    for index, (source, number) in enumerate(node.next_functions):
        if source is None:
            continue
        parameters = [parameter for parameter in _origins(source) if parameter.dim() > 1]
        summed_size = _summed_size(operator, index, source, number)
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
    """Return the FLOPs of the weight gradient of a matrix, or of a stack of matrices that divide the rows."""
    matrix = shape if len(shape) == 2 else shape[1:]
    return 2 * rows * prod(matrix)


def operator_of(node: Node) -> str:
    """Return the operator of a backward node: "Addmm" for AddmmBackward0."""
    return node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _summed_size(operator: str, index: int, source: Node, number: int) -> int | None:
    """Return the size over which a GEMM sums; None if the operator is no GEMM, or the operand cannot be a weight.

    Args:
        operator: name of the operator.
        index: index of the operand.
        source: backward node of the operator that has made the operand.
        number: index of the operand among the results of that operator.
    """
    if operator == _CONVOLUTION:
        return prod(_shape(source, number)[1:]) if index == 1 else None
    dimension = _GEMMS.get(operator, {}).get(index)
    return None if dimension is None else _shape(source, number)[dimension]


def _shape(node: Node, number: int) -> torch.Size:
    """Return the shape of a result of the forward operator whose backward is `node`."""
    return torch.Size(node._input_metadata[number].shape)


def _origins(source: Node) -> list[nn.Parameter]:
    """Return the parameters that an operand consists of; none if it is made by more than views and joins."""
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
            pending.extend(origin for origin, _ in node.next_functions if origin is not None)
        else:
            return []
    return parameters


def _shared(parameters: list[nn.Parameter], operator: str, flops: int) -> Iterator[Use]:
    """Yield the uses of a GEMM whose weight is joined from parameters; their FLOPs are in proportion to elements."""
    elements = sum(parameter.numel() for parameter in parameters)
    for parameter in parameters:
        yield Use(parameter, operator, "gemm", flops * parameter.numel() // max(1, elements))


def _computed(source: Node, computing: Collection[nn.Parameter], operator: str, flops: int) -> Iterator[Use]:
    """Yield the use of the largest parameter from which the weight of a GEMM is computed, if any."""
    origins: list[nn.Parameter] = []
    pending = [source]
    visited: set[Node] = set()
    while pending and len(visited) < _MAX_OPERATORS:
        node = pending.pop()
        if node in visited or operator_of(node) in _GEMMS:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and variable in computing:
            origins.append(variable)
        pending.extend(origin for origin, _ in node.next_functions if origin is not None)
    if origins:
        yield Use(max(origins, key=torch.numel), operator, "computed", flops)
