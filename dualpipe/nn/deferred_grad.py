"""Deferred weight gradients: the operands of a layer's backward, and the GEMM that computes the gradients from them.

Gradients of one weight in several micro-batches can be merged: one GEMM then computes their sum. Every GEMM that adds
to the accumulator of an expert reads and writes it once. With few rows for each expert this takes longer than the
multiplications: at 256 rows the gate and up projections of 128 experts move 3.2 GB, about 1 ms on an H100, beside
0.3 ms of multiplications. Micro-batches that are merged share one read and one write.

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
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from dualpipe.nn import accumulators


class Gemm(NamedTuple):
    """Functions that compute the gradients of a kind of layer. `operands` is a NamedTuple of one backward's tensors.

    Attributes:
        weight_grad: `weight_grad(weight, operands, out)` returns the gradient of the local shard of `weight` in the
            dtype of its accumulator, from a list of operands: of one micro-batch or, if `merges`, of several. It adds
            to `out` unless that is None.
        num_rows: returns the number of rows of a micro-batch that the GEMM sums over; None: the gradient needs no GEMM.
        bias_grad: `bias_grad(bias, operands)` returns the gradient of `bias` from the operands of one micro-batch;
            None: such layers have no bias.
        merges: True if one call for several micro-batches is faster than one for each.
    """

    weight_grad: Callable[[Tensor, Sequence[Any], Tensor | None], Tensor]
    num_rows: Callable[[Any], int] | None = None
    bias_grad: Callable[[Tensor, Any], Tensor] | None = None
    merges: bool = False

    def compute_bias_grad(self, bias: Tensor, operands: Any) -> Tensor:
        """Return the gradient of `bias` from the operands of one micro-batch."""
        assert self.bias_grad is not None, "a layer with a bias has a gradient for it"
        return self.bias_grad(bias, operands)


class DeferredGrad:
    """Gradients of a layer's weight and bias that are still to be computed, from one or several micro-batches.

    Attributes:
        weight, bias: the parameters; None if the gradient is not needed.
        operands: operands of each micro-batch.
        gemm: computes the gradients.
    """

    __slots__ = ("_versions", "bias", "gemm", "operands", "weight")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, operands: Any, gemm: Gemm) -> None:
        """Take the operands of one micro-batch; their tensors must not require gradients."""
        self.weight = weight
        self.bias = bias
        self.operands = [operands]
        self.gemm = gemm
        self._versions = [_versions(operands)]

    def __call__(self) -> None:
        """Compute the gradients and add them to the accumulators. Raises ValueError if an operand has changed."""
        self._require_unchanged()
        weight = self.weight
        if weight is not None:
            accumulators.add_weight_grad(weight, partial(self.gemm.weight_grad, weight, self.operands))
        if self.bias is not None:
            for operands in self.operands:
                accumulators.add_grad(self.bias, self.gemm.compute_bias_grad(self.bias, operands))

    def merge(self, later: DeferredGrad) -> None:
        """Take over the operands of a gradient of the same parameters by the same GEMM, from a later micro-batch."""
        self.operands += later.operands
        self._versions += later._versions

    def _require_unchanged(self) -> None:
        """Raise ValueError if an operand was changed in place."""
        for operands, versions in zip(self.operands, self._versions):
            if _versions(operands) != versions:
                param = self.bias if self.weight is None else self.weight
                assert param is not None, "a gradient is needed"
                raise ValueError(f"the input of a layer with a parameter of shape {list(param.shape)}, or the gradient "
                                 "of its output, was changed in place before the deferred weight gradient was computed "
                                 "from it; make a new tensor in each forward and backward instead of filling one again")


def _versions(operands: Any) -> list[int]:
    """Return torch's counts of the changes in place of the tensors among operands; inference tensors have none."""
    return [x._version for x in operands if isinstance(x, Tensor) and not x.is_inference()]


Deferred = Callable[[], None]


def merge_queues(queues: Sequence[Sequence[Deferred]]) -> list[list[Deferred]]:
    """Merge the queues of several micro-batches into the same number of queues, with about equal work in each.

    The order is that of the queues, one micro-batch after the other, except that a merged gradient is computed at its
    place in the first micro-batch that has it. Gradients that are not merged are therefore added to their accumulators
    in the same order as without merging, and merged ones in the order of micro-batches.

    Example: the queues [a, X, b] and [a, X, b], where X can be merged, become [a, 2X] and [b, a, b]; 2X is one GEMM.
    """
    first_of_weight: dict[int, DeferredGrad] = {}
    order: list[Deferred] = []
    for queue in queues:
        for deferred in queue:
            if isinstance(deferred, DeferredGrad) and deferred.gemm.merges and deferred.weight is not None:
                first = first_of_weight.setdefault(id(deferred.weight), deferred)
                is_alike = first.gemm is deferred.gemm and first.bias is deferred.bias
                if first is not deferred and is_alike:
                    first.merge(deferred)
                    continue
            order.append(deferred)
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
    return len(deferred.operands) if isinstance(deferred, DeferredGrad) else 1
