"""Dtype rules, policy and plan: the dtypes of every tensor by its fully qualified name, before a model is sharded.

    policy = DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16, [Rule("*.mlp.gate.weight", torch.float32)])
    plan = resolve_dtypes(whole_model_on_meta, policy, source_dtypes=checkpoint_dtypes("checkpoint/"))
    shard_stages(stages, mesh, plan)
    assert_contract(stage, plan, run=lambda: pipe.step(...))

A tensor has a storage dtype (of the parameter that the optimizer updates), a compute dtype (in the forward), a reduce
dtype (in which its gradient is accumulated and reduced) and a save dtype (of an export for other libraries). The plan
of a whole model serves each of its stages, since they keep the names of the whole model. See docs/precision.md for an
example, and `check_contract.py` for the check of a model against its plan.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from dualpipe.kernels.formats import Format, format_of
from dualpipe.runtime.dtypes import dtype_of_code, short_name

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a segment of a name: "layers.3.up" -> "layers.", "3", ".up"


@dataclass(frozen=True)
class Rule:
    """Rule that sets the dtypes of all tensors that match `pattern`; a dtype of None is not set.

    The pattern is matched segment by segment: `*` alone stands for one or more whole segments, `?_norm` for part of
    one. It names tensors, or a module and with it every tensor inside. `gate` never matches `gate_up_proj`.

    dtype: the compute dtype. output_dtype: the dtype of the module's output. By default a module whose dtype differs
    from its surroundings returns its compute dtype; `Rule("*.q_norm", torch.float32, output_dtype=torch.bfloat16)` is
    for a caller that mixes the output with other tensors. storage, reduce, save: see the head of this file.

    A `Format`, or its name, quantizes weights: `storage` stores them in the format, with float32 masters if they are
    trained; `gather` quantizes plain shards for each gather. A format applies to the weights that match the pattern,
    that `dualpipe.quantized.quantize_model.quantizable` lists, and that no module pins (see `resolve_dtypes`).

    Raises ValueError for an empty pattern, a rule without a dtype, dtypes that are not floating-point, unknown formats,
    and formats in both `storage` and `gather`.
    """

    pattern: str
    dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    storage: torch.dtype | Format | str | None = None
    reduce: torch.dtype | None = None
    save: torch.dtype | None = None
    gather: Format | str | None = None

    def __post_init__(self) -> None:
        if not self.pattern or not all(self.pattern.split(".")):
            raise ValueError(f"a rule's pattern is segments joined by dots, such as '*.A_log'; got {self.pattern!r}")
        if not self.dtypes:
            raise ValueError(f"rule {self.pattern!r} names no dtype; give it one to compute in")
        if isinstance(self.storage, str):
            self._set_format("storage", self.storage)
        if self.gather is not None:
            self._set_format("gather", self.gather)
        if self.gather and isinstance(self.storage, Format):
            raise ValueError(f"rule {self.pattern!r} both stores weights in {self.storage} and gathers them in "
                             f"{self.gather}; name one of them")
        for dtype in self.dtypes.values():
            if not isinstance(dtype, Format):
                _require_floating(dtype, f"rule {self.pattern!r}")

    def _set_format(self, field_name: str, format: Format | str) -> None:
        """Set a field to a format, by its name."""
        try:
            object.__setattr__(self, field_name, format_of(format))
        except ValueError as error:
            raise ValueError(f"rule {self.pattern!r}: {field_name}: {error}") from None

    @property
    def format(self) -> Format | None:
        """Format that the rule sets for weights, if any."""
        return cast(Format | None, self.gather) or (self.storage if isinstance(self.storage, Format) else None)

    @property
    def dtypes(self) -> dict[str, Any]:
        """Dtypes and formats that the rule sets, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: dtype for name, dtype in values.items() if dtype is not None}


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern of a `Rule` matches a tensor's name, or the name of a module that contains it."""

    def match(pattern: Sequence[str], name: Sequence[str]) -> bool:
        if not pattern:
            return True
        if set(pattern[0]) == {"*"}:
            return any(match(pattern[1:], name[count:]) for count in range(1, len(name) + 1))
        return bool(name) and fnmatchcase(name[0], pattern[0]) and match(pattern[1:], name[1:])

    return match(pattern.split("."), name.split("."))


def _require_floating(dtype: torch.dtype, owner: str) -> None:
    """Raise ValueError for another kind of dtype; `owner` names the rule or field in the message."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{owner}: the dtype must be a floating-point one, such as torch.float32; got {dtype!r}")


@dataclass(frozen=True)
class DTypePolicy:
    """Default dtypes of all tensors, and the rules for the exceptions.

    param_dtype: the compute dtype. reduce_dtype: gradients are accumulated and reduced in it. output_dtype: the dtype
    of a stage's output, and so of the messages between pipeline ranks. rules: `Rule`s, or tuples of their arguments.

    Raises ValueError for dtypes that are not floating-point.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype
    rules: Sequence[Rule | tuple[str, torch.dtype]] = ()

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _require_floating(getattr(self, name), name)
        rules = tuple(rule if isinstance(rule, Rule) else Rule(*rule) for rule in self.rules)
        object.__setattr__(self, "rules", rules)


