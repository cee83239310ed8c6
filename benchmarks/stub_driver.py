"""A Triton driver without a GPU: kernels are compiled for sm_90 and launched, and nothing runs.

    with stub_driver() as driver:          # kernels accept CPU tensors as if they were on an H100
        grouped_gemm(x, w, offs)           # results are uninitialized
    driver.launches                        # (kernel, grid) of each launch, with record=True

All Python of a launch is real. Only C is left out: reading the arguments, `cuTensorMapEncodeTiled` and
`cuLaunchKernelEx`, some us together. Kernels are compiled at their first launch, without a GPU, and must not be
interpreted. Supports Triton 3.6 and 3.7.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

MODULES = ("cross_entropy", "grouped_gemm", "grouped_gemm_quantized", "norm", "quantize", "rotary", "routing", "swiglu",
           "top_k")
ARCHITECTURE = 90
SHARED = 232_448  # bytes per block on an H100
THREADS = 1024


class LoadedKernel(NamedTuple):
    """One compiled form of a kernel on one device."""

    name: str
    device: int
    number: int


class StubDriver:
    """Stand-in for Triton's `CudaDriver` that uses its real launcher.

    record: keep the kernel and grid of each launch, which takes time.
    """

    def __init__(self, record: bool = False) -> None:
        from triton.backends.nvidia.driver import CudaLauncher

        self.launcher_cls = CudaLauncher
        self.device = 0
        self.launches: list[tuple[LoadedKernel, tuple[int, int, int]]] = []
        self._loaded = 0
        self.utils = SimpleNamespace(
            load_binary=self._load_binary, launch=self._launch if record else _ignore,
            get_device_properties=lambda device: {"max_shared_mem": SHARED}, fill_tma_descriptor_tiled=_ignore,
            fill_tma_descriptor=_ignore,  # its name in Triton 3.6
            build_signature_metadata=lambda signature: signature,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)

    def _load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[str, LoadedKernel, int, int, int]:
        """Return (module, function, registers, spills, maximum threads) of a kernel."""
        self._loaded += 1
        return name, LoadedKernel(name, device, self._loaded), 0, 0, THREADS

    def _launch(
        self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: LoadedKernel, *arguments: Any
    ) -> None:
        self.launches.append((function, (grid_x, grid_y, grid_z)))


def _ignore(*arguments: Any) -> None:
    """Stand in for a function in C."""


@contextmanager
def stub_driver(record: bool = False) -> Iterator[StubDriver]:
    """Launch kernels for CPU tensors, by a driver that discards every launch."""
    import triton
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver as config

    from dualpipe.kernels.common import INTERPRET

    if INTERPRET:
        raise RuntimeError("TRITON_INTERPRET=1 is set, and interpreted kernels are not launched: unset it")
    driver, active = StubDriver(record), config._active
    with ExitStack() as stack:
        for name in MODULES:
            module = importlib.import_module(f"dualpipe.kernels.{name}")
            for function, value in (("use_triton", _true), ("architecture", _architecture), ("check_values", _ignore)):
                if hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, value))
        if hasattr(nvidia, "PyKernelArg"):  # Triton 3.7
            stack.enter_context(mock.patch.object(nvidia, "PyKernelArg", SimpleNamespace))
        else:  # Triton 3.6 compiles a launcher in C for each kernel
            instead = SimpleNamespace(launch=driver.utils.launch)
            stack.enter_context(mock.patch.object(nvidia, "compile_module_from_src", lambda *_, **__: instead))
            stack.enter_context(mock.patch.object(nvidia, "library_dirs", list))
        config.set_active(driver)
        stack.callback(setattr, config, "_active", active)
        for jit in _jit_functions(triton):
            stack.enter_context(mock.patch.object(jit, "device_caches", type(jit.device_caches)(jit.create_binder)))
        yield driver


def _jit_functions(triton: Any) -> Iterator[Any]:
    """Yield all kernels, which cache what was compiled for the driver that was active."""
    for name in MODULES:
        module = sys.modules[f"dualpipe.kernels.{name}"]
        yield from (value for value in vars(module).values() if isinstance(value, triton.JITFunction))


def _true(tensor: Tensor) -> bool:
    return True


def _architecture(device: Any) -> int:
    return ARCHITECTURE


class _UncomputedAttention(torch.autograd.Function):
    """Attention by one fused kernel, as a GPU runs it: allocates the results and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@contextmanager
def uncomputed_attention() -> Iterator[None]:
    """Take the path of a GPU in attention, with a fused kernel that only allocates its results."""
    from dualpipe.nn.attention import causal_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return _UncomputedAttention.apply(q, k, v)

    with (
        mock.patch.object(causal_attention, "_has_kernel", lambda *_: True),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
    ):
        yield


@contextmanager
def zeroed_results() -> Iterator[None]:
    """Fill new integers with zeros, which are valid offsets and counts: the host of a layer reads some of them."""
    empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like
    with (
        mock.patch.object(torch, "empty", lambda *args, **options: _possible(empty(*args, **options))),
        mock.patch.object(torch, "empty_like", lambda *args, **options: _possible(empty_like(*args, **options))),
        mock.patch.object(Tensor, "new_empty", lambda *args, **options: _possible(new_empty(*args, **options))),
    ):
        yield


def _possible(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.zero_()
