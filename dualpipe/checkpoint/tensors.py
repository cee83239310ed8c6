"""Tensors in safetensors files: what a header says, reading any box of a tensor by its bytes, writing whole files.

A safetensors file is the length of its header (8 bytes, little-endian), the header as JSON, padded with spaces to a
multiple of 8, and the tensors' bytes without gaps. So every rank knows where its box of a tensor goes, or lies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualpipe.kernels.formats import Format
from dualpipe.runtime.dtypes import SAFETENSORS_CODES, dtype_of_code


class Box(NamedTuple):
    """A box in a tensor: the index at which it begins, and its shape.

    Example: rows 2 and 3 of a (4, 5) tensor are Box((2, 0), (2, 5)).
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, place: Sequence[slice]) -> Box:
        """What `tensor[place]` is; a slice with start and stop for each dimension."""
        return cls(tuple(part.start for part in place), tuple(part.stop - part.start for part in place))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of it in the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape))

    @property
    def numel(self) -> int:
        """The elements that are in it."""
        return prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """What two boxes in one tensor share; None where that is nothing."""
        shared = []
        for start, size, other_start, other_size in zip(*self, *other, strict=True):
            first, stop = max(start, other_start), min(start + size, other_start + other_size)
            if first >= stop:  # as of most boxes of a tensor in many parts: no time is lost on them
                return None
            shared.append(slice(first, stop))
        return Box.at(shared)

    def within(self, outer: Box) -> Box:
        """The same box in a tensor that is the box `outer`."""
        return Box(tuple(ours - theirs for ours, theirs in zip(self.offsets, outer.offsets)), self.shape)

    def runs(self, shape: Sequence[int]) -> list[int]:
        """Where the contiguous runs that make it up start, in elements of a tensor of `shape`; all equally long.

        Example: rows 1 and 2 of (4, 5) are one run, from 5; columns 1 and 2 of (3, 5) are three, from 1, 6 and 11.
        """
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # Within the last dimension that is cut, it is contiguous.
        outer = max((dim for dim, size in enumerate(self.shape) if size != shape[dim]), default=0)
        base = sum(start * stride for start, stride in zip(self.offsets[outer:], strides[outer:]))
        indices = product(*(range(part.start, part.stop) for part in self.slices[:outer]))
        return [base + sum(index * stride for index, stride in zip(each, strides)) for each in indices]


