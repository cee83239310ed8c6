"""Writing quantized weights as Hugging Face's quantized checkpoints have them: FP8 blocks, and MXFP4 of gpt-oss.

Their elements and scales go from block rows to the files as they are. `load.HubTensor.quantized` is the way in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dualpipe.checkpoint.hub.load import cut_through, model_shapes, upright
from dualpipe.checkpoint.hub.stored_formats import Fp8, Mxfp4, Stored
from dualpipe.checkpoint.tensors import Box
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.models import HubConfig
from dualpipe.models.hub import HubTensorPart, whole
from dualpipe.models.stages import meta_stages
from dualpipe.parallel import DTypePlan
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import quantizable


def check_quantized(config: HubConfig, plan: DTypePlan) -> None:
    """Raise ValueError for a plan that stores weights as the checkpoints of their family do not, or none as they do."""
    shapes, theirs = model_shapes(config), FORMATS[config.quantized_as]
    formats = {name: each.stored for name, each in plan.tensors.items() if isinstance(each.stored, Format)}
    if not formats:
        raise ValueError(f"nothing can be exported quantized: the dtype plan stores no weight in {theirs}; give it a "
                         f"rule with storage {str(theirs)!r}, or leave out quantized (export.quantized)")
    for name, format in formats.items():
        if (format.bits, format.block, format.scale) != (theirs.bits, theirs.block, theirs.scale):
            problem = f"it is in {format}, and checkpoints of {config.model_type} are in {theirs}"
        elif theirs.bits == 4 and len(shapes[name]) == 2:
            problem = f"in checkpoints of {config.model_type}, experts alone are in {theirs}"
        else:
            problem = cut_through(config.hub_parts(name, shapes[name])[0], shapes[name], format)
        if problem:
            raise ValueError(f"{name} cannot be exported quantized: {problem}; store it otherwise, or leave out "
                             "quantized (export.quantized), which gives numbers")


def forms(
    config: HubConfig, name: str, shape: Sequence[int], dtype: torch.dtype | Format
) -> Iterator[tuple[HubTensorPart, Stored]]:
    """The hub's tensors that one of ours is written as, and how each is stored; dtype: or the format of its blocks."""
    copies = [whole(copy, shape) for copy, ours in config.hub_copies.items() if ours == name]
    for part in (*config.hub_parts(name, shape)[0], *copies):
        if isinstance(dtype, torch.dtype):
            yield part, Stored(part.name, part.shape, dtype)
        elif dtype.bits == 8:
            yield part, Fp8(part.name, part.shape)
        else:
            yield upright(part), Mxfp4(part.name, upright(part).shape)


def unpack(weight: QuantizedTensor, box: Box) -> tuple[Tensor, Tensor]:
    """Elements (M, N, bytes of a row) uint8 and scales (M, block rows, blocks across) of whole blocks, on the host."""
    part, format = cast(QuantizedTensor, weight[box.slices]), weight.format
    data, (rows, columns) = part.block_rows.cpu(), part.shape[-2:]
    return format.elements(data, columns).flatten(1, 2)[:, :rows], format.scales(data, columns)


def quantization_config(config: HubConfig, written: Collection[str], source: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of blocks that are written: what `source` says, and which layers have none.

    written: the names of all tensors; without blocks among them there is nothing to say.
    """
    is_fp8 = config.quantized_as != "mxfp4"
    scales = "_scale_inv" if is_fp8 else "_scales"
    names = [part.name for each in quantizable(meta_stages(config)[0])
             for part in config.hub_parts(each.name, each.param.shape)[0]]
    plain = [name for name in names if name + scales not in written]
    if len(plain) == len(names):
        return {}
    form = {"quant_method": "mxfp4"} if not is_fp8 else {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    told = dict(source) if source.get("quant_method") == form["quant_method"] else {}
    layers = [re.sub(r"(\.experts)\..*|\.weight$", r"\1", name) for name in plain]
    carried = {config.carried_layer(name): None for name in written}
    with_blocks = {config.carried_layer(name) for name in written if name.endswith(scales)}
    layers += [f"model.layers.{layer}" for layer in carried if layer not in (None, *with_blocks)]
    # Readers that are told of some quantize the head too, unless it is among them.
    skipped = told.pop("modules_to_not_convert", None) or (["lm_head"] if layers else [])
    return told | form | ({"modules_to_not_convert": list(dict.fromkeys((*skipped, *layers)))} if skipped else {})
