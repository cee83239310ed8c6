"""Merging of deferred weight gradients: several micro-batches of the same weight in one GEMM.

The accumulator of an expert is read and written once for every GEMM that adds to it. With few rows for each expert this
takes longer than the GEMM itself: at 256 rows the gate and up projections of 128 experts move 3.2 GB, about 1 ms on an
H100, beside 0.3 ms of multiplications. Weight gradients that wait for the same moment can share it.

Bits: on CPU those of the unmerged gradients, as one micro-batch is added after the other. On CUDA a GEMM sums up to
four micro-batches in float32 registers before it adds to the accumulator: see
`dualpipe.kernels.grouped_gemm.grouped_gemm_wgrad_merged`.

Memory: merging starts when all queues are full, and keeps nothing that a queue would not keep. Until the first share
has run, the operands of all micro-batches are alive, merged or not; after each share, about as many are freed as those
of one micro-batch. Where the accumulators exist before, the peak is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class MergeableOperands(NamedTuple):
    """One micro-batch's part of a weight gradient that can be merged.

    Attributes:
        weight_grad: computes the gradient over several micro-batches, `weight_grad(weight, operands, out=None)`, from a
            list of their `operands`; with `out` it adds to that. The same for all micro-batches of a weight.
        operands: those of this micro-batch.
    """

    weight_grad: Callable[..., Tensor]
    operands: Any


class MergeableGrad:
    """Deferred gradient of a weight, and of its bias, that can be merged with others of the same weight.

    Calling it computes it alone.
    """

    __slots__ = ("_add", "_add_merged", "add_bias", "merge", "weight")

    def __init__(
        self, weight: Tensor, merge: MergeableOperands, add_merged: Callable[[Sequence[Any]], None],
        add: Callable[[], None], add_bias: Callable[[], None] | None,
    ) -> None:
        """Keep the ways to compute it.

        Args:
            weight: the parameter.
            merge: its part in a merged GEMM.
            add_merged: adds the weight gradient over several micro-batches, from a list of their operands.
            add: adds the gradients of weight and bias alone.
            add_bias: adds the gradient of the bias alone; None without a bias.
        """
        self.weight = weight
        self.merge = merge
        self._add_merged = add_merged
        self._add = add
        self.add_bias = add_bias

    def __call__(self) -> None:
        """Compute it alone."""
        self._add()

    def add_with(self, others: Sequence[MergeableGrad]) -> None:
        """Compute it together with `others`, those of later micro-batches; biases one by one."""
        grads = (self, *others)
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
    """Merge queues of deferred weight gradients, one for each micro-batch, into as many queues of about the same work.

    The order is that of the queues, one micro-batch after the other, but that a merged gradient comes at its place in
    the first micro-batch that has it. So gradients that are not merged are added to their accumulators in the same
    order as without merging, and merged ones in the order of micro-batches.

    Example: of queues [a, X, b] and [a, X, b], where X can be merged, come [a, 2X] and [b, a, b].
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
    """Cut `order` into shares of the same number of gradients or, where a merged one is across a border, more first."""
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