class TensorHeader(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str  # its name
    start: int  # the first of its bytes in the file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """The tensors of a file by name, and its metadata. Reads the header only.

    Raises ValueError for a file that cannot be opened, or whose header does not describe every byte of it, as one that
    was cut short; and for a dtype that torch lacks.
    """
    try:
        with safe_open(path, framework="np") as checked:
            metadata = checked.metadata() or {}
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be opened as safetensors ({error}); download or write it again") from error
    entries.pop("__metadata__", None)
    return {name: TensorHeader(dtype_of_code(entry["dtype"], name), tuple(entry["shape"]), path.name,
                               8 + length + entry["data_offsets"][0]) for name, entry in entries.items()}, metadata


def read_box(descriptor: int, tensor: TensorHeader, box: Box, out: Tensor) -> None:
    """Read a box of a tensor from its open file, and no byte besides.

    out: takes it, of the box's shape, in any dtype, strides and device. Raises OSError where the file ends before, or
    the disk fails.
    """
    is_direct = out.device.type == "cpu" and out.dtype is tensor.dtype and out.is_contiguous()
    read = out if is_direct else torch.empty(box.shape, dtype=tensor.dtype, device="cpu")
    _transfer(lambda part, start: os.preadv(descriptor, [part], start), tensor, box, read)
    if not is_direct:
        out.copy_(read)


def write_box(descriptor: int, tensor: TensorHeader, box: Box, values: Tensor) -> None:
    """Write a box of a tensor where it belongs in its open file; raises OSError where the disk refuses.

    values: in the dtype of the file, on any device.
    """
    _transfer(lambda part, start: os.pwrite(descriptor, part, start), tensor, box, values.cpu().contiguous())


def _transfer(move: Callable[[memoryview, int], int], tensor: TensorHeader, box: Box, values: Tensor) -> None:
    """Call `move` with the bytes of each run of a box and where they are in the file, until it has moved them all."""
    raw, starts = bytes_of(values), box.runs(tensor.shape) if box.numel else []
    size = len(raw) // max(1, len(starts))
    for index, first in enumerate(starts):
        part, start = raw[index * size : (index + 1) * size], tensor.start + first * tensor.dtype.itemsize
        while len(part):  # one call moves 2 GB at most
            count = move(part, start)
            if not count:
                raise OSError(f"{tensor.file} ends at byte {start}")
            part, start = part[count:], start + count


def in_file(dtype: torch.dtype | Format, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape that a box of a tensor has in a safetensors file; of one in a format those of its block rows."""
    if isinstance(dtype, Format):
        return torch.uint8, block_rows(Box.whole(shape), dtype, shape[-1]).shape
    return (dtype, tuple(shape)) if dtype in SAFETENSORS_CODES else (torch.uint8, (*shape, dtype.itemsize))


def bytes_in_file(dtype: torch.dtype | Format, shape: Sequence[int]) -> int:
    """Bytes that a box of a tensor takes in a file."""
    held, shape = in_file(dtype, shape)
    return prod(shape) * held.itemsize


def block_rows(box: Box, format: Format, columns: int) -> Box:
    """The box of block rows (matrices, block rows, bytes) that a box of numbers, (N, K) or (M, N, K), is in."""
    step, first, rows = format.block[0], box.offsets[-2], box.shape[-2]
    start, stop = first // step, -(-(first + rows) // step)
    matrices = (box.offsets[0], box.shape[0]) if len(box.shape) == 3 else (0, 1)
    return Box((matrices[0], start, 0), (matrices[1], stop - start, format.row_bytes(columns)))


def storable(tensor: Tensor) -> Tensor:
    """A view of a tensor that a safetensors file can hold: its bytes in a last dimension where the format lacks it."""
    return tensor if tensor.dtype in SAFETENSORS_CODES else tensor.detach().unsqueeze(-1).view(torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, sharing its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # one element may have any strides


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, sharing it."""
    return as_bytes(tensor).numpy().data


class NewFile(NamedTuple):
    """A safetensors file to be written: its name, its first bytes and where each tensor goes, in the file's order."""

    name: str
    head: bytes
    tensors: dict[str, TensorHeader]

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
        """Its bytes in turn, for `write_file`: of a device's tensors at most one is in host memory besides."""
        yield self.head
        for name in self.tensors:
            yield bytes_of(tensors[name].cpu().contiguous())


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], max_bytes: int, name: Callable[[int, int], str],
    metadata: Mapping[str, str],
) -> list[NewFile]:
    """Fill files of at most `max_bytes` of tensors in turn; a larger tensor has one of its own.

    tensors: dtype (one that safetensors has) and shape by name. name: of a file, by its number from 0 and how many
    there are. metadata: of the first. Without tensors there is one file.
    """
    groups: list[dict[str, TensorHeader]] = [{}]
    filled = 0
    for key, (dtype, shape) in tensors.items():
        header = TensorHeader(dtype, tuple(shape), "", 0)
        if groups[-1] and filled + header.nbytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][key] = header
        filled += header.nbytes
    files = []
    for number, group in enumerate(groups):
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **({} if number else metadata)}}
        starts, end = {}, 0
        for key, each in sorted(group.items(), key=lambda item: -item[1].dtype.itemsize):  # so that all are aligned
            starts[key], end = end, end + each.nbytes
            entries[key] = {"dtype": SAFETENSORS_CODES[each.dtype], "shape": each.shape,
                            "data_offsets": [starts[key], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head, file = len(text).to_bytes(8, "little") + text, name(number, len(groups))
        files.append(NewFile(file, head, {key: group[key]._replace(file=file, start=len(head) + start)
                                          for key, start in starts.items()}))
    return files
