"""Writing the stages of all ranks as one Hugging Face checkpoint, every rank its own part.

    rank 0      a directory beside the target, with config.json, the tokenizer, the index, and the files at full size
                with their headers
    every rank  the bytes of the parameters that it holds, where they belong in the files; rank 0 those besides that are
                carried from the source: of layers for multi-token prediction that are not trained
    rank 0      the directory takes its name

Nothing is gathered, and the files are the same whichever layout wrote them.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from io import FileIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dualpipe.checkpoint.assign import assign
from dualpipe.checkpoint.hub.files import CONFIG, INDEX, SINGLE, Reader, StrPath, file_within, read_headers, read_json
from dualpipe.checkpoint.hub.load import blocks, config_of, model_shapes
from dualpipe.checkpoint.hub.save_quantized import check_quantized, forms, quantization_config, unpack
from dualpipe.checkpoint.state import parts_of, training_state
from dualpipe.checkpoint.tensors import Box, NewFile, TensorHeader, lay_out, write_box
from dualpipe.kernels.formats import Format
from dualpipe.models import HubConfig, config_from_dict, read_config
from dualpipe.models.hub import MTP_LAYERS
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.fsdp.materialize import Sliceable
from dualpipe.quantized import QuantizedTensor
from dualpipe.runtime.dtypes import long_name
from dualpipe.runtime.files import hold, naming, sync
from dualpipe.runtime.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder

MAX_SHARD_BYTES = 5 * 10**9
# What a source's directory has besides tensors and config.json that belongs to the model.
CARRIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "tiktoken.model",
)
_OF_FILES = {"quantization_config", "auto_map", "torch_dtype", "dtype"}  # in config.json: of the source's files alone


def save_hf(
    stages: Sequence[nn.Module], path: StrPath, mesh: DeviceMesh | None, plan: DTypePlan, *,
    source: StrPath | None = None, max_shard_bytes: int = MAX_SHARD_BYTES, quantized: bool = False,
) -> None:
    """Write the model to a new directory as safetensors, which transformers, vLLM and others read.

    Called by all ranks of `mesh` (from `build_mesh`) together, or by one process with None and all stages. `path` must
    be on a file system that all ranks share. Tensors get the dtypes `plan.of(name).save`, so one that is pinned to
    float32 stays so; experts are written apart, where the family's are; a tied head is not written. A rank takes the
    memory of one hub tensor on top. The timeout of the default process group must be longer than the writing takes.

    `source`, a checkpoint of the same model, is where `config.json`, `generation_config.json` and the tokenizer come
    from, and the code where the family's comes with its checkpoints (Kimi K2); without one, `config.json` has only what
    this library knows. Layers for multi-token prediction (DeepSeek-V3) are written as all others where the model has
    them to be trained, each with a copy of the embedding and of the head. Else they are carried from it byte for byte,
    FP8 with its scales too. Those that it lacks `config.json` does not announce; that is warned.
    `quantized`: weights that are stored in the format of the family's quantized checkpoints, fp8_block or of gpt-oss
    mxfp4, are written as their elements and scales, which untrained are those that were loaded, and `config.json` says
    so. Otherwise that never says quantized, and of such weights the masters are written, or where frozen what they
    stand for.
    `max_shard_bytes`: of the tensors in a file; a larger tensor has a file of its own.

    The directory appears when it is complete. Raises, on every rank, with nothing left behind:
        ValueError: `path` exists and is not empty; a source that is another model; ranks that do not hold all of the
            model between them; a plan that lacks a tensor; `quantized`, and weights in a format that the family's
            checkpoints lack, or none in one.
        OSError (RuntimeError with several ranks): writing failed on some rank.
    """
    ranks = RankSync.of_mesh(mesh)
    config = ranks.agree(lambda: config_of(stages))

    def held() -> dict[str, tuple[tuple[int, ...], Box, Sliceable]]:
        for inner in chain.from_iterable(stage.modules() for stage in stages):
            if isinstance(inner, FSDPModule):
                inner.reshard()  # a root stays gathered after a forward
        if quantized:
            check_quantized(config, plan)
        return {name: (shape, box, tensor if weight is None else weight.detach())
                for name, (shape, box, tensor, weight) in parts_of(training_state(stages)).items()}

    write_model(ranks, config, ranks.agree(held), path, plan, source, max_shard_bytes, quantized)


def write_model(
    ranks: RankSync, config: HubConfig, parts: Mapping[str, tuple[tuple[int, ...], Box, Sliceable]], path: StrPath,
    plan: DTypePlan, source: StrPath | None, max_shard_bytes: int, quantized: bool = False,
) -> None:
    """Write what each rank holds. parts: this rank's, by our names, as of `TensorPart`."""
    target, dtype = Path(path), plan.policy.param_dtype
    # A tied head is written as the embedding.
    own = [name for name in parts if not (config.tie_word_embeddings and name == "lm_head.weight")]

    def saved_in(name: str) -> torch.dtype | Format:
        dtypes = plan.of(name)
        return dtypes.stored if quantized and isinstance(dtypes.stored, Format) else dtypes.save

    offers = ranks.gather(lambda: (0, {name: ((saved_in(name), *parts[name][:2]), b"") for name in own}))

    def look() -> tuple[Path, dict[str, TensorHeader]]:
        """Where to write, and what is carried of the source, which may have a config.json and a tokenizer alone."""
        is_free = not any(target.iterdir()) if target.is_dir() else not target.exists()
        if target.is_symlink() or not is_free:
            raise ValueError(f"{target} exists already; give a new directory, or an empty one")
        folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
        if source is None:
            return folder, {}
        described = replace(read_config(source), mtp_depth=config.mtp_depth)
        has_tensors = any((Path(source) / name).exists() for name in (SINGLE, INDEX))
        return folder, carried(described, read_headers(source)) if described.carried_layers and has_tensors else {}

    folder, kept = ranks.first(look)

    def arrange() -> tuple[list[NewFile], list[str]]:
        """All files, and the names of ours whose parts this rank writes."""
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}")
        names, stored = assign(offers)
        tensors = new_tensors(config, {name: each.dtype for name, each in stored.items()})
        tensors |= {name: (info.dtype, info.shape) for name, info in kept.items()}
        files = lay_out(tensors, max_shard_bytes, metadata={}, name=lambda number, count:
                        SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors")
        return files, names[ranks.rank]

    files, written = ranks.agree(arrange)
    header = {name: tensor for file in files for name, tensor in file.tensors.items()}

    def data() -> Iterator[tuple[str, Box, Tensor]]:
        """What this rank writes: tensors of the files, boxes in them, and their values in the same dtype."""
        for name in written:
            (shape, box, held), form = parts[name], saved_in(name)
            plain = held.master if isinstance(held, QuantizedTensor) else held
            stored = {part.name: (part, how) for part, how in forms(config, name, shape, form)}
            for part, at, into in blocks((part for part, _ in stored.values()), box):
                if isinstance(form, Format):
                    files = stored[part.name][1].raw(at)
                    yield from ((*file, each) for file, each in zip(files, unpack(cast(QuantizedTensor, held), into)))
                    continue
                if plain is None:  # whole matrices are dequantized, as these rows may cut through blocks
                    values = cast(QuantizedTensor, held[into.slices[:-2]]).dequantize()[..., into.slices[-2], :]
                else:
                    values = plain[into.slices]
                yield part.name, at, (values.mT if part.transposed else values).to("cpu", form)
        if source is not None and ranks.rank == 0:
            read = Reader(source, kept)
            yield from ((name, box, read(name, box)) for name, info in kept.items() for box in [Box.whole(info.shape)])

    with ExitStack() as ending:  # of rank 0
        ranks.first(lambda: _begin(folder, target, ending, files, _documents(config, dtype, source, kept, header),
                                   _carried_files(config, source)))
        ranks.agree(lambda: _write(folder, header, data()))
        ranks.first(lambda: _finish(folder, target))


def new_tensors(
    config: HubConfig, dtypes: Mapping[str, torch.dtype | Format]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of the hub's tensors of a model, in its order, without a tied head.

    `dtypes`: those of ours that they are part of, or formats. Raises `ValueError` for tensors that have none.
    """
    shapes = model_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    if missing := [name for name in shapes if name not in dtypes]:
        raise ValueError(f"no rank holds {', '.join(missing[:10])}{' ...' if missing[10:] else ''}; pass the mesh, "
                         "and all stages of every rank")
    return {file: (dtype, box.shape) for name, shape in shapes.items()
            for _, how in forms(config, name, shape, dtypes[name])
            for (file, box), dtype in zip(how.raw(Box.whole(how.shape)), how.dtypes or (how.dtype,))}


def carried(config: HubConfig, header: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """What an export takes along of a checkpoint as it is: the layers for multi-token prediction that it announces.

    If one of them is missing, none behind it: config.json can say only how many there are.
    """
    layer_of = {name: config.carried_layer(name) for name in header}
    layers = config.carried_layers
    stop = next((layer for layer in layers if layer not in layer_of.values()), layers.stop)
    return {name: header[name] for name, layer in layer_of.items() if layer is not None and layer < stop}


def _documents(
    config: HubConfig, dtype: torch.dtype, source: StrPath | None, kept: Iterable[str],
    header: Mapping[str, TensorHeader],
) -> dict[str, dict[str, Any]]:
    """The files in JSON; `kept`: the tensors that are carried, `header`: all that are written."""
    content = config.to_dict() if source is None else read_json(source, CONFIG)
    described = replace(config_from_dict(content), mtp_depth=config.mtp_depth)
    if source is not None and described != config:
        theirs, ours = asdict(described), asdict(config)
        differ = ", ".join(f"{key}: {theirs.get(key)} there, {value} in the model" for key, value in ours.items()
                           if theirs.get(key) != value)
        raise ValueError(f"{source} is of another model ({differ or described.model_type}); give the one that the "
                         "model was made from, or none")
    content = {key: value for key, value in content.items() if key not in _OF_FILES}
    if config.auto_map:
        content["auto_map"] = _auto_map(config, source)
    layers = config.mtp_depth + len({described.carried_layer(name) for name in kept})
    for key in [key for key in MTP_LAYERS if key in content] or MTP_LAYERS[: min(layers, 1)]:
        if (content.get(key) or 0) > layers:
            lacks = "no source was given" if source is None else f"{source} has no tensors of more"
            warnings.warn(
                f"config.json says {key} = {layers} instead of {content[key]}: layers for multi-token prediction that "
                f"were not trained are only carried, and {lacks}; the source is the checkpoint that the model was "
                "made from (init.from_hf, or `dualpipe hf export --source`)", stacklevel=2,
            )
        content[key] = layers
    told = {} if source is None else read_json(source, CONFIG).get("quantization_config")
    if quantization := quantization_config(config, header, told or {}):
        content["quantization_config"] = quantization
    documents = {CONFIG: content | {"dtype": long_name(dtype)}}
    if len({tensor.file for tensor in header.values()}) > 1:
        documents[INDEX] = {
            "metadata": {"total_parameters": sum(prod(tensor.shape) for tensor in header.values()),
                         "total_size": sum(tensor.nbytes for tensor in header.values())},
            "weight_map": {name: tensor.file for name, tensor in sorted(header.items())},
        }
    return documents


def _auto_map(config: HubConfig, source: StrPath | None) -> dict[str, Any]:
    """The "auto_map" of a family whose code comes with its checkpoint: the source's, where the files that it names are
    there and so go along; else that of the published checkpoint."""
    theirs = {} if source is None else read_json(source, CONFIG).get("auto_map")
    if source is None or not isinstance(theirs, dict) or not theirs:
        return dict(config.auto_map)
    code = {path.stem for path in Path(source).glob("*.py")}
    entries = (entry for value in theirs.values() for entry in (value if isinstance(value, list) else [value]))
    places = [str(entry) for entry in entries if entry is not None]  # "module.Class", or "owner/name--module.Class"
    is_complete = all("--" in place or place.partition(".")[0] in code for place in places)
    return theirs if is_complete else dict(config.auto_map)


def _carried_files(config: HubConfig, source: StrPath | None) -> list[Path]:
    """The files of a source that go into an export as they are; its code too, where the family's comes with it."""
    if source is None:
        return []
    names = [name for name in CARRIED if (Path(source) / name).exists()]
    code = sorted(path.name for path in Path(source).glob("*.py")) if config.auto_map else []
    return [file_within(source, name) for name in (*names, *code)]


def _begin(
    folder: Path, target: Path, ending: ExitStack, files: Sequence[NewFile], documents: Mapping[str, dict[str, Any]],
    carried_files: Iterable[Path],
) -> None:
    """Make the directory, with all files but their tensors; remove those that killed writers of the same target left.

    What is locked belongs to a process that lives: the system frees it when that dies. `ending` removes the directory,
    if it still has this name, and frees it.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
        with suppress(OSError), ExitStack() as while_removed:
            while_removed.callback(hold(left).release)
            shutil.rmtree(left)
    folder.mkdir(parents=True)
    with suppress(OSError):  # of a file system without locks
        ending.callback(hold(folder).release)
    ending.callback(shutil.rmtree, folder, ignore_errors=True)
    for name, content in documents.items():
        with naming(folder / name), open(folder / name, "x", encoding="utf-8") as document:
            document.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    for path in carried_files:
        shutil.copyfile(path, folder / path.name)
    for file in files:
        with naming(folder / file.name), open(folder / file.name, "xb") as out:
            out.write(file.head)
            out.truncate(file.size)


def _write(folder: Path, header: Mapping[str, TensorHeader], data: Iterable[tuple[str, Box, Tensor]]) -> None:
    """Write values where they belong, flushed to the disk."""
    opened: dict[str, FileIO] = {}
    recorder = Recorder.current()
    with ExitStack() as stack:
        for name, box, values in data:
            file = header[name].file
            with naming(folder / file), recorder.doing("write", name):
                if file not in opened:
                    opened[file] = stack.enter_context(open(folder / file, "r+b", buffering=0))
                write_box(opened[file].fileno(), header[name], box, values)
        for file, out in opened.items():
            with naming(folder / file):
                os.fsync(out)


def _finish(folder: Path, target: Path) -> None:
    """Flush the rest to the disk, and give the directory its name."""
    for path in (*folder.iterdir(), folder):
        sync(path)
    os.rename(folder, target)  # onto an empty directory too
    sync(target.parent)
