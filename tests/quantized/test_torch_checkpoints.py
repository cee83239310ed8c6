"""torch's checkpoints of modules with quantized weights: they save bytes, and load into every layout and form."""

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dualpipe.parallel import Rule
from dualpipe.parallel.fsdp.driver import StageStep
from dualpipe.parallel.fsdp.stage_parameters import StageParameters
from dualpipe.quantized import FORMATS, QuantizedTensor, quantize_weights
from native import Trainee
from ranks import run_ranks

WEIGHTS = ("0.weight", "2.weight")
FULL = StateDictOptions(full_state_dict=True, strict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=True)


def make(format, seed=0, *, mesh=None, trained=False, dtype=torch.float32):
    """Build quantized matrices, frozen unless `trained`, and a norm that is always trained; sharded over a mesh."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 512, bias=False), nn.LayerNorm(512), nn.Linear(512, 512, bias=False)).to(dtype)
    for name in WEIGHTS:
        model.get_parameter(name).requires_grad_(trained)
    if format is not None:
        quantize_weights(model, format)
    return model if mesh is None else fully_shard(model, mesh=mesh)


def layout(*sizes):
    """Return a mesh of ranks for FSDP2 or HSDP; None without sizes."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]) if sizes else None


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def same(actual, expected):
    """Compare this rank's part by bytes and type."""
    actual, expected = local(actual), local(expected)
    return type(actual) is type(expected) and actual.dtype is expected.dtype and torch.equal(actual, expected)


def all_same(actual, expected):
    """Return True if state dicts are equal, bit for bit."""
    return actual.keys() == expected.keys() and all(same(actual[name], expected[name]) for name in expected)


def files(path):
    return {each.name: each.read_bytes() for each in Path(path).glob("*.distcp")}


# --- what is on the disk ---------------------------------------------------------------------------------------------


def save(rank, path, sizes, formats):
    for format in formats:
        dcp.save(make(format, mesh=layout(*sizes)).state_dict(), checkpoint_id=path / str(format))


def test_bytes_are_saved(tmp_path):
    """A save holds the weights' bytes, and not one byte of masters, which belong to the optimizer."""
    for format in FORMATS:
        for trained in (False, True):
            model, path = make(format, trained=trained), tmp_path / f"{format}-{trained}"
            dcp.save(model.state_dict(), checkpoint_id=path)
            size = sum(map(len, files(path).values()))
            stored = sum(tensor.nbytes for tensor in model.state_dict().values())
            assert stored < size < stored + 12_000  # for names and zip files
            assert size < 64 * 512 + 512 * 512 * 1.2


STAGERS = {
    "default": lambda: None,
    "shared": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "blocking": BlockingAsyncStager,
}


def save_in_background(rank, path, kind, stager):
    """Check that a background save writes a synchronous one's files while the model changes; twice with one stager."""
    for format in ("mxfp8", "nvfp4", "fp8_block"):
        model = make(format, mesh=layout(dist.get_world_size()), trained=True)
        state, used = model.state_dict(), STAGERS[stager]()
        for number in range(2):
            if number and used is not None and torch.__version__ < "2.12":  # older stagers serve once
                used = STAGERS[stager]()
            expected = {name: local(tensor).clone() for name, tensor in state.items()}
            dcp.save(state, checkpoint_id=path / f"{format}-{number}-sync")
            saving = dcp.async_save(state, checkpoint_id=path / f"{format}-{number}-async", async_stager=used,
                                    async_checkpointer_type=AsyncCheckpointerType[kind])
            with torch.no_grad():
                for tensor in state.values():
                    local(tensor).copy_(torch.full(local(tensor).shape, 7.0 + number))
            saving.result()
            if rank == 0:
                found = [files(path / f"{format}-{number}-{how}") for how in ("sync", "async")]
                assert found[0] and found[0] == found[1]
            loaded = make(format, seed=1, mesh=layout(dist.get_world_size())).state_dict()
            dcp.load(loaded, checkpoint_id=path / f"{format}-{number}-async")
            assert all(torch.equal(local(loaded[name]), expected[name]) for name in WEIGHTS)
        if used is not None:
            used.close()


@pytest.mark.slow
@pytest.mark.parametrize("stager", STAGERS)
def test_background_saves_are_those_of_the_moment(tmp_path, stager):
    run_ranks(save_in_background, 2, tmp_path, "THREAD", stager)


@pytest.mark.slow
def test_background_saves_by_a_process(tmp_path):
    run_ranks(save_in_background, 2, tmp_path, "PROCESS", "default", timeout=240, group_timeout=200, fresh=True)


# --- into other layouts and forms ------------------------------------------------------------------------------------


def load(rank, path, sizes, formats):
    for format in formats:
        model = make(format, seed=1, mesh=layout(*sizes))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path / str(format))
        model.load_state_dict(state)
        assert all_same(model.state_dict(), make(format, mesh=layout(*sizes)).state_dict())


SLOW_LAYOUTS = [((), (2,)), ((2,), (2, 1)), ((), (4,)), ((2,), ()), ((2, 1), (2,)), ((2, 2), (2,)), ((4,), (2, 2))]


