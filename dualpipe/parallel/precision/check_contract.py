"""Check of a training module against its dtype plan: stored parameters, tensors in forwards, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualpipe.kernels.formats import Format
from dualpipe.parallel.precision.dtype_plan import DTypePlan, slots
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import short_name


class ContractError(AssertionError):
    """Raised when tensors differ from their plan; the message names all of them."""


class Differences:
    """Differences from a plan, without duplicates, in the order in which they were added."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Add a difference, as a line of text."""
        self._lines[line] = None

    def check(self, name: str, role: str, actual: torch.dtype | Format | None, planned: torch.dtype | Format) -> None:
        """Add a difference if a dtype is not the planned one. role: the use of the dtype, such as "is stored in"."""
        if actual != planned:
            actual_text = short_name(actual) if actual else "any dtype"
            self.add(f"{name}: {role} {actual_text}, planned {short_name(planned)}")

    def raise_all(self) -> None:
        """Raise a ContractError that names all differences, if there are any."""
        if self._lines:
            raise ContractError("the dtype contract does not hold:\n" + "\n".join(f"  {line}" for line in self._lines))


def assert_contract(
    module: nn.Module | Sequence[nn.Module], plan: DTypePlan, *, run: Callable[[], object] | None = None
) -> None:
    """Check a module, or the stages of a rank, against its plan, between two training steps.

    The stored parameters are always checked, with formats and masters, and so are the gradients that exist at the end.
    run: a forward or a whole step of the module, called once. While it runs, the parameters and buffers of every module
    are compared with their compute dtype and format, and the dtypes of gradient accumulators with the reduce dtype.

    Raises ContractError if a tensor differs, or `run` runs no forward of a module with parameters; ValueError if the
    plan lacks a tensor of the module.
    """
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    differences = Differences()
    if run is not None and not _watch_forwards(modules, plan, run, differences):
        differences.add("no module with parameters ran its forward: `run` must call the module, not only its methods")
    for root in modules:
        for inner in root.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()  # a root unit stays gathered after a forward
        _check_storage(root, plan, differences)
        _check_gradients(root, plan, differences)
    differences.raise_all()


def _check_storage(module: nn.Module, plan: DTypePlan, differences: Differences) -> None:
    for slot in slots(module):
        planned = plan.of(slot.name)
        part = quantized_part(slot.tensor)
        differences.check(slot.name, "is stored in", _dtype_or_format(slot.tensor), planned.stored)
        if part is not None and planned.master != (part.master is not None):
            actual = "without" if part.master is None else "with"
            differences.add(f"{slot.name}: is stored {actual} masters, planned otherwise")


def _check_gradients(module: nn.Module, plan: DTypePlan, differences: Differences) -> None:
    for name, param in module.named_parameters():
        if param.grad is not None:  # FSDP2 casts a reduced gradient to the storage dtype; others stay as accumulated
            is_sharded = isinstance(module, FSDPModule)
            planned = plan.of(name).storage if is_sharded else plan.reduce_dtype(name)
            differences.check(name, "has a gradient in", _dtype_or_format(param.grad), planned)


def _watch_forwards(
    modules: Sequence[nn.Module], plan: DTypePlan, run: Callable[[], object], differences: Differences
) -> bool:
    """Check the tensors in the forwards of `run`; return True if a module with parameters ran its forward."""
    checked: list[str] = []

    def check_forward(prefix: str, module: nn.Module, args: Any) -> None:
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{prefix}.{key}".lstrip(".")
            planned = plan.of(name)
            used = vars(module).get(key, tensor)  # if `shard` casts a parameter for the forward, the result is in vars
            differences.check(name, "computes in", used.dtype, planned.compute)
            differences.check(name, "computes with", _dtype_or_format(used), planned.format or planned.compute)
            if isinstance(tensor, nn.Parameter):
                checked.append(name)
                if tensor.requires_grad:
                    differences.check(name, "accumulates in", tensor.grad_dtype, plan.reduce_dtype(name))

    with ExitStack() as hooks:
        for prefix, inner in (pair for module in modules for pair in module.named_modules()):
            hooks.callback(inner.register_forward_pre_hook(partial(check_forward, prefix)).remove)
        run()
    return bool(checked)


def _dtype_or_format(tensor: Tensor) -> torch.dtype | Format:
    part = quantized_part(tensor)
    return tensor.dtype if part is None else part.format
