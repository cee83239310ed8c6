"""Resolution of a model's dtype plan: each tensor's dtypes from rules, pins, a checkpoint and the policy.

    _find_pins, _find_rules   record the pins and rules that match each tensor, as a `_TensorRecord`
    _decide                   combines them with the checkpoint's dtype and the policy into `TensorDTypes`
    widen_siblings            gives vectors the dtypes of wider parameters in the same module, for FSDP2
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dualpipe.kernels.formats import Format
from dualpipe.parallel.precision.dtype_plan import DTypePlan, DTypePolicy, Rule, TensorDTypes, matches, slots
from dualpipe.parallel.precision.partition import ModuleUnits
from dualpipe.quantized.quantize_model import quantizable
from dualpipe.quantized.tensor import QuantizedTensor
from dualpipe.runtime import errors
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.ranks.process_groups import backends, new_gloo_group
from dualpipe.runtime.ranks.rank_sync import RankSync

_PIN_TARGET = "tensor of the model"  # the tensors that patterns of each kind apply to, for error messages
_RULE_TARGET = "floating-point tensor of the model"
_FORMAT_TARGET = "weight of a linear layer or of experts, except heads, routers, eh_proj and pinned ones,"
_OTHER_STAGES = ("; for tensors of other ranks' stages, resolve the plan for the whole model, on the meta device, or "
                 "pass the pipeline's group")
# Attributes of modules that name tensors to keep in float32.
_PINS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "keep_fp32")


def resolve_dtypes(
    model: nn.Module | Sequence[nn.Module], policy: DTypePolicy,
    source_dtypes: Mapping[str, torch.dtype] | None = None, *, sharded: bool = True, group: ProcessGroup | None = None,
) -> DTypePlan:
    """Decide the storage, compute, reduce and save dtype of every parameter and buffer.

    model: the whole model or all of its stages. Only names, dtypes and `requires_grad` are read, so it may be on the
    meta device. The dtype that a tensor was built with is the requested storage dtype.

    source_dtypes: the dtypes in the checkpoint that will be loaded, by the model's names (see `checkpoint_dtypes`).

    group: the ranks whose stages make up the model, such as the pipeline's, if `model` is this rank's stages alone. The
    call is then collective: a rule or `keep_fp32` must match on one of the ranks, and an error on one is raised on all.
    Without a group, a pattern that matches nothing in `model` is an error, though another rank's stage may match.

    The first of these that applies sets the compute dtype (2 and 3 are called pins):

    1. a rule of the policy;
    2. `keep_fp32`, an attribute of the model or of any module in it: patterns as in rules, relative to that module.
       Each pattern must match a tensor in at least one module of the class; an attribute that is None in place of a
       tensor, such as a bias, counts;
    3. transformers' `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`, if the policy computes in less than
       float32: regular expressions that match anywhere in a name, as in transformers (which applies the former
       in float16 only);
    4. float32 in a checkpoint that also has narrower floating-point tensors;
    5. the policy.

    The other dtypes follow, unless a rule sets them. Storage is `promote_types(checkpoint, requested)`, widened to the
    compute dtype. Gradients are reduced in at least the compute dtype. The save dtype is the compute dtype. A weight
    that a rule quantizes is stored in its format, with float32 masters if it is trained, or gathered in it from shards
    in the storage dtype. Modules without a trainable parameter are stored in their compute dtype, buffers included;
    other buffers keep their dtype, since nothing casts them in a forward. Integers and booleans are not changed.

    Vectors that a module owns beside parameters of a wider dtype (`dt_bias` in bfloat16 beside `A_log` in float32) are
    stored and reduced in the widest, since FSDP2 cannot keep them apart; a forward sees each in its compute dtype.

    Raises ValueError if a rule or `keep_fp32` matches nothing, or a rule with a format matches no quantizable weight;
    if a rule stores a tensor in less than it computes in, quantizes a tied weight or one that does not fit the format,
    or contradicts another; if no name of `source_dtypes` is in the model; or if FSDP2 could not keep the dtypes apart
    (not checked if `sharded` is false).
    """
    ranks = RankSync(group if group is None or "cpu" in backends(group) else new_gloo_group(group))
    modules = (model,) if isinstance(model, nn.Module) else tuple(model)
    hint = _OTHER_STAGES if group is None and _may_be_part(model) else ""
    plans: list[DTypePlan] = []

    def resolve_here() -> list[_Pattern]:
        plan, patterns = _resolve(modules, policy, source_dtypes or {}, sharded, is_alone=ranks.size == 1, hint=hint)
        plans.append(plan)
        return patterns

    _require_matches(ranks.gather(resolve_here))
    return plans[0]


def _may_be_part(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Return True if these may be the stages of one rank, and not the whole model.

    Several modules may be, and so may a single one, unless it is on the meta device or there is no default process
    group.
    """
    if not isinstance(model, nn.Module):
        return True
    return torch.distributed.is_initialized() and not any(p.is_meta for p in model.parameters())