@dataclass(frozen=True)
class TensorDTypes:
    """Dtypes of one tensor, with the reason.

    `output` and `reduce` are None unless a rule sets them, or a wider sibling requires another `reduce` (see
    `resolve.widen_siblings`).
    """

    storage: torch.dtype
    compute: torch.dtype
    save: torch.dtype
    reason: str
    output: torch.dtype | None = None  # of the module's output
    reduce: torch.dtype | None = None
    format: Format | None = None  # of the gathered weight, and of the stored one unless `gathered`
    gathered: bool = False  # the shards are plain and are quantized for each gather
    master: bool = False  # float32 masters are kept beside the quantized weight
    unsharded: torch.dtype | None = None  # the dtype that FSDP2 gathers, if the forward sees another one

    @property
    def stored(self) -> torch.dtype | Format:
        """Format or dtype that the parameter is stored in."""
        return self.format if self.format and not self.gathered else self.storage


@dataclass(frozen=True)
class DTypePlan:
    """Dtypes of every tensor of a model, by fully qualified name; created by `resolve_dtypes`."""

    policy: DTypePolicy
    tensors: Mapping[str, TensorDTypes]

    def of(self, name: str) -> TensorDTypes:
        """Return the dtypes of a tensor; raises `ValueError` for a name that the plan lacks."""
        if name not in self.tensors:
            raise ValueError(f"the dtype plan lacks {name!r}; resolve it for the whole model, not for a part")
        return self.tensors[name]

    def reduce_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the gradient of a tensor is accumulated and reduced.

        It is the policy's, but never narrower than a compute dtype that a rule or pin sets. Raises `ValueError` for a
        name that the plan lacks.
        """
        dtypes = self.of(name)
        if dtypes.reduce is not None:
            return dtypes.reduce
        if dtypes.compute is self.policy.param_dtype:
            return self.policy.reduce_dtype
        return torch.promote_types(dtypes.compute, self.policy.reduce_dtype)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Format the plan as a table; layers with equal dtypes share a line: `layers.0-2,5.mlp.gate.weight`."""
        layers: defaultdict[tuple, list[int]] = defaultdict(list)
        for name in self.tensors:
            before, *number, after = (*re.split(_NUMBER, name, maxsplit=1), "")[:3]
            layers[before, after, self.of(name), self.reduce_dtype(name)] += map(int, number)
        rows = [("tensor", "storage", "compute", "reduce", "save", "reason")]
        for (before, after, dtypes, reduce), numbers in layers.items():
            name = f"{before}{_number_spans(numbers)}{after}"
            reduced = short_name(reduce) if dtypes.compute.is_floating_point else "-"
            rows.append((name, _storage_text(dtypes), short_name(dtypes.compute), reduced, short_name(dtypes.save),
                         dtypes.reason))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _number_spans(numbers: list[int]) -> str:
    """Format numbers as spans: [0, 1, 2, 5] as "0-2,5"."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]))
    return ",".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)


def _storage_text(dtypes: TensorDTypes) -> str:
    """Format how a tensor is stored, with the quantization of its gather or its masters."""
    text = short_name(dtypes.stored)
    if dtypes.gathered:
        return f"{text}, gathered as {dtypes.format}"
    return f"{text} + fp32 masters" if dtypes.master else text


class Slot(NamedTuple):
    """Place of a parameter or buffer in a model; a tied tensor has several."""

    name: str  # fully qualified
    owner: nn.Module
    key: str  # its name in the owner
    tensor: Tensor
    is_buffer: bool
    is_saved: bool  # a parameter or persistent buffer
    # Stored in its compute dtype: an untrained scalar, a tensor in a module without trained parameters, or a parameter
    # of a module that has trained ones only in submodules, such as a linear layer with an adapter.
    is_frozen: bool


def slots(root: nn.Module) -> Iterator[Slot]:
    """Yield the places of all parameters and buffers, tied ones under every name."""
    frozen = {id(param) for param in root.parameters() if param.dim() == 0 and not param.requires_grad}
    for module in root.modules():
        params = list(module.parameters())
        if params and not any(param.requires_grad for param in params):
            frozen.update(map(id, (*params, *module.buffers())))
        own_params = [param for param in module._parameters.values() if param is not None]
        if not any(param.requires_grad for param in own_params):
            frozen.update(map(id, own_params))
    for path, owner in root.named_modules(remove_duplicate=False):
        unsaved = owner._non_persistent_buffers_set  # nn.Module has no public accessor
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield Slot(f"{path}.{key}".lstrip("."), owner, key, tensor, key in owner._buffers, key not in unsaved,
                           id(tensor) in frozen)


def saved_slots(root: nn.Module) -> list[list[Slot]]:
    """Return the tensors that a checkpoint of a module contains, each as the list of all its places.

    These are its parameters and persistent buffers.
    """
    slots_by_id: dict[int, list[Slot]] = {}
    for slot in slots(root):
        if slot.is_saved:
            slots_by_id.setdefault(id(slot.tensor), []).append(slot)
    return list(slots_by_id.values())


def checkpoint_dtypes(path: str | PathLike[str]) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor in a checkpoint, without loading the tensors.

    path: a safetensors file, a folder of them, or a checkpoint of `torch.distributed.checkpoint`. The metadata of the
    latter is a pickle: read only checkpoints that you trust. Raises ValueError if there is no checkpoint at `path`, or
    a tensor has a dtype that torch lacks.
    """
    path = Path(path)
    files = [path] if path.suffix == ".safetensors" and path.is_file() else sorted(path.glob("*.safetensors"))
    if not files and (path / ".metadata").is_file():
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: entry.properties.dtype for name, entry in entries.items() if hasattr(entry, "properties")}
    if not files:
        raise ValueError(f"{path} is no safetensors file, folder of them, or distributed checkpoint; give the path of "
                         "one")
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                dtypes[name] = dtype_of_code(tensors.get_slice(name).get_dtype(), name)
    return dtypes
