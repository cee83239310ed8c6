"""Quantization of a model's weights, and the rules for the weights that can be quantized."""

from __future__ import annotations

from collections import Counter, defaultdict
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

HEADS = ("lm_head", "head", "output")  # names of modules that are not quantized, like embeddings and routers


class Weight(NamedTuple):
    """A weight that can be quantized: its name in the model, its module and the parameter."""

    name: str
    owner: nn.Module
    param: nn.Parameter


def quantizable(module: nn.Module) -> Iterator[Weight]:
    """Yield the weights that can be quantized: the matrices of linear layers and of experts, except heads.

    A layer with the attribute `quantizable = False`, such as a router, is left out. A class other than `nn.Linear` has
    `quantizable = True` if its GEMMs take a quantized `weight`.
    """
    for path, owner in module.named_modules():
        weight = owner._parameters.get("weight")
        is_head = path.rpartition(".")[2] in HEADS
        if weight is not None and not is_head and getattr(owner, "quantizable", isinstance(owner, nn.Linear)):
            yield Weight(f"{path}.weight".lstrip("."), owner, weight)


def quantize_weights(module: nn.Module, format: Format | str, match: Sequence[str] = ("*",)) -> list[str]:
    """Quantize weights of a module in place, before it is sharded, and return their names.

    A parameter that requires gradients keeps its values in float32 as its master, which the optimizer updates. Without
    a master, updates smaller than half a step of the format would be lost.

    Args:
        module: the module.
        format: a format or its name.
        match: glob patterns of parameter names, such as "*.experts.*". A weight that `quantizable` yields is quantized
            if its name matches a pattern.

    Raises:
        ValueError: the format is unknown or does not suit a weight's shape, a pattern matches no weight, or a weight is
            tied, sharded or quantized already. The module is unchanged then.
    """
    format = format_of(format)
    patterns = [match] if isinstance(match, str) else list(match)
    weights = _matching_weights(module, patterns)
    num_owners = Counter(id(param) for owner in module.modules() for param in owner._parameters.values())
    for weight in weights:
        _check_weight(weight, format, is_tied=num_owners[id(weight.param)] > 1)
    for _, owner, param in weights:
        values: Tensor = QuantizedTensor.quantize(param, format, keep_master=param.requires_grad)
        owner.weight = nn.Parameter(values, requires_grad=param.requires_grad)
    return [weight.name for weight in weights]


def _matching_weights(module: nn.Module, patterns: Sequence[str]) -> list[Weight]:
    """Return the weights that match any pattern. Raises ValueError if a pattern matches none."""
    weights = list(quantizable(module))
    for pattern in patterns:
        if not any(fnmatchcase(weight.name, pattern) for weight in weights):
            nearest_names = errors.nearest(pattern, [weight.name for weight in weights], 3, cutoff=0.0)
            names = ", ".join(map(repr, nearest_names))
            raise ValueError(f"no weight that can be quantized matches {pattern!r}, nearest: {names or 'none'}; give "
                             "patterns of matrices of linear layers and experts, except heads and routers")
    return [weight for weight in weights if any(fnmatchcase(weight.name, pattern) for pattern in patterns)]


def _check_weight(weight: Weight, format: Format, *, is_tied: bool) -> None:
    """Raise ValueError if a weight cannot be quantized."""
    problem = ""
    if isinstance(weight.param, DTensor):
        problem = "is sharded already; quantize before"
    elif isinstance(weight.param, QuantizedTensor):
        problem = "is quantized already"
    elif is_tied:
        problem = "is tied to another module, which may need its values; untie it"
    if problem:
        raise ValueError(f"{weight.name} cannot be stored in {format}: it {problem}, or leave it out of match")
    try:
        format.check(weight.param.shape)
    except ValueError as error:
        raise ValueError(f"{weight.name}: {error}; choose a format of 8 bits, or leave it out of match") from None


def _local(param: Tensor) -> Tensor:
    """Return the local tensor of a DTensor itself, not a new tensor as `to_local` does; return a plain tensor as is."""
    return param._local_tensor if isinstance(param, DTensor) else param