class _Pattern(NamedTuple):
    """Rule or pin with its matches in the modules of one rank."""

    text: str
    is_matched: bool
    target: str  # the kind of tensor that it should match
    glob: str
    names: list[str]  # the names it was compared with, layers as "*"; empty if it matched


def _require_matches(patterns_of_ranks: Sequence[Sequence[_Pattern]], hint: str = "") -> None:
    """Raise ValueError for the patterns that match on no rank. hint: a further remedy for the message."""
    patterns = list(chain.from_iterable(patterns_of_ranks))
    matched = {(pattern.target, pattern.text) for pattern in patterns if pattern.is_matched}
    names: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for pattern in patterns:
        if (pattern.target, pattern.text) not in matched:
            names[pattern.target, pattern.text, pattern.glob] += pattern.names
    if not names:
        return
    target = min((target for target, _, _ in names), key=(_PIN_TARGET, _RULE_TARGET, _FORMAT_TARGET).index)
    unmatched = [f"{text}, nearest: {_nearest(glob, near)}"
                 for (pattern_target, text, glob), near in names.items() if pattern_target == target]
    where = " in that module" if target == _PIN_TARGET else ""
    raise ValueError(f"no {target} matches {'; '.join(unmatched)}; a pattern is matched by whole segments from the "
                     f"start of a name{where}{hint}")


@dataclass
class _TensorRecord:
    """Parameter or buffer of the model with all its names, and the pins and rules that match it."""

    tensor: Tensor
    is_buffer: bool
    is_frozen: bool = False  # stored in its compute dtype
    names: list[str] = field(default_factory=list)
    quantizable: bool = False
    pin: str = ""
    rules: str = ""  # the patterns of the rules that match, for messages
    rule_dtypes: dict[str, Any] = field(default_factory=dict)  # the dtypes and formats of these rules, by field


def _resolve(
    modules: Sequence[nn.Module], policy: DTypePolicy, source_dtypes: Mapping[str, torch.dtype], sharded: bool, *,
    is_alone: bool, hint: str,
) -> tuple[DTypePlan, list[_Pattern]]:
    """Return the plan of modules and the matches of all patterns. is_alone: no other rank has part of the model."""
    records: dict[int, _TensorRecord] = {}
    for slot in chain.from_iterable(map(slots, modules)):
        record = records.setdefault(id(slot.tensor), _TensorRecord(slot.tensor, slot.is_buffer))
        record.names.append(slot.name)
        record.is_frozen |= slot.is_frozen
    patterns = _find_pins(modules, records, policy.param_dtype)
    for weight in chain.from_iterable(map(quantizable, modules)):
        record = records[id(weight.param)]
        record.quantizable = not record.pin
    patterns += _find_rules(records.values(), cast(Sequence[Rule], policy.rules))  # the policy has converted tuples
    if is_alone:
        _require_matches([patterns], hint)  # before other errors: they may follow from it
    _check_source_names(source_dtypes, records.values())
    source_is_narrow = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in source_dtypes.values())
    tensors: dict[str, TensorDTypes] = {}
    for record in records.values():
        source = next((source_dtypes[name] for name in record.names if name in source_dtypes), None)
        tensors.update(dict.fromkeys(record.names, _decide(record, source, policy.param_dtype, source_is_narrow)))
    plan = DTypePlan(policy, tensors)
    if sharded:
        widen_siblings(modules, records, plan, tensors)
        for module in modules:
            ModuleUnits(module, plan)  # raises ValueError for dtypes that FSDP2 could not keep apart
    return plan, patterns


