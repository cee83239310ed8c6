"""Cutting a module as its dtype plan says: into FSDP2 units of one dtype each, with casts where dtypes meet.

    host      the module itself, an element of its outermost ModuleList or ModuleDict (a layer), or a frozen tower
    unit      parameters of one key (storage, compute, reduce, expert or dense) in a host, gathered and reduced together
    cast      what goes into a module that owns parameters has their compute dtype, where its host mixes dtypes

FSDP2 gathers a unit in one dtype and reduces it in one; its assertion about that comes in the first forward, and says
nothing of frozen parameters. So parameters are grouped here, before anything is sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dualpipe.dtypes import short_name
from dualpipe.parallel.dtype_plan import DTypePlan

_Dtypes = tuple[torch.dtype, torch.dtype | None]  # computed in, and returned where that is another


class Key(NamedTuple):
    """What the parameters of a unit have in common."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    expert: bool  # already sharded over the expert-parallel ranks

    def __str__(self) -> str:
        storage, compute, reduce = map(short_name, self[:3])
        return f"{storage} computing in {compute}, reduced in {reduce}{', expert' if self.expert else ''}"


class Unit(NamedTuple):
    """Modules whose parameters are gathered and reduced together; no key: no parameter of its own."""

    modules: tuple[nn.Module, ...]
    key: Key | None


class Cast(NamedTuple):
    """What a module's floating-point inputs and outputs are cast to; None leaves them."""

    module: nn.Module
    inputs: torch.dtype
    outputs: torch.dtype | None


