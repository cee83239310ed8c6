"""Launching compiled kernels in a few us of the host's time: `Launcher`, and `Block` for what a copy engine reads.

`kernel[grid](...)` of Triton binds, classifies and hashes all arguments at each launch, 20 to 30 us for a grouped
product. A `Launcher` is a kernel with its constants, made once for a shape. Its first launch with arguments of a form
goes Triton's way, which compiles; it keeps what that returned, and later launches of that form go straight to the
driver. A form is all that Triton compiles for, or more: the driver and its device, the dtype of each pointer and
its remainder by 16, which pointers are None, the block of each descriptor, and the numbers themselves, except those in
`do_not_specialize`, which only have to be of 32 bits.

    launch = Launcher(_scale_kernel, BLOCK=128, num_warps=4)    # _scale_kernel(x, y, N, stride, BLOCK: tl.constexpr)
    launch((blocks,), (x, y), (rows, stride))                   # pointers, then numbers, in the order of parameters

Triton's way is also taken by kernels that are interpreted, and while a hook of Triton is set, such as a profiler's. A
global variable that a kernel reads must not change once it has been launched: this is not checked again.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from dualpipe.kernels.common import INTERPRET

MOST_FORMS = 1024  # that are kept, where numbers that Triton specialises on vary
MOST_SHAPES = 4096  # that launchers are kept for; a model has some dozens


class Block:
    """A tensor that a kernel reads or adds to by a descriptor, `block_shape` at a time.

    Has the fields that Triton's launcher reads of a `TensorDescriptor`, whose checks take longer than a launch.
    """

    __slots__ = ("base", "block_shape", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self, base: Tensor, block_shape: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """shape, strides: of the same memory, such as those of `base`; each of `shape` is positive."""
        self.base = base
        self.block_shape = block_shape
        self.shape = shape
        self.strides = strides

    def checked(self) -> Any:
        """Return the descriptor that Triton makes."""
        from triton.tools.tensor_descriptor import TensorDescriptor  # Triton exists for Linux only

        return TensorDescriptor(self.base, [*self.shape], [*self.strides], [*self.block_shape])


Pointers = tuple[Tensor | Block | None, ...]


class Launcher:
    """A kernel with its constants; see the top of this file."""

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """constants: `tl.constexpr` parameters, which follow the others, and options of Triton such as `num_warps`."""
        self.kernel = kernel
        self._constants = constants
        self._forms: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._is_compiled = not INTERPRET and hasattr(kernel, "params")  # not a stand-in for a kernel
        if self._is_compiled:
            self._read_parameters()

    def _read_parameters(self) -> None:
        from triton import knobs
        from triton.runtime.driver import driver

        self._knobs = knobs.runtime
        self._driver = driver
        parameters = self.kernel.params
        self._variable = [param for param in parameters if not param.is_constexpr]
        trailing = parameters[len(self._variable):]
        assert all(param.is_constexpr for param in trailing), f"{self.kernel.__name__}: constants must be last"
        self._trailing = tuple(self._constants[param.name] for param in trailing)
        self._specialized: Callable[[tuple[int, ...]], Any] | None = None  # of the numbers, those in a form
        self._unspecialized: tuple[int, ...] = ()  # where the other numbers are

    def __call__(self, grid: tuple[int, ...], pointers: Pointers, numbers: tuple[int, ...]) -> None:
        """Launch on the current device and stream. grid: one to three numbers of programs."""
        if not self._is_compiled or self._is_hooked():
            self._launch_by_triton(grid, pointers, numbers)
            return
        specialized = self._specialized or self._divide(len(pointers))
        for i in self._unspecialized:
            if not -(2**31) <= numbers[i] < 2**31:  # Triton compiles another form
                self._launch_by_triton(grid, pointers, numbers)
                return
        driver = self._driver.active
        device = driver.get_current_device()
        form: list[Any] = [driver, device, self._knobs.debug, specialized(numbers)]
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
            self._keep(key, self._launch_by_triton(grid, pointers, numbers))
            return
        run, function, metadata = compiled
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *numbers, *self._trailing)

    def _is_hooked(self) -> bool:
        """Return True if somebody wants to be told of launches, or changes how kernels are compiled."""
        knobs = self._knobs
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        return bool(
            getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
            or knobs.add_stages_inspection_hook or self.kernel.pre_run_hooks
        )

    def _divide(self, num_pointers: int) -> Callable[[tuple[int, ...]], Any]:
        """Find which numbers Triton specialises on, and return what picks them."""
        numbers = self._variable[num_pointers:]
        specialized = [i for i, param in enumerate(numbers) if not param.do_not_specialize]
        self._unspecialized = tuple(i for i, param in enumerate(numbers) if param.do_not_specialize)
        self._specialized = itemgetter(*specialized) if specialized else lambda numbers: None
        return self._specialized

    def _launch_by_triton(self, grid: tuple[int, ...], pointers: Pointers, numbers: tuple[int, ...]) -> Any:
        """Return the compiled kernel, or what else Triton, its interpreter or a stand-in returns."""
        arguments = [pointer.checked() if isinstance(pointer, Block) else pointer for pointer in pointers]
        return self.kernel[grid](*arguments, *numbers, **self._constants)

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Keep a compiled kernel for its form; other chips have forms of more than is in the key."""
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if target is None or target.backend != "cuda":
            return
        if len(self._forms) >= MOST_FORMS:
            self._forms.clear()
        self._forms[key] = compiled.run, compiled.function, compiled.packed_metadata