@pytest.mark.parametrize("saved, loaded", [
    ((4,), (2,)), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_LAYOUTS),
])
def test_layouts(tmp_path, saved, loaded):
    for function, sizes in ((save, saved), (load, loaded)):
        ranks = torch.Size(sizes).numel()
        run_ranks(function, ranks, tmp_path, sizes, ["mxfp8", "nvfp4", "fp8_block"], fresh=ranks == 1)


def load_into_other_forms(rank, path):
    mesh = layout(2)
    for saved in ("mxfp8", "nvfp4", None):
        source = make(saved, dtype=torch.bfloat16 if saved is None else torch.float32)
        dcp.save(source.state_dict(), checkpoint_id=path / str(saved))
        for format in ("mxfp8", "nvfp4", "fp8_block", None):
            model = make(format, seed=1, mesh=mesh)
            state = model.state_dict()
            dcp.load(state, checkpoint_id=path / str(saved))
            for name in WEIGHTS:
                weight = source.get_parameter(name).detach()
                numbers = weight.float() if saved is None else weight.dequantize()
                rows = slice(rank * len(numbers) // 2, (rank + 1) * len(numbers) // 2)
                if format is None:
                    expected = numbers[rows]
                elif FORMATS[format].matrix_scale and format != saved:  # what is read together has a scale of its own
                    expected = QuantizedTensor.quantize(numbers[rows], format).dequantize()
                else:
                    expected = QuantizedTensor.quantize(numbers, format).dequantize()[rows]
                found = local(state[name])
                assert torch.equal(found if format is None else found.dequantize(), expected), (saved, format)


def test_forms(tmp_path):
    """Bytes load into the same format; values into another, or none; values of a bfloat16 checkpoint are quantized."""
    run_ranks(load_into_other_forms, 2, tmp_path)


def load_what_does_not_suit(rank, path):
    torch.manual_seed(0)
    mesh, rows = layout(2), 400
    plain = nn.Linear(32, rows, bias=False)
    dcp.save(fully_shard(plain, mesh=mesh).state_dict(), checkpoint_id=path / "plain")  # 200 rows a file
    other = nn.Linear(32, rows, bias=False).requires_grad_(False)
    quantize_weights(other, "fp8_block")
    kept = other.weight.block_rows.clone()
    with pytest.raises(dcp.api.CheckpointException, match="cut rows at multiples of 128"):
        dcp.load(other.state_dict(), checkpoint_id=path / "plain")
    rebuild, (data, master, name, _, *rest) = other.weight.detach().__reduce_ex__(2)

    class OtherBlocks:
        def __reduce__(self):
            return rebuild, (data, master, name, (64, 64), *rest)

    dcp.save({"weight": other.weight.detach()}, checkpoint_id=path / "blocks")
    if rank == 0:
        torch.save(OtherBlocks(), held := io.BytesIO())
        (file,) = [each for each in (path / "blocks").glob("*.distcp") if each.stat().st_size]
        file.write_bytes(held.getvalue())
        metadata = dcp.FileSystemReader(path / "blocks").read_metadata()
        (where,) = metadata.storage_data.values()
        where.length = len(held.getvalue())
        (path / "blocks" / ".metadata").write_bytes(pickle.dumps(metadata))
    dist.barrier()
    with pytest.raises(dcp.api.CheckpointException, match=r"fp8_block in blocks of \(64, 64\)"):
        dcp.load({"weight": other.weight.detach()}, checkpoint_id=path / "blocks")
    assert torch.equal(other.weight.block_rows, kept)


def test_what_does_not_suit_is_refused_by_name(tmp_path):
    run_ranks(load_what_does_not_suit, 2, tmp_path)


# --- state dicts of torch.distributed.checkpoint.state_dict ----------------------------------------------------------


def state_dicts(rank, sizes):
    mesh = layout(*sizes)
    for format in ("mxfp8", "nvfp4", "fp8_block"):
        model, whole = make(format, mesh=mesh), make(format).state_dict()
        shards = model.state_dict()
        full = get_model_state_dict(model, options=FULL)
        assert all_same(full, whole)
        offloaded = get_model_state_dict(model, options=FROM_FIRST)
        assert all_same(offloaded, whole) if rank == 0 else not offloaded
        for state, options in ((get_model_state_dict(model), StateDictOptions(strict=True)), (full, FULL),
                               (offloaded, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))):
            other = make(format, seed=1, mesh=mesh)
            set_model_state_dict(other, state, options=options)
            assert all_same(other.state_dict(), shards)


@pytest.mark.parametrize("sizes", [(2,), *(pytest.param(each, marks=pytest.mark.slow) for each in ((2, 1), (1, 2)))])
def test_state_dicts(sizes):
    run_ranks(state_dicts, 2, sizes)


