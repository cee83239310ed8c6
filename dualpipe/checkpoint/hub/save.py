"""Write the stages of all ranks as one Hugging Face checkpoint. Each rank writes its part.

    rank 0      makes a directory beside the target, with config.json, the tokenizer, the index, and all tensor files at
                full size with their headers
    every rank  writes the bytes of its parameters to their places in the files; rank 0 also copies tensors from the
                source: layers for multi-token prediction that are not trained
    rank 0      renames the directory to the target

No tensor is gathered, and the files do not depend on the layout that wrote them.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.checkpoint.assign import Offer, RankOffers, assign_writers
from dualpipe.checkpoint.hub.documents import json_documents
from dualpipe.checkpoint.hub.files import INDEX, SINGLE, Reader, StrPath, file_within, read_headers
from dualpipe.checkpoint.hub.load import common_config, intersect_parts, model_shapes
from dualpipe.checkpoint.hub.save_quantized import check_quantized, storage_forms, unpack_blocks
from dualpipe.checkpoint.state import parts_of, training_state
from dualpipe.checkpoint.tensors import Box, NewFile, TensorHeader, lay_out, write_box
from dualpipe.kernels.formats import Format
from dualpipe.models import HubConfig, read_config
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.fsdp.materialize import Sliceable
from dualpipe.quantized import QuantizedTensor
from dualpipe.runtime.files import hold, name_file_in_errors, sync
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder

MAX_SHARD_BYTES = 5 * 10**9
# Files of a source that belong to the model, besides its tensors and config.json.
CARRIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "tiktoken.model",
)
CARRIED = CARRIED_FILES  # the former name


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
    target = Path(path)
    if config.tie_word_embeddings:  # a tied head is written as the embedding
        parts = {name: part for name, part in parts.items() if name != "lm_head.weight"}
    # With one number for the stages of all ranks, `assign_writers` does not compare values, so it needs no samples.
    offers = ranks.gather(lambda: RankOffers(0, {
        name: (Offer(_file_dtype(plan, name, quantized), part.shape, part.box), b"") for name, part in parts.items()
    }))
    folder, carried = ranks.first(lambda: _choose_folder(config, source, target))
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

    def begin() -> None:
        documents = json_documents(config, plan.policy.param_dtype, source, carried, header)
        _begin(folder, target, cleanup, files, documents, _carried_files(config, source))

    with ExitStack() as cleanup:  # stays empty except on rank 0, which makes the directory
        ranks.first(begin)
        ranks.agree(lambda: _write(folder, header, values()))
        ranks.first(lambda: _finish(folder, target))


def _file_dtype(plan: DTypePlan, name: str, quantized: bool) -> torch.dtype | Format:
    """Return the dtype of a parameter in the files, or the format of its blocks."""
    dtypes = plan.of(name)
    return dtypes.stored if quantized and isinstance(dtypes.stored, Format) else dtypes.save


def _choose_folder(
    config: HubConfig, source: StrPath | None, target: Path
) -> tuple[Path, dict[str, TensorHeader]]:
    """Return the temporary directory to write to, and the tensors that are copied from the source.

    A source may consist of config.json and a tokenizer only.
    """
    is_free = not any(target.iterdir()) if target.is_dir() else not target.exists()
    if target.is_symlink() or not is_free:
        raise ValueError(f"{target} exists already; give a new directory, or an empty one")
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    if source is None:
        return folder, {}
    source_config = replace(read_config(source), mtp_depth=config.mtp_depth)
    has_tensors = any((Path(source) / name).exists() for name in (SINGLE, INDEX))
    if not (source_config.carried_layers and has_tensors):
        return folder, {}
    return folder, carried_tensors(source_config, read_headers(source))


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
    return lay_out(tensors, max_shard_bytes, _shard_name, {}), names[rank]


def _shard_name(number: int, count: int) -> str:
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


def _carried_files(config: HubConfig, source: StrPath | None) -> list[Path]:
    """Return the files of a source that are copied, including code if the family's checkpoints include code."""
    if source is None:
        return []
    names = [name for name in CARRIED_FILES if (Path(source) / name).exists()]
    code = sorted(path.name for path in Path(source).glob("*.py")) if config.auto_map else []
    return [file_within(source, name) for name in (*names, *code)]


def _begin(
    folder: Path, target: Path, cleanup: ExitStack, files: Sequence[NewFile], documents: Mapping[str, dict[str, Any]],
    carried_files: Iterable[Path],
) -> None:
    """Make the directory with all files, without the values of tensors. Remove leftovers of writers that were killed.

    A locked directory belongs to a running process: the system releases the lock of a process that dies.

    cleanup: removes the directory if it still has this name, and releases its lock.
    """
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
        with suppress(OSError), ExitStack() as while_removed:
            while_removed.callback(hold(leftover).release)
            shutil.rmtree(leftover)
    folder.mkdir(parents=True)
    with suppress(OSError):  # a file system without locks
        cleanup.callback(hold(folder).release)
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    for name, content in documents.items():
        with name_file_in_errors(folder / name), open(folder / name, "x", encoding="utf-8") as document:
            document.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    for path in carried_files:
        shutil.copyfile(path, folder / path.name)
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
    for path in (*folder.iterdir(), folder):
        sync(path)
    os.rename(folder, target)  # replaces an empty directory
    sync(target.parent)
