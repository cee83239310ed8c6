"""Where kernel tests run: the reference on CPU, the kernel on CUDA, and interpreted ones under TRITON_INTERPRET=1.

tests/kernels/test_interpreter.py runs every file once more with that variable set.
"""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from dualpipe.kernels.common import INTERPRET

HERE = Path(__file__).parent
# Tests of an operator rather than of its kernel: the run on the reference has the same.
OF_OPERATORS = ("registration", "registered", "compiles", "second_derivative")
# Dtypes, tables and formats that a fast run does not interpret: it interprets float32 alone, by the tables of sm_90.
NOT_FAST_WHEN_INTERPRETED = ("cpu-80", "float64", "float16", "pow2", "real_models")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow tests of this folder `matrix`, and, where kernels are interpreted, choose the slow ones first."""
    kernel_tests = [item for item in items if HERE in item.path.parents and item.path.name != "test_interpreter.py"]
    of_pairs = _mark_slow_when_interpreted(kernel_tests) if INTERPRET else set()
    for item in kernel_tests:
        if item.get_closest_marker("slow") and item not in of_pairs:
            item.add_marker(pytest.mark.matrix)


def _mark_slow_when_interpreted(items):
    """Mark all `slow` but one case of each test, as interpreting takes long.

    Returns the cases, among those marked, that together have every value of every parameter and every two of them.
    """
    tests, seen, of_pairs = set(), set(), set()
    for item in items:
        if any(word in item.name for word in (*NOT_FAST_WHEN_INTERPRETED, *OF_OPERATORS)):
            item.add_marker(pytest.mark.slow)
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("gpu") or torch.bfloat16 in values.values():
            continue
        test = (item.path, item.originalname)
        pairs = {(*test, *pair) for pair in combinations(map(str, values.items()), 2)}
        if not item.get_closest_marker("slow"):
            if test in tests and pairs:
                item.add_marker(pytest.mark.slow)
                if not pairs <= seen:
                    of_pairs.add(item)
            tests.add(test)
        seen |= pairs
    return of_pairs


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
