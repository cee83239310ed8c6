"""Load a Hugging Face checkpoint into the stages of a rank. Each rank reads only its part.

    config = read_config(path)
    stages = build_on_meta(lambda: build_stages(config, 2 * pp, only=...))
    plan = resolve_dtypes(stages, policy, source_dtypes=hub_dtypes(path, config))
    ... shard_experts and shard_stages, on meta ...
    load_hf(stages, path, mesh, plan)

Rank 0 reads all headers, checks them, and sends them to the other ranks. Every rank then opens the files that it needs.
Parameters are filled only if all ranks could open theirs. `save` is the way back.

Example: of 4 experts over ep 2 and dp 2, rank 1 (dp 0, ep 1) holds `gate_up_proj.weight[2:4, 0:I]` of (4, 2I, H). So it
reads the `gate_proj.weight` of experts 2 and 3, and no `up_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.hub.files import Reader, StrPath
from dualpipe.checkpoint.hub.stored_formats import SUFFIXES, Fp8, Mxfp4, Stored, find_stored
from dualpipe.checkpoint.tensors import Box, TensorHeader
from dualpipe.kernels.formats import Format
from dualpipe.models import HubConfig, same_values
from dualpipe.models.hub import HubTensorPart
from dualpipe.models.stages import meta_stages
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.fsdp.materialize import Sliceable, check_materialize, materialize
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime import device as devices
from dualpipe.runtime.errors import nearest, raise_for
from dualpipe.runtime.ranks.rank_sync import RankSync

_MAX_LISTED = 3  # tensors of each kind of problem in an error message


def load_hf(
    stages: Sequence[nn.Module], path: StrPath, mesh: DeviceMesh | None, plan: DTypePlan, *,
    device: torch.device | str | None = None, param_device: torch.device | str | None = None,
    fresh: Mapping[str, Sliceable] | None = None,
) -> int:
    """Fill this rank's stages from a Hugging Face checkpoint; return the bytes read. Collective over `mesh`.

    Each rank reads the byte ranges of its stages, its experts and its shards, one parameter at a time, so the
    extra memory is that of one parameter. Experts may be stacked or separate on disk, and stored in MXFP4 or FP8
    (`stored_formats`). A tied tensor is read once per stage that has it.

    Parameters get the dtype `plan.of(name).storage`. FP8 is decoded in float32 and rounded to that dtype once. A
    parameter that the plan stores in the format of the files, fp8_block or mxfp4, takes their bytes unchanged; if it is
    trained, its master gets the dequantized values.

    Args:
        stages: on meta, sharded or not.
        path: a directory with `config.json` and safetensors, the same files on all ranks.
        mesh: from `build_mesh`; None: this process alone.
        plan: the dtypes of the parameters.
        device: default: the device of the mesh, or the CPU.
        param_device: as for `materialize`.
        fresh: values by name for parameters that the checkpoint lacks, such as those of adapters.

    Raises (on all ranks):
        ValueError: before anything is changed. A file is missing, truncated, no safetensors or outside of the
            directory; a tensor is missing, unexpected, of another shape, of integers, or lacks its scales; the dtype of
            the plan would round values; blocks do not fit those of the plan's format (`HubTensor.format_mismatch`); or
            the checkpoint has another model type.
        RuntimeError: reading failed on some rank after that, for example because of a disk failure. The stages are
            unusable then: elements that were not read are NaN.
    """
    ranks = RankSync.of_mesh(mesh)
    if device is None:
        device = devices.current() if mesh is not None and mesh.device_type == "cuda" else "cpu"
    config = ranks.agree(lambda: common_config(stages))
    header, block = ranks.first(lambda: _read_headers(path, config))
    reader = Reader(path, header, block)
    sources = ranks.agree(lambda: _find_sources(stages, config, reader, path, plan, fresh or {}))
    ranks.agree(lambda: [materialize(stage, device, plan, source=source, param_device=param_device)
                         for stage, source in zip(stages, sources)])
    return reader.bytes_read


def _find_sources(
    stages: Sequence[nn.Module], config: HubConfig, reader: Reader, path: StrPath, plan: DTypePlan,
    fresh: Mapping[str, Sliceable],
) -> list[dict[str, Sliceable]]:
    """Return the tensors of every stage by name, after checking that they can be read and fit the plan.

    fresh: see `load_hf`.
    """
    tensors = find_tensors(config, reader)
    params = [stage_tensors(stage) for stage in stages]
    stored = [{name: tensors[name] for name in stage_params if name in tensors} for stage_params in params]
    reader.check(name for source in stored for tensor in source.values()
                 for name, _ in tensor.reads(Box.whole(tensor.shape)))
    mismatches = []
    for stage_params, source in zip(params, stored):
        for name, tensor in source.items():
            quantized = quantized_part(stage_params[name])
            mismatch = "" if quantized is None else tensor.format_mismatch(quantized.format)
            if mismatch:
                mismatches.append(f"{name}: {mismatch}")
    raise_for(f"{path} does not fit the formats of the dtype plan; give these weights another one, or none:",
              mismatches)
    sources: list[dict[str, Sliceable]] = []
    for stage, stage_params, source in zip(stages, params, stored):
        new = {name: fresh[name] for name in stage_params if name in fresh}
        check_materialize(stage, plan, source={**source, **new})
        sources.append({**source, **new})
    return sources


def _read_headers(path: StrPath, config: HubConfig) -> tuple[dict[str, TensorHeader], tuple[int, int] | None]:
    """Check a checkpoint, and return the arguments of a `Reader` of it."""
    reader, _ = open_hf(path, config)
    return dict(reader.header), reader.block


def hub_dtypes(path: StrPath, config: HubConfig) -> dict[str, torch.dtype]:
    """Return the dtypes of a checkpoint's tensors by the model's names, for `resolve_dtypes`.

    Quantized tensors count as bfloat16. Raises ValueError like `load_hf`.
    """
    _, tensors = open_hf(path, config)
    return {name: tensor.dtype for name, tensor in tensors.items()}


def open_hf(path: StrPath, config: HubConfig) -> tuple[Reader, dict[str, HubTensor]]:
    """Read all headers of a checkpoint; return a reader, and the model's tensors by name. Raises like `load_hf`."""
    reader = Reader.open(path, config.model_type)
    tensors = find_tensors(config, reader)
    different = _different_copies(config, reader, tensors)
    if different:
        names = ", ".join(different[:_MAX_LISTED])
        raise ValueError(f"{path}: {names} differs from the embedding or the head, which it would share; set "
                         "tie_word_embeddings to false in config.json, or for a layer for multi-token prediction, "
                         "mtp.weight to 0")
    return reader, tensors


