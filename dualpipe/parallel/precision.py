"""The dtype contract: one plan, by fully qualified name, made before a model is sharded and asserted afterwards.

    policy = DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16, [Rule("*.mlp.gate.weight", torch.float32)])
    plan = resolve_dtypes(whole_model_on_meta, policy, source_dtypes=checkpoint_dtypes("checkpoint/"))
    shard(stage, mesh, plan)
    assert_contract(stage, plan, run=lambda: pipe.step(...))

A tensor has a storage dtype (the parameter that the optimizer updates), a compute dtype (what a forward sees), the
dtype its gradient is accumulated and reduced in, and a save dtype (what an export for other libraries writes). The plan
of a whole model serves each of its stages, whose names are those of the whole. docs/dtypes.md has an example.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.dtypes import short_name
from dualpipe.parallel.contract import ContractError, assert_contract, checkpoint_dtypes
from dualpipe.parallel.sharding import boundary_dtype, frozen_modules, plan_units, shard

__all__ = [
    "ContractError", "DTypePlan", "DTypePolicy", "Rule", "TensorDTypes", "assert_contract", "boundary_dtype",
    "checkpoint_dtypes", "resolve_dtypes", "shard",
]


@dataclass(frozen=True)
class Rule:
    """Tensors that match `pattern` compute in `dtype`, are stored in `storage`, and so on; what is None is left open.

    The pattern is matched segment by segment: `*` alone stands for one or more whole segments, `?_norm` for part of
    one. It names tensors, or a module and so every tensor inside. `gate` never matches `gate_up_proj`.

    What a module of another dtype than its surroundings returns stays in that dtype, unless `output_dtype` names
    another: `Rule("*.q_norm", torch.float32, output_dtype=torch.bfloat16)` suits a caller that mixes it with others.
    """

    pattern: str
    dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    storage: torch.dtype | None = None
    reduce: torch.dtype | None = None
    save: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.pattern or not all(self.pattern.split(".")):
            raise ValueError(f"a rule's pattern is segments joined by dots, such as '*.A_log'; got {self.pattern!r}")
        if not self.given:
            raise ValueError(f"rule {self.pattern!r} names no dtype; give it one to compute in")
        for dtype in self.given.values():
            _require_floating(dtype, f"rule {self.pattern!r}")

    @property
    def given(self) -> dict[str, torch.dtype]:
        """The dtypes that it names, by field."""
        named = {name: getattr(self, name) for name in _DECIDED}
        return {name: dtype for name, dtype in named.items() if dtype is not None}

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the fully qualified name, or that of a module around it."""
        return _matches(self.pattern.split("."), name.split("."))


_DECIDED = ("dtype", "output_dtype", "storage", "reduce", "save")


def _matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return True
    if set(pattern[0]) == {"*"}:
        return any(_matches(pattern[1:], name[taken:]) for taken in range(1, len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])


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

    def reduce_dtype_of(self, compute: torch.dtype) -> torch.dtype:
        """`reduce_dtype`, but never narrower than a compute dtype that a rule or pin asked for."""
        if compute is self.param_dtype:
            return self.reduce_dtype
        return torch.promote_types(compute, self.reduce_dtype)


