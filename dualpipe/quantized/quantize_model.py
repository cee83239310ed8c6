"""Quantizing a model's weights, and which of them that may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dualpipe.kernels.formats import Format, format_of
from dualpipe.kernels.quantize import matrix_amax
from dualpipe.quantized.tensor import QuantizedTensor
from dualpipe.runtime import errors

HEADS = ("lm_head", "head", "output")  # names of modules that are left alone, as embeddings and routers are


class Weight(NamedTuple):
    """A weight that may be quantized: its name in the model, its module and the parameter."""

    name: str
    owner: nn.Module
    param: nn.Parameter


def quantizable(module: nn.Module) -> Iterator[Weight]:
    """The matrices of linear layers and of experts, but for heads, and layers that say `quantizable = False` (routers).

    A class that is no `nn.Linear` says `quantizable = True` where its products take a quantized `weight`.
    """
    for path, owner in module.named_modules():
        weight = owner._parameters.get("weight")
        if (weight is not None and getattr(owner, "quantizable", isinstance(owner, nn.Linear))
                and path.rpartition(".")[2] not in HEADS):
            yield Weight(f"{path}.weight".lstrip("."), owner, weight)


def quantize_weights(module: nn.Module, format: Format | str, match: Sequence[str] = ("*",)) -> list[str]:
    """Store weights of a module in a format, in place, before it is sharded; returns their names.

    match: glob patterns of names of parameters, such as "*.experts.*"; of those that match, the ones that `quantizable`
    names. A parameter that requires gradients keeps its values in float32 as its master, which the optimizer updates:
    without one, updates smaller than half a step of the format would be lost.

    Raises ValueError, before anything is changed, for a format that there is not or that a weight's shape does not
    suit, patterns that match none, and weights that are tied, sharded or quantized already.
    """
    format = format_of(format)
    patterns = [match] if isinstance(match, str) else list(match)
    weights = list(quantizable(module))
    for pattern in patterns:
        if not any(fnmatchcase(weight.name, pattern) for weight in weights):
            names = ", ".join(map(repr, errors.nearest(pattern, [weight.name for weight in weights], 3, cutoff=0.0)))
            raise ValueError(f"no weight that can be quantized matches {pattern!r}, nearest: {names or 'none'}; these "
                             "are the matrices of linear layers and experts, but for heads and routers")
    chosen = [each for each in weights if any(fnmatchcase(each.name, pattern) for pattern in patterns)]
    places: dict[int, int] = {}
    for owner in module.modules():
        for param in owner._parameters.values():
            places[id(param)] = places.get(id(param), 0) + 1
    for name, _, param in chosen:
        problem = ("is sharded already; quantize before" if isinstance(param, DTensor) else
                   "is quantized already" if isinstance(param, QuantizedTensor) else
                   "is tied to another module, which may need its numbers; untie it" if places[id(param)] > 1 else "")
        if problem:
            raise ValueError(f"{name} cannot be stored in {format}: it {problem}, or leave it out of match")
        try:
            format.check(param.shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; choose a format of 8 bits, or leave it out of match") from None
    for _, owner, param in chosen:
        values: Tensor = QuantizedTensor.quantize(param, format, keep_master=param.requires_grad)
        owner.weight = nn.Parameter(values, requires_grad=param.requires_grad)
    return [name for name, _, _ in chosen]


def quantized_part(param: Tensor) -> QuantizedTensor | None:
    """What this rank holds of a parameter, the very tensor; None where it is not quantized."""
    local = param._local_tensor if isinstance(param, DTensor) else param  # `to_local` would give another one
    return local if isinstance(local, QuantizedTensor) else None


@torch.no_grad()
def requantize(params: Iterable[Tensor]) -> None:
    """Quantize the masters of quantized parameters, `DTensor`s or not, into their bytes; others are left alone.

    Collective over the ranks that hold rows of a matrix, for formats with a scale of the matrix: these quantize with
    the largest magnitude of all, one all-reduce for all parameters of a group.
    """
    held = [(param, part) for param in params if (part := quantized_part(param)) is not None]
    shared: defaultdict[tuple[ProcessGroup, ...], list[tuple[QuantizedTensor, Tensor]]] = defaultdict(list)
    for param, part in held:
        if (master := part.master) is not None and part.format.matrix_scale:
            stack = master if master.dim() == 3 else master[None]
            shared[matrix_groups(param)].append((part, matrix_amax(stack, part.format)))
        elif master is not None:
            part.quantize_(master)
    for groups, parts in shared.items():
        largest = torch.cat([amax for _, amax in parts])
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for (part, _), amax in zip(parts, largest.split([len(amax) for _, amax in parts])):
            part.quantize_(cast(Tensor, part.master), amax)


def matrix_groups(param: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups of ranks that hold other rows of the same matrices as this one."""
    if not isinstance(param, DTensor):
        return ()
    mesh, rows = param.device_mesh, param.dim() - 2
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(param.placements)
                 if placement.is_shard(rows) and mesh.size(dim) > 1)


@contextmanager
def filling(params: Iterable[Tensor]) -> Iterator[None]:
    """Quantize masters that are filled meanwhile; parameters that are not trained have one until then."""
    params = list(params)
    parts = [part for param in params if (part := quantized_part(param)) is not None and part.master is None]
    for part in parts:
        part.master = torch.full(part.shape, torch.nan, device=part.device)
    try:
        yield
    finally:
        requantize(params)  # also where this rank has failed: others may wait for it
        for part in parts:
            part.master = None


def check_cut(name: str, param: Tensor, format: Format, ranks: int) -> None:
    """Raise ValueError where to shard the rows of a matrix over this many ranks would cut through its blocks, and for a
    trained weight that has no master."""
    rows = -(-param.shape[0] // ranks)
    if param.dim() == 2 and rows < param.shape[0] and rows % format.block[0]:
        raise ValueError(f"{name} is {tuple(param.shape)}; over {ranks} ranks each would have {rows} rows, which cuts "
                         f"through the blocks of {format.block[0]} rows of {format}: leave it out of the rule, choose "
                         "a format whose blocks are of one row, such as mxfp8, or shard over fewer ranks (HSDP)")
    held = quantized_part(param)
    if held is not None and held.master is None and param.requires_grad:
        raise ValueError(untrained(name, held))


def untrained(name: str, part: QuantizedTensor) -> str:
    """Why a weight without a master is not trained."""
    return (f"{name} is trainable and stored in {part.format} without a master: updates smaller than half a step of "
            "the format would be lost; quantize it while it requires gradients, or freeze it")


def quantized(param: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """A parameter in a format, that gives itself out as `dtype`, with a master if it is trained; also on meta.

    One that is a DTensor has whole matrices on each rank.
    """
    keep_master, local = param.requires_grad, (param._local_tensor if isinstance(param, DTensor) else param).detach()
    if isinstance(local, QuantizedTensor):
        part = local.both(lambda each: each, dtype=dtype)
    elif local.device.type == "meta":
        part = QuantizedTensor.empty(local.shape, format, dtype=dtype, device="meta", keep_master=keep_master)
    else:
        part = QuantizedTensor.quantize(local, format, dtype=dtype, keep_master=keep_master)
    return placed_as(param, part)


def placed_as(param: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank's part is given, distributed as a parameter is; it shares memory."""
    if not isinstance(param, DTensor):
        return part
    return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                              stride=param.stride())
