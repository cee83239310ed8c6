"""The arguments of a step and of a pipeline: what a rank checks on its own, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from itertools import chain, starmap, zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualpipe.nn.deferral import local
from dualpipe.nn.segments import Segment, checked, is_reserved
from dualpipe.parallel.fsdp.driver import StageParameters
from dualpipe.parallel.tied import tied_parameters
from dualpipe.runtime.dtypes import long_name

_SHOWN = 3  # parameters that are not reduced
_REMEDY = "use dualpipe.parallel.shard or torch's fully_shard"
_UNREDUCED = (f"gradients would differ from one data-parallel rank to the next: {_REMEDY}, or, where you reduce them "
              "yourself, name them in unreduced")


class SideSpec(NamedTuple):
    """The side inputs that a stage can be given, or several stages together: tensors without a gradient, such as
    position ids, which go through all stages behind the activations, in the order of their names."""

    names: tuple[str, ...]
    every: bool  # whether a `forward` has **kwargs
    hooked: bool = False  # whether DeepSeek's `overlapped_forward_backward` runs them, which has no room for any

    @staticmethod
    def of(module: nn.Module) -> SideSpec:
        """By the parameters of its `forward`, of which the first is the activation."""
        module = getattr(module, "_orig_mod", module)  # what torch.compile returns has (*args, **kwargs)
        try:
            parameters = list(signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # code without a signature that Python can see
            return SideSpec((), False)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters[1:] if p.kind in by_name and not is_reserved(p.name))
        return SideSpec(names, any(p.kind is Parameter.VAR_KEYWORD for p in parameters))


@dataclass(frozen=True)
class OwnStages:
    """The stages of a rank, by number, of `count` in the whole pipeline. batch_dim: along which batches are cut."""

    modules: Mapping[int, nn.Module]
    specs: Mapping[int, SideSpec]
    parameters: Mapping[int, StageParameters]
    borrowers: Mapping[int, set[int]]  # of each stage, the others that see parameters which FSDP2 has in it
    count: int
    device: torch.device
    batch_dim: int

    @property
    def hooked(self) -> bool:
        """Whether they are of one type that offers DeepSeek's `overlapped_forward_backward`."""
        types = {type(module) for module in self.modules.values()}
        return len(types) == 1 and hasattr(types.pop(), "overlapped_forward_backward")

    def segments(self) -> dict[int, list[Segment]]:
        """Those of each stage that offers them."""
        return {
            number: checked(list(segments()), self.specs[number].names)
            for number, module in self.modules.items() if (segments := getattr(module, "segments", None)) is not None
        }


# -- a step


class StepArguments(NamedTuple):
    """One rank's arguments, reduced to what the ranks compare. Travels as JSON."""

    num_chunks: int
    grad: bool
    sync: bool
    training: list[bool]  # by module
    input_shapes: list[list[int]]
    side_shapes: list[list[Any]]  # [name, shape], by name
    batch_size: int | None  # of the inputs, the side inputs and the labels, where this rank needs them
    side_size: int | None
    label_size: int | None
    operands: int  # checksum of the dtypes of these tensors, the labels' shapes, and autocast


class Batch(NamedTuple):
    """A rank's share of a step's arguments, split into micro-batches; empty where this rank has no use for them."""

    inputs: Sequence[tuple[Tensor, ...]]
    side: Sequence[tuple[Tensor, ...]]  # in the order of their names
    labels: Sequence[tuple[Tensor, ...]]
    criterion: Callable[..., Tensor] | None
    keep_outputs: bool
    segments: Mapping[int, Sequence[Segment]]  # of the stages that offer them
    told: StepArguments


