"""Devices of the kernel tests: the reference on CPU, the kernel on CUDA, and interpreted under TRITON_INTERPRET=1.

tests/kernels/test_interpreter.py runs every file once more with that variable set. A fast run has a case or two of
each kernel, those of `SMOKE`, and reports a kernel that none of them launches.
"""

from importlib import import_module
from itertools import combinations
from pathlib import Path

import pytest
import torch

from dualpipe.kernels.common import INTERPRET

HERE = Path(__file__).parent
# Dtypes, tables and formats that a fast run does not interpret: it interprets float32 alone, by the tables of sm_90.
NOT_FAST_WHEN_INTERPRETED = ("cpu-80", "float64", "float16", "pow2", "real_models", "second_derivative")
# A fast run interprets one case of each, and nothing else: together they launch every kernel, against its reference.
SMOKE = {
    "test_cross_entropy.py": {"test_loss_and_gradient"},
    "test_grouped_gemm.py": {"test_products_equal_a_loop"},
    "test_grouped_gemm_merged.py": {"test_equals_a_loop"},
    "test_grouped_gemm_quantized.py": {"test_dequantized_products_equal_a_loop", "test_fp8_products_equal_a_loop"},
    "test_grouped_gemm_swiglu.py": {"test_equals_the_two_functions"},
    "test_grouped_gemm_tiles.py": {"test_worked_example"},
    "test_interpreter.py": {"test_every_kernel_was_launched"},
    "test_norm.py": {"test_values_and_gradients"},
    "test_quantize.py": {"test_bytes_and_numbers", "test_activation_and_quantization_in_one", "test_transposed_blocks"},
    "test_rotary.py": {"test_values_and_gradients"},
    "test_routing.py": {"test_rows_there_and_back", "test_destinations_equal_a_loop"},
    "test_swiglu.py": {"test_values_and_gradients"},
    "test_top_k.py": {"test_values_and_gradients"},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow tests of this folder `matrix`; where kernels are interpreted, choose the slow ones first."""
    kernel_tests = [item for item in items if HERE in item.path.parents
                    and (INTERPRET or item.path.name != "test_interpreter.py")]
    of_pairs = _mark_slow_when_interpreted(kernel_tests) if INTERPRET else set()
    for item in kernel_tests:
        if item.get_closest_marker("slow") and item not in of_pairs:
            item.add_marker(pytest.mark.matrix)


def _mark_slow_when_interpreted(items):
    """Mark all cases `slow` except one of each test of `SMOKE`, as interpreting takes long.

    Returns a choice of the marked cases that covers every test, every value of every parameter and every two of them.
    """
    tests, seen, of_pairs = set(), set(), set()
    for item in items:
        if any(word in item.name for word in NOT_FAST_WHEN_INTERPRETED):
            item.add_marker(pytest.mark.slow)
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("gpu") or torch.bfloat16 in values.values():
            continue
        test = (item.path, item.originalname)
        pairs = {(*test, *pair) for pair in combinations(map(str, values.items()), 2)}
        if not item.get_closest_marker("slow"):
            is_first = test not in tests
            if not is_first or item.originalname not in SMOKE.get(item.path.name, ()):
                item.add_marker(pytest.mark.slow)
                if is_first or not pairs or not pairs <= seen:
                    of_pairs.add(item)
            tests.add(test)
        seen |= pairs
    return of_pairs


@pytest.fixture(scope="session", autouse=True)
def launched():
    """Return the names of the interpreted kernels launched so far."""
    names = set()
    if INTERPRET:
        from triton.runtime import interpreter

        launch = interpreter.GridExecutor.__call__

        def recorded(self, *arguments, **options):
            names.add(f"{self.fn.__module__}.{self.fn.__name__}")
            return launch(self, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.GridExecutor, "__call__", recorded)
            yield names
    else:
        yield names


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


@pytest.fixture(params=[80, 90] if INTERPRET else [None])
def chip(request, monkeypatch):
    """Run interpreted grouped GEMMs with pointers like sm_80, and with descriptors like sm_90."""
    if request.param is not None:
        for name in ("grouped_gemm", "grouped_gemm_quantized"):
            module = import_module(f"dualpipe.kernels.{name}")
            monkeypatch.setattr(module, "architecture", lambda device: request.param)
