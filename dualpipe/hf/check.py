"""`dualpipe hf check` for a model of transformers: can its stages be loaded, and what does a rank hold of them?"""

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
from dualpipe.runtime.byte_sizes import format_bytes
from dualpipe.schedule.types import v_placement

_SHOWN = 8  # names of tensors that are missing


def check_checkpoint(path: str | Path, model: TransformersModel, mesh: Mesh) -> Iterator[str]:
    """Yield lines about a checkpoint: what it holds, and the share of a rank. Reads headers only.

    mesh: need not run. Raises ValueError, naming them, for tensors that the checkpoint lacks, and for a mesh that the
    model cannot be cut for.
    """
    header = read_headers(path)
    yield from describe_tensors(path, f"{model.model_type} (transformers' implementation)", header)
    missing = _missing(header, model)
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(f"the checkpoint {str(path)!r} does not fit the model ({model.model_type}): it lacks "
                         f"{', '.join(missing[:_SHOWN])}{more}")
    if mesh.size("cp") > 1:
        raise ValueError(f"cp {mesh.size('cp')}: the attention of transformers does not share sequences between ranks; "
                         "set it to 1")
    if model.num_experts % mesh.size("ep"):
        raise ValueError(f"{model.num_experts} experts cannot be divided evenly among {mesh.size('ep')} "
                         "expert-parallel ranks")
    placement = v_placement(mesh.size("pp"))
    stages = model.meta_stages(len(placement))
    held = max(sum(_held(stages[number], mesh) for number, rank in enumerate(placement) if rank == place)
               for place in range(mesh.size("pp")))
    yield (f"a rank of {describe_layout(mesh)} (two stages each, in a V) holds at most {held:,} parameters, "
           f"{format_bytes(2 * held)} in bf16")
    yield "it can be loaded"


def _missing(header: Mapping[str, TensorHeader], model: TransformersModel) -> list[str]:
    """Return the names of the model's tensors that transformers would make of none of those in a checkpoint."""
    causal_lm = model.causal_lm
    expected = causal_lm.state_dict()
    conversions = get_model_conversion_mapping(causal_lm)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    targets = {target: converter.target_patterns for converter in converters for target in converter.target_patterns}
    found: set[str] = set()
    for stored in dict.fromkeys(tensor_name(name, header) for name in header):
        name, source = rename_source_key(stored, renamings, converters, causal_lm.base_model_prefix, expected)
        found.add(name if name in expected else stored)
        if source is not None:  # a converter may make several of one
            for target, siblings in targets.items():
                if target in name:
                    found.update(name.replace(target, sibling) for sibling in siblings)
    if model.is_tied:
        found.add("lm_head.weight")
    return [name for name in expected if name not in found]


def _held(stage: nn.Module, mesh: Mesh) -> int:
    """Return the number of parameters of a stage on a rank."""
    dense, experts = parameter_sizes(stage, mesh.size("ep"))
    return -(-dense // mesh.replicas) + -(-experts // mesh.size(*EXPERTS))
