"""`dualpipe hf`: look at a Hugging Face checkpoint, or write it again in another dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from os import PathLike

import torch

from dualpipe.checkpoint.hf import Opened, hub_tensors, open_hf
from dualpipe.checkpoint.hf_save import write_model
from dualpipe.checkpoint.hub_files import Reader, TensorInfo
from dualpipe.checkpoint.hub_layout import Piece
from dualpipe.checkpoint.hub_plan import Layout, carried, plan_reads, rank_tensors
from dualpipe.models import HubConfig, build_stages, read_config
from dualpipe.parallel import DTypePolicy, resolve_dtypes
from dualpipe.ranks import RankSync

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def check(path: str | PathLike[str], layout: Layout) -> Iterator[str]:
    """What a checkpoint holds and what of it a rank would read, as lines of text. Reads headers only.

    Raises `ValueError`, with everything that is wrong, for one that cannot be loaded, or not in this layout.
    """
    config = read_config(path)
    opened, _ = open_hf(path, config)
    header = opened.header
    files = len({info.file for info in header.values()})
    yield (f"{path}: {config.model_type}, {len(header):,} tensors in {files:,} file{'s' * (files > 1)}, "
           f"{format_bytes(sum(info.nbytes for info in header.values()))}")
    for dtype, (tensors, size) in sorted(dtype_counts(header).items(), key=lambda entry: -entry[1][1]):
        yield f"  {str(dtype).removeprefix('torch.'):14} {tensors:>9,} tensors {format_bytes(size):>10}"
    if layers := len(config.carried_layers):
        kept = carried(config, header)
        found = len({config.carried_layer(name) for name in kept})
        size = format_bytes(sum(info.nbytes for info in kept.values()))
        yield (f"{found} of {layers} layer{'s' * (layers > 1)} for multi-token prediction, {len(kept):,} tensors, "
               f"{size}: not trained; an export carries them as they are")
    read, held = _largest_share(config, opened, layout)
    yield (f"a rank of pp {layout.pp}, dp {layout.dp}, ep {layout.ep} (two stages each, in a V) reads at most "
           f"{format_bytes(read)} and holds at most {held:,} parameters, {format_bytes(2 * held)} in bf16")
    if config.tie_word_embeddings and layout.dp * layout.ep > 1:
        raise ValueError(f"{path}: tied embeddings cannot be shared by data- or expert-parallel ranks (dp {layout.dp}, "
                         f"ep {layout.ep}); it can be loaded with pp alone")
    yield "it can be loaded"


def dtype_counts(header: dict[str, TensorInfo]) -> dict[torch.dtype, tuple[int, int]]:
    """Tensors and bytes of each dtype."""
    counts: dict[torch.dtype, tuple[int, int]] = {}
    for info in header.values():
        tensors, size = counts.get(info.dtype, (0, 0))
        counts[info.dtype] = tensors + 1, size + info.nbytes
    return counts


def _largest_share(config: HubConfig, opened: Opened, layout: Layout) -> tuple[int, int]:
    """The most bytes that a rank reads and the most parameters that one holds.

    Where something does not divide evenly, the first ranks of "dp" and "ep" have most; so one rank of each pipeline
    place is enough.
    """
    read = held = 0
    for rank in range(0, layout.size, layout.dp * layout.ep):
        reads = plan_reads(opened.header, config, layout, rank, block=opened.block)
        read = max(read, sum(each.nbytes(opened.header) for each in reads))
        tensors = rank_tensors(config, layout, rank)
        if config.tie_word_embeddings and "embed_tokens.weight" in tensors:
            tensors.pop("lm_head.weight", None)
        held = max(held, sum(prod(p.stop - p.start for p in part) for _, part in tensors.values()))
    return read, held


def export(
    source: str | PathLike[str], target: str | PathLike[str], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """Write a checkpoint again, in `dtype` and one canonical layout: dequantized, experts apart where the family's are.

    What is float32 among narrower tensors stays so. One tensor at a time is in memory. Raises `ValueError` for a
    checkpoint that cannot be loaded and for a target that exists; nothing is left behind.
    """
    config = read_config(source)
    opened, origins = open_hf(source, config)
    with torch.device("meta"):
        stages = build_stages(config, 1)
    policy = DTypePolicy(dtype, torch.float32, dtype)
    plan = resolve_dtypes(stages, policy, {name: o.dtype for name, o in origins.items()}, sharded=False)
    pieces = [Piece(name, origin.shape, plan.of(name).save, tuple((0, size) for size in origin.shape))
              for name, origin in origins.items()]
    tensors = hub_tensors(origins, Reader(source, opened.header))
    write_model(RankSync(None), config, [pieces], tensors, target, dtype, source, max_shard_bytes)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500 MB", "2GiB" or a number alone; raises `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) * _UNITS[found[2].upper()] < 1:
        raise ValueError(f"a size must be such as 5GB, 500MB or 2GiB; got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def format_bytes(size: int) -> str:
    """1500 -> "1.5 KB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"
