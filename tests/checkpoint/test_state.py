"""States of any torch optimizer, and of stages with equal names, are loaded back, or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dualpipe.checkpoint import Checkpoints, load, save, training_state
from dualpipe.checkpoint.commands import show
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.nn.accumulators import local
from dualpipe.parallel.mesh import Mesh, build_mesh
from ranks import run_ranks


class Odd(torch.optim.Optimizer):
    """Keeps state that torch's optimizers do not: a number, a text, None, a list, a sum of squares by row."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state |= {"nothing": None, "kind": "odd", "scale": [1.5, float("inf")]}
                rows = p.grad.square().sum(-1, keepdim=True)
                state["rows"] = state.get("rows", torch.zeros_like(rows)) + rows
                p.add_(p.grad / (state["rows"] + 1).sqrt(), alpha=-group["lr"] / state["count"])


MAKE = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "odd": Odd,
}


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"used": nn.Linear(6, 4), "last": nn.Linear(4, 3, bias=False), "unused": nn.Linear(2, 2)})


def groups(module):
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "lr": 0.02}]


def steps(module, optimizer, scheduler, numbers):
    for number in numbers:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
        module["last"](module["used"](x).tanh()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def make(name):
    module = model()
    optimizer = MAKE[name](groups(module))
    return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


@pytest.mark.parametrize("name", MAKE)
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, name):
    module, optimizer, scheduler = make(name)
    steps(module, optimizer, scheduler, range(3))
    save(tmp_path, training_state([module], optimizer), step=3, extra={"scheduler": scheduler.state_dict()})
    fresh, other, schedule = make(name)
    steps(fresh, other, schedule, [7] if name == "sgd" else [])  # a state of its own is replaced
    other.state[fresh["unused"].weight]["momentum_buffer"] = torch.ones(2, 2)  # which the checkpoint does not have
    for group in other.param_groups:
        group["lr"] = torch.tensor(9.0) if isinstance(group["lr"], torch.Tensor) else 9.0
    loaded = load(tmp_path, training_state([fresh], other))
    schedule.load_state_dict(loaded.manifest.extra["scheduler"])
    for ours, theirs in zip(other.param_groups, optimizer.param_groups):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
        assert all(type(ours[key]) is type(theirs[key]) for key in theirs)
    for p, q in zip(fresh.parameters(), module.parameters()):
        ours, theirs = other.state.get(p, {}), optimizer.state.get(q, {})
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
    assert fresh["unused"].weight not in other.state
    for each in ((module, optimizer, scheduler), (fresh, other, schedule)):
        steps(*each, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), fresh.parameters()))


def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path):
    module, optimizer, scheduler = make("sgd")
    steps(module, optimizer, scheduler, range(2))
    save(tmp_path / "sgd", training_state([module], optimizer), step=1)
    fresh = model()
    joined, before = torch.optim.SGD(fresh.parameters(), lr=5.0), copy.deepcopy(fresh.state_dict())
    with pytest.raises(ValueError, match=r"\.bias and .*\.weight are in one group .* different initial_lr, lr:"):
        load(tmp_path / "sgd", training_state([fresh], joined))
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())
    assert joined.param_groups[0]["lr"] == 5.0 and not joined.state
    with pytest.raises(ValueError, match=r"a parameter \(4, 6\) that is in none of the stages"):
        training_state([fresh["last"]], joined)
    save(tmp_path / "none", training_state([module]), step=1)
    with pytest.raises(ValueError, match=r"optimizer/last\.weight/values is missing from the checkpoint"):
        load(tmp_path / "none", training_state([fresh], joined))
    load(tmp_path / "none", training_state([fresh], joined), allow=["optimizer/*"])
    assert torch.equal(fresh["last"].weight, module["last"].weight) and joined.param_groups[0]["lr"] == 5.0
    optimizer.state[module["last"].weight]["object"] = object()
    with pytest.raises(ValueError, match=r"what JSON can hold: .* is a object"):
        save(tmp_path / "object", training_state([module], optimizer), step=2)
    for key in ("values", "a/b", 3):  # names in the checkpoint that mean something else, or no names
        optimizer.state[module["last"].weight] = {key: torch.ones(3)}
        with pytest.raises(ValueError, match=f"strings as keys, without a '/' and not 'values'; it has {key!r}"):
            save(tmp_path / "key", training_state([module], optimizer), step=2)


