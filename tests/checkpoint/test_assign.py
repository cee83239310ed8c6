"""A checkpoint of any layout is loaded in any other, bit for bit."""

from math import prod

import pytest
import torch
import torch.distributed as dist

from dualpipe.checkpoint import Checkpoints, latest, load, verify
from dualpipe.checkpoint.manifest import Checkpoint, tensor_file_name
from dualpipe.checkpoint.tensors import read_header
from native import Trainee
from ranks import run_ranks

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
FAST = [(1, 1, 1), (2, 1, 2), (1, 2, 2)]  # saved in each, and loaded in the first two
MOMENTS = {"narrow": torch.bfloat16}


def write(rank, folder, shape, how):
    trainee = Trainee(shape, moments=MOMENTS.get(how, torch.float32))
    trainee.fill(7)
    torch.manual_seed(100 + rank)
    kind = "process" if how == "process" else "thread"
    with Checkpoints(folder, trainee.mesh, kind=kind) as checkpoints:
        if how in ("sync", "narrow"):
            checkpoints.save(trainee.state, step=3, plan=trainee.plan, extra={"loader": [1, 2]})
        else:
            checkpoints.save_async(trainee.state, step=3, plan=trainee.plan, extra={"loader": [1, 2]})
            trainee.wreck()
    return torch.rand(1).item()


