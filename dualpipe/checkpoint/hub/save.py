"""Write the stages of all ranks as one Hugging Face checkpoint. Each rank writes its part.

    rank 0      makes a directory beside the target, with config.json, the tokenizer, the index, and all tensor files at
                full size with their headers
    every rank  writes the bytes of its parameters to their places in the files; rank 0 also copies tensors from the
                source: layers for multi-token prediction that are not trained
    rank 0      renames the directory to the target

No tensor is gathered, and the files do not depend on the layout that wrote them. Weights in blocks with scales are
written in the forms of published checkpoints, FP8 blocks or MXFP4 of gpt-oss: elements and scales are copied from block
rows to the files unchanged. `load.HubTensor.quantized` is the way back.
"""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from io import FileIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.checkpoint.assign import Offer, RankOffers, assign_writers
from dualpipe.checkpoint.hub.files import CONFIG, INDEX, SINGLE, Reader, StrPath, file_within, read_headers, read_json
from dualpipe.checkpoint.hub.load import common_config, find_cut_block, intersect_parts, model_shapes, mxfp4_part
from dualpipe.checkpoint.hub.stored_formats import Fp8, Mxfp4, Stored
from dualpipe.checkpoint.state import parts_of, training_state
from dualpipe.checkpoint.tensors import Box, NewFile, TensorHeader, lay_out, write_box
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.models import HubConfig, config_from_dict, read_config, read_hub_json
from dualpipe.models.hub import MTP_LAYERS, HubTensorPart, whole
from dualpipe.models.stages import meta_stages
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.fsdp.materialize import Sliceable
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import quantizable
from dualpipe.runtime.dtypes import long_name
from dualpipe.runtime.files import hold, name_file_in_errors, sync
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder
from dualpipe.runtime.storage import RemotePath, as_location

MAX_SHARD_BYTES = 5 * 10**9
CHAT_TEMPLATES = "additional_chat_templates"  # folder of the templates besides chat_template.jinja
# Files of a source that belong to the model, besides its tensors and config.json.
CARRIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    CHAT_TEMPLATES, "tiktoken.model",
)
# Keys of the source's config.json that describe its files and not the model.
_FILE_KEYS = {"quantization_config", "auto_map", "torch_dtype", "dtype"}


class ModelPart(NamedTuple):
    """A rank's part of a model's tensor: the shape of the complete tensor, the box in it, and the values of the box."""

    shape: tuple[int, ...]
    box: Box
    values: Sliceable


def save_hf(
    stages: Sequence[nn.Module], path: StrPath, mesh: DeviceMesh | None, plan: DTypePlan, *,
    source: StrPath | None = None, max_shard_bytes: int = MAX_SHARD_BYTES, quantized: bool = False,
) -> None:
    """Write the model as a Hugging Face checkpoint, which transformers and vLLM read. Collective over `mesh`.

    Tensors get the dtype `plan.of(name).save`, so one that is pinned to float32 stays in float32. Experts are written
    separately if the family's are, and a tied head is not written. A rank needs extra memory for one hub tensor. The
    directory appears when it is complete.

    Layers for multi-token prediction (DeepSeek-V3) are written like all others if the model trains them, each with a
    copy of the embedding and of the head. Otherwise they are copied from `source` byte for byte, including FP8 and its
    scales. If the source lacks some of them, `config.json` announces fewer, with a warning.

    Args:
        stages: this rank's stages; all stages without a mesh.
        path: a new directory, on a file system that all ranks share.
        mesh: from `build_mesh`; None: this process alone. The timeout of the default process group must be longer
            than the writing takes.
        plan: the dtypes of the parameters.
        source: a checkpoint of the same model. `config.json`, `generation_config.json` and the tokenizer are copied
            from it, and the code of a family whose checkpoints include code (Kimi K2). Without a source, `config.json`
            has only what this library knows.
        max_shard_bytes: most bytes of tensors in a file. A larger tensor gets a separate file.
        quantized: write weights that are stored in the format of the family's quantized checkpoints (fp8_block, or
            mxfp4 for gpt-oss) as their elements and scales, and say so in `config.json`. Weights that were not trained
            are written as they were loaded. False: write the masters of such weights, or the dequantized values of
            frozen ones.

    Raises (on all ranks, with nothing left behind):
        ValueError: `path` exists and is not empty; the source is another model; the ranks together do not hold all of
            the model; the plan lacks a tensor; or, with `quantized`, the plan stores weights in another format than
            the family's quantized checkpoints, or stores no weight in a format.
        OSError (RuntimeError with several ranks): writing failed on some rank.
    """
    ranks = RankSync.of_mesh(mesh)
    config = ranks.agree(lambda: common_config(stages))

    def find_parts() -> dict[str, ModelPart]:
        for module in chain.from_iterable(stage.modules() for stage in stages):
            if isinstance(module, FSDPModule):
                module.reshard()  # the root stays unsharded after a forward
        if quantized:
            check_quantized(config, plan)
        parts = {}
        for name, part in parts_of(training_state(stages)).items():
            values = part.tensor if part.quantized is None else part.quantized.detach()
            parts[name] = ModelPart(part.shape, part.box, values)
        return parts

    write_model(ranks, config, ranks.agree(find_parts), path, plan, source, max_shard_bytes, quantized)


