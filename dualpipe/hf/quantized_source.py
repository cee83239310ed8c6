"""Read and dequantize a stage's weights from a checkpoint in FP8 (DeepSeek-V3) or MXFP4 (gpt-oss).

transformers needs extra packages to dequantize such checkpoints. This module reads them with the readers of this
library's own models, and presents them to transformers' loader as if they were stored in bfloat16.
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
    """Return True if the configuration describes a quantized checkpoint."""
    return getattr(config, "quantization_config", None) is not None


def read_dequantized(
    source: str | Path, config: Any, layers: range, *, has_ends: bool, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return the tensors of a stage by their names in the checkpoint; indexing a tensor reads it.

    source: folder, or name on the hub.
    layers: numbers of the stage's layers.
    has_ends: also return the tensors outside of layers, such as the embedding and the head.
    dtype: dtype of dequantized tensors; others keep their dtype.

    Raises ValueError for another quantization method, and for incomplete files.
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
    """Tensor of a checkpoint that indexing reads and, if it is quantized, dequantizes.

    Replaces a slice object of a safetensors file in transformers' loader, which indexes with slices only.
    """

    def __init__(self, reader: Reader, name: str, dtype: torch.dtype) -> None:
        stored = find_stored(reader.header, name, reader.block)
        assert stored is not None, "the name must come from the header"
        self._reader = reader
        self._stored = stored
        self._dtype = dtype
        # gpt-oss computes x W, but stores W transposed if it is in MXFP4.
        self._is_transposed = isinstance(stored, Mxfp4)

    def get_shape(self) -> list[int]:
        """Return the shape of the model's parameter."""
        shape = list(self._stored.shape)
        if self._is_transposed:
            shape[-2:] = reversed(shape[-2:])
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part of the tensor. Reads only the selected range of the first dimension, such as the experts."""
        slices = index if isinstance(index, tuple) else (index,)
        shape = tuple(self._stored.shape)
        if not shape or slices[0] is Ellipsis:
            return self._read(Box.from_slices(tuple(slice(0, size) for size in shape)))
        start, stop, _ = slices[0].indices(shape[0])
        rows = self._read(Box.from_slices((slice(start, stop), *(slice(0, size) for size in shape[1:]))))
        return rows[(slice(None), *slices[1:])]

    def _read(self, box: Box) -> Tensor:
        """Read a box of the stored tensor -> dequantized, in the layout of the model's parameter."""
        raw = [self._reader(part, part_box) for part, part_box in self._stored.raw(box)]
        if self._stored.format is None:
            return raw[0].clone()
        out = torch.empty([part.stop - part.start for part in box.slices], dtype=self._dtype, device="cpu")
        self._stored.decode(raw, box, out)
        return out.transpose(-1, -2).contiguous() if self._is_transposed else out


def tensor_name(stored: str, header: Any) -> str:
    """Return the name of the model's tensor that a stored tensor is a part of, such as its blocks or scales."""
    for suffix in SUFFIXES[1:]:
        name = stored.removesuffix(suffix)
        if name != stored and (suffix != "_scale_inv" or name in header):
            return name
    return stored


def _filter(layers: range, *, has_ends: bool) -> Callable[[str], bool]:
    """Return a predicate that is True for the names of the stage's tensors."""

    def is_needed(name: str) -> bool:
        match = _layer_number(name)
        return has_ends if match is None else int(match[1]) in layers

    return is_needed
