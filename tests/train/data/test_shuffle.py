"""The shuffle is a permutation for any size, and as random as those of numpy."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from dualpipe.train.data.sequences import shuffle

SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 625, 1009, 1024, 4095, 4096, 4097, 10_007, 65_536, 65_537]


@pytest.mark.parametrize("seed, epoch", [(0, 0), (2**62, 5)])
def test_shuffle_is_a_permutation(seed, epoch):
    for size in SIZES:
        places = shuffle(np.arange(size), size, seed, epoch)
        assert (np.sort(places) == np.arange(size)).all(), size
    assert shuffle(np.arange(0), 0, seed, epoch).shape == (0,)


def test_an_index_has_the_same_place_alone_and_in_an_array():
    whole = shuffle(np.arange(1000), 1000, 3, 1)
    assert [int(shuffle(np.array([index]), 1000, 3, 1)[0]) for index in range(0, 1000, 97)] == whole[::97].tolist()
    assert shuffle(np.arange(6).reshape(2, 3), 1000, 3, 1).tolist() == whole[:6].reshape(2, 3).tolist()


def test_the_order_equals_that_of_checkpoints():
    """A changed order must change the name `shuffle.ORDER`."""
    assert shuffle(np.arange(8), 8, 0, 0).tolist() == [0, 1, 2, 4, 5, 3, 7, 6]
    assert shuffle(np.arange(3), 10**12, 7, 2).tolist() == [803451923396, 680015824767, 301291443039]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_sizes_have_all_orders_equally_often(size):
    orders = list(itertools.permutations(range(size)))
    draws = 40 * len(orders)
    counts = Counter(tuple(shuffle(np.arange(size), size, seed, 0).tolist()) for seed in range(draws))
    assert set(counts) == set(orders)
    chi_squared = sum((count - 40) ** 2 / 40 for count in counts.values())
    degrees = len(orders) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


def test_places_are_as_random_as_those_of_numpy():
    """Check the distribution of places, neighbours and fixed points against the spread of chance."""
    size, seeds = 24, 600
    places = np.stack([shuffle(np.arange(size), size, seed, 1) for seed in range(seeds)])
    counts = np.stack([np.bincount(places[:, index], minlength=size) for index in range(size)])
    assert abs(counts - seeds / size).max() < 5 * (seeds / size) ** 0.5
    steps = np.bincount((np.diff(places) % size).ravel(), minlength=size)[1:]
    assert abs(steps - steps.mean()).max() < 5 * steps.mean() ** 0.5
    large = shuffle(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(large, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(large[1:], large[:-1])[0, 1]) < 0.02
    assert (large == np.arange(100_000)).sum() < 8 and (abs(np.diff(large)) == 1).sum() < 14


def test_other_seeds_and_epochs_have_other_orders():
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**40, 0), (0, 2**40)]
    orders = [shuffle(np.arange(5000), 5000, *key) for key in keys]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 8, "one in common is to be expected"


def test_a_huge_order_takes_neither_memory_nor_time():
    size = 2**62 - 57
    shuffle(np.arange(2), size, 0, 0)
    tracemalloc.start()
    places = shuffle(np.arange(size - 1000, size), size, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(places.tolist())) == 1000 and places.min() >= 0 and places.max() < size
    assert peak < 200_000, "of 8 KB of indices"