def write_model(
    ranks: RankSync, config: HubConfig, parts: Mapping[str, ModelPart], path: StrPath, plan: DTypePlan,
    source: StrPath | None, max_shard_bytes: int, quantized: bool = False,
) -> None:
    """Write a checkpoint from the parts of all ranks. Collective. Raises like `save_hf`.

    Args:
        ranks: all ranks.
        config: the model.
        parts: this rank's parts, by the model's names.
        path, plan, source, max_shard_bytes, quantized: as for `save_hf`.
    """
    if config.tie_word_embeddings:  # a tied head is written as the embedding
        parts = {name: part for name, part in parts.items() if name != "lm_head.weight"}
    # With one number for the stages of all ranks, `assign_writers` does not compare values, so it needs no samples.
    offers = ranks.gather(lambda: RankOffers(0, {
        name: (Offer(_file_dtype(plan, name, quantized), part.shape, part.box), b"") for name, part in parts.items()
    }))
    carried = ranks.first(lambda: _tensors_to_carry(config, source))
    files, names = ranks.agree(lambda: _lay_out_files(config, offers, carried, max_shard_bytes, ranks.rank))
    header = {name: tensor for file in files for name, tensor in file.tensors.items()}

    def values() -> Iterator[tuple[str, Box, Tensor]]:
        """Yield what this rank writes: names of file tensors, boxes in them, and values in the dtype of the file."""
        for name in names:
            yield from _hub_values(config, name, parts[name], _file_dtype(plan, name, quantized))
        if source is not None and ranks.rank == 0:
            read = Reader(source, carried)
            for name, info in carried.items():
                box = Box.whole(info.shape)
                yield name, box, read(name, box)

    with new_directory(path, ranks) as folder:
        ranks.first(lambda: _begin(
            folder, files, json_documents(config, plan.policy.param_dtype, source, carried, header),
            carried_files(source, has_code=bool(config.auto_map))))
        ranks.agree(lambda: _write(folder, header, values()))


@contextmanager
def new_directory(path: StrPath, ranks: RankSync) -> Iterator[Path]:
    """Make a directory for the files of all ranks, and give it the name `path` when the block ends. Collective.

    Until then it lies beside `path` under a hidden name. It is removed if the block raises, which it must do on all
    ranks; if the process is killed, the next writer of the same path removes it.

    Raises ValueError if `path` is a URL, or anything but a new or an empty directory.
    """
    with ExitStack() as cleanup:  # stays empty except on rank 0, which makes the directory
        folder = ranks.first(lambda: _make_directory(path, cleanup))
        yield folder
        ranks.first(lambda: _finish(folder, Path(path)))


def _make_directory(path: StrPath, cleanup: ExitStack) -> Path:
    """Make the hidden directory beside `path`, and remove those of writers that were killed.

    A locked directory belongs to a running process: the system releases the lock of a process that dies.

    cleanup: removes the directory if it still has its hidden name, and releases its lock.
    """
    if isinstance(as_location(path), RemotePath):
        raise ValueError(f"{path} is a URL, but models are written to local directories; write to one, and copy it")
    target = Path(path)
    is_free = not any(target.iterdir()) if target.is_dir() else not target.exists()
    if target.is_symlink() or not is_free:
        raise ValueError(f"{target} exists already; give a new directory, or an empty one")
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
        with suppress(OSError), ExitStack() as while_removed:
            while_removed.callback(hold(leftover).release)
            shutil.rmtree(leftover)
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    folder.mkdir(parents=True)
    with suppress(OSError):  # a file system without locks
        cleanup.callback(hold(folder).release)
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _file_dtype(plan: DTypePlan, name: str, quantized: bool) -> torch.dtype | Format:
    """Return the dtype of a parameter in the files, or the format of its blocks."""
    dtypes = plan.of(name)
    return dtypes.stored if quantized and isinstance(dtypes.stored, Format) else dtypes.save


def _tensors_to_carry(config: HubConfig, source: StrPath | None) -> dict[str, TensorHeader]:
    """Return the tensors that are copied from a source, which may consist of config.json and a tokenizer only."""
    if source is None:
        return {}
    source_config = replace(read_config(source), mtp_depth=config.mtp_depth)
    has_tensors = any((Path(source) / name).exists() for name in (SINGLE, INDEX))
    if not (source_config.carried_layers and has_tensors):
        return {}
    return carried_tensors(source_config, read_headers(source))