class Cut:
    """How a module is cut as its plan says; nothing of the module is changed.

    units: innermost first, the order in which they are to be sharded. casts: into and out of modules. output_dtype:
    what the module returns, by default the policy's.

    Raises:
        ValueError: the plan lacks a tensor of the module, or dtypes meet where FSDP2 cannot keep them apart: in the
            parameters that one module owns directly, in a container without a forward, in tied parameters.
    """

    def __init__(self, root: nn.Module, plan: DTypePlan, *, output_dtype: torch.dtype | None = None) -> None:
        self._plan = plan
        self._names = {module: name for name, module in root.named_modules()}
        self._own = {module: self._own_key(module) for module in self._names}  # refuses what cannot be told apart
        self._keys = {module: {key for m in module.modules() if (key := self._own[m])} for module in self._names}
        tensors = {module: self._tensor_dtypes(module) for module in self._names}
        self._computes = {module: set(chain.from_iterable(tensors[m] for m in module.modules())) for module in tensors}
        self._seen: set[nn.Module] = set()
        self._is_host: dict[nn.Module, bool] = {}
        self._find_hosts(root, in_layer=False)
        self.casts = [*self._casts_of(root, output_dtype or plan.policy.output_dtype)]
        for host in (module for module, is_host in self._is_host.items() if is_host):
            self.casts += self._casts_of(host, self._output_of(host))
        self.units = _join_tied(root, [*self._units_of(root, self._main_key(root))])

    def _units_of(self, module: nn.Module, main: Key | None) -> Iterator[Unit]:
        """The units in a module, and last the module itself with what is around them, of the key `main`."""
        groups: defaultdict[Key, list[nn.Module]] = defaultdict(list)
        yield from self._units_inside(module, main, groups)
        yield from (Unit(tuple(modules), key) for key, modules in groups.items())
        yield Unit((module,), main)

    def _units_inside(self, module: nn.Module, main: Key | None, groups: dict[Key, list[nn.Module]]) -> Iterator[Unit]:
        for child in module.children():
            if not self._keys[child] or child in self._seen:
                continue
            self._seen.add(child)
            own, has_forward = self._own[child], _has_forward(child)
            if self._is_host[child]:
                yield from self._units_of(child, self._main_key(child))
            elif not has_forward and own not in (None, main):
                raise ValueError(f"{self._names[child]} ({type(child).__name__}) has no forward, so its parameters, "
                                 f"{own}, cannot be gathered apart from those around it, {main or 'none'}: give both "
                                 "the same dtype, or move them to a module that has one")
            elif has_forward and len(self._keys[child]) == 1 and not any(self._is_host[m] for m in child.modules()):
                (key,) = self._keys[child]
                if key != main:
                    groups[key].append(child)
            elif own in (None, main):
                yield from self._units_inside(child, main, groups)
            else:
                yield from self._units_of(child, own)

    def _main_key(self, host: nn.Module) -> Key | None:
        """The key of the host's own parameters or, where it has none, of most that compute in the policy's dtype."""
        if self._own[host] or len(self._keys[host]) == 1:
            return self._own[host] or next(iter(self._keys[host]))
        sizes: Counter[Key] = Counter()
        for module in self._near(host):
            if (key := self._own[module]) and key.compute is self._plan.policy.param_dtype and not key.expert:
                sizes[key] += sum(param.numel() for param in module.parameters(recurse=False))
        return max(sizes, key=sizes.__getitem__, default=None)

    def _near(self, module: nn.Module) -> Iterator[nn.Module]:
        """A module and what is in it, but not in a host inside."""
        yield module
        for child in module.children():
            if not self._is_host[child]:
                yield from self._near(child)

    def _find_hosts(self, module: nn.Module, *, in_layer: bool) -> None:
        """Layers and frozen towers inside, by the first place that they have; a layer has no layers of its own."""
        for child in module.children():
            if child in self._is_host:
                continue
            is_layer = isinstance(module, nn.ModuleList | nn.ModuleDict) and not in_layer
            has_more = any(True for _ in child.children()) or any(True for _ in child.buffers(recurse=False))
            is_tower = has_more and not _is_trained(child) and _is_trained(module)
            is_host = bool(self._keys[child]) and _has_forward(child) and (is_layer or is_tower)
            self._is_host[child] = is_host
            self._find_hosts(child, in_layer=in_layer or (is_host and is_layer))

    def _output_of(self, host: nn.Module) -> torch.dtype | None:
        """A layer or tower returns the policy's compute dtype, whatever its fp32 parts do; one all in fp32, fp32."""
        base = self._plan.policy.param_dtype
        if any(compute is base for compute, _ in self._computes[host]):
            return base
        outputs = {output for _, output in self._computes[host]}
        return outputs.pop() if len(outputs) == 1 else None

    def _casts_of(self, host: nn.Module, output: torch.dtype | None) -> Iterator[Cast]:
        """The casts of a host, which returns `output`, and of the modules in it where it mixes dtypes."""
        main = self._main_key(host)
        yield Cast(host, main.compute if main else self._plan.policy.param_dtype, output)
        if len(self._computes[host]) > 1:
            yield from self._casts_inside(host)

    def _casts_inside(self, module: nn.Module) -> Iterator[Cast]:
        """Casts around the largest modules of one dtype, and into those that own parameters among other dtypes."""
        for child in module.children():
            if not self._keys[child] or self._is_host[child]:
                continue
            if len(self._computes[child]) == 1 and _has_forward(child):
                yield Cast(child, *next(iter(self._computes[child])))
                continue
            own = self._tensor_dtypes(child, buffers=False)
            if len({output for _, output in own}) > 1:
                raise ValueError(f"rules disagree on what {self._names[child]} returns: {set(own)}")
            if own and _has_forward(child):
                yield Cast(child, *own[0])
            yield from self._casts_inside(child)

    def _tensor_dtypes(self, module: nn.Module, *, buffers: bool = True) -> list[_Dtypes]:
        """What the floating-point tensors that a module owns compute in, and have it return; each pair once."""
        named = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False) if buffers else ())
        found = [self._plan.of(self._full(module, name)) for name, tensor in named if tensor.is_floating_point()]
        return list(dict.fromkeys((dtypes.compute, dtypes.output) for dtypes in found))

    def _own_key(self, module: nn.Module) -> Key | None:
        keys: dict[Key, str] = {}
        for name, param in module.named_parameters(recurse=False):
            full = self._full(module, name)
            dtypes = self._plan.of(full)
            if param.dim() == 0 and param.requires_grad:
                raise ValueError(f"{full} is a scalar, which FSDP2 cannot shard: give it the shape (1,)")
            if param.dim() > 0:
                key = Key(dtypes.storage, dtypes.compute, self._plan.reduce_dtype(full), isinstance(param, DTensor))
                keys.setdefault(key, full)
        if len(keys) > 1:
            found = ", ".join(f"{full} ({key})" for key, full in keys.items())
            raise ValueError(f"{self._names[module] or 'the module'} ({type(module).__name__}) directly owns "
                             f"parameters that FSDP2 cannot keep apart: {found}; give them the same dtypes with a rule "
                             "or pin, or move some to a submodule")
        return next(iter(keys), None)

    def _full(self, module: nn.Module, name: str) -> str:
        return f"{self._names[module]}.{name}".lstrip(".")


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())


def _join_tied(root: nn.Module, units: list[Unit]) -> list[Unit]:
    """Put modules of different units that share a parameter into a unit of their own, ahead of all others."""
    unit_of: dict[nn.Module, Unit] = {}
    for unit in units:  # innermost first
        for module in chain.from_iterable(outer.modules() for outer in unit.modules):
            unit_of.setdefault(module, unit)
    owners: defaultdict[nn.Parameter, dict[nn.Module, None]] = defaultdict(dict)
    for module in root.modules():
        for param in module.parameters(recurse=False):
            owners[param][module] = None
    joined: list[Unit] = []
    taken: set[nn.Module] = set()
    for tied in map(tuple, owners.values()):
        if len({unit_of[module].modules for module in tied}) > 1:
            if not taken.isdisjoint(tied) or any(child is not module for module in tied for child in module.modules()):
                raise ValueError(f"{[type(module).__name__ for module in tied]} share a parameter across units and "
                                 "have others besides: tie modules that own nothing else")
            joined.append(Unit(tied, unit_of[tied[0]].key))
            taken.update(tied)
    rest = [Unit(tuple(m for m in unit.modules if m not in taken), unit.key) for unit in units]
    return joined + [unit for unit in rest if unit.modules]
