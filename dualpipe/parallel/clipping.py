"""The norm of a whole model's gradients over the ranks that hold its parts, and scaling them by it.

    norms of this rank's gradients, by the groups that their parameters are sharded over
      -> reduced over these groups: what all data-parallel and expert-parallel ranks of a stage hold
      -> added up, reduced over the pipeline: the norm of the model, the same on every rank

Which reductions there are follows from the parameters and not from the gradients, which a rank may lack. Everything
stays on the device: the scaling is queued before the host can know the norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isinf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dualpipe.nn.deferral import local
from dualpipe.runtime.recorder import Recorder

_Groups = tuple[ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *,
    copies: Iterable[Tensor] = (), group: ProcessGroup | None = None, device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm over all ranks of `group` and of the parameters' meshes.

    A parameter that is given twice counts once, and so do the copies of a DTensor that is replicated. A plain parameter
    counts once for each rank of `group` (None: this rank alone) that has it, unless it is one of `copies`, which are
    only scaled. `max_norm` infinite: nothing is scaled.

    Returns the norm before, a scalar of `dtype` on `device`, the same on every rank. Collective; raises ValueError for
    norms that there are not, and with `error_if_nonfinite` RuntimeError, on every rank, where the norm is infinite or
    NaN: gradients are then as they were.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0 or not max_norm >= 0:
        raise ValueError(f"norm_type must be above 0 and max_norm at least 0, got norm_type = {norm_type} and "
                         f"max_norm = {max_norm}")
    to_measure: defaultdict[_Groups, list[Tensor]] = defaultdict(list)
    to_scale: list[Tensor] = []
    counted_elsewhere = set(copies)
    for parameter in dict.fromkeys(parameters):
        groups: _Groups = ()  # whose ranks hold different parts of it
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter.placements)
            groups = tuple(parameter.device_mesh.get_group(i) for i, place in placed if not place.is_replicate())
        measured = [] if parameter in counted_elsewhere else to_measure[groups]
        if (grad := parameter.grad) is not None:
            if grad.is_sparse:  # has no norm, its values have one
                grad = parameter.grad = grad.coalesce()
            to_scale.append(grad._values() if grad.is_sparse else local(grad))
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                measured.append(local(grad.redistribute(placements=parameter.placements)))  # of sums to be made
            else:
                measured.append(to_scale[-1])
    norm = _norm(to_measure, () if group is None else (group,), norm_type, device)
    if max_norm < inf:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
        if error_if_nonfinite:
            scale = torch.where(norm.isfinite(), scale, 1.0)
        for own, gradients in _by_dtype(to_scale):
            torch._foreach_mul_(gradients, scale.to(torch.promote_types(own, torch.float32)))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they were not clipped; without "
                           "error_if_nonfinite they are scaled all the same")
    return norm.to(dtype)


def _norm(
    to_measure: Mapping[_Groups, Sequence[Tensor]], groups: _Groups, norm_type: float, device: torch.device
) -> Tensor:
    """The norm of the gradients of all ranks of `groups`, which are cut over the groups that they are given by.

    What is added up are two float64: the sum of powers; of the infinity norm the maximum, and whether any is NaN, which
    a maximum over ranks would lose.
    """

    recorder, op = Recorder.current(), dist.ReduceOp.MAX if isinf(norm_type) else dist.ReduceOp.SUM

    def reduced(part: Tensor, groups: _Groups) -> Tensor:
        for group in groups:
            if group.size() > 1:
                with recorder.collective("clip", "the norm of the gradients", recorder.members(group), part.nbytes):
                    dist.all_reduce(part, op, group=group)
        return part

    parts = [torch.zeros(2, dtype=torch.float64, device=device)]
    for shards, gradients in to_measure.items():
        part = torch.zeros_like(parts[0])
        norms: list[Tensor] = []
        for dtype, tensors in _by_dtype(gradient for gradient in gradients if gradient.numel()):
            norms += torch._foreach_norm(tensors, norm_type, dtype=torch.promote_types(dtype, torch.float32))
        if norms:
            found = torch.stack([norm.double() for norm in norms])
            found = found.max() if isinf(norm_type) else found.pow(norm_type).sum()
            part = torch.stack([found, found.isnan().double()])
        parts.append(reduced(part, shards))
    stacked = torch.stack(parts)
    value, bad = reduced(stacked.amax(0) if isinf(norm_type) else stacked.sum(0), groups)
    return torch.where(bad > 0, torch.nan, value if isinf(norm_type) else value.pow(1 / norm_type))


def _by_dtype(tensors: Iterable[Tensor]) -> Iterable[tuple[torch.dtype, list[Tensor]]]:
    found: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.dtype].append(tensor)
    return found.items()
