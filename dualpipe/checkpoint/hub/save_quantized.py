"""Write quantized weights in the storage forms of Hugging Face checkpoints: FP8 blocks, and MXFP4 of gpt-oss.

Elements and scales are copied from block rows to the files unchanged. `load.HubTensor.quantized` is the way back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dualpipe.checkpoint.hub.load import find_cut_block, model_shapes, mxfp4_part
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
    """Check that a plan stores weights in the format of the family's quantized checkpoints.

    Raises:
        ValueError: the plan stores no weight in a format, or one that such checkpoints cannot hold.
    """
    shapes = model_shapes(config)
    hub_format = FORMATS[config.quantized_as]
    formats = {name: dtypes.stored for name, dtypes in plan.tensors.items() if isinstance(dtypes.stored, Format)}
    if not formats:
        raise ValueError(f"nothing can be exported quantized: the dtype plan stores no weight in {hub_format}; give it "
                         f"a rule with storage {str(hub_format)!r}, or leave out quantized (export.quantized)")
    for name, format in formats.items():
        problem = _quantized_problem(config, name, shapes[name], format, hub_format)
        if problem:
            raise ValueError(f"{name} cannot be exported quantized: {problem}; store it otherwise, or leave out "
                             "quantized (export.quantized) to export plain values")


def _quantized_problem(
    config: HubConfig, name: str, shape: tuple[int, ...], format: Format, hub_format: Format
) -> str:
    """Return why a weight in a format cannot be written to a quantized checkpoint, or "" if it can."""
    if (format.bits, format.block, format.scale) != (hub_format.bits, hub_format.block, hub_format.scale):
        return f"it is in {format}, and checkpoints of {config.model_type} are in {hub_format}"
    if hub_format.bits == 4 and len(shape) == 2:
        return f"in checkpoints of {config.model_type}, experts alone are in {hub_format}"
    return find_cut_block(config.hub_parts(name, shape)[0], shape, format)


def storage_forms(
    config: HubConfig, name: str, shape: Sequence[int], dtype: torch.dtype | Format
) -> Iterator[tuple[HubTensorPart, Stored]]:
    """Yield the hub tensors that a tensor of the model is written as, and the storage form of each.

    Args:
        config: the model.
        name: name of the tensor in the model.
        shape: shape of the tensor in the model.
        dtype: dtype of the values in the files, or the format of their blocks.
    """
    copies = [whole(copy, shape) for copy, original in config.hub_copies.items() if original == name]
    for part in (*config.hub_parts(name, shape)[0], *copies):
        if isinstance(dtype, torch.dtype):
            yield part, Stored(part.name, part.shape, dtype)
        elif dtype.bits == 8:
            yield part, Fp8(part.name, part.shape)
        else:
            part = mxfp4_part(part)
            yield part, Mxfp4(part.name, part.shape)


def unpack_blocks(weight: QuantizedTensor, box: Box) -> tuple[Tensor, Tensor]:
    """Return elements and scales of a box of whole blocks, on the host.

    Elements are uint8 (M, N, bytes of a row), and scales (M, block rows, blocks in a block row).
    """
    part = cast(QuantizedTensor, weight[box.slices])
    format = weight.format
    data = part.block_rows.cpu()
    rows, columns = part.shape[-2:]
    elements = format.elements(data, columns).flatten(1, 2)[:, :rows]
    return elements, format.scales(data, columns)


def quantization_config(config: HubConfig, written: Collection[str], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "quantization_config" of config.json: which layers have blocks, and in which form.

    Args:
        config: the model.
        written: names of all tensors of the checkpoint.
        source: "quantization_config" of the source checkpoint. Its other entries are kept if its method is the same.

    Returns an empty dict if no weight has blocks.
    """
    is_fp8 = config.quantized_as != "mxfp4"
    scales_suffix = "_scale_inv" if is_fp8 else "_scales"
    weights = [part.name for weight in quantizable(meta_stages(config)[0])
               for part in config.hub_parts(weight.name, weight.param.shape)[0]]
    plain = [name for name in weights if name + scales_suffix not in written]
    if len(plain) == len(weights):
        return {}
    form: dict[str, Any] = {"quant_method": "mxfp4"}
    if is_fp8:
        form = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    result = dict(source) if source.get("quant_method") == form["quant_method"] else {}
    plain_modules = [re.sub(r"(\.experts)\..*|\.weight$", r"\1", name) for name in plain]
    plain_modules += _plain_carried_layers(config, written, scales_suffix)
    # Other libraries leave the head as it is if there is no list, but quantize it if there is one without the head.
    skipped = result.pop("modules_to_not_convert", None) or (["lm_head"] if plain_modules else [])
    result |= form
    if skipped:
        result["modules_to_not_convert"] = list(dict.fromkeys((*skipped, *plain_modules)))
    return result


def _plain_carried_layers(config: HubConfig, written: Collection[str], scales_suffix: str) -> list[str]:
    """Return the carried layers for multi-token prediction that have no blocks, as module names."""
    carried = dict.fromkeys(config.carried_layer(name) for name in written)
    with_blocks = {config.carried_layer(name) for name in written if name.endswith(scales_suffix)}
    return [f"model.layers.{layer}" for layer in carried if layer is not None and layer not in with_blocks]
