"""Gathers of quantized bytes by FSDP2, in the cases that a `QuantizedTensor` alone does not cover.

    plain shards        are quantized for each gather, to a quarter to a seventh of float32's bytes
    quantized shards    of a stack of experts (E, N, K) that is sharded on dimension 1, the rows of each expert

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of the tensor that holds a shard. They are set as
attributes of this tensor, and set again whenever it is replaced: FSDP2 pads shards at its first forward, and
checkpoints and `materialize` replace them.

Dimension letters: E experts, N rows, K columns, R block rows (rows of blocks that share scales), B bytes of a block
row.
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
    """Gather of one parameter as quantized bytes.

    A gather is collective over the parameter's ranks, with two collectives if the format has a scale of the matrix.
    """

    def __init__(self, fsdp_param: Any, format: Format) -> None:
        self._param = fsdp_param
        self._format = format
        self._padded_size: torch.Size = private(fsdp_param, "padded_sharded_param_size")
        self._dim: int = private(fsdp_param, "fsdp_placement").dim  # the parameter is sharded on it

    def attach(self) -> None:
        """Make FSDP2 use this gather; called before each gather. Does nothing if the parameter is gathered."""
        param = self._param
        if private(param, "sharded_state").name != "SHARDED" or self._is_attached():
            return
        private(param, "reset_sharded_param")()  # pads the shard; FSDP2 would do so later and lose the attributes
        shard = private(param, "_sharded_local_tensor")
        shard.fsdp_pre_all_gather = self._pack
        shard.fsdp_post_all_gather = self._unpack
        if not hasattr(param, "_extensions_data"):
            private(param, "_init_extensions")()

    def _is_attached(self) -> bool:
        return "fsdp_pre_all_gather" in vars(private(self._param, "_sharded_local_tensor"))

    def _pack(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], torch.Size]:
        """Return the bytes of this rank's shard, padded to the common shard size, and the shape of the parameter."""
        shard = private(self._param, "_sharded_local_tensor")
        rows = shard.block_rows if isinstance(shard, QuantizedTensor) else self._quantize_shard(shard, mesh)
        if shard.dim() != 3:
            rows = rows[0]
        if self._dim:  # FSDP2 concatenates the parts by this size, which must be that of the gathered bytes
            self._param.padded_sharded_param_size = rows.shape
        return (rows.contiguous(),), private(self._param, "_orig_size")

    def _quantize_shard(self, shard: Tensor, mesh: DeviceMesh) -> Tensor:
        """Quantize a plain shard; returns its block rows (E, R, B), padded, where E is 1 for a single matrix."""
        format = self._format
        stack = shard if shard.dim() == 3 else shard[None]
        amax = matrix_amax(stack, format) if format.matrix_scale else None
        if amax is not None and self._dim == shard.dim() - 2 and mesh.size() > 1:  # ranks hold rows of one matrix
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        if shard.shape == self._padded_size:
            return quantize(stack, format, amax)
        *matrices, rows, columns = self._padded_size
        size = (*(matrices or [1]), format.block_rows(rows), format.row_bytes(columns))
        packed = torch.zeros(size, dtype=torch.uint8, device=shard.device)
        quantize(stack, format, amax, out=packed[: stack.shape[0], : format.block_rows(stack.shape[1])])
        return packed

    def _unpack(
        self, gathered: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight; implements the interface of `QuantizedTensor.fsdp_post_all_gather`."""
        self._param.padded_sharded_param_size = self._padded_size
        if out is not None:
            finish_gather(out, exact=True)
            return None
        (packed,) = gathered
        num_matrices = shape[0] if len(shape) == 3 else 1
        num_padded = packed.shape[0] if len(shape) == 3 and not self._dim else num_matrices
        rows = packed.view(num_padded, -1, packed.shape[-1])
        rows = rows[:num_matrices, : self._format.block_rows(shape[-2])]
        weight = QuantizedTensor(rows, shape, dtype, self._format)
        return weight, finish_gather(weight, exact=True)


def add_packed_gathers(unit: FSDPModule, formats: Mapping[tuple[nn.Module, str], Format]) -> list[PackedGather]:
    """Make FSDP2 gather the parameters of a unit as quantized bytes; returns the new gathers.

    formats: by module and name. Skips shards that are quantized and sharded on dimension 0, which `QuantizedTensor`
    gathers itself.
    """
    gathers: list[PackedGather] = []
    for group in groups_of(unit):
        for fsdp_param in private(group, "fsdp_params"):
            info = private(fsdp_param, "_module_info")
            format = formats.get((info.module, info.param_name))
            is_plain = not isinstance(private(fsdp_param, "_sharded_local_tensor"), QuantizedTensor)
            if format is not None and (is_plain or private(fsdp_param, "fsdp_placement").dim):
                fsdp_param.packed_gather = PackedGather(fsdp_param, format)
                fsdp_param.packed_gather.attach()
                gathers.append(fsdp_param.packed_gather)
    return gathers


def attach_all(gathers: Iterable[PackedGather]) -> None:
    """Make FSDP2 use these gathers; see `PackedGather.attach`."""
    for gather in gathers:
        gather.attach()
