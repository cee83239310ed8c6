"""Helpers for the tests of the kernels that move and scale rows."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Fill every uninitialised tensor with NaN (integers: the largest), and raise on irreproducible operations."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_synchronisation():
    """Raise on a call that waits for the device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def far_apart(x):
    """Return a CPU copy of the matrix `x` with rows 2^30 elements apart; nothing in between is ever touched."""
    stride = 2**30 + 8
    size = (len(x) - 1) * stride + x.shape[1]
    memory = torch.from_numpy(np.empty(size, dtype=x.numpy().dtype))  # torch.empty may be configured to fill
    return memory.as_strided(x.shape, (stride, 1)).copy_(x)


def assert_close(actual, expected, dtype, tolerance, size=None):
    """Check ||actual - expected|| <= tolerance * ||expected||, or `size` for sums that cancel; in `dtype`, finite."""
    assert actual.dtype is dtype and actual.shape == expected.shape
    assert actual.isfinite().all()
    error, size = (actual.double() - expected).norm(), expected.norm() if size is None else size
    assert error <= tolerance * size, f"relative error {error / size:.2e}"


def run_with_debug_switch(program):
    """Return the output of a program that must fail on the device, in a separate process: its device is lost."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    env = {**os.environ, "TRITON_DEBUG": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode != 0
    return result.stdout + result.stderr