def test_an_optimizer_that_keeps_lists_of_tensors_is_refused_in_a_line(tmp_path):
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters())
    state = optimizer.state[next(module.parameters())]
    state["old_dirs"] = [torch.ones(40, 40)]
    with pytest.raises(ValueError, match=r"what JSON can hold: .* is a Tensor$") as refused:
        save(tmp_path, training_state([module], optimizer), step=1)
    assert "\n" not in str(refused.value)


# -- several ranks


def filled(tensor, name):
    """Return values that depend on the name and the position in the whole tensor, not on its sharding."""
    whole = torch.arange(float(tensor.numel())).view(tensor.shape) + len(name) + sum(map(ord, name)) / 7
    with torch.no_grad():
        tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor)
                     else whole)


def fill(stages, optimizer, tag=""):
    for index, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            filled(p, f"{tag}{index}{name}")
            optimizer.state[p] = {"momentum_buffer": torch.empty_like(p).detach()}
            filled(optimizer.state[p]["momentum_buffer"], f"{tag}{index}{name}momentum")


def wrong(stages, optimizer, tag=""):
    """Return the indices of tensors that differ from what `fill` makes."""
    parameters = [p for stage in stages for p in stage.parameters()]

    def held():
        pairs = [(p, optimizer.state.get(p, {}).get("momentum_buffer", torch.zeros(0))) for p in parameters]
        return [(type(t) is DTensor or t is p, local(t).detach().clone()) for p, m in pairs for t in (p, m)]

    found = held()
    fill(stages, optimizer, tag)
    return [index for index, (actual, expected) in enumerate(zip(found, held(), strict=True))
            if actual[0] != expected[0] or not torch.equal(actual[1], expected[1])]


def sgd(stages, lr=0.5):
    return torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=lr, momentum=0.9)


WIDTH = 256  # as many elements as the values of a group have bytes, which must not be taken for a state like the bias


def sequential(rank=0):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 6))


def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def four(rank, folder):
    said = {}
    # Two stages of a V on each of two pipeline ranks, sharded over two, whose names are all alike.
    mesh = build_mesh(2, 2, 1, torch.device("cpu"))
    pp = mesh["pp"].get_local_rank()

    def build():
        stages = [fully_shard(sequential(), mesh=Mesh.of(mesh).dense) for _ in range(2)]
        return stages, sgd(stages)

    stages, optimizer = build()
    numbers = (pp, 3 - pp)
    fill(stages, optimizer, f"pp {pp}")
    said["twice"] = refusal(lambda: training_state(stages, optimizer))
    with Checkpoints(f"{folder}/v", mesh) as checkpoints:
        said["ranks"] = refusal(lambda: checkpoints.save(training_state(stages[:1], None), step=1))
        checkpoints.save_async(training_state(stages, optimizer, numbers=numbers), step=2)
    fresh, other = build()
    load(f"{folder}/v", training_state(fresh, other, numbers=numbers), mesh=mesh)
    said["v"] = wrong(fresh, other, f"pp {pp}")
    said["one"] = refusal(
        lambda: load(f"{folder}/v", training_state(fresh[:1], sgd(fresh[:1]), numbers=numbers[:1]), mesh=mesh)
    )

    # Replicas of shards (HSDP), on a mesh of the user's own; into plain and replicated parameters, and back.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stages = [fully_shard(sequential(), mesh=mesh)]
    optimizer = sgd(stages)
    fill(stages, optimizer)
    with Checkpoints(f"{folder}/hsdp", mesh) as checkpoints:
        checkpoints.save(training_state(stages, optimizer), step=1)
        rows = torch.arange(float(WIDTH)).view(WIDTH, 1)  # another shape: sums of rows
        own = optimizer.state[stages[0][0].weight]
        own["rows"] = distribute_tensor(rows, mesh, [Replicate(), Shard(0)])
        checkpoints.save_async(training_state(stages, optimizer), step=2)
        checkpoints.wait()
        own["rows"] = torch.zeros(3, 1)
        said["state"] = refusal(lambda: checkpoints.save(training_state(stages, optimizer), step=3))
    fresh = [fully_shard(sequential(), mesh=mesh)]
    other = sgd(fresh)
    load(f"{folder}/hsdp", training_state(fresh, other), mesh=mesh)
    said["rows"] = torch.equal(other.state[fresh[0][0].weight]["rows"].full_tensor(), rows)
    plain, twice = [sequential(rank)], [sequential(rank)]
    for name, p in list(twice[0].named_parameters()):
        module, _, own = name.rpartition(".")
        spread = nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Replicate()]))
        setattr(twice[0].get_submodule(module), own, spread)
    fresh = [fully_shard(sequential(), mesh=mesh)]
    for kind, each in (("plain", plain), ("replicated", twice), ("hsdp", fresh)):
        other = sgd(each)
        load(f"{folder}/hsdp/step-00000001", training_state(each, other), mesh=mesh)
        said[kind] = wrong(each, other)
        if kind != "hsdp":
            with Checkpoints(f"{folder}/{kind}", mesh) as checkpoints:
                checkpoints.save(training_state(each, other), step=1)
    unnamed = init_device_mesh("cpu", (4,))
    load(f"{folder}/hsdp", training_state(plain, sgd(plain)), mesh=unnamed)
    fill(plain, sgd(plain), f"{rank}")
    with Checkpoints(f"{folder}/apart", unnamed) as checkpoints:
        said["apart"] = refusal(lambda: checkpoints.save(training_state(plain), step=1))
    said["part"] = refusal(lambda: load(f"{folder}/hsdp", training_state(plain), mesh=mesh["shard"]))
    return said