def _check_source_names(source_dtypes: Mapping[str, torch.dtype], records: Collection[_TensorRecord]) -> None:
    """Raise ValueError if a checkpoint has no name of the model."""
    names = chain.from_iterable(record.names for record in records)
    if source_dtypes and source_dtypes.keys().isdisjoint(names):
        first = next((record.names[0] for record in records), "nothing")
        raise ValueError(f"no name of source_dtypes is in the model; it has {next(iter(source_dtypes))!r}, the model "
                         f"{first!r}: convert the checkpoint's names")


def _find_pins(
    roots: Iterable[nn.Module], records: Mapping[int, _TensorRecord], param_dtype: torch.dtype
) -> list[_Pattern]:
    """Record the pins of all modules; return the patterns of `keep_fp32`, with their matches."""
    compared: dict[tuple[str, str], list[str]] = {}  # by pin and pattern: the names compared, none once it has matched
    is_half = param_dtype in (torch.float16, torch.bfloat16)
    for module, attribute in product(chain.from_iterable(root.modules() for root in roots), _PINS):
        is_keep_fp32 = attribute == "keep_fp32"
        pins = getattr(module, attribute, None) or ()
        if not isinstance(pins, tuple | list | set | frozenset) or not all(isinstance(pin, str) for pin in pins):
            raise ValueError(f"{type(module).__name__}.{attribute} must be a tuple, list or set of names; got {pins!r}")
        if not pins or not (is_keep_fp32 or is_half):
            continue
        tensors = _tensors_inside(module)
        for pattern in pins if isinstance(pins, tuple | list) else sorted(pins):
            pin = f"{type(module).__name__}.{attribute} {pattern!r}"
            if is_keep_fp32:
                matching = [name for name in tensors if matches(pattern, name)]
            else:  # transformers searches patterns anywhere in a name: see its build_glob_alternation
                matching = [name for name in tensors if re.search(pattern.replace("*", ".*"), name)]
            for name in matching:
                tensor = tensors[name]
                if tensor is not None:
                    records[id(tensor)].pin = pin
            if is_keep_fp32:  # the lists of transformers also name tensors that some models of a class lack
                compared[pin, pattern] = [] if matching else compared.get((pin, pattern), list(tensors))
    return [_Pattern(pin, not names, _PIN_TARGET, pattern, _generic_names(names))
            for (pin, pattern), names in compared.items()]


