"""Weight gradients at once and deferred, for comparison."""

from dualpipe.nn.deferral import WeightGradStore


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
