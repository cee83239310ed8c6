"""Quantized weights in checkpoints: as block rows, into every layout, format or none; misfits are refused."""

from math import prod
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dualpipe.checkpoint import Checkpoints, load, save, verify
from dualpipe.checkpoint.commands import ls, show
from dualpipe.checkpoint.state import parts_of
from dualpipe.checkpoint.tensors import read_header
from dualpipe.kernels.formats import FORMATS
from dualpipe.nn.accumulators import local
from dualpipe.parallel import Rule
from dualpipe.parallel.mesh import build_mesh
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.printing import format_bytes
from native import Trainee, load_trainee, save_trainee
from ranks import run_ranks

SHAPES = {"dense.weight": (512, 64), "experts.weight": (4, 512, 32), "partial.weight": (300, 32)}
LAYOUTS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)]
SOME = ("mxfp8", "nvfp4", "fp8_block")


def whole(name, seed=0):
    generator = torch.Generator().manual_seed(seed + len(name))
    values = torch.randn(SHAPES[name], generator=generator)
    return values * torch.logspace(-2, 2, values.shape[-2])[:, None]  # so that parts have other largest values


def cut(values, placements, mesh):
    """Return this rank's part of a tensor, cut shard after shard."""
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            values = values.chunk(mesh.size(dim), placement.dim)[mesh.get_coordinate()[dim]]
    return values


def make(form, shape=(1, 1, 1), seed=0):
    """Build weights in a format, or unquantized in a dtype.

    Dense ones are sharded by rows over all ranks; experts over ep, and their rows over dp. `partial.weight` stays
    whole, as its blocks cannot be shared.
    """
    mesh, state = None if prod(shape) == 1 else build_mesh(*shape, torch.device("cpu"))["dp", "ep"], {}
    for name in SHAPES:
        values = whole(name, seed)
        tensor = QuantizedTensor.quantize(values, form) if form in FORMATS else values.to(form)
        if mesh is not None and name != "partial.weight":
            placements = [Shard(0), Shard(0)] if name == "dense.weight" else [Shard(1), Shard(0)]
            part = cut(tensor, placements, mesh)
            part = part.clone() if isinstance(part, QuantizedTensor) else part.contiguous()
            size = {"shape": tensor.shape, "stride": tensor.stride()}
            tensor = DTensor.from_local(part, mesh, placements, run_check=False, **size)
        state[name] = tensor
    return state


def same(actual, expected):
    if isinstance(actual, DTensor):
        expected = cut(expected, actual.placements, actual.device_mesh)
        actual = actual.to_local()
    return type(actual) is type(expected) and actual.dtype is expected.dtype and torch.equal(actual, expected)


def same_part(actual, expected):
    actual, expected = (each.to_local() if isinstance(each, DTensor) else each for each in (actual, expected))
    return same(actual, expected)


def mesh_of(shape):
    return None if prod(shape) == 1 else build_mesh(*shape, torch.device("cpu"))


def write(rank, folder, shape, forms, how="sync"):
    for form in forms:
        state, kind = make(form, shape), "thread" if how == "sync" else how
        with Checkpoints(Path(folder) / str(form), mesh_of(shape), kind=kind) as checkpoints:
            if how == "sync":
                checkpoints.save(state, step=1)
            else:
                checkpoints.save_async(state, step=1)
                for tensor in state.values():
                    part = quantized_part(tensor)
                    part.block_rows.fill_(255)


def read(rank, folder, shape, forms):
    for form in forms:
        state = make(form, shape, seed=1)
        load(Path(folder) / str(form), state, mesh=mesh_of(shape))
        expected = make(form)
        assert all(same(state[name], expected[name]) for name in SHAPES), form


@pytest.mark.slow
@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_layouts(tmp_path, saved, loaded):
    forms = tuple(FORMATS) if saved == loaded else SOME
    run_ranks(write, prod(saved), str(tmp_path), saved, forms)
    run_ranks(read, prod(loaded), str(tmp_path), loaded, forms)


def test_the_files_hold_block_rows_once(tmp_path):
    run_ranks(write, 4, str(tmp_path), (1, 2, 2), SOME)
    for form in SOME:
        (path,) = (tmp_path / form).glob("step-*")
        stored = sum(tensor.nbytes for tensor in make(form).values())
        headers = [read_header(file)[0].values() for file in path.glob("*.safetensors")]
        assert len(headers) == 4 and sum(header.nbytes for each in headers for header in each) == stored
        assert verify(path) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "process"])
def test_background_saves_are_those_of_the_moment(tmp_path, how):
    run_ranks(write, 2, str(tmp_path), (1, 2, 1), SOME)
    run_ranks(write, 2, str(tmp_path / how), (1, 2, 1), SOME, how)
    for form in SOME:
        found = [{file.name: file.read_bytes()[-make(form)["partial.weight"].nbytes :] for file in
                  (folder / form).glob("step-*/*.safetensors")} for folder in (tmp_path, tmp_path / how)]
        assert len(found[0]) == 2 and found[0] == found[1]
    run_ranks(read, 2, str(tmp_path / how), (1, 2, 1), SOME)


def convert(rank, folder, shape):
    """Load each form into each other one that `allow` names; equal to quantizing the whole at once, in any layout."""
    for saved in ("fp8_block", torch.bfloat16):
        for form in (*SOME, torch.float32):
            if form == saved:
                continue
            state = make(form, shape, seed=1)
            expected = make(form, shape, seed=1)
            there, here = (short_name(FORMATS.get(each, each)) for each in (saved, form))
            with pytest.raises(ValueError, match=f"dense.weight is {there} in the checkpoint, {here} in the model"):
                load(Path(folder) / str(saved), state, mesh=mesh_of(shape))
            assert all(same_part(state[name], expected[name]) for name in SHAPES)
            load(Path(folder) / str(saved), state, mesh=mesh_of(shape), allow=["*"])
            for name, values in make(saved).items():
                numbers = values.float() if saved is torch.bfloat16 else values.dequantize()
                expected = QuantizedTensor.quantize(numbers, form) if form in FORMATS else numbers.to(form)
                assert same(state[name], expected), (name, saved, form)
                part = quantized_part(state[name])
                assert part is None or part.master is None