def _different_copies(config: HubConfig, reader: Reader, tensors: Mapping[str, HubTensor]) -> list[str]:
    """Return the names of tensors with other values than the weight that the model has in their place.

    A copy may be in a narrower dtype. Quantized copies, which are rounded, are not compared.
    """
    copies = dict(config.hub_copies)
    if config.tie_word_embeddings:
        copies["lm_head.weight"] = "embed_tokens.weight"
    different = []
    for name, original in copies.items():
        stored = find_stored(reader.header, name, reader.block)
        if type(stored) is not Stored:
            continue
        expected = tensors[original][Box.whole(tensors[original].shape).slices]
        if not same_values(reader(name, Box.whole(stored.shape)), expected.to(stored.dtype)):
            different.append(name)
    return different


def common_config(stages: Sequence[nn.Module]) -> HubConfig:
    """Return the configuration that all stages were built with; raise ValueError if they do not share one."""
    configs = [stage.config for stage in stages if isinstance(getattr(stage, "config", None), HubConfig)]
    if not stages or len(configs) < len(stages) or any(config != configs[0] for config in configs):
        raise ValueError("stages must be some of one model, from build_stages; got "
                         f"{[type(stage).__name__ for stage in stages]}")
    return configs[0]


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a stage. A tied parameter has its first name."""
    state = stage.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: tensor for name, tensor in state.items() if first_names[id(tensor)] == name}


def model_shapes(config: HubConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and persistent buffers of a model by name."""
    return {name: tuple(tensor.shape) for name, tensor in meta_stages(config)[0].state_dict().items()}


def intersect_parts(parts: Iterable[HubTensorPart], box: Box) -> Iterator[tuple[HubTensorPart, Box, Box]]:
    """Yield the hub tensors that make up a box of a model's tensor, with the region in each and the region in `box`."""
    for part in parts:
        place = Box.from_slices(part.where)
        shared = place.intersection(box)
        if shared is None:
            continue
        offsets, shape = shared.relative_to(place)
        leading = len(shape) - len(part.shape)  # dimensions that the hub's tensor lacks, such as experts
        offsets = offsets[leading:]
        shape = shape[leading:]
        if part.transposed:
            offsets = (*offsets[:-2], offsets[-1], offsets[-2])
            shape = (*shape[:-2], shape[-1], shape[-2])
        yield part, Box(offsets, shape), shared.relative_to(box)