def quantized_part(param: Tensor) -> QuantizedTensor | None:
    """Return the local tensor of a parameter, the same object; None if it is not quantized."""
    local = _local(param)
    return local if isinstance(local, QuantizedTensor) else None


@torch.no_grad()
def requantize(params: Iterable[Tensor]) -> None:
    """Quantize the masters of quantized parameters into their bytes. Other parameters are left alone.

    For formats with a scale per matrix, this is collective over the ranks that hold rows of the same matrix: they
    quantize with the largest magnitude of all rows, by one all-reduce for all parameters of a process group.

    params: parameters, `DTensor`s or not.
    """
    amax_by_groups: defaultdict[tuple[ProcessGroup, ...], list[tuple[QuantizedTensor, Tensor]]] = defaultdict(list)
    for param in params:
        part = quantized_part(param)
        if part is None or part.master is None:
            continue
        if part.format.matrix_scale:
            master = part.master if part.master.dim() == 3 else part.master[None]
            amax_by_groups[matrix_groups(param)].append((part, matrix_amax(master, part.format)))
        else:
            part.quantize_(part.master)
    for groups, parts in amax_by_groups.items():
        largest = torch.cat([amax for _, amax in parts])
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for (part, _), amax in zip(parts, largest.split([len(amax) for _, amax in parts])):
            part.quantize_(cast(Tensor, part.master), amax)


def matrix_groups(param: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups of the ranks that hold other rows of the same matrices as this rank."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    row_dim = param.dim() - 2
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(param.placements)
                 if placement.is_shard(row_dim) and mesh.size(dim) > 1)


@contextmanager
def filling(params: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which the caller writes values to masters; they are quantized at the end.

    Parameters that are not trained have no master; they get one inside the `with`.
    """
    params = list(params)
    parts = [part for part in map(quantized_part, params) if part is not None and part.master is None]
    for part in parts:
        part.master = torch.full(part.shape, torch.nan, device=part.device)
    try:
        yield
    finally:
        requantize(params)  # also if this rank has failed: others may be waiting for it
        for part in parts:
            part.master = None


def check_sharding(name: str, param: Tensor, format: Format, num_ranks: int) -> None:
    """Raise ValueError if sharding a parameter by rows would cut blocks, or if it is trained without a master.

    Args:
        name: name of the parameter.
        param: the parameter.
        format: its format.
        num_ranks: number of ranks it is sharded over.
    """
    num_rows = -(-param.shape[0] // num_ranks)
    if param.dim() == 2 and num_rows < param.shape[0] and num_rows % format.block[0]:
        raise ValueError(f"{name} is {tuple(param.shape)}; over {num_ranks} ranks each would have {num_rows} rows, "
                         f"which cuts through the blocks of {format.block[0]} rows of {format}: leave it out of the "
                         "rule, choose a format whose blocks are of one row, such as mxfp8, or shard over fewer ranks "
                         "(HSDP)")
    part = quantized_part(param)
    if part is not None and part.master is None and param.requires_grad:
        raise ValueError(missing_master_message(name, part))


def missing_master_message(name: str, part: QuantizedTensor) -> str:
    """Return the error message for a trained weight without a master."""
    return (f"{name} is trainable and stored in {part.format} without a master: updates smaller than half a step of "
            "the format would be lost; quantize it while it requires gradients, or freeze it")


def quantize_param(param: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """Return a parameter in a format, with a master if it requires gradients. Works on the meta device too.

    Args:
        param: the parameter; a DTensor must have whole matrices on each rank.
        format: the format. A parameter that is quantized already keeps its own.
        dtype: dtype that the result appears to have.
    """
    keep_master = param.requires_grad
    local = _local(param).detach()
    if isinstance(local, QuantizedTensor):
        part = local.map_storage(lambda storage: storage, dtype=dtype)
    elif local.device.type == "meta":
        part = QuantizedTensor.empty(local.shape, format, dtype=dtype, device="meta", keep_master=keep_master)
    else:
        part = QuantizedTensor.quantize(local, format, dtype=dtype, keep_master=keep_master)
    return distribute_like(param, part)


def distribute_like(param: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part as a tensor that is distributed like `param`. It shares memory with `part`."""
    if not isinstance(param, DTensor):
        return part
    return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                              stride=param.stride())