@dataclass(frozen=True)
class TensorDTypes:
    """The dtypes of one tensor and why. `output` is what its module returns, and `reduce` what its gradient is
    accumulated in, where a rule names them."""

    storage: torch.dtype
    compute: torch.dtype
    save: torch.dtype
    reason: str
    output: torch.dtype | None = None
    reduce: torch.dtype | None = None


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
        """The dtype in which the gradient of a tensor is accumulated and reduced."""
        dtypes = self.of(name)
        return dtypes.reduce or self.policy.reduce_dtype_of(dtypes.compute)

    def table(self) -> str:
        """The plan as text; layers that agree share a line: `layers.0-47.mlp.gate.weight`."""
        head = ("tensor", "storage", "compute", "reduce", "save", "reason")
        rows = [head, *_rows(self)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _rows(plan: DTypePlan) -> Iterator[tuple[str, ...]]:
    merged: dict[tuple, list[int]] = {}
    for name in plan.tensors:
        segments = name.split(".")
        at = next((i for i, segment in enumerate(segments) if segment.isdigit()), None)
        index = [] if at is None else [int(segments[at])]
        template = name if at is None else ".".join([*segments[:at], "{}", *segments[at + 1 :]])
        merged.setdefault((template, plan.of(name), plan.reduce_dtype(name)), []).extend(index)
    for (template, dtypes, reduce), indices in merged.items():
        reduced = short_name(reduce) if dtypes.compute.is_floating_point else "-"
        cells = short_name(dtypes.storage), short_name(dtypes.compute), reduced, short_name(dtypes.save), dtypes.reason
        yield template.replace("{}", _ranges(indices)), *cells


def _ranges(indices: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1][-1:] = [runs[-1][0], index] if len(runs[-1]) == 1 else [index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


# -- resolving


@dataclass
class _Found:
    """A parameter or buffer of the model: every name it has, and what the model itself says of it."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    buffer: bool = False
    frozen: bool = False  # stored in its compute dtype
    pin: str | None = None


class _Decided(NamedTuple):
    """What rules say of one tensor; nothing where none matches."""

    reason: str
    dtypes: Mapping[str, torch.dtype]  # by the rules' fields


def resolve_dtypes(
    model: nn.Module | Sequence[nn.Module],
    policy: DTypePolicy,
    source_dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    sharded: bool = True,
) -> DTypePlan:
    """Decide storage, compute and save dtype of every parameter and buffer.

    `model` is the whole model or all of its stages; only names, dtypes and `requires_grad` are read, so it may be on
    the meta device. The dtype that it was built with is the one requested. `source_dtypes` are those in the checkpoint
    that will be loaded, by the model's names (see `checkpoint_dtypes`).

    What decides the compute dtype, the first that applies:

    1. a rule of the policy;
    2. `keep_fp32`, an attribute of the model or of any module in it: globs as in rules, relative to that module; each
       must match in a module of its class, if only a parameter that is None;
    3. transformers' `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`, where less than float32 is computed in:
       regular expressions, found anywhere in a name, as they are there (which heeds the first in float16 only);
    4. float32 in a checkpoint that also has narrower floating-point tensors;
    5. the policy.

    Storage is `promote_types(checkpoint, requested)`, widened to the compute dtype; gradients are reduced in at least
    the compute dtype; what is computed in is saved. A rule may say otherwise of each. Modules without a trainable
    parameter are stored in their compute dtype, buffers included; other buffers keep the dtype that they have, because
    nothing casts them in a forward. Integers and booleans are left alone.

    Raises:
        ValueError: a rule or `keep_fp32` matches nothing; a rule stores a tensor in less than it computes in, or
            disagrees with another on one; no name of `source_dtypes` is in the model; or FSDP2 could not keep the
            dtypes apart (not checked where `sharded` is false).
    """
    modules = (model,) if isinstance(model, nn.Module) else tuple(model)
    found = _find(modules, policy.param_dtype)
    rules = _match_rules(found, policy.rules)
    sources = _match_sources(found, source_dtypes)
    narrow = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in (source_dtypes or {}).values())
    tensors: dict[str, TensorDTypes] = {}
    for item, rule, source in zip(found, rules, sources):
        tensors.update(dict.fromkeys(item.names, _decide(item, policy, rule, source, narrow)))
    plan = DTypePlan(policy, tensors)
    for module in modules if sharded else ():
        plan_units(module, plan)
    return plan


def _find(modules: Sequence[nn.Module], base: torch.dtype) -> list[_Found]:
    found: dict[int, _Found] = {}
    for root in modules:
        frozen = frozen_modules(root)
        for prefix, module in root.named_modules(remove_duplicate=False):
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                item = found.setdefault(id(tensor), _Found(tensor, buffer=key in module._buffers))
                item.names.append(f"{prefix}.{key}" if prefix else key)
                scalar = tensor.dim() == 0 and not item.buffer and not tensor.requires_grad
                item.frozen = item.frozen or module in frozen or scalar
    _find_pins(modules, found, base)
    return list(found.values())


def _find_pins(roots: Iterable[nn.Module], found: Mapping[int, _Found], base: torch.dtype) -> None:
    unused: dict[_Pin, list[str]] = {}  # and the names that there were
    for module in chain.from_iterable(root.modules() for root in roots):
        pins = list(_pins(module, base))
        inside = _slots(module) if pins else {}
        for pin in pins:
            matching = [name for name in inside if pin.matches(name)]
            for tensor in map(inside.get, matching):
                if tensor is not None:
                    found[id(tensor)].pin = str(pin)
            unused[pin] = [] if matching else unused.get(pin, list(inside))
    for pin, names in unused.items():
        if names and pin.attribute == "keep_fp32":  # transformers' lists name what some models of a class lack
            raise ValueError(f"no tensor of the model matches {pin}, nearest: {_nearest(pin.pattern, names)}; "
                             "a pattern is matched by whole segments from the start of a name in that module")


def _slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Every tensor in a module by its names in it, and None where there could be one, such as a bias."""
    return {
        f"{prefix}.{key}".lstrip("."): tensor
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for key, tensor in [*inner._parameters.items(), *inner._buffers.items()]
    }


class _Pin(NamedTuple):
    """What a class of modules says of tensors in them."""

    owner: str
    attribute: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.attribute} {self.pattern!r}"

    def matches(self, name: str) -> bool:
        if self.attribute == "keep_fp32":
            return _matches(self.pattern.split("."), name.split("."))
        pattern = self.pattern.replace("*", ".*")  # transformers.core_model_loading.build_glob_alternation
        return re.search(pattern, name) is not None


def _pins(module: nn.Module, base: torch.dtype) -> Iterator[_Pin]:
    owner = type(module).__name__
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "keep_fp32"):
        pins = getattr(module, attribute, None) or ()
        if not isinstance(pins, tuple | list | set | frozenset) or not all(isinstance(pin, str) for pin in pins):
            raise ValueError(f"{owner}.{attribute} must be a tuple, list or set of names; got {pins!r}")
        if attribute == "keep_fp32" or base in (torch.float16, torch.bfloat16):
            for pin in pins if isinstance(pins, tuple | list) else sorted(pins):
                yield _Pin(owner, attribute, pin)


