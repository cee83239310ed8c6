"""Kernel launches with a few us of host time: `Launcher`, and `Block` for tensors that a kernel reads by descriptor.

Triton's `kernel[grid](...)` binds, classifies and hashes all arguments at every launch, which takes 20 to 30 us for a
grouped GEMM. A `Launcher` is a kernel with its constants, made once for a shape. The first launch with arguments of a
form calls Triton, which compiles; the launcher caches the compiled kernel, and later launches of that form call the
driver directly. A form contains all properties that Triton specializes on: the driver and its device, the dtype of
every pointer and its remainder modulo 16, the positions of None, the block shape of every descriptor, and the values of
numbers. Numbers in `do_not_specialize` are not part of the form; they must fit into 32 bits.

    launch = Launcher(_scale_kernel, BLOCK=128, num_warps=4)    # _scale_kernel(x, y, N, stride, BLOCK: tl.constexpr)
    launch((blocks,), (x, y), (rows, stride))                   # pointers, then numbers, in the order of parameters

Interpreted kernels are always launched by Triton, and so are all kernels while a Triton hook is set, such as that of a
profiler. A global variable that a kernel reads must not change after the first launch: later launches do not check it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from dualpipe.kernels.common import INTERPRET

MAX_FORMS = 1024  # cached forms of a launcher, for numbers that Triton specializes on and that vary
MAX_LAUNCHERS = 4096  # cached launchers of a kernel file, one per shape; a model has dozens of shapes


class Block:
    """Tensor that a kernel reads, or adds to, by a descriptor, in blocks of `block_shape`.

    Has the fields of a `TensorDescriptor` that Triton's launcher reads. The checks of that class take longer than a
    launch.
    """

    __slots__ = ("base", "block_shape", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self, base: Tensor, block_shape: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Describe the memory of `base`.

        shape, strides: view of the memory, such as those of `base`; every element of `shape` is positive.
        """
        self.base = base
        self.block_shape = block_shape
        self.shape = shape
        self.strides = strides

    def to_descriptor(self) -> Any:
        """Return Triton's descriptor, which checks its arguments."""
        from triton.tools.tensor_descriptor import TensorDescriptor  # not at the top: Triton exists for Linux only

        return TensorDescriptor(self.base, [*self.shape], [*self.strides], [*self.block_shape])


Pointers = tuple[Tensor | Block | None, ...]


class Launcher:
    """Kernel with its constants; see the docstring of this file."""

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """Bind constants to a kernel.

        constants: its `tl.constexpr` parameters, which must be its last ones, and options such as `num_warps`.
        """
        self.kernel = kernel
        self._constants = constants
        self._forms: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}  # (run, function, metadata) by form
        self._is_compiled = not INTERPRET and hasattr(kernel, "params")  # tests replace kernels by plain functions
        if self._is_compiled:
            self._read_parameters()

    def _read_parameters(self) -> None:
        """Divide the kernel's parameters into variable ones and constants."""
        from triton import knobs
        from triton.runtime.driver import driver

        self._knobs = knobs.runtime
        self._driver = driver
        parameters = self.kernel.params
        self._variable = [param for param in parameters if not param.is_constexpr]
        trailing = parameters[len(self._variable):]
        assert all(param.is_constexpr for param in trailing), f"{self.kernel.__name__}: constants must be last"
        self._trailing = tuple(self._constants[param.name] for param in trailing)
        self._select_specialized: Callable[[tuple[int, ...]], Any] | None = None  # selects the numbers of a form
        self._unspecialized: tuple[int, ...] = ()  # positions of the other numbers

    def __call__(self, grid: tuple[int, ...], pointers: Pointers, numbers: tuple[int, ...]) -> None:
        """Launch the kernel on the current device and stream.

        grid: numbers of programs in one to three dimensions.
        pointers, numbers: arguments, in the order of the kernel's parameters.
        """
        if not self._is_compiled or self._is_hooked():
            self._launch_by_triton(grid, pointers, numbers)
            return
        select_specialized = self._select_specialized or self._classify_numbers(len(pointers))
        for i in self._unspecialized:
            if not -(2**31) <= numbers[i] < 2**31:  # Triton compiles another kernel for 64 bits
                self._launch_by_triton(grid, pointers, numbers)
                return
        driver = self._driver.active
        device = driver.get_current_device()
        form: list[Any] = [driver, device, self._knobs.debug, select_specialized(numbers)]
        arguments: list[Any] = []
        for pointer in pointers:
            if pointer is None:
                form.append(None)
                arguments.append(None)
            elif isinstance(pointer, Block):
                form.append(pointer.base.dtype)
                form.append(pointer.block_shape)
                arguments.append(pointer)
            else:
                address = pointer.data_ptr()
                form.append(pointer.dtype)
                form.append(address % 16)
                arguments.append(address)
        key = tuple(form)
        compiled = self._forms.get(key)
        if compiled is None:
            self._cache(key, self._launch_by_triton(grid, pointers, numbers))
            return
        run, function, metadata = compiled
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *numbers, *self._trailing)

    def _is_hooked(self) -> bool:
        """Return True if a hook observes launches or changes the compilation of kernels."""
        knobs = self._knobs
        enter = knobs.launch_enter_hook
        leave = knobs.launch_exit_hook
        return bool(
            getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
            or knobs.add_stages_inspection_hook or self.kernel.pre_run_hooks
        )

    def _classify_numbers(self, num_pointers: int) -> Callable[[tuple[int, ...]], Any]:
        """Determine the numbers that Triton specializes on, and return a function that selects them."""
        numbers = self._variable[num_pointers:]
        specialized = [i for i, param in enumerate(numbers) if not param.do_not_specialize]
        self._unspecialized = tuple(i for i, param in enumerate(numbers) if param.do_not_specialize)
        self._select_specialized = itemgetter(*specialized) if specialized else lambda numbers: None
        return self._select_specialized

    def _launch_by_triton(self, grid: tuple[int, ...], pointers: Pointers, numbers: tuple[int, ...]) -> Any:
        """Launch with `kernel[grid](...)`, and return its result: the compiled kernel, unless it is interpreted."""
        arguments = [pointer.to_descriptor() if isinstance(pointer, Block) else pointer for pointer in pointers]
        return self.kernel[grid](*arguments, *numbers, **self._constants)

    def _cache(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Cache a compiled CUDA kernel for its form. Other backends specialize on more than the key contains."""
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if target is None or target.backend != "cuda":
            return
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[key] = (compiled.run, compiled.function, compiled.packed_metadata)
