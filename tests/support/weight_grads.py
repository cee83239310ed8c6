"""Weight gradients at once and deferred, to be compared."""

from dualpipe.nn.deferral import WeightGradStore


def weight_gradients(run, weights, key="I"):
    """Of an "I" that defers, and of its "W"; and those that autograd adds at once."""
    run().backward()
    at_once, store = [weight.grad for weight in weights], WeightGradStore()
    for weight in weights:
        weight.grad = None
    with store.activate(), store.defer(key):
        run().backward()
    assert all(weight.grad is None for weight in weights) and store.pending()[key] > 0
    store.run(key)
    return at_once, [weight.grad for weight in weights]
