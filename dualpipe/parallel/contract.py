"""Asserting a dtype plan on a real module: what is stored, computed, accumulated and on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule

from dualpipe.dtypes import dtype_of_code, short_name
from dualpipe.parallel.dtype_plan import DTypePlan, saved, slots

METADATA = ".metadata"  # of torch.distributed.checkpoint
TENSORS = "tensors.json"  # of a checkpoint of a run, whose tensors are in safetensors files


class ContractError(AssertionError):
    """A tensor is not what the plan says; the message names all of them."""


def assert_contract(
    module: nn.Module | Sequence[nn.Module],
    plan: DTypePlan,
    *,
    run: Callable[[], object] | None = None,
    checkpoint: str | PathLike[str] | Mapping[str, torch.dtype] | None = None,
) -> None:
    """Check a module, or the stages of a rank, against its plan, between two training steps.

    Storage is checked always. `run`, a forward or a whole step of the module, is called once; while it runs, each
    module's parameters and buffers are compared with their compute dtype, and what gradients accumulate in with the
    reduce dtype. Gradients that are there afterwards are checked too. `checkpoint` is a distributed checkpoint, which
    has storage dtypes or the float32 masters of trained parameters, or an export as safetensors or the dtypes by name,
    which have the save dtypes.

    Raises:
        ContractError: something differs, or no parameter was seen in a forward.
        ValueError: the plan lacks a tensor of the module, or `checkpoint` cannot be read.
    """
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    wrong = [] if run is None else _watch(modules, plan, run)
    for each in modules:
        sharded = isinstance(each, FSDPModule)
        for inner in each.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()  # a root stays gathered after a forward
        for slot in slots(each):
            wrong += _differs(slot.name, "is stored in", slot.tensor.dtype, plan.of(slot.name).storage)
        for name, param in each.named_parameters():
            if param.grad is not None:  # FSDP2 hands on a reduced one in the storage dtype; a plain one accumulates
                expected = plan.of(name).storage if sharded else plan.reduce_dtype(name)
                wrong += _differs(name, "has a gradient in", param.grad.dtype, expected)
        if checkpoint is not None:
            wrong += _on_disk(each, plan, checkpoint)
    if wrong := list(dict.fromkeys(wrong)):
        raise ContractError("the dtype contract does not hold:\n" + "\n".join(f"  {line}" for line in wrong))


def checkpoint_dtypes(path: str | PathLike[str]) -> dict[str, torch.dtype]:
    """The dtype of every tensor in a safetensors file, a folder of them, or a distributed checkpoint, without loading.

    What `torch.distributed.checkpoint` wrote by itself is described by a pickle: of that read only what you trust.

    Raises:
        ValueError: there is none of these at `path`, or a tensor has a dtype that torch lacks.
    """
    path = Path(path)
    files = [path] if path.suffix == ".safetensors" and path.is_file() else sorted(path.glob("*.safetensors"))
    if not files and (path / METADATA).is_file():
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: entry.properties.dtype for name, entry in entries.items() if hasattr(entry, "properties")}
    if not files:
        raise ValueError(f"{path} is no safetensors file, folder of them, or distributed checkpoint")
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                dtypes[name] = dtype_of_code(tensors.get_slice(name).get_dtype(), name)
    return dtypes


def _differs(name: str, what: str, actual: torch.dtype | None, expected: torch.dtype) -> list[str]:
    if actual is expected:
        return []
    return [f"{name}: {what} {short_name(actual) if actual else 'any dtype'}, planned {short_name(expected)}"]


def _watch(modules: Sequence[nn.Module], plan: DTypePlan, run: Callable[[], object]) -> list[str]:
    wrong: list[str] = []
    seen: set[str] = set()

    def look(prefix: str, module: nn.Module, args: Any) -> None:
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{prefix}.{key}".lstrip(".")
            wrong.extend(_differs(name, "computes in", tensor.dtype, plan.of(name).compute))
            if isinstance(tensor, nn.Parameter):
                seen.add(name)
                if tensor.requires_grad:
                    wrong.extend(_differs(name, "accumulates in", tensor.grad_dtype, plan.reduce_dtype(name)))

    with ExitStack() as hooks:
        for prefix, inner in (pair for module in modules for pair in module.named_modules()):
            hooks.callback(inner.register_forward_pre_hook(partial(look, prefix)).remove)
        run()
    if not seen:
        wrong.append("no module with parameters ran its forward: `run` must call the module, not only its methods")
    return wrong


def _on_disk(module: nn.Module, plan: DTypePlan, checkpoint: Any) -> Iterator[str]:
    given = isinstance(checkpoint, Mapping)
    distributed = not given and any((Path(checkpoint) / name).is_file() for name in (METADATA, TENSORS))
    found = checkpoint if given else checkpoint_dtypes(checkpoint)
    for first, *others in saved(module):
        expected = plan.of(first.name).storage if distributed else plan.of(first.name).save
        is_trained = distributed and first.tensor.requires_grad
        master = torch.promote_types(expected, torch.float32) if is_trained else expected
        present = [slot.name for slot in (first, *others) if slot.name in found]
        for name in present:
            if found[name] is not master:
                yield from _differs(name, "is on disk in", found[name], expected)
        if not present:
            yield f"{first.name}: is not in the checkpoint"
