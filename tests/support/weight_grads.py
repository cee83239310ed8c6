"""Weight gradients at once and deferred, for comparison, and the GEMMs that compute them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dualpipe.nn.deferral import WeightGradStore


class Wgrads(TorchDispatchMode):
    """Number of micro-batches of each GEMM for a grouped weight gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.dualpipe.grouped_gemm_wgrad_merged.default:
            self.sizes.append(len(args[0]))
        return function(*args, **kwargs or {})


def weight_gradients(run, weights, key="I"):
    """Return the weight gradients that autograd adds at once, and those of an "I" that defers and its "W"."""
    run().backward()
    at_once, store = [weight.grad for weight in weights], WeightGradStore()
    for weight in weights:
        weight.grad = None
    with store.activate(), store.defer(key):
        run().backward()
    assert all(weight.grad is None for weight in weights) and store.pending()[key] > 0
    store.run(key)
    return at_once, [weight.grad for weight in weights]