def _lay_out_files(
    config: HubConfig, offers: Sequence[RankOffers], carried: Mapping[str, TensorHeader], max_shard_bytes: int,
    rank: int,
) -> tuple[list[NewFile], list[str]]:
    """Return all files, and the names of the model's tensors whose parts this rank writes."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}")
    names, stored = assign_writers(offers)
    tensors = new_tensors(config, {name: tensor.dtype for name, tensor in stored.items()})
    tensors |= {name: (info.dtype, info.shape) for name, info in carried.items()}
    return lay_out(tensors, max_shard_bytes, shard_name, {}), names[rank]


def shard_name(number: int, count: int) -> str:
    """Return the name of file `number` of `count` files with tensors."""
    return SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _hub_values(
    config: HubConfig, name: str, part: ModelPart, dtype: torch.dtype | Format
) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield the file tensors, boxes and values that a part of a model's tensor is written as."""
    forms = {hub_part.name: (hub_part, form) for hub_part, form in storage_forms(config, name, part.shape, dtype)}
    hub_parts = [hub_part for hub_part, _ in forms.values()]
    for hub_part, region, place in intersect_parts(hub_parts, part.box):
        if isinstance(dtype, Format):
            _, form = forms[hub_part.name]
            tensors = unpack_blocks(cast(QuantizedTensor, part.values), place)
            yield from ((file_name, box, tensor) for (file_name, box), tensor in zip(form.raw(region), tensors))
            continue
        values = _plain_values(part.values, place)
        yield hub_part.name, region, (values.mT if hub_part.transposed else values).to("cpu", dtype)


def _plain_values(values: Sliceable, box: Box) -> Tensor:
    """Return a box of plain values. Those of a quantized weight come from its master, or if frozen, are dequantized."""
    if not isinstance(values, QuantizedTensor):
        return values[box.slices]
    if values.master is not None:
        return values.master[box.slices]
    # Dequantize whole matrices: these rows may cut through blocks.
    matrices = cast(QuantizedTensor, values[box.slices[:-2]])
    return matrices.dequantize()[..., box.slices[-2], :]


