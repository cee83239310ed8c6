"""FSDP2 units and casts of a module, as its dtype plan says. Nothing of the module is changed.

    host      the module itself, an element of its outermost ModuleList or ModuleDict (a layer), or a frozen tower
    unit      parameters of one key (storage, compute, reduce, expert or dense) in a host, gathered and reduced together
    cast      what goes into a module that owns parameters has their compute dtype, where its host mixes dtypes
    narrow    a parameter that is gathered wider than it computes in, for what its module owns beside it, is cast for
              the module's forward

FSDP2 gathers a unit in one dtype and reduces it in one; its assertion about that comes in the first forward, and says
nothing of frozen parameters. So parameters are grouped here, before anything is sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dualpipe.parallel.precision.plan import DTypePlan
from dualpipe.runtime.dtypes import short_name

CastDTypes = tuple[torch.dtype, torch.dtype | None]  # computed in, and returned where that is another


class Key(NamedTuple):
    """What the parameters of a unit have in common."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    expert: bool  # already sharded over the expert-parallel ranks

    def __str__(self) -> str:
        storage, compute, reduce = map(short_name, self[:3])
        return f"{storage} computing in {compute}, reduced in {reduce}{', expert' if self.expert else ''}"


@dataclass
class _Node:
    """A module with what `ModuleUnits` has to know of it."""

    module: nn.Module
    name: str
    is_host: bool
    own: Key | None = None  # of the parameters that it owns directly
    narrow: torch.dtype | None = None  # what it computes in, where some of these are gathered wider than that
    casts: dict[CastDTypes, None] = field(default_factory=dict)  # of these and of frozen scalars, in order
    children: list[_Node] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)  # of all parameters inside
    dtypes: set[CastDTypes] = field(default_factory=set)  # of all floating-point tensors inside
    sizes: Counter[Key] = field(default_factory=Counter)  # dense, computing in the policy's dtype, in no host inside
    has_hosts: bool = False
    seen: bool = False  # whether its units are found

    @property
    def main(self) -> Key | None:
        """The key of its own parameters or, where it has none, of most that compute in the policy's dtype."""
        if self.own or len(self.keys) == 1:
            return self.own or next(iter(self.keys))
        return max(self.sizes, key=self.sizes.__getitem__, default=None)


