"""Random permutations of any size, computed index by index: nothing is stored, however large they are.

A Feistel network over pairs (left, right): each round adds to one half a hash of the other half. A round can be undone,
so all rounds together are a bijection. The halves count modulo `left_size` and `right_size`, whose product is barely
above the size of the permutation. An index that lands beyond the size goes through the network once more, until it
lands inside (cycle walking). The walk follows a cycle of a bijection, so it ends, and no two indices end at one place.

Example with 10 elements: the halves have sizes 4 and 3, the network permutes 0 to 11, and if it maps 7 to 11 and 11 to
2, then the permutation maps 7 to 2.
"""

from __future__ import annotations

import math

import numpy as np

ORDER = "feistel 1"  # name of the permutation in checkpoints
_ROUNDS = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # increment of SplitMix64


def shuffle(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images of `indices` under a random permutation of range(size), int64, in the same shape.

    Takes O(1) time per index and no memory that grows with `size`.

    Args:
        indices: integers in range(size), of any shape.
        size: up to 2**62.
        seed: with `size` and `epoch`, all that the permutation depends on.
        epoch: selects one of the permutations of a seed.
    """
    left_size = math.isqrt(max(size, 1) - 1) + 1  # the square root, rounded up
    right_size = max(1, -(-size // left_size))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    places = _permute(indices.astype(np.uint64), left_size, right_size, keys)
    beyond = places >= size
    while beyond.any():
        places[beyond] = _permute(places[beyond], left_size, right_size, keys)
        beyond = places >= size
    return places.astype(np.int64)


def _permute(indices: np.ndarray, left_size: int, right_size: int, keys: np.ndarray) -> np.ndarray:
    """Apply the network, a bijection of range(left_size * right_size), to uint64 indices of any shape."""
    left, right = np.divmod(indices, np.uint64(right_size))
    for round_number, key in enumerate(keys):
        if round_number % 2:
            right = (right + _hash(left, key) % np.uint64(right_size)) % np.uint64(right_size)
        else:
            left = (left + _hash(right, key) % np.uint64(left_size)) % np.uint64(left_size)
    return left * np.uint64(right_size) + right


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the outputs of the SplitMix64 generator with seed `key` at positions `values`, uint64."""
    mixed = values * _GOLDEN + key  # arrays of uint64 wrap around
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
