"""Deciding the dtypes of every tensor of a model: what rules, pins, a checkpoint and the policy say of it."""

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
from dualpipe.parallel.precision.fsdp_units import ModuleUnits
from dualpipe.parallel.precision.plan import DTypePlan, DTypePolicy, Rule, TensorDTypes, matches, slots
from dualpipe.quantized.quantize_model import quantizable
from dualpipe.quantized.tensor import QuantizedTensor
from dualpipe.runtime import errors
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.ranks.process_groups import backends, gloo_beside
from dualpipe.runtime.ranks.rank_sync import RankSync

_OF_PIN = "tensor of the model"  # what patterns of each kind should match
_OF_RULE = "floating-point tensor of the model"
_OF_FORMAT = "weight of a linear layer or of experts, but for heads, routers, eh_proj and pinned ones,"
_OTHER_STAGES = ("; for what only other ranks' stages have, resolve the plan for the whole model, on the meta device, "
                 "or pass the pipeline's group")
_PINS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "keep_fp32")  # attributes of modules


def resolve_dtypes(
    model: nn.Module | Sequence[nn.Module], policy: DTypePolicy,
    source_dtypes: Mapping[str, torch.dtype] | None = None, *, sharded: bool = True, group: ProcessGroup | None = None,
) -> DTypePlan:
    """Decide storage, compute and save dtype of every parameter and buffer.

    `model` is the whole model or all of its stages; only names, dtypes and `requires_grad` are read, so it may be on
    the meta device. The dtype that it was built with is the one requested. `source_dtypes` are those in the checkpoint
    that will be loaded, by the model's names (see `checkpoint_dtypes`).

    `group`: of the ranks whose stages make up the model, such as the pipeline's, where `model` is this rank's stages
    alone. Collective over it: a rule or `keep_fp32` must then match on one of its ranks, and an error on one is raised
    on all. Without it, what matches nothing in `model` is an error, though another rank's stage may have it.

    What decides the compute dtype, the first that applies:

    1. a rule of the policy;
    2. `keep_fp32`, an attribute of the model or of any module in it: globs as in rules, relative to that module; each
       must match in a module of its class, if only a parameter that is None;
    3. transformers' `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`, where less than float32 is computed in:
       regular expressions, found anywhere in a name, as they are there (which heeds the first in float16 only);
    4. float32 in a checkpoint that also has narrower floating-point tensors;
    5. the policy.

    Vectors that one module owns beside others of a wider dtype (`dt_bias` in bfloat16 beside `A_log` in float32), which
    FSDP2 cannot keep apart, are stored and reduced in the widest; a forward sees each in its compute dtype.

    Storage is `promote_types(checkpoint, requested)`, widened to the compute dtype; gradients are reduced in at least
    the compute dtype; what is computed in is saved. A rule may say otherwise of each. What one quantizes is stored in
    its format, beside float32 masters if it is trained, or gathered in it from shards in the storage dtype. Modules
    without a trainable parameter are stored in their compute dtype, buffers included; other buffers keep the dtype that
    they have, because nothing casts them in a forward. Integers and booleans are left alone.

    Raises ValueError where a rule or `keep_fp32` matches nothing, or a format nothing that can be quantized; a rule
    stores a tensor in less than it computes in, quantizes one that is tied or does not suit the format, or disagrees
    with another; no name of `source_dtypes` is in the model; or FSDP2 could not keep the dtypes apart (not checked
    where `sharded` is false).
    """
    ranks = RankSync(group if group is None or "cpu" in backends(group) else gloo_beside(group))
    modules = (model,) if isinstance(model, nn.Module) else tuple(model)
    hint = _OTHER_STAGES if group is None and _may_be_part(model) else ""
    plans: list[DTypePlan] = []

    def decide() -> list[_Pattern]:
        plan, patterns = _resolve(modules, policy, source_dtypes or {}, sharded, alone=ranks.size == 1, hint=hint)
        plans.append(plan)
        return patterns

    _require_matches(ranks.gather(decide))
    return plans[0]


