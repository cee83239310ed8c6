"""The dtype contract: one plan, by fully qualified name, made before a model is sharded and asserted afterwards
(`contract`).

    policy = DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16, [Rule("*.mlp.gate.weight", torch.float32)])
    plan = resolve_dtypes(whole_model_on_meta, policy, source_dtypes=checkpoint_dtypes("checkpoint/"))
    shard(stage, mesh, plan)
    assert_contract(stage, plan, run=lambda: pipe.step(...))

A tensor has a storage dtype (the parameter that the optimizer updates), a compute dtype (what a forward sees), the
dtype its gradient is accumulated and reduced in, and a save dtype (what an export for other libraries writes). The plan
of a whole model serves each of its stages, whose names are those of the whole. docs/dtypes.md has an example.
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
    """Tensors that match `pattern` compute in `dtype`, are stored in `storage`, and so on; what is None is left open.

    The pattern is matched segment by segment: `*` alone stands for one or more whole segments, `?_norm` for part of
    one. It names tensors, or a module and so every tensor inside. `gate` never matches `gate_up_proj`.
    What a module of another dtype than its surroundings returns stays in that dtype, unless `output_dtype` names
    another: `Rule("*.q_norm", torch.float32, output_dtype=torch.bfloat16)` suits a caller that mixes it with others.

    A `Format`, or its name, says that weights are quantized: in `storage` they are stored so, those that are trained
    beside float32 masters; in `gather` plain shards are, each time that they are gathered. It holds for the weights
    that the pattern matches and `dualpipe.quantized.quantize_model.quantizable` names, but for those that are pinned.
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
        if not self.given:
            raise ValueError(f"rule {self.pattern!r} names no dtype; give it one to compute in")
        for name in ("storage", "gather"):
            if isinstance(value := getattr(self, name), str) or (name == "gather" and value is not None):
                try:
                    object.__setattr__(self, name, format_of(value))
                except ValueError as error:
                    raise ValueError(f"rule {self.pattern!r}: {name}: {error}") from None
        if self.gather and isinstance(self.storage, Format):
            raise ValueError(f"rule {self.pattern!r} both stores weights in {self.storage} and gathers them in "
                             f"{self.gather}; name one of them")
        for dtype in self.given.values():
            if not isinstance(dtype, Format):
                _require_floating(dtype, f"rule {self.pattern!r}")

    @property
    def format(self) -> Format | None:
        """The format that it names for weights."""
        return cast(Format | None, self.gather) or (self.storage if isinstance(self.storage, Format) else None)

    @property
    def given(self) -> dict[str, Any]:
        """The dtypes and formats that it names, by field."""
        return {f.name: dtype for f in fields(self)[1:] if (dtype := getattr(self, f.name)) is not None}


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern as of `Rule` matches a name, or that of a module around it."""

    def match(pattern: Sequence[str], name: Sequence[str]) -> bool:
        if not pattern:
            return True
        if set(pattern[0]) == {"*"}:
            return any(match(pattern[1:], name[taken:]) for taken in range(1, len(name) + 1))
        return bool(name) and fnmatchcase(name[0], pattern[0]) and match(pattern[1:], name[1:])

    return match(pattern.split("."), name.split("."))


def _require_floating(dtype: torch.dtype, what: str) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{what}: the dtype must be a floating-point one, such as torch.float32; got {dtype!r}")


@dataclass(frozen=True)
class DTypePolicy:
    """What holds for every tensor that no rule, pin or checkpoint says otherwise of.

    `param_dtype` is what is computed in, `reduce_dtype` what gradients are accumulated and reduced in, `output_dtype`
    what a stage returns, and so what crosses pipeline ranks. A rule may be a tuple of `Rule`'s arguments.
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
    """The dtypes of one tensor and why. `output` is what its module returns, and `reduce` what its gradient is
    accumulated in, where a rule names them, or wider ones beside it ask for more (see `resolve.widen_siblings`)."""

    storage: torch.dtype
    compute: torch.dtype
    save: torch.dtype
    reason: str
    output: torch.dtype | None = None
    reduce: torch.dtype | None = None
    format: Format | None = None  # what is gathered and computed with; and stored, unless
    gathered: bool = False  # the shards are plain, and are quantized for each gather
    master: bool = False  # float32 ones are beside what is stored in the format
    unsharded: torch.dtype | None = None  # what FSDP2 gathers it in, where that is not what its forward sees

    @property
    def stored(self) -> torch.dtype | Format:
        """What the parameter is stored in."""
        return self.format if self.format and not self.gathered else self.storage


