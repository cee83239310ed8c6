"""`dualpipe hf`: look at a Hugging Face checkpoint, write it again in another dtype, or take it in and out of a run.

In one process. `import_hf` and `export_checkpoint` have the whole model in host memory, in float32: larger ones come
and go by `dualpipe train --init.from_hf` and `--export.to_hf`, where each rank has its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dualpipe.checkpoint.directory import find, is_checkpoint, latest, none_whole, scan
from dualpipe.checkpoint.hub.files import CONFIG, StrPath
from dualpipe.checkpoint.hub.load import hub_dtypes, load_hf, open_hf
from dualpipe.checkpoint.hub.save import carried, save_hf, write_model
from dualpipe.checkpoint.load import load
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.checkpoint.save import save
from dualpipe.checkpoint.state import training_state
from dualpipe.checkpoint.tensors import Box, TensorHeader
from dualpipe.models import HubConfig, Stage, build_stages, config_from_dict, read_config
from dualpipe.models.stages import meta_stages
from dualpipe.nn import GroupedLinear
from dualpipe.parallel import DTypePlan, DTypePolicy, resolve_dtypes
from dualpipe.parallel.fsdp.materialize import build_on_meta, materialize
from dualpipe.parallel.mesh import EXPERTS, TRAFFIC, Mesh
from dualpipe.runtime.byte_sizes import format_bytes
from dualpipe.runtime.dtypes import dtype_of, long_name
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule.types import v_placement


def check(path: StrPath, mesh: Mesh, *, mtp: bool = False) -> Iterator[str]:
    """What a checkpoint holds and what of it a rank would read, as lines of text. Reads headers only.

    `mesh`: it need not run. `mtp`: for a run that trains layers for multi-token prediction. Raises `ValueError`, with
    everything that is wrong, for a checkpoint that cannot be loaded, or not into this mesh.
    """
    config = _read_config(path, mtp)
    reader, tensors = open_hf(path, config)
    header = reader.header
    yield from describe_tensors(path, config.model_type, header)
    if layers := len(config.carried_layers):
        kept = carried(config, header)
        found = len({config.carried_layer(name) for name in kept})
        yield (f"{found} of {layers} layer{'s' * (layers > 1)} for multi-token prediction, {len(kept):,} tensors, "
               f"{format_bytes(sum(info.nbytes for info in kept.values()))}: trained with mtp.weight > 0, else "
               "carried as they are by an export")
    shares = [largest_share(config, mesh, place) for place in range(mesh.size("pp"))]
    read = max(sum(box.numel * header[name].dtype.itemsize for ours, wanted in share.items()
                   for name, box in tensors[ours].reads(wanted)) for share in shares)
    held = max(sum(box.numel for box in share.values()) for share in shares)
    yield (f"a rank of {describe_layout(mesh)} (two stages each, in a V) reads at most "
           f"{format_bytes(read)} and holds at most {held:,} parameters, {format_bytes(2 * held)} in bf16")
    yield "it can be loaded"


def describe_tensors(path: StrPath, family: str, header: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield lines about the tensors of a checkpoint: how many there are, in how many files, and of which dtypes."""
    files = len({info.file for info in header.values()})
    counts = Counter(info.dtype for info in header.values())
    sizes = Counter[torch.dtype]()
    for info in header.values():
        sizes[info.dtype] += info.nbytes
    yield (f"{path}: {family}, {len(header):,} tensors in {files:,} file{'s' * (files > 1)}, "
           f"{format_bytes(sizes.total())}")
    for dtype, size in sizes.most_common():
        yield f"  {long_name(dtype):14} {counts[dtype]:>9,} tensors {format_bytes(size):>10}"


def describe_layout(mesh: Mesh) -> str:
    """Return the sizes of a mesh in words, such as "pp 2, dp 1, ep 4"."""
    return ", ".join(f"{name} {mesh.size(name)}" for name in TRAFFIC if name != "cp" or mesh.size(name) > 1)