def _match_rules(found: Iterable[_Found], rules: Sequence[Rule]) -> list[_Decided]:
    """For each tensor, what all rules that match it say together."""
    used: set[Rule] = set()
    chosen = []
    for item in found:
        floating = item.tensor.is_floating_point()
        matching = [rule for rule in rules if floating and any(map(rule.matches, item.names))]
        used.update(matching)
        said: dict[str, torch.dtype] = {}
        for rule in matching:
            for name, dtype in rule.given.items():
                if said.setdefault(name, dtype) is not dtype:
                    both = " and ".join(map(_say, matching))
                    raise ValueError(f"rules disagree on {' = '.join(item.names)}: {both}; make one of the patterns "
                                     "narrower")
        patterns = ", ".join(dict.fromkeys(repr(rule.pattern) for rule in matching))
        chosen.append(_Decided(f"rule {patterns}" if matching else "", said))
    if unused := [rule for rule in rules if rule not in used]:
        names = [name for item in found if item.tensor.is_floating_point() for name in item.names]
        raise ValueError("no floating-point tensor of the model matches "
                         + "; ".join(f"{_say(rule)}, nearest: {_nearest(rule.pattern, names)}" for rule in unused)
                         + "; a pattern is matched by whole segments from the start of a name")
    return chosen


def _say(rule: Rule) -> str:
    words = {"dtype": "", "output_dtype": "returning ", "storage": "stored in ", "reduce": "reduced in ",
             "save": "saved in "}
    return f"{rule.pattern!r} ({' '.join(words[name] + short_name(dtype) for name, dtype in rule.given.items())})"


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Patterns like this one that match: of tensors and modules, with and without what is before them."""
    candidates: dict[str, None] = {}
    for segments in {tuple("*" if part.isdigit() else part for part in name.split(".")): None for name in names}:
        for end in range(1, len(segments) + 1):
            candidates[".".join(segments[:end])] = None
            for start in (start for start in range(1, end) if segments[start] != "*"):
                candidates[".".join(("*", *segments[start:end]))] = None
    return ", ".join(map(repr, difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.0)))


def _match_sources(
    found: Sequence[_Found], sources: Mapping[str, torch.dtype] | None
) -> list[torch.dtype | None]:
    matched = [next((sources[name] for name in item.names if name in sources), None) if sources else None
               for item in found]
    if sources and not any(matched):
        raise ValueError(f"no name of source_dtypes is in the model; it has {next(iter(sources))!r}, the model "
                         f"{found[0].names[0] if found else 'nothing'!r}: convert the checkpoint's names")
    return matched


def _decide(
    item: _Found, policy: DTypePolicy, rule: _Decided, source: torch.dtype | None, narrow: bool
) -> TensorDTypes:
    own, base = item.tensor.dtype, policy.param_dtype
    if not own.is_floating_point:
        return TensorDTypes(own, own, own, "not floating point")
    loaded, by_rule = _promote(source, own), rule.dtypes
    kept = item.buffer and not item.frozen
    as_computed = item.frozen or item.buffer  # stored in its compute dtype
    if asked := by_rule.get("dtype", by_rule.get("storage") if as_computed else None):
        compute, reason = asked, rule.reason
    elif item.pin:
        compute, reason = torch.promote_types(loaded if kept else base, torch.float32), item.pin
    elif narrow and source is not None and source.is_floating_point and source.itemsize >= 4:
        compute, reason = torch.promote_types(base, source), f"{short_name(source)} in a lower-precision checkpoint"
    elif kept:
        compute, reason = loaded, "a buffer, not cast"
    else:
        compute, reason = base, "policy"
    if rule.reason not in ("", reason):
        reason = f"{reason}; {rule.reason}"
    storage = compute if as_computed else torch.promote_types(loaded, compute)
    if (asked := by_rule.get("storage", storage)) is not storage:
        if as_computed or torch.promote_types(asked, compute) is not asked:
            what = "a buffer or frozen, and is stored as it computes" if as_computed else "to compute in more than that"
            raise ValueError(f"{item.names[0]} is {what}, {short_name(compute)}, but {rule.reason} stores it in "
                             f"{short_name(asked)}; give both the same dtype")
        storage = asked
    return TensorDTypes(storage, compute, by_rule.get("save", compute), f"{reason}; frozen" if item.frozen else reason,
                        by_rule.get("output_dtype"), by_rule.get("reduce"))


def _promote(source: torch.dtype | None, requested: torch.dtype) -> torch.dtype:
    """`promote_types` for a floating-point checkpoint; quantized ones (integers, one byte) take what is requested."""
    if source is None or not source.is_floating_point or source.itemsize == 1:
        return requested
    return torch.promote_types(source, requested)