def split_batch(
    stages: OwnStages, inputs: Sequence[Tensor | None], num_chunks: int, criterion: Callable[..., Tensor] | None,
    labels: Sequence[Tensor | None] | Tensor | None, return_outputs: bool, sync: bool,
    side: Mapping[str, Tensor | None] | None,
) -> Batch:
    """This rank's micro-batches, and what the other ranks must know of them; ValueError for what it can see to be wrong
    on its own. The arguments are those of `Pipeline.step`."""
    if not hasattr(num_chunks, "__index__") or int(num_chunks) < 1:
        raise ValueError(f"num_chunks must be an integer >= 1, got {num_chunks!r}: give the number of micro-batches "
                         "into which the batch is split; their gradients add up, so divide a mean loss by it")
    num_chunks = int(num_chunks)
    side = _checked_side(side)
    for module in stages.modules.values():
        if (found := getattr(next(module.parameters(), None), "device", stages.device)) != stages.device:
            raise ValueError(f"a stage is on {found}, but the pipeline was built on {stages.device}; build it anew")
    first, last = 0 in stages.modules, stages.count - 1 in stages.modules
    grad, given = torch.is_grad_enabled(), [t for t in inputs if t is not None]
    if last and criterion is None and grad:
        raise ValueError("criterion is required on the rank of the last stage; evaluate under torch.no_grad()")
    if first and not given:
        raise ValueError("inputs are required on the rank of the first stage, got none")
    cut_inputs, size = _split("input", dict(enumerate(inputs)) if first else None, num_chunks, stages)
    cut_side, side_size = _split("side input", side if first and side else None, num_chunks, stages)
    by_number = dict(enumerate((labels,) if isinstance(labels, Tensor) else labels or ()))
    cut_labels, label_size = _split("label", by_number if last and criterion else None, num_chunks, stages)
    used = *(chain(inputs, side.values()) if first else ()), *(by_number.values() if last and criterion else ())
    operands, kind = [(t.dtype, t.shape) for t in used if t is not None], stages.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    told = StepArguments(
        num_chunks, grad, bool(sync), [module.training for module in stages.modules.values()],
        [list(t.shape) for t in given], [[name, list(t.shape)] for name, t in side.items()],
        size, side_size, label_size, crc32(repr((operands, autocast)).encode()),
    )
    return Batch(
        cut_inputs, cut_side, cut_labels, criterion if last else None, last and return_outputs, stages.segments(), told
    )


def agree(told: Iterable[Sequence[Any]], *, first: int, last: int, spec: SideSpec) -> tuple[int, list[str], int]:
    """What follows from the `StepArguments` of all ranks: how many micro-batches, the first ones, are larger than the
    others; the names of the side inputs; and a number for the kind of step, the same where all arguments, shapes and
    dtypes are. ValueError, with the same text on every rank, where they disagree.

    first, last: the ranks of the first and the last stage; spec: what the stages of all ranks take.
    """
    ranks = list(starmap(StepArguments, told))
    _same("num_chunks", [r.num_chunks for r in ranks])
    _same("grad mode", [r.grad for r in ranks])
    _same("sync", [r.sync for r in ranks])
    modes = [r.training for r in ranks]
    if len(set(chain(*modes))) > 1:
        raise ValueError(f"ranks disagree about train/eval mode: training of the stages, by rank: {modes}")
    _same("the shapes of the inputs", [r.input_shapes or ranks[first].input_shapes for r in ranks])
    _same("the side inputs and their shapes", [r.side_shapes or ranks[first].side_shapes for r in ranks])
    names = [name for name, _ in ranks[first].side_shapes]
    if names and spec.hooked:
        raise ValueError(f"side inputs {names} do not go with overlapped_forward_backward, which has no argument for "
                         "them; return them from the first stage as tensors that all hand on, or give the stages "
                         "segments()")
    if unused := [name for name in names if name not in spec.names and not spec.every]:
        raise ValueError(f"no stage takes the side inputs {unused}; the stages' forwards name {list(spec.names)} when "
                         "the pipeline is built. Name them there as parameters behind the first")
    batch_size = ranks[first].batch_size
    for what, size in ((f"side inputs {names}", ranks[first].side_size), ("labels", ranks[last].label_size)):
        if size not in (None, batch_size):
            raise ValueError(f"inputs have batch size {batch_size}, {what} {size}")
    assert batch_size is not None, "the rank of the first stage has inputs"
    return batch_size % ranks[first].num_chunks, names, crc32(repr(ranks).encode())


def _checked_side(side: Any) -> dict[str, Tensor]:
    """Those that are not None, in the order of their names; ValueError where one cannot be a side input."""
    if side is None:
        return {}
    if not isinstance(side, Mapping) or not all(isinstance(name, str) for name in side):
        keys = [type(key).__name__ for key in side] if isinstance(side, Mapping) else type(side).__name__
        raise ValueError(f"side must be a mapping from names to tensors, got {keys}")
    if reserved := sorted(filter(is_reserved, side)):
        raise ValueError(f"side inputs are called {reserved}, names that the pipeline uses; choose others")
    found = {name: side[name] for name in sorted(side) if side[name] is not None}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"side input {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"side input {name!r} must be dense, got {tensor.layout}")
        if tensor.requires_grad:
            raise ValueError(f"side input {name!r} requires grad, but none flows back to it; detach it or make it an "
                             "input, which the stages hand on")
    return found


