"""What the tests of the kernels that move and scale rows share."""

import numpy as np
import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Every uninitialised tensor is NaN (integers: the largest), and an operation that is not reproducible raises."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_synchronisation():
    """A call that waits for the device raises."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def far_apart(x):
    """A copy of the matrix `x` on CPU with rows 2^30 elements apart; nothing in between is ever touched."""
    stride = 2**30 + 8
    size = (len(x) - 1) * stride + x.shape[1]
    memory = torch.from_numpy(np.empty(size, dtype=x.numpy().dtype))  # torch.empty may be told to fill
    return memory.as_strided(x.shape, (stride, 1)).copy_(x)


def assert_close(actual, expected, dtype, tolerance):
    """||actual - expected|| <= tolerance * ||expected||, finite, in `dtype`; `expected` is float64."""
    assert actual.dtype is dtype and actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected).norm()
    assert error <= tolerance * expected.norm(), f"relative error {error / expected.norm():.2e}"
