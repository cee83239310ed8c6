"""What the tests of the kernels that move and scale rows share."""

import os
import subprocess
import sys
import textwrap

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


def assert_close(actual, expected, dtype, tolerance, size=None):
    """||actual - expected|| <= tolerance * ||expected||, or `size` for sums that cancel; in `dtype`, finite."""
    assert actual.dtype is dtype and actual.shape == expected.shape
    assert actual.isfinite().all()
    error, size = (actual.double() - expected).norm(), expected.norm() if size is None else size
    assert error <= tolerance * size, f"relative error {error / size:.2e}"


def run_with_debug_switch(program):
    """What a program prints that must fail on the device, in a process of its own: the device is lost to it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    env = {**os.environ, "TRITON_DEBUG": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode != 0
    return result.stdout + result.stderr
