"""Safetensors files: read headers, read and write any box of a tensor by byte ranges, write whole files.

A safetensors file is an 8-byte little-endian header length, a JSON header padded with spaces to a multiple of 8 bytes,
and the bytes of the tensors without gaps. From the header alone, every rank can compute the byte ranges of its box of a
tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualpipe.kernels.formats import Format
from dualpipe.runtime import storage
from dualpipe.runtime.dtypes import SAFETENSORS_CODES, dtype_of_code
from dualpipe.runtime.storage import Location, ReadInto, RemotePath

_LIKELY_HEADER = 2**20  # bytes that a first request for a remote header reads
_LONGEST_HEADER = 10**8  # what safetensors accepts


class Box(NamedTuple):
    """A rectangular region of a tensor, given by its first index and its shape.

    Example: rows 2 and 3 of a (4, 5) tensor are Box((2, 0), (2, 5)).
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_slices(cls, slices: Sequence[slice]) -> Box:
        """Return the box of `tensor[slices]`. Every dimension needs a slice with start and stop."""
        return cls(tuple(span.start for span in slices), tuple(span.stop - span.start for span in slices))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box: `tensor[box.slices]`."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the intersection with another box of the same tensor, or None if it is empty."""
        shared = []
        for start, size, other_start, other_size in zip(*self, *other, strict=True):
            first = max(start, other_start)
            stop = min(start + size, other_start + other_size)
            if first >= stop:  # return early: most boxes of a tensor in many parts are disjoint
                return None
            shared.append(slice(first, stop))
        return Box.from_slices(shared)

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`, a box that contains it."""
        return Box(tuple(start - origin for start, origin in zip(self.offsets, outer.offsets)), self.shape)

    def run_starts(self, shape: Sequence[int]) -> list[int]:
        """Return the start of every contiguous run of the box, in elements of a contiguous tensor of `shape`.

        All runs have the same length.

        Example: rows 1 and 2 of (4, 5) are one run, from 5; columns 1 and 2 of (3, 5) are three, from 1, 6 and 11.
        """
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # A run spans the last dimension that the box does not cover entirely, and all dimensions after it.
        run_dim = max((dim for dim, size in enumerate(self.shape) if size != shape[dim]), default=0)
        base = sum(start * stride for start, stride in zip(self.offsets[run_dim:], strides[run_dim:]))
        outer_indices = product(*(range(span.start, span.stop) for span in self.slices[:run_dim]))
        return [base + sum(position * stride for position, stride in zip(index, strides)) for index in outer_indices]


class TensorHeader(NamedTuple):
    """The entry of a tensor in the header of a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str  # name of the file
    start: int  # offset of its first byte in the file

    @property
    def nbytes(self) -> int:
        """The size in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


    def byte_ranges(self, box: Box) -> list[tuple[int, int]]:
        """Return start and size of every contiguous run of a box in the file."""
        run_starts = box.run_starts(self.shape) if box.numel else []
        run_size = box.numel * self.dtype.itemsize // max(1, len(run_starts))
        return [(self.start + first * self.dtype.itemsize, run_size) for first in run_starts]


def read_header(path: Location) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Return the tensors of a file by name, and the file's metadata. Reads the header only.

    Raises:
        ValueError: the file cannot be opened; its header does not describe every byte of it, as in a truncated file;
            or torch lacks one of its dtypes.
        OSError: the store of a URL cannot be reached.
    """
    if isinstance(path, RemotePath):
        with _header_copy(path) as copy:
            return _read_local_header(copy, path)
    return _read_local_header(path, path)


@contextmanager
def _header_copy(path: RemotePath) -> Iterator[Path]:
    """Yield a local file with the header of a remote file, since safetensors opens local files only.

    The file has the size of the remote one. Its tensors are holes, which take no memory.
    """
    size = storage.size(path)
    head = bytearray(min(size, 8))
    with storage.open_ranges(path, lambda: [(0, min(size, _LIKELY_HEADER))]) as read_into:
        _transfer_run(read_into, memoryview(head), 0, path.name)
        length = min(int.from_bytes(head, "little"), size - len(head), _LONGEST_HEADER)
        head = bytearray(head + bytes(length))
        _transfer_run(read_into, memoryview(head)[8:], 8, path.name)
    descriptor = os.memfd_create("header")
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, head, 0)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _read_local_header(path: Path, shown: Location) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Read the header of a local file. shown: the location to name in errors."""
    try:
        with safe_open(path, framework="np") as checked:
            metadata = checked.metadata() or {}
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, RecursionError) as error:
        raise ValueError(f"{shown} cannot be opened as safetensors ({error}); download or write it again") from error
    entries.pop("__metadata__", None)
    header = {}
    for name, entry in entries.items():
        start = 8 + length + entry["data_offsets"][0]
        header[name] = TensorHeader(dtype_of_code(entry["dtype"], name), tuple(entry["shape"]), shown.name, start)
    return header, metadata


def read_box(descriptor: int, tensor: TensorHeader, box: Box, out: Tensor) -> None:
    """Like `read_box_with`, from the descriptor of an open file."""
    read_box_with(lambda buffer, start: os.preadv(descriptor, [buffer], start), tensor, box, out)


def read_box_with(read_into: ReadInto, tensor: TensorHeader, box: Box, out: Tensor) -> None:
    """Read a box of a tensor from its open file, and no other bytes.

    Args:
        read_into: reads from the file, from `storage.open_ranges`.
        out: receives the values; of the box's shape, in any dtype, strides and device.

    Raises:
        OSError: the file is too short, or reading fails.
    """
    is_direct = out.device.type == "cpu" and out.dtype is tensor.dtype and out.is_contiguous()
    target = out if is_direct else torch.empty(box.shape, dtype=tensor.dtype, device="cpu")
    _transfer(read_into, tensor, box, target)
    if not is_direct:
        out.copy_(target)


def write_box(descriptor: int, tensor: TensorHeader, box: Box, values: Tensor) -> None:
    """Write a box of a tensor to its place in the open file.

    Args:
        values: of the box's shape and the file's dtype, on any device.

    Raises:
        OSError: writing fails.
    """
    _transfer(lambda buffer, start: os.pwrite(descriptor, buffer, start), tensor, box, values.cpu().contiguous())


def _transfer(move: Callable[[memoryview, int], int], tensor: TensorHeader, box: Box, values: Tensor) -> None:
    """Call `move(buffer, file_offset)` for every run of a box until all bytes are transferred.

    `move` returns the number of bytes that it transferred, 0 at the end of the file.
    """
    raw = bytes_of(values)
    for index, (start, size) in enumerate(tensor.byte_ranges(box)):
        _transfer_run(move, raw[index * size : (index + 1) * size], start, tensor.file)


def _transfer_run(move: Callable[[memoryview, int], int], buffer: memoryview, start: int, file: str) -> None:
    """Call `move(buffer, file_offset)` until the whole buffer is transferred."""
    while len(buffer):  # a call transfers at most 2 GB
        count = move(buffer, start)
        if not count:
            raise OSError(f"{file} ends at byte {start}")
        buffer = buffer[count:]
        start += count


def dtype_and_shape_in_file(
    dtype: torch.dtype | Format, shape: Sequence[int]
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that a box has in a safetensors file.

    A box in a format, whose values are quantized, is stored as its block rows (see `kernels.formats`). A dtype that
    safetensors lacks is stored as bytes in an extra last dimension.
    """
    if isinstance(dtype, Format):
        return torch.uint8, block_rows(Box.whole(shape), dtype, shape[-1]).shape
    if dtype in SAFETENSORS_CODES:
        return dtype, tuple(shape)
    return torch.uint8, (*shape, dtype.itemsize)


def bytes_in_file(dtype: torch.dtype | Format, shape: Sequence[int]) -> int:
    """Return the size of a box in a file, in bytes."""
    file_dtype, file_shape = dtype_and_shape_in_file(dtype, shape)
    return prod(file_shape) * file_dtype.itemsize


def block_rows(box: Box, format: Format, columns: int) -> Box:
    """Return the box of block rows that contains a box of values.

    Values are a matrix (N, K) or a stack of matrices (M, N, K). Block rows have the dimensions (matrices, block rows,
    bytes).
    """
    rows_per_block = format.block[0]
    first = box.offsets[-2]
    last = first + box.shape[-2]
    start = first // rows_per_block
    stop = -(-last // rows_per_block)
    first_matrix, matrices = (box.offsets[0], box.shape[0]) if len(box.shape) == 3 else (0, 1)
    return Box((first_matrix, start, 0), (matrices, stop - start, format.row_bytes(columns)))


def storable(tensor: Tensor) -> Tensor:
    """Return a view that a safetensors file can hold: bytes in an extra last dimension for dtypes that it lacks."""
    return tensor if tensor.dtype in SAFETENSORS_CODES else tensor.detach().unsqueeze(-1).view(torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a one-dimensional uint8 tensor that shares its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a tensor of one element may have any strides
    return flat.view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous tensor in host memory as a memoryview that shares its memory."""
    return as_bytes(tensor).numpy().data


class NewFile(NamedTuple):
    """A safetensors file to write: its name, its length and header bytes, and its tensors in file order."""

    name: str
    head: bytes
    tensors: dict[str, TensorHeader]

    @property
    def size(self) -> int:
        """The size of the complete file, in bytes."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterable[bytes | memoryview]:
        """Return the bytes of the file in order, for `storage.write`, which may iterate over them several times.

        Copies one device tensor at a time to the host.
        """
        return _FilePieces(self, tensors)


class _FilePieces:
    """The bytes of a new file."""

    def __init__(self, file: NewFile, tensors: Mapping[str, Tensor]) -> None:
        self._file = file
        self._tensors = tensors

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._file.head
        for name in self._file.tensors:
            yield bytes_of(self._tensors[name].cpu().contiguous())


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], max_bytes: int, file_name: Callable[[int, int], str],
    metadata: Mapping[str, str],
) -> list[NewFile]:
    """Distribute tensors over files of at most `max_bytes` of tensors, in order. A larger tensor gets a separate file.

    Args:
        tensors: dtype (one that safetensors supports) and shape by name. No tensors make one empty file.
        max_bytes: most bytes of tensors in a file.
        file_name: maps the number of a file, from 0, and the number of files to a name.
        metadata: stored in the header of the first file.
    """
    groups = _fill_files(tensors, max_bytes)
    files = []
    for number, group in enumerate(groups):
        file_metadata = {"format": "pt", **({} if number else metadata)}
        files.append(_new_file(file_name(number, len(groups)), group, file_metadata))
    return files


def _fill_files(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], max_bytes: int
) -> list[dict[str, TensorHeader]]:
    """Return the tensors of every file. File name and start are not known yet."""
    groups: list[dict[str, TensorHeader]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        header = TensorHeader(dtype, tuple(shape), "", 0)
        if groups[-1] and filled + header.nbytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = header
        filled += header.nbytes
    return groups


def _new_file(file: str, tensors: Mapping[str, TensorHeader], metadata: Mapping[str, str]) -> NewFile:
    """Encode the header of a file, and place its tensors: the widest dtypes first, so that all are aligned."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts = {}
    end = 0
    for name, header in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name] = end
        end += header.nbytes
        entries[name] = {"dtype": SAFETENSORS_CODES[header.dtype], "shape": header.shape,
                         "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    placed = {name: tensors[name]._replace(file=file, start=len(head) + start) for name, start in starts.items()}
    return NewFile(file, head, placed)