class ModuleUnits:
    """The units and casts of a module by its plan; nothing of the module is changed.

    units: modules whose parameters are gathered and reduced together, and their key (None: no parameters of their own);
    innermost first, the order in which they are to be sharded. casts: by module, what its floating-point inputs and
    outputs are cast to; None leaves them. narrowed: by module, the parameters that its forward sees in another dtype
    than they are gathered in. output_dtype: what the module returns, by default the policy's.

    Raises ValueError where the plan lacks a tensor, or dtypes meet where FSDP2 cannot keep them apart: in parameters
    that one module owns directly, in a container without a forward, in tied parameters.
    """

    def __init__(self, root: nn.Module, plan: DTypePlan, *, output_dtype: torch.dtype | None = None) -> None:
        self._plan, base = plan, plan.policy.param_dtype
        self._nodes: dict[nn.Module, _Node] = {}
        self.units: list[tuple[tuple[nn.Module, ...], Key | None]] = []
        self.casts: dict[nn.Module, CastDTypes] = {}
        self.narrowed: defaultdict[nn.Module, dict[str, torch.dtype]] = defaultdict(dict)
        whole = self._look(root, "")
        self._find_casts(whole, output_dtype or plan.policy.output_dtype)
        for node in self._nodes.values():
            if node.is_host:  # returns what is computed in, whatever its fp32 parts do; one all in fp32, fp32
                outputs = {base if any(dtype is base for dtype, _ in node.dtypes) else out for _, out in node.dtypes}
                self._find_casts(node, outputs.pop() if len(outputs) == 1 else None)
        self._find_units(whole, whole.main)
        self._join_tied()

    def _look(self, module: nn.Module, name: str, *, is_host: bool = False, in_layer: bool = False) -> _Node:
        """Note a module and what is inside, by the first place that it has; a layer has no layers of its own."""
        node = self._nodes[module] = self._node(module, name, is_host)
        for key, child in module.named_children():
            if child not in self._nodes:
                is_layer = isinstance(module, nn.ModuleList | nn.ModuleDict) and not in_layer
                has_more = any(True for _ in chain(child.children(), child.buffers(recurse=False)))
                is_tower = has_more and not _is_trained(child) and _is_trained(module)
                sharded = any(param.dim() for param in child.parameters())
                is_host = (is_layer or is_tower) and sharded and _has_forward(child)
                in_host = in_layer or (is_host and is_layer)
                self._look(child, f"{name}.{key}".lstrip("."), is_host=is_host, in_layer=in_host)
            inner = self._nodes[child]
            node.children.append(inner)
            node.keys |= inner.keys
            node.dtypes |= inner.dtypes
            node.has_hosts |= inner.is_host or inner.has_hosts
            if not inner.is_host:
                node.sizes.update(inner.sizes)
        return node

    def _node(self, module: nn.Module, name: str, is_host: bool) -> _Node:
        """A module with what it owns directly."""
        node = _Node(module, name, is_host)
        owned: dict[Key, str] = {}
        for key, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            full, is_param = f"{name}.{key}".lstrip("."), isinstance(tensor, nn.Parameter)
            dtypes = self._plan.of(full)
            if tensor.is_floating_point():
                node.dtypes.add((dtypes.compute, dtypes.output))
                if is_param:
                    node.casts[dtypes.compute, dtypes.output] = None
            if is_param and tensor.dim() > 0:
                reduce = self._plan.reduce_dtype(full)
                gathered = dtypes.unsharded or dtypes.compute
                node.own = Key(dtypes.storage, gathered, reduce, isinstance(tensor, DTensor))
                owned.setdefault(node.own, full)
                if dtypes.unsharded:
                    node.narrow = dtypes.compute
                    self.narrowed[module][key] = dtypes.compute
            elif is_param and tensor.requires_grad:
                raise ValueError(f"{full} is a scalar, which FSDP2 cannot shard: give it the shape (1,)")
        if len(owned) > 1:
            found = ", ".join(f"{full} ({key})" for key, full in owned.items())
            raise ValueError(f"{name or 'the module'} ({type(module).__name__}) directly owns parameters that FSDP2 "
                             f"cannot keep apart: {found}; give them the same dtypes with a rule or pin, or move some "
                             "to a submodule")
        node.keys.update(owned)
        if node.own and node.own.compute is self._plan.policy.param_dtype and not node.own.expert:
            node.sizes[node.own] = sum(param.numel() for param in module.parameters(recurse=False))
        return node

    def _find_casts(self, host: _Node, output: torch.dtype | None) -> None:
        """The casts of a host, which returns `output`; where it mixes dtypes, those around the largest modules in it of
        one dtype, and into those that own parameters among other dtypes."""
        computes = {dtype for dtype, _ in host.dtypes}
        main = host.main.compute if host.main else self._plan.policy.param_dtype
        self.casts[host.module] = computes.pop() if len(computes) == 1 else host.narrow or main, output
        inside = [] if len(host.dtypes) == 1 or _mixes_by_itself(host) else host.children[::-1]
        while inside:
            node = inside.pop()
            if not node.keys or node.is_host:
                continue
            if len(node.dtypes) == 1 and _has_forward(node.module):
                (self.casts[node.module],) = node.dtypes
                continue
            if len({output for _, output in node.casts}) > 1:
                raise ValueError(f"rules disagree on what {node.name} returns: {set(node.casts)}")
            if node.casts and _has_forward(node.module):
                inputs, returned = next(iter(node.casts))
                self.casts[node.module] = node.narrow or inputs, returned
            inside += [] if _mixes_by_itself(node) else node.children[::-1]

    def _find_units(self, host: _Node, main: Key | None) -> None:
        """The units in a module, and last the module itself with what is around them, of the key `main`."""
        groups: defaultdict[Key, list[nn.Module]] = defaultdict(list)
        inside = host.children[::-1]
        while inside:
            node = inside.pop()
            if node.seen or not node.keys:
                continue
            node.seen, has_forward = True, _has_forward(node.module)
            if node.is_host:
                self._find_units(node, node.main)
            elif not has_forward and node.own not in (None, main):
                raise ValueError(f"{node.name} ({type(node.module).__name__}) has no forward, so its parameters, "
                                 f"{node.own}, cannot be gathered apart from those around it, {main or 'none'}: give "
                                 "both the same dtype, or move them to a module that has one")
            elif has_forward and len(node.keys) == 1 and not node.has_hosts:
                (key,) = node.keys
                if key != main:
                    groups[key].append(node.module)
            elif node.own in (None, main):
                inside += node.children[::-1]
            else:
                self._find_units(node, node.own)
        self.units += [(tuple(modules), key) for key, modules in groups.items()]
        self.units.append(((host.module,), main))

    def _join_tied(self) -> None:
        """Put modules of different units that share a parameter into a unit of their own, ahead of all others."""
        unit_of: dict[nn.Module, int] = {}
        for number, (modules, _) in enumerate(self.units):  # innermost first
            for module in chain.from_iterable(outer.modules() for outer in modules):
                unit_of.setdefault(module, number)
        owners: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        for module in self._nodes:
            for param in module.parameters(recurse=False):
                owners[param].append(module)
        joined: dict[tuple[nn.Module, ...], Key | None] = {}
        taken: set[nn.Module] = set()
        for tied in owners.values():
            if len({unit_of[module] for module in tied}) > 1:
                if not taken.isdisjoint(tied) or any(self._nodes[module].children for module in tied):
                    raise ValueError(f"{[type(module).__name__ for module in tied]} share a parameter across units and "
                                     "have others besides: tie modules that own nothing else")
                joined[tuple(tied)] = self.units[unit_of[tied[0]]][1]
                taken.update(tied)
        rest = [(tuple(m for m in modules if m not in taken), key) for modules, key in self.units]
        self.units = [*joined.items(), *(unit for unit in rest if unit[0])]


def _mixes_by_itself(node: _Node) -> bool:
    """Return True for a module whose own parameters differ in dtype, and what is inside does not: its forward was
    written for that mix, and casts where it wants to."""
    return node.narrow is not None and all(child.dtypes <= {(node.narrow, None)} for child in node.children)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())