def _split(
    what: str, tensors: Mapping[Any, Tensor | None] | None, num_chunks: int, stages: OwnStages
) -> tuple[Sequence[tuple[Any, ...]], int | None]:
    """The micro-batches, as `torch.tensor_split` cuts them, and the size of the batch; none of None. ValueError, with
    `what` and its name or number, where a tensor cannot be cut."""
    if tensors is None:
        return (), None
    dim, given = stages.batch_dim, [(f"{what} {name!r}", t) for name, t in tensors.items() if t is not None]
    for name, tensor in given:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        shape = list(tensor.shape)
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{name} of shape {shape} has no dimension {dim} to split")
        if shape[dim] < num_chunks:
            raise ValueError(f"{name} of shape {shape} cannot be split into num_chunks={num_chunks} along dimension "
                             f"{dim}")
        if tensor.device != stages.device:
            raise ValueError(f"{name} is on {tensor.device}, the stages on {stages.device}; move it there")
    if len({t.shape[dim] for _, t in given}) > 1:
        raise ValueError(f"{what}s differ in size along dimension {dim}: {[list(t.shape) for _, t in given]}")
    chunks = [[None] * num_chunks if t is None else t.tensor_split(num_chunks, dim) for t in tensors.values()]
    return list(zip(*chunks)) if chunks else [()] * num_chunks, given[0][1].shape[dim] if given else None


def _same(what: str, values: Sequence[Any]) -> None:
    """ValueError unless all ranks' values are equal."""
    if any(value != values[0] for value in values):
        raise ValueError(f"ranks disagree about {what}: by rank {list(values)}")


# -- a pipeline


def conclude(ranks: Iterable[Sequence[Any]]) -> tuple[bool | None, SideSpec, torch.dtype, bool]:
    """Whether pairs run in turn (None: no matter), what the stages take, the dtype of norms, whether the ends have
    copies of parameters; ValueError where ranks do not fit.

    ranks: what each says when it builds its pipeline: what must be the same everywhere, whether pairs are to run in
    turn (None where nothing could), the `SideSpec`s of the stages, whether DeepSeek's hook runs them, whether any
    parameter is float64, the `tied_ends` and what `check_stages` has found. Travels as JSON.
    """
    same, turns, specs, hooked, doubles, tied, reduced = zip(*ranks)
    _same("(schedule, its checksum, device, batch_dim, rank_mapping)", same)
    check_ranks(reduced)
    embeddings, last, *copies = (list(chain(*ends)) for ends in zip(*tied))
    if any(shape in last for shape in embeddings):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage are on two ranks and would "
                         "train two weights; use a V-shaped schedule (dualpipev, zbv), give both stages a method "
                         "tied_parameters() that returns their copies, or set it to False in their config")
    if copies[0] != copies[1]:
        raise ValueError("the tied_parameters() of the first and of the last stage must be copies of one another, of "
                         "one shape, dtype and dtype of gradients, sharded alike, and frozen or not at both ends; they "
                         f"are {copies[0]} and {copies[1]}")
    wanted = [each for each in turns if each is not None]
    parts = list(starmap(SideSpec, chain(*specs)))
    names = sorted(set(chain.from_iterable(part.names for part in parts)))
    spec = SideSpec(tuple(names), any(part.every for part in parts), any(hooked))
    norms = torch.float64 if any(doubles) else torch.float32
    return any(wanted) if wanted else None, spec, norms, bool(copies[0])


def checked_modules(modules: Any) -> tuple[nn.ModuleList, torch.device | None]:
    """The stages of a rank, and the device of their parameters and buffers, None where they have none. ValueError where
    they are not modules, one is there twice, or they are on several devices."""
    sequence = isinstance(modules, list | tuple | nn.ModuleList | nn.Sequential)
    if not sequence or not all(isinstance(module, nn.Module) for module in modules):
        kinds = [type(m).__name__ for m in modules] if isinstance(modules, list | tuple) else type(modules).__name__
        raise ValueError(f"modules must be a tuple of nn.Modules, got {kinds}")
    if len(set(modules)) < len(modules):
        names = [type(module).__name__ for module in modules]
        raise ValueError(f"one module is given twice in {names}; give each stage a module of its own, which may "
                         "share Parameters with another")
    devices = {t.device for m in modules for t in chain(m.parameters(), m.buffers())}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):
        raise ValueError(f"all stages of a rank must be on one real device, found {sorted(map(str, devices))}")
    return nn.ModuleList(modules), devices.pop() if devices else None


def _copy(parameter: nn.Parameter) -> str:
    """Describe a copy of a tied parameter by all that both ends must share, as its gradients are exchanged."""
    dtype = long_name(parameter.dtype)
    gradient = long_name(parameter.grad_dtype or parameter.dtype)
    own = local(parameter.detach()).shape
    return (f"{dtype}{list(parameter.shape)}" + (f" with {gradient} gradients" if gradient != dtype else "")
            + (f" of which {list(own)} are here" if own != parameter.shape else ""))


