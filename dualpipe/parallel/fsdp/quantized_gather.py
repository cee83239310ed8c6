"""Parameters that FSDP2 gathers as quantized bytes where a `QuantizedTensor` alone could not have it do so.

    gathered            shards are plain and are quantized for each gather: a quarter to a seventh of float32's bytes
    rows of a stack     shards are quantized, and were cut on dimension 1: of experts (E, N, K), the rows of each

FSDP2 asks the tensor that a shard is in for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. It gets them as its own
attributes, again whenever another has taken its place: FSDP2 pads shards at its first forward, checkpoints and
`materialize` put others there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.kernels.formats import Format
from dualpipe.kernels.quantize import matrix_amax, quantize
from dualpipe.parallel.fsdp.private import groups_of, private
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.tensor import finish_gather


class PackedGather:
    """How FSDP2 gathers one parameter; collective, where the format has a scale of the matrix, twice."""

    def __init__(self, fsdp_param: Any, format: Format) -> None:
        self._param, self._format = fsdp_param, format
        self._size: torch.Size = private(fsdp_param, "padded_sharded_param_size")
        self._dim: int = private(fsdp_param, "fsdp_placement").dim

    def attach(self) -> None:
        """Have FSDP2 gather as this says from now on; to be called before a gather, and where nothing is gathered."""
        param = self._param
        if private(param, "sharded_state").name != "SHARDED" or self._is_attached():
            return
        private(param, "reset_sharded_param")()  # which pads it; FSDP2 would do that later and lose the attributes
        shard = private(param, "_sharded_local_tensor")
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._pack, self._unpack
        if not hasattr(param, "_extensions_data"):
            private(param, "_init_extensions")()

    def _is_attached(self) -> bool:
        return "fsdp_pre_all_gather" in vars(private(self._param, "_sharded_local_tensor"))

    def _pack(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], torch.Size]:
        """The bytes of this rank's shard, padded as all are, and the shape of the whole."""
        shard = private(self._param, "_sharded_local_tensor")
        rows = shard.block_rows if isinstance(shard, QuantizedTensor) else self._quantized(shard, mesh)
        rows = rows if shard.dim() == 3 else rows[0]
        if self._dim:  # FSDP2 puts the parts together by this, which it takes for the size of what it gathers
            self._param.padded_sharded_param_size = rows.shape
        return (rows.contiguous(),), private(self._param, "_orig_size")

    def _quantized(self, shard: Tensor, mesh: DeviceMesh) -> Tensor:
        format, stack = self._format, shard if shard.dim() == 3 else shard[None]
        amax = matrix_amax(stack, format) if format.matrix_scale else None
        if amax is not None and self._dim == shard.dim() - 2 and mesh.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        if shard.shape == self._size:
            return quantize(stack, format, amax)
        *matrices, rows, columns = self._size
        size = (*(matrices or [1]), format.block_rows(rows), format.row_bytes(columns))
        packed = torch.zeros(size, dtype=torch.uint8, device=shard.device)
        quantize(stack, format, amax, out=packed[: stack.shape[0], : format.block_rows(stack.shape[1])])
        return packed

    def _unpack(
        self, gathered: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """As `QuantizedTensor.fsdp_post_all_gather`."""
        self._param.padded_sharded_param_size = self._size
        if out is not None:
            finish_gather(out, exact=True)
            return None
        (packed,) = gathered
        matrices = 1 if len(shape) == 2 else shape[0] if self._dim else packed.shape[0]
        rows = packed.view(matrices, -1, packed.shape[-1])
        rows = rows[: shape[0] if len(shape) == 3 else 1, : self._format.block_rows(shape[-2])]
        weight = QuantizedTensor(rows, shape, dtype, self._format)
        return weight, finish_gather(weight, exact=True)


def gather_packed(unit: FSDPModule, formats: Mapping[tuple[nn.Module, str], Format]) -> list[PackedGather]:
    """Have FSDP2 gather parameters of a unit as bytes in their formats, which are given by module and name: those whose
    shards are plain, or not cut on dimension 0."""
    made = []
    for fsdp_param in (each for group in groups_of(unit) for each in private(group, "fsdp_params")):
        info, shard = private(fsdp_param, "_module_info"), private(fsdp_param, "_sharded_local_tensor")
        format = formats.get((info.module, info.param_name))
        plain = not isinstance(shard, QuantizedTensor)
        if format is not None and (plain or private(fsdp_param, "fsdp_placement").dim):
            fsdp_param.packed_gather = PackedGather(fsdp_param, format)
            fsdp_param.packed_gather.attach()
            made.append(fsdp_param.packed_gather)
    return made


def attach(gathers: Iterable[PackedGather]) -> None:
    """Have FSDP2 gather so from now on."""
    for gather in gathers:
        gather.attach()
