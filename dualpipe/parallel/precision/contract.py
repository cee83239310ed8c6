"""Check that a module which trains has the dtypes of its plan: parameters, what forwards see, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualpipe.kernels.formats import Format
from dualpipe.parallel.precision.plan import DTypePlan, slots
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import short_name


class ContractError(AssertionError):
    """A tensor is not what the plan says; the message names all of them."""


class Differences:
    """The differences from a plan that were found so far, each once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Add a difference, as a line of text."""
        self._lines[line] = None

    def check(self, name: str, what: str, actual: torch.dtype | Format | None, planned: torch.dtype | Format) -> None:
        """Add a difference where a dtype is not the planned one. what: such as "is stored in"."""
        if actual != planned:
            found = short_name(actual) if actual else "any dtype"
            self.add(f"{name}: {what} {found}, planned {short_name(planned)}")

    def raise_all(self) -> None:
        """Raise a ContractError that names them, if there are any."""
        if self._lines:
            raise ContractError("the dtype contract does not hold:\n" + "\n".join(f"  {line}" for line in self._lines))


def assert_contract(
    module: nn.Module | Sequence[nn.Module], plan: DTypePlan, *, run: Callable[[], object] | None = None
) -> None:
    """Check a module, or the stages of a rank, against its plan, between two training steps.

    Storage is checked always, with formats and masters. `run`, a forward or a whole step of the module, is called once;
    while it runs, each module's parameters and buffers are compared with their compute dtype and format, and what
    gradients accumulate in with the reduce dtype. Gradients that are there afterwards are checked too.

    Raises ContractError where something differs, or no parameter was seen in a forward; ValueError where the plan lacks
    a tensor of the module.
    """
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    differences = Differences()
    if run is not None and not _watch_forwards(modules, plan, run, differences):
        differences.add("no module with parameters ran its forward: `run` must call the module, not only its methods")
    for each in modules:
        for inner in each.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()  # a root stays gathered after a forward
        _check_storage(each, plan, differences)
        _check_gradients(each, plan, differences)
    differences.raise_all()


def _check_storage(module: nn.Module, plan: DTypePlan, differences: Differences) -> None:
    for slot in slots(module):
        planned, part = plan.of(slot.name), quantized_part(slot.tensor)
        differences.check(slot.name, "is stored in", _kind(slot.tensor), planned.stored)
        if part is not None and planned.master != (part.master is not None):
            differences.add(f"{slot.name}: is stored with{'out' * planned.master} masters, planned otherwise")


def _check_gradients(module: nn.Module, plan: DTypePlan, differences: Differences) -> None:
    for name, param in module.named_parameters():
        if param.grad is not None:  # FSDP2 hands on a reduced one in the storage dtype; a plain one accumulates
            sharded = isinstance(module, FSDPModule)
            planned = plan.of(name).storage if sharded else plan.reduce_dtype(name)
            differences.check(name, "has a gradient in", _kind(param.grad), planned)


def _watch_forwards(
    modules: Sequence[nn.Module], plan: DTypePlan, run: Callable[[], object], differences: Differences
) -> bool:
    """Check what forwards in `run` see; return True if a module with parameters ran its forward."""
    seen: list[str] = []

    def look(prefix: str, module: nn.Module, args: Any) -> None:
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{prefix}.{key}".lstrip(".")
            planned = plan.of(name)
            seen_by_forward = vars(module).get(key, tensor)  # see `shard`: one that is gathered wider is narrowed
            differences.check(name, "computes in", seen_by_forward.dtype, planned.compute)
            differences.check(name, "computes with", _kind(seen_by_forward), planned.format or planned.compute)
            if isinstance(tensor, nn.Parameter):
                seen.append(name)
                if tensor.requires_grad:
                    differences.check(name, "accumulates in", tensor.grad_dtype, plan.reduce_dtype(name))

    with ExitStack() as hooks:
        for prefix, inner in (pair for module in modules for pair in module.named_modules()):
            hooks.callback(inner.register_forward_pre_hook(partial(look, prefix)).remove)
        run()
    return bool(seen)


def _kind(tensor: Tensor) -> torch.dtype | Format:
    part = quantized_part(tensor)
    return tensor.dtype if part is None else part.format
