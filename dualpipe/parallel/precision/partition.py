"""Partition of a module into FSDP2 units, with the casts between dtypes, as its dtype plan says.

    host      the module itself, a layer (an element of an outermost ModuleList or ModuleDict), or a tower (a frozen
              module with submodules, in a module that is trained)
    unit      parameters of one key (storage, compute, reduce, expert or dense) in a host, gathered and reduced together
    cast      of a module's inputs to the compute dtype of the parameters that it owns, in a host of several dtypes
    narrow    cast of a parameter for its module's forward, if it is gathered in a wider dtype than it computes in, for
              the sake of other parameters that the module owns

FSDP2 gathers a unit in one dtype and reduces it in one. It checks this in the first forward only, and not for frozen
parameters; therefore parameters are grouped here, before anything is sharded. Nothing in the module is changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dualpipe.parallel.precision.dtype_plan import DTypePlan
from dualpipe.runtime.dtypes import short_name

CastDTypes = tuple[torch.dtype, torch.dtype | None]  # of a module's inputs and outputs; None: outputs are not cast


class Key(NamedTuple):
    """Dtypes of the parameters of a unit, and their kind: experts or dense."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    expert: bool  # already sharded over the expert-parallel ranks

    def __str__(self) -> str:
        storage = short_name(self.storage)
        compute = short_name(self.compute)
        reduce = short_name(self.reduce)
        return f"{storage} computing in {compute}, reduced in {reduce}{', expert' if self.expert else ''}"


@dataclass
class _Node:
    """Module with the properties that `ModuleUnits` groups by."""

    module: nn.Module
    name: str
    is_host: bool
    direct_key: Key | None = None  # of the parameters that the module owns directly
    narrow: torch.dtype | None = None  # compute dtype of directly owned parameters gathered in a wider one, if any
    # Compute and output dtypes of all floating-point parameters that the module owns directly, including frozen
    # scalars, in order.
    casts: dict[CastDTypes, None] = field(default_factory=dict)
    children: list[_Node] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)  # of all parameters inside
    dtypes: set[CastDTypes] = field(default_factory=set)  # of all floating-point tensors inside
    # Elements of dense parameters that compute in the policy's dtype, without those in hosts inside.
    sizes: Counter[Key] = field(default_factory=Counter)
    has_hosts: bool = False  # inside
    is_assigned: bool = False  # its parameters are in a unit

    @property
    def main_key(self) -> Key | None:
        """Key of the directly owned parameters; without any, the only key, or that of most elements in `sizes`."""
        if self.direct_key is not None:
            return self.direct_key
        if len(self.keys) == 1:
            return next(iter(self.keys))
        return max(self.sizes, key=self.sizes.__getitem__, default=None)


