"""Launches that bypass Triton launch what Triton would: compared form by form on a driver without a GPU."""

from collections import defaultdict
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from unittest import mock

import pytest
import torch

from dualpipe.kernels import (
    WgradOperands,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_merged,
)
from dualpipe.kernels.common import INTERPRET, tl, triton
from dualpipe.kernels.launcher import Launcher
from dualpipe.kernels.norm import rms_norm
from scripts import BENCHMARKS

pytest.importorskip("triton.runtime.jit")
pytestmark = pytest.mark.skipif(INTERPRET, reason="what is interpreted is not compiled")


@triton.jit(do_not_specialize=["M"])
def _copy_kernel(x, y, bias, M, N, stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * stride + cols, mask=(cols < N) & (tl.program_id(0) < M))
    if bias is not None:
        row += tl.load(bias + cols)
    tl.store(y + tl.program_id(0) * stride + cols, row)


@pytest.fixture
def driver(monkeypatch):
    """The stub driver, which records launches."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(_copy_kernel, "device_caches", defaultdict(_copy_kernel.create_binder))  # not other drivers'
    with import_module("stub_driver").stub_driver(record=True) as driver, torch.no_grad():
        yield driver


@contextmanager
def hooked():
    """Set a launch hook, so that Triton does every launch; yields the list of launches."""
    chain, ran = triton.knobs.runtime.launch_enter_hook, []
    run = triton.JITFunction.run

    def counted(*args, **options):
        ran.append(True)
        return run(*args, **options)

    chain.add(print)
    try:
        with mock.patch.object(triton.JITFunction, "run", counted):
            yield ran
    finally:
        chain.remove(print)


def launched(driver, call):
    """Return the launches of a call: of its first run, its second run, and its run by Triton."""
    found = []
    for _ in range(2):
        driver.launches.clear()
        call()
        found.append(list(driver.launches))
    driver.launches.clear()
    with hooked() as ran:
        call()
    assert len(ran) == len(driver.launches) > 0
    return *found, list(driver.launches)


def test_every_form_launches_what_triton_compiled_for_it(driver):
    launch, used = Launcher(_copy_kernel, BLOCK=16, num_warps=1), set()
    wide = torch.zeros(4, 64)
    pointers = product((wide, wide[:, 1:], wide.half(), wide.half()[:, 1:]), (wide, wide[:, 1:]), (None, wide))
    numbers = ((0, 16, 16), (1, 16, 16), (7, 16, 16), (16, 1, 16), (16, 17, 16), (16, 16, 1), (16, 16, 17),
               (2**31 - 1, 16, 16), (2**31, 16, 16), (16, 2**31, 16), (16, 2**31 + 1, 16))
    cases = [*product(pointers, numbers[:1]), *product([(wide, wide, None)], numbers)]
    for tensors, sizes in cases * 2:
        first, second, by_triton = launched(driver, lambda: launch((3, 2), tensors, sizes))  # noqa: B023
        assert first == second == by_triton and first[0][1] == (3, 2, 1), (tensors, sizes)
        used.add(first[0][0])
    # Besides the 16 of pointers: N of 1 and 17, stride of 1 and 17, M of 64 bits, N of 64 bits and no multiple of 16.
    assert len(used) == 16 + 7


def test_a_form_belongs_to_a_device_and_a_driver(driver):
    launch, x = Launcher(_copy_kernel, BLOCK=16, num_warps=1), torch.zeros(4, 64)
    used = []
    for device in (0, 1, 0):
        driver.device = device
        first, second, by_triton = launched(driver, lambda: launch((1,), (x, x, None), (4, 16, 16)))
        assert first == second == by_triton
        used.append(first[0][0])
    assert [kernel.device for kernel in used] == [0, 1, 0] and used[0] == used[2] != used[1]


def test_rows_that_vary_have_one_form(driver):
    launch, x = Launcher(_copy_kernel, BLOCK=16, num_warps=1), torch.zeros(4, 64)
    for rows in range(100):
        launch((1,), (x, x, None), (rows, 16, 16))
    assert len({kernel for kernel, _ in driver.launches}) == 1 and len(launch._forms) == 1


def operands(rows=12, offset=0, pad=0, dtype=torch.bfloat16, hidden=64, out=96):
    """Return x (rows, hidden), w (3, out, hidden), dy, offs. offset: elements past 16 bytes; pad: between rows."""

    def matrix(*shape):
        *others, columns = shape
        return torch.zeros(*others, offset + columns + pad, dtype=dtype)[..., offset : offset + columns]

    offs = torch.tensor([4, 4, rows], dtype=torch.int32).clamp(max=rows)
    return matrix(rows, hidden), matrix(3, out, hidden), matrix(rows, out), offs


@pytest.mark.parametrize("case", [
    {}, {"rows": 0}, {"rows": 1}, {"rows": 16},
    *(pytest.param(case, marks=pytest.mark.slow) for case in (  # compile kernels of their own
        {"pad": 8}, {"pad": 1}, {"offset": 8}, {"offset": 1, "pad": 7}, {"dtype": torch.float32},
        {"dtype": torch.float16}, {"hidden": 40}, {"out": 40}, {"out": 512}, {"hidden": 1})),
], ids=str)
def test_grouped_products(driver, case):
    x, w, dy, offs = operands(**case)
    gather, out = torch.zeros(len(x), dtype=torch.int64), torch.zeros(w.shape)
    norm_weight = torch.ones(x.shape[1])
    calls = (
        lambda: grouped_gemm(x, w, offs), lambda: grouped_gemm(x, w, offs, gather=gather, bias=w[..., 0]),
        lambda: grouped_gemm_swiglu(x, w, offs), lambda: grouped_gemm_swiglu(x, w, offs, weight=x[:, 0].float()),
        lambda: grouped_gemm_dgrad(dy, w, offs), lambda: grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=True),
        lambda: grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=False, gather=gather),
        lambda: grouped_gemm_wgrad_merged([WgradOperands(dy, x, offs)] * 2, out=out, accumulate=True),
        lambda: grouped_gemm_wgrad_merged([WgradOperands(dy, x, offs, gather)] * 4, out=out, accumulate=True),
        *((lambda: rms_norm(x, norm_weight, 1e-6), lambda: rms_norm(x, norm_weight, 1e-6, x)) if len(x) else ()),
    )
    for call in calls:
        first, second, by_triton = launched(driver, call)
        assert first == second == by_triton
