"""Boxes of tensors, and reading and writing them by ranges; safetensors' own reader and writer are the reference."""

import itertools
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualpipe.checkpoint.tensors import Box, lay_out, read_box, read_header, storable, write_box
from dualpipe.runtime.files import write_file

SHAPE = (3, 4, 5)


def boxes(generator, shape, count):
    for _ in range(count):
        starts = [generator.randint(0, size) for size in shape]
        yield Box(tuple(starts), tuple(generator.randint(0, size - start) for start, size in zip(starts, shape)))


def test_a_box_is_what_its_slices_cut():
    whole = torch.arange(60).view(SHAPE)
    generator = random.Random(0)
    for box, other in zip(boxes(generator, SHAPE, 300), boxes(generator, SHAPE, 300)):
        cut = whole[box.slices]
        assert tuple(cut.shape) == box.shape and cut.numel() == box.numel and Box.from_slices(box.slices) == box
        both = set(cut.flatten().tolist()) & set(whole[other.slices].flatten().tolist())
        shared = box.intersection(other)
        assert (shared is None) == (not both)
        if shared is not None:
            assert set(whole[shared.slices].flatten().tolist()) == both
            assert torch.equal(cut[shared.relative_to(box).slices], whole[shared.slices])
        if box.numel:
            run_starts = box.run_starts(SHAPE)
            length = box.numel // len(run_starts)
            assert [start + i for start in run_starts for i in range(length)] == cut.flatten().tolist()
            gaps = [after - before for before, after in itertools.pairwise(run_starts)]
            assert all(gap > length for gap in gaps) or SHAPE[0] == 1 or len(run_starts) == 1


def test_runs_are_as_long_as_can_be():
    assert Box((1, 0), (2, 5)).run_starts((4, 5)) == [5]
    assert Box((0, 1), (3, 2)).run_starts((3, 5)) == [1, 6, 11]
    assert Box.whole((3, 4)).run_starts((3, 4)) == [0] and Box((), ()).run_starts(()) == [0]


TENSORS = {
    "wide": torch.randn(6, 7, dtype=torch.float64), "cut": torch.randn(4, 6)[:, 1:3],
    "flag": torch.tensor([True, False]), "number": torch.tensor(3), "none": torch.zeros(0, 3),
    "bf16": torch.randn(*SHAPE).bfloat16(),
}
KINDS = {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("max_bytes, count", [(10**6, 1), (100, 3), (1, 6)])
def test_files_are_those_of_safetensors(tmp_path, max_bytes, count):
    files = lay_out(KINDS, max_bytes, "{}-of-{}.safetensors".format, {"said": "ä"})
    assert len(files) == count
    found = {}
    for file in files:
        written = write_file(tmp_path / file.name, file.pieces(TENSORS), "sha256")
        assert written.size == file.size == (tmp_path / file.name).stat().st_size
        header, metadata = read_header(tmp_path / file.name)
        assert header == file.tensors and metadata.get("said") == ("ä" if file is files[0] else None)
        assert all(each.start % each.dtype.itemsize == 0 for each in header.values())
        found |= load_file(tmp_path / file.name)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype


def test_files_are_filled_in_turn():
    """a (40 bytes) and b (6) are one file, c alone is too large for any, d begins the next."""
    narrow, wide = torch.bfloat16, torch.float32
    tensors = {"a": (wide, (10,)), "b": (narrow, (3,)), "c": (wide, (100,)), "d": (narrow, (1,)), "e": (wide, (2,))}
    files = lay_out(tensors, 50, "{}-of-{}".format, {})
    assert [(file.name, list(file.tensors)) for file in files] == [
        ("0-of-3", ["a", "b"]), ("1-of-3", ["c"]), ("2-of-3", ["e", "d"]),  # wide ones first, so that they are aligned
    ]


def test_any_box_is_read_and_written(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in TENSORS.items()}
    save_file(tensors, path)
    header, _ = read_header(path)
    descriptor, generator = os.open(path, os.O_RDWR), random.Random(1)
    for name, tensor in tensors.items():
        for box in boxes(generator, tensor.shape, 50):
            strided = torch.zeros(*box.shape, 2, dtype=torch.float64)[..., 0]
            for out in (torch.zeros(box.shape, dtype=tensor.dtype), strided):
                read_box(descriptor, header[name], box, out)
                assert torch.equal(out, tensor[box.slices].to(out.dtype))
            tensor[box.slices] = 1
            write_box(descriptor, header[name], box, tensor[box.slices])
        assert torch.equal(load_file(path)[name], tensor)
    os.truncate(path, header["bf16"].start + 1)
    with pytest.raises(OSError, match=r"x\.safetensors ends at byte"):
        read_box(descriptor, header["bf16"], Box.whole(SHAPE), torch.empty(SHAPE, dtype=torch.bfloat16))
    os.close(descriptor)


def test_what_is_no_safetensors_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(9)}, path)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + b"\0", b"\xff" * 8 + whole[8:], whole[:8] + b"[" * 100, b"cos\nsystem\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be opened as safetensors"):
            read_header(path)
    with pytest.raises(ValueError, match="cannot be opened as safetensors"):
        read_header(tmp_path / "none")


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz, torch.complex64, torch.uint16], ids=str)
def test_what_the_format_lacks_is_held_as_bytes(dtype):
    tensor = torch.arange(6).view(2, 3).to(torch.float32).to(dtype).mT
    held = storable(tensor)
    assert held is tensor or (held.dtype is torch.uint8 and held.shape == (3, 2, dtype.itemsize))
    assert held.data_ptr() == tensor.data_ptr()