class ModuleUnits:
    """FSDP2 units and casts of a module, by its dtype plan.

    Attributes:

    - units: modules whose parameters are gathered and reduced together, with their key (None: no parameters of their
      own); innermost first, the order in which to shard them.
    - casts: by module, the dtypes of its floating-point inputs and outputs; outputs are not cast if None.
    - narrowed: by module, the parameters that its forward sees in another dtype than they are gathered in.

    output_dtype: the dtype of the module's output, by default the policy's.

    Raises ValueError if the plan lacks a tensor, or FSDP2 cannot keep dtypes apart: in parameters that one module owns
    directly, in a container without a forward, in tied parameters.
    """

    def __init__(self, root: nn.Module, plan: DTypePlan, *, output_dtype: torch.dtype | None = None) -> None:
        self._plan = plan
        self._nodes: dict[nn.Module, _Node] = {}
        self.units: list[tuple[tuple[nn.Module, ...], Key | None]] = []
        self.casts: dict[nn.Module, CastDTypes] = {}
        self.narrowed: defaultdict[nn.Module, dict[str, torch.dtype]] = defaultdict(dict)
        root_node = self._add_module(root, "")
        self._add_casts(root_node, output_dtype or plan.policy.output_dtype)
        for node in self._nodes.values():
            if node.is_host:
                self._add_casts(node, self._host_output(node))
        self._add_units(root_node, root_node.main_key)
        self._join_tied()

    def _host_output(self, host: _Node) -> torch.dtype | None:
        """Return the output dtype of a host: the policy's compute dtype, if any tensor inside computes in it.

        Without such a tensor, the output dtype that all rules inside agree on; None if they do not.
        """
        param_dtype = self._plan.policy.param_dtype
        if any(dtype is param_dtype for dtype, _ in host.dtypes):
            return param_dtype
        outputs = {output for _, output in host.dtypes}
        return outputs.pop() if len(outputs) == 1 else None

    def _add_module(self, module: nn.Module, name: str, *, is_host: bool = False, in_layer: bool = False) -> _Node:
        """Add a module and all modules inside, under their first names; a layer contains no other layers."""
        node = self._node(module, name, is_host)
        self._nodes[module] = node
        for key, child in module.named_children():
            if child not in self._nodes:
                is_layer = isinstance(module, nn.ModuleList | nn.ModuleDict) and not in_layer
                has_contents = any(True for _ in chain(child.children(), child.buffers(recurse=False)))
                is_tower = has_contents and not _is_trained(child) and _is_trained(module)
                can_shard = any(param.dim() for param in child.parameters())
                is_host = (is_layer or is_tower) and can_shard and _has_forward(child)
                child_name = f"{name}.{key}".lstrip(".")
                self._add_module(child, child_name, is_host=is_host, in_layer=in_layer or (is_host and is_layer))
            inner = self._nodes[child]
            node.children.append(inner)
            node.keys |= inner.keys
            node.dtypes |= inner.dtypes
            node.has_hosts |= inner.is_host or inner.has_hosts
            if not inner.is_host:
                node.sizes.update(inner.sizes)
        return node

    def _node(self, module: nn.Module, name: str, is_host: bool) -> _Node:
        """Return the node of a module with its directly owned tensors."""
        node = _Node(module, name, is_host)
        first_names: dict[Key, str] = {}
        for key, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            tensor_name = f"{name}.{key}".lstrip(".")
            is_param = isinstance(tensor, nn.Parameter)
            dtypes = self._plan.of(tensor_name)
            if tensor.is_floating_point():
                node.dtypes.add((dtypes.compute, dtypes.output))
                if is_param:
                    node.casts[dtypes.compute, dtypes.output] = None
            if is_param and tensor.dim() > 0:
                gathered = dtypes.unsharded or dtypes.compute
                node.direct_key = Key(
                    dtypes.storage, gathered, self._plan.reduce_dtype(tensor_name), isinstance(tensor, DTensor))
                first_names.setdefault(node.direct_key, tensor_name)
                if dtypes.unsharded:
                    node.narrow = dtypes.compute
                    self.narrowed[module][key] = dtypes.compute
            elif is_param and tensor.requires_grad:
                raise ValueError(f"{tensor_name} is a scalar, which FSDP2 cannot shard: give it the shape (1,)")
        if len(first_names) > 1:
            parameters = ", ".join(f"{tensor_name} ({key})" for key, tensor_name in first_names.items())
            raise ValueError(f"{name or 'the module'} ({type(module).__name__}) directly owns parameters that FSDP2 "
                             f"cannot keep apart: {parameters}; give them the same dtypes with a rule or pin, or move "
                             "some to a submodule")
        node.keys.update(first_names)
        direct_key = node.direct_key
        if direct_key and direct_key.compute is self._plan.policy.param_dtype and not direct_key.expert:
            node.sizes[direct_key] = sum(param.numel() for param in module.parameters(recurse=False))
        return node

    def _add_casts(self, host: _Node, output: torch.dtype | None) -> None:
        """Add the casts of a host that returns `output`.

        The host itself casts its inputs and output. In a host of several dtypes, so do the outermost modules of one
        dtype inside it, and modules of several dtypes that own parameters directly.
        """
        self.casts[host.module] = (self._input_dtype(host), output)
        pending = [] if len(host.dtypes) == 1 or _casts_by_itself(host) else host.children[::-1]
        while pending:
            node = pending.pop()
            if not node.keys or node.is_host:
                continue
            if len(node.dtypes) == 1 and _has_forward(node.module):
                (self.casts[node.module],) = node.dtypes
                continue
            if len({output for _, output in node.casts}) > 1:
                raise ValueError(f"rules disagree on the output_dtype of {node.name}, got {set(node.casts)}: give all "
                                 "of them the same output_dtype")
            if node.casts and _has_forward(node.module):
                inputs, returned = next(iter(node.casts))
                self.casts[node.module] = node.narrow or inputs, returned
            if not _casts_by_itself(node):
                pending += node.children[::-1]

    def _input_dtype(self, host: _Node) -> torch.dtype:
        """Return the dtype of a host's inputs: its only compute dtype, or that of its main parameters."""
        compute_dtypes = {dtype for dtype, _ in host.dtypes}
        if len(compute_dtypes) == 1:
            return compute_dtypes.pop()
        if host.narrow is not None:
            return host.narrow
        return self._plan.policy.param_dtype if host.main_key is None else host.main_key.compute

    def _add_units(self, host: _Node, main_key: Key | None) -> None:
        """Add the units inside a module, then that of the module itself, with its other parameters, of `main_key`."""
        groups: defaultdict[Key, list[nn.Module]] = defaultdict(list)
        pending = host.children[::-1]
        while pending:
            node = pending.pop()
            if node.is_assigned or not node.keys:
                continue
            node.is_assigned = True
            has_forward = _has_forward(node.module)
            if node.is_host:
                self._add_units(node, node.main_key)
            elif not has_forward and node.direct_key not in (None, main_key):
                raise ValueError(f"{node.name} ({type(node.module).__name__}) has no forward, so its parameters, "
                                 f"{node.direct_key}, cannot be gathered apart from those around it, "
                                 f"{main_key or 'none'}: give both the same dtype, or move them to a module with a "
                                 "forward")
            elif has_forward and len(node.keys) == 1 and not node.has_hosts:
                (key,) = node.keys
                if key != main_key:
                    groups[key].append(node.module)
            elif node.direct_key in (None, main_key):
                pending += node.children[::-1]
            else:
                self._add_units(node, node.direct_key)
        self.units += [(tuple(modules), key) for key, modules in groups.items()]
        self.units.append(((host.module,), main_key))

    def _join_tied(self) -> None:
        """Move modules of different units that share a parameter into a common unit, ahead of all others."""
        unit_of: dict[nn.Module, int] = {}
        for number, (modules, _) in enumerate(self.units):  # innermost first
            for module in chain.from_iterable(outer.modules() for outer in modules):
                unit_of.setdefault(module, number)
        owners: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        for module in self._nodes:
            for param in module.parameters(recurse=False):
                owners[param].append(module)
        joined: dict[tuple[nn.Module, ...], Key | None] = {}
        moved: set[nn.Module] = set()
        for tied in owners.values():
            if len({unit_of[module] for module in tied}) > 1:
                if not moved.isdisjoint(tied) or any(self._nodes[module].children for module in tied):
                    raise ValueError(f"{[type(module).__name__ for module in tied]} share a parameter across units and "
                                     "contain other modules or are tied twice: tie modules that contain no others")
                joined[tuple(tied)] = self.units[unit_of[tied[0]]][1]
                moved.update(tied)
        remaining = [(tuple(module for module in modules if module not in moved), key) for modules, key in self.units]
        self.units = [*joined.items(), *(unit for unit in remaining if unit[0])]


def _casts_by_itself(node: _Node) -> bool:
    """Return True for a module that owns parameters of several dtypes, with one dtype in all modules inside.

    Its forward was written for that mix of dtypes, and casts where necessary.
    """
    return node.narrow is not None and all(child.dtypes <= {(node.narrow, None)} for child in node.children)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())
