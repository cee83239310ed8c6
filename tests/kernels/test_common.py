"""One form of each kernel for any number of rows: what Triton would compile, without a GPU, where nothing runs."""

import importlib
from unittest import mock

import pytest
import torch

from dualpipe.kernels import combine_tokens, sort_tokens
from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.quantize import dequantize_rows, quantize_rows, swiglu_quantize
from dualpipe.models.decoder import Experts
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.experts.dispatcher import Received, run_experts

jit = pytest.importorskip("triton.runtime.jit")
pytestmark = pytest.mark.skipif(INTERPRET, reason="what is interpreted is not compiled")
HIDDEN, EXPERTS, TOP_K, SENT = 64, 3, 2, 40
FORMS = {"plain": {}, "gpt-oss": dict(bias=True, clamped=True)}


@pytest.fixture(params=[80, 90, 100])
def forms(request, monkeypatch):
    """The forms of kernels that would have been launched on such a chip, as Triton keys them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend, launched = make_backend(GPUTarget("cuda", request.param, 32)), set()

    def run(kernel, *args, grid, warmup, **options):
        assert min(grid) > 0, f"{kernel.__name__} is not launched"
        _, arguments, options = jit.create_function_from_signature(kernel.signature, kernel.params, backend)(
            *args, **options)
        launched.add((kernel.module, kernel.__name__, str(arguments), str(options)))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(jit.driver, "_active", mock.Mock(get_current_device=lambda: 0))
    for name in ("grouped_gemm", "quantize", "routing", "swiglu"):
        monkeypatch.setattr(importlib.import_module(f"dualpipe.kernels.{name}"), "use_triton", lambda tensor: True)
    gemm = importlib.import_module("dualpipe.kernels.grouped_gemm")
    monkeypatch.setattr(gemm, "architecture", lambda device: request.param)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what nothing has written must be offsets
    return launched


@pytest.mark.parametrize("intermediate", [48, 72, 20], ids=["narrow", "wide", "odd"])
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_rows_that_arrive_choose_no_form(options, intermediate, forms):
    """Forward and backward of experts, written and added to their gradients, and the sum of what comes back."""
    experts, store = Experts(EXPERTS, HIDDEN, intermediate, **options).bfloat16(), WeightGradStore()
    for param in experts.parameters():
        param.grad_dtype = torch.float32
    places = sort_tokens(torch.zeros(SENT, TOP_K, dtype=torch.int64), 4)
    found = {}
    for rows, pairs in [(4096, 5000), (0, 0), (1, 1), (1, 2), (16, 16), (17, 31), (300, 512)]:
        forms.clear()
        experts.zero_grad()
        for _ in range(2):
            x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            weights = torch.zeros(rows, TOP_K, requires_grad=True)
            ids = torch.zeros(rows, TOP_K, dtype=torch.int32)
            with store.activate(), store.defer("W"):
                run_experts(experts, x, weights, Received(ids, EXPERTS, pairs, None)).backward(torch.zeros_like(x))
            store.run("W")
        combine_tokens(torch.zeros(min(rows, SENT), HIDDEN), None, places.cut(min(rows, SENT)), top_k=TOP_K)
        found[rows, pairs] = set(forms)
    assert len(found[4096, 5000]) >= 10
    for rows, launched in found.items():
        different = launched ^ found[4096, 5000]
        assert not different, "\n".join(map(str, (rows, *sorted(different))))


@pytest.mark.parametrize("block", [128, 32])
def test_rows_that_arrive_choose_no_form_of_quantization(block, forms):
    found = {}
    for rows in (4096, 0, 1, 2, 16, 17, 300):
        forms.clear()
        gate_up = torch.zeros(rows, 576, dtype=torch.bfloat16)
        _, quantized = swiglu_quantize(gate_up, torch.zeros(rows), block=block)
        dequantize_rows(quantized, torch.bfloat16)
        quantize_rows(gate_up, block)
        found[rows] = set(forms)
    assert len(found[0]) >= 3 and all(launched == found[0] for launched in found.values()), found
