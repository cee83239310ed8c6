"""`dualpipe hf check` for models of transformers: check a checkpoint's tensors and report a rank's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from dualpipe.checkpoint.hub.commands import describe_layout, describe_tensors
from dualpipe.checkpoint.hub.files import read_headers
from dualpipe.checkpoint.tensors import TensorHeader
from dualpipe.hf.model import TransformersModel
from dualpipe.hf.quantized_source import tensor_name
from dualpipe.parallel.experts.dispatcher import parameter_sizes
from dualpipe.parallel.mesh import EXPERTS, Mesh
from dualpipe.runtime.errors import CheckFailed
from dualpipe.runtime.printing import format_bytes
from dualpipe.schedule.types import v_placement

_MAX_SHOWN_NAMES = 8  # of missing tensors, in the error message


def check_checkpoint(path: str | Path, model: TransformersModel, mesh: Mesh) -> Iterator[str]:
    """Yield lines that describe a checkpoint: its contents, and the largest share of a rank. Reads headers only.

    mesh: sizes only; needs no process group.

    Raises CheckFailed if files cannot be read or tensors are missing, which the message names, and ValueError if the
    model cannot be cut for the mesh.
    """
    try:
        header = read_headers(path)
    except ValueError as error:
        raise CheckFailed(str(error)) from error
    yield from describe_tensors(path, f"{model.model_type} (transformers' implementation)", header)
    missing = _missing_tensors(header, model)
    if missing:
        num_hidden = len(missing) - _MAX_SHOWN_NAMES
        more = f" and {num_hidden} more" if num_hidden > 0 else ""
        raise CheckFailed(f"the checkpoint {str(path)!r} does not fit the model ({model.model_type}): it lacks "
                          f"{', '.join(missing[:_MAX_SHOWN_NAMES])}{more}")
    if mesh.size("cp") > 1:
        raise ValueError(f"cp {mesh.size('cp')}: the attention of transformers does not share sequences between ranks; "
                         "set it to 1")
    model.check_expert_division(mesh.size("ep"))
    num_parameters = _max_parameters_per_rank(model, mesh)
    yield (f"a rank of {describe_layout(mesh)} (two stages each, in a V) holds at most {num_parameters:,} parameters, "
           f"{format_bytes(2 * num_parameters)} in bf16")
    yield "it can be loaded"


def _missing_tensors(header: Mapping[str, TensorHeader], model: TransformersModel) -> list[str]:
    """Return the names of the model's tensors that transformers cannot make from the tensors of a checkpoint."""
    causal_lm = model.causal_lm
    expected = causal_lm.state_dict()
    conversions = get_model_conversion_mapping(causal_lm)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    targets = {target: converter.target_patterns for converter in converters for target in converter.target_patterns}
    available: set[str] = set()
    for stored in dict.fromkeys(tensor_name(name, header) for name in header):
        name, source = rename_source_key(stored, renamings, converters, causal_lm.base_model_prefix, expected)
        available.add(name if name in expected else stored)
        if source is not None:  # a converter may make several tensors from one
            for target, siblings in targets.items():
                if target in name:
                    available.update(name.replace(target, sibling) for sibling in siblings)
    ends = {"lm_head.weight", f"{model.name_prefix}embed_tokens.weight"}
    if model.is_tied and available & ends:
        available |= ends
    return [name for name in expected if name not in available]


def _max_parameters_per_rank(model: TransformersModel, mesh: Mesh) -> int:
    """Return the largest number of parameters that a rank stores, with the stages placed in a V."""
    placement = v_placement(mesh.size("pp"))
    stages = model.meta_stages(len(placement))
    totals = [0] * mesh.size("pp")
    for stage, rank in zip(stages, placement):
        totals[rank] += _local_parameters(stage, mesh)
    return max(totals)


def _local_parameters(stage: nn.Module, mesh: Mesh) -> int:
    """Return the number of a stage's parameters on one of the ranks that it is sharded over, rounded up."""
    dense, experts = parameter_sizes(stage, mesh.size("ep"))
    return -(-dense // mesh.replicas) + -(-experts // mesh.size(*EXPERTS))
