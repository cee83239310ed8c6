"""Reading what a distributed checkpoint says of its tensors, without running code of it.

`.metadata` of `torch.distributed.checkpoint` is a pickle, which torch loads as it is: whoever made the file could have
anything run. Here nothing is made but the plain records that such a description consists of.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

METADATA = ".metadata"


def read_description(path: Path) -> Metadata:
    """What the file `path`, the `.metadata` of a checkpoint, says; raises ValueError for anything else."""
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{path} cannot be read: {error}") from error
    stored = found.state_dict_metadata if isinstance(found, Metadata) else None
    if not isinstance(stored, dict) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path} holds no description of tensors")
    for index, place in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            raise ValueError(f"{path} does not say of {index!r} where it lies")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == Metadata.__module__ and "." not in name:
            record = getattr(records, name, None)
            found = record if isinstance(record, type) and record.__module__ == module else None
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint; refused")
        return found


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
}