def tied_ends(first: nn.Module | None, last: nn.Module | None) -> list[list[Any]]:
    """Shapes of the first stage's embeddings and of the last one's matrices, where a config like one of transformers'
    ties them, then what must be alike of those that each says to have copies of; none of a stage on another rank
    (None), nor of what both have here. ValueError where both are here, with weights that are to be one, and share no
    Parameter."""
    copies = [tied_parameters(stage) for stage in (first, last)]
    ties = [not own and getattr(getattr(stage, "config", None), "tie_word_embeddings", False)
            for stage, own in zip((first, last), copies)]
    ends: list[list[Tensor]] = [
        [m.weight for m in first.modules() if isinstance(m, nn.Embedding)] if first is not None and ties[0] else [],
        [p for p in last.parameters() if p.dim() == 2] if last is not None and ties[1] else [],
    ]
    embeddings, matrices = ([list(shape) for shape in dict.fromkeys(w.shape for w in weights)] for weights in ends)
    if first is None or last is None:
        return [embeddings, matrices, *(list(map(_copy, each)) for each in copies)]
    if any(a is not b for a, b in zip_longest(*copies)):
        raise ValueError("the first and the last stage are on one rank and must share the Parameters that their "
                         "tied_parameters() return: give one the other's")
    shared = first is last or set(first.parameters()) & set(last.parameters())
    if not shared and any(shape in matrices for shape in embeddings):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage share no Parameter and would "
                         "train two weights; give one the other's, or set it to False in their config")
    return [[], [], [], []]


def check_stages(
    stages: Sequence[nn.Module], parameters: Sequence[StageParameters], unreduced: Iterable[str] | str
) -> tuple[bool, list[str]]:
    """Whether FSDP2 reduces any of a rank's gradients over several ranks, and the first parameters of those stages that
    it has nothing of, for `check_ranks`. unreduced: names in their stage, of parameters or modules, with wildcards,
    whose gradients are the caller's to reduce. Raises ValueError for a stage that is sharded together with another one,
    or in part and does not name the rest, or that reduces in another way: DistributedDataParallel and the first FSDP do
    in hooks of one backward, which would see a part of a gradient, or nothing, as weight gradients are computed outside
    of backwards.
    """
    unreduced = (unreduced,) if isinstance(unreduced, str) else tuple(unreduced)
    patterns = [*unreduced, *(f"{pattern}.*" for pattern in unreduced)]
    places = [set(its.places()) for its in parameters]
    managed = set(chain.from_iterable(places))
    if len(managed) != sum(map(len, places)):
        raise ValueError("fully_shard was given modules of two stages together, which are gathered and reduced "
                         "at different times; shard each stage by itself, sharing no parameter")
    meshes = {param.device_mesh for module, name in managed if isinstance(param := getattr(module, name), DTensor)}
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    plain: list[str] = []
    for number, stage in enumerate(stages):
        missed: list[str] = []
        for path, module in stage.named_modules():
            if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                raise ValueError(f"module {number} of this rank {'has' if path else 'is'} a {type(module).__name__}"
                                 f"{path and f', {path}'}, which does not reduce the gradients of a pipeline's step: "
                                 f"{_REMEDY} instead")
            for key, param in module.named_parameters(recurse=False):
                name = f"{path}.{key}".lstrip(".")
                # Each of the ranks may have another part of it, as of experts, and so nothing to reduce.
                apart = (isinstance(param, DTensor) and ranks <= set(param.device_mesh.mesh.flatten().tolist())
                         and not any(placed.is_replicate() for placed in param.placements))
                named = any(fnmatchcase(name, pattern) for pattern in patterns)
                if param.requires_grad and (module, key) not in managed and not apart and not named:
                    missed.append(name)
        if places[number] and len(ranks) > 1 and missed:
            raise ValueError(f"module {number} of this rank is sharded in part, but not {_some(missed)}; {_UNREDUCED}")
        plain += missed
    return len(ranks) > 1, plain[:_SHOWN]


def check_ranks(ranks: Sequence[tuple[bool, list[str]]]) -> None:
    """Raise ValueError where some stages of a pipeline are sharded over several ranks, and others not at all."""
    plain = list(chain.from_iterable(names for _, names in ranks))
    if plain and any(reduces for reduces, _ in ranks):
        raise ValueError(f"some stages are sharded, but not the one with {_some(plain)}; {_UNREDUCED}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
