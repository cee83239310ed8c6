"""`dualpipe hf`: inspect a Hugging Face checkpoint, convert it to another dtype, import it, or export one of a run.

These commands run in one process. `import_hf` and `export_checkpoint` hold the whole model in host memory in float32.
For larger models, use `dualpipe train --init.from_hf` and `--export.to_hf`, where each rank holds its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from dualpipe.checkpoint.directory import find, is_checkpoint, latest, raise_none_complete, scan
from dualpipe.checkpoint.hub.files import CONFIG, StrPath
from dualpipe.checkpoint.hub.load import hub_dtypes, load_hf, open_hf
from dualpipe.checkpoint.hub.save import ModelPart, carried_tensors, save_hf, write_model
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
from dualpipe.runtime.dtypes import dtype_of, long_name
from dualpipe.runtime.errors import CheckFailed
from dualpipe.runtime.printing import format_bytes
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.storage import Location, RemotePath, StrLocation, as_location
from dualpipe.schedule.types import v_placement


def check(path: StrPath, mesh: Mesh, *, mtp: bool = False) -> Iterator[str]:
    """Yield lines about the contents of a checkpoint and the share of a rank. Reads headers only.

    Args:
        path: the checkpoint.
        mesh: sizes of the mesh to load it into. No job needs to run.
        mtp: for a run that trains layers for multi-token prediction.

    Raises:
        ValueError: there is no checkpoint, or it cannot be loaded into this mesh.
        CheckFailed: the checkpoint cannot be loaded; the message lists all problems.
    """
    config = _read_config(path, mtp)
    try:
        reader, tensors = open_hf(path, config)
    except ValueError as error:
        raise CheckFailed(str(error)) from error
    header = reader.header
    yield from describe_tensors(path, config.model_type, header)
    announced = len(config.carried_layers)
    if announced:
        mtp_header = carried_tensors(config, header)
        present = len({config.carried_layer(name) for name in mtp_header})
        size = format_bytes(sum(info.nbytes for info in mtp_header.values()))
        yield (f"{present} of {announced} layer{'s' * (announced > 1)} for multi-token prediction, "
               f"{len(mtp_header):,} tensors, {size}: trained with mtp.weight > 0, otherwise copied unchanged by an "
               "export")
    shares = [largest_share(config, mesh, place) for place in range(mesh.size("pp"))]
    bytes_read = max(sum(read_box.numel * header[name].dtype.itemsize for tensor, box in share.items()
                         for name, read_box in tensors[tensor].reads(box)) for share in shares)
    parameters = max(sum(box.numel for box in share.values()) for share in shares)
    yield (f"a rank of {describe_layout(mesh)} (two stages each, in a V) reads at most "
           f"{format_bytes(bytes_read)} and holds at most {parameters:,} parameters, {format_bytes(2 * parameters)} "
           "in bf16")
    yield "it can be loaded"


def describe_tensors(path: StrPath, family: str, header: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield lines about the tensors of a checkpoint: their number, files, sizes and dtypes."""
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
    """Return the sizes of a mesh as text, such as "pp 2, dp 1, ep 4"."""
    return ", ".join(f"{name} {mesh.size(name)}" for name in TRAFFIC if name != "cp" or mesh.size(name) > 1)