def read(rank, folders, shape, how):
    found = {}
    trainee = Trainee(shape, moments=MOMENTS.get(how, torch.float32))
    for saved, folder in folders.items():
        trainee.wreck()
        loaded = load(folder, trainee.state, mesh=trainee.mesh)
        trainee.optimizer.round_parameters()
        assert (loaded.manifest.step, loaded.manifest.extra) == (3, {"loader": [1, 2]})
        assert loaded.random_restored == (saved == shape)
        found[saved] = trainee.wrong(7), torch.rand(1).item()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes the checkpoint of a layout when it is first asked for: (its directory, the next random number by rank)."""
    made = {}

    def get(shape, how="sync"):
        if (shape, how) not in made:
            folder = tmp_path_factory.mktemp("layout") / "checkpoints"
            made[shape, how] = str(folder), run_ranks(write, prod(shape), str(folder), shape, how)
        return made[shape, how]

    return get


def check(saved, sources, target, how="sync"):
    folders = {shape: saved(shape, how)[0] for shape in sources}
    results = run_ranks(read, prod(target), folders, target, how)
    for shape in sources:
        for found in results:
            assert not found[shape][0], (shape, target)
        numbers = [found[shape][1] for found in results]
        if shape == target:
            assert numbers == saved(shape, how)[1], "the random numbers go on"
        else:
            assert len(set(numbers)) == len(numbers), "each rank derives its own"


@pytest.mark.parametrize("target", [pytest.param(FAST[0], marks=pytest.mark.slow), FAST[1]], ids=str)
def test_some_pairs(saved, target):
    check(saved, FAST, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_every_pair(saved, target):
    check(saved, LAYOUTS, target)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "process"])
def test_saved_in_the_background(saved, how):
    check(saved, [(2, 1, 2)], (1, 2, 2), how)


@pytest.mark.slow
def test_moments_in_bf16(saved):
    check(saved, [(2, 1, 2)], (1, 2, 2), "narrow")


def test_moments_of_another_dtype_are_refused_unless_it_is_allowed_to_round_them(saved):
    folder, _ = saved((1, 1, 1))
    trainee = Trainee((1, 1, 1), moments=torch.bfloat16)
    with pytest.raises(ValueError, match=r"exp_avg.* is fp32 in the checkpoint, bf16 in the model"):
        load(folder, trainee.state)
    load(folder, trainee.state, allow=("optimizer/*/exp_avg*",))
    wide = Trainee((1, 1, 1))
    wide.fill(7)
    for name, tensor in wide.state.items():
        assert torch.equal(trainee.state[name], tensor.to(trainee.state[name].dtype)), name


def test_the_files_do_not_depend_on_the_layout(saved):
    described = []
    for shape in FAST:
        path = latest(saved(shape)[0])
        assert not verify(path)
        checkpoint = Checkpoint.read(path)
        manifest, (stored, wrong) = checkpoint.manifest, checkpoint.read_tensors()
        assert not wrong
        described.append({name: (entry.shape, entry.dtype) for name, entry in stored.items()})
        assert {dtype for _, dtype in described[-1].values()} == {torch.float32}
        headers = [read_header(path / tensor_file_name(rank))[0] for rank in range(prod(shape))]
        in_files = [name for header in headers for name in header]
        assert sorted(in_files) == sorted(name for name, entry in stored.items() for _ in entry.boxes)  # each box once
        assert all(sum(box.numel for box in entry.boxes) == prod(entry.shape) for entry in stored.values())
        sizes = [sum(each.nbytes for each in header.values()) for header in headers]
        assert len(manifest.files) == prod(shape) + 1 and max(sizes) < 2 * min(sizes), "all write, and about as much"
        assert manifest.layout == dict(zip(("pp", "dp", "ep"), shape), world=prod(shape))
        assert manifest.dtypes["norm.weight"]["save"] == "bf16"
    assert described[0] == described[1] == described[2]
    assert sum(name.startswith("optimizer/") for name in described[0]) > 100


def replicated(rank, folder):
    """Two replicas of what is sharded over two ranks, with the experts over two (dp 2 = 2 x 1); bytes in the files."""
    hybrid = Trainee((1, 2, 2), dp_replicate=2)
    assert {tuple(p.device_mesh.shape) for p in hybrid.optimizer.parameters} == {(2, 2), (2, 1, 2)}
    sharded = Trainee((1, 2, 2))
    others = [sharded, Trainee((2, 2, 1), dp_replicate=2), hybrid]
    hybrid.fill(7)
    sizes = []
    for saving, name in ((hybrid, "hybrid"), (sharded, "sharded")):
        with Checkpoints(f"{folder}/{name}", saving.mesh) as checkpoints:
            path = checkpoints.save(saving.state, step=3, plan=saving.plan)
        headers = [read_header(path / tensor_file_name(each))[0] for each in range(4)]
        sizes.append(sum(entry.nbytes for header in headers for entry in header.values()))
        for trainee in others:
            trainee.wreck()
            load(f"{folder}/{name}", trainee.state, mesh=trainee.mesh)
            trainee.optimizer.round_parameters()
            assert not trainee.wrong(7), name
    return sizes


@pytest.mark.slow
def test_replicas_are_written_once_and_loaded_into_other_layouts(tmp_path):
    for hybrid, sharded in run_ranks(replicated, 4, str(tmp_path)):
        assert hybrid == sharded
    assert not verify(latest(tmp_path / "hybrid"))


def mismatch(rank, folder):
    trainee = Trainee((2, 1, 1))
    trainee.fill(7)
    problems = []
    with Checkpoints(folder, trainee.mesh) as checkpoints:
        for state, step in ((trainee.state, rank), ({"twice": torch.zeros(2 + rank)}, 1), ({}, "x" if rank else 1)):
            try:
                checkpoints.save(state, step=step)
            except ValueError as error:
                problems.append(str(error))
        checkpoints.save(trainee.state, step=5)
        dist.barrier()
    return problems


def test_what_fails_on_one_rank_raises_on_all(tmp_path):
    first, second = run_ranks(mismatch, 2, str(tmp_path))
    assert first == second
    assert "the same step; got [0, 1]" in first[0]
    assert "twice is fp32 (3,) on rank 1, but fp32 (2,) on an earlier one" in first[1]
    assert "rank 1 (pp 1): step must be a number" in first[2]
    assert latest(tmp_path).name == "step-00000005" and not list(tmp_path.glob(".tmp*"))
