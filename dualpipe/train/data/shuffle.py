"""A random order of any number of things, computed index by index: nothing is stored, however many there are.

A Feistel network over pairs (left, right): every round adds to one half a hash of the other, which can be undone, so
that all rounds together are a bijection. The halves count modulo `left_size` and `right_size`, whose product is barely
above the number of things; an index that lands beyond it goes through the network again (cycle walking), until it lands
inside. As the walk follows a cycle of a bijection, it ends, and no two indices end alike.

Example with 10 things: the halves have sizes 4 and 3, the network permutes 0 to 11, and if it takes 7 to 11 and 11 to
2, then 7 becomes 2.
"""

from __future__ import annotations

import math

import numpy as np

ORDER = "feistel 1"  # what a checkpoint says of the order that it was saved in
_ROUNDS = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step from one number to the next


def shuffle(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the places of `indices` in a random order of range(size); int64, of the same shape.

    The order depends on size, seed and epoch alone. Takes O(1) time for an index, and no memory that grows with `size`,
    which may be up to 2**62.
    """
    left_size = math.isqrt(max(size, 1) - 1) + 1  # the root, rounded up: both halves have something to add
    right_size = max(1, -(-size // left_size))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    places = _permute(indices.astype(np.uint64), left_size, right_size, keys)
    while (beyond := places >= size).any():
        places[beyond] = _permute(places[beyond], left_size, right_size, keys)
    return places.astype(np.int64)


def _permute(indices: np.ndarray, left_size: int, right_size: int, keys: np.ndarray) -> np.ndarray:
    """Apply the network, a bijection of range(left_size * right_size), to uint64 indices."""
    left, right = np.divmod(indices, np.uint64(right_size))
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _hash(left, key) % np.uint64(right_size)) % np.uint64(right_size)
        else:
            left = (left + _hash(right, key) % np.uint64(left_size)) % np.uint64(left_size)
    return left * np.uint64(right_size) + right


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the numbers at positions `values` of the SplitMix64 generator that starts at `key`."""
    mixed = values * _GOLDEN + key  # arrays of uint64 wrap around
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
