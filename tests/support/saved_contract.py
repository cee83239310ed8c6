"""Check that a checkpoint on disk has the dtypes of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualpipe.kernels.formats import Format
from dualpipe.parallel.precision.check_contract import Differences
from dualpipe.parallel.precision.dtype_plan import DTypePlan, checkpoint_dtypes, saved_slots


def assert_saved_contract(
    module: nn.Module, plan: DTypePlan, checkpoint: str | Path | Mapping[str, torch.dtype]
) -> None:
    """Check the tensors of a module on disk against its plan.

    `checkpoint` is a distributed checkpoint, which has storage dtypes, the float32 masters of trained parameters, or
    bytes of quantized ones; or an export as safetensors or the dtypes by name, which have the save dtypes.

    Raises ContractError where something differs; ValueError where `checkpoint` cannot be read.
    """
    on_disk: Any = checkpoint
    distributed = False
    if isinstance(checkpoint, str | Path):
        on_disk = checkpoint_dtypes(checkpoint)
        distributed = any((Path(checkpoint) / name).is_file() for name in (".metadata", "tensors.json"))
    differences = Differences()
    for places in saved_slots(module):
        first, present = places[0], [slot.name for slot in places if slot.name in on_disk]
        planned = plan.of(first.name)
        expected = planned.storage if distributed else planned.save
        as_well: set[torch.dtype] = set()
        if distributed and first.tensor.requires_grad:
            as_well.add(torch.promote_types(expected, torch.float32))
        if distributed and isinstance(planned.stored, Format):
            as_well.add(torch.uint8)  # block rows
        for name in present:
            differences.check(name, "is on disk in", expected if on_disk[name] in as_well else on_disk[name], expected)
        if not present:
            differences.add(f"{first.name}: is not in the checkpoint")
    differences.raise_all()