@pytest.mark.parametrize("shape", [(1, 1, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_other_forms(tmp_path, shape):
    run_ranks(write, 2, str(tmp_path), (1, 2, 1), ("fp8_block", torch.bfloat16))
    run_ranks(convert, prod(shape), str(tmp_path), shape)


def test_plain_parts_of_blocks(tmp_path):
    """Unquantized tensors may be cut anywhere: rows within blocks, columns."""
    run_ranks(write, 1, str(tmp_path), (1, 1, 1), ("fp8_block",))
    run_ranks(read_odd_parts, 2, str(tmp_path))


def read_odd_parts(rank, folder):
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))["dp"]
    for name, dim in [("partial.weight", 0), ("dense.weight", 1), ("experts.weight", 2), ("experts.weight", 1)]:
        expected = QuantizedTensor.quantize(whole(name), "fp8_block").dequantize()
        tensor = DTensor.from_local(torch.zeros(cut(expected, [Shard(dim)], mesh).shape), mesh, [Shard(dim)])
        load(Path(folder) / "fp8_block", {name: tensor}, mesh=mesh_of((1, 2, 1)), allow=["*"])
        assert same(tensor, expected)


def test_a_master_is_what_the_bytes_stand_for(tmp_path):
    """The values of the bytes initialize the masters, where no optimizer state has masters."""
    save(tmp_path, make("mxfp8"), step=1)
    name = "dense.weight"
    trained = QuantizedTensor.quantize(whole(name, 1), "mxfp8", keep_master=True)
    load(tmp_path, {name: trained}, allow=["*"])
    assert same(trained, make("mxfp8")[name]) and torch.equal(trained.master, trained.dequantize())


def test_commands_name_formats_and_sizes(tmp_path):
    save(tmp_path, make("fp8_block") | {"norm.weight": torch.ones(8)}, step=1)
    assert "fp32, fp8_block" in list(ls(tmp_path))[1]
    lines = list(show(tmp_path))
    stored = sum(tensor.nbytes for tensor in make("fp8_block").values()) + 32
    model = next(line for line in lines if line.startswith("model: "))
    assert "4 tensors (3 fp8_block, 1 fp32)" in model and model.endswith(format_bytes(stored))
    assert "  dense.weight  (512, 64)  fp8_block" in lines


# --- trained ones: their masters are what is stored, and give the bytes ----------------------------------------------

RULES = {
    "stored": (Rule("*.experts", storage="nvfp4"), Rule("*.self_attn", storage="mxfp8")),
    "gathered": (Rule("*.experts", gather="nvfp4"), Rule("*.self_attn", gather="mxfp8")),
    "plain": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("saved, loaded, ways", [
    ((1, 2, 2), (2, 1, 2), ("stored", "stored")), ((1, 1, 1), (1, 2, 1), ("plain", "stored")),
    ((1, 2, 2), (1, 1, 1), ("gathered", "gathered")), ((2, 1, 2), (1, 2, 1), ("stored", "gathered")),
])
def test_masters_go_into_every_layout_and_way(tmp_path, saved, loaded, ways):
    """A checkpoint does not record how weights are stored, so a run that stores them otherwise loads it too."""
    run_ranks(save_trainee, prod(saved), str(tmp_path), saved, {"rules": RULES[ways[0]]})
    assert not any(run_ranks(load_trainee, prod(loaded), [str(tmp_path)], loaded, {"rules": RULES[ways[1]]}))


def test_trained_weights_are_stored_as_their_rules_say():
    for way, is_stored in (("stored", True), ("gathered", True), ("plain", False)):  # without a mesh to gather over
        parameters = Trainee((1, 1, 1), rules=RULES[way]).optimizer.parameters
        assert any(quantized_part(param) is not None for param in parameters) == is_stored


def go_on(rank, folder, way):
    shape, ends = (1, 2, 2), []
    for is_first in (True, False):
        trainee = Trainee(shape, rules=RULES[way])
        if is_first:
            step(trainee, 1)
            with Checkpoints(folder, trainee.mesh) as checkpoints:
                checkpoints.save(trainee.state, step=1)
        else:
            trainee.wreck()
            load(folder, trainee.state, mesh=trainee.mesh)
            trainee.optimizer.round_parameters()
        step(trainee, 2)
        tensors = {name: part.tensor.clone() for name, part in parts_of(trainee.state).items()}
        ends.append((tensors, [part_bytes(p) for p in trainee.optimizer.parameters]))
    (first, bytes_of_first), (second, bytes_of_second) = ends
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert len(bytes_of_first) > 20 and all(map(torch.equal, bytes_of_first, bytes_of_second))


def part_bytes(param):
    part = quantized_part(param)
    return local(param.detach()).clone() if part is None else part.block_rows.clone()


def step(trainee, number):
    for index, param in enumerate(trainee.optimizer.parameters):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * number + index))
        if isinstance(param, DTensor):
            values = distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = values if isinstance(param, DTensor) or param.grad_dtype is not None else values.to(param.dtype)
    trainee.optimizer.step(0.01)
    trainee.optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stored", "gathered"])
def test_going_on(tmp_path, way):
    run_ranks(go_on, 4, str(tmp_path), way)
