"""Merging of deferred weight gradients: one GEMM computes the gradient of a weight for several micro-batches.

Every GEMM that adds to the accumulator of an expert reads and writes it once. With few rows for each expert this takes
longer than the multiplications: at 256 rows the gate and up projections of 128 experts move 3.2 GB, about 1 ms on an
H100, beside 0.3 ms of multiplications. Micro-batches that are merged share one read and one write.

Numerics: on the CPU the result is bitwise equal to that of unmerged gradients, because micro-batches are added one
after the other. On CUDA a GEMM sums up to four micro-batches in float32 registers before it adds to the accumulator;
see `dualpipe.kernels.grouped_gemm.grouped_gemm_wgrad_merged`.

Memory: queues are merged when all of them are complete, so that the operands of all micro-batches are alive before the
first "W", as they are without merging. The merged queue is divided into one share for each micro-batch. Each share
frees about as many operands as one micro-batch has. If the accumulators are allocated already, the peak of memory is
therefore the same as without merging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class MergeableOperands(NamedTuple):
    """Operands of one micro-batch for a merged weight gradient, and the function that computes it.

    Attributes:
        weight_grad: computes the gradient over several micro-batches, `weight_grad(weight, operands, out=None)`, from
            the list of their `operands`, and adds it to `out` if given. The same for all micro-batches of a weight.
        operands: operands of this micro-batch.
    """

    weight_grad: Callable[..., Tensor]
    operands: Any


class MergeableGrad:
    """Deferred gradient of a weight, and of its bias, that can be merged with others of the same weight.

    Call it to compute the gradient of this micro-batch only, without merging.
    """

    __slots__ = ("_add", "_add_merged", "add_bias", "merge", "require_unchanged", "weight")

    def __init__(
        self, weight: Tensor, merge: MergeableOperands, add_merged: Callable[[Sequence[Any]], None],
        add: Callable[[], None], add_bias: Callable[[], None] | None, require_unchanged: Callable[[], None],
    ) -> None:
        """Store the functions that compute the gradient, merged or not, and add it to the accumulator.

        Args:
            weight: the parameter.
            merge: operands of this micro-batch for a merged GEMM.
            add_merged: adds the weight gradient over several micro-batches, from a list of their operands.
            add: adds the gradients of weight and bias for this micro-batch.
            add_bias: adds the gradient of the bias for this micro-batch; None without a bias.
            require_unchanged: raises ValueError if an operand of this micro-batch was changed in place.
        """
        self.weight = weight
        self.merge = merge
        self._add_merged = add_merged
        self._add = add
        self.add_bias = add_bias
        self.require_unchanged = require_unchanged

    def __call__(self) -> None:
        """Compute the gradients of this micro-batch only."""
        self._add()

    def add_with(self, others: Sequence[MergeableGrad]) -> None:
        """Compute the gradient together with `others`, from later micro-batches; those of biases one by one."""
        grads = (self, *others)
        for grad in grads:
            grad.require_unchanged()
        self._add_merged([grad.merge.operands for grad in grads])
        for grad in grads:
            if grad.add_bias is not None:
                grad.add_bias()


class _MergedGrads:
    """The gradients of one weight in several micro-batches, to be computed by one GEMM."""

    __slots__ = ("grads",)

    def __init__(self, first: MergeableGrad) -> None:
        self.grads = [first]

    def __call__(self) -> None:
        first, *others = self.grads
        if others:
            first.add_with(others)
        else:
            first()


Deferred = Callable[[], None]


def merge_queues(queues: Sequence[Sequence[Deferred]]) -> list[list[Deferred]]:
    """Merge the queues of several micro-batches into the same number of queues, with about equal work in each.

    The order is that of the queues, one micro-batch after the other, except that a merged gradient is computed at its
    place in the first micro-batch that has it. Gradients that are not merged are therefore added to their accumulators
    in the same order as without merging, and merged ones in the order of micro-batches.

    Example: the queues [a, X, b] and [a, X, b], where X can be merged, become [a, 2X] and [b, a, b]; 2X is one GEMM.
    """
    merged: dict[int, _MergedGrads] = {}
    order: list[Deferred] = []
    for queue in queues:
        for grad in queue:
            if not isinstance(grad, MergeableGrad):
                order.append(grad)
            elif id(grad.weight) in merged:
                merged[id(grad.weight)].grads.append(grad)
            else:
                merged[id(grad.weight)] = _MergedGrads(grad)
                order.append(merged[id(grad.weight)])
    return _shares(order, len(queues))


def _shares(order: Sequence[Deferred], num_shares: int) -> list[list[Deferred]]:
    """Divide `order` into shares with about the same number of gradients.

    A merged gradient that crosses the border of two shares belongs to the earlier one, which is then larger.
    """
    total = sum(_num_grads(deferred) for deferred in order)
    shares: list[list[Deferred]] = [[] for _ in range(num_shares)]
    share = 0
    done = 0
    for deferred in order:
        while done * num_shares >= total * (share + 1):
            share += 1
        shares[share].append(deferred)
        done += _num_grads(deferred)
    return shares


def _num_grads(deferred: Deferred) -> int:
    """Return the number of weight gradients that are computed at once."""
    return len(deferred.grads) if isinstance(deferred, _MergedGrads) else 1
