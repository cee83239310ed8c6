"""Loading a Hugging Face checkpoint into the stages of a rank, each rank its own part.

    config = read_config(path)
    stages = build_on_meta(lambda: build_stages(config, 2 * pp, only=...))
    plan = resolve_dtypes(stages, policy, source_dtypes=hub_dtypes(path, config))
    ... shard_experts and shard, on meta ...
    load_hf(stages, path, mesh, plan)

Rank 0 reads all headers, checks them and tells the others; every rank then opens the files that it needs,
and only when all could do so are parameters filled. See `save` for the way back.

Example: of 4 experts over ep 2 and dp 2, rank 1 (dp 0, ep 1) holds `gate_up_proj.weight[2:4, 0:I]` of (4, 2I, H), and
so reads the `gate_proj.weight` of experts 2 and 3 and no `up_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.hub.files import Reader, StrPath
from dualpipe.checkpoint.hub.stored_formats import SUFFIXES, Fp8, Mxfp4, Stored, find_stored
from dualpipe.checkpoint.tensors import Box
from dualpipe.kernels.formats import Format
from dualpipe.models import HubConfig
from dualpipe.models.hub import HubTensorPart
from dualpipe.models.stages import meta_stages
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.fsdp.materialize import check_materialize, materialize
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime import device as devices
from dualpipe.runtime.errors import nearest, raise_for
from dualpipe.runtime.rank_sync import RankSync

_NAMED = 3  # tensors of each kind that are wrong


def load_hf(
    stages: Sequence[nn.Module], path: StrPath, mesh: DeviceMesh | None, plan: DTypePlan, *,
    device: torch.device | str | None = None, param_device: torch.device | str | None = None,
) -> int:
    """Fill the stages of this rank from a directory with `config.json` and safetensors; returns the bytes it has read.

    Called by all ranks of `mesh` (from `build_mesh`) together, which find the same files at `path`, or by one process
    with None. The stages are on meta, sharded or not. Each rank reads the byte ranges of its stages, its experts and
    its shards, one parameter at a time: that is the memory it takes on top. Experts may be stacked or apart on disk,
    and stored in MXFP4 or FP8 (`stored_formats`). Parameters get the dtypes `plan.of(name).storage`; FP8, computed in
    float32, is rounded to it once. Those that the plan stores in the format of the files, fp8_block or mxfp4, take
    their very bytes, and if they are trained the dequantized values as masters. Tied tensors of one stage are read
    once, of two stages twice.

    `device`: default the mesh's, or the CPU; `param_device` as for `materialize`. Raises, on every rank:
        ValueError: before anything is changed: files that are missing, cut short, no safetensors or outside the
            directory; tensors that are missing, unexpected, misshapen, integers or lack their scales; values that the
            plan's dtype would round; blocks that do not fit those of the plan's format (`HubTensor.problem`). A
            checkpoint of another model type.
        RuntimeError: reading failed on some rank after all that, as when a disk fails. The stages are not usable then:
            what was not read is NaN.
    """
    ranks = RankSync.of_mesh(mesh)
    if device is None:
        device = devices.current() if mesh is not None and mesh.device_type == "cuda" else "cpu"
    config = ranks.agree(lambda: config_of(stages))
    first = ranks.first(lambda: open_hf(path, config)[0])
    reader = Reader(path, first.header, first.block)

    def prepare() -> list[dict[str, HubTensor]]:
        tensors = find_tensors(config, reader)
        held = [stage_tensors(stage) for stage in stages]
        sources = [{name: tensors[name] for name in each if name in tensors} for each in held]
        reader.check(name for source in sources for tensor in source.values()
                     for name, _ in tensor.reads(Box.whole(tensor.shape)))
        quantized = ((name, part.format) for each in held for name, param in each.items()
                     if name in tensors and (part := quantized_part(param)) is not None)
        raise_for(f"{path} does not fit the formats of the dtype plan; give these weights another one, or none:", (
            f"{name}: {problem}" for name, format in quantized if (problem := tensors[name].problem(format))))
        for stage, source in zip(stages, sources):
            check_materialize(stage, plan, source=source)
        return sources

    sources = ranks.agree(prepare)
    ranks.agree(lambda: [materialize(stage, device, plan, source=source, param_device=param_device)
                         for stage, source in zip(stages, sources)])
    return reader.bytes_read


def hub_dtypes(path: StrPath, config: HubConfig) -> dict[str, torch.dtype]:
    """The dtypes of a checkpoint's tensors by the model's names, for `resolve_dtypes`; bfloat16 for quantized ones."""
    return {name: tensor.dtype for name, tensor in open_hf(path, config)[1].items()}


def open_hf(path: StrPath, config: HubConfig) -> tuple[Reader, dict[str, HubTensor]]:
    """Read all headers, and find every tensor of ours in them; raises `ValueError` as `load_hf` does."""
    reader = Reader.of(path, config.model_type)
    return reader, find_tensors(config, reader)


def config_of(stages: Sequence[nn.Module]) -> HubConfig:
    """The configuration that the stages were built with; raises `ValueError` unless it is one and the same."""
    configs = [stage.config for stage in stages if isinstance(getattr(stage, "config", None), HubConfig)]
    if not stages or len(configs) < len(stages) or any(config != configs[0] for config in configs):
        raise ValueError("stages must be some of one model, from build_stages; got "
                         f"{[type(stage).__name__ for stage in stages]}")
    return configs[0]


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a stage, a tied one under its first name."""
    first = {id(tensor): name for name, tensor in reversed(stage.state_dict(keep_vars=True).items())}
    return {name: tensor for name, tensor in stage.state_dict(keep_vars=True).items() if first[id(tensor)] == name}


