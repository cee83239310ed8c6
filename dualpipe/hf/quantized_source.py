"""Read a stage's weights of a checkpoint in FP8 (DeepSeek-V3) or MXFP4 (gpt-oss), and dequantize them.

transformers dequantizes such checkpoints with packages that it does not bring along. They are read as for this
library's own models, and transformers' loader gets them as if they had been stored in bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from dualpipe.checkpoint.hub.files import Reader, read_headers
from dualpipe.checkpoint.hub.stored_formats import SUFFIXES, Mxfp4, find_stored, fp8_block
from dualpipe.checkpoint.tensors import Box

_layer_number = re.compile(r"(?:^|\.)layers\.(\d+)\.").search


def is_quantized(config: Any) -> bool:
    """Return True for the configuration of a checkpoint that is stored in a quantized form."""
    return getattr(config, "quantization_config", None) is not None


def read_dequantized(
    source: str | Path, config: Any, layers: range, *, has_ends: bool, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return the tensors of a stage under the names that the checkpoint has, those in FP8 or MXFP4 in `dtype`.

    They are read when they are indexed. layers: those of the stage; has_ends: whether it has tensors of no layer, too.
    Raises ValueError for other forms of quantization, and for files that are incomplete.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    quantization = config.quantization_config
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    block = fp8_block({"quantization_config": fields})
    header = read_headers(folder)
    reader = Reader(folder, header, block)
    is_needed = _filter(layers, has_ends=has_ends)
    names = dict.fromkeys(tensor_name(stored, header) for stored in header)
    return {name: StoredTensor(reader, name, dtype) for name in names if is_needed(name)}


class StoredTensor:
    """A tensor of a checkpoint that is read, and dequantized where it is quantized, when it is indexed.

    It is what a slice of a safetensors file is to transformers' loader, which indexes by slices alone.
    """

    def __init__(self, reader: Reader, name: str, dtype: torch.dtype) -> None:
        stored = find_stored(reader.header, name, reader.block)
        assert stored is not None, "a name comes from the header"
        self._reader = reader
        self._stored = stored
        self._dtype = dtype
        # gpt-oss multiplies rows by its matrices from the right, and stores those in MXFP4 the other way.
        self._is_transposed = isinstance(stored, Mxfp4)

    def get_shape(self) -> list[int]:
        """Return the shape that the model has."""
        shape = list(self._stored.shape)
        if self._is_transposed:
            shape[-2:] = reversed(shape[-2:])
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the tensor; of the first dimension nothing else is read, such as other experts."""
        slices = index if isinstance(index, tuple) else (index,)
        shape = tuple(self._stored.shape)
        if not shape or slices[0] is Ellipsis:
            return self._read(Box.at(tuple(slice(0, size) for size in shape)))
        start, stop, _ = slices[0].indices(shape[0])
        rows = self._read(Box.at((slice(start, stop), *(slice(0, size) for size in shape[1:]))))
        return rows[(slice(None), *slices[1:])]

    def _read(self, box: Box) -> Tensor:
        """Return a box of the tensor as it is stored, dequantized, in the shape that the model has."""
        raw = [self._reader(part, inside) for part, inside in self._stored.raw(box)]
        if self._stored.format is None:
            return raw[0].clone()
        out = torch.empty([part.stop - part.start for part in box.slices], dtype=self._dtype, device="cpu")
        self._stored.decode(raw, box, out)
        return out.transpose(-1, -2).contiguous() if self._is_transposed else out


def tensor_name(stored: str, header: Any) -> str:
    """Return the name of the tensor that a tensor of the files is a part of."""
    for suffix in SUFFIXES[1:]:
        name = stored.removesuffix(suffix)
        if name != stored and (suffix != "_scale_inv" or name in header):
            return name
    return stored


def _filter(layers: range, *, has_ends: bool) -> Callable[[str], bool]:
    """Return a function that says of a tensor's name whether the stage needs it."""

    def is_needed(name: str) -> bool:
        match = _layer_number(name)
        return has_ends if match is None else int(match[1]) in layers

    return is_needed
