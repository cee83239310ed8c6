"""Gradient clipping by the norm of the whole model, over all ranks that hold parts of it.

    norms of this rank's gradients, by the ranks that their parameters are sharded over
      -> reduced over these ranks: the norm of a stage, the same on its data-parallel and expert-parallel ranks
      -> summed, and reduced over the pipeline: the norm of the model, the same on every rank

Dense parameters and experts of a stage are sharded over the same ranks along different meshes, dp * ep as one group or
as two, and are reduced together: in all, two small all-reduces.

The collectives follow from the parameters, not from the gradients: a rank may lack some gradients. Everything stays on
the device: the scaling is queued before the host can know the norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isinf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dualpipe.nn.accumulators import coalesce, local, scale
from dualpipe.runtime.recorder import Recorder

_Groups = tuple[ProcessGroup, ...]
_Layout = tuple[DeviceMesh, tuple[Placement, ...]] | None  # of a DTensor; None for a plain parameter


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *,
    copies: Iterable[Tensor] = (), group: ProcessGroup | None = None, device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, by their norm over all ranks. Collective.

    The ranks are those of `group` (None: this rank alone) and of the parameters' meshes. A parameter that is passed
    twice counts once, and so do the replicas of a DTensor. A plain parameter counts once for each rank of `group` that
    has it, unless it is one of `copies`, which are scaled and not counted. With an infinite `max_norm` nothing is
    scaled.

    Returns the norm before clipping, a scalar of `dtype` on `device`, the same on every rank. Raises ValueError for a
    norm type or limit out of range. With `error_if_nonfinite` raises RuntimeError on every rank if the norm is infinite
    or NaN, with the gradients unchanged.
    """
    max_norm = float(max_norm)
    norm_type = float(norm_type)
    if not norm_type > 0 or not max_norm >= 0:
        raise ValueError(f"norm_type must be above 0 and max_norm at least 0, got norm_type = {norm_type} and "
                         f"max_norm = {max_norm}")
    to_measure: defaultdict[_Layout, list[Tensor]] = defaultdict(list)
    to_scale: list[Tensor] = []
    counted_elsewhere = set(copies)
    for parameter in dict.fromkeys(parameters):
        measured: list[Tensor] = []
        if parameter not in counted_elsewhere:
            # Creates the entry even if the gradient is None: entries are collectives.
            measured = to_measure[_layout(parameter)]
        if parameter.grad is not None:
            scaled, summed = _local_gradients(parameter)
            to_scale.append(scaled)
            measured.append(summed)
    norm = _norm(_by_ranks(to_measure), () if group is None else (group,), norm_type, device)
    if max_norm < inf:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # the formula of torch
        if error_if_nonfinite:
            factor = torch.where(norm.isfinite(), factor, 1.0)
        for gradient_dtype, gradients in _by_dtype(to_scale):
            scale(gradients, factor.to(torch.promote_types(gradient_dtype, torch.float32)))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they were not clipped; to scale them "
                           "anyway, pass error_if_nonfinite=False")
    return norm.to(dtype)


def _layout(parameter: Tensor) -> _Layout:
    """Return the mesh and the placements of a parameter."""
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def _by_ranks(to_measure: Mapping[_Layout, Sequence[Tensor]]) -> list[tuple[_Groups, list[Tensor]]]:
    """Return the gradients by the ranks that hold shards of their parameters, with the groups that connect these ranks.

    If several meshes have the same ranks, the groups are those of the mesh with the fewest.
    """
    groups: dict[tuple[int, ...], _Groups] = {}
    gradients: defaultdict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for layout, measured in to_measure.items():
        ranks, layout_groups = _shards(layout)
        if ranks not in groups or len(layout_groups) < len(groups[ranks]):
            groups[ranks] = layout_groups
        gradients[ranks] += measured
    return [(groups[ranks], gradients[ranks]) for ranks in groups]


def _shards(layout: _Layout) -> tuple[tuple[int, ...], _Groups]:
    """Return the ranks that hold different parts of a parameter, and the groups of more than one rank between them."""
    if layout is None:
        return (), ()
    mesh, placements = layout
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank is in the meshes of its parameters"
    index = tuple(place if placement.is_replicate() else slice(None)
                  for place, placement in zip(coordinate, placements, strict=True))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    return ranks, tuple(mesh.get_group(dim) for dim in dims)


def _local_gradients(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local gradient, which is scaled, and the local part of the reduced gradient, which is measured.

    They are the same tensor unless the gradient is still to be reduced.
    """
    grad = parameter.grad
    assert grad is not None, "the caller has checked"
    if grad.is_sparse:  # torch has no norm of a sparse tensor, only of its values
        values = coalesce(parameter)._values()
        return values, values
    local_grad = local(grad)
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        return local_grad, local(grad.redistribute(placements=parameter.placements))  # reduces a partial gradient
    return local_grad, local_grad


def _norm(
    to_measure: Sequence[tuple[_Groups, Sequence[Tensor]]], groups: _Groups, norm_type: float, device: torch.device
) -> Tensor:
    """Return the norm of the gradients of all ranks of `groups`, as a float64 scalar.

    to_measure: this rank's gradients, with the groups they are sharded over.

    Ranks reduce two float64 values: the sum of powers (for the infinity norm, the maximum), and a count (or flag) of
    NaN norms, since a maximum over ranks would lose a NaN.
    """
    recorder = Recorder.current()
    is_max = isinf(norm_type)
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM

    def reduce(values: Tensor, groups: _Groups) -> Tensor:
        for group in groups:
            if group.size() > 1:
                with recorder.collective("clip", "the norm of the gradients", recorder.members(group), values.nbytes):
                    dist.all_reduce(values, op, group=group)
        return values

    reduced = [torch.zeros(2, dtype=torch.float64, device=device)]
    for shard_groups, gradients in to_measure:
        values = torch.zeros_like(reduced[0])
        norms: list[Tensor] = []
        for dtype, tensors in _by_dtype(gradient for gradient in gradients if gradient.numel()):
            norms += torch._foreach_norm(tensors, norm_type, dtype=torch.promote_types(dtype, torch.float32))
        if norms:
            stacked_norms = torch.stack([norm.double() for norm in norms])
            value = stacked_norms.max() if is_max else stacked_norms.pow(norm_type).sum()
            values = torch.stack([value, value.isnan().double()])
        reduced.append(reduce(values, shard_groups))
    stacked = torch.stack(reduced)
    value, nans = reduce(stacked.amax(0) if is_max else stacked.sum(0), groups)
    return torch.where(nans > 0, torch.nan, value if is_max else value.pow(1 / norm_type))


def _by_dtype(tensors: Iterable[Tensor]) -> Iterable[tuple[torch.dtype, list[Tensor]]]:
    """Group tensors by dtype."""
    groups: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return groups.items()
