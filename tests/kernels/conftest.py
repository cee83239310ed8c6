"""Where kernel tests run: the reference on CPU, the kernel on CUDA, and interpreted ones under TRITON_INTERPRET=1.

tests/kernels/test_interpreter.py runs every file once more with that variable set.
"""

from pathlib import Path

import pytest
import torch

from dualpipe.kernels.common import INTERPRET

HERE = Path(__file__).parent
# Tests of an operator rather than of its kernel: the run on the reference has the same.
OF_OPERATORS = ("registration", "registered", "compiles", "second_derivative")
# Dtypes, tables and formats that a fast run does not interpret: it interprets float32 alone, by the tables of sm_90.
NOT_FAST_WHEN_INTERPRETED = ("cpu-80", "float64", "float16", "pow2", "real_models", "stochastic")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow tests of this folder `matrix`, and, where kernels are interpreted, choose the slow ones first."""
    kernel_tests = [item for item in items if HERE in item.path.parents and item.path.name != "test_interpreter.py"]
    if INTERPRET:
        _mark_slow_when_interpreted(kernel_tests)
    for item in kernel_tests:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.matrix)


def _mark_slow_when_interpreted(items):
    """Interpreting takes long: a fast run has one case of each test."""
    tests = set()
    for item in items:
        if any(word in item.name for word in (*NOT_FAST_WHEN_INTERPRETED, *OF_OPERATORS)):
            item.add_marker(pytest.mark.slow)
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("slow") or item.get_closest_marker("gpu") or torch.bfloat16 in values.values():
            continue
        test = (item.path, item.originalname)
        if test in tests and len(values) > 1:
            item.add_marker(pytest.mark.slow)
        tests.add(test)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def no_interpreted_bfloat16(request):
    callspec = getattr(request.node, "callspec", None)
    if INTERPRET and callspec is not None and torch.bfloat16 in callspec.params.values():
        pytest.skip("Triton's interpreter gets bfloat16 wrong by design")
