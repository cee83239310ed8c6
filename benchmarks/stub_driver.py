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
def uncomputed_operators() -> Iterator[None]:
    """Take the paths of a GPU in attention and dense GEMMs, with operators that allocate their results and no more.

    Results that the host of a layer reads, or that select rows, are valid: choices of experts, positions and ends of
    sorted rows, and the numbers of rows for other ranks, which are as if all tokens chose expert 0.
    """
    from dualpipe.kernels import routing, top_k
    from dualpipe.nn import linear
    from dualpipe.nn.attention import causal_attention

    launch_sort = routing._launch_sort
    launch_destinations = routing._launch_destinations
    launch_top_k = top_k._launch_forward

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return _UncomputedAttention.apply(q, k, v)

    def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[-1])

    def outer_product(weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        dy_NM = linear.flatten_rows(dy).t()
        x_MH = linear.flatten_rows(x)
        dtype = linear.accumulation_dtype(weight, dy.dtype)
        return dy.new_empty(dy_NM.shape[0], x_MH.shape[1], dtype=dtype) if out is None else out

    def sort(expert_idx: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        results = launch_sort(expert_idx, num_experts)
        for result in results:
            result.zero_()
        return results

    def find_destinations(*operands: Any) -> tuple[Tensor, ...]:
        *results, counts = launch_destinations(*operands)
        tokens, _, num_choices = operands[-1].shape
        counts.zero_()
        counts[0, 0] = tokens
        counts[0, 1] = tokens * num_choices
        return *results, counts

    def choose(logits: Tensor, weights: Tensor, experts: Tensor, *options: Any) -> None:
        launch_top_k(logits, weights, experts, *options)
        experts.zero_()

    with (
        mock.patch.object(causal_attention, "_has_kernel", lambda *_: True),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(F, "linear", dense_linear),
        mock.patch.object(Tensor, "matmul", matmul),
        mock.patch.object(linear, "_outer_product", outer_product),
        mock.patch.object(routing, "_launch_sort", sort),
        mock.patch.object(routing, "_launch_destinations", find_destinations),
        mock.patch.object(top_k, "_launch_forward", choose),
    ):
        yield