def _tensors_inside(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters and buffers of a module by name, with None for an absent one, such as a bias."""
    tensors: dict[str, Tensor | None] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            tensors[f"{path}.{key}".lstrip(".")] = tensor
    return tensors


def _find_rules(records: Collection[_TensorRecord], rules: Sequence[Rule]) -> list[_Pattern]:
    """Record the dtypes of all rules that match; return the rules with their matches."""
    matched: set[Rule] = set()
    floating = [record for record in records if record.tensor.is_floating_point()]
    for record in floating:
        applied: list[Rule] = []
        for rule in rules:
            if not any(matches(rule.pattern, name) for name in record.names):
                continue
            if record.quantizable or not rule.format:
                matched.add(rule)
            if _apply_rule(rule, record, applied):
                applied.append(rule)
        if applied:
            record.rules = "rule " + ", ".join(dict.fromkeys(repr(rule.pattern) for rule in applied))
    patterns: list[_Pattern] = []
    for rule in rules:
        compared = [name for record in floating if record.quantizable or not rule.format for name in record.names]
        target = _FORMAT_TARGET if rule.format else _RULE_TARGET
        names = [] if rule in matched else _generic_names(compared)
        patterns.append(_Pattern(_describe(rule), rule in matched, target, rule.pattern, names))
    return patterns


def _apply_rule(rule: Rule, record: _TensorRecord, applied: Sequence[Rule]) -> bool:
    """Add a rule's dtypes to a tensor that it matches; return False if it sets none, such as a format for a norm.

    applied: the rules before. Raises ValueError if it contradicts one of them.
    """
    dtypes = {name: dtype for name, dtype in rule.dtypes.items()
              if record.quantizable or not isinstance(dtype, Format)}
    is_applied = bool(dtypes)
    if isinstance(dtypes.get("storage"), Format):
        dtypes["gather"] = None  # another rule must not set it
    for name, dtype in dtypes.items():
        if record.rule_dtypes.setdefault(name, dtype) != dtype:
            contradicting = " and ".join(map(_describe, (*applied, rule)))
            raise ValueError(f"rules disagree on {' = '.join(record.names)}: {contradicting}; make one of the patterns "
                             "narrower")
    return is_applied


def _generic_names(names: Iterable[str]) -> list[str]:
    """Return names with "*" for the numbers of layers, without duplicates."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))


def _describe(rule: Rule) -> str:
    """Format a rule as its pattern and dtypes."""
    words = {"dtype": "", "output_dtype": "returning ", "storage": "stored in ", "reduce": "reduced in ",
             "save": "saved in ", "gather": "gathered as "}
    return f"{rule.pattern!r} ({' '.join(words[name] + short_name(dtype) for name, dtype in rule.dtypes.items())})"


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Suggest patterns similar to this one that match, for tensors and modules, with and without a prefix "*"."""
    candidates: dict[str, None] = {}
    for segments in (name.split(".") for name in _generic_names(names)):
        for end in range(1, len(segments) + 1):
            candidates[".".join(segments[:end])] = None
            for start in range(1, end):
                if segments[start] != "*":
                    candidates[".".join(("*", *segments[start:end]))] = None
    return ", ".join(map(repr, errors.nearest(pattern, candidates, 3, cutoff=0.0)))


def _decide(
    record: _TensorRecord, source: torch.dtype | None, param_dtype: torch.dtype, source_is_narrow: bool
) -> TensorDTypes:
    """Return the dtypes of a tensor.

    source: its dtype in the checkpoint. param_dtype: the compute dtype of the policy. source_is_narrow: the checkpoint
    has floating-point tensors narrower than float32.
    """
    requested = record.tensor.dtype
    rule_dtypes = record.rule_dtypes
    if not requested.is_floating_point:
        return TensorDTypes(requested, requested, requested, "not floating point")
    loaded = requested
    if source is not None and source.is_floating_point and source.itemsize > 1:  # 8-bit tensors load as requested
        loaded = torch.promote_types(source, requested)
    gather = rule_dtypes.get("gather")
    rule_storage = rule_dtypes.get("storage")
    format = gather or (record.tensor.format if isinstance(record.tensor, QuantizedTensor) else None)
    if isinstance(rule_storage, Format):
        format = rule_storage
        rule_storage = None  # the storage dtype of a quantized weight is the dtype it would have unquantized
    if format:
        _check_quantized(record, format)
    compute, reason = _compute_dtype(record, loaded, source if source_is_narrow else None, param_dtype, rule_storage)
    if record.rules not in ("", reason):
        reason = f"{reason}; {record.rules}"
    storage = _storage_dtype(record, loaded, compute, rule_storage)
    return TensorDTypes(
        storage, compute, rule_dtypes.get("save", compute), f"{reason}; frozen" if record.is_frozen else reason,
        rule_dtypes.get("output_dtype"), rule_dtypes.get("reduce"), format, gathered=bool(gather),
        master=bool(format and not gather and record.tensor.requires_grad))


def _compute_dtype(
    record: _TensorRecord, loaded: torch.dtype, source: torch.dtype | None, param_dtype: torch.dtype,
    rule_storage: torch.dtype | None,
) -> tuple[torch.dtype, str]:
    """Return a tensor's compute dtype and the reason; `resolve_dtypes` lists the order.

    source: its dtype in a checkpoint with narrow tensors, else None.
    """
    stored_as_computed = record.is_frozen or record.is_buffer
    rule_dtype = record.rule_dtypes.get("dtype", rule_storage if stored_as_computed else None)
    if rule_dtype is not None:
        return rule_dtype, record.rules
    is_uncast = record.is_buffer and not record.is_frozen
    if record.pin:
        return torch.promote_types(loaded if is_uncast else param_dtype, torch.float32), record.pin
    if source is not None and source.is_floating_point and source.itemsize >= 4:
        return torch.promote_types(param_dtype, source), f"{short_name(source)} in a lower-precision checkpoint"
    if is_uncast:
        return loaded, "a buffer, not cast"
    return param_dtype, "policy"


def _storage_dtype(
    record: _TensorRecord, loaded: torch.dtype, compute: torch.dtype, rule_storage: torch.dtype | None
) -> torch.dtype:
    """Return a tensor's storage dtype; raises ValueError if a rule stores it in a dtype that it cannot have."""
    stored_as_computed = record.is_frozen or record.is_buffer
    storage = compute if stored_as_computed else torch.promote_types(loaded, compute)
    if rule_storage is None or rule_storage is storage:
        return storage
    if stored_as_computed or torch.promote_types(rule_storage, compute) is not rule_storage:
        narrow = short_name(rule_storage)
        if stored_as_computed:
            problem = f"stores it in {narrow}; a buffer or frozen parameter is stored in the dtype that it computes in"
        else:
            problem = f"stores it in {narrow}, which is narrower"
        raise ValueError(f"{record.names[0]} computes in {short_name(compute)}, but {record.rules} {problem}; give "
                         "both the same dtype")
    return rule_storage


def widen_siblings(
    roots: Iterable[nn.Module], records: Mapping[int, _TensorRecord], plan: DTypePlan, tensors: dict[str, TensorDTypes]
) -> None:
    """Store, gather and reduce vectors in the widest dtypes of the parameters that the same module owns.

    FSDP2 has one storage, gather and reduce dtype for all parameters that a module owns. Changes `tensors`, the entries
    of the plan.

    Matrices are not widened, since they would take twice the memory and traffic: `ModuleUnits` raises an error instead.
    Neither are parameters of modules of torch and `dualpipe.nn`, whose operators take one dtype, nor vectors whose
    storage or reduce dtype a rule sets.
    """
    owned: defaultdict[nn.Module, dict[int, str]] = defaultdict(dict)
    for slot in chain.from_iterable(map(slots, roots)):
        if not slot.is_buffer and slot.tensor.is_floating_point() and slot.tensor.dim() > 0:
            owned[slot.owner].setdefault(id(slot.tensor), slot.name)
    for owner, names in owned.items():
        dtypes = {name: (tensors[name].storage, tensors[name].compute, plan.reduce_dtype(name))
                  for name in names.values()}
        widest = tuple(reduce(torch.promote_types, column) for column in zip(*dtypes.values()))
        narrower = {key: name for key, name in names.items() if dtypes[name] != widest}
        takes_one_dtype = type(owner).__module__.startswith(("torch.nn.", "dualpipe.nn."))
        if not narrower or hasattr(owner, "segments") or takes_one_dtype:
            continue
        if any(tensors[name].format or isinstance(records[key].tensor, DTensor) for key, name in names.items()):
            continue
        if not all(_can_widen(records[key]) for key in narrower):
            continue
        storage, compute, reduced = widest
        wide_name = next((name for name in dtypes if dtypes[name] == widest), next(iter(dtypes))).rpartition(".")[2]
        for key, name in narrower.items():
            planned = tensors[name]
            wider = replace(planned, storage=storage, reduce=reduced,
                            unsharded=compute if planned.compute != compute else None,
                            reason=f"{planned.reason}; stored in {short_name(storage)} beside {wide_name}")
            tensors.update(dict.fromkeys(records[key].names, wider))


def _can_widen(record: _TensorRecord) -> bool:
    """Return True for a vector, at most one of whose dimensions is above 1, without a rule for storage or reduction."""
    is_vector = record.tensor.numel() == max(record.tensor.shape)
    return is_vector and not {"storage", "reduce"}.intersection(record.rule_dtypes)


def _check_quantized(record: _TensorRecord, format: Format) -> None:
    """Raise ValueError if a weight cannot be quantized as its rules say."""
    problem = f"{' = '.join(record.names)} cannot be quantized to {format}, as {record.rules} says"
    if isinstance(record.tensor, QuantizedTensor):
        stored = record.tensor.format
        if stored != format or record.rule_dtypes.get("gather"):
            raise ValueError(f"{problem}: it is stored in {stored} already; leave one of them out")
    if len(record.names) > 1:
        raise ValueError(f"{problem}: it is tied, and the other module may need its unquantized values; untie it, or "
                         "make the pattern narrower")
    try:
        format.check(record.tensor.shape)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}; choose a format of 8 bits, or make the pattern narrower") from None
