"""The arguments of a step: what each rank checks on its own, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class StepArguments(NamedTuple):
    """One rank's arguments, reduced to what the ranks compare. Travels as JSON."""

    num_chunks: int
    grad: bool
    training: list[bool]  # by module
    input_shapes: list[list[int]]
    batch_size: int | None  # of the inputs, where this rank has some
    label_size: int | None

    @staticmethod
    def of(
        inputs: Sequence[Tensor | None],
        num_chunks: int,
        labels: Sequence[Tensor] | None,
        modules: Sequence[nn.Module],
        batch_dim: int,
    ) -> StepArguments:
        tensors = given(inputs)
        return StepArguments(
            num_chunks,
            torch.is_grad_enabled(),
            [module.training for module in modules],
            [list(t.shape) for t in tensors],
            tensors[0].shape[batch_dim] if tensors else None,
            labels[0].shape[batch_dim] if labels else None,
        )


def given(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The inputs of a rank; those that need none may pass None."""
    return [t for t in inputs if t is not None]


def split(
    what: str, tensors: Sequence[Tensor | None], num_chunks: int, dim: int, device: torch.device
) -> list[tuple[Tensor, ...]]:
    """The micro-batches, as `torch.tensor_split` cuts them; ValueError where a tensor cannot be cut."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{what} {i} must be a tensor, got {type(tensor).__name__}")
        shape = list(tensor.shape)
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{what} {i} of shape {shape} has no dimension {dim} to split")
        if tensor.shape[dim] < num_chunks:
            raise ValueError(
                f"{what} {i} of shape {shape} cannot be split into num_chunks={num_chunks} micro-batches along "
                f"dimension {dim}"
            )
        if tensor.device != device:
            raise ValueError(f"{what} {i} is on {tensor.device}, the stages on {device}; move it there")
    if len({tensor.shape[dim] for tensor in tensors}) > 1:
        raise ValueError(f"{what}s differ in size along dimension {dim}: {[list(t.shape) for t in tensors]}")
    chunks = [tensor.tensor_split(num_chunks, dim) for tensor in tensors]
    return list(zip(*chunks)) if chunks else [()] * num_chunks


def agree(ranks: Sequence[StepArguments], *, first: int, last: int) -> int:
    """The size of the batch; ValueError, with the same text on every rank, where the ranks disagree.

    first, last: the ranks of the first and the last stage.
    """
    same("num_chunks", [r.num_chunks for r in ranks])
    same("grad mode", [r.grad for r in ranks])
    if len(set(chain.from_iterable(r.training for r in ranks))) > 1:
        raise ValueError(f"ranks disagree about train/eval mode: module.training is {[r.training for r in ranks]}")
    same("the shapes of the inputs", [r.input_shapes or ranks[first].input_shapes for r in ranks])
    batch_size, label_size = ranks[first].batch_size, ranks[last].label_size
    if label_size not in (None, batch_size):
        raise ValueError(f"inputs have batch size {batch_size}, labels {label_size}")
    return batch_size


def same(what: str, values: Sequence[Any]) -> None:
    """ValueError unless all ranks' values are equal."""
    if any(value != values[0] for value in values):
        raise ValueError(f"ranks disagree about {what}: by rank {list(values)}")