def distribute(rank):
    """Distribute tensors: every rank gets the first rank's values; masters go along."""
    for sizes, placements in [((2,), [Shard(0)]), ((2,), [Replicate()]), ((2, 1), [Replicate(), Shard(0)])]:
        for format in ("mxfp8", "nvfp4", "fp8_block"):
            for shape in ((512, 32), (4, 256, 32)):
                values = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (rank, 0)]
                made = [QuantizedTensor.quantize(each, format, keep_master=True) for each in values]
                spread = distribute_tensor(made[0], layout(*sizes), placements)
                assert same(spread.full_tensor(), made[1])
                master = spread.to_local().master
                start = rank * len(master) if len(master) < shape[0] else 0
                assert torch.equal(master, made[1].master[start : start + len(master)])


def test_distribute_tensor():
    run_ranks(distribute, 2)


def gather_other_dimensions(rank):
    """Gather weights sharded like experts: their rows over dp by FSDP2, and the experts themselves over ep."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    for format in ("mxfp8", "nvfp4", "fp8_block"):
        for experts in (2, 4):
            values = torch.randn(experts, 512, 32, generator=torch.Generator().manual_seed(0))
            whole = QuantizedTensor.quantize(values, format)
            dp, ep = mesh.get_coordinate()
            part = whole.chunk(2)[ep].chunk(2, 1)[dp]
            spread = DTensor.from_local(part, mesh, [Shard(1), Shard(0)], run_check=False)
            assert same(spread.full_tensor(), whole)
            assert all_same(get_model_state_dict(Holder(spread), options=FULL), {"weight": whole})


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def test_experts():
    run_ranks(gather_other_dimensions, 4)


def uneven(rank):
    """Gather 382 rows over 3 ranks: 128, 128 and 126.

    fully_shard pads the last shard, and so does the gathering of a state dict.
    """
    weight = QuantizedTensor.quantize(torch.randn(382, 32, generator=torch.Generator().manual_seed(0)), "fp8_block")
    model = fully_shard(Holder(weight), mesh=layout(3))
    assert model.weight.to_local().shape == ((126 if rank == 2 else 128), 32)
    full = get_model_state_dict(model, options=FULL)["weight"]
    assert full.shape == (382, 32) and torch.equal(full.dequantize(), weight.dequantize())


def test_uneven_shards():
    run_ranks(uneven, 3)


def train(model, optimizer, seed):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("format", FORMATS)
def test_going_on(tmp_path, format):
    """A run saved and loaded into a fresh model gives the uninterrupted run's results, moments too."""

    def fresh(seed):
        model = make(format, seed)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)

    model, optimizer = fresh(0)
    train(model, optimizer, 0)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=tmp_path)
    expected = model(torch.ones(2, 64))
    train(model, optimizer, 1)
    other, others = fresh(1)
    states = dict(zip(("model", "optimizer"), get_state_dict(other, others)))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(other, others, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert torch.equal(other(torch.ones(2, 64)), expected)
    train(other, others, 1)
    assert all_same(other.state_dict(), model.state_dict())
    moments = [get_optimizer_state_dict(*pair)["state"] for pair in ((model, optimizer), (other, others))]
    assert moments[0].keys() == {"1.weight", "1.bias"}
    for name, state in moments[0].items():
        assert all(torch.equal(state[key], moments[1][name][key]) for key in state)



# --- of dualpipe's own sharding --------------------------------------------------------------------------------------

RULES = {
    "stored": (Rule("*.experts", storage="nvfp4"), Rule("*.self_attn", storage="mxfp8")),
    "gathered": (Rule("*.experts", gather="nvfp4"), Rule("*.self_attn", gather="mxfp8")),
}


def own_sharding(rank, path, way):
    """Save weights that were gathered before, in the background; gathered weights have unquantized float32 shards."""
    trainee = Trainee((1, 2, 2), rules=RULES[way])
    for stage in trainee.model.stages:
        parameters = StageParameters(stage)
        parameters.check()
        step = StageStep(parameters)
        step.gather()
        step.wait()
        step.complete(reduce=False)
        step.finish()
    state = {f"{number}.{name}": tensor for number, stage in enumerate(trainee.model.stages)
             for name, tensor in stage.state_dict().items()}
    name = next(name for name in state if "experts.gate_up_proj" in name)
    assert isinstance(local(state[name]), QuantizedTensor) == (way == "stored")
    expected = {name: local(tensor).clone() for name, tensor in state.items()}
    dcp.save(state, checkpoint_id=path / "sync")
    saving = dcp.async_save(state, checkpoint_id=path / "async")
    trainee.wreck()
    saving.result()
    assert files(path / "sync") == files(path / "async")
    dcp.load(state, checkpoint_id=path / "async")
    assert all(same(state[name], expected[name]) for name in expected)
    trainee.fill(7)
    dcp.save(trainee.state, checkpoint_id=path / "training")  # masters and moments suit torch, too
    trainee.wreck()
    dcp.load(trainee.state, checkpoint_id=path / "training")
    trainee.optimizer.round_parameters()
    assert trainee.wrong(7) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stored", pytest.param("gathered", marks=pytest.mark.slow)])
def test_own_sharding(tmp_path, way):
    run_ranks(own_sharding, 4, tmp_path, way)