def mxfp4_part(part: HubTensorPart) -> HubTensorPart:
    """Return the part as stored in MXFP4: inputs are last, as in the model, even if the plain tensor is transposed."""
    if not part.transposed:
        return part
    return replace(part, shape=(*part.shape[:-2], part.shape[-1], part.shape[-2]), transposed=False)


def find_cut_block(parts: Iterable[HubTensorPart], shape: Sequence[int], format: Format) -> str:
    """Return a problem if a part starts or ends within a block of the model's tensor; else "".

    Example: gate is stacked above up, and the number of its rows is not a multiple of the rows of a block.
    """
    for part in parts:
        rows = part.where[-2]
        if rows.start % format.block[0] or (rows.stop % format.block[0] and rows.stop != shape[-2]):
            return (f"{part.name} is rows {rows.start} to {rows.stop} of it, which are no whole blocks of "
                    f"{format.block[0]}")
    return ""


@dataclass(frozen=True)
class HubTensor:
    """A model's tensor in a checkpoint. Indexing reads that part: a `Sliceable`.

    Args:
        shape: shape of the model's tensor.
        reader: reads the files.
        parts: the hub tensors that it consists of.
        stored: storage form of every part, by its name.
    """

    shape: tuple[int, ...]
    reader: Reader
    parts: list[HubTensorPart] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parts (see `Stored`), promoted if they differ."""
        return reduce(torch.promote_types, (stored.dtype for stored in self.stored.values()))

    def reads(self, box: Box) -> Iterator[tuple[str, Box]]:
        """Yield the file tensors that reading a box requires, and the box to read of each."""
        for part, region, _ in intersect_parts(self.parts, box):
            yield from self.stored[part.name].raw(region)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        """Read a part in the dtype of the files, or float32 for FP8.

        Returns a view of the file if the part is a single region that is stored unchanged.
        """
        box = Box.from_slices(slices)
        dtypes = {torch.float32 if isinstance(stored, Fp8) else stored.dtype for stored in self.stored.values()}
        out = torch.empty(box.shape, dtype=reduce(torch.promote_types, dtypes), device="cpu")
        for part, region, target in intersect_parts(self.parts, box):
            stored = self.stored[part.name]
            raw = [self.reader(name, raw_box) for name, raw_box in stored.raw(region)]
            if type(stored) is Stored and not part.transposed and region.shape == box.shape:
                return raw[0]
            values = out[target.slices]
            values = values[(0,) * (values.ndim - len(region.shape))]  # drop dimensions that the hub's tensor lacks
            stored.decode(raw, region, values.mT if part.transposed else values)
        return out

    def quantized(self, slices: tuple[slice, ...], format: Format) -> Tensor | None:
        """Return the block rows of a part, from the bytes in the files without any arithmetic.

        They are uint8 (M, R, B): matrices, block rows, and bytes of a block row.

        Returns None if the files have another storage form, so that values must be quantized.

        Args:
            slices: whole blocks of a tensor (N, K) or (M, N, K).
            format: the format of the block rows.

        Raises:
            ValueError: for the problems that `format_mismatch` describes.
        """
        mismatch = self.format_mismatch(format)
        if mismatch:
            raise ValueError(mismatch)
        box = Box.from_slices(slices)
        *matrices, rows, columns = box.shape
        block_height = format.block[0]
        out = torch.zeros(*(matrices or [1]), format.block_rows(rows), format.row_bytes(columns), dtype=torch.uint8,
                          device="cpu")
        for part, region, target in intersect_parts(self.parts, box):
            stored = self.stored[part.name]
            if stored.format != format:
                return None
            elements, scales = (self.reader(name, raw_box) for name, raw_box in stored.raw(region))
            elements = elements.view(torch.uint8).flatten(len(region.shape) - 1)  # (..., N, bytes of a row)
            padding = -elements.shape[-2] % block_height
            elements = nn.functional.pad(elements, (0, 0, 0, padding)).unflatten(-2, (-1, block_height))
            first = target.offsets[-2] // block_height
            block_rows = out[target.slices[0] if matrices else slice(None), first : first + elements.shape[-3]]
            format.elements(block_rows, columns).copy_(elements)
            if format.scale.itemsize == 1:
                scales = scales.view(format.scale)
            format.scales(block_rows, columns).copy_(scales)
        return out

    def format_mismatch(self, format: Format) -> str:
        """Return why blocks of this format in the files cannot be used unchanged; "" if they can, or there are none."""
        if not any(stored.format == format for stored in self.stored.values()):
            return ""
        for part in self.parts:
            stored = self.stored[part.name]
            if stored.format != format:
                return f"{part.name} is {stored.dtype} in the files, where others are in {format}"
            if isinstance(stored, Fp8) and stored.block != format.block:
                return f"{part.name} is in blocks of {stored.block} in the files, and {format} is in {format.block}"
        return find_cut_block(self.parts, self.shape, format)


def find_tensors(config: HubConfig, reader: Reader) -> dict[str, HubTensor]:
    """Return every tensor of a model in a checkpoint, by the model's names.

    A tensor may have several layouts on the hub. The first one with the largest share of its parts present is used.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, or stored in a form that cannot be read. The
            message lists the first ones of each kind, and how many more there are. Missing names come with the most
            similar name among the unexpected ones, or if there are none, in the whole checkpoint.
    """
    header = reader.header
    tensors: dict[str, HubTensor] = {}
    used: set[str] = set()
    missing: dict[str, None] = {}  # by name: a tied tensor is found twice
    invalid: dict[str, str] = {}
    for name, shape in model_shapes(config).items():
        parts = _most_complete(config.hub_parts(name, shape), header)
        assert sum(Box.from_slices(part.where).numel for part in parts) == prod(shape), name
        used.update(part.name + suffix for part in parts for suffix in SUFFIXES)
        tensors[name] = HubTensor(shape, reader)
        for part in parts:
            try:
                stored = find_stored(header, part.name, reader.block)
            except ValueError as error:
                invalid[part.name] = str(error)
                continue
            if stored is None:
                missing[part.name] = None
                continue
            if isinstance(stored, Mxfp4):
                part = mxfp4_part(part)
            if not stored.dtype.is_floating_point:
                invalid[part.name] = f"{part.name}: {stored.dtype}, which parameters in floating point would round"
            elif stored.shape != part.shape:
                invalid[part.name] = f"{part.name}: {stored.shape} in the checkpoint, {part.shape} in the model"
            else:
                tensors[name].parts.append(part)
                tensors[name].stored[part.name] = stored
    unexpected = [name for name in header if name not in used
                  and not any(config.ignored_on_hub(name.removesuffix(suffix)) for suffix in SUFFIXES)]
    if missing or invalid or unexpected:
        raise ValueError(_mismatch_message(config, header, list(missing), list(invalid.values()), unexpected))
    return tensors


def _most_complete(
    layouts: Iterable[Sequence[HubTensorPart]], header: Mapping[str, TensorHeader]
) -> Sequence[HubTensorPart]:
    """Return the layout on the hub of which the largest share of parts is present."""

    def share_present(parts: Sequence[HubTensorPart]) -> float:
        return sum(any(part.name + suffix in header for suffix in SUFFIXES) for part in parts) / len(parts)

    return max(layouts, key=share_present)


def _mismatch_message(
    config: HubConfig, header: Mapping[str, TensorHeader], missing: Sequence[str], invalid: Sequence[str],
    unexpected: Sequence[str],
) -> str:
    """Return the error message for a checkpoint that does not fit the model."""
    lines = []
    for name in missing[:_MAX_LISTED]:
        similar = nearest(name, unexpected or header)
        lines.append(f"{name}: missing" + (f", the nearest is {similar[0]}" if similar else ""))
    lines += invalid[:_MAX_LISTED]
    lines += [f"{name}: unexpected, the model has no such tensor" for name in unexpected[:_MAX_LISTED]]
    unlisted = len(missing) + len(invalid) + len(unexpected) - len(lines)
    if unlisted:
        lines.append(f"and {unlisted:,} more")
    mtp = tuple(f"model.layers.{layer}." for layer in config.mtp_layers)
    hint = ""
    if missing and all(name.startswith(mtp) for name in missing):
        hint = "; mtp.weight = 0 trains no layers for multi-token prediction"
    return (f"the checkpoint does not fit the model ({config.model_type}): {'; '.join(lines)} (is this checkpoint "
            f"complete, and its config.json the one that it was written with?{hint})")