@pytest.mark.slow
def test_on_four_ranks(tmp_path):
    results = run_ranks(four, 4, str(tmp_path), fresh=True)
    for said in results:
        assert "two stages have a tensor called '0.weight'; give" in said["twice"] and "numbers" in said["twice"]
        assert "0.weight has other values on rank 2" in said["ranks"] and "numbers of the stages" in said["ranks"]
        assert "numbers of 4 stages, the model with those of 2" in said["one"] and "the same stages" in said["one"]
        assert "has other values on rank 1" in said["apart"] and "the mesh has 2 of 4 ranks" in said["part"]
        assert "keeps 'rows' of a sharded parameter as a plain tensor (3, 1)" in said["state"] and said["rows"]
        assert said["v"] == said["plain"] == said["replicated"] == said["hsdp"] == []
    wanted = sum(p.numel() for p in sequential().parameters()) * 2 * 4
    for kind in ("hsdp", "plain", "replicated"):  # once, in whatever form, and to be loaded by one process
        path = tmp_path / kind / "step-00000001"
        stored, _ = Checkpoint.read(path).read_tensors()
        sizes = [box.numel * entry.dtype.itemsize for name, entry in stored.items() if not name.endswith("/values")
                 for box in entry.boxes]
        assert sum(sizes) == wanted and len(sizes) == (16 if kind == "hsdp" else 8)
        alone = [sequential(1)]
        optimizer = sgd(alone, lr=7.0)
        loaded = load(path, training_state(alone, optimizer))
        assert not wrong(alone, optimizer) and optimizer.param_groups[0]["lr"] == 0.5
        assert not loaded.random_restored and loaded.manifest.layout["shard"] == 2
    assert "replicate 2, shard 2" in next(line for line in show(tmp_path / "hsdp") if line.startswith("layout"))
    with pytest.raises(ValueError, match="numbers of 4 stages, the model with those of 0"):
        load(tmp_path / "v", training_state([sequential()]))
    assert [file.name for file in (tmp_path / "apart").iterdir()] == [".lock"]


def refused_part(rank, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with pytest.raises(ValueError, match="2 of 4 ranks"):
        Checkpoints(path, mesh["pp"])


def test_a_part_of_a_mesh_is_refused_on_every_rank(tmp_path):
    run_ranks(refused_part, 4, tmp_path)