def model_shapes(config: HubConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and persistent buffers of a model."""
    return {name: tuple(tensor.shape) for name, tensor in meta_stages(config)[0].state_dict().items()}


def blocks(parts: Iterable[HubTensorPart], wanted: Box) -> Iterator[tuple[HubTensorPart, Box, Box]]:
    """What of the hub's tensors makes up the box `wanted` in a tensor of ours: where it is in them, and in `wanted`."""
    for part in parts:
        where = Box.at(part.where)
        if both := where.intersection(wanted):
            at = [side[len(side) - len(part.shape) :] for side in both.within(where)]
            if part.transposed:
                at = [(*side[:-2], side[-1], side[-2]) for side in at]
            yield part, Box(*at), both.within(wanted)


def upright(part: HubTensorPart) -> HubTensorPart:
    """The part in MXFP4, whose blocks have inputs last, as ours do, where the plain tensor has them before outputs."""
    shape = (*part.shape[:-2], part.shape[-1], part.shape[-2])
    return replace(part, shape=shape, transposed=False) if part.transposed else part


def cut_through(parts: Iterable[HubTensorPart], shape: Sequence[int], format: Format) -> str:
    """Which part is rows of ours that are no whole blocks, such as of gate above up; "" where there is none."""
    for name, rows in ((part.name, part.where[-2]) for part in parts):
        if rows.start % format.block[0] or (rows.stop % format.block[0] and rows.stop != shape[-2]):
            return f"{name} is rows {rows.start} to {rows.stop} here, which are no whole blocks of {format.block[0]}"
    return ""


@dataclass(frozen=True)
class HubTensor:
    """A tensor of ours in a checkpoint: a `Sliceable`, which reads the part that it is indexed with.

    stored: how each of the parts is, by its name.
    """

    shape: tuple[int, ...]
    parts: list[HubTensorPart]
    stored: dict[str, Stored]
    reader: Reader

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest that holds its values as well as the hub's own loaders do."""
        return reduce(torch.promote_types, (stored.dtype for stored in self.stored.values()))

    def reads(self, wanted: Box) -> Iterator[tuple[str, Box]]:
        """The tensors in the files, and the boxes of them, that are read for a box of this one."""
        for part, at, _ in blocks(self.parts, wanted):
            yield from self.stored[part.name].raw(at)

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        """In the dtype of the files, float32 where computed from FP8. Without a copy where it is stored as it is."""
        wanted = Box.at(place)
        wide = {torch.float32 if isinstance(stored, Fp8) else stored.dtype for stored in self.stored.values()}
        out = torch.empty(wanted.shape, dtype=reduce(torch.promote_types, wide), device="cpu")
        for part, at, into in blocks(self.parts, wanted):
            stored = self.stored[part.name]
            raw = [self.reader(*read) for read in stored.raw(at)]
            if type(stored) is Stored and not part.transposed and at.shape == wanted.shape:
                return raw[0]
            values = out[into.slices]
            values = values[(0,) * (values.ndim - len(at.shape))]  # without the dimensions that the hub's tensor lacks
            stored.decode(raw, at, values.mT if part.transposed else values)
        return out

    def quantized(self, place: tuple[slice, ...], format: Format) -> Tensor | None:
        """The block rows (M, R, B) uint8 of whole blocks, made of what is in the files without computing; None where
        that is in another form, so that values are to be quantized. Raises ValueError for what `problem` names."""
        if problem := self.problem(format):
            raise ValueError(problem)
        wanted = Box.at(place)
        *matrices, rows, columns = wanted.shape
        out = torch.zeros(*(matrices or [1]), format.block_rows(rows), format.row_bytes(columns), dtype=torch.uint8,
                          device="cpu")
        for part, at, into in blocks(self.parts, wanted):
            stored, step = self.stored[part.name], format.block[0]
            if stored.format != format:
                return None
            elements, scales = (self.reader(*read) for read in stored.raw(at))
            elements = elements.view(torch.uint8).flatten(len(at.shape) - 1)  # (..., N, bytes of a row)
            elements = nn.functional.pad(elements, (0, 0, 0, -elements.shape[-2] % step)).unflatten(-2, (-1, step))
            first = into.offsets[-2] // step
            bands = out[into.slices[0] if matrices else slice(None), first : first + elements.shape[-3]]
            format.elements(bands, columns).copy_(elements)
            format.scales(bands, columns).copy_(scales.view(format.scale) if format.scale.itemsize == 1 else scales)
        return out

    def problem(self, format: Format) -> str:
        """Why blocks that are in the files cannot be taken over into a format of the same kind; "" where they can, and
        where there are none."""
        if not any(stored.format == format for stored in self.stored.values()):
            return ""
        for part in self.parts:
            stored = self.stored[part.name]
            if stored.format != format:
                return f"{part.name} is {stored.dtype} in the files, where others are in {format}"
            if isinstance(stored, Fp8) and stored.block != format.block:
                return f"{part.name} is in blocks of {stored.block} in the files, and {format} is in {format.block}"
        return cut_through(self.parts, self.shape, format)


def find_tensors(config: HubConfig, reader: Reader) -> dict[str, HubTensor]:
    """Every tensor of a model in a checkpoint: of several ways to store one, the first of which most is there.

    Raises `ValueError` for tensors that are missing, unexpected or misshapen, or stored in a way that cannot be read:
    the first ones of each kind and how many more. Missing names come with the most similar ones that are there, first
    of those that nobody wants.
    """
    header, found, used = reader.header, dict[str, HubTensor](), set[str]()
    missing, wrong = dict[str, None](), dict[str, str]()  # by name: a tied tensor is met twice
    for name, shape in model_shapes(config).items():
        parts = max(config.hub_parts(name, shape), key=lambda parts: sum(
            any(part.name + suffix in header for suffix in SUFFIXES) for part in parts) / len(parts))
        assert sum(Box.at(part.where).numel for part in parts) == prod(shape), name
        used.update(part.name + suffix for part in parts for suffix in SUFFIXES)
        tensor = found[name] = HubTensor(shape, [], {}, reader)
        for part in parts:
            try:
                stored = find_stored(header, part.name, reader.block)
            except ValueError as error:
                wrong[part.name] = str(error)
                continue
            if isinstance(stored, Mxfp4):
                part = upright(part)
            if stored is None:
                missing[part.name] = None
            elif not stored.dtype.is_floating_point:
                wrong[part.name] = f"{part.name}: {stored.dtype}, which parameters in floating point would round"
            elif stored.shape != part.shape:
                wrong[part.name] = f"{part.name}: {stored.shape} in the checkpoint, {part.shape} in the model"
            else:
                tensor.parts.append(part)
                tensor.stored[part.name] = stored
    unexpected = [name for name in header if name not in used
                  and not any(config.ignored_on_hub(name.removesuffix(suffix)) for suffix in SUFFIXES)]
    lines = []
    for name in list(missing)[:_NAMED]:
        near = nearest(name, unexpected or header)
        lines.append(f"{name}: missing" + (f", the nearest is {near[0]}" if near else ""))
    lines += list(wrong.values())[:_NAMED]
    lines += [f"{name}: unexpected, the model has no such tensor" for name in unexpected[:_NAMED]]
    if more := len(missing) + len(wrong) + len(unexpected) - len(lines):
        lines.append(f"and {more:,} more")
    if lines:
        mtp = tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
        hint = "; mtp.weight = 0 trains no layers for multi-token prediction" if missing and all(
            name.startswith(mtp) for name in missing) else ""
        raise ValueError(f"the checkpoint does not fit the model ({config.model_type}): {'; '.join(lines)} (is this "
                         f"checkpoint complete, and its config.json the one that it was written with?{hint})")
    return found