def _may_be_part(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Return True for what may be the stages of one rank: several modules, or one that a job's rank has in memory.

    One on the meta device is taken for the whole model.
    """
    if not isinstance(model, nn.Module):
        return True
    return torch.distributed.is_initialized() and not any(p.is_meta for p in model.parameters())


class _Pattern(NamedTuple):
    """A rule or pin, and whether it matches in the modules of one rank."""

    text: str
    is_matched: bool
    kind: str  # of what it should match
    glob: str
    names: list[str]  # those that it was held against, layers by "*"


def _require_matches(patterns_of_ranks: Sequence[Sequence[_Pattern]], hint: str = "") -> None:
    """Raise ValueError for the patterns that match on no rank. hint: what else to do about it."""
    everywhere = list(chain.from_iterable(patterns_of_ranks))
    matched = {(each.kind, each.text) for each in everywhere if each.is_matched}
    names: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in everywhere:
        if (each.kind, each.text) not in matched:
            names[each.kind, each.text, each.glob] += each.names
    if not names:
        return
    kind = min((of for of, _, _ in names), key=(_OF_PIN, _OF_RULE, _OF_FORMAT).index)
    unmatched = (f"{text}, nearest: {_nearest(glob, near)}" for (of, text, glob), near in names.items() if of == kind)
    where = " in that module" if kind == _OF_PIN else ""
    raise ValueError(f"no {kind} matches {'; '.join(unmatched)}; a pattern is matched by whole segments from the start "
                     f"of a name{where}{hint}")


def _resolve(
    modules: Sequence[nn.Module], policy: DTypePolicy, sources: Mapping[str, torch.dtype], sharded: bool, *,
    alone: bool, hint: str,
) -> tuple[DTypePlan, list[_Pattern]]:
    """The plan of modules, and what their patterns match; alone: whether no other rank has part of the model."""
    found: dict[int, _Found] = {}
    for slot in chain.from_iterable(map(slots, modules)):
        item = found.setdefault(id(slot.tensor), _Found(slot.tensor, slot.is_buffer))
        item.names.append(slot.name)
        item.frozen |= slot.is_frozen
    patterns = _find_pins(modules, found, policy.param_dtype)
    for weight in chain.from_iterable(map(quantizable, modules)):
        found[id(weight.param)].quantizable = not found[id(weight.param)].pin
    patterns += _find_rules(found.values(), cast(Sequence[Rule], policy.rules))  # which a policy has made of tuples
    if alone:
        _require_matches([patterns], hint)  # ahead of what else may be wrong
    if sources and sources.keys().isdisjoint(chain.from_iterable(item.names for item in found.values())):
        first = next((item.names[0] for item in found.values()), "nothing")
        raise ValueError(f"no name of source_dtypes is in the model; it has {next(iter(sources))!r}, the model "
                         f"{first!r}: convert the checkpoint's names")
    narrow = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in sources.values())
    tensors: dict[str, TensorDTypes] = {}
    for item in found.values():
        source = next((sources[name] for name in item.names if name in sources), None)
        tensors.update(dict.fromkeys(item.names, _decide(item, source, policy.param_dtype, narrow)))
    plan = DTypePlan(policy, tensors)
    if sharded:
        widen_siblings(modules, found, plan, tensors)
    for module in modules if sharded else ():
        ModuleUnits(module, plan)  # which refuses what FSDP2 could not keep apart
    return plan, patterns


@dataclass
class _Found:
    """A parameter or buffer of the model: every name it has, and what is said of it."""

    tensor: Tensor
    is_buffer: bool
    frozen: bool = False  # stored in its compute dtype
    names: list[str] = field(default_factory=list)
    quantizable: bool = False
    pin: str = ""
    rules: str = ""  # those that match
    given: dict[str, Any] = field(default_factory=dict)  # what they say together, by their fields


def _find_pins(roots: Iterable[nn.Module], found: Mapping[int, _Found], base: torch.dtype) -> list[_Pattern]:
    unused: dict[tuple[str, str], list[str]] = {}  # by pin and pattern, the names that there were
    for module, attribute in product(chain.from_iterable(root.modules() for root in roots), _PINS):
        pins, ours = getattr(module, attribute, None) or (), attribute == "keep_fp32"
        if not isinstance(pins, tuple | list | set | frozenset) or not all(isinstance(pin, str) for pin in pins):
            raise ValueError(f"{type(module).__name__}.{attribute} must be a tuple, list or set of names; got {pins!r}")
        if not pins or not (ours or base in (torch.float16, torch.bfloat16)):
            continue
        inside = {  # by their names in the module, and None where there could be a tensor, such as a bias
            f"{path}.{key}".lstrip("."): tensor
            for path, owner in module.named_modules(remove_duplicate=False)
            for key, tensor in (*owner._parameters.items(), *owner._buffers.items())
        }
        for pattern in pins if isinstance(pins, tuple | list) else sorted(pins):
            pin, glob = f"{type(module).__name__}.{attribute} {pattern!r}", pattern.replace("*", ".*")
            # transformers' patterns are found anywhere, as its build_glob_alternation does.
            matching = [name for name in inside if (matches(pattern, name) if ours else re.search(glob, name))]
            for name in matching:
                if (tensor := inside[name]) is not None:
                    found[id(tensor)].pin = pin
            if ours:  # transformers' lists name what some models of a class lack
                unused[pin, pattern] = [] if matching else unused.get((pin, pattern), list(inside))
    return [_Pattern(pin, not names, _OF_PIN, pattern, _short(names)) for (pin, pattern), names in unused.items()]


def _find_rules(found: Collection[_Found], rules: Sequence[Rule]) -> list[_Pattern]:
    used: set[Rule] = set()
    floating = [item for item in found if item.tensor.is_floating_point()]
    for item in floating:
        matching: list[Rule] = []
        for rule in rules:
            if not any(matches(rule.pattern, name) for name in item.names):
                continue
            given = {n: what for n, what in rule.given.items() if item.quantizable or not isinstance(what, Format)}
            if item.quantizable or not rule.format:
                used.add(rule)
            if given:
                matching.append(rule)
            if isinstance(given.get("storage"), Format):
                given["gather"] = None  # which another rule may not name
            for name, what in given.items():
                if item.given.setdefault(name, what) != what:
                    both = " and ".join(map(_say, matching))
                    raise ValueError(f"rules disagree on {' = '.join(item.names)}: {both}; make one of the patterns "
                                     "narrower")
        if matching:
            item.rules = "rule " + ", ".join(dict.fromkeys(repr(rule.pattern) for rule in matching))
    patterns: list[_Pattern] = []
    for rule in rules:
        names = [name for item in floating for name in item.names if item.quantizable or not rule.format]
        kind = _OF_FORMAT if rule.format else _OF_RULE
        patterns.append(_Pattern(_say(rule), rule in used, kind, rule.pattern, [] if rule in used else _short(names)))
    return patterns


def _short(names: Iterable[str]) -> list[str]:
    """Names with "*" in place of the numbers of layers, each once."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))


def _say(rule: Rule) -> str:
    words = {"dtype": "", "output_dtype": "returning ", "storage": "stored in ", "reduce": "reduced in ",
             "save": "saved in ", "gather": "gathered as "}
    return f"{rule.pattern!r} ({' '.join(words[name] + short_name(dtype) for name, dtype in rule.given.items())})"


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Patterns like this one that match: of tensors and modules, with and without what is before them."""
    candidates: dict[str, None] = {}
    for segments in (name.split(".") for name in _short(names)):
        for end in range(1, len(segments) + 1):
            candidates[".".join(segments[:end])] = None
            for start in (start for start in range(1, end) if segments[start] != "*"):
                candidates[".".join(("*", *segments[start:end]))] = None
    return ", ".join(map(repr, errors.nearest(pattern, candidates, 3, cutoff=0.0)))


def _decide(item: _Found, source: torch.dtype | None, base: torch.dtype, narrow: bool) -> TensorDTypes:
    """The dtypes of a tensor, `source` in the checkpoint, under a policy that computes in `base`; narrow: whether the
    checkpoint has less than float32 somewhere."""
    own, given = item.tensor.dtype, item.given
    if not own.is_floating_point:
        return TensorDTypes(own, own, own, "not floating point")
    loaded = own
    if source is not None and source.is_floating_point and source.itemsize > 1:  # quantized ones take what is requested
        loaded = torch.promote_types(source, own)
    kept, gather, asked_storage = item.is_buffer and not item.frozen, given.get("gather"), given.get("storage")
    format = gather or (item.tensor.format if isinstance(item.tensor, QuantizedTensor) else None)
    if isinstance(asked_storage, Format):
        format, asked_storage = asked_storage, None  # it gives itself out as what it would be stored in
    if format:
        _check_quantized(item, format)
    as_computed = item.frozen or item.is_buffer  # stored in its compute dtype
    if asked := given.get("dtype", asked_storage if as_computed else None):
        compute, reason = asked, item.rules
    elif item.pin:
        compute, reason = torch.promote_types(loaded if kept else base, torch.float32), item.pin
    elif narrow and source is not None and source.is_floating_point and source.itemsize >= 4:
        compute, reason = torch.promote_types(base, source), f"{short_name(source)} in a lower-precision checkpoint"
    elif kept:
        compute, reason = loaded, "a buffer, not cast"
    else:
        compute, reason = base, "policy"
    if item.rules not in ("", reason):
        reason = f"{reason}; {item.rules}"
    storage = compute if as_computed else torch.promote_types(loaded, compute)
    if (asked := asked_storage or storage) is not storage:
        if as_computed or torch.promote_types(asked, compute) is not asked:
            what = "a buffer or frozen, and is stored as it computes" if as_computed else "to compute in more than that"
            raise ValueError(f"{item.names[0]} is {what}, {short_name(compute)}, but {item.rules} stores it in "
                             f"{short_name(asked)}; give both the same dtype")
        storage = asked
    return TensorDTypes(storage, compute, given.get("save", compute), f"{reason}; frozen" if item.frozen else reason,
                        given.get("output_dtype"), given.get("reduce"), format, gathered=bool(gather),
                        master=bool(format and not gather and item.tensor.requires_grad))


def widen_siblings(
    roots: Iterable[nn.Module], found: Mapping[int, _Found], plan: DTypePlan, tensors: dict[str, TensorDTypes]
) -> None:
    """Store, gather and reduce vectors that a module owns beside wider parameters in the widest of their dtypes, as
    FSDP2 stores, gathers and reduces all that one module owns in one.

    Changes `tensors`, those of the plan. Matrices stay, for `ModuleUnits` to refuse: they would take twice the memory
    and traffic. So do those of torch's modules and ours, whose operators take one dtype, and what a rule stores or
    reduces so.
    """
    owned: defaultdict[nn.Module, dict[int, str]] = defaultdict(dict)
    for slot in chain.from_iterable(map(slots, roots)):
        if not slot.is_buffer and slot.tensor.is_floating_point() and slot.tensor.dim() > 0:
            owned[slot.owner].setdefault(id(slot.tensor), slot.name)
    for owner, names in owned.items():
        each = {name: (tensors[name].storage, tensors[name].compute, plan.reduce_dtype(name))
                for name in names.values()}
        widest = tuple(reduce(torch.promote_types, dtypes) for dtypes in zip(*each.values()))
        narrow = {key: name for key, name in names.items() if each[name] != widest}
        takes_one_dtype = type(owner).__module__.startswith(("torch.nn.", "dualpipe.nn."))
        if not narrow or hasattr(owner, "segments") or takes_one_dtype:
            continue
        if any(tensors[name].format or isinstance(found[key].tensor, DTensor) for key, name in names.items()):
            continue
        if not all(_is_vector(found[key].tensor) and not {"storage", "reduce"}.intersection(found[key].given)
                   for key in narrow):
            continue
        storage, compute, reduced = widest
        beside = next((name for name in each if each[name] == widest), next(iter(each))).rpartition(".")[2]
        for key, name in narrow.items():
            planned = tensors[name]
            wider = replace(planned, storage=storage, reduce=reduced,
                            unsharded=compute if planned.compute != compute else None,
                            reason=f"{planned.reason}; stored in {short_name(storage)} beside {beside}")
            tensors.update(dict.fromkeys(found[key].names, wider))


def _is_vector(tensor: Tensor) -> bool:
    """Return True where at most one dimension is larger than 1."""
    return tensor.numel() == max(tensor.shape)


def _check_quantized(item: _Found, format: Format) -> None:
    """Raise ValueError where a weight cannot be quantized as planned."""
    what = f"{' = '.join(item.names)} cannot be quantized to {format}, as {item.rules} says"
    if isinstance(item.tensor, QuantizedTensor) and (item.tensor.format != format or item.given.get("gather")):
        raise ValueError(f"{what}: it is stored in {item.tensor.format} already; leave one of them out")
    if len(item.names) > 1:
        raise ValueError(f"{what}: it is tied, and the other place may need its numbers; untie it, or make the pattern "
                         "narrower")
    try:
        format.check(item.tensor.shape)
    except ValueError as error:
        raise ValueError(f"{what}: {error}; choose a format of 8 bits, or make the pattern narrower") from None
