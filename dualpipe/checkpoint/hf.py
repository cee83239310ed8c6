"""Loading a Hugging Face checkpoint into the stages of a rank, each rank its own part.

    config = read_config(path)
    stages = build_on_meta(lambda: build_stages(config, 2 * pp, only=...))
    plan = resolve_dtypes(stages, policy, source_dtypes=hub_dtypes(path, config))
    ... shard_experts and shard, on meta ...
    load_hf(stages, path, mesh, plan)

Rank 0 reads all headers, checks them and tells the others; every rank then opens the files that it needs, and only when
all could do so are parameters filled. See `hub_plan` for who reads what, and `hf_save` for the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.hub_files import CONFIG, Reader, TensorInfo, read_header, read_json
from dualpipe.checkpoint.hub_plan import Origin, check_header, find_origins
from dualpipe.checkpoint.quantized import At, Plain, fp8_block
from dualpipe.models import HubConfig
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.materialize import check_materialize, materialize
from dualpipe.ranks import RankSync


class Opened(NamedTuple):
    """A checkpoint that fits its model."""

    header: dict[str, TensorInfo]
    block: tuple[int, int] | None  # rows and columns that share a scale, in FP8


def load_hf(
    stages: Sequence[nn.Module],
    path: str | PathLike[str],
    mesh: DeviceMesh | None,
    plan: DTypePlan,
    *,
    device: torch.device | str | None = None,
    param_device: torch.device | str | None = None,
) -> int:
    """Fill the stages of this rank from a directory with `config.json` and safetensors; returns the bytes it has read.

    Called by all ranks of `mesh` (from `build_mesh`) together, which find the same files at `path`, or by one process
    with None. The stages are on meta, sharded or not. Each rank reads the byte ranges of its stages, its experts and
    its shards, one parameter at a time: that is the memory it takes on top. Experts may be stacked or apart on disk,
    and stored in MXFP4 or FP8 (`quantized`). Parameters get the dtypes `plan.of(name).storage`; FP8, computed in
    float32, is rounded to it once. Tied tensors of one stage are read once, of two stages twice.

    `device`: default the mesh's, or the CPU; `param_device` as for `materialize`.

    Raises, on every rank:
        ValueError: before anything is changed: files that are missing, cut short, no safetensors or outside the
            directory; tensors that are missing, unexpected, misshapen, integers or lack their scales; values that the
            plan's dtype would round. A checkpoint of another model type.
        RuntimeError: reading failed on some rank after all that, as when a disk fails. The stages are not usable then:
            what was not read is NaN.
    """
    ranks = RankSync.of_mesh(mesh)
    device = _device(mesh) if device is None else device
    config = ranks.agree(lambda: config_of(stages))
    opened = ranks.first(lambda: open_hf(path, config)[0])
    reader = Reader(path, opened.header)

    def prepare() -> list[dict[str, HubTensor]]:
        sources = [_source(stage, opened, reader) for stage in stages]
        reader.check({name for source in sources for tensor in source.values() for name in tensor.files_have})
        for stage, source in zip(stages, sources):
            check_materialize(stage, device, plan, source=source)
        return sources

    sources = ranks.agree(prepare)

    def fill() -> None:
        for stage, source in zip(stages, sources):
            materialize(stage, device, plan, source=source, param_device=param_device)

    ranks.agree(fill)
    return reader.bytes_read


def hub_dtypes(path: str | PathLike[str], config: HubConfig) -> dict[str, torch.dtype]:
    """The dtypes of a checkpoint's tensors by the model's names, for `resolve_dtypes`; bfloat16 for quantized ones."""
    return {name: origin.dtype for name, origin in open_hf(path, config)[1].items()}


def open_hf(path: str | PathLike[str], config: HubConfig) -> tuple[Opened, dict[str, Origin]]:
    """Read all headers, and find every tensor of ours in them; raises `ValueError` as `load_hf` does."""
    hub = read_json(path, CONFIG)
    if hub.get("model_type") != config.model_type:
        raise ValueError(f"{path} holds a {hub.get('model_type')!r} model; the stages are {config.model_type!r}")
    opened = Opened(read_header(path), fp8_block(hub))
    return opened, check_header(config, *opened)


class HubTensor:
    """A tensor of ours in a checkpoint: a `Sliceable`, which reads the part that it is indexed with."""

    def __init__(self, origin: Origin, reader: Reader) -> None:
        self.shape, self.dtype = origin.shape, origin.dtype
        self._origin, self._reader = origin, reader

    @property
    def files_have(self) -> set[str]:
        """The names of the tensors in the files that it is made of."""
        return {name for stored in self._origin.stored.values() for name in stored.names}

    def __getitem__(self, part: At) -> Tensor:
        """In the dtype of the files, float32 where computed from FP8. Without a copy where it is stored as it is."""
        sizes = [wanted.stop - wanted.start for wanted in part]
        out = None
        for block, stored, reads in self._origin.reads(part):
            raw = [self._reader(*read) for read in reads]
            if isinstance(stored, Plain) and not block.part.transposed and list(raw[0].shape) == sizes:
                return raw[0]
            if out is None:
                out = torch.empty(sizes, dtype=self._origin.value_dtype, device="cpu")
            into = out[block.into]
            into = into[(0,) * (into.ndim - len(block.at))]  # without the dimensions that the hub's tensor lacks
            stored.decode(raw, block.at, into.mT if block.part.transposed else into)
        return torch.empty(sizes, dtype=self._origin.value_dtype, device="cpu") if out is None else out


def hub_tensors(origins: Mapping[str, Origin], reader: Reader) -> dict[str, HubTensor]:
    """The tensors of ours as they can be read from a checkpoint."""
    return {name: HubTensor(origin, reader) for name, origin in origins.items()}


def _source(stage: nn.Module, opened: Opened, reader: Reader) -> dict[str, HubTensor]:
    shapes = {name: tensor.shape for name, tensor in stage_tensors(stage).items()}
    search = find_origins(stage.config, shapes, *opened)
    search.check("the checkpoint does not fit the stage", opened.header)
    return hub_tensors(search.found, reader)


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a stage, a tied one under its first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in stage.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def config_of(stages: Sequence[nn.Module]) -> HubConfig:
    """The configuration that the stages were built with; raises `ValueError` unless it is one and the same."""
    configs = [stage.config for stage in stages if isinstance(getattr(stage, "config", None), HubConfig)]
    if not stages or len(configs) < len(stages) or any(config != configs[0] for config in configs):
        raise ValueError("stages must be some of one model, from build_stages; got "
                         f"{[type(stage).__name__ for stage in stages]}")
    return configs[0]


def _device(mesh: DeviceMesh | None) -> torch.device:
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