@dataclass(frozen=True)
class DTypePlan:
    """Made by `resolve_dtypes`: the dtypes of every tensor, by fully qualified name."""

    policy: DTypePolicy
    tensors: Mapping[str, TensorDTypes]

    def of(self, name: str) -> TensorDTypes:
        """The dtypes of a tensor; raises `ValueError` for a name that the plan does not have."""
        if name not in self.tensors:
            raise ValueError(f"the dtype plan lacks {name!r}; resolve it for the whole model, of which this is a part")
        return self.tensors[name]

    def reduce_dtype(self, name: str) -> torch.dtype:
        """The dtype in which the gradient of a tensor is accumulated and reduced: the policy's, but never narrower than
        a compute dtype that a rule or pin asked for."""
        dtypes, policy = self.of(name), self.policy
        if dtypes.reduce or dtypes.compute is policy.param_dtype:
            return dtypes.reduce or policy.reduce_dtype
        return torch.promote_types(dtypes.compute, policy.reduce_dtype)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The plan as text; layers that agree share a line: `layers.0-2,5.mlp.gate.weight`."""
        layers: defaultdict[tuple, list[int]] = defaultdict(list)
        for name in self.tensors:
            before, *number, after = (*re.split(_NUMBER, name, maxsplit=1), "")[:3]
            layers[before, after, self.of(name), self.reduce_dtype(name)] += map(int, number)
        rows = [("tensor", "storage", "compute", "reduce", "save", "reason")]
        for (before, after, dtypes, reduce), numbers in layers.items():
            runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]))
            spans = (str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)
            reduced = short_name(reduce) if dtypes.compute.is_floating_point else "-"
            storage, compute, save = map(short_name, (dtypes.stored, dtypes.compute, dtypes.save))
            if dtypes.format:
                storage += (f", gathered as {dtypes.format}" if dtypes.gathered else
                            " + fp32 masters" if dtypes.master else "")
            rows.append((f"{before}{','.join(spans)}{after}", storage, compute, reduced, save, dtypes.reason))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


class Slot(NamedTuple):
    """The place of a parameter or buffer in a model; one that is tied has several."""

    name: str  # fully qualified
    owner: nn.Module
    key: str  # its name in the owner
    tensor: Tensor
    is_buffer: bool
    is_saved: bool  # a parameter or persistent buffer
    is_frozen: bool  # stored in its compute dtype: a scalar that is not trained, all in a module without one that is


def slots(root: nn.Module) -> Iterator[Slot]:
    """The places of all parameters and buffers, under every name."""
    frozen = {id(param) for param in root.parameters() if param.dim() == 0 and not param.requires_grad}
    for module in root.modules():
        params = list(module.parameters())
        if params and not any(param.requires_grad for param in params):
            frozen.update(map(id, (*params, *module.buffers())))
    for path, owner in root.named_modules(remove_duplicate=False):
        unsaved = owner._non_persistent_buffers_set  # nn.Module has no public way to ask
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield Slot(f"{path}.{key}".lstrip("."), owner, key, tensor, key in owner._buffers, key not in unsaved,
                           id(tensor) in frozen)


def saved(root: nn.Module) -> list[list[Slot]]:
    """What a checkpoint has of a module: parameters and persistent buffers, each by all the places that it has."""
    found: dict[int, list[Slot]] = {}
    for slot in slots(root):
        if slot.is_saved:
            found.setdefault(id(slot.tensor), []).append(slot)
    return list(found.values())


def checkpoint_dtypes(path: str | PathLike[str]) -> dict[str, torch.dtype]:
    """The dtype of every tensor in a safetensors file, a folder of them, or a distributed checkpoint, without loading;
    ValueError where there is none of these at `path`, or a tensor has a dtype that torch lacks.

    What `torch.distributed.checkpoint` wrote by itself is described by a pickle: of that read only what you trust.
    """
    path = Path(path)
    files = [path] if path.suffix == ".safetensors" and path.is_file() else sorted(path.glob("*.safetensors"))
    if not files and (path / ".metadata").is_file():
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
