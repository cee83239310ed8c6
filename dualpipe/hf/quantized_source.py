"""Read a stage's weights of a checkpoint in FP8 (DeepSeek-V3) or MXFP4 (gpt-oss), and dequantize them.

transformers dequantizes such checkpoints with packages that it does not bring along; here they are read as for this
library's own models, and transformers gets them as if they had been stored in bfloat16.
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
) -> dict[str, Tensor]:
    """Return the tensors of a stage under the names that the checkpoint has, those in FP8 or MXFP4 in `dtype`.

    layers: those to read; has_ends: whether to read what is in no layer, too. Raises ValueError for other forms of
    quantization, and for files that are incomplete.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    quantization = config.quantization_config
    described = quantization if isinstance(quantization, dict) else quantization.to_dict()
    block = fp8_block({"quantization_config": described})
    header = read_headers(folder)
    reader = Reader(folder, header, block)
    is_needed = _filter(layers, has_ends=has_ends)
    tensors = {}
    for name in dict.fromkeys(tensor_name(stored, header) for stored in header):
        if is_needed(name):
            tensors[name] = _read(reader, name, dtype)
    return tensors


def tensor_name(stored: str, header: Any) -> str:
    """Return the name of the tensor that a tensor of the files is a part of."""
    for suffix in SUFFIXES[1:]:
        name = stored.removesuffix(suffix)
        if name != stored and (suffix != "_scale_inv" or name in header):
            return name
    return stored


def _filter(layers: range, *, has_ends: bool) -> Callable[[str], bool]:
    """Return what says of a name whether the stage has the tensor."""

    def is_needed(name: str) -> bool:
        found = _layer_number(name)
        return has_ends if found is None else int(found[1]) in layers

    return is_needed


def _read(reader: Reader, name: str, dtype: torch.dtype) -> Tensor:
    """Return a whole tensor, dequantized where it is quantized."""
    stored = find_stored(reader.header, name, reader.block)
    assert stored is not None, "a name comes from the header"
    box = Box.at(tuple(slice(0, size) for size in stored.shape))
    raw = [reader(part, inside) for part, inside in stored.raw(box)]
    if stored.format is None:
        return raw[0].clone()
    out = torch.empty(stored.shape, dtype=dtype, device="cpu")
    stored.decode(raw, box, out)
    # gpt-oss multiplies rows by its matrices from the right, and stores those in MXFP4 the other way.
    return out.transpose(-1, -2).contiguous() if isinstance(stored, Mxfp4) else out