def largest_share(config: HubConfig, mesh: Mesh, place: int) -> dict[str, Box]:
    """The part of every tensor of a pipeline rank that its first rank of the other dimensions holds: none has a larger.

    As `shard_experts` and `shard` cut them; two stages a rank in a V, a tied head only as the embedding. Raises
    `ValueError` for experts that cannot be divided evenly.
    """
    pp, ep, sharing = mesh.size("pp"), mesh.size("ep"), mesh.size(*EXPERTS)
    numbers = tuple(number for number, rank in enumerate(v_placement(pp)) if rank == place)
    found: dict[str, Box] = {}
    for stage in meta_stages(config, 2 * pp, numbers):
        grouped = [module for module in stage.modules() if isinstance(module, GroupedLinear)]
        experts = {id(param) for module in grouped for param in module.parameters()}
        for name, tensor in stage.state_dict(keep_vars=True).items():
            shape = list(tensor.shape)
            if id(tensor) in experts and ep > 1:
                if shape[0] % ep:
                    raise ValueError(f"{shape[0]} experts cannot be divided evenly among {ep} expert-parallel ranks")
                shape[0] //= ep
                divided = next((dim for dim in range(1, len(shape)) if shape[dim] % sharing == 0), 0)
                shape[divided] = -(-shape[divided] // sharing)
            elif isinstance(tensor, nn.Parameter) and shape:  # of one expert-parallel rank, experts are as any other
                shape[0] = -(-shape[0] // mesh.replicas)
            found[name] = Box.whole(shape)
    if config.tie_word_embeddings and "embed_tokens.weight" in found:
        found.pop("lm_head.weight", None)
    return found


def import_hf(source: StrPath, directory: StrPath, *, mtp: bool = False) -> Path:
    """Write a Hugging Face checkpoint as step 0 of a run; returns its path.

    mtp: with its layers for multi-token prediction, for a run that trains them. Raises ValueError as `load_hf` does, as
    `with_mtp` does, and for the directory of a run that is further: it would start again from these weights, and delete
    its own in time.
    """
    found = scan(directory)
    if found.damaged or any(each.manifest.step for each in found.committed):
        raise ValueError(f"{directory} has checkpoints of a run; give a new directory")
    config = _read_config(source, mtp)
    stages = _stages(config)
    load_hf(stages, source, None, _plan(stages, torch.float32))
    # Recorded for an export: what the source keeps in float32 among narrower tensors stays so.
    plan = _plan(stages, torch.bfloat16, hub_dtypes(source, config))
    return save(directory, training_state(stages), step=0, plan=plan, config={"model": config.to_dict()})


def export(source: StrPath, target: StrPath, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write a Hugging Face checkpoint again, in `dtype` and one canonical form: dequantized, experts apart where the
    family's are.

    What is float32 among narrower tensors stays so. One tensor at a time is in memory. Raises `ValueError` for a
    checkpoint that cannot be loaded and for a target that exists; nothing is left behind.
    """
    config = read_config(source)
    _, tensors = open_hf(source, config)
    plan = _plan(_stages(config), dtype, {name: tensor.dtype for name, tensor in tensors.items()})
    parts = {name: (tensor.shape, Box.whole(tensor.shape), tensor) for name, tensor in tensors.items()}
    write_model(RankSync(None), config, parts, target, plan, source, max_shard_bytes)


def export_checkpoint(
    source: StrPath, target: StrPath, dtype: torch.dtype, max_shard_bytes: int, hub: StrPath | None = None
) -> None:
    """Write a checkpoint of a run, or the newest in a directory of them, in Hugging Face's form.

    Tensors are in `dtype`, but for those that the run kept in float32 while it computed in less; layers for multi-token
    prediction are among them where they were trained. `hub`: what the model was made from, the `source` of `save_hf`;
    it is not recorded, so that nothing outside of it is read. Raises ValueError for a checkpoint that does not say what
    model it is of, and for a target that exists.
    """
    found = find(source)
    if not found.committed:
        none_whole(source, found.damaged.values())
    model = _model_of(found.committed[0])
    stages = _stages(model)
    for stage in stages:
        materialize(stage, "cpu", _plan(stages, torch.float32))
    loaded = load(source, training_state(stages), allow=("optimizer/*", "routers/*"))
    if _model_of(Checkpoint(loaded.path, loaded.manifest)) != model:
        raise ValueError(f"{loaded.path} is of another model than {found.committed[0].path}; give one of them")
    kept = {name: dtype_of(of["save"]) for name, of in loaded.manifest.dtypes.items()}
    save_hf(stages, target, None, _plan(stages, dtype, kept), source=hub, max_shard_bytes=max_shard_bytes)


def _model_of(checkpoint: Checkpoint) -> HubConfig:
    """The model of a checkpoint, by its tensors' names with the layers for multi-token prediction that it has."""
    path, manifest = checkpoint
    if not isinstance(manifest.config, dict) or "model" not in manifest.config:
        raise ValueError(f"{path} does not say what model it is of; it was not saved by `dualpipe train`")
    model = config_from_dict(manifest.config["model"])
    return replace(model, mtp_depth=model.mtp_depth_of(manifest.dtypes))


def is_of_a_run(path: StrPath) -> bool:
    """Return True if it is a checkpoint of this library, or a directory of them."""
    path = Path(path)
    return path.is_dir() and not (path / CONFIG).exists() and (is_checkpoint(path) or latest(path) is not None)


def _read_config(path: StrPath, mtp: bool) -> HubConfig:
    return read_config(path).with_mtp() if mtp else read_config(path)


def _stages(config: HubConfig) -> list[Stage]:
    return build_on_meta(lambda: build_stages(config, 1))


def _plan(stages: list[Stage], dtype: torch.dtype, kept: Mapping[str, torch.dtype] | None = None) -> DTypePlan:
    return resolve_dtypes(stages, DTypePolicy(dtype, torch.float32, dtype), kept, sharded=False)