def new_tensors(
    config: HubConfig, dtypes: Mapping[str, torch.dtype | Format]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of a model's tensors on the hub, in the model's order and without a tied head.

    Args:
        config: the model.
        dtypes: dtypes or formats by the model's names.

    Raises:
        ValueError: `dtypes` lacks a tensor.
    """
    shapes = model_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    missing = [name for name in shapes if name not in dtypes]
    if missing:
        raise ValueError(f"no rank holds {', '.join(missing[:10])}{' ...' if missing[10:] else ''}; pass the mesh, "
                         "and all stages of every rank")
    tensors = {}
    for name, shape in shapes.items():
        for _, form in storage_forms(config, name, shape, dtypes[name]):
            file_dtypes = form.dtypes or (form.dtype,)
            for (file_name, box), dtype in zip(form.raw(Box.whole(form.shape)), file_dtypes):
                tensors[file_name] = (dtype, box.shape)
    return tensors


def carried_tensors(config: HubConfig, header: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors of a checkpoint that an export copies: untrained layers for multi-token prediction.

    If one of the layers is missing, the layers after it are not copied: config.json can only state their number.
    """
    layer_of = {name: config.carried_layer(name) for name in header}
    layers = config.carried_layers
    stop = next((layer for layer in layers if layer not in layer_of.values()), layers.stop)
    return {name: header[name] for name, layer in layer_of.items() if layer is not None and layer < stop}


def carried_files(source: StrPath | None, *, has_code: bool = False) -> list[Path]:
    """Return the files of a source that are copied: the tokenizer, and code if the family's checkpoints include it."""
    if source is None:
        return []
    names = [name for name in CARRIED_FILES if (Path(source) / name).exists()]
    code = sorted(path.name for path in Path(source).glob("*.py")) if has_code else []
    return [Path(source, name) if name == CHAT_TEMPLATES else file_within(source, name) for name in (*names, *code)]


def copy_carried(paths: Iterable[Path], folder: Path) -> None:
    """Copy the files, and the folder of chat templates, that an export takes from its source."""
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def _begin(
    folder: Path, files: Sequence[NewFile], documents: Mapping[str, dict[str, Any]], copies: Iterable[Path]
) -> None:
    """Write all files to a directory, without the values of tensors."""
    for name, content in documents.items():
        with name_file_in_errors(folder / name), open(folder / name, "x", encoding="utf-8") as document:
            document.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    copy_carried(copies, folder)
    for file in files:
        with name_file_in_errors(folder / file.name), open(folder / file.name, "xb") as out:
            out.write(file.head)
            out.truncate(file.size)


def _write(folder: Path, header: Mapping[str, TensorHeader], data: Iterable[tuple[str, Box, Tensor]]) -> None:
    """Write values to their places in the files, and flush them to the disk."""
    opened: dict[str, FileIO] = {}
    recorder = Recorder.current()
    with ExitStack() as stack:
        for name, box, values in data:
            file = header[name].file
            with name_file_in_errors(folder / file), recorder.doing("write", name):
                if file not in opened:
                    opened[file] = stack.enter_context(open(folder / file, "r+b", buffering=0))
                write_box(opened[file].fileno(), header[name], box, values)
        for file, out in opened.items():
            with name_file_in_errors(folder / file):
                os.fsync(out)


def _finish(folder: Path, target: Path) -> None:
    """Flush all files to the disk, and rename the directory to the target."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
    os.rename(folder, target)  # replaces an empty directory
    sync(target.parent)


def json_documents(
    config: HubConfig, dtype: torch.dtype, source: StrPath | None, carried: Iterable[str],
    header: Mapping[str, TensorHeader],
) -> dict[str, dict[str, Any]]:
    """Return the contents of the JSON files by name.

    Args:
        config: the model.
        dtype: dtype of most parameters, which config.json states.
        source: a checkpoint of the same model, whose config.json is the basis. None: what this library knows.
        carried: names of the tensors that are copied from the source.
        header: all tensors that are written.

    Raises:
        ValueError: the source is of another model.
    """
    source_content = None if source is None else dict(read_hub_json(source)[1])
    content = config.to_dict() if source_content is None else source_content
    source_config = replace(config_from_dict(content), mtp_depth=config.mtp_depth)
    if source is not None:
        _check_same_model(config, source, source_config)
    content = {key: value for key, value in content.items() if key not in _FILE_KEYS}
    if config.auto_map:
        content["auto_map"] = _auto_map(config, source)
    mtp_layers = config.mtp_depth + len({source_config.carried_layer(name) for name in carried})
    _set_mtp_layers(content, mtp_layers, source)
    source_quantization = (source_content or {}).get("quantization_config")
    quantization = quantization_config(config, header, source_quantization or {})
    if quantization:
        content["quantization_config"] = quantization
    documents = {CONFIG: content | {"dtype": long_name(dtype)}}
    if len({tensor.file for tensor in header.values()}) > 1:
        documents[INDEX] = index_of(header)
    return documents


def index_of(header: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Return the content of the index of a checkpoint of several files."""
    return {
        "metadata": {"total_parameters": sum(prod(tensor.shape) for tensor in header.values()),
                     "total_size": sum(tensor.nbytes for tensor in header.values())},
        "weight_map": {name: tensor.file for name, tensor in sorted(header.items())},
    }


def _check_same_model(config: HubConfig, source: StrPath, source_config: HubConfig) -> None:
    """Raise ValueError if the source has another configuration than the model."""
    if source_config == config:
        return
    source_fields = asdict(source_config)
    differences = ", ".join(f"{key}: {source_fields.get(key)} there, {value} in the model"
                            for key, value in asdict(config).items() if source_fields.get(key) != value)
    raise ValueError(f"{source} is of another model ({differences or source_config.model_type}); give the checkpoint "
                     "that the model was made from, or none")


def _set_mtp_layers(content: dict[str, Any], layers: int, source: StrPath | None) -> None:
    """Set the number of layers for multi-token prediction in a config.json; warn if the source announces more."""
    keys = [key for key in MTP_LAYERS if key in content]
    if not keys and layers:
        keys = [*MTP_LAYERS[:1]]
    for key in keys:
        if (content.get(key) or 0) > layers:
            reason = "no source was given" if source is None else f"{source} has no tensors of more"
            warnings.warn(
                f"config.json says {key} = {layers} instead of {content[key]}: layers for multi-token prediction that "
                f"were not trained are only copied, and {reason}; give the checkpoint that the model was made from as "
                "source (init.from_hf, or `dualpipe hf export --source`)", stacklevel=3,
            )
        content[key] = layers


def _auto_map(config: HubConfig, source: StrPath | None) -> dict[str, Any]:
    """Return the "auto_map" of a family whose checkpoints include code.

    Return that of the source if the source, whose code is copied, has every module that it names. Otherwise return that
    of the published checkpoint.
    """
    source_map = {} if source is None else read_json(source, CONFIG).get("auto_map")
    if source is None or not isinstance(source_map, dict) or not source_map:
        return dict(config.auto_map)
    modules = {path.stem for path in Path(source).glob("*.py")}
    entries = (entry for value in source_map.values() for entry in (value if isinstance(value, list) else [value]))
    names = [str(entry) for entry in entries if entry is not None]  # "module.Class", or "owner/name--module.Class"
    is_complete = all("--" in name or name.partition(".")[0] in modules for name in names)
    return source_map if is_complete else dict(config.auto_map)


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