def largest_share(config: HubConfig, mesh: Mesh, place: int) -> dict[str, Box]:
    """Return the box of every tensor on the first rank at a position along "pp". No other rank there has a larger one.

    Tensors are sharded as by `shard_experts` and `shard`, with two stages per rank in a V. A tied head is part of the
    embedding.

    Args:
        config: the model.
        mesh: sizes of the mesh.
        place: the position, a pipeline rank.

    Raises:
        ValueError: the experts cannot be divided evenly.
    """
    pp = mesh.size("pp")
    ep = mesh.size("ep")
    expert_shards = mesh.size(*EXPERTS)  # ranks that the experts of one expert-parallel rank are sharded over
    numbers = tuple(number for number, rank in enumerate(v_placement(pp)) if rank == place)
    share: dict[str, Box] = {}
    for stage in meta_stages(config, 2 * pp, numbers):
        grouped = [module for module in stage.modules() if isinstance(module, GroupedLinear)]
        experts = {id(param) for module in grouped for param in module.parameters()}
        for name, tensor in stage.state_dict(keep_vars=True).items():
            shape = list(tensor.shape)
            if id(tensor) in experts and ep > 1:
                if shape[0] % ep:
                    raise ValueError(f"{shape[0]} experts cannot be divided evenly among {ep} expert-parallel ranks")
                shape[0] //= ep
                shard_dim = next((dim for dim in range(1, len(shape)) if shape[dim] % expert_shards == 0), 0)
                shape[shard_dim] = -(-shape[shard_dim] // expert_shards)
            elif isinstance(tensor, nn.Parameter) and shape:  # with ep 1, experts are sharded like other parameters
                shape[0] = -(-shape[0] // mesh.replicas)
            share[name] = Box.whole(shape)
    if config.tie_word_embeddings and "embed_tokens.weight" in share:
        share.pop("lm_head.weight", None)
    return share


def import_hf(source: StrPath, directory: StrLocation, *, mtp: bool = False) -> Location:
    """Write a Hugging Face checkpoint as step 0 of a run; return its path.

    Args:
        source: the Hugging Face checkpoint.
        directory: the checkpoint directory of the new run, or its URL.
        mtp: include its layers for multi-token prediction, for a run that trains them.

    Raises:
        ValueError: the source cannot be loaded (as in `load_hf`), lacks layers for multi-token prediction (as in
            `with_mtp`), or the directory has checkpoints of a later step. The run that saved those would start again
            from these weights and delete its own checkpoints over time.
    """
    checkpoints = scan(directory)
    if checkpoints.damaged or any(checkpoint.manifest.step for checkpoint in checkpoints.committed):
        raise ValueError(f"{directory} has checkpoints of a run; give a new directory")
    config = _read_config(source, mtp)
    stages = _stages(config)
    load_hf(stages, source, None, _plan(stages, torch.float32))
    # Recorded for an export: what the source has in float32 among narrower tensors is exported in float32.
    plan = _plan(stages, torch.bfloat16, hub_dtypes(source, config))
    return save(directory, training_state(stages), step=0, plan=plan, config={"model": config.to_dict()})


def export(source: StrPath, target: StrPath, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Convert a Hugging Face checkpoint to another dtype and its canonical form.

    Weights are dequantized, and experts are separate if the family's are. Tensors in float32 among narrower tensors
    stay in float32. One tensor at a time is in memory.

    Args:
        source: the checkpoint to convert.
        target: a new directory.
        dtype: dtype of the new tensors.
        max_shard_bytes: most bytes of tensors in a file.

    Raises:
        ValueError: the source cannot be loaded, or the target exists. Nothing is left behind.
    """
    config = read_config(source)
    _, tensors = open_hf(source, config)
    plan = _plan(_stages(config), dtype, {name: tensor.dtype for name, tensor in tensors.items()})
    parts = {name: ModelPart(tensor.shape, Box.whole(tensor.shape), tensor) for name, tensor in tensors.items()}
    write_model(RankSync(None), config, parts, target, plan, source, max_shard_bytes)


def export_checkpoint(
    source: StrLocation, target: StrPath, dtype: torch.dtype, max_shard_bytes: int, hub: StrPath | None = None
) -> None:
    """Write a checkpoint of a run, or the newest one in a directory, as a Hugging Face checkpoint.

    Layers for multi-token prediction are included if they were trained.

    Args:
        source: the checkpoint or directory, or the URL of either.
        target: a new directory.
        dtype: dtype of the new tensors, except those that the run kept in float32 while it computed in a narrower
            dtype.
        max_shard_bytes: most bytes of tensors in a file.
        hub: the checkpoint that the model was made from, the `source` of `save_hf`. Checkpoints of runs do not record
            its path, because loading one reads nothing outside of it.

    Raises:
        ValueError: the checkpoint does not record its model or holds adapters alone, or the target exists.
    """
    checkpoints = find(source)
    if not checkpoints.committed:
        raise_none_complete(source, checkpoints.damaged.values())
    newest = checkpoints.committed[0]
    base = (newest.manifest.extra or {}).get("base")
    if base:
        raise ValueError(f"{newest.path} has adapters of the base {base.get('path')!r} alone; start its run again with "
                         "export.to_hf, and for a whole model export.merged = true: a complete run only exports")
    model = _model_of(newest)
    stages = _stages(model)
    for stage in stages:
        materialize(stage, "cpu", _plan(stages, torch.float32))
    loaded = load(source, training_state(stages), allow=("optimizer/*", "routers/*"))
    if _model_of(Checkpoint(loaded.path, loaded.manifest)) != model:
        raise ValueError(f"{loaded.path} has another model than {newest.path}; give one of them")
    saved_dtypes = {name: dtype_of(uses["save"]) for name, uses in loaded.manifest.dtypes.items()}
    save_hf(stages, target, None, _plan(stages, dtype, saved_dtypes), source=hub, max_shard_bytes=max_shard_bytes)


def _model_of(checkpoint: Checkpoint) -> HubConfig:
    """Return the model of a checkpoint, with the layers for multi-token prediction that its tensors include."""
    path, manifest = checkpoint
    if not isinstance(manifest.config, dict) or "model" not in manifest.config:
        raise ValueError(f"{path} does not record its model; give a checkpoint that `dualpipe train` saved")
    model = config_from_dict(manifest.config["model"])
    return replace(model, mtp_depth=model.mtp_depth_of(manifest.dtypes))


def is_native_checkpoint(path: StrLocation) -> bool:
    """Return True if `path` is a checkpoint of this library, or a directory of such checkpoints, or any URL."""
    path = as_location(path)
    if isinstance(path, RemotePath):
        return True  # Hugging Face's checkpoints are read from local directories only
    return path.is_dir() and not (path / CONFIG).exists() and (is_checkpoint(path) or latest(path) is not None)


def _read_config(path: StrPath, mtp: bool) -> HubConfig:
    """Return the model of a checkpoint, with trained layers for multi-token prediction if `mtp`."""
    return read_config(path).with_mtp() if mtp else read_config(path)


def _stages(config: HubConfig) -> list[Stage]:
    """Return the model as a single stage on meta."""
    return build_on_meta(lambda: build_stages(config, 1))


def _plan(
    stages: list[Stage], dtype: torch.dtype, source_dtypes: Mapping[str, torch.dtype] | None = None
) -> DTypePlan:
    """Return the dtype plan of an unsharded model."""
    return resolve_dtypes(stages, DTypePolicy(dtype, torch.float32, dtype), source_dtypes, sharded=False)
