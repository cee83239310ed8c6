"""The dtype contract: one plan, by fully qualified name, made before a model is sharded and asserted afterwards.

    policy = DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16, [Rule("*.mlp.gate.weight", torch.float32)])
    plan = resolve_dtypes(whole_model_on_meta, policy, source_dtypes=checkpoint_dtypes("checkpoint/"))
    shard(stage, mesh, plan)
    assert_contract(stage, plan, run=lambda: pipe.step(...))

A tensor has a storage dtype (the parameter that the optimizer updates), a compute dtype (what a forward sees), the
dtype its gradient is accumulated and reduced in, and a save dtype (what an export for other libraries writes). The plan
of a whole model serves each of its stages, whose names are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from dualpipe.parallel.contract import ContractError, assert_contract, checkpoint_dtypes
from dualpipe.parallel.sharding import boundary_dtype, frozen_modules, plan_units, shard, short_name

__all__ = [
    "ContractError", "DTypePlan", "DTypePolicy", "Rule", "TensorDTypes", "assert_contract", "boundary_dtype",
    "checkpoint_dtypes", "resolve_dtypes", "shard",
]  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Tensors that match `pattern` compute in `dtype`.

    The pattern is matched segment by segment: `*` alone stands for one or more whole segments, `?_norm` for part of
    one. It names tensors, or a module and so every tensor inside. `gate` never matches `gate_up_proj`.

    What a module of another dtype than its surroundings returns stays in that dtype, unless `output_dtype` names
    another: `Rule("*.q_norm", torch.float32, output_dtype=torch.bfloat16)` suits a caller that mixes it with others.
    """

    pattern: str
    dtype: torch.dtype
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.pattern or not all(self.pattern.split(".")):
            raise ValueError(f"a rule's pattern is segments joined by dots, such as '*.A_log'; got {self.pattern!r}")
        for dtype in (self.dtype, self.output_dtype or self.dtype):
            _require_floating(dtype, f"rule {self.pattern!r}")

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the fully qualified name, or that of a module around it."""
        return _matches(self.pattern.split("."), name.split("."))


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
    """The dtypes of one tensor and why. `output` is what its module returns, where a rule names it."""

    storage: torch.dtype
    compute: torch.dtype
    save: torch.dtype
    reason: str
    output: torch.dtype | None = None


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
        return self.policy.reduce_dtype_of(self.of(name).compute)

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

    What decides the compute dtype, the first that applies: a rule of the policy; `keep_fp32`, a class attribute of the
    model or of any module in it, globs relative to that module; float32 in a checkpoint that also has narrower
    floating-point tensors; the policy. Storage is `promote_types(checkpoint, requested)`, widened to the compute dtype.
    Modules without a trainable parameter are stored in their compute dtype, buffers included; other buffers keep the
    dtype that they have, because nothing casts them in a forward. Integers and booleans are left alone.

    Raises:
        ValueError: a rule matches nothing; two rules disagree on a tensor; no name of `source_dtypes` is in the model;
            or FSDP2 could not keep the dtypes apart (not checked where `sharded` is false).
    """
    modules = (model,) if isinstance(model, nn.Module) else tuple(model)
    found = _find(modules)
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


def _find(modules: Iterable[nn.Module]) -> list[_Found]:
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
        _find_pins(root, found)
    return list(found.values())


def _find_pins(root: nn.Module, found: Mapping[int, _Found]) -> None:
    for module in root.modules():
        pins = getattr(type(module), "keep_fp32", ())
        owner = f"{type(module).__name__}.keep_fp32"
        if isinstance(pins, str):
            raise ValueError(f"{owner} must be a tuple of globs; got the string {pins!r}")
        inside = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for pin in pins:
            for name, tensor in inside:
                if _matches(pin.split("."), name.split(".")):
                    found[id(tensor)].pin = f"{owner} {pin!r}"


def _match_rules(found: Iterable[_Found], rules: Sequence[Rule]) -> list[Rule | None]:
    used, chosen = set(), []
    for item in found:
        floating = item.tensor.is_floating_point()
        matching = [rule for rule in rules if floating and any(map(rule.matches, item.names))]
        used.update(matching)
        chosen.append(matching[0] if matching else None)
        for other in matching[1:]:
            if (other.dtype, other.output_dtype) != (matching[0].dtype, matching[0].output_dtype):
                raise ValueError(f"rules disagree on {' = '.join(item.names)}: {_say(matching[0])} and {_say(other)}; "
                                 "make one of the patterns narrower")  # fmt: skip
    if unused := [_say(rule) for rule in rules if rule not in used]:
        raise ValueError(f"no floating-point tensor of the model matches {', '.join(unused)}; a pattern is matched "
                         "by whole segments from the start of a name; for 'gate' anywhere, say '*.gate'")  # fmt: skip
    return chosen


def _say(rule: Rule) -> str:
    output = f" returning {short_name(rule.output_dtype)}" if rule.output_dtype else ""
    return f"{rule.pattern!r} ({short_name(rule.dtype)}{output})"


def _match_sources(
    found: Sequence[_Found], sources: Mapping[str, torch.dtype] | None
) -> list[torch.dtype | None]:  # fmt: skip
    matched = [next((sources[name] for name in item.names if name in sources), None) if sources else None
               for item in found]  # fmt: skip
    if sources and not any(matched):
        raise ValueError(f"no name of source_dtypes is in the model; it has {next(iter(sources))!r}, the model "
                         f"{found[0].names[0] if found else 'nothing'!r}: convert the checkpoint's names")  # fmt: skip
    return matched


def _decide(
    item: _Found, policy: DTypePolicy, rule: Rule | None, source: torch.dtype | None, narrow: bool
) -> TensorDTypes:
    own, base = item.tensor.dtype, policy.param_dtype
    if not own.is_floating_point:
        return TensorDTypes(own, own, own, "not floating point")
    loaded = _promote(source, own)
    kept = item.buffer and not item.frozen
    if rule:
        compute, reason = rule.dtype, f"rule {rule.pattern!r}"
    elif item.pin:
        compute, reason = torch.promote_types(loaded if kept else base, torch.float32), item.pin
    elif narrow and source is not None and source.is_floating_point and source.itemsize >= 4:
        compute, reason = torch.promote_types(base, source), f"{short_name(source)} in a lower-precision checkpoint"
    elif kept:
        compute, reason = loaded, "a buffer, not cast"
    else:
        compute, reason = base, "policy"
    storage = compute if item.frozen or item.buffer else torch.promote_types(loaded, compute)
    return TensorDTypes(storage, compute, compute, f"{reason}; frozen" if item.frozen else reason,
                        rule.output_dtype if rule else None)  # fmt: skip


def _promote(source: torch.dtype | None, requested: torch.dtype) -> torch.dtype:
    """`promote_types` for a floating-point checkpoint; quantized ones (integers, one byte) take what is requested."""
    if source is None or not source.is_floating_point or source.itemsize == 1:
        return requested
    return torch.promote_types(source, requested)
