"""Where kernel tests run: the reference on CPU, the kernel on CUDA, and interpreted ones under TRITON_INTERPRET=1.

tests/kernels/test_interpreter.py runs every file once more with that variable set.
"""

import pytest
import torch

from dualpipe.kernels.backend import INTERPRET


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
