"""Where kernel tests run: the reference on CPU, the kernel on CUDA, and interpreted ones under TRITON_INTERPRET=1.

tests/kernels/test_interpreter.py runs every file once more with that variable set.
"""

from itertools import combinations

import pytest
import torch

from dualpipe.kernels.common import INTERPRET

# Of an operator rather than of its kernel: the run on the reference has the same.
OF_OPERATORS = ("registration", "registered", "compiles", "second_derivative")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Interpreting takes long: a fast run has every value of every parameter, and every two of them, together once."""
    if not INTERPRET:
        return
    seen = set()
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("gpu") or torch.bfloat16 in values.values():
            continue
        pairs = {(item.path, item.originalname, *pair) for pair in combinations(map(str, values.items()), 2)}
        if (pairs and pairs <= seen) or any(word in item.name for word in OF_OPERATORS):
            item.add_marker(pytest.mark.slow)
        seen |= pairs


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
